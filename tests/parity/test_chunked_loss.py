"""The loss over chunks of tokens: the value and the gradients of one process with whole logits, in fp64, and no logits.

The oracle is the model's own loss (`tests.models.causal_lm_loss`, or transformers' own in fp32).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    Cohere2Config,
    Cohere2ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    PreTrainedModel,
)

from hfdist.errors import ConfigError
from tests.models import VOCAB, Family, Recipe, Window, build_lm, make_windows
from tests.oracle import assert_steps, gradients_of, train
from tests.parity.cells import assert_ranks_agree
from tests.parity.loops import CLIP, RankRun, run_windows
from tests.pool import Pools
from tests.worker import make_accelerator

TOLERANCE = 1e-10
ADAMW = Recipe("adamw")


def build(family: Family, tied: bool) -> PreTrainedModel:
    """An fp64 model with transformers' own loss, which the chunked one stands for."""
    model = build_lm(family, tied=tied, dtype=torch.float64)
    del model._loss_function
    return model


# ----------------------------------------------------------------------------------------------------- one process


@pytest.mark.parametrize("chunk_size", [1, 7, 10_000])
@pytest.mark.parametrize("items", [None, 17, torch.tensor(29)], ids=["mean", "int", "tensor"])
@pytest.mark.parametrize(("family", "tied"), [("llama", True), ("llama", False), ("gpt2", True)])
def test_loss_and_gradients_are_the_models_own(
    family: Family, tied: bool, items: Tensor | int | None, chunk_size: int
) -> None:
    from hfdist.parallel.chunked_loss import apply_chunked_loss

    batch = dict(make_windows(vocab=VOCAB[family], steps=1, gas=1, world_size=1)[0][0][0])
    assert (batch["labels"] == -100).any()
    want, ours = build_lm(family, tied=tied, dtype=torch.float64), build(family, tied)
    expected = want(**batch).loss
    if items is not None:
        count = (batch["labels"][:, 1:] != -100).sum()
        expected = expected * count / items
        batch["num_items_in_batch"] = items
    expected.backward()
    undo = apply_chunked_loss(ours, chunk_size)
    loss = ours(**batch).loss
    loss.backward()
    assert loss.dtype == torch.float64
    assert abs(loss.item() - expected.item()) <= TOLERANCE
    got, wanted = gradients_of(ours), gradients_of(want)
    assert got.keys() == wanted.keys()
    for name, gradient in got.items():
        assert (gradient - wanted[name]).abs().max() <= TOLERANCE, name
    undo()


def _families() -> list[PreTrainedModel]:
    """Models that change their logits between head and loss: a soft cap, a scale, a division."""
    sizes: dict[str, Any] = {
        "vocab_size": 61,
        "hidden_size": 24,
        "intermediate_size": 37,
        "num_hidden_layers": 1,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "max_position_embeddings": 19,
        "pad_token_id": 0,
        "initializer_range": 0.3,
    }
    without_head_dim = {name: size for name, size in sizes.items() if name != "head_dim"}
    with torch.random.fork_rng():
        torch.manual_seed(2)
        return [
            Gemma2ForCausalLM(Gemma2Config(final_logit_softcapping=1.5, **sizes)),
            Cohere2ForCausalLM(Cohere2Config(logit_scale=0.7, **sizes)),
            GraniteForCausalLM(GraniteConfig(logits_scaling=3.0, **without_head_dim)),
        ]


@pytest.mark.parametrize("number", [0, 1, 2], ids=["soft cap", "scale", "division"])
def test_what_a_model_does_to_its_logits_is_done_to_every_chunk(number: int) -> None:
    from hfdist.parallel.chunked_loss import apply_chunked_loss

    model = _families()[number].train()
    ids = torch.randint(0, 61, (2, 11), generator=torch.Generator().manual_seed(4))
    whole = model(input_ids=ids, labels=ids, use_cache=False).loss
    whole.backward()
    want = gradients_of(model)
    model.zero_grad()
    undo = apply_chunked_loss(model, 5)
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    undo()
    assert loss.item() == pytest.approx(whole.item(), rel=1e-6)
    for name, gradient in gradients_of(model).items():
        assert (gradient - want[name]).norm() <= 1e-5 * want[name].norm() + 1e-8, name


def test_no_more_logits_than_a_chunk_exist() -> None:
    """Every product of the head is at most `chunk_size` tokens, and none outlives its turn."""
    from hfdist.parallel.chunked_loss import apply_chunked_loss

    model = build("llama", True)
    seen: list[tuple[int, ...]] = []
    original = type(model.lm_head).forward

    class Watched(nn.Linear):
        def forward(self, hidden: Tensor) -> Tensor:
            seen.append(tuple(hidden.shape))
            return original(self, hidden)

    model.lm_head.__class__ = Watched
    ids = torch.randint(0, VOCAB["llama"], (3, 13), generator=torch.Generator().manual_seed(1))
    saved: list[tuple[int, ...]] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tuple(tensor.shape))
        return tensor

    apply_chunked_loss(model, 5)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(input_ids=ids, labels=ids).loss
    # 39 tokens in 8 chunks; nothing with the width of the vocabulary is saved for backward (the head's weight is).
    assert [shape[0] for shape in seen] == [5] * 7 + [4]
    assert (39, VOCAB["llama"]) not in saved
    assert not any(shape[-1] == VOCAB["llama"] and shape[0] in (4, 5) for shape in saved if len(shape) > 1)
    loss.backward()
    assert [shape[0] for shape in seen[8:]] == [4, *[5] * 7]


