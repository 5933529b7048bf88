"""B14: all stages give the trajectory of one process: a deep MLP whose first and last layers share a weight."""

from __future__ import annotations

import pytest
import torch

from tests.models import SharedMlp, seeded
from tests.oracle import Tensors, assert_same, gradients_of, parameters_of
from tests.parity.loops import whole_gradients, whole_parameters
from tests.pool import Pools
from tests.worker import make_accelerator

DTYPES = {"fp32": torch.float32, "fp64": torch.float64}
TOLERANCE = {"fp32": 1e-6, "fp64": 1e-12}
STEPS = 5


def _x(step: int, micro: int, rank: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10_000 * step + 100 * micro + rank)
    return torch.randn(3, 16, generator=generator, dtype=torch.float64).to(dtype)


def _train(stage: int, gas: int, optimizer_name: str, dtype: str) -> list[Tensors]:
    from hfdist.plugins import ZeroPlugin

    accelerator = make_accelerator(plugins=[ZeroPlugin(stage=stage)], gradient_accumulation_steps=gas)
    model = seeded(SharedMlp, dtype=DTYPES[dtype])
    model, optimizer = accelerator.prepare(model, getattr(torch.optim, optimizer_name)(model.parameters(), lr=1e-2))
    assert model.last.weight is model.first.weight
    records = []
    for step in range(STEPS):
        for micro in range(gas):
            with accelerator.accumulate(model):
                x = _x(step, micro, accelerator.process_index, DTYPES[dtype])
                accelerator.backward((model(x) - x).pow(2).mean())
                if accelerator.sync_gradients:
                    records.append(whole_gradients(model))
                optimizer.step()
                optimizer.zero_grad()
        records.append(whole_parameters(accelerator, model))
    return records


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("optimizer_name", ["Adam", "SGD"])
@pytest.mark.parametrize(("world_size", "gas", "dtype"), [(2, 4, "fp32"), (2, 4, "fp64"), (3, 2, "fp64")])
def test_stage_equals_one_process(
    pool: Pools, stage: int, optimizer_name: str, world_size: int, gas: int, dtype: str
) -> None:
    """Five updates: every gradient, every parameter."""
    model = seeded(SharedMlp, dtype=DTYPES[dtype])
    optimizer = getattr(torch.optim, optimizer_name)(model.parameters(), lr=1e-2)
    want = []
    for step in range(STEPS):
        optimizer.zero_grad()
        xs = [_x(step, micro, rank, DTYPES[dtype]) for micro in range(gas) for rank in range(world_size)]
        torch.stack([(model(x) - x).pow(2).mean() for x in xs]).mean().backward()
        want.append(gradients_of(model))
        optimizer.step()
        want.append(parameters_of(model))
    for rank, records in enumerate(pool(world_size).run(_train, stage, gas, optimizer_name, dtype)):
        for index, (ours, theirs) in enumerate(zip(records, want, strict=True)):
            assert_same(f"rank {rank}, record {index}", ours, theirs, TOLERANCE[dtype])
