"""Before a batch runs, the pipeline's ranks agree that it is the same batch and that nobody failed while preparing it.

Without it a batch of another length on one rank would end in the backend (gloo kills the process on a size mismatch).
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hfdist import comm
from hfdist.errors import DistributedError, coordinates


def describe_batch(batch: Mapping[str, Any]) -> str:
    """`input_ids (2, 7) int64, ...`: what must be equal on all ranks."""
    parts = [
        f"{name} {tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
        for name, value in sorted(batch.items())
        if isinstance(value, Tensor)
    ]
    return ", ".join(parts) or "no tensors"


def agree(group: dist.ProcessGroup, device: torch.device, *, what: str, seed: int, error: BaseException | None) -> int:
    """The first rank's `seed`, once all ranks say the same `what` and none has an `error`.

    Raises this rank's `error`, or DistributedError naming the ranks that failed or differ, on all ranks.
    """
    size = dist.get_world_size(group)
    code = zlib.crc32(what.encode())
    mine = torch.tensor([int(error is not None), code, seed], dtype=torch.int64, device=device)
    every = torch.empty(3 * size, dtype=torch.int64, device=device)
    comm.all_gather(every, mine, group, label="pipeline agreement")
    failed, codes, seeds = every.view(size, 3).T.tolist()
    if error is not None:
        raise error
    if any(failed):
        ranks = ", ".join(coordinates(pp=rank) for rank, bad in enumerate(failed) if bad)
        raise DistributedError(
            f"Got an error on {ranks} while the batch was prepared. Expected every rank of a pipeline to run it. "
            "See the error of that rank."
        )
    if len(set(codes)) > 1:
        ranks = ", ".join(coordinates(pp=rank) for rank, other in enumerate(codes) if other != codes[0])
        raise DistributedError(
            f"Got another batch on {ranks} than on pp=0 (here: {what}). Expected the same batch on all ranks of a "
            "pipeline. Give them the same data: shard by data-parallel rank only."
        )
    return seeds[0]
