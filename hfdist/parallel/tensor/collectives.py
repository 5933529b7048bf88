"""What tensor parallelism sends, as autograd functions over the group's ranks.

    name    forward                           backward                          where
    copy    nothing                           all-reduce                        into a column-parallel layer
    reduce  all-reduce                        nothing                           out of a row-parallel layer
    gather  all-gather along the last dim     own slice                         out of a gathered column-parallel layer
    cut     own slice of the last dim         all-gather                        into a row-parallel layer

The first two and the last two are each other's transposes, provided that what is whole is equal on all ranks. All go
through `hfdist.comm`, labelled "tp forward" and "tp backward".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hfdist import comm

FORWARD, BACKWARD = "tp forward", "tp backward"


@dataclass(frozen=True)
class Ranks:
    """The group and this process's place in it."""

    group: dist.ProcessGroup
    rank: int
    size: int

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> Ranks:
        """As the group says."""
        return cls(group, group.rank(), group.size())

    def slice_of(self, length: int, rank: int | None = None) -> tuple[int, int]:
        """(start, stop) of a rank's part of `length`: parts differ by at most one."""
        rank = self.rank if rank is None else rank
        return length * rank // self.size, length * (rank + 1) // self.size


def summed(tensor: Tensor, ranks: Ranks, label: str) -> Tensor:
    """The sum over ranks, in a new tensor: the argument may be shared with other parts of the graph."""
    return comm.all_reduce(tensor.clone(memory_format=torch.contiguous_format), ranks.group, label=label)


def gathered(local: Tensor, ranks: Ranks, *, dim: int, label: str) -> list[Tensor]:
    """All ranks' tensors, which may differ in length along `dim` as `slice_of` cuts it; by rank."""
    return gathered_parts(local, ranks, _lengths(local, ranks, dim), dim=dim, label=label)


def gathered_parts(local: Tensor, ranks: Ranks, lengths: list[int], *, dim: int, label: str) -> list[Tensor]:
    """All ranks' tensors, of which that of rank r has `lengths[r]` along `dim`; by rank."""
    shapes = [(*local.shape[:dim], length, *local.shape[dim + 1 :]) for length in lengths]
    counts = [torch.Size(shape).numel() for shape in shapes]
    # One exchange of equal sizes: the shorter ones are padded, by at most a row where nothing is copied.
    mine = local.new_zeros(max(counts))
    mine[: local.numel()] = local.reshape(-1)
    every = local.new_empty(ranks.size * max(counts))
    comm.all_gather(every, mine, ranks.group, label=label)
    rows = every.view(ranks.size, -1)
    return [row[:count].view(shape) for row, count, shape in zip(rows, counts, shapes, strict=True)]


def _lengths(local: Tensor, ranks: Ranks, dim: int) -> list[int]:
    """Lengths along `dim` on all ranks, when they are not known from elsewhere: one small exchange."""
    mine = torch.tensor([local.shape[dim]], dtype=torch.int64, device=local.device)
    every = torch.empty(ranks.size, dtype=torch.int64, device=local.device)
    comm.all_gather(every, mine, ranks.group, label="tp sizes")
    return every.tolist()


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return summed(gradient, ctx.ranks, BACKWARD), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks) -> Tensor:
        return summed(x, ranks, FORWARD)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks, length: int) -> Tensor:
        ctx.ranks, ctx.length = ranks, length
        return _whole_last(x, ranks, length, FORWARD)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        start, stop = ctx.ranks.slice_of(ctx.length)
        return gradient[..., start:stop].contiguous(), None, None


class _Cut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks, ctx.length = ranks, x.shape[-1]
        start, stop = ranks.slice_of(x.shape[-1])
        return x[..., start:stop].contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _whole_last(gradient, ctx.ranks, ctx.length, BACKWARD), None


def _whole_last(x: Tensor, ranks: Ranks, length: int, label: str) -> Tensor:
    bounds = [ranks.slice_of(length, rank) for rank in range(ranks.size)]
    lengths = [stop - start for start, stop in bounds]
    return torch.cat(gathered_parts(x, ranks, lengths, dim=x.ndim - 1, label=label), -1)


def copy(x: Tensor, ranks: Ranks) -> Tensor:
    """`x` as it is; its gradient is summed over ranks."""
    return _Copy.apply(x, ranks)


def reduce(x: Tensor, ranks: Ranks) -> Tensor:
    """The sum of all ranks' `x`; the gradient goes through as it is."""
    return _Reduce.apply(x, ranks)


def gather(x: Tensor, ranks: Ranks, length: int) -> Tensor:
    """(..., own part of length) to (..., length)."""
    return _Gather.apply(x, ranks, length)


def cut(x: Tensor, ranks: Ranks) -> Tensor:
    """(..., length) to (..., own part of length)."""
    return _Cut.apply(x, ranks)
