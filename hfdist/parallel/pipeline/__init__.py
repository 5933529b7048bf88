"""Pipeline parallelism of an unmodified model in an unmodified loop.

    pipeline = apply_pipeline(model, group, schedule="1f1b", num_micro_batches=4)
    loss = model(**batch).loss      # the schedule ran, forward and backward; the same loss on every rank
    loss.backward()                 # gradients appear

This file is the order; each step has its own: `cut` (who gets what), `apply` (free the rest), `view` (what a stage
runs), `stage` and `schedules` (torch's runtime), `run` (a batch), `ties`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import nn

from hfdist.models.stages import find_stage_parts
from hfdist.parallel.pipeline.apply import apply_cut
from hfdist.parallel.pipeline.cut import Split, plan_cut
from hfdist.parallel.pipeline.run import LossFn, Pipeline
from hfdist.parallel.pipeline.schedules import resolve_schedule

__all__ = ["Pipeline", "apply_pipeline"]


def apply_pipeline(
    model: nn.Module,
    group: dist.ProcessGroup,
    *,
    schedule: str = "1f1b",
    num_micro_batches: int,
    num_virtual_stages: int | None = None,
    split: Split = "auto",
    loss_fn: LossFn | None = None,
    example: Mapping[str, Any] | None = None,
) -> Pipeline:
    """Cut `model` (the same on all ranks) over `group`, in place, and let `model(**batch)` run `schedule`.

    `num_virtual_stages`: model stages a rank; None: 2 where the schedule needs several. `loss_fn(outputs, batch)`: the
    loss of a micro-batch, instead of the model's own. `example`: a batch, for a model that does not take `input_ids`.
    Raises ConfigError, the same on every rank, for what cannot be cut or scheduled.
    """
    num_ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    runs, virtual = resolve_schedule(schedule, num_ranks, num_micro_batches, num_virtual_stages)
    cut = plan_cut(find_stage_parts(model, example=example), num_ranks * virtual, split=split)
    applied = apply_cut(model, cut, rank, num_ranks=num_ranks, schedule=schedule)
    return Pipeline(
        model, applied, group, schedule=schedule, runs=runs, num_micro_batches=num_micro_batches, loss_fn=loss_fn
    )
