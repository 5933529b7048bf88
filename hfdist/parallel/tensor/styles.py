"""What each parallel style of a plan means: one table, name -> how parameters are cut, what happens around the forward.

    hidden --copy--> [ q k v | colwise ] --own heads--> [ o | rowwise ] --reduce--> hidden
                     [  up   | colwise ] --own part --> [ down | rowwise ] --reduce--> hidden

so a pair costs one all-reduce forward and one backward. The names are those of transformers' tensor-parallel plans
(`ALL_PARALLEL_STYLES`) plus "fused_colwise"; what hfdist does not run is refused by name (`REFUSED`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hfdist.errors import ConfigError, nearest, say
from hfdist.parallel.tensor import collectives, sequence
from hfdist.parallel.tensor.collectives import Ranks
from hfdist.parallel.tensor.streams import Streams

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


@dataclass(frozen=True)
class Site:
    """Where a style is applied: the module's name, whole length of what is cut (0: nothing), MLA's rope width."""

    name: str
    length: int = 0
    rope_dim: int = 0
    attends: bool = False  # a projection of a module whose heads are spread


@dataclass
class Run:
    """What the hooks of one model share while it runs."""

    ranks: Ranks
    streams: Streams
    sequence: sequence.Sequence | None = None  # None: no sequence parallelism
    local_logits: bool = False  # whether the head leaves its part of the logits to the loss
    # The last tensor that entered a column-parallel layer, its copy, and whether gradients were on.
    _entered: tuple[Tensor, Tensor, bool] | None = None
    # What a module's `before` keeps for its `after`.
    kept: dict[nn.Module, Tensor] = field(default_factory=dict)

    def copy(self, x: Tensor) -> Tensor:
        """`collectives.copy`, one for layers that take the same tensor in turn: q, k, v share an all-reduce."""
        grad = torch.is_grad_enabled()
        if self._entered is None or self._entered[0] is not x or self._entered[2] != grad:
            cut = self.sequence is not None and self.sequence.inside
            copied = sequence.gather(x, self.ranks) if cut else collectives.copy(x, self.ranks)
            self._entered = (x, copied, grad)
        return self._entered[1]

    def sum(self, x: Tensor) -> Tensor:
        """What a row-parallel layer puts out, of all ranks together."""
        cut = self.sequence is not None and self.sequence.inside
        return sequence.scatter(x, self.ranks) if cut else collectives.reduce(x, self.ranks)

    def leave(self) -> None:
        """A pair has ended: back to the common random numbers, and no reference to its activations."""
        self._entered = None
        if self.sequence is None or not self.sequence.inside:
            self.streams.leave()


Before = Callable[[Run, Site, nn.Module, Args, Kwargs], tuple[Args, Kwargs]]
After = Callable[[Run, Site, nn.Module, Any], Any]
# Which dimension of a weight is cut: what a linear layer puts out or takes in, or an embedding's rows or columns.
Cut = Literal["out", "in", "rows", "columns"]


@dataclass(frozen=True)
class Style:
    """`cut` None: parameters stay whole."""

    cut: Cut | None = None
    blocks: int | Literal["qkv"] = 1  # what is packed in the cut dimension; "qkv": q, k and v, each of all its heads
    before: Before | None = None
    after: After | None = None
    even: bool = True  # whether the cut dimension has to divide by the number of ranks
    partial_gradient: bool = False
    reduces: bool = False  # whether its forward ends with an all-reduce


def _map_first(change: Callable[[Tensor], Any], args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    """Change the first tensor a module is called with."""
    if args:
        return (change(args[0]), *args[1:]), kwargs
    name = next(name for name, value in kwargs.items() if isinstance(value, Tensor))
    return args, {**kwargs, name: change(kwargs[name])}


def _copy_input(run: Run, site: Site, module: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    if site.attends and run.sequence is not None and run.sequence.inside:
        return args, kwargs  # its module gathered the tokens already
    return _map_first(run.copy, args, kwargs)


def _cut_input(run: Run, site: Site, module: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    args, kwargs = _map_first(lambda x: collectives.cut(x, run.ranks), args, kwargs)
    return _begin_rowwise(run, site, module, args, kwargs)


def _begin_rowwise(run: Run, site: Site, module: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    """The bias is whole on every rank and counts once: the layer runs with zeros, `_end_rowwise` adds it."""
    run.leave()
    bias = module._parameters.get("bias")
    if bias is not None:
        run.kept[module] = bias
        # Zeros and not None: transformers' Conv1D needs a bias.
        module._parameters["bias"] = torch.zeros_like(bias)  # type: ignore[assignment]
    return args, kwargs


def _end_rowwise(run: Run, site: Site, module: nn.Module, output: Any) -> Any:
    bias = run.kept.pop(module, None)
    if bias is not None:
        module._parameters["bias"] = bias  # type: ignore[assignment]
    if output is None:  # the layer raised
        return None
    whole = run.sum(output)
    return whole if bias is None else whole + bias


def _reduce_output(run: Run, site: Site, module: nn.Module, output: Any) -> Any:
    return None if output is None else collectives.reduce(output, run.ranks)


def _gather_output(run: Run, site: Site, module: nn.Module, output: Any) -> Any:
    return None if output is None else collectives.gather(output, run.ranks, site.length)


def _end_head(run: Run, site: Site, module: nn.Module, output: Any) -> Any:
    """As `_gather_output`, but for a loss that works on each rank's part of the vocabulary."""
    return output if run.local_logits else _gather_output(run, site, module, output)


