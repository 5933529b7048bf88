"""Which dtype lives where, on request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch

from hfdist.engine.core import Engine
from hfdist.parallel import fsdp


def dtype_report(engine: Engine) -> dict[str, str]:
    """{"parameters": "float32 (12)", ...}: dtypes with the number of tensors; "-" where there is none yet.

    parameters: the masters that are stored; compute: copies that a forward sees; reductions: on the wire.
    """
    params = [param for zero in engine.models for param in fsdp.iterate_params(zero.modules)]
    compute = [zero.mp_policy.param_dtype or param.sharded_param.dtype for zero in engine.models for param in
               fsdp.iterate_params(zero.modules)]  # fmt: skip
    reductions = [
        zero.mp_policy.reduce_dtype or zero.mp_policy.param_dtype or param.sharded_param.dtype
        for zero in engine.models
        for param in fsdp.iterate_params(zero.modules)
        if param.sharded_param.requires_grad
    ]
    states = [
        value
        for optimizer in engine.optimizers
        for state in optimizer.optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor) and value.ndim
    ]
    return {
        "parameters": _count(p.sharded_param.dtype for p in params),
        "compute": _count(compute),
        "gradients": _count(p.sharded_param.grad.dtype for p in params if p.sharded_param.grad is not None),
        "reductions": _count(reductions),
        "optimizer": _count(value.dtype for value in states),
        "buffers": _count(buffer.dtype for zero in engine.models for buffer in zero.model.buffers()),
    }


def _count(dtypes: Iterable[torch.dtype]) -> str:
    counted = Counter(str(dtype).removeprefix("torch.") for dtype in dtypes)
    return ", ".join(f"{name} ({number})" for name, number in sorted(counted.items())) or "-"