def test_unbuilt_logits_say_so_and_others_are_built() -> None:
    from hfdist.parallel.chunked_loss import apply_chunked_loss

    model, plain = build("llama", True), build("llama", True)
    ids = torch.randint(0, VOCAB["llama"], (2, 9), generator=torch.Generator().manual_seed(1))
    undo = apply_chunked_loss(model, 4)
    logits = model(input_ids=ids, labels=ids).logits
    for use in (
        lambda: logits.argmax(-1),
        lambda: torch.softmax(logits, -1),
        lambda: logits[:, :-1],
        lambda: logits.shape,
        lambda: nn.functional.cross_entropy(logits, ids),
        lambda: list(logits),
    ):
        with pytest.raises(ConfigError, match=r"not built.*LossPlugin.*eval"):
            use()
    want = plain(input_ids=ids).logits
    assert torch.equal(model(input_ids=ids).logits, want)
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids, labels=ids).logits, want)
    model.eval()
    assert torch.equal(model(input_ids=ids, labels=ids).logits, want)
    model.train()
    undo()
    assert torch.equal(model(input_ids=ids, labels=ids).logits, want)
    assert not {"forward", "_loss_function"} & set(model.__dict__)
    assert "forward" not in model.lm_head.__dict__


def test_models_without_such_a_loss_are_refused_by_name() -> None:
    from hfdist.parallel.chunked_loss import apply_chunked_loss

    with pytest.raises(ConfigError, match="Linear, which has no language-model head"):
        apply_chunked_loss(nn.Linear(3, 3), 5)
    with pytest.raises(ConfigError, match="LlamaForCausalLM, whose loss is causal_lm_loss"):
        apply_chunked_loss(build_lm("llama", tied=True, dtype=torch.float64), 5)
    model = build("llama", True)
    ids = torch.zeros(1, 9, dtype=torch.int64)
    apply_chunked_loss(model, 5)
    with pytest.raises(ConfigError, match="9 labels for 2 tokens"):
        model(input_ids=ids, labels=ids, logits_to_keep=2)


# ------------------------------------------------------------------------------------------------------------ ranks


def _train(family: Family, tied: bool, windows: list[Window], route: list[int], chunk_size: int) -> RankRun:
    from hfdist.plugins import LossPlugin, ZeroPlugin

    accelerator = make_accelerator(
        plugins=[ZeroPlugin(stage=route[0]), LossPlugin(chunk_size)], gradient_accumulation_steps=len(windows[0])
    )
    model, *optimizers = (lambda m: accelerator.prepare(m, *ADAMW.build(m)))(build(family, tied))
    return run_windows(
        accelerator,
        model,
        optimizers,
        windows,
        clip=CLIP,
        between=lambda index: accelerator.set_zero_stage(route[index]),
    )


@pytest.mark.parametrize(
    ("family", "tied", "world_size", "route", "gas"),
    [
        ("llama", True, 2, [0, 0, 0], 2),
        ("llama", False, 2, [1, 1, 1], 2),
        ("gpt2", True, 3, [2, 2, 2], 1),
        ("llama", True, 3, [3, 3, 3], 2),
        ("llama", False, 2, [3, 3, 3], 1),
        ("llama", True, 2, [0, 3, 1, 2, 0], 1),
    ],
)
def test_every_stage_and_a_live_switch(
    pool: Pools, family: Family, tied: bool, world_size: int, route: list[int], gas: int
) -> None:
    """Ragged batches with masked labels: the steps of one process, in fp64."""
    windows = make_windows(vocab=VOCAB[family], steps=len(route), gas=gas, world_size=world_size)
    runs = pool(world_size).run(_train, family, tied, windows, route, 5)
    want = train(build_lm(family, tied=tied, dtype=torch.float64), windows, optimizers=ADAMW.build, clip=CLIP)
    assert_steps(runs[0].steps, want, tolerance=TOLERANCE)
    assert_ranks_agree(runs)


def _losses_in_bf16(chunk_size: int | None, stage: int) -> tuple[list[float], list[str]]:
    from hfdist.plugins import AmpPlugin, LossPlugin, ZeroPlugin

    plugins: list[Any] = [ZeroPlugin(stage=stage), AmpPlugin("bf16")]
    if chunk_size is not None:
        plugins.append(LossPlugin(chunk_size))
    accelerator = make_accelerator(plugins=plugins)
    model = build_lm("llama", tied=True)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    losses = []
    for window in make_windows(vocab=VOCAB["llama"], steps=4, gas=1, world_size=2):
        loss = model(**window[0][accelerator.process_index]).loss
        losses.append(loss.item())
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.free_memory()
    return losses, [name for name in ("forward", "_loss_function") if name in vars(model)]


@pytest.mark.parametrize("stage", [0, 3])
def test_mixed_precision_and_what_is_left_on_the_model(pool: Pools, stage: int) -> None:
    """bf16: the head's products are rounded as ever, so losses stay within bf16's noise; free_memory undoes it."""
    chunked, whole = (pool(2).run(_losses_in_bf16, chunk, stage) for chunk in (5, None))
    for (ours, left), (theirs, _) in zip(chunked, whole, strict=True):
        assert ours[0] == pytest.approx(theirs[0], rel=1e-4)
        assert ours == pytest.approx(theirs, rel=1e-2)
        assert left == []


def _prepare_refused() -> str:
    from hfdist.plugins import LossPlugin, ZeroPlugin

    accelerator = make_accelerator(plugins=[ZeroPlugin(stage=3), LossPlugin(8)])
    model = nn.Linear(3, 5)
    try:
        accelerator.prepare(model)
    except ConfigError as error:
        return f"{error} / {type(model.weight).__name__}"
    return "prepared"


def test_prepare_refuses_before_it_shards(pool: Pools) -> None:
    for said in pool(2).run(_prepare_refused):
        assert "LossPlugin" in said
        assert said.endswith("/ Parameter")
