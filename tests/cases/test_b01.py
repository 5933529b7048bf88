"""B01: parameters tied across modules stay one parameter, in training, in the exported file and after reloading."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_model
from torch import nn

from tests.models import TiedToy, seeded
from tests.oracle import Tensors, assert_same, parameters_of
from tests.parity.loops import whole_gradients, whole_parameters
from tests.pool import Pools
from tests.worker import make_accelerator


def _orders(vocab: int, world_size: int) -> list[torch.Tensor]:
    """Every rank sees all ids, in an order of its own: targets differ between ranks."""
    return [torch.arange(vocab).roll(rank) for rank in range(world_size)]


def _train(stage: int, vocab: int, width: int, steps: int, directory: str | None) -> dict[str, Any]:
    from hfdist.plugins import ZeroPlugin

    accelerator = make_accelerator(plugins=[ZeroPlugin(stage=stage)])
    model = seeded(TiedToy, vocab, width)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    ids = _orders(vocab, accelerator.num_processes)[accelerator.process_index]
    gradients: Tensors = {}
    for _ in range(steps):
        accelerator.backward(nn.functional.cross_entropy(model(torch.arange(vocab)), ids))
        gradients = whole_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    if directory is not None:
        accelerator.save_model(model, directory)
    return {
        "gradients": gradients,
        "parameters": whole_parameters(accelerator, model),
        "count": len(list(model.parameters())),
        "tied": model.head.weight is model.embed.weight,
        "state": accelerator.get_state_dict(model),
    }


def _oracle(vocab: int, width: int, steps: int, world_size: int) -> tuple[Tensors, Tensors]:
    model = seeded(TiedToy, vocab, width)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gradients: Tensors = {}
    for _ in range(steps):
        optimizer.zero_grad()
        logits = model(torch.arange(vocab))
        losses = [nn.functional.cross_entropy(logits, ids) for ids in _orders(vocab, world_size)]
        torch.stack(losses).mean().backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
    return gradients, parameters_of(model)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(
    ("world_size", "vocab", "width", "steps"), [(2, 7, 4, 1), (2, 7, 4, 5), (3, 7, 4, 2), (4, 11, 5, 2), (4, 3, 2, 2)]
)
def test_tied_weights(
    pool: Pools, tmp_path: Path, stage: int, world_size: int, vocab: int, width: int, steps: int
) -> None:
    """One parameter, one process's gradient and step; the file has it once or twice equal and loads tied."""
    gradients, parameters = _oracle(vocab, width, steps, world_size)
    for rank, seen in enumerate(pool(world_size).run(_train, stage, vocab, width, steps, str(tmp_path))):
        assert seen["count"] == 1
        assert seen["tied"]
        assert_same(f"rank {rank}: gradients", seen["gradients"], gradients, 1e-6)
        assert_same(f"rank {rank}: parameters", seen["parameters"], parameters, 1e-6)
        assert torch.equal(seen["state"]["head.weight"], seen["state"]["embed.weight"])
    again = seeded(TiedToy, vocab, width, seed=99)
    load_model(again, tmp_path / "model.safetensors")
    assert again.head.weight is again.embed.weight
    assert_same("reloaded", parameters_of(again), parameters, 1e-6)
