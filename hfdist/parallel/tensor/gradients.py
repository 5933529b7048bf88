"""Gradients of local tensors: sums that a tensor-parallel group owes before an update, and their norm.

    q_norm (whole on both ranks)      rank 0: from heads 0, 1   rank 1: from heads 2, 3    -> the sum, on both
    k head 0 (copied on ranks 0, 1)   rank 0: from query head 0 rank 1: from query head 1  -> the sum, on both

Once per optimizer step, not per micro-step: adding up what was added up already would count the earlier ones again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from hfdist import comm
from hfdist.parallel.tensor.collectives import Ranks
from hfdist.parallel.tensor.layout import Layout, Replicated, Split

LABEL = "tp gradients"


@torch.no_grad()
def reduce_partial_gradients(gradients: Iterable[tuple[Tensor | None, Layout]], ranks: Ranks) -> None:
    """Sum, in place, what several ranks hold a part of: at most one all-reduce and one all-gather a dtype.

    All ranks pass the same parameters in the same order. One that has a gradient on some ranks only is not among them.
    """
    summed: dict[torch.dtype, list[Tensor]] = {}
    copied: dict[tuple[torch.dtype, int], list[Tensor]] = {}
    for gradient, layout in gradients:
        if gradient is None:
            continue
        if isinstance(layout, Replicated) and layout.partial_gradient:
            summed.setdefault(gradient.dtype, []).append(gradient)
        elif isinstance(layout, Split) and layout.copies != 1:
            for piece, copies in layout.local_pieces(gradient, ranks.size):
                if copies > 1:
                    copied.setdefault((gradient.dtype, copies), []).append(piece)
    for tensors in summed.values():
        flat = torch.cat([t.reshape(-1) for t in tensors])
        _write_back(comm.all_reduce(flat, ranks.group, label=LABEL), tensors)
    for (_, copies), tensors in copied.items():
        flat = torch.cat([t.reshape(-1) for t in tensors])
        every = flat.new_empty(ranks.size * flat.numel())
        comm.all_gather(every, flat, ranks.group, label=LABEL)
        first = ranks.rank // copies * copies
        _write_back(every.view(ranks.size, -1)[first : first + copies].sum(dim=0), tensors)


def _write_back(flat: Tensor, tensors: list[Tensor]) -> None:
    for tensor, values in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        tensor.copy_(values.view(tensor.shape))


@torch.no_grad()
def total_norm(
    gradients: Mapping[str, Tensor], layouts: Mapping[str, Layout], ranks: Ranks, norm_type: float = 2.0
) -> Tensor:
    """Norm of all gradients (local, by parameter name) as one vector, each element once; the same on every rank."""
    counted = [
        part.double() if part.device.type == "cpu" else part.float()
        for name, gradient in gradients.items()
        for part in layouts[name].counted(gradient, ranks.rank, ranks.size)
        if part.numel()
    ]
    device = next((g.device for g in gradients.values()), torch.device("cpu"))
    dtype = torch.float64 if device.type == "cpu" else torch.float32
    norms = [torch.linalg.vector_norm(part, norm_type) for part in counted]
    stacked = torch.stack(norms) if norms else torch.zeros(1, dtype=dtype, device=device)
    if math.isinf(norm_type):
        return comm.all_reduce(stacked.max(), ranks.group, dist.ReduceOp.MAX, label="norm")
    local = torch.linalg.vector_norm(stacked, norm_type) ** norm_type
    return comm.all_reduce(local, ranks.group, label="norm") ** (1.0 / norm_type)
