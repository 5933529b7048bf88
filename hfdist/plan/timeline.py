"""When each rank of a pipeline computes and when it waits, worked out from its schedule.

A computation starts when its rank is free and what it needs is there: a forward the forward of the stage before, a
backward its own forward and the backward of the stage after, the weight half its input half. Sending takes no time.

    1f1b, p=2, m=2     rank 0   F0 F1 .. B0 B0 B1 B1      (a backward takes twice a forward)
                       rank 1   .. F0 B0 B0 F1 B1 B1
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hfdist.plan.schedule import Action, Schedule

# Time units of a whole rank's share of the model: a backward is two forwards, half of it for the weights.
DURATIONS = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}


@dataclass(frozen=True)
class Span:
    """`action` on `rank` from `start` to `end` (any unit of time)."""

    rank: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """What all ranks did, measured or worked out."""

    num_ranks: int
    spans: tuple[Span, ...]

    @property
    def end(self) -> float:
        return max(span.end for span in self.spans)

    def bubble(self, start: float = 0.0, end: float | None = None) -> float:
        """Idle share of all ranks between two times (the whole by default)."""
        end = self.end if end is None else end
        busy = sum(max(0.0, min(span.end, end) - max(span.start, start)) for span in self.spans)
        return 1.0 - busy / (self.num_ranks * (end - start))

    def activations_held(self, rank: int, num_virtual_stages: int) -> float:
        """Most micro-batches whose activations the rank holds at once, in shares of a whole rank's layers.

        They are needed from the start of a forward to the end of the backward (of its weight half, where split).
        """
        events: list[tuple[float, int]] = []
        for span in self.spans:
            if span.rank == rank and span.action.kind == "F":
                events.append((span.start, 1))
            elif span.rank == rank and span.action.kind in ("B", "W"):
                events.append((span.end, -1))
        held = most = 0
        for _, change in sorted(events):  # at one time, what ends goes before what begins
            held += change
            most = max(most, held)
        return most / num_virtual_stages


def plan_timeline(schedule: Schedule) -> Timeline:
    """The ideal timeline: equal stages, `DURATIONS`, no time for sending. Raises AssertionError when it cannot end."""
    ended: dict[Action, float] = {}
    free = [0.0] * schedule.num_ranks
    waiting = [list(order) for order in schedule.orders]
    spans: list[Span] = []
    while any(waiting):
        moved = False
        for rank, order in enumerate(waiting):
            while order and all(need in ended for need in _needs(order[0], schedule, ended)):
                action = order.pop(0)
                ready = max((ended[need] for need in _needs(action, schedule, ended)), default=0.0)
                start = max(free[rank], ready)
                free[rank] = start + DURATIONS[action.kind] / schedule.num_virtual_stages
                ended[action] = free[rank]
                spans.append(Span(rank, action, start, free[rank]))
                moved = True
        assert moved, f"{schedule.name} waits for itself: {[order[:1] for order in waiting]}"
    return Timeline(schedule.num_ranks, tuple(spans))


def _needs(action: Action, schedule: Schedule, ended: Iterable[Action]) -> Sequence[Action]:
    stage, number = action.stage, action.micro_batch
    if action.kind == "F":
        return [Action(stage - 1, "F", number)] if stage else []
    if action.kind == "W":
        return [Action(stage, "I", number)]
    needs = [Action(stage, "F", number)]
    if stage + 1 < schedule.num_stages:
        # The stage after may run its backward whole or in halves; either gives what is needed here.
        whole = Action(stage + 1, "B", number)
        needs.append(whole if whole in ended else Action(stage + 1, "I", number))
    return needs


def steady_bubble(schedule: Schedule, timeline: Timeline) -> float:
    """Idle share; of an asynchronous schedule that of its middle, when every rank has begun and none has ended."""
    if schedule.name != "pipedream":
        return timeline.bubble()
    by_rank = [[s for s in timeline.spans if s.rank == rank] for rank in range(schedule.num_ranks)]
    begun = max(min(s.start for s in spans if s.action.kind == "B") for spans in by_rank)
    ending = min(max(s.end for s in spans if s.action.kind == "F") for spans in by_rank)
    return timeline.bubble(begun, ending)
