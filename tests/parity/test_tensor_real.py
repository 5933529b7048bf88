"""SmolLM2-135M (9 heads, 3 key-value heads) over 3 ranks: its known loss, and fine-tuning as in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.parity.test_real_weights import GOLDEN, SEQ_LEN, STEPS, real_data
from tests.pool import Pools

__all__ = ["real_data"]  # a fixture


def _tune(model: Any, tokens: list[int], reduce: Any) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model.train()
    losses = []
    for step in range(STEPS):
        ids = torch.tensor([tokens[step * SEQ_LEN : (step + 1) * SEQ_LEN]])
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        reduce()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _over_ranks(weights: str, tokens: list[int]) -> tuple[float, list[float], float]:
    from transformers import AutoModelForCausalLM

    from hfdist.parallel.tensor import apply_tensor_parallel

    assert dist.group.WORLD is not None
    model = AutoModelForCausalLM.from_pretrained(weights)
    handle = apply_tensor_parallel(model, dist.group.WORLD)
    model.eval()
    with torch.no_grad():
        ids = torch.tensor([tokens[:512]])
        likelihood = model(input_ids=ids, labels=ids).loss.item()
    return likelihood, _tune(model, tokens, handle.reduce_partial_gradients), handle.block_share


@pytest.mark.timeout(1800)
def test_smollm2_over_three_ranks(pool: Pools, real_data: tuple[str, list[int]]) -> None:
    from transformers import AutoModelForCausalLM

    weights, tokens = real_data
    want = _tune(AutoModelForCausalLM.from_pretrained(weights), tokens, lambda: None)
    for likelihood, losses, share in pool(3).run(_over_ranks, weights, tokens, timeout=900):
        assert likelihood == pytest.approx(GOLDEN[0], abs=1e-4)
        assert losses == pytest.approx(want, abs=1e-4)
        assert share == pytest.approx(1 / 3, abs=0.01)
