"""B11: loading with missing keys: a causal LM's weights into a classifier, straight into shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from tests.models import Family
from tests.oracle import assert_same
from tests.parity.loops import digest, whole_parameters
from tests.pool import Pools
from tests.worker import make_accelerator

# 2 x 256 values: their standard deviation is within 20 % of the true one but for chances of 1e-10.
WIDTH = 256


def _save_lm(family: Family, directory: Path) -> PreTrainedModel:
    torch.manual_seed(3)
    if family == "llama":
        config = LlamaConfig(
            vocab_size=61,
            hidden_size=WIDTH,
            intermediate_size=33,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
            pad_token_id=0,
            bos_token_id=None,
            eos_token_id=None,
        )
        model: PreTrainedModel = LlamaForCausalLM(config)
    else:
        ids: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}
        model = GPT2LMHeadModel(GPT2Config(vocab_size=67, n_embd=WIDTH, n_layer=1, n_head=4, n_positions=16, **ids))
    model.save_pretrained(directory)
    return model


def _load(stage: int, directory: str, extra_layers: int, seed_by_rank: bool) -> dict[str, Any]:
    from hfdist.plugins import ZeroPlugin

    accelerator = make_accelerator(plugins=[ZeroPlugin(stage=stage)])
    torch.manual_seed(accelerator.process_index if seed_by_rank else 0)
    options: dict[str, Any] = {"num_labels": 2}
    if extra_layers:
        options["num_hidden_layers"] = 1 + extra_layers
    model, info = AutoModelForSequenceClassification.from_pretrained(directory, output_loading_info=True, **options)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    loaded = whole_parameters(accelerator, model)
    ids = torch.tensor([[5, 6, 7, 8, 9], [9, 8, 7, 6, 5]])
    loss = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=torch.tensor([0, 1])).loss
    accelerator.backward(loss)
    optimizer.step()
    return {
        "missing": set(info["missing_keys"]),
        "unexpected": set(info["unexpected_keys"]),
        "loaded": loaded if accelerator.is_main_process else {},
        "digest": digest(loaded),
        "loss": loss.item(),
        "after": digest(whole_parameters(accelerator, model)),
    }


@pytest.mark.parametrize(
    ("family", "stage", "world_size", "extra_layers", "seed_by_rank"),
    [
        ("llama", 3, 2, 0, False),
        ("llama", 3, 2, 0, True),
        ("llama", 3, 3, 1, True),
        ("gpt2", 3, 2, 0, True),
        ("llama", 0, 2, 0, True),
        ("gpt2", 2, 2, 1, True),
        ("llama", 1, 3, 0, False),
    ],
)
def test_missing_keys(
    pool: Pools, tmp_path: Path, family: Family, stage: int, world_size: int, extra_layers: int, seed_by_rank: bool
) -> None:
    """Exact lists, loaded weights bitwise, what was missing initialised as the config says and equal on all ranks."""
    lm = _save_lm(family, tmp_path)
    options = {"num_hidden_layers": 1 + extra_layers} if extra_layers else {}
    plain, info = AutoModelForSequenceClassification.from_pretrained(
        tmp_path, output_loading_info=True, num_labels=2, **options
    )
    ranks = pool(world_size).run(_load, stage, str(tmp_path), extra_layers, seed_by_rank)
    for seen in ranks:
        assert seen["missing"] == set(info["missing_keys"])
        assert seen["unexpected"] == set(info["unexpected_keys"])
        assert seen["digest"] == ranks[0]["digest"]
        assert seen["after"] == ranks[0]["after"]
        assert 0 < seen["loss"] < 10
    assert "score.weight" in ranks[0]["missing"]
    loaded = ranks[0]["loaded"]
    assert set(loaded) == {name for name, _ in plain.named_parameters()}
    source = dict(lm.named_parameters())
    present = {name: value for name, value in loaded.items() if name not in info["missing_keys"]}
    assert_same("loaded", present, {name: source[name].detach() for name in present}, 0.0)
    for name in info["missing_keys"]:
        value = loaded[name]
        if value.ndim == 2 and value.numel() >= 512:
            # GPT-2 starts its residual projections lower, as its own init says.
            spread = dict(plain.named_parameters())[name].std().item()
            assert value.std().item() == pytest.approx(spread, rel=0.2), name
    assert loaded["score.weight"].std().item() == pytest.approx(plain.config.initializer_range, rel=0.2)
