"""A pipeline stage under ZeRO: parameters gathered once before a schedule runs, gradients reduced once after it.

A schedule runs the stage many times, forward and backward mixed, on plain whole parameters (`parallel/pipeline`).
FSDP2's hooks would gather and reduce at each of these. Here they stay out of it:

    before_run       every unit gathered                       (N-1)/N x P of the stage, at every stage of ZeRO
    the schedule     plain autograd; its gradients are set aside, whole
    after_run        stages 0 and 3 free the gathered copies, 1 and 2 keep them until the window's last backward
    add_gradients    (in the loss's backward) reduced as the stage says: once a window at 0 and 1, each time at 2 and 3
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from hfdist.errors import DistributedError, say
from hfdist.parallel import fsdp
from hfdist.parallel.zero import ZeroModel


def before_run(zero: ZeroModel) -> None:
    """Gather every unit, so that the model's modules hold plain whole parameters; all dp ranks call it together."""
    fsdp.as_fsdp(zero.model)._get_fsdp_state()._lazy_init()
    for module in _in_order(zero):
        group = fsdp.param_group(module)
        if group is not None:
            group._training_state = TrainingState.FORWARD
            group.unshard()
            group.wait_for_unshard()
            group._training_state = TrainingState.IDLE


def after_run(zero: ZeroModel) -> None:
    """Put the units at rest that the ZeRO stage does not keep."""
    if zero.stage in (0, 3) or not torch.is_grad_enabled():
        zero.reshard()


@torch.no_grad()
def add_gradients(zero: ZeroModel, gradients: dict[nn.Parameter, torch.Tensor], factor: torch.Tensor) -> None:
    """Add `factor` x the whole `gradients` (by gathered parameter) to what waits, and reduce it as the stage says.

    Raises DistributedError for gradients of parameters that were replaced since their forward.
    """
    known = {
        param._unsharded_param for param in fsdp.iterate_params(zero.modules) if hasattr(param, "_unsharded_param")
    }
    if not gradients.keys() <= known:
        raise DistributedError(
            say(
                given=f"gradients of {len(gradients.keys() - known)} parameters that the model no longer has",
                expected="a loss's backward before set_zero_stage() lays the parameters out anew",
                do="Change the stage between optimizer steps; an asynchronous pipeline has a batch in flight there and "
                "must keep its stage.",
            )
        )
    for module in reversed(_in_order(zero)):
        group = fsdp.param_group(module)
        if group is None:
            continue
        for param in group.fsdp_params:
            whole = param._unsharded_param
            gradient = gradients.get(whole)
            if gradient is None:
                continue
            part = gradient * factor.to(gradient.dtype)
            if part.dtype == whole.dtype:
                whole.grad = part if whole.grad is None else whole.grad.add_(part)
            else:  # of half-precision parameters, summed in fp32: where FSDP2 keeps those of earlier micro-steps
                waiting = param.unsharded_accumulated_grad
                param.unsharded_accumulated_grad = part if waiting is None else waiting.add_(part)
        group.post_backward()
        group._training_state = TrainingState.IDLE
    if not zero.window_open:
        zero.reshard()


def _in_order(zero: ZeroModel) -> list[nn.Module]:
    """The root, which holds the embeddings, then the blocks."""
    return [zero.model, *(module for _, module in zero.blocks)]
