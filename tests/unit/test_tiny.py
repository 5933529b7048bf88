"""Tiny models of registered types: what they are, that they are reproducible, and why there is none."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hfdist.models import tiny
from hfdist.models.blocks import find_blocks
from hfdist.models.tiny import NUM_LAYERS, NotBuilt, causal_types, tiny_batch, tiny_config, tiny_model

# Dense, fused projections, experts with latent attention, state space beside attention, sizes by a rule of their own.
TYPES = ["llama", "gpt2", "deepseek_v3", "jamba", "falcon_h1"]


@pytest.mark.parametrize("model_type", TYPES)
def test_it_is_the_types_own_model_and_trains(model_type: str) -> None:
    model = tiny_model(model_type)
    assert model.config.model_type == model_type
    assert len(find_blocks(model)) == NUM_LAYERS
    assert sum(p.numel() for p in model.parameters()) < 200_000
    loss = model(**tiny_batch()).loss
    loss.backward()
    got = {name for name, p in model.named_parameters() if p.grad is not None and bool(p.grad.any())}
    # Experts that no token chose, and their router's correction, may have none.
    assert len(got) > 0.8 * len(list(model.parameters()))
    assert all(p.dtype == torch.float32 for p in model.parameters())


def test_the_same_seed_is_the_same_model_and_the_global_one_is_left_alone() -> None:
    before = torch.random.get_rng_state()
    first, second, other = tiny_model("llama"), tiny_model("llama"), tiny_model("llama", seed=1)
    assert torch.equal(before, torch.random.get_rng_state())
    for (name, a), b, c in zip(first.named_parameters(), second.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b), name
        assert not torch.equal(a, c), name  # norms too are off one


def test_dropout_is_off_in_training_mode() -> None:
    model = tiny_model("gpt2")
    assert model.training
    dropouts = [module.p for module in model.modules() if isinstance(module, nn.Dropout)]
    assert dropouts
    assert set(dropouts) == {0.0}
    assert torch.equal(model(**tiny_batch()).loss, model(**tiny_batch()).loss)


def test_a_hybrid_keeps_its_kinds_of_layers() -> None:
    kinds = {type(layer).__name__ for _, layer in find_blocks(tiny_model("jamba"))}
    assert len(kinds) == 2


@pytest.mark.parametrize(
    ("values", "length", "want"),
    [
        (["a"] * 5 + ["b", "a", "a"], 4, ["a", "a", "a", "b"]),
        (["a", "b"], 4, ["a", "b", "b", "b"]),
        ([1, 1, 1], 2, [1, 1]),
    ],
)
def test_a_window_has_the_most_kinds(values: list[object], length: int, want: list[object]) -> None:
    assert tiny._window(values, length) == want


def test_a_field_that_the_class_computes_is_left_out() -> None:
    assert tiny_config("falcon").head_dim == tiny._HIDDEN // tiny._HEADS


def test_what_cannot_be_built_says_why() -> None:
    with pytest.raises(NotBuilt, match=r"MusicgenConfig.*dropout"):
        tiny_model("musicgen")


def test_a_part_that_does_not_shrink_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny, "MAX_PARAMETERS", 1000)
    with pytest.raises(NotBuilt, match="parameters remain"):
        tiny_model("llama")


def test_every_registered_type_is_listed_once() -> None:
    types = causal_types()
    assert types == sorted(set(types))
    assert {"llama", "gpt2", "qwen3", "mixtral", "bloom"} <= set(types)
