"""Ranks that run different modules in one step, made right: every rank serves what another one needs.

Before each collective all ranks say what they want next (`comm.Meeting`). What is wanted by some is carried out by all,
in one order: a rank that does not need the unit gives its shard to the gather, or zeros to the reduction. A rank whose
pass has ended keeps serving until no rank wants anything. A parameter no rank used ends without a gradient.

    rank 0 runs a:  wants gather(a)   -> gather(a), gather(b)   both take part in both
    rank 1 runs b:  wants gather(b)   -> gather(a), gather(b)
"""

from __future__ import annotations

import itertools

import torch

from hfdist import comm
from hfdist.parallel import direct, fsdp
from hfdist.parallel.zero import ZeroModel


def serve(zero: ZeroModel, op: int, unit: int) -> bool:
    """Take part in another rank's `op` on one of `zero`'s units; False when the unit is not of this model."""
    numbers = {number: name for name, number in zero.unit_numbers.items()}
    if unit not in numbers:
        return False
    module = dict(zero.units)[numbers[unit]]
    group = fsdp.param_group(module)
    assert group is not None
    if op == comm.GATHER:
        _serve_gather(zero, group, module)
    elif op == comm.REDUCE:
        _serve_reduce(group, module)
    return True


def _serve_gather(zero: ZeroModel, group: fsdp.FSDPParamGroup, module: torch.nn.Module) -> None:
    shards = fsdp.shard_group(group)
    if direct.gathers(group):
        if shards.size() > 1:
            direct.serve_gather(group, "served", int8=zero.int8)
        return
    if group.is_unsharded or group._all_gather_result is not None:
        inputs = [p._sharded_param_data.to(p.param_dtype or p._sharded_param_data.dtype) for p in group.fsdp_params]
        same = len({t.dtype for t in inputs}) == 1
        flat = torch.cat(inputs if same else [t.view(torch.uint8) for t in inputs])
        with fsdp.unmet(group):
            group._all_gather_comm(flat.new_empty(flat.numel() * shards.size()), flat, shards)
        return
    with fsdp.unmet(group):
        fsdp.as_fsdp(module).unshard()
    group._to_sharded()


def _serve_reduce(group: fsdp.FSDPParamGroup, module: torch.nn.Module) -> None:
    state, reshard = group._training_state, group.reshard_after_backward
    for param in group.fsdp_params:
        if not param.sharded_param.requires_grad:
            continue
        dtype = param.reduce_dtype or param.param_dtype or param.orig_dtype
        if not hasattr(param, "_unsharded_param"):
            # Never gathered on this rank, and FSDP2 reduces only what was: give it the (freed) gathered form.
            fsdp.make_gathered_form(param)
        if param.unsharded_accumulated_grad is None:
            param.unsharded_accumulated_grad = torch.zeros(param._orig_size, dtype=dtype, device=param.device)
    group.reshard_after_backward = False
    if direct.reduces(group):
        direct.reduce(group, lambda collective: collective(), "served")
    else:
        type(group).post_backward(group)
    group.reshard_after_backward, group._training_state = reshard, state


def used_by_nobody(zero: ZeroModel) -> list[fsdp.FSDPParam]:
    """Trainable parameters that got a gradient on no rank since the last update (collective)."""
    params = [p for p in fsdp.iterate_params(zero.modules) if p.sharded_param.requires_grad]
    used = torch.tensor([p in zero.used for p in params], dtype=torch.uint8, device=zero.mesh.device_type)
    comm.all_reduce(used, zero.mesh.group, torch.distributed.ReduceOp.MAX, label="used parameters")
    return list(itertools.compress(params, (flag == 0 for flag in used.tolist())))
