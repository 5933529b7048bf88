"""FSDP2's gathers and reductions on CPU ranks without its flat buffers (`exchange.py`); private API of torch 2.13.

    gather    shards are cast into their place in the gathered parameter and exchanged there
    reduce    whole gradients are exchanged where autograd left them; what remains is this rank's rows of the mean
    stage 0   the gathered parameter *is* the stored one when both have one dtype: no copy, no second P bytes

A gather may pack matrices as int8 (`quantize.py`); from what a secondary group kept after forward (`fsdp.py`) it takes
the values as they are, so that forward and backward compute with the same ones.

Everything that can fail for want of memory is allocated before the ranks meet. FSDP2's own path stays for devices and
for reductions over shards and replicas together.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo, TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor

from hfdist.parallel import exchange, fsdp, quantize

# Runs a collective once the ranks have met about it.
Meet = Callable[[Callable[[], None]], None]

# Bytes that must be left when ranks meet: gloo's threads allocate too, and abort the process when they cannot.
SPARE_BYTES = 8 << 20


def gathers(group: FSDPParamGroup) -> bool:
    """Whether a group is gathered here (a group of one shard is, on any device)."""
    return group.device.type == "cpu" or fsdp.shard_group(group).size() == 1


def reduces(group: FSDPParamGroup) -> bool:
    """Whether a group's gradients are reduced here."""
    return group.device.type == "cpu" and (fsdp.shard_group(group).size() == 1 or _replicas(group) is None)


def _replicas(group: FSDPParamGroup) -> dist.ProcessGroup | None:
    """The ranks that hold the same shard, if there are several."""
    if isinstance(group.mesh_info, DDPMeshInfo) and group.mesh_info.replicate_process_group.size() > 1:
        return group.mesh_info.replicate_process_group
    return None


# ------------------------------------------------------------------------------------------------------- gathers


@torch.no_grad()
def unshard(group: FSDPParamGroup, meet: Meet, label: str, *, int8: bool = False) -> None:
    """What FSDP2's `unshard` and `wait_for_unshard` do together: whole parameters registered on their modules."""
    if group.is_unsharded:
        return
    if not group.unshard_in_backward and group._training_state == TrainingState.PRE_BACKWARD:
        return
    # The secondary group's where that has kept the parameters since forward.
    shards, secondary = group._all_gather_process_group, group.is_sharded_post_forward
    try:
        allocated = [(param, _allocate(param, fsdp.shard_group(group))) for param in group.fsdp_params]
        outputs = [output for _, output in allocated if output is not None]
        # Autograd may have saved a gathered parameter: what fills it again is the same value.
        versioned = tuple(output for output in outputs if not output.is_inference())
        with torch.autograd._unsafe_preserve_version_counter(versioned) if versioned else contextlib.nullcontext():
            for param in group.fsdp_params:
                stored = cast(
                    torch.Tensor, param._sharded_post_forward_param_data if secondary else param._sharded_param_data
                )
                for output in param.all_gather_outputs if stored.numel() else ():
                    output.view(shards.size(), -1)[shards.rank()].copy_(stored)
            if shards.size() > 1:
                filled = [(param, output) for param, output in allocated if output is not None and output.numel()]
                rows = [output.view(shards.size(), -1) for _, output in filled]
                matrices = [int8 and not secondary and fsdp.is_matrix(param) for param, _ in filled]
                packed = quantize.PackedGather(rows, matrices, shards, label)
                _try_spare(group)
                meet(packed.run)
    except BaseException:
        for param in group.fsdp_params:
            param.free_unsharded_param()
        raise
    for param in group.fsdp_params:
        param.init_unsharded_param()
    group._to_unsharded()


