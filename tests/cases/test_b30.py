"""B30: an overflow on one rank skips the step on all: nothing moves but the loss scale."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tests.models import seeded
from tests.parity.loops import digest, whole_parameters
from tests.pool import Pools
from tests.worker import make_accelerator


def _spoil(model: nn.Module, value: float) -> None:
    """Put `value` into this rank's own part of a gradient, one that has elements here."""
    for parameter in model.parameters():
        gradient = parameter.grad
        local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        if local is not None and local.numel():
            local.view(-1)[0] = value
            return
    raise AssertionError("this rank holds no gradient")


def _train(stage: int, bad_rank: int, how: str, gas: int, num_optimizers: int) -> dict[str, Any]:
    """One good step, one spoiled, one good; what is seen after each."""
    from hfdist.plugins import AmpPlugin, ZeroPlugin

    plugins = [ZeroPlugin(stage=stage), AmpPlugin(dtype="fp16")]
    accelerator = make_accelerator(
        plugins=plugins, gradient_accumulation_steps=gas, env={"HFDIST_SCHEDULER_STEP": "update"}
    )
    model = seeded(nn.Sequential, nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    groups = [[*model[0].parameters()], [*model[2].parameters()]] if num_optimizers == 2 else [[*model.parameters()]]
    inner = [torch.optim.AdamW(group, lr=0.01) for group in groups]
    schedules = [torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)) for o in inner]
    model, *prepared = accelerator.prepare(model, *inner, *schedules)
    optimizers, schedules = prepared[:num_optimizers], prepared[num_optimizers:]
    rank = accelerator.process_index
    seen: dict[str, Any] = {"scale": [accelerator.scaler.get_scale()]}
    for key in ("parameters", "lr", "steps", "skipped"):
        seen[key] = []
    seen["parameters"].append(digest(whole_parameters(accelerator, model)))
    for step in range(3):
        for micro in range(gas):
            with accelerator.accumulate(model):
                x = torch.full((4, 6), 0.01 * (rank + 1))
                spoil = step == 1 and rank == bad_rank and micro == gas - 1
                if spoil and how == "data":
                    x[2, 3] = float("inf")
                accelerator.backward(model(x).pow(2).mean() * 1e-2)
                if spoil and how in ("inf", "nan"):
                    _spoil(model, float(how))
                if accelerator.sync_gradients and how == "clipped":
                    if spoil:
                        _spoil(model, float("inf"))
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                for optimizer in optimizers:
                    optimizer.step()
                for schedule in schedules:
                    schedule.step()
                for optimizer in optimizers:
                    optimizer.zero_grad()
        seen["scale"].append(accelerator.scaler.get_scale())
        seen["parameters"].append(digest(whole_parameters(accelerator, model)))
        seen["lr"].append([o.param_groups[0]["lr"] for o in optimizers])
        seen["steps"].append([int(state["step"]) for o in inner for state in o.state.values()])
        seen["skipped"].append(accelerator.optimizer_step_was_skipped)
    return seen


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(
    ("world_size", "bad_rank", "how", "gas"),
    [(2, 1, "inf", 1), (2, 0, "nan", 1), (3, 2, "data", 1), (2, 1, "clipped", 1), (2, 1, "inf", 3)],
)
def test_overflow_on_one_rank(pool: Pools, stage: int, world_size: int, bad_rank: int, how: str, gas: int) -> None:
    """Scale 65536 to 32768 on all; parameters, learning rate and step counts as before; then it goes on."""
    ranks = pool(world_size).run(_train, stage, bad_rank, how, gas, 1)
    for rank, seen in enumerate(ranks):
        where = f"rank {rank}: {seen}"
        assert seen["scale"] == [65536.0, 65536.0, 32768.0, 32768.0], where
        assert seen["skipped"] == [False, True, False], where
        start, first, second, third = seen["parameters"]
        assert start != first, where
        assert first == second, where
        assert second != third, where
        assert [rate for (rate,) in seen["lr"]] == pytest.approx([0.01 / 2, 0.01 / 2, 0.01 / 3]), where
        assert [set(steps) for steps in seen["steps"]] == [{1}, {1}, {2}], where
        assert seen["parameters"] == ranks[0]["parameters"]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_two_optimizers(pool: Pools, stage: int) -> None:
    """As torch's scaler documents: the optimizer whose gradients overflow is skipped (on all ranks), the other steps;
    one window backs off once."""
    ranks = pool(3).run(_train, stage, 1, "inf", 1, 2)
    for rank, seen in enumerate(ranks):
        where = f"rank {rank}: {seen}"
        assert seen["scale"] == [65536.0, 65536.0, 32768.0, 32768.0], where
        assert seen["skipped"] == [False, True, False], where
        assert seen["steps"] == [[1, 1, 1, 1], [1, 1, 2, 2], [2, 2, 3, 3]], where
        assert seen["lr"][1] == pytest.approx([0.01 / 2, 0.01 / 3]), where
        assert seen["parameters"] == ranks[0]["parameters"]
