"""0-dim parameters: FSDP2 refuses them, so every rank keeps them whole and their gradients are averaged here.

    rank 0 grad 3.0   rank 1 grad None   ->   1.5 on both (who did not use it counts 0); nobody used it: None on both

The average of averages is itself, so averaging again before an update changes nothing that was averaged already.
"""

from __future__ import annotations

import torch

from hfdist import comm
from hfdist.parallel.zero import ZeroModel


@torch.no_grad()
def average_gradients(zero: ZeroModel) -> None:
    """Replace the gradients of `zero.replicated` by their mean over all ranks; all ranks call it (one all-reduce)."""
    params = [p for p in zero.replicated if p.requires_grad]
    if not params or zero.mesh.size == 1:
        return
    zero.meeting.run(comm.SCALARS)
    values = [p.new_zeros(()) if p.grad is None else p.grad for p in params]
    used = [p.new_full((), p.grad is not None) for p in params]
    flat = torch.stack([value.double() for value in (*values, *used)])  # (2 n,)
    comm.all_reduce(flat, zero.mesh.group, label="0-dim gradients")
    means, counts = flat[: len(params)] / zero.mesh.size, flat[len(params) :].tolist()
    for parameter, mean, count in zip(params, means, counts, strict=True):
        if count:
            parameter.grad = mean.to(parameter.dtype)
