"""Tensor-parallel models in use: plans given by users, dropout, checkpointing, generation, custom losses, undoing."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import CodeGenConfig, CodeGenForCausalLM, PreTrainedModel

from tests.models import make_windows
from tests.oracle import Tensors, assert_same, gradients_of, parameters_of
from tests.parity.test_tensor import VOCAB, Exact, build
from tests.pool import Pools

TOLERANCE = 1e-10


def _batch() -> dict[str, Tensor]:
    return make_windows(vocab=VOCAB, steps=1, gas=1, world_size=1)[0][0][0]


def _world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def _refused(family: str, plan: dict[str, str], verify: bool) -> str:
    from hfdist.errors import ConfigError
    from hfdist.parallel.tensor import apply_tensor_parallel

    model = build(family)
    before = parameters_of(model)
    with pytest.raises(ConfigError) as caught:
        apply_tensor_parallel(model, _world(), plan=plan, verify=verify)
    assert_same("untouched", parameters_of(model), before, 0.0)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    return str(caught.value)


@pytest.mark.parametrize(
    ("family", "plan", "words"),
    [
        ("llama", {}, ["empty plan"]),
        (
            "llama",
            {"model.layers.*.self_attn.q_prj": "colwise"},
            ["q_prj", "did you mean 'model.layers.*.self_attn.q_pro"],
        ),
        ("llama", {"model.layers.*.mlp.up_proj": "colwize"}, ["'colwize'", "did you mean 'colwise'?"]),
        ("llama", {"model.norm": "sequence_parallel"}, ["sequence_parallel", "sequence parallelism"]),
        ("mixtral", {"model.layers.*.mlp.experts": "grouped_gemm"}, ["expert parallelism"]),
        # Runs without an error, and wrongly: up without gate, q and k packed head by head that are not.
        ("llama", {"model.layers.*.mlp.down_proj": "rowwise"}, ["LlamaForCausalLM", "trial"]),
        (
            "gpt2",
            {"transformer.h.*.attn.c_attn": "colwise", "transformer.h.*.attn.c_proj": "rowwise"},
            ["GPT2LMHeadModel", "different output", "transformer.h.0.attn.c_attn"],
        ),
    ],
)
def test_wrong_plans_are_refused(pool: Pools, family: str, plan: dict[str, str], words: list[str]) -> None:
    for message in pool(2).run(_refused, family, plan, True):
        assert [word for word in words if word not in message] == [], message


def _with_plan(plan: dict[str, str], batch: dict[str, Tensor]) -> tuple[float, dict[str, tuple[int, ...]], Tensors]:
    from hfdist.parallel.tensor import apply_tensor_parallel

    model = build("llama")
    handle = apply_tensor_parallel(model, _world(), plan=plan)
    with Exact():
        loss = model(**batch).loss
        loss.backward()
    handle.reduce_partial_gradients()
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    return loss.item(), shapes, {name: handle.whole(name, g) for name, g in gradients_of(model).items()}


def test_a_users_plan_is_the_whole_plan(pool: Pools) -> None:
    """Only the MLPs, one of them gathered: everything else stays whole."""
    plan = {
        "model.layers.0.mlp.gate_proj": "colwise",
        "model.layers.0.mlp.up_proj": "colwise",
        "model.layers.0.mlp.down_proj": "rowwise",
        "model.layers.1.mlp.up_proj": "colwise_gather_output",
        "model.layers.1.mlp.down_proj": "rowwise_split_input",
        "model.embed_tokens": "embedding_colwise",
    }
    model, batch = build("llama"), _batch()
    with Exact():
        loss = model(**batch).loss
        loss.backward()
    for got, shapes, gradients in pool(2).run(_with_plan, plan, batch):
        assert got == pytest.approx(loss.item(), abs=TOLERANCE)
        assert_same("gradients", gradients, gradients_of(model), TOLERANCE)
        assert shapes["model.layers.0.mlp.up_proj.weight"] == (26, 20)
        assert shapes["model.layers.1.mlp.down_proj.weight"] == (20, 26)
        assert shapes["model.embed_tokens.weight"] == (VOCAB, 10)
        assert shapes["model.layers.0.self_attn.q_proj.weight"] == (24, 20)
        assert shapes["lm_head.weight"] == (VOCAB, 20)


def _dropout(checkpointing: bool, batch: dict[str, Tensor]) -> dict[str, Any]:
    from hfdist.parallel.tensor import apply_tensor_parallel

    model = build("gpt2", attn_pdrop=0.3, resid_pdrop=0.3, embd_pdrop=0.3, attn_implementation="eager")
    model.config._attn_implementation = "eager"
    apply_tensor_parallel(model, _world())
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        with Exact():
            recorded: dict[str, list[Tensor]] = {"split": [], "whole": []}
            dropout = nn.functional.dropout

            def recording(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
                out = dropout(x, p, training, inplace)
                recorded["split" if x.ndim == 4 else "whole"].append((out != 0).detach())
                return out

            nn.functional.dropout = recording
            try:
                outputs = model(**batch)
                outputs.loss.backward()
            finally:
                nn.functional.dropout = dropout
        after = torch.rand(3)
    masks = {kind: torch.cat([mask.reshape(-1) for mask in seen]) for kind, seen in recorded.items()}
    return {"masks": masks, "loss": outputs.loss.item(), "after": after, "gradients": gradients_of(model)}


def test_dropout_is_alike_where_activations_are(pool: Pools) -> None:
    """Residuals are dropped in the same places on both ranks, heads in others; checkpointing repeats them."""
    batch = _batch()
    plain, checkpointed = (pool(2).run(_dropout, flag, batch) for flag in (False, True))
    first, second = plain
    assert torch.equal(first["masks"]["whole"], second["masks"]["whole"])
    assert first["masks"]["split"].shape == second["masks"]["split"].shape
    assert not torch.equal(first["masks"]["split"], second["masks"]["split"])
    assert first["loss"] == second["loss"]
    assert torch.equal(first["after"], second["after"])  # both generators went on alike
    for rank in (0, 1):
        assert checkpointed[rank]["loss"] == plain[rank]["loss"]
        assert_same(f"rank {rank}", checkpointed[rank]["gradients"], plain[rank]["gradients"], TOLERANCE)


def _generate(family: str, ids: Tensor) -> Tensor:
    from hfdist.parallel.tensor import apply_tensor_parallel

    model = build(family, use_cache=True).eval()
    apply_tensor_parallel(model, _world())
    with Exact():
        return model.generate(input_ids=ids, max_new_tokens=6, do_sample=False, pad_token_id=0)


@pytest.mark.parametrize("family", ["llama-kv1", "gpt2", "bloom"])
def test_generation(pool: Pools, family: str) -> None:
    ids = torch.randint(0, VOCAB, (2, 5), generator=torch.Generator().manual_seed(2))
    with Exact():
        want = (
            build(family, use_cache=True)
            .eval()
            .generate(input_ids=ids, max_new_tokens=6, do_sample=False, pad_token_id=0)
        )
    assert want.shape[1] == 11
    for got in pool(2).run(_generate, family, ids):
        assert torch.equal(got, want)


def _own_loss(
    logits: Tensor, labels: Tensor, vocab_size: int, **_: object
) -> Tensor:  # what one process would compute with, on whole logits
    assert logits.shape[-1] == vocab_size
    return logits.logsumexp(-1).mean() + labels.float().mean()


def _losses(batch: dict[str, Tensor], when: str) -> dict[str, float]:
    from hfdist.parallel.tensor import apply_tensor_parallel

    model = build("llama")
    if when == "before":
        model.loss_function = _own_loss
    handle = apply_tensor_parallel(model, _world())
    with Exact():
        counted = float("nan") if when == "before" else model(**batch, num_items_in_batch=torch.tensor(17)).loss.item()
        if when == "after":
            model.loss_function = _own_loss
        own = model(**batch).loss.item()
        handle.undo()
        return {"counted": counted, "own": own, "undone": model(**batch).loss.item()}


@pytest.mark.parametrize("when", ["before", "after"])
def test_losses(pool: Pools, when: str) -> None:
    """`num_items_in_batch` as in transformers; a loss of the user's gets whole logits, set before or after."""
    batch, model = _batch(), build("llama")
    with Exact():
        counted = model(**batch, num_items_in_batch=torch.tensor(17)).loss.item()
        plain = model(**batch).loss.item()
        model.loss_function = _own_loss
        own = model(**batch).loss.item()
    for got in pool(2).run(_losses, batch, when):
        assert got["own"] == pytest.approx(own, abs=TOLERANCE)
        if when == "after":
            assert got["counted"] == pytest.approx(counted, abs=TOLERANCE)
            assert got["undone"] == pytest.approx(plain, abs=TOLERANCE)
        else:
            assert got["undone"] == pytest.approx(own, abs=TOLERANCE)


