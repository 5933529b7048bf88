"""B32: an overflow that ends when the scale is small enough, and one that does not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.models import seeded
from tests.parity.loops import digest, whole_parameters
from tests.pool import Pools
from tests.worker import make_accelerator

# The gradient of a layer's output, in fp16: times 2**9 it is below 65504, times 2**10 above.
SLOPE = 100.0


def _train(stage: int, steps: int, slope: float, amp: dict[str, Any]) -> dict[str, Any]:
    from hfdist.errors import DistributedError
    from hfdist.plugins import AmpPlugin, ZeroPlugin

    plugins = [ZeroPlugin(stage=stage), AmpPlugin(dtype="fp16", **amp)]
    accelerator = make_accelerator(plugins=plugins, env={"HFDIST_SCHEDULER_STEP": "update"})
    model = seeded(nn.Linear, 3, 5)
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(inner, lambda step: 0.5**step)
    model, optimizer, schedule = accelerator.prepare(model, inner, schedule)
    seen: dict[str, Any] = {"scales": [], "skipped": [], "lr": [], "error": ""}
    before = digest(whole_parameters(accelerator, model))
    seen["unmoved"] = 0
    try:
        for _ in range(steps):
            seen["scales"].append(accelerator.scaler.get_scale())
            accelerator.backward((model(torch.full((1, 3), 0.01)) * slope).sum())
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            seen["skipped"].append(accelerator.optimizer_step_was_skipped)
            seen["lr"].append(optimizer.param_groups[0]["lr"])
            seen["unmoved"] += digest(whole_parameters(accelerator, model)) == before
    except DistributedError as error:
        seen["error"] = str(error)
    return seen


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("world_size", [2, 3])
def test_it_ends(pool: Pools, stage: int, world_size: int) -> None:
    """2^16 with overflow above 2^9: seven skips, then a step; the scheduler counts real steps only."""
    for seen in pool(world_size).run(_train, stage, 9, SLOPE, {}):
        assert seen["error"] == ""
        assert seen["scales"] == [2.0**power for power in (16, 15, 14, 13, 12, 11, 10, 9, 9)]
        assert seen["skipped"] == [True] * 7 + [False] * 2
        assert seen["lr"] == [1.0] * 7 + [0.5, 0.25]
        assert seen["unmoved"] == 7


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize(
    ("slope", "amp", "skips"),
    [
        (SLOPE, {"max_skipped_steps": 6}, 6),
        (SLOPE, {"min_scale": 2.0**12}, 4),
        (float("inf"), {"max_skipped_steps": 3}, 3),
        (float("inf"), {"init_scale": 8.0}, 3),
    ],
    ids=str,
)
def test_it_goes_on(pool: Pools, stage: int, slope: float, amp: dict[str, Any], skips: int) -> None:
    """Beyond `max_skipped_steps`, or at the smallest scale: an error on every rank that names the parameter."""
    for seen in pool(2).run(_train, stage, 60, slope, amp):
        assert "weight" in seen["error"] or "bias" in seen["error"], seen
        assert len(seen["skipped"]) == skips, seen
        assert all(seen["skipped"])
        assert set(seen["lr"]) == {1.0}
        assert seen["unmoved"] == skips


def test_hysteresis(pool: Pools) -> None:
    """Two overflows in a row before the scale backs off."""
    seen = pool(2).run(_train, 2, 3, float("inf"), {"hysteresis": 2})[0]
    assert seen["scales"] == [2.0**16, 2.0**16, 2.0**15]