def _look_up_own(run: Run, site: Site, module: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    """Ids of other ranks' rows look up row 0, which `_sum_lookups` takes out again."""
    start, stop = run.ranks.slice_of(site.length)

    def local(ids: Tensor) -> Tensor:
        foreign = (ids < start) | (ids >= stop)
        run.kept[module] = foreign
        return (ids - start).masked_fill(foreign, 0)

    return _map_first(local, args, kwargs)


def _sum_lookups(run: Run, site: Site, module: nn.Module, output: Any) -> Any:
    foreign = run.kept.pop(module, None)
    if output is None or foreign is None:
        return None
    return collectives.reduce(output.masked_fill(foreign.unsqueeze(-1), 0), run.ranks)


def _copy_routed(run: Run, site: Site, module: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    """Tokens and their routing weights enter experts of which each rank has a part: all floating inputs."""

    def copied(value: Any) -> Any:
        floating = isinstance(value, Tensor) and value.is_floating_point()
        return collectives.copy(value, run.ranks) if floating else value

    return tuple(copied(value) for value in args), {name: copied(value) for name, value in kwargs.items()}


def _divide_input(run: Run, site: Site, module: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    """An identity among experts whose outputs are summed over ranks."""
    return _map_first(lambda x: x / run.ranks.size, args, kwargs)


def _copy_rope(run: Run, site: Site, module: nn.Module, output: Any) -> Any:
    """Of MLA's compressed (latent, rope) the rope part goes straight to each rank's heads."""
    if output is None:
        return None
    latent, rope = output.split([output.shape[-1] - site.rope_dim, site.rope_dim], dim=-1)
    return torch.cat([latent, collectives.copy(rope, run.ranks)], dim=-1)


_COLWISE_GATHERED = Style("out", before=_copy_input, after=_gather_output, even=False)
_ROWWISE_CUT = Style("in", before=_cut_input, after=_end_rowwise, even=False, reduces=True)

STYLES: dict[str, Style] = {
    "colwise": Style("out", before=_copy_input),
    "rowwise": Style("in", before=_begin_rowwise, after=_end_rowwise, reduces=True),
    "colwise_gather_output": _COLWISE_GATHERED,
    "colwise_rep": _COLWISE_GATHERED,
    "rowwise_split_input": _ROWWISE_CUT,
    "rowwise_rep": _ROWWISE_CUT,
    "packed_colwise": Style("out", blocks=2, before=_copy_input),
    "packed_rowwise": Style("in", blocks=2, before=_begin_rowwise, after=_end_rowwise, reduces=True),
    "fused_colwise": Style("out", blocks="qkv", before=_copy_input),
    "embedding_rowwise": Style("rows", before=_look_up_own, after=_sum_lookups, even=False, reduces=True),
    "embedding_colwise": Style("columns", after=_gather_output, even=False),
    "vocabulary_head": Style("out", before=_copy_input, after=_end_head, even=False),
    "replicated_with_grad_allreduce": Style(partial_gradient=True),
    "all_reduce": Style(after=_reduce_output, reduces=True),
    "mla_kv_a_proj": Style(after=_copy_rope),
    "moe_tp_experts": Style(before=_copy_routed, after=_reduce_output, reduces=True),
    "moe_identity_expert": Style(before=_divide_input),
    "local_params": Style(),
    "replicate": Style(),
}

_EXPERTS = "it spreads whole experts over ranks, which is expert parallelism"
REFUSED = {
    "grouped_gemm": _EXPERTS,
    "ep_dispatch_experts": _EXPERTS,
    "sequence_parallel": "sequence parallelism is switched on by sequence_parallel=True, for all blocks",
}


def style_of(name: str, where: str) -> Style:
    """The style `name` of the rule for `where`; ConfigError when hfdist has none."""
    if name in STYLES:
        return STYLES[name]
    reason = f": {REFUSED[name]}" if name in REFUSED else nearest(name, STYLES)
    raise ConfigError(
        say(
            given=f"style {name!r} for {where}{reason}",
            expected=f"one of {', '.join(sorted(STYLES))}",
            do="Change the rule, or leave the plan out to have it found.",
        )
    )
