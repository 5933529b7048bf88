"""Does an optimizer update each element by itself? Found by trying it on a tiny tensor, whole and in two halves.

Sharded stages step each rank's rows alone. That is exact for AdamW or SGD, wrong (without any error) for optimizers
that look at a whole matrix (Muon, Adafactor, LAMB): those step whole parameters on an owner rank. An optimizer that
couples parameters with each other (a step size estimated over all of them) cannot be split at all.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from typing import Any, Literal

import torch

Kind = Literal["element", "whole", "coupled"]

_SHAPES = {1: (6,), 2: (6, 5), 3: (6, 3, 2), 4: (6, 2, 3, 2)}
_STEPS = 3


def probe_optimizer(optimizer: torch.optim.Optimizer, group: dict[str, Any], ndim: int) -> Kind:
    """How the options of `group` make `optimizer` treat parameters with `ndim` dimensions.

    "element": rows may be stepped apart. "whole": a parameter must be stepped whole. "coupled": parameters depend on
    each other. An optimizer that cannot even step a whole tiny tensor of that shape raises what it raises.
    """
    shape = _SHAPES.get(ndim, (6, *([2] * (ndim - 1))))
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2)]
    grads = [[torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2)] for _ in range(_STEPS)]
    together = _trial(optimizer, group, weights, grads)
    alone = [_trial(optimizer, group, [weights[i]], [[g[i]] for g in grads])[0] for i in range(2)]
    if not all(torch.allclose(a, b, rtol=1e-9, atol=1e-12) for a, b in zip(together, alone, strict=True)):
        return "coupled"
    rows = [slice(0, 3), slice(3, 6)]
    try:
        parts = [_trial(optimizer, group, [weights[0][r]], [[g[0][r]] for g in grads])[0] for r in rows]
    except Exception:  # e.g. "only 2-D parameters": whole works, so step it whole
        return "whole"
    split = torch.cat(parts)
    return "element" if torch.allclose(split, alone[0], rtol=1e-9, atol=1e-12) else "whole"


def _trial(
    optimizer: torch.optim.Optimizer,
    group: dict[str, Any],
    weights: list[torch.Tensor],
    grads: list[list[torch.Tensor]],
) -> list[torch.Tensor]:
    """The weights after as many steps as `grads` has, by a copy of `optimizer` that shares nothing with it."""
    trial = copy.copy(optimizer)
    parameters = [torch.nn.Parameter(w.clone()) for w in weights]
    options = {k: copy.deepcopy(v) for k, v in group.items() if k not in ("params", "param_names")}
    if isinstance(options.get("lr"), (int, float, torch.Tensor)):
        options["lr"] = 0.01  # a warm-up may have set it to 0, and then every optimizer looks element-wise
    trial.param_groups = [{**options, "params": parameters}]
    trial.state = defaultdict(dict)
    for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        if hasattr(trial, hooks):
            setattr(trial, hooks, OrderedDict())
    for step in grads:
        for parameter, gradient in zip(parameters, step, strict=True):
            parameter.grad = gradient.clone()
        # A scheduler may have replaced `step` on the instance by one bound to the original: call the class's.
        type(trial).step(trial)
    return [p.detach() for p in parameters]
