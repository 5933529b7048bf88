"""B33: learning rates: one step per update as an option, and accelerate's rule of `num_processes` steps per update."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import get_linear_schedule_with_warmup

from tests.models import seeded
from tests.pool import Pools
from tests.worker import make_accelerator


def _train(stage: int, rule: str, gas: int, updates: int, total: int, order: str) -> list[float]:
    """The learning rate after each update; linear from 1 to 0 over `total` updates."""
    from hfdist.plugins import ZeroPlugin

    env = {"HFDIST_SCHEDULER_STEP": "update"} if rule == "update" else {}
    accelerator = make_accelerator(plugins=[ZeroPlugin(stage=stage)], gradient_accumulation_steps=gas, env=env)
    model = seeded(nn.Linear, 4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    steps = total * (accelerator.num_processes if rule == "num_processes" else 1)
    schedule = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=0, num_training_steps=steps)
    if rule == "unprepared":
        model, optimizer = accelerator.prepare(model, optimizer)
    elif order == "schedule first":
        schedule, optimizer, model = accelerator.prepare(schedule, optimizer, model)
    else:
        model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    rates = []
    for _ in range(updates * gas):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(3, 4)).mean())
            optimizer.step()
            if rule != "unprepared" or accelerator.sync_gradients:
                schedule.step()
            optimizer.zero_grad()
            if accelerator.sync_gradients:
                rates.append(optimizer.param_groups[0]["lr"])
    assert schedule.get_last_lr() == [rates[-1]]
    return rates


@pytest.mark.parametrize("rule", ["update", "num_processes", "unprepared"])
@pytest.mark.parametrize(
    ("stage", "world_size", "gas", "order"),
    [
        (0, 2, 2, "model first"),
        (1, 2, 2, "schedule first"),
        (2, 3, 1, "model first"),
        (3, 2, 2, "model first"),
        (3, 4, 3, "schedule first"),
    ],
)
def test_learning_rates(pool: Pools, rule: str, stage: int, world_size: int, gas: int, order: str) -> None:
    """.75 after two of eight updates under either rule; the whole line down to 0."""
    for rates in pool(world_size).run(_train, stage, rule, gas, 8, 8, order):
        assert rates == pytest.approx([1 - (update + 1) / 8 for update in range(8)], abs=1e-9)
        assert rates[1] == pytest.approx(0.75, abs=1e-9)
