"""B34: a window cut short by the end of the data is divided by its real size."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.models import IGNORE, WeightedLoss
from tests.parity.loops import whole_gradients, whole_parameters
from tests.pool import Pools
from tests.worker import make_accelerator


class Slope(nn.Module):
    """w times the mean of x (batch, 1): where x is 1, the gradient is 1."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return (self.w * x).mean()


def _train(stage: int, gas: int, num_micro: int, epochs: int, how: str) -> dict[str, Any]:
    """Changes of w at each update (lr 1) and the norms that clipping reports."""
    from hfdist.plugins import ZeroPlugin

    accelerator = make_accelerator(plugins=[ZeroPlugin(stage=stage)], gradient_accumulation_steps=gas)
    model = Slope()
    rows = [torch.ones(1)] * (2 * num_micro * accelerator.num_processes)
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=1.0), DataLoader(rows, batch_size=2)
    )
    updates, norms, previous = [], [], 0.0
    for _ in range(epochs):
        for x in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(x))
                if accelerator.sync_gradients and how == "clip":
                    norms.append(accelerator.clip_grad_norm_(model.parameters(), 10.0).item())
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                value = whole_parameters(accelerator, model)["w"].item()
                updates.append(previous - value)
                previous = value
    return {"updates": updates, "norms": norms}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(
    ("world_size", "gas", "num_micro", "epochs", "how"),
    [
        (2, 4, 10, 1, "plain"),
        (2, 4, 10, 2, "clip"),
        (3, 4, 9, 2, "clip"),
        (2, 10, 3, 2, "plain"),
        (2, 3, 6, 2, "plain"),
    ],
)
def test_updates_are_one(
    pool: Pools, stage: int, world_size: int, gas: int, num_micro: int, epochs: int, how: str
) -> None:
    """Every gradient is 1, so every update is 1, the last of an epoch and the first of the next too."""
    windows = -(-num_micro // gas)
    for seen in pool(world_size).run(_train, stage, gas, num_micro, epochs, how):
        assert seen["updates"] == pytest.approx([1.0] * windows * epochs, abs=1e-6)
        if how == "clip":
            assert seen["norms"] == pytest.approx([1.0] * windows * epochs, abs=1e-6)


def _rows(num_micro: int, world_size: int) -> list[dict[str, Tensor]]:
    rows = []
    for index in range(num_micro * world_size):
        labels = torch.full((12,), IGNORE)
        labels[: 1 + index * 5 % 11] = 1
        rows.append({"values": torch.full((12,), float(index % 7)), "labels": labels})
    return rows


def _train_tokens(stage: int, gas: int, num_micro: int) -> list[float]:
    from hfdist.plugins import ZeroPlugin

    accelerator = make_accelerator(plugins=[ZeroPlugin(stage=stage)], gradient_accumulation_steps=gas)
    model = WeightedLoss()
    loader = DataLoader(_rows(num_micro, accelerator.num_processes), batch_size=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    gradients = []
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch)["loss"])
            if accelerator.sync_gradients:
                gradients.append(whole_gradients(model)["w"].item())
            optimizer.step()
            optimizer.zero_grad()
    return gradients


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("world_size", [2, 3])
def test_tail_by_tokens(pool: Pools, stage: int, world_size: int) -> None:
    """10 micro-batches, GAS 4, labels: each window's gradient is the mean over its own tokens."""
    rows = _rows(10, world_size)
    want = []
    for start in range(0, 10, 4):
        window = rows[start * world_size : (start + 4) * world_size]
        tokens = [int((row["labels"] != IGNORE).sum()) for row in window]
        losses = [row["values"][0].item() for row in window]
        want.append(sum(n * loss for n, loss in zip(tokens, losses, strict=True)) / sum(tokens))
    for gradients in pool(world_size).run(_train_tokens, stage, 4, 10):
        assert gradients == pytest.approx(want, abs=1e-5)
