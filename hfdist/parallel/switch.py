"""From one ZeRO stage to another between two steps: no restart, no disk, the same curve.

Among 1-3 only the policy changes. To and from 0 the model is laid out anew on the other mesh, unit by unit, so that a
rank never holds more than the larger of both layouts plus one unit. Gradients and optimizer state move with their
parameters; parameter objects are new, and optimizers are pointed to them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hfdist import comm
from hfdist.errors import DistributedError, say
from hfdist.parallel import fsdp
from hfdist.parallel.zero import ZeroModel

# Points optimizers from the old parameter to the new one and moves its state: mover(old, new, relayout).
StateMover = Callable[[nn.Parameter, nn.Parameter, "Relayout"], None]


class Relayout:
    """How one parameter's tensors go from the old layout (`gather`) to the new (`take`)."""

    def __init__(self, old: fsdp.FSDPParam, group: torch.distributed.ProcessGroup) -> None:
        self.old, self.group = old, group
        self.new: fsdp.FSDPParam | None = None

    def is_like_shard(self, tensor: torch.Tensor) -> bool:
        """Whether a state tensor is split as the parameter is (a step count is not)."""
        return tensor.ndim > 0 and tensor.shape == self.old.sharded_size

    def whole(self, shard: torch.Tensor) -> torch.Tensor:
        return fsdp.gather_whole(shard, self.old._orig_size[0], self.group)

    def shard(self, whole: torch.Tensor) -> torch.Tensor:
        assert self.new is not None
        return fsdp.take_shard(self.new, whole)

    def move(self, shard: torch.Tensor) -> torch.Tensor:
        """Local shard in the old layout -> local shard in the new one."""
        return self.shard(self.whole(shard))


def verify_between_steps(zero: ZeroModel, stage: int) -> None:
    """Raises DistributedError inside an accumulation window: gradients of half a window have no meaning elsewhere."""
    if zero.window_open:
        raise DistributedError(
            say(
                given=f"set_zero_stage({stage}) inside a gradient accumulation window",
                expected="a switch between two optimizer steps",
                do="Call it after the optimizer.step() that ends a window (accelerator.sync_gradients is True there).",
            )
        )


def switch_stage(zero: ZeroModel, stage: int, move_state: StateMover) -> None:
    """Bring `zero` to `stage`. `move_state` is called for every parameter while its old layout is still known."""
    zero.meeting.run(comm.SWITCH, detail=stage)
    zero.reshard()
    if zero.mesh.shape(stage) == zero.mesh.shape(zero.stage):
        zero.stage = stage
        zero.apply_policy()
        return
    zero.stage = stage
    for name, module in zero.units:
        _lay_out_anew(zero, name, module, move_state)
    zero.apply_policy()


def _lay_out_anew(zero: ZeroModel, name: str, module: nn.Module, move_state: StateMover) -> None:
    group = fsdp.param_group(module)
    if group is None:
        fsdp.undo_fully_shard(module, {})
        zero.shard_unit(name, module)
        return
    shards = fsdp.shard_group(group)
    old_params = list(group.fsdp_params)
    old_by_place = {_place(p): p for p in old_params}
    plans = {p: Relayout(p, shards) for p in old_params}
    whole = {p: plans[p].whole(fsdp.local_shard(p).detach()) for p in old_params}
    fsdp.undo_fully_shard(module, whole)
    whole.clear()
    zero.shard_unit(name, module)
    for new in fsdp.iterate_params([module]):
        old = old_by_place[_place(new)]
        plans[old].new = new
        _move_gradient(plans[old], old, new)
        move_state(old.sharded_param, new.sharded_param, plans[old])
        old.sharded_param.grad = None


def _place(param: fsdp.FSDPParam) -> tuple[int, str]:
    return id(param._module_info.module), param._module_info.param_name


@torch.no_grad()
def _move_gradient(plan: Relayout, old: fsdp.FSDPParam, new: fsdp.FSDPParam) -> None:
    gradient = old.sharded_param.grad
    if gradient is not None:
        assert isinstance(gradient, DTensor)
        new.sharded_param.grad = new.to_sharded_dtensor(plan.move(gradient._local_tensor))
