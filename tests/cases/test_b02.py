"""B02: a parameter without dimensions trains at every stage, alone and beside others."""

from __future__ import annotations

import pytest
import torch

from tests.models import ScalarToy, seeded
from tests.oracle import Tensors, assert_same, gradients_of, parameters_of
from tests.parity.loops import whole_gradients, whole_parameters
from tests.pool import Pools
from tests.worker import make_accelerator

X = torch.tensor([1.0, 2.0, 3.0])


def _step(stage: int) -> tuple[float, float, float]:
    from hfdist.plugins import ZeroPlugin

    accelerator = make_accelerator(plugins=[ZeroPlugin(stage=stage)])
    model = ScalarToy()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.backward(model(X).sum())
    gradient = whole_gradients(model)["s"].item()
    norm = accelerator.clip_grad_norm_(model.parameters(), 100.0).item()
    optimizer.step()
    return gradient, norm, whole_parameters(accelerator, model)["s"].item()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_the_case(pool: Pools, stage: int, world_size: int) -> None:
    """Gradient 6, s 1.4, on every rank."""
    for gradient, norm, value in pool(world_size).run(_step, stage):
        assert gradient == pytest.approx(6, abs=1e-6)
        assert norm == pytest.approx(6, abs=1e-6)
        assert value == pytest.approx(1.4, abs=1e-6)


def _inputs(world_size: int, gas: int) -> list[list[torch.Tensor]]:
    return [[X * (rank + 1) + micro for rank in range(world_size)] for micro in range(gas)]


def _train(stages: list[int], gas: int, optimizer_name: str) -> tuple[list[Tensors], list[float]]:
    from hfdist.plugins import ZeroPlugin

    accelerator = make_accelerator(plugins=[ZeroPlugin(stage=stages[0])], gradient_accumulation_steps=gas)
    model = seeded(ScalarToy, True)
    model, optimizer = accelerator.prepare(model, getattr(torch.optim, optimizer_name)(model.parameters(), lr=0.01))
    records, norms = [], []
    for stage in stages:
        accelerator.set_zero_stage(stage)
        for micro in _inputs(accelerator.num_processes, gas):
            with accelerator.accumulate(model):
                accelerator.backward(model(micro[accelerator.process_index]).pow(2).mean())
                if accelerator.sync_gradients:
                    norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.5).item())
                    records.append(whole_gradients(model))
                optimizer.step()
                optimizer.zero_grad()
        records.append(whole_parameters(accelerator, model))
    return records, norms


@pytest.mark.parametrize("gas", [1, 2])
@pytest.mark.parametrize("optimizer_name", ["SGD", "AdamW"])
@pytest.mark.parametrize("stages", [[0, 0], [1, 1], [2, 2], [3, 3], [3, 0, 2, 1, 3]], ids=str)
def test_beside_a_layer(pool: Pools, stages: list[int], optimizer_name: str, gas: int) -> None:
    """With a layer next to it: accumulation, clipping by the common norm, switching stages."""
    model = seeded(ScalarToy, True)
    optimizer = getattr(torch.optim, optimizer_name)(model.parameters(), lr=0.01)
    want, want_norms = [], []
    for _ in stages:
        optimizer.zero_grad()
        losses = [model(x).pow(2).mean() for micro in _inputs(2, gas) for x in micro]
        torch.stack(losses).mean().backward()
        want_norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        want.append(gradients_of(model))
        optimizer.step()
        want.append(parameters_of(model))
    for rank, (records, norms) in enumerate(pool(2).run(_train, stages, gas, optimizer_name)):
        assert norms == pytest.approx(want_norms, rel=1e-5)
        for index, (ours, theirs) in enumerate(zip(records, want, strict=True)):
            assert_same(f"rank {rank}, record {index}", ours, theirs, 1e-6)
