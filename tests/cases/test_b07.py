"""B07: frozen weights survive training, saving and loading at every stage."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.models import FrozenToy, seeded
from tests.oracle import Tensors
from tests.parity.loops import whole_parameters
from tests.pool import Pool, Pools
from tests.worker import make_accelerator

STAGES = [0, 1, 2, 3]


def _train(stage: int, everything: bool, precision: str, directory: str, export: str) -> Tensors:
    """Two steps, save. `everything`: frozen parameters are in the optimizer's groups too."""
    from hfdist.plugins import ZeroPlugin

    accelerator = make_accelerator(plugins=[ZeroPlugin(stage=stage)], mixed_precision=precision)
    model = seeded(FrozenToy)
    parameters = model.parameters() if everything else model.head.parameters()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(parameters, lr=0.05, weight_decay=0.1))
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(accelerator.process_index))
    for _ in range(2):
        accelerator.backward(model(x).pow(2).mean())
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert [name for name, p in model.named_parameters() if not p.requires_grad] == ["frozen.weight", "frozen.bias"]
    accelerator.save_state(directory)
    accelerator.save_model(model, export)
    return whole_parameters(accelerator, model)


def _load(stage: int, everything: bool, precision: str, directory: str) -> tuple[Tensors, list[str]]:
    """A new process, another seed, weights overwritten: what `load_state` brings back."""
    from hfdist.plugins import ZeroPlugin

    accelerator = make_accelerator(plugins=[ZeroPlugin(stage=stage)], mixed_precision=precision)
    model = seeded(FrozenToy, seed=1234)
    with torch.no_grad():
        for parameter in model.frozen.parameters():
            parameter.fill_(-1.0)
    parameters = model.parameters() if everything else model.head.parameters()
    model, _ = accelerator.prepare(model, torch.optim.AdamW(parameters, lr=0.05, weight_decay=0.1))
    accelerator.load_state(directory)
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    return whole_parameters(accelerator, model), frozen


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    ("world_size", "everything", "precision"),
    [(2, False, "no"), (3, True, "no"), (2, True, "bf16"), (3, False, "fp16")],
)
def test_frozen_weights(
    pool: Pools, tmp_path: Path, stage: int, world_size: int, everything: bool, precision: str
) -> None:
    """All .123 in training, in the export and after a load in new processes; the rest bitwise; still frozen."""
    state, export = str(tmp_path / "state"), str(tmp_path / "export")
    want = pool(world_size).run(_train, stage, everything, precision, state, export)[0]
    for name in ("frozen.weight", "frozen.bias"):
        assert torch.equal(want[name], torch.full_like(want[name], 0.123)), name
    assert not torch.equal(want["head.weight"], seeded(FrozenToy).head.weight), "nothing was trained"
    exported = load_file(tmp_path / "export" / "model.safetensors")
    for name, value in want.items():
        assert torch.equal(exported[name], value), f"{name} in the export"
    with Pool(world_size) as fresh:
        for rank, (loaded, frozen) in enumerate(fresh.run(_load, stage, everything, precision, state)):
            for name, value in want.items():
                assert torch.equal(loaded[name], value), f"{name} on rank {rank}"
            assert frozen == ["frozen.weight", "frozen.bias"]
