"""B15: accumulation: one optimizer step per window, with the mean of the window's gradients."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.models import seeded
from tests.oracle import Tensors, assert_same, gradients_of, parameters_of
from tests.parity.loops import whole_gradients, whole_parameters
from tests.pool import Pools
from tests.worker import make_accelerator

NUM_MICRO = 12


def _data(micro: int, rank: int, inputs: int, outputs: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * micro + rank)
    return torch.randn(3, inputs, generator=generator), torch.randn(3, outputs, generator=generator)


def _train(stage: int, gas: int, shape: tuple[int, int]) -> tuple[list[Tensors], list[int], list[bool]]:
    """Gradients and parameters at each update; the micro-steps at which the user's optimizer really stepped."""
    from hfdist.plugins import ZeroPlugin

    accelerator = make_accelerator(plugins=[ZeroPlugin(stage=stage)], gradient_accumulation_steps=gas)
    model = seeded(nn.Linear, *shape)
    inner = torch.optim.AdamW(model.parameters(), lr=0.05)
    stepped: list[int] = []
    model, optimizer = accelerator.prepare(model, inner)
    records, synced = [], []
    count = 0
    for micro in range(NUM_MICRO):
        with accelerator.accumulate(model):
            x, y = _data(micro, accelerator.process_index, *shape)
            accelerator.backward((model(x) - y).pow(2).mean())
            synced.append(accelerator.sync_gradients)
            if accelerator.sync_gradients:
                records.append(whole_gradients(model))
            optimizer.step()
            optimizer.zero_grad()
        taken = max((int(state["step"]) for state in inner.state.values()), default=0)
        if taken != count:
            count = taken
            stepped.append(micro)
            records.append(whole_parameters(accelerator, model))
    return records, stepped, synced


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(
    ("world_size", "gas", "shape"), [(2, 4, (4, 2)), (2, 3, (4, 2)), (3, 4, (5, 3)), (4, 2, (4, 2)), (2, 1, (4, 2))]
)
def test_one_step_per_window(pool: Pools, stage: int, world_size: int, gas: int, shape: tuple[int, int]) -> None:
    """Steps at the end of each window and nowhere else; gradients and parameters are one process's."""
    model = seeded(nn.Linear, *shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    want = []
    for start in range(0, NUM_MICRO, gas):
        optimizer.zero_grad()
        data = [_data(m, rank, *shape) for m in range(start, start + gas) for rank in range(world_size)]
        torch.stack([(model(x) - y).pow(2).mean() for x, y in data]).mean().backward()
        want.append(gradients_of(model))
        optimizer.step()
        want.append(parameters_of(model))
    ends = list(range(gas - 1, NUM_MICRO, gas))
    for rank, (records, stepped, synced) in enumerate(pool(world_size).run(_train, stage, gas, shape)):
        assert stepped == ends
        assert [micro for micro, flag in enumerate(synced) if flag] == ends
        for index, (ours, theirs) in enumerate(zip(records, want, strict=True)):
            assert_same(f"rank {rank}, record {index}", ours, theirs, 1e-6)
