"""B03: parameters with fewer elements than there are ranks: some ranks hold nothing of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.models import seeded
from tests.oracle import Tensors, assert_same, gradients_of, parameters_of
from tests.parity.loops import whole_gradients, whole_parameters
from tests.pool import Pools
from tests.worker import make_accelerator

# fp16 work of one layer: ten roundings of 2^-11.
TOLERANCE = {"no": 1e-6, "fp16": 5e-3, "bf16": 4e-2}


def _data(inputs: int, outputs: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(6, inputs, generator=generator), torch.randn(6, outputs, generator=generator)


def _train(stage: int, shape: tuple[int, int], precision: str, optimizer_name: str) -> tuple[list[Tensors], int]:
    from hfdist.plugins import AmpPlugin, ZeroPlugin

    plugins: list[Any] = [ZeroPlugin(stage=stage)]
    if precision == "fp16":
        plugins.append(AmpPlugin(dtype="fp16", init_scale=1024.0))  # errors of 3 overflow at 65536, rightly
    elif precision == "bf16":
        plugins.append(AmpPlugin(dtype="bf16"))
    accelerator = make_accelerator(plugins=plugins)
    model = seeded(nn.Linear, *shape)
    model, optimizer = accelerator.prepare(model, getattr(torch.optim, optimizer_name)(model.parameters(), lr=0.1))
    x, y = _data(*shape, accelerator.process_index)
    records = []
    for _ in range(2):
        accelerator.backward((model(x) - y).pow(2).mean())
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        records.append(whole_gradients(model))
        optimizer.step()
        optimizer.zero_grad()
        records.append(whole_parameters(accelerator, model))
    return records, sum(p.to_local().numel() if hasattr(p, "to_local") else p.numel() for p in model.parameters())


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(
    ("shape", "world_size", "precision", "optimizer_name"),
    [
        ((4, 1), 4, "no", "SGD"),
        ((4, 1), 4, "fp16", "SGD"),
        ((4, 1), 4, "no", "AdamW"),
        ((1, 1), 4, "no", "AdamW"),
        ((1, 1), 3, "fp16", "SGD"),
        ((3, 2), 4, "bf16", "SGD"),
        ((2, 5), 3, "no", "Adam"),
    ],
)
def test_tiny_parameters(
    pool: Pools, stage: int, shape: tuple[int, int], world_size: int, precision: str, optimizer_name: str
) -> None:
    """Two clipped steps equal one process's; each element is held once at stages 1 to 3."""
    model = seeded(nn.Linear, *shape)
    optimizer = getattr(torch.optim, optimizer_name)(model.parameters(), lr=0.1)
    data = [_data(*shape, rank) for rank in range(world_size)]
    want = []
    for _ in range(2):
        optimizer.zero_grad()
        torch.stack([(model(x) - y).pow(2).mean() for x, y in data]).mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        want.append(gradients_of(model))
        optimizer.step()
        want.append(parameters_of(model))
    ranks = pool(world_size).run(_train, stage, shape, precision, optimizer_name)
    for rank, (records, _) in enumerate(ranks):
        for index, (ours, theirs) in enumerate(zip(records, want, strict=True)):
            assert_same(f"rank {rank}, record {index}", ours, theirs, TOLERANCE[precision])
    total = sum(p.numel() for p in model.parameters())
    assert sum(held for _, held in ranks) == total * (world_size if stage == 0 else 1)
