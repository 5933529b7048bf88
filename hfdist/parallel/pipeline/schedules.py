"""hfdist's schedule names as torch's schedule objects, and what is refused before anything runs."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from hfdist.errors import ConfigError, say
from hfdist.parallel.pipeline.stage import Stage
from hfdist.plan.schedule import plan_schedule

_SEVERAL = {
    "interleaved": ScheduleInterleaved1F1B,
    "zero-bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
}
SYNCHRONOUS = ("gpipe", "1f1b", *_SEVERAL)


def resolve_schedule(
    name: str, num_ranks: int, num_micro_batches: int, num_virtual_stages: int | None
) -> tuple[str, int]:
    """(the order that really runs, stages a rank). 1f1b with fewer micro-batches than ranks has GPipe's order.

    Raises ConfigError for a name or sizes that do not go together, the same on every rank.
    """
    planned = plan_schedule(
        name, num_ranks=num_ranks, num_micro_batches=num_micro_batches, num_virtual_stages=num_virtual_stages
    )
    if name not in SYNCHRONOUS:
        raise ConfigError(
            say(
                given=f"schedule {name!r}",
                expected=f"one of {', '.join(SYNCHRONOUS)}",
                do="Choose one of them.",
            )
        )
    runs = "gpipe" if name == "1f1b" and num_micro_batches < num_ranks else name
    return runs, planned.num_virtual_stages


def build_schedule(name: str, stages: list[Stage], num_micro_batches: int) -> Any:
    """torch's schedule over this rank's `stages`; its loss is what the last stage returns."""
    if name in _SEVERAL:
        return _SEVERAL[name](stages, num_micro_batches, loss_fn=_loss, scale_grads=False)  # type: ignore[arg-type]
    kind = ScheduleGPipe if name == "gpipe" else Schedule1F1B
    return kind(stages[0], num_micro_batches, loss_fn=_loss, scale_grads=False)


def _loss(output: Tensor, _: Tensor) -> Tensor:
    return output
