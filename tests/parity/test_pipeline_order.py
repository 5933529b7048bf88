"""What a rank computes, in which order, and what it holds meanwhile: facts of each schedule that need no clock."""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hfdist.plan.schedule import plan_schedule
from tests.parity.pipelines import Spec, make_batch, pipeline_of
from tests.pool import Pools


def _order(schedule: str, pp: int, number: int) -> list[tuple[int, str, int]]:
    """(stage, kind, micro-batch) of one batch, the second, as this rank begins and ends each."""
    model = Spec(layers=2 * pp + 1).build()
    pipeline = pipeline_of(model, schedule=schedule, num_micro_batches=number)
    model(**make_batch(number, 5)).loss.backward()
    begun: list[tuple[int, str, int]] = []
    ended: list[tuple[int, str, int]] = []

    def watch(stage: int, kind: str, micro_batch: int, begins: bool) -> None:
        (begun if begins else ended).append((stage, kind, micro_batch))

    pipeline.watch = watch
    model(**make_batch(number, 7)).loss.backward()
    assert begun == ended, "a computation ends before the next one begins"
    return begun


@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zero-bubble", "zbv"])
def test_what_runs_is_what_is_planned(pool: Pools, schedule: str, pp: int) -> None:
    """The order of `hfdist schedule`; pipedream's is in `test_pipeline_asynchronous`."""
    planned = plan_schedule(schedule, num_ranks=pp, num_micro_batches=2 * pp)
    for rank, order in enumerate(pool(pp).run(_order, schedule, pp, 2 * pp)):
        assert order == [(action.stage, action.kind, action.micro_batch) for action in planned.orders[rank]]


class _Saved:
    """A tensor that autograd keeps for backward; goes away with it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def _held(schedule: str, number: int) -> int:
    """Most micro-batches of which this rank's autograd keeps activations at once."""
    model = Spec(layers=5).build()
    pipeline = pipeline_of(model, schedule=schedule, num_micro_batches=number)
    alive: dict[int, weakref.WeakSet[_Saved]] = {}
    current = most = 0

    def watch(_: int, kind: str, micro_batch: int, begins: bool) -> None:
        nonlocal current, most
        current = micro_batch
        if kind == "F" and not begins:
            assert alive[micro_batch], "a forward keeps something"
            most = max(most, sum(len(saved) > 0 for saved in alive.values()))

    def pack(tensor: Tensor) -> Any:
        saved = _Saved(tensor)
        alive.setdefault(current, weakref.WeakSet()).add(saved)
        return saved

    pipeline.watch = watch
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved.tensor):
        model(**make_batch(number, 5)).loss.backward()
    return most


@pytest.mark.parametrize("pp", [2, 4])
def test_1f1b_holds_at_most_p_micro_batches_where_gpipe_holds_all(pool: Pools, pp: int) -> None:
    assert pool(pp).run(_held, "gpipe", 7) == [7] * pp
    assert pool(pp).run(_held, "1f1b", 7) == [pp - rank for rank in range(pp)]


def _recorded(schedule: str, first: int | None) -> tuple[list[float], list[list[tuple[int, str, int]]]]:
    """Five updates, with a recorder from batch `first` on: (losses, what it saw of every rank)."""
    from hfdist.measure.timeline import Recorder

    model = Spec(layers=5).build()
    pipeline = pipeline_of(model, schedule=schedule, num_micro_batches=4)
    recorder = None if first is None else Recorder(pipeline, first=first)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for number in range(5):
        if recorder is not None:
            recorder.turn(number)
        loss = model(**make_batch(4, 5, seed=number)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    pipeline.drain()
    dist.barrier(pipeline.group)  # a rank that leaves takes its connections with it
    if recorder is None:
        return losses, []
    timeline = recorder.gather()
    assert pipeline.watch is None
    for rank in range(2):
        mine = [span for span in timeline.spans if span.rank == rank]
        assert all(span.start <= span.end for span in mine)
        assert all(before.end <= after.start for before, after in itertools.pairwise(mine))
    actions = [[span.action for span in timeline.spans if span.rank == rank] for rank in range(2)]
    return losses, [[(a.stage, a.kind, a.micro_batch) for a in order] for order in actions]


@pytest.mark.parametrize(("schedule", "first"), [("1f1b", 0), ("zero-bubble", 4), ("pipedream", 1), ("pipedream", 2)])
def test_a_recorder_sees_the_planned_order_of_all_ranks_and_changes_no_loss(
    pool: Pools, schedule: str, first: int
) -> None:
    planned = plan_schedule(schedule, num_ranks=2, num_micro_batches=4)
    want = [[(a.stage, a.kind, a.micro_batch) for a in order] for order in planned.orders]
    plain = pool(2).run(_recorded, schedule, None)
    for (losses, orders), (without, _) in zip(pool(2).run(_recorded, schedule, first), plain, strict=True):
        assert orders == want
        assert losses == without