@torch.no_grad()
def serve_gather(group: FSDPParamGroup, label: str, *, int8: bool = False) -> None:
    """Take part in a gather that only other ranks need; the group stays as it is."""
    shards = fsdp.shard_group(group)
    outputs, matrices = [], []
    for param in group.fsdp_params:
        if not param._sharded_param_data.numel():
            continue
        shard = param._sharded_param_data
        output = torch.empty(shards.size(), shard.numel(), dtype=param.param_dtype or shard.dtype, device=param.device)
        output[shards.rank()].copy_(shard)
        outputs.append(output)
        matrices.append(int8 and fsdp.is_matrix(param))
    quantize.PackedGather(outputs, matrices, shards, label).run()


def _allocate(param: FSDPParam, shards: dist.ProcessGroup) -> torch.Tensor | None:
    """The memory of the gathered parameter (N * rows,); None where the stored one serves."""
    if fsdp.alias_gathered_form(param):
        return None
    shard = param._sharded_param_data
    param.init_all_gather_outputs([shard.numel()], [param.param_dtype or shard.dtype], shards.size(), param.device)
    param.alloc_all_gather_outputs()
    return param.all_gather_outputs[0]


# ---------------------------------------------------------------------------------------------------- reductions


@torch.no_grad()
def reduce(group: FSDPParamGroup, meet: Meet, label: str, *, unused: bool = False) -> None:
    """What FSDP2's `post_backward` does with the gradients of a unit: reduced ones end in `sharded_param.grad`.

    `unused`: parameters without a gradient count zero (ranks that used different ones).
    """
    group._training_state = TrainingState.POST_BACKWARD
    params, grads = _take_gradients(group, unused=unused)
    if group.reshard_after_backward:
        group.reshard()
    for index, grad in enumerate(grads):  # one by one, each frees its half-precision one
        grads[index] = grad.to(group._reduce_dtype or grad.dtype).contiguous()
        del grad
    shards, replicas = fsdp.shard_group(group), _replicas(group)
    collective: exchange.ReduceScatter | exchange.AllReduce | None = None
    if shards.size() > 1:
        collective = exchange.ReduceScatter(grads, shards, label)
    elif replicas is not None:
        collective = exchange.AllReduce(grads, replicas, label)
    if collective is not None:
        _try_spare(group)
        reduction = collective

        def run() -> None:
            grads[:] = reduction.run()

        meet(run)
    else:
        meet(lambda: None)
    for param, mean in zip(params, grads, strict=True):
        _keep(param, mean.to(group._orig_dtype))


def _take_gradients(group: FSDPParamGroup, *, unused: bool) -> tuple[list[FSDPParam], list[torch.Tensor]]:
    params, grads = [], []
    for param in group.fsdp_params:
        if not hasattr(param, "_unsharded_param"):
            continue
        param.accumulate_unsharded_grad_if_needed()
        grad = param.unsharded_accumulated_grad
        grad = param._unsharded_param.grad if grad is None else grad
        param.unsharded_accumulated_grad = param._unsharded_param.grad = None
        if grad is None:
            if not (unused and param._unsharded_param.requires_grad):
                continue
            grad = torch.zeros(param._orig_size, dtype=param._unsharded_param.dtype, device=param.device)
        params.append(param)
        grads.append(grad)
    return params, grads


def _keep(param: FSDPParam, mean: torch.Tensor) -> None:
    """Add this rank's rows to the sharded gradient, and tell hooks on the sharded parameter, as FSDP2 does."""
    sharded = param.sharded_param
    if sharded.grad is not None:
        cast(DTensor, sharded.grad)._local_tensor.add_(mean)
    else:
        sharded.grad = param.to_sharded_dtensor(mean.view(param.sharded_size))
    hooks = cast("dict[int, Callable[[nn.Parameter], None]] | None", sharded._post_accumulate_grad_hooks)
    for hook in (hooks or {}).values():
        hook(sharded)


def _try_spare(group: FSDPParamGroup) -> None:
    """Allocate and free: a rank without memory fails here, before the others wait for it."""
    torch.empty(SPARE_BYTES, dtype=torch.uint8, device=group.device)
