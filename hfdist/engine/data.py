"""Data over the data axis only: ranks that hold different parts of one model read the same batch.

accelerate shards and gathers over the whole world, which is right where every rank has the whole model. On a grid
pp x dp x tp (`mesh.Grid`) a loader deals its batches to the dp ranks, and what is gathered or reduced is counted once
for each of them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from accelerate.data_loader import prepare_data_loader
from accelerate.utils import recursively_apply
from torch.utils.data import DataLoader

from hfdist.errors import ConfigError, say
from hfdist.mesh import DataMesh


def shard_data_loader(
    accelerator: Any, loader: DataLoader, mesh: DataMesh, *, device_placement: bool | None, slice_fn: Any
) -> Any:
    """accelerate's prepared loader of this dp rank's batches, equal on all ranks that share it.

    Raises ConfigError for `dispatch_batches=True`, where one rank of the world reads for all.
    """
    if accelerator.dispatch_batches:
        raise ConfigError(
            say(
                given="dispatch_batches=True with pipeline or tensor parallelism",
                expected="every rank to read its own batches",
                do="Leave dispatch_batches out.",
            )
        )
    return prepare_data_loader(
        loader,
        accelerator.device,
        num_processes=mesh.size,
        process_index=mesh.rank,
        split_batches=accelerator.split_batches,
        put_on_device=accelerator.device_placement if device_placement is None else device_placement,
        rng_types=accelerator.rng_types.copy(),
        dispatch_batches=False,
        even_batches=accelerator.even_batches,
        slice_fn_for_dispatch=slice_fn,
        use_seedable_sampler=accelerator.use_seedable_sampler,
        data_seed=accelerator.dataloader_config.data_seed,
        non_blocking=accelerator.non_blocking,
        use_stateful_dataloader=accelerator.use_stateful_dataloader,
    )


def gather(values: Any, mesh: DataMesh) -> Any:
    """The tensors of all dp ranks in nested `values`, one after the other along dimension 0."""

    def one(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.clone()[None] if tensor.ndim == 0 else tensor.contiguous()
        parts = [torch.empty_like(tensor) for _ in range(mesh.size)]
        dist.all_gather(parts, tensor, group=mesh.group)
        return torch.cat(parts, dim=0)

    return recursively_apply(one, values, error_on_other_type=True)


def all_tensors(values: Any) -> bool:
    """Whether nested `values` hold tensors only."""
    return all(isinstance(leaf, torch.Tensor) for leaf in torch.utils._pytree.tree_leaves(values))


def gather_objects(values: list[Any], mesh: DataMesh) -> list[Any]:
    """The lists of picklable objects of all dp ranks as one list."""
    listed: list[Any] = [None] * mesh.size
    dist.all_gather_object(listed, values, group=mesh.group)
    return [item for part in listed for item in part]


def reduce(values: Any, mesh: DataMesh, reduction: str) -> Any:
    """ "sum", "mean", "max" or (as accelerate has it) "none" of the dp ranks' tensors."""

    def one(tensor: torch.Tensor) -> torch.Tensor:
        result = tensor.clone()
        if reduction == "none":
            return result
        dist.all_reduce(result, dist.ReduceOp.MAX if reduction == "max" else dist.ReduceOp.SUM, group=mesh.group)
        return result / mesh.size if reduction == "mean" else result

    return recursively_apply(one, values, error_on_other_type=True)
