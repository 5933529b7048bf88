"""B10: resizing the vocabulary of a model that is sharded, tied and untied, before and after prepare."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from tests.oracle import Tensors
from tests.parity.loops import digest, whole_parameters
from tests.pool import Pools
from tests.worker import make_accelerator


def build(vocab: int, tied: bool) -> LlamaForCausalLM:
    """A tiny Llama from a fixed seed."""
    torch.manual_seed(11)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=20,
        intermediate_size=28,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=tied,
        max_position_embeddings=16,
    )
    return LlamaForCausalLM(config)


def _embeddings(state: Tensors, tied: bool) -> list[torch.Tensor]:
    return [state["model.embed_tokens.weight"]] + ([] if tied else [state["lm_head.weight"]])


def _resize(stage: int, old: int, new: int, tied: bool, when: str, directory: str) -> dict[str, Any]:
    from hfdist.plugins import ZeroPlugin

    accelerator = make_accelerator(plugins=[ZeroPlugin(stage=stage)])
    # Loaded: straight into shards at stage 3.
    model = AutoModelForCausalLM.from_pretrained(directory) if when == "loaded" else build(old, tied)
    if when == "before":
        model.resize_token_embeddings(new)
    model = accelerator.prepare(model)
    if when != "before":
        accelerator.unwrap_model(model).resize_token_embeddings(new)
    optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters(), lr=1e-2))
    resized = whole_parameters(accelerator, model)
    ids = torch.arange(12).view(2, 6) * (new // 12) % new
    ids[0, 0] = new - 1
    loss = model(input_ids=ids, labels=ids).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    after = whole_parameters(accelerator, model)
    rows = (model.get_input_embeddings().weight.shape[0], model.get_output_embeddings().weight.shape[0])
    return {
        "vocab": (model.config.vocab_size, *rows),
        "resized": resized,
        "digest": digest(resized),
        "loss": loss.item(),
        "moved": not torch.equal(after["model.embed_tokens.weight"], resized["model.embed_tokens.weight"]),
        "tied": model.get_input_embeddings().weight is model.get_output_embeddings().weight,
    }


@pytest.mark.parametrize(
    ("stage", "world_size", "old", "new", "tied", "when"),
    [
        (3, 2, 100, 103, True, "after"),
        (3, 2, 100, 103, False, "after"),
        (3, 2, 100, 103, True, "before"),
        (3, 2, 100, 103, True, "loaded"),
        (3, 3, 100, 103, False, "loaded"),
        (0, 2, 100, 103, True, "after"),
        (1, 3, 100, 103, False, "after"),
        (2, 2, 100, 91, True, "after"),
        (3, 4, 97, 128, False, "after"),
    ],
)
def test_resize(
    pool: Pools, tmp_path: Path, stage: int, world_size: int, old: int, new: int, tied: bool, when: str
) -> None:
    """New size everywhere, kept rows bitwise, ranks equal, loss finite, the new embedding trains, ties stay."""
    original = build(old, tied)
    original.save_pretrained(tmp_path)
    want = {name: p.detach() for name, p in original.named_parameters()}
    ranks = pool(world_size).run(_resize, stage, old, new, tied, when, str(tmp_path))
    kept = min(old, new)
    for rank, seen in enumerate(ranks):
        assert seen["vocab"] == (new, new, new)
        assert seen["digest"] == ranks[0]["digest"], f"rank {rank} has other rows"
        pairs = zip(_embeddings(seen["resized"], tied), _embeddings(want, tied), strict=True)
        for ours, theirs in pairs:
            assert ours.shape[0] == new
            assert torch.equal(ours[:kept], theirs[:kept])
        assert torch.isfinite(torch.tensor(seen["loss"]))
        assert seen["moved"]
        assert seen["tied"] == tied
