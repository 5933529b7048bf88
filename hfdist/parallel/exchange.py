"""Gathers and reductions of many tensors between CPU ranks, straight from and into the memory they belong to.

A collective over one flat buffer needs every tensor copied into it and out again. Here a tensor of at least
DIRECT_BYTES a rank travels as a message of its own, out of the gradient it was computed in or into the parameter it is
needed in; smaller ones share one packed message per pair of ranks. Two ranks, a large weight W and two small ones a, b:

    gather    rank 0 sends W[0] and (a[0] b[0]) and receives W[1] into W and (a[1] b[1]) into a buffer
    reduce    rank 0 sends dW[1] and (da[1] db[1]), receives rank 1's dW[0] and (da[0] db[0]) and adds its own

What a copy costs beside a message, in CPU time: 256 KB copied 11 us, 1 MB 73 us, 4 MB 570 us; a message 50 to 100 us
more than the bytes it carries (2 ranks, gloo over the loopback). Bytes sent are at the bound; padding of large tensors
is not sent.
Ranks must call with tensors of the same shapes and dtypes in the same order: they meet first (`hfdist.comm`).
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from hfdist.measure import wire

# Bytes of one rank's part from which a tensor is not packed. An all-reduce sends it twice, and packing is one copy.
DIRECT_BYTES = 1 << 18
DIRECT_ALL_REDUCE_BYTES = 1 << 20

Messages = list[list[torch.Tensor]]  # by peer (rank in the group), in the same order on both sides


def swap(group: dist.ProcessGroup, outgoing: Messages, incoming: Messages, *, op: str, label: str) -> None:
    """Send `outgoing[r]` to every other rank r and receive its messages into `incoming[r]`; returns when all are done.

    Tensors are contiguous; empty ones are not sent. Raises RuntimeError when a partner is lost.
    """
    rank, size = group.rank(), group.size()
    wire.record(
        op,
        sum(t.nbytes for r, listed in enumerate(outgoing) if r != rank for t in listed),
        group_size=size,
        label=label,
    )
    works = []
    for distance in range(1, size):
        to, source = (rank + distance) % size, (rank - distance) % size
        works += [group.recv([t], source, tag) for tag, t in enumerate(incoming[source]) if t.numel()]
        works += [group.send([t], to, tag) for tag, t in enumerate(outgoing[to]) if t.numel()]
    for work in works:
        work.wait()


def gather(outputs: list[torch.Tensor], group: dist.ProcessGroup, *, label: str) -> None:
    """Fill `outputs`, each (N, n) with row r of rank r; this rank's own rows are there already."""
    rank, size = group.rank(), group.size()
    outputs = [output for output in outputs if output.numel()]
    large = [output for output in outputs if output[rank].nbytes >= DIRECT_BYTES]
    small = [output.view(torch.uint8) for output in outputs if output[rank].nbytes < DIRECT_BYTES]
    sent, received = [output[rank] for output in large], [[output[r] for output in large] for r in range(size)]
    if small:
        packed = torch.empty(size, sum(output.size(1) for output in small), dtype=torch.uint8)
        torch.cat([output[rank] for output in small], out=packed[rank])
        sent.append(packed[rank])
        for r in range(size):
            received[r].append(packed[r])
    swap(group, [sent] * size, received, op="all_gather", label=label)
    if small:
        torch.split_with_sizes_copy(packed, [output.size(1) for output in small], dim=1, out=small)