def _interrupted(batch: dict[str, Tensor]) -> tuple[float, float]:
    from hfdist.parallel.tensor import apply_tensor_parallel

    model = build("llama")
    apply_tensor_parallel(model, _world())
    projection = model.model.layers[0].self_attn.o_proj

    def fail(*_: object) -> None:
        raise KeyError("on purpose")

    with Exact():
        before = model(**batch).loss.item()
        hook = projection.register_forward_pre_hook(fail)
        with pytest.raises(KeyError):
            model(**batch)
        hook.remove()
        assert isinstance(projection.bias, nn.Parameter)
        return before, model(**batch).loss.item()


def test_a_forward_that_raises_leaves_nothing_behind(pool: Pools) -> None:
    for before, after in pool(2).run(_interrupted, _batch()):
        assert before == after


def _last_resort(batch: dict[str, Tensor]) -> tuple[float, Tensors, float, list[str]]:
    from hfdist.parallel.tensor import apply_tensor_parallel

    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("hfdist.parallel.tensor.verify")
    logger.addHandler(handler)
    try:
        model = _codegen()
        handle = apply_tensor_parallel(model, _world())
    finally:
        logger.removeHandler(handler)
    with Exact():
        loss = model(**batch).loss
        loss.backward()
    handle.reduce_partial_gradients()
    gradients = {name: handle.whole(name, g) for name, g in gradients_of(model).items()}
    return loss.item(), gradients, handle.block_share, messages


