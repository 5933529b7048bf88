"""When each rank of a pipeline really computed: what `Pipeline.watch` sees, as a `plan.timeline.Timeline` of all ranks.

    with record_timeline(pipeline) as events:      # on every rank
        model(**batch).loss.backward()
    measured = gather_timeline(events, pipeline.group)
    measured.bubble()                              # idle share from the first action of any rank to the last

A span is a computation without the messages before and after it: what a rank waits for, sends and receives is idle. The
clock is the system's monotonic one, which all processes of a machine share, so that nothing has to be aligned; ranks on
several machines are refused (`verify_one_clock`). An asynchronous schedule is drained before and after, and recorded
over several batches (`num_recorded`), so that it shows the order of `plan_schedule`.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from hfdist.errors import ConfigError, say
from hfdist.plan.schedule import NUM_UNFLUSHED, Action, Schedule, plan_schedule
from hfdist.plan.timeline import Span, Timeline

if TYPE_CHECKING:
    import torch.distributed as dist

# One computation of a rank: action, start and end in seconds.
Event = tuple[Action, float, float]


class Watched(Protocol):
    """What is asked of a pipeline (`hfdist.parallel.pipeline.Pipeline`)."""

    watch: Any  # watch(stage, kind, micro_batch, begins), or None
    runs: str
    num_micro_batches: int
    applied: Any
    group: Any

    def drain(self) -> None:
        """Finish what is in flight, on all ranks together."""


@contextmanager
def record_timeline(pipeline: Watched) -> Iterator[list[Event]]:
    """This rank's computations of the block, oldest first; complete once the block has ended. All ranks enter it."""
    events: list[Event] = []
    begun: list[float] = []

    def watch(stage: int, kind: Any, micro_batch: int, begins: bool) -> None:
        if begins:
            begun.append(time.monotonic())
        else:
            events.append((Action(stage, kind, micro_batch), begun.pop(), time.monotonic()))

    pipeline.drain()
    before, pipeline.watch = pipeline.watch, watch
    try:
        yield events
        pipeline.drain()
    finally:
        pipeline.watch = before


class Recorder:
    """Records the batches of a training loop from number `first` on: `turn(number)` as each begins, `stop()` after."""

    def __init__(self, pipeline: Watched, *, first: int) -> None:
        """Raises ConfigError for ranks on several machines. All ranks of the pipeline call it."""
        verify_one_clock(pipeline.group)
        self.pipeline, self.first = pipeline, first
        self.schedule = schedule_of(pipeline)
        self._last = first + num_recorded(pipeline.runs) - 1
        self._recording: Any = None
        self._events: list[Event] = []

    def turn(self, number: int) -> None:
        """Batch `number` begins."""
        if number == self.first:
            self._recording = record_timeline(self.pipeline)
            self._events = self._recording.__enter__()
        elif number > self._last:
            self.stop()

    def stop(self) -> None:
        """No more batches; nothing when it has stopped before."""
        if self._recording is not None:
            self._recording.__exit__(None, None, None)
            self._recording = None

    def gather(self) -> Timeline:
        """What was recorded, of all ranks of the pipeline; the same on each of them."""
        self.stop()
        return gather_timeline(self._events, self.pipeline.group)


def schedule_of(pipeline: Watched) -> Schedule:
    """The order that `pipeline` really runs."""
    return plan_schedule(
        pipeline.runs,
        num_ranks=pipeline.applied.num_ranks,
        num_micro_batches=pipeline.num_micro_batches,
        num_virtual_stages=len(pipeline.applied.stages),
    )


def num_recorded(schedule: str) -> int:
    """Batches that show `schedule`: one, or as many as are planned of one that is never flushed."""
    return NUM_UNFLUSHED if schedule == "pipedream" else 1


def gather_timeline(events: Sequence[Event], group: dist.ProcessGroup) -> Timeline:
    """The timeline of all ranks of `group`, on each of them."""
    import torch.distributed as dist

    ranks: list[Sequence[Event]] = [()] * dist.get_world_size(group)
    dist.all_gather_object(ranks, list(events), group=group)
    return build_timeline(ranks)


def build_timeline(ranks: Sequence[Sequence[Event]]) -> Timeline:
    """Events by rank -> a timeline in seconds. Its first action starts at 0, its first micro-batch is number 0."""
    every = [event for events in ranks for event in events]
    zero = min(start for _, start, _ in every)
    first = min(action.micro_batch for action, _, _ in every)
    spans = tuple(
        Span(rank, Action(action.stage, action.kind, action.micro_batch - first), start - zero, end - zero)
        for rank, events in enumerate(ranks)
        for action, start, end in events
    )
    return Timeline(len(ranks), spans)


def verify_one_clock(group: dist.ProcessGroup) -> None:
    """Raise ConfigError when ranks of `group` are on several machines, whose clocks have nothing in common."""
    import torch.distributed as dist

    machines: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(machines, socket.gethostname(), group=group)
    if len(set(machines)) > 1:
        raise ConfigError(
            say(
                given=f"a timeline of a pipeline over {len(set(machines))} machines",
                expected="ranks that share one monotonic clock",
                do="Leave --timeline out, or keep the pipeline within a machine.",
            )
        )


def as_record(schedule: Schedule, timeline: Timeline) -> dict[str, Any]:
    """Both as json takes them; `from_record` is the way back."""
    return {
        "schedule": schedule.name,
        "num_ranks": schedule.num_ranks,
        "num_micro_batches": schedule.num_micro_batches,
        "num_virtual_stages": schedule.num_virtual_stages,
        # rank, stage, kind, micro-batch, start and end in seconds
        "spans": [
            (s.rank, s.action.stage, s.action.kind, s.action.micro_batch, round(s.start, 7), round(s.end, 7))
            for s in timeline.spans
        ],
    }


def from_record(line: Mapping[str, Any]) -> tuple[Schedule, Timeline]:
    """The schedule and the measured timeline that `as_record` wrote."""
    schedule = plan_schedule(
        line["schedule"],
        num_ranks=line["num_ranks"],
        num_micro_batches=line["num_micro_batches"],
        num_virtual_stages=line["num_virtual_stages"],
    )
    spans = (Span(rank, Action(stage, kind, m), start, end) for rank, stage, kind, m, start, end in line["spans"])
    return schedule, Timeline(schedule.num_ranks, tuple(spans))
