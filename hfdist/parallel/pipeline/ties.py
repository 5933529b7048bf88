"""Parameters that several pipeline ranks keep: one gradient, the sum of the ranks', so that copies stay bitwise equal.

The embedding on the first rank tied to the head on the last: each sends its gradient to the other and both add the two
in rank order. Ranks between them take no part.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hfdist.measure import wire
from hfdist.parallel.pipeline.apply import Applied, Shared


def shared_here(model: nn.Module, applied: Applied) -> list[tuple[Shared, nn.Parameter]]:
    """What other ranks keep too, with this rank's parameter for it, in the same order on all ranks."""
    named = dict(model.named_parameters(remove_duplicate=False))
    return [(shared, named[shared.names_here[0]]) for shared in applied.shared if shared.names_here]


def sum_shared_gradients(
    shared: Iterable[tuple[Shared, nn.Parameter]], gradients: dict[nn.Parameter, Tensor], group: dist.ProcessGroup
) -> None:
    """Replace in `gradients` each shared parameter's gradient by the sum over its ranks (none there: zeros)."""
    rank = dist.get_rank(group)
    for entry, parameter in shared:
        if not parameter.requires_grad:
            continue
        mine = gradients.get(parameter)
        mine = torch.zeros_like(parameter, memory_format=torch.contiguous_format) if mine is None else mine.contiguous()
        parts = {rank: mine}
        waits = []
        for peer in entry.ranks:
            if peer == rank:
                continue
            parts[peer] = torch.empty_like(mine)
            wire.record("send", mine.nbytes, group_size=2, label="pipeline ties")
            waits.append(dist.isend(mine, group=group, group_dst=peer))
            waits.append(dist.irecv(parts[peer], group=group, group_src=peer))
        for wait in waits:
            assert wait is not None  # of a rank in the group
            wait.wait()
        total = parts[entry.ranks[0]].clone()
        for peer in entry.ranks[1:]:
            total += parts[peer]
        gradients[parameter] = total


def owned_once(
    model: nn.Module, applied: Applied, parameters: Iterable[nn.Parameter] | None = None
) -> list[nn.Parameter]:
    """Those of `parameters` (all by default) that count on this rank: a shared one on the lowest rank that has it."""
    elsewhere = {id(parameter) for entry, parameter in shared_here(model, applied) if applied.rank != min(entry.ranks)}
    chosen = model.parameters() if parameters is None else parameters
    return [parameter for parameter in chosen if id(parameter) not in elsewhere]
