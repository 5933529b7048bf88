"""SmolLM2-135M (9 heads, 3 key-value heads, 30 blocks) split over ranks: its known loss, and fine-tuning as alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.parity.test_real_weights import GOLDEN, STEPS, real_data
from tests.pool import Pools
from tests.worker import make_accelerator

__all__ = ["real_data"]  # a fixture
ROWS, LENGTH = 6, 16
LEARNING_RATE = 1e-4


@dataclass(frozen=True)
class Layout:
    """How the model lies over ranks, and the share of its block parameters that a rank may hold at most."""

    pp: int
    tp: int
    schedule: str
    share: float

    @property
    def name(self) -> str:
        return f"pp{self.pp}-tp{self.tp}" + f"-{self.schedule}" * (self.pp > 1)

    def plugins(self) -> list[Any]:
        from hfdist import PipelineParallelPlugin, TensorParallelPlugin, ZeroPlugin

        plugins: list[Any] = [ZeroPlugin(stage=0)]
        if self.tp > 1:
            plugins.append(TensorParallelPlugin(tp_size=self.tp))
        if self.pp > 1:
            plugins.append(
                PipelineParallelPlugin(pp_size=self.pp, schedule=self.schedule, num_micro_batches=3)  # type: ignore[arg-type]
            )
        return plugins


# Stages are cut by cost: the head's, a fifth of the whole, makes the others larger.
LAYOUTS = [
    Layout(1, 3, "", 0.34),
    Layout(2, 1, "1f1b", 0.65),
    Layout(3, 1, "interleaved", 0.47),
    Layout(2, 3, "1f1b", 0.65 / 3 * 1.01),
]


def _batches(tokens: list[int]) -> list[torch.Tensor]:
    numel = ROWS * LENGTH
    return [torch.tensor(tokens[step * numel : (step + 1) * numel]).view(ROWS, LENGTH) for step in range(STEPS)]


def _tune(model: Any, optimizer: Any, tokens: list[int], backward: Any) -> list[float]:
    model.train()
    losses = []
    for ids in _batches(tokens):
        loss = model(input_ids=ids, labels=ids).loss
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _alone(weights: str, tokens: list[int]) -> list[float]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(weights)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    return _tune(model, optimizer, tokens, torch.Tensor.backward)


def _over_ranks(layout: Layout, weights: str, tokens: list[int]) -> tuple[float, list[float], float]:
    from transformers import AutoModelForCausalLM

    from hfdist.models.blocks import find_blocks

    accelerator = make_accelerator(plugins=layout.plugins())
    model = AutoModelForCausalLM.from_pretrained(weights)
    whole = sum(p.numel() for _, block in find_blocks(model) for p in block.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    model, optimizer = accelerator.prepare(model, optimizer)
    share = sum(p.to_local().numel() for _, block in find_blocks(model) for p in block.parameters()) / whole
    model.eval()
    with torch.no_grad():
        # As many rows as micro-batches: every row has as many labels, so the mean is the first row's.
        ids = torch.tensor([tokens[:512]]).expand(3, -1)
        likelihood = model(input_ids=ids, labels=ids).loss.item()
    return likelihood, _tune(model, optimizer, tokens, accelerator.backward), share


@pytest.fixture(scope="module")
def alone(real_data: tuple[str, list[int]]) -> list[float]:
    return _alone(*real_data)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_smollm2_split_over_ranks(
    pool: Pools, real_data: tuple[str, list[int]], alone: list[float], layout: Layout
) -> None:
    for likelihood, losses, share in pool(layout.pp * layout.tp).run(_over_ranks, layout, *real_data, timeout=900):
        assert likelihood == pytest.approx(GOLDEN[0], abs=1e-4)
        assert losses == pytest.approx(alone, abs=1e-4)
        assert share <= layout.share