class ReduceScatter:
    """The mean over ranks of gradients, each rank's rows of it. Buffers are allocated here, the exchange is `run()`.

    `grads[i]` is a whole gradient (D_i, ...), contiguous; it is not changed and not needed after `run()`. Rank r's rows
    are the r-th ceil(D_i / N). Half precision is summed in fp32 and not rounded afterwards.
    """

    def __init__(self, grads: list[torch.Tensor], group: dist.ProcessGroup, label: str) -> None:
        self.group, self.label = group, label
        rank, size = group.rank(), group.size()
        self.shapes = [grad.shape for grad in grads]
        chunks = [-(-grad.size(0) // size) for grad in grads]
        self.padded = [
            chunk * grad[0].numel() if grad.size(0) else 0 for chunk, grad in zip(chunks, grads, strict=True)
        ]
        self.is_large = [numel * grad.itemsize >= DIRECT_BYTES for numel, grad in zip(self.padded, grads, strict=True)]
        # By rank, what is sent there (this rank's own entry is its part of the sum).
        self.rows: Messages = [[] for _ in range(size)]
        for grad, chunk, large in zip(grads, chunks, self.is_large, strict=True):
            if large:
                for r, rows in enumerate(self.rows):
                    rows.append(grad[r * chunk : (r + 1) * chunk])
        small = [grad for grad, large in zip(grads, self.is_large, strict=True) if not large]
        if small:
            packed = torch.empty(size, sum(self._small_numels()), dtype=small[0].dtype)
            torch._chunk_cat(small, dim=0, num_chunks=size, out=packed)
            for r, rows in enumerate(self.rows):
                rows.append(packed[r])
        sizes = [numel for numel, large in zip(self.padded, self.is_large, strict=True) if large]
        sizes += [sum(self._small_numels())] if small else []
        # Allocated with padding, so that what a rank keeps is the same on all.
        self.received: Messages = [
            []
            if r == rank
            else [
                mine.new_empty(n)[: mine.numel()].view(mine.shape)
                for n, mine in zip(sizes, self.rows[rank], strict=True)
            ]
            for r in range(size)
        ]

    def _small_numels(self) -> list[int]:
        return [numel for numel, large in zip(self.padded, self.is_large, strict=True) if not large]

    def run(self) -> list[torch.Tensor]:
        """This rank's rows of the means, one tensor for each gradient: (rows, ...), fewer or none on the last ranks."""
        rank, size = self.group.rank(), self.group.size()
        swap(self.group, self.rows, self.received, op="reduce_scatter", label=self.label)
        mine, self.received[rank], self.rows = self.rows[rank], self.rows[rank], []
        # In the order of ranks, in memory that was received: the gradient itself goes.
        order = [1, 0, *range(2, size)] if rank == 0 else list(range(size))
        sums = [_mean([self.received[r][i] for r in order]) for i in range(len(mine))]
        self.received = []
        packed = list(sums.pop().split(self._small_numels())) if not all(self.is_large) else []
        means = []
        for shape, large in zip(self.shapes, self.is_large, strict=True):
            if large:
                means.append(sums.pop(0))
                continue
            chunk = -(-shape[0] // size)
            rows = min(max(shape[0] - rank * chunk, 0), chunk)
            means.append(packed.pop(0)[: rows * shape[1:].numel()].view(rows, *shape[1:]))
        return means


class AllReduce:
    """The mean over ranks of gradients, in place where they are large. Buffers are allocated here."""

    def __init__(self, grads: list[torch.Tensor], group: dist.ProcessGroup, label: str) -> None:
        self.group, self.label, self.grads = group, label, grads
        rank, size = group.rank(), group.size()
        self.is_large = [grad.nbytes >= DIRECT_ALL_REDUCE_BYTES * size for grad in grads]
        flat = [grad.view(-1) for grad, large in zip(grads, self.is_large, strict=True) if large]
        self.small = [grad for grad, large in zip(grads, self.is_large, strict=True) if not large]
        if self.small:
            flat.append(torch.cat([grad.view(-1) for grad in self.small]))
        self.flat = flat
        parts = [tensor.tensor_split(size) for tensor in flat]
        self.parts: Messages = [[part[r] for part in parts] for r in range(size)]  # by the rank that adds them up
        self.received: Messages = [
            [] if r == rank else [torch.empty_like(part) for part in self.parts[rank]] for r in range(size)
        ]

    def run(self) -> list[torch.Tensor]:
        """The means, shaped as the gradients; large ones are the gradients themselves."""
        rank, size = self.group.rank(), self.group.size()
        mine = self.parts[rank]
        swap(self.group, self.parts, self.received, op="all_reduce", label=self.label)
        for i, part in enumerate(mine):
            part.copy_(_mean([part, *(listed[i] for listed in self.received if listed)]))
        self.received = []
        swap(self.group, [mine] * size, self.parts, op="all_reduce", label=self.label)
        packed = list(self.flat[-1].split([grad.numel() for grad in self.small])) if self.small else []
        return [
            grad if large else packed.pop(0).view(grad.shape)
            for grad, large in zip(self.grads, self.is_large, strict=True)
        ]


def _mean(parts: list[torch.Tensor]) -> torch.Tensor:
    """The mean of one tensor of each rank, added in this order, in the memory of the first; half precision in fp32."""
    total = parts[0].float() if parts[0].dtype.itemsize < 4 else parts[0]
    if len(parts) == 2:
        return total.lerp_(parts[1].to(total.dtype), 0.5)  # one pass over the memory instead of two
    for part in parts[1:]:
        total.add_(part)
    return total.div_(len(parts))
