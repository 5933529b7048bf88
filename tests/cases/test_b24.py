"""B24: fewer micro-batches than stages. 4 stages of Linear(8, 8), batch 8, m = 1, 2: gradients equal one process's."""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor, nn

from tests.parity.pipelines import pipeline_of
from tests.pool import Pools


class Stack(nn.Module):
    """`depth` Linear(8, 8) with tanh between; x (rows, 8), labels (rows, 8) -> {"loss", "y"}."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(depth)])

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        for layer in self.layers:
            x = layer(torch.tanh(x))
        output = {"y": x}
        if labels is not None:
            output["loss"] = nn.functional.mse_loss(x, labels)
        return output


def build(depth: int) -> Stack:
    state = torch.get_rng_state()
    torch.manual_seed(2)
    model = Stack(depth).to(torch.float64)
    torch.set_rng_state(state)
    return model


def batch(rows: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(4)
    return {name: torch.randn(rows, 8, generator=generator, dtype=torch.float64) for name in ("x", "labels")}


def gradients(schedule: str, number: int, rows: int, depth: int) -> tuple[dict[str, Tensor], float, float, str]:
    start = time.monotonic()
    model = build(depth)
    pipeline = pipeline_of(model, schedule=schedule, num_micro_batches=number, example=batch(2))
    loss = model(**batch(rows))["loss"]
    loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return found, loss.item(), time.monotonic() - start, pipeline.describe()


def assert_equal_to_one_process(ranks: list[tuple], rows: int, depth: int) -> None:
    model = build(depth)
    loss = model(**batch(rows))["loss"]
    loss.backward()
    want = dict(model.named_parameters())
    assert {name for found, *_ in ranks for name in found} == want.keys()
    for found, value, *_ in ranks:
        assert value == pytest.approx(loss.item(), rel=1e-12)
        for name, gradient in found.items():
            assert float((gradient - want[name].grad).abs().max()) <= 1e-12


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zero-bubble", "zbv"])
def test_fewer_micro_batches_than_stages(pool: Pools, schedule: str, number: int) -> None:
    depth = 4 if schedule in ("gpipe", "1f1b") else 8
    ranks = pool(4).run(gradients, schedule, number, 8, depth)
    assert_equal_to_one_process(ranks, 8, depth)
    assert all(seconds < 20 for _, _, seconds, _ in ranks)
    # 1f1b has nothing to alternate: whoever asks is told.
    assert all(("in the order of gpipe" in text) == (schedule == "1f1b") for *_, text in ranks)
