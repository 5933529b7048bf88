"""Sequence parallelism: between the pairs of a block each rank holds a part of the tokens instead of all of them.

    (B, S/N, H) --gather--> attention on own heads, all S tokens --reduce-scatter--> (B, S/N, H) --> norm, residual

    first block   cuts hidden states along the sequence             (backward: all-gather)
    a pair        all-gather before, reduce-scatter after           (backward: the reverse)
    last block    gathers them again for the final norm and head    (backward: own part)

An all-reduce is a gather and a reduce-scatter, so a block sends what it sent before, and what is kept of norms, dropout
and residuals for backward is an N-th. What is whole on every rank inside of a block (norms, row-parallel biases) sees
only the rank's own tokens: its gradient is partial. In training the sequence has to divide by N; without gradients one
that does not (a decoding step) runs as under plain tensor parallelism.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hfdist import comm
from hfdist.errors import DistributedError, say
from hfdist.models.blocks import find_blocks
from hfdist.models.tensor_plans import Plan
from hfdist.parallel.tensor.collectives import BACKWARD, FORWARD, Ranks
from hfdist.parallel.tensor.layout import Layout, Replicated, UnfitPlan

_ALLOWED = {"colwise", "rowwise", "packed_colwise", "fused_colwise", "replicated_with_grad_allreduce", "replicate"}


def _gathered(x: Tensor, ranks: Ranks, label: str) -> Tensor:
    """(B, S/N, H) to (B, S, H); rows of a matrix (tokens of all sequences together) to those of all ranks."""
    every = x.new_empty(ranks.size * x.numel())
    comm.all_gather(every, x.contiguous().view(-1), ranks.group, label=label)
    parts = every.view(ranks.size, *x.shape)
    return torch.cat(list(parts), dim=_token_dim(x))


def _scattered(x: Tensor, ranks: Ranks, label: str) -> Tensor:
    """This rank's tokens of the sum over ranks: (B, S, H) to (B, S/N, H)."""
    parts = torch.stack(x.chunk(ranks.size, dim=_token_dim(x)))
    own = torch.empty_like(parts[0])
    comm.reduce_scatter(own.view(-1), parts.view(-1), ranks.group, mean=False, label=label)
    return own


def _token_dim(x: Tensor) -> int:
    # Some MLPs flatten (B, S, H) to a matrix. Their maths is one of single tokens, so the order does not matter.
    return 1 if x.ndim == 3 else 0


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return _gathered(x, ranks, FORWARD)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _scattered(gradient, ctx.ranks, BACKWARD), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return _scattered(x, ranks, FORWARD)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _gathered(gradient, ctx.ranks, BACKWARD), None


class _Begin(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return x.chunk(ranks.size, dim=1)[ranks.rank].contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _gathered(gradient, ctx.ranks, BACKWARD), None


class _End(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return _gathered(x, ranks, FORWARD)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.chunk(ctx.ranks.size, dim=1)[ctx.ranks.rank].contiguous(), None


def gather(x: Tensor, ranks: Ranks) -> Tensor:
    """All tokens, for a layer of which each rank has a part: its gradient is summed over ranks."""
    return _Gather.apply(x, ranks)


def scatter(x: Tensor, ranks: Ranks) -> Tensor:
    """This rank's tokens of the sum of all ranks' `x`."""
    return _Scatter.apply(x, ranks)


def begin(x: Tensor, ranks: Ranks) -> Tensor:
    """This rank's tokens of hidden states that are equal on all ranks."""
    return _Begin.apply(x, ranks)


def end(x: Tensor, ranks: Ranks) -> Tensor:
    """All tokens, for what every rank computes alike."""
    return _End.apply(x, ranks)


def verify_plan_allows(plan: Plan, blocks: tuple[str, ...]) -> None:
    """UnfitPlan for a plan whose blocks do not consist of column- and row-parallel pairs."""
    others = {name: style for name, style in plan.items() if name.startswith(blocks) and style not in _ALLOWED}
    if others:
        name, style = next(iter(others.items()))
        raise UnfitPlan(
            say(
                given=f"sequence_parallel=True with style {style!r} for {name}",
                expected="blocks of column- and row-parallel pairs only",
                do="Use sequence_parallel=False for this model.",
            )
        )


def partial_layouts(layouts: Mapping[str, Layout], blocks: tuple[str, ...]) -> dict[str, Layout]:
    """Layouts in which what blocks hold whole gets a partial gradient on each rank."""
    return {
        name: Replicated(partial_gradient=True) if layout == Replicated() and name.startswith(blocks) else layout
        for name, layout in layouts.items()
    }


class Sequence:
    """Whether activations are cut along the sequence just now. One a handle."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.inside = False  # within a block that runs on this rank's tokens
        self._on = False  # whether the forward going on does

    def hook(
        self,
        model: nn.Module,
        attentions: list[nn.Module],
        enter: Callable[[torch.device], None],
        leave: Callable[[], None],
    ) -> list[Callable[[], None]]:
        """Hooks on blocks and attention modules; `enter` and `leave` change random streams. Returns the undos."""
        blocks = [block for _, block in find_blocks(model)]
        undos = []
        for block in blocks:
            first, last = block is blocks[0], block is blocks[-1]

            def pre(module: nn.Module, args: Any, kwargs: Any, first: bool = first) -> tuple[Any, Any]:
                return self._pre(module, args, kwargs, first=first, enter=enter)

            def post(module: nn.Module, args: Any, output: Any, last: bool = last) -> Any:
                inside, self.inside = self.inside, False
                leave()
                if output is None or not (inside and last):
                    return output
                return _map_output(lambda x: end(x, self.ranks), output)

            undos.append(block.register_forward_pre_hook(pre, with_kwargs=True).remove)
            undos.append(block.register_forward_hook(post, always_call=True).remove)
        undos += [a.register_forward_pre_hook(self._gather_input, with_kwargs=True).remove for a in attentions]
        return undos

    def _pre(
        self, module: nn.Module, args: Any, kwargs: Any, *, first: bool, enter: Callable[[torch.device], None]
    ) -> tuple[Any, Any]:
        hidden = args[0] if args else next(value for value in kwargs.values() if isinstance(value, Tensor))
        if first:
            self._on = hidden.shape[1] % self.ranks.size == 0
            if not self._on and torch.is_grad_enabled():
                raise DistributedError(
                    say(
                        given=f"{hidden.shape[1]} tokens with sequence_parallel over {self.ranks.size} ranks",
                        expected=f"a multiple of {self.ranks.size} in training",
                        do=f"Pad batches (pad_to_multiple_of={self.ranks.size}), or evaluate under torch.no_grad().",
                    )
                )
        self.inside = self._on or torch.is_grad_enabled()
        if self.inside and module.training:
            enter(hidden.device)
        if self.inside and first:
            return _map_input(lambda x: begin(x, self.ranks), args, kwargs)
        return args, kwargs

    def _gather_input(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return _map_input(lambda x: gather(x, self.ranks), args, kwargs) if self.inside else (args, kwargs)


def _map_input(change: Callable[[Tensor], Tensor], args: Any, kwargs: Any) -> tuple[Any, Any]:
    if args:
        return (change(args[0]), *args[1:]), kwargs
    name = next(name for name, value in kwargs.items() if isinstance(value, Tensor))
    return args, {**kwargs, name: change(kwargs[name])}


def _map_output(change: Callable[[Tensor], Tensor], output: Any) -> Any:
    return (change(output[0]), *output[1:]) if isinstance(output, tuple) else change(output)
