"""The idle share of each schedule, measured through `model(**batch)` with blocks that sleep, against the formulas."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hfdist.plan.schedule import Action, plan_schedule
from hfdist.plan.timeline import Span, Timeline, steady_bubble
from tests.parity.pipelines import Spec, make_batch, pipeline_of
from tests.pool import Pools

SLEEP = 0.2  # seconds of a block's forward, of its backward for inputs and of that for weights
MICRO_BATCHES = 8


class _SleepBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, clock: list[float]) -> Tensor:
        ctx.clock = clock
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        time.sleep(ctx.clock[0])
        return gradient, None


class _Sleeping(nn.Linear):
    """A linear layer that sleeps in its forward, in the backward of its input and in that of its weight, apart."""

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.clock[0])
        weight = _SleepBackward.apply(self.weight, self.clock)
        return nn.functional.linear(_SleepBackward.apply(x, self.clock), weight, self.bias)


def _spans(schedule: str, layers: int, batches: int) -> list[tuple[int, str, int, float, float]]:
    model = Spec("llama", layers=layers).build(torch.float32)
    clock = [0.0]
    for layer in model.model.layers:
        layer.mlp.down_proj.__class__ = _Sleeping
        layer.mlp.down_proj.clock = clock
    pipeline = pipeline_of(model, schedule=schedule, num_micro_batches=MICRO_BATCHES)
    batch = make_batch(MICRO_BATCHES, 5)
    for _ in range(2 if schedule == "pipedream" else 1):  # the connections are made
        model(**batch).loss.backward()
    pipeline.drain()
    spans: list[tuple[int, str, int, float, float]] = []
    begun: list[float] = []

    def watch(stage: int, kind: str, number: int, begins: bool) -> None:
        if begins:
            begun.append(time.monotonic())
        else:
            spans.append((stage, kind, number, begun.pop(), time.monotonic()))

    pipeline.watch, clock[0] = watch, SLEEP
    for _ in range(batches):
        model(**batch).loss.backward()
    pipeline.drain()
    return spans


def _measure(pool: Pools, schedule: str, p: int) -> float:
    ranks = pool(p).run(_spans, schedule, 2 * p, 3 if schedule == "pipedream" else 1)
    spans = tuple(
        Span(rank, Action(stage, kind, number), start, end)
        for rank, several in enumerate(ranks)
        for stage, kind, number, start, end in several
    )
    timeline = Timeline(p, spans)
    planned = plan_schedule(schedule, num_ranks=p, num_micro_batches=MICRO_BATCHES)
    if schedule == "pipedream":
        return steady_bubble(planned, timeline)
    return timeline.bubble(start=min(span.start for span in spans))


@pytest.mark.parametrize("p", [2, 4])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
def test_bubbles_are_the_formulas(pool: Pools, schedule: str, p: int) -> None:
    formula = plan_schedule(schedule, num_ranks=p, num_micro_batches=MICRO_BATCHES).bubble_formula
    assert formula is not None
    assert _measure(pool, schedule, p) == pytest.approx(formula[1], abs=0.03)


@pytest.mark.parametrize("schedule", ["zero-bubble", "zbv"])
@pytest.mark.parametrize("p", [2, 4])
def test_zero_bubble_idles_less_than_half(pool: Pools, schedule: str, p: int) -> None:
    one = plan_schedule("1f1b", num_ranks=p, num_micro_batches=MICRO_BATCHES).bubble_formula
    assert one is not None
    assert _measure(pool, schedule, p) < one[1] / 2


def test_pipedream_does_not_idle(pool: Pools) -> None:
    assert _measure(pool, "pipedream", 4) < 0.05
