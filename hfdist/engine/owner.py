"""Whole parameters on owner ranks, for optimizers that must see a parameter whole.

Each such parameter has one owner in its shard group (balanced by size). At the step every rank sends its rows of the
gradient and of the parameter to the owner, which holds the optimizer state, updates, and sends the rows back:

    rank 0 rows --\\                                   /--> rank 0 rows
    rank 1 rows ----> owner: whole gradient, step ----+---> rank 1 rows       3 exchanges, (N-1)/N x P bytes each

Memory: the owner holds its parameters and gradients whole while it steps, its state for good: P/N each on average.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from hfdist import comm


def rows_of(rank: int, num_rows: int, size: int) -> int:
    """Rows of a (num_rows, ...) tensor that FSDP2 gives to `rank` of `size`: chunks of ceil(num_rows / size)."""
    chunk = -(-num_rows // size)
    return max(0, min(chunk, num_rows - rank * chunk))


def assign_owners(shapes: list[torch.Size], size: int) -> list[int]:
    """Owner rank of each parameter, largest first to the least loaded rank; the same on all ranks."""
    load = [0] * size
    owners = [0] * len(shapes)
    for index in sorted(range(len(shapes)), key=lambda i: (-shapes[i].numel(), i)):
        owners[index] = load.index(min(load))
        load[owners[index]] += shapes[index].numel()
    return owners


def _sizes(shapes: list[torch.Size], owners: list[int], owner: int, rank: int, size: int) -> list[int]:
    """Elements that `rank` holds of each parameter of `owner`."""
    return [
        rows_of(rank, shape[0], size) * (shape.numel() // max(shape[0], 1))
        for shape, o in zip(shapes, owners, strict=True)
        if o == owner
    ]


@torch.no_grad()
def to_owners(
    shards: list[torch.Tensor], shapes: list[torch.Size], owners: list[int], group: dist.ProcessGroup
) -> list[torch.Tensor]:
    """Local `shards` (rows, ...) of all parameters -> the whole (n, ...) tensors that this rank owns, in order."""
    rank, size = group.rank(), group.size()
    out = [[s.reshape(-1) for s, o in zip(shards, owners, strict=True) if o == r] for r in range(size)]
    sent = torch.cat([t for part in out for t in part]) if shards else torch.empty(0)
    sent_sizes = [sum(t.numel() for t in part) for part in out]
    mine = [shape for shape, o in zip(shapes, owners, strict=True) if o == rank]
    pieces = [_sizes(shapes, owners, rank, source, size) for source in range(size)]
    received_sizes = [sum(piece) for piece in pieces]
    received = sent.new_empty(sum(received_sizes))
    comm.all_to_all(received, sent, received_sizes, sent_sizes, group, label="to owners")
    by_source = [list(part.split(piece)) for part, piece in zip(received.split(received_sizes), pieces, strict=True)]
    return [torch.cat([source[i] for source in by_source]).view(shape) for i, shape in enumerate(mine)]


@torch.no_grad()
def from_owners(
    whole: list[torch.Tensor],
    shards: list[torch.Tensor],
    shapes: list[torch.Size],
    owners: list[int],
    group: dist.ProcessGroup,
) -> None:
    """The way back: the `whole` tensors this rank owns are written into everyone's local `shards`, in place."""
    rank, size = group.rank(), group.size()
    pieces = [_sizes(shapes, owners, rank, target, size) for target in range(size)]
    flat = [w.reshape(-1).split([pieces[target][i] for target in range(size)]) for i, w in enumerate(whole)]
    parts = [part[target] for target in range(size) for part in flat]
    sent = torch.cat(parts) if parts else shards[0].new_empty(0)
    sent_sizes = [sum(piece) for piece in pieces]
    incoming = [_sizes(shapes, owners, owner, rank, size) for owner in range(size)]
    received_sizes = [sum(piece) for piece in incoming]
    received = shards[0].new_empty(sum(received_sizes))
    comm.all_to_all(received, sent, received_sizes, sent_sizes, group, label="from owners")
    for owner, (part, piece) in enumerate(zip(received.split(received_sizes), incoming, strict=True)):
        targets = [s for s, o in zip(shards, owners, strict=True) if o == owner]
        for target, values in zip(targets, part.split(piece), strict=True):
            target.copy_(values.view(target.shape))