def _codegen() -> PreTrainedModel:
    """Its fused projection interleaves q, v and k in an order of its own."""
    config = CodeGenConfig(
        vocab_size=VOCAB, n_embd=24, n_layer=2, n_head=4, rotary_dim=4, n_positions=32, n_ctx=32, n_inner=52,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, initializer_range=0.2, use_cache=False,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return CodeGenForCausalLM(config).to(torch.float64).train()


def test_heads_that_cannot_be_spread(pool: Pools) -> None:
    """Weights are split all the same, the result is one process's, and a warning says what it costs."""
    batch, model = _batch(), _codegen()
    with Exact():
        loss = model(**batch).loss
        loss.backward()
    for rank, (got, gradients, share, messages) in enumerate(pool(2).run(_last_resort, batch)):
        assert got == pytest.approx(loss.item(), abs=TOLERANCE)
        assert_same("gradients", gradients, gradients_of(model), TOLERANCE)
        assert share <= 0.6
        assert ["heads cannot be spread" in message for message in messages] == ([True] if rank == 0 else [])


def test_every_style_of_transformers_is_known() -> None:
    from transformers.integrations.tensor_parallel import ALL_PARALLEL_STYLES

    from hfdist.parallel.tensor.styles import REFUSED, STYLES

    assert set(ALL_PARALLEL_STYLES) <= set(STYLES) | set(REFUSED)
    assert not set(STYLES) & set(REFUSED)


def _tried_on_a_shrunken_copy(family: str, batch: dict[str, Tensor]) -> float:
    from hfdist.parallel.tensor import apply_tensor_parallel, verify

    model = build(family, tied=True)
    small, verify._SMALL = verify._SMALL, 0
    try:
        apply_tensor_parallel(model, _world())
    finally:
        verify._SMALL = small
    with Exact():
        return model(**batch).loss.item()


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3", "mixtral"])
def test_large_models_are_tried_in_small(pool: Pools, family: str) -> None:
    batch = _batch()
    with Exact():
        want = build(family, tied=True)(**batch).loss.item()
    assert pool(2).run(_tried_on_a_shrunken_copy, family, batch) == pytest.approx([want, want], abs=TOLERANCE)
