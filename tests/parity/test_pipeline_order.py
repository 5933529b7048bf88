"""What a rank computes, in which order, and what it holds meanwhile: facts of each schedule that need no clock."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
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
