"""How a whole parameter lies over the ranks of a tensor-parallel group: pure arithmetic on shapes, no communication.

    Linear (6, 4), split by its output over 2 ranks           Split(0)            rank 0 rows 0-2, rank 1 rows 3-5
    fused q, k, v of 2 heads of 2 each (12, 4)                Split(0, (4, 4, 4)) rank 0 rows 0-1, 4-5, 8-9
    vocabulary of 7 over 2 ranks                              Split(0)            rank 0 rows 0-2, rank 1 rows 3-6
    k of 2 heads over 4 ranks                                 Split(0, copies=2)  ranks 0, 1 the first, 2, 3 the second
    a norm                                                    Replicated()        all rows on both

`take` cuts a rank's part out of the whole, `join` puts the whole together again, and `counted` names the part of a
local tensor that stands for itself in a sum over ranks (a norm), so that what several ranks hold counts once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from hfdist.errors import ConfigError


class UnfitPlan(ConfigError):
    """A plan does not fit the model whatever the number of ranks: another candidate may."""


class Layout(Protocol):
    """Where a whole parameter is. Ranks are 0 .. size - 1."""

    def shape(self, whole: Sequence[int], rank: int, size: int) -> tuple[int, ...]:
        """Shape of the part of `rank`."""

    def take(self, whole: Tensor, rank: int, size: int) -> Tensor:
        """The part of `rank` (a view or a copy)."""

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """The whole, from the parts of all ranks in order."""

    def counted(self, local: Tensor, rank: int, size: int) -> list[Tensor]:
        """Views of a local part (or its gradient) that `rank` stands for: over all ranks they are the whole, once."""


@dataclass(frozen=True)
class Replicated:
    """Whole on every rank.

    `partial_gradient`: each rank's gradient covers only what its own heads saw, so the gradients are summed once before
    an update (`gradients.reduce_partial_gradients`).
    """

    partial_gradient: bool = False

    def shape(self, whole: Sequence[int], rank: int, size: int) -> tuple[int, ...]:
        """The whole shape."""
        return tuple(whole)

    def take(self, whole: Tensor, rank: int, size: int) -> Tensor:
        """The whole itself."""
        return whole

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """The first rank's."""
        return parts[0]

    def counted(self, local: Tensor, rank: int, size: int) -> list[Tensor]:
        """The first rank's counts."""
        return [local] if rank == 0 else []


@dataclass(frozen=True)
class Split:
    """Cut along `dim`, each of the `blocks` packed in it on its own.

    blocks: sizes of the packed parts in order, each of which every rank has a piece of; empty: the dimension is one.
    copies: how many neighbouring ranks hold the same piece, one number for all blocks or one a block; `size` is a
        multiple of each.
    Pieces of a block differ by at most one row; a block of fewer rows than ranks leaves some ranks without.
    """

    dim: int
    blocks: tuple[int, ...] = ()
    copies: int | tuple[int, ...] = 1

    def pieces(self, length: int, rank: int, size: int) -> list[tuple[int, int, int]]:
        """(start, stop, copies) in the whole dimension of each block's piece of `rank`."""
        blocks = self.blocks or (length,)
        assert sum(blocks) == length, (blocks, length)
        result, start = [], 0
        for index, block in enumerate(blocks):
            copies = self._copies(index)
            num_pieces, piece = size // copies, rank // copies
            first, last = (block * n // num_pieces for n in (piece, piece + 1))
            result.append((start + first, start + last, copies))
            start += block
        return result

    def shape(self, whole: Sequence[int], rank: int, size: int) -> tuple[int, ...]:
        """`whole` with this rank's length in `dim`."""
        length = sum(stop - start for start, stop, _ in self.pieces(whole[self.dim], rank, size))
        return (*whole[: self.dim], length, *whole[self.dim + 1 :])

    def take(self, whole: Tensor, rank: int, size: int) -> Tensor:
        """This rank's pieces, one behind the other."""
        pieces = self.pieces(whole.shape[self.dim], rank, size)
        parts = [whole.narrow(self.dim, start, stop - start) for start, stop, _ in pieces]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """The pieces back in the order of the whole; of copies the first rank's."""
        size = len(parts)
        local = [part.shape[self.dim] for part in parts]
        blocks = self.blocks or (self._whole_length(local),)
        length = sum(blocks)
        rows: list[list[Tensor]] = [[] for _ in blocks]
        for rank, part in enumerate(parts):
            offset = 0
            for index, (start, stop, copies) in enumerate(self.pieces(length, rank, size)):
                if rank % copies == 0:
                    rows[index].append(part.narrow(self.dim, offset, stop - start))
                offset += stop - start
        return torch.cat([piece for block in rows for piece in block], self.dim)

    def counted(self, local: Tensor, rank: int, size: int) -> list[Tensor]:
        """All of it, but for what an earlier rank holds as well."""
        if self.copies == 1:
            return [local]
        return [piece for piece, copies in self.local_pieces(local, size) if rank % copies == 0]

    def local_pieces(self, local: Tensor, size: int) -> list[tuple[Tensor, int]]:
        """Views of a local part by block, each with how many ranks hold it. Only where blocks divide evenly."""
        blocks = self.blocks or (local.shape[self.dim] * size // self._copies(0),)
        result, offset = [], 0
        for index, block in enumerate(blocks):
            copies = self._copies(index)
            length = block * copies // size
            result.append((local.narrow(self.dim, offset, length), copies))
            offset += length
        return result

    def _copies(self, index: int) -> int:
        return self.copies[index] if isinstance(self.copies, tuple) else self.copies

    def _whole_length(self, local: Sequence[int]) -> int:
        return sum(local) // self._copies(0)
