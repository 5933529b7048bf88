"""The whole order in which a model becomes distributed, in place. Each step has a package or file of its own.

    fp32 masters      (`amp`)                 under fp16 and bf16
    equal weights                             those of the first rank, where ranks will hold different parts
    tensor split      (`tensor`)              on the whole model, so that its plan is complete
    pipeline cut      (`pipeline`)            then each rank drops the blocks of other stages
    ZeRO              (`zero`)                what is left on the rank, over its data axis

The handles of the first steps hang on the `ZeroModel`: they know how this rank's parameters lie in the whole model.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import nn

from hfdist import comm
from hfdist.errors import ConfigError, say
from hfdist.mesh import Grid
from hfdist.models.stages import find_stage_parts
from hfdist.parallel import staged
from hfdist.parallel.pipeline import Pipeline
from hfdist.parallel.pipeline.apply import apply_cut
from hfdist.parallel.pipeline.cut import plan_cut
from hfdist.parallel.pipeline.schedules import resolve_schedule
from hfdist.parallel.split import SplitModel
from hfdist.parallel.tensor import apply_tensor_parallel
from hfdist.parallel.zero import ZeroModel, apply_zero
from hfdist.plugins import PipelineParallelPlugin, TensorParallelPlugin

logger = logging.getLogger(__name__)


def apply_model_axes(
    model: nn.Module, grid: Grid, *, tensor: TensorParallelPlugin | None, pipeline: PipelineParallelPlugin | None
) -> SplitModel | None:
    """Split and cut `model` over the tensor and pipeline ranks of `grid`; None when there are none of both.

    Raises ConfigError, the same on every rank, for a model that cannot be split or cut so.
    """
    if not grid.model_groups:
        return None
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ConfigError(
            say(
                given=f"a {type(model).__name__} on the meta device with tensor or pipeline parallelism",
                expected="a model with its weights",
                do="Build or load it on the CPU.",
            )
        )
    if pipeline is not None and tensor is not None and tensor.sequence_parallel:
        raise ConfigError(
            say(
                given="sequence_parallel together with a pipeline",
                expected="hidden states that are whole where one stage hands them to the next",
                do="Leave sequence_parallel out, or set pp_size to 1.",
            )
        )
    names = [(name, tuple(p.shape)) for name, p in model.named_parameters(remove_duplicate=False)]
    for group in grid.model_groups:
        for tensor_ in (*model.parameters(), *model.buffers()):
            comm.broadcast(tensor_.data, group, label="initial weights")
    # Before anything is split: it runs the model.
    parts = find_stage_parts(model) if pipeline is not None and grid.pp_group is not None else None
    split = SplitModel(model, grid, dict(names), sum(p.numel() for p in model.parameters()))
    if tensor is not None and grid.tp_group is not None:
        plan = tensor.plan if tensor.plan == "auto" else dict(tensor.plan)
        split.tensor = apply_tensor_parallel(
            model, grid.tp_group, plan=plan, sequence_parallel=tensor.sequence_parallel
        )
        split.name_ties()
        share = split.tensor.block_share
        if grid.rank == 0 and share > 1.2 / grid.tp_size:
            logger.warning(
                "Each of %d tensor ranks holds %.0f %% of the blocks of %s, where an even split is %.0f %%: its plan "
                "leaves much of them whole. Results are right; memory is saved on the rest only.",
                grid.tp_size, 100 * share, type(model).__name__, 100 / grid.tp_size,
            )  # fmt: skip
    if parts is not None and pipeline is not None and grid.pp_group is not None:
        size = grid.pp_size
        num_micro_batches = pipeline.num_micro_batches or size
        runs, virtual = resolve_schedule(pipeline.schedule, size, num_micro_batches, pipeline.num_virtual_stages)
        cut = plan_cut(parts, size * virtual, split=pipeline.split)
        applied = apply_cut(model, cut, grid.pp_rank, num_ranks=size, schedule=pipeline.schedule)
        split.pipeline = Pipeline(
            model,
            applied,
            grid.pp_group,
            schedule=pipeline.schedule,
            runs=runs,
            num_micro_batches=num_micro_batches,
            loss_fn=pipeline.loss_fn,
        )
    return split


def apply_sharding(
    zero: ZeroModel,
    split: SplitModel | None,
    device: torch.device,
    *,
    synchronise: bool = True,
    loss_scale: Callable[[], float] = lambda: 1.0,
) -> None:
    """Shard what this rank has over its data axis, and lead what the outer axes need through it."""
    zero.split = split
    apply_zero(zero, device, synchronise=synchronise)
    if split is None:
        return
    if split.tensor is not None:
        zero.before_reduce = split.reduce_partial
    pipeline = split.pipeline
    if pipeline is not None:
        pipeline.before_run = lambda: staged.before_run(zero)
        pipeline.after_run = lambda: staged.after_run(zero)
        pipeline.add_gradients = lambda gradients, factor: staged.add_gradients(zero, gradients, factor)
        pipeline.loss_scale = loss_scale
