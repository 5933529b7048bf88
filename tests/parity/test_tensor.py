"""Tensor parallelism against one process in fp64: loss, gradients, norm, parameters; what ranks hold and send."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from tests.models import IGNORE, Batch, Recipe, Window, make_windows
from tests.oracle import Step, Tensors, assert_near, assert_same, gradients_of, parameters_of, train
from tests.pool import Pools

TOLERANCE = 1e-10
VOCAB = 61

_DECODER = {
    "hidden_size": 20,
    "intermediate_size": 52,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 6,
    "max_position_embeddings": 32,
}
_GPT2 = {"n_embd": 20, "n_inner": 52, "n_layer": 2, "n_head": 4, "n_positions": 32}
_NO_DROP = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
# Class and what its configuration differs in from the default. Sizes that must divide do by 4, all others are odd.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {**_DECODER, "attention_bias": True, "mlp_bias": True}),
    "llama-kv2": ("Llama", {**_DECODER, "num_key_value_heads": 2, "attention_bias": True}),
    "llama-kv1": ("Llama", {**_DECODER, "num_key_value_heads": 1}),
    "qwen3": ("Qwen3", {**_DECODER, "num_key_value_heads": 2}),
    "gemma": ("Gemma", {**_DECODER, "num_key_value_heads": 1}),
    "gemma2": ("Gemma2", {**_DECODER, "num_key_value_heads": 2}),
    "phi3": ("Phi3", {**_DECODER, "hidden_size": 24, "pad_token_id": None}),
    "mixtral": ("Mixtral", {**_DECODER, "num_local_experts": 3, "num_experts_per_tok": 2}),
    "gpt2": ("GPT2LMHead", {**_GPT2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}),
    "opt": (
        "OPT",
        {
            "hidden_size": 20,
            "ffn_dim": 52,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "dropout": 0.0,
            "max_position_embeddings": 32,
            "word_embed_proj_dim": 13,
            "pad_token_id": 1,
        },
    ),
    "bloom": ("Bloom", {"hidden_size": 20, "n_layer": 2, "n_head": 4, **_NO_DROP}),
    "falcon-alibi": (
        "Falcon",
        {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "alibi": True, "multi_query": False}
        | {**_NO_DROP, "parallel_attn": False, "bias": True},
    ),
    "falcon-mq": (
        "Falcon",
        {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "multi_query": True, **_NO_DROP},
    ),
    "gpt_neox": (
        "GPTNeoX",
        {"hidden_size": 24, "intermediate_size": 52, "num_hidden_layers": 2, "num_attention_heads": 4, **_NO_DROP},
    ),
    "mpt": ("Mpt", {"d_model": 20, "n_heads": 4, "n_layers": 2, "max_seq_len": 32, "expansion_ratio": 2}),
    "gptj": ("GPTJ", {"n_embd": 24, "n_layer": 2, "n_head": 4, "rotary_dim": 4, "n_positions": 32, "n_inner": 52}),
    "bert": (
        "BertForMaskedLM",
        {"hidden_size": 20, "intermediate_size": 52, "num_hidden_layers": 2, "num_attention_heads": 4}
        | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "max_position_embeddings": 32},
    ),
    "roberta": (
        "RobertaForCausalLM",
        {"hidden_size": 20, "intermediate_size": 52, "num_hidden_layers": 2, "num_attention_heads": 4}
        | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "max_position_embeddings": 40}
        | {"is_decoder": True},
    ),
}


class Exact(TorchFunctionMode):
    """Casts of fp64 tensors to fp32, of which transformers does many, do nothing: all is computed in fp64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if args and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            if func is Tensor.float:
                return args[0]
            if kwargs.get("dtype") is torch.float32:
                kwargs = {**kwargs, "dtype": torch.float64}
            if func is Tensor.to:
                args = tuple(torch.float64 if value is torch.float32 else value for value in args)
        return func(*args, **kwargs)


def build(family: str, *, tied: bool = False, seed: int = 7, **changes: Any) -> PreTrainedModel:
    """A 2-block model in fp64, in train mode, with random biases and norms."""
    name, settings = FAMILIES[family]
    config_name = name.removesuffix("LMHead").removesuffix("ForMaskedLM").removesuffix("ForCausalLM") + "Config"
    class_name = {"GPT2LMHead": "GPT2LMHeadModel"}.get(name, name if "For" in name else f"{name}ForCausalLM")
    settings = {"vocab_size": VOCAB, "use_cache": False, "bos_token_id": None, "eos_token_id": None, **settings}
    settings = {"initializer_range": 0.2, "tie_word_embeddings": tied, **settings, **changes}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = getattr(transformers, config_name)(**settings)
        config._experts_implementation = "eager"
        model: PreTrainedModel = getattr(transformers, class_name)(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter.add_(torch.randn(parameter.shape) * 0.1)
    return model.to(torch.float64).train()


@dataclass
class Trained:
    """What a rank saw: steps (whole tensors), bytes of its blocks' parameters, collectives of the last micro-step."""

    steps: list[Step]
    block_bytes: int
    collectives: dict[str, int]
    undone: Tensors


def _train(
    family: str, tied: bool, windows: list[Window], recipe: Recipe, build_args: dict[str, Any], sequence: bool
) -> Trained:
    from hfdist.measure.wire import record_wire
    from hfdist.models.blocks import find_blocks
    from hfdist.parallel.tensor import apply_tensor_parallel

    model = build(family, tied=tied, **build_args)
    optimizers = recipe.build(model)
    assert dist.group.WORLD is not None
    handle = apply_tensor_parallel(model, dist.group.WORLD, sequence_parallel=sequence)
    blocks = sum(p.nbytes for _, block in find_blocks(model) for p in block.parameters())
    steps = []
    with Exact():
        for window in windows:
            model.zero_grad()
            losses = []
            for micro in window:
                with record_wire() as wire:
                    loss = model(**micro[0]).loss
                    (loss / len(window)).backward()
                losses.append(loss.item())
            handle.reduce_partial_gradients()
            gradients = {name: handle.whole(name, gradient) for name, gradient in gradients_of(model).items()}
            norm = handle.norm().item()
            for optimizer in optimizers:
                optimizer.step()
            parameters = {name: handle.whole(name) for name, _ in model.named_parameters()}
            steps.append(Step(sum(losses) / len(losses), norm, gradients, {}, parameters, []))
    handle.undo()
    return Trained(steps, blocks, dict(wire.calls_by_op), parameters_of(model))


def check(
    pool: Pools,
    family: str,
    *,
    size: int,
    tied: bool,
    gas: int,
    optimizer: str,
    limit: float | None = None,
    sequence: bool = False,
    **build_args: Any,
) -> None:
    """Five optimizer steps over `size` ranks against one process; a rank holds `limit` of the blocks' bytes at most."""
    limit = limit or {2: 0.6, 4: 0.4}[size]
    from hfdist.models.blocks import find_blocks

    windows = make_windows(vocab=VOCAB, steps=5, gas=gas, world_size=1)
    if sequence:
        windows = [[[padded(micro[0], size)] for micro in window] for window in windows]
    recipe = Recipe(optimizer)  # type: ignore[arg-type]
    model = build(family, tied=tied, **build_args)
    block_bytes = sum(p.nbytes for _, block in find_blocks(model) for p in block.parameters())
    with Exact():
        want = train(model, windows, optimizers=recipe.build, weighting="mean")
    for rank, trained in enumerate(pool(size).run(_train, family, tied, windows, recipe, build_args, sequence)):
        for number, (ours, theirs) in enumerate(zip(trained.steps, want, strict=True)):
            where = f"{family} rank {rank} step {number}"
            assert_near(f"{where}: loss", ours.loss, theirs.loss, TOLERANCE)
            assert_same(f"{where}: gradients", ours.gradients, theirs.gradients, TOLERANCE)
            assert_near(f"{where}: norm", ours.norm, theirs.norm, TOLERANCE)
            assert_same(f"{where}: parameters", ours.parameters, theirs.parameters, TOLERANCE)
        assert_same(f"{family} rank {rank}: undone", trained.undone, want[-1].parameters, TOLERANCE)
        assert trained.block_bytes <= limit * block_bytes


@pytest.mark.parametrize("family", FAMILIES)
def test_families(pool: Pools, family: str) -> None:
    check(pool, family, size=2, tied=False, gas=1, optimizer="adamw")


@pytest.mark.parametrize(
    ("family", "size", "tied", "gas", "optimizer"),
    [
        ("llama", 4, True, 3, "sgd"),
        ("llama", 2, True, 1, "adamw"),
        ("gpt2", 4, True, 3, "adamw"),
        ("gpt2", 2, True, 3, "sgd"),
        ("qwen3", 2, True, 3, "adamw"),
        ("gemma", 4, True, 1, "adamw"),
        ("gemma", 2, True, 3, "sgd"),
        ("phi3", 4, False, 3, "sgd"),
        ("mixtral", 4, True, 3, "adamw"),
        ("opt", 4, True, 3, "adamw"),
        ("bloom", 4, True, 3, "sgd"),
        ("falcon-mq", 4, True, 3, "adamw"),
        ("falcon-alibi", 4, True, 1, "sgd"),
        ("gpt_neox", 4, True, 3, "adamw"),
        ("mpt", 4, True, 1, "sgd"),
        ("bert", 4, True, 3, "adamw"),
    ],
)
def test_pairwise(pool: Pools, family: str, size: int, tied: bool, gas: int, optimizer: str) -> None:
    """Ties, accumulation, optimizers and group sizes over the families; a copied head makes blocks larger."""
    limit = 0.6 if family in ("qwen3", "gemma", "falcon-mq") else None
    check(pool, family, size=size, tied=tied, gas=gas, optimizer=optimizer, limit=limit)


def padded(batch: Batch, multiple: int) -> Batch:
    """The batch with padding on the right to a length that `multiple` divides."""
    missing = -batch["input_ids"].shape[1] % multiple
    filler = {"input_ids": 0, "attention_mask": 0, "labels": IGNORE}
    return {name: torch.nn.functional.pad(batch[name], (0, missing), value=filler[name]) for name in filler}


@pytest.mark.parametrize(
    ("family", "size", "tied", "gas", "optimizer"),
    [
        ("llama", 2, True, 3, "adamw"),
        ("llama-kv1", 4, False, 1, "sgd"),
        ("qwen3", 2, False, 3, "adamw"),
        ("gpt2", 4, True, 1, "adamw"),
        ("opt", 2, True, 3, "sgd"),
        ("bloom", 2, True, 1, "adamw"),
        ("falcon-alibi", 4, True, 3, "adamw"),
        ("gpt_neox", 2, False, 1, "sgd"),
        ("bert", 2, True, 3, "adamw"),
    ],
)
def test_sequence_parallel(pool: Pools, family: str, size: int, tied: bool, gas: int, optimizer: str) -> None:
    limit = 0.6 if family == "llama-kv1" else None
    check(pool, family, size=size, tied=tied, gas=gas, optimizer=optimizer, limit=limit, sequence=True)


@dataclass
class Wire:
    """Collectives by label in one training step, as (calls, bytes), and bytes by label."""

    calls: dict[str, int]
    bytes: dict[str, int]
    widest: int  # the longest last dimension any tensor had that the loss or the head made


def _wire(family: str, batch: dict[str, Tensor]) -> Wire:
    from hfdist.measure.wire import listen
    from hfdist.parallel.tensor import apply_tensor_parallel

    model = build(family)
    assert dist.group.WORLD is not None
    apply_tensor_parallel(model, dist.group.WORLD)
    calls: dict[str, int] = {}
    sizes: dict[str, int] = {}

    def count(op: str, nbytes: int, group_size: int, label: str) -> None:
        calls[f"{label} {op}"] = calls.get(f"{label} {op}", 0) + 1
        sizes[label] = sizes.get(label, 0) + nbytes

    watch = Widest()
    with Exact(), listen(count), watch:
        model(**batch).loss.backward()
    return Wire(calls, sizes, watch.widest)


class Widest(TorchDispatchMode):
    """The longest last dimension of all tensors that are made, in forward and backward."""

    widest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for made in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(made, Tensor) and made.ndim and made.is_floating_point():
                self.widest = max(self.widest, made.shape[-1])
        return result


@pytest.mark.parametrize(
    "family", ["llama", "qwen3", "gpt2", "gemma", "bloom", "mpt", "mixtral", "gpt_neox", "falcon-alibi", "falcon-mq"]
)
@pytest.mark.parametrize("size", [2, 4])
def test_what_is_sent(pool: Pools, family: str, size: int) -> None:
    """Two all-reduces of (rows, tokens, hidden) a block forward and two backward; the embedding one; the head one."""
    (window,) = make_windows(vocab=VOCAB, steps=1, gas=1, world_size=1, ragged=False)
    batch = window[0][0]
    tokens = batch["input_ids"].numel()
    hidden = {"gpt_neox": 24, "falcon-alibi": 24, "falcon-mq": 24}.get(family, 20)
    ring = 2 * (size - 1) / size
    for wire in pool(size).run(_wire, family, batch):
        # Backward: into each pair and the head; a router's weights are what experts take besides their tokens.
        routed = 2 if family == "mixtral" else 0
        assert wire.calls["tp forward all_reduce"] == 2 * 2 + 1
        assert wire.calls["tp backward all_reduce"] == 2 * 2 + 1 + routed
        assert wire.calls["tp loss all_reduce"] == 2
        assert set(wire.calls) == {"tp forward all_reduce", "tp backward all_reduce", "tp loss all_reduce"}
        unit = tokens * hidden * 8
        assert wire.bytes["tp forward"] == pytest.approx(5 * unit * ring, rel=1e-3)
        assert wire.bytes["tp backward"] == pytest.approx((5 * unit + routed * tokens * 2 * 8) * ring, rel=1e-3)
        # The maximum, the sum and the target's logit of each token.
        assert wire.bytes["tp loss"] == pytest.approx(3 * tokens * 8 * ring, rel=0.05)


def _full_logits(batch: dict[str, Tensor], vocab: int) -> dict[str, Any]:
    from hfdist.measure.wire import record_wire
    from hfdist.parallel.tensor import apply_tensor_parallel

    model = build("llama", vocab_size=vocab)
    assert dist.group.WORLD is not None
    apply_tensor_parallel(model, dist.group.WORLD)
    with Exact():
        watch = Widest()
        with watch:
            outputs = model(**batch)
            outputs.loss.backward()
        with record_wire() as read:
            logits = outputs.logits
        again = [outputs["logits"], outputs[1], outputs.to_tuple()[1]]
        with torch.no_grad():
            evaluated = model(**batch)
        custom = torch.nn.functional.cross_entropy(
            model(**batch).logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten()
        )
        model.zero_grad()
        custom.backward()
    return {
        "widest": watch.widest,
        "read": read.calls_by_op,
        "logits": logits.detach(),
        "same": all(torch.equal(logits, other) for other in again),
        "evaluated": (evaluated.loss, evaluated.logits),
        "loss": outputs.loss.item(),
        "kind": type(outputs).__name__,
        "norm_gradient": model.model.norm.weight.grad,
    }


def test_no_rank_makes_full_logits_in_training(pool: Pools) -> None:
    """A vocabulary wider than anything else: a rank's tensors end at its half. Read, logits are whole."""
    vocab = 211
    (window,) = make_windows(vocab=vocab, steps=1, gas=1, world_size=1)
    batch = window[0][0]
    model = build("llama", vocab_size=vocab)
    with Exact():
        outputs = model(**batch)
        outputs.loss.backward()
    for rank, got in enumerate(pool(2).run(_full_logits, batch, vocab)):
        assert got["widest"] == (105, 106)[rank]
        assert got["read"] == {"all_gather": 1}
        assert got["kind"] == type(outputs).__name__
        assert got["same"]
        assert_near("loss", got["loss"], outputs.loss.item(), TOLERANCE)
        want = {"logits": outputs.logits.detach(), "evaluated": outputs.logits.detach(), "loss": outputs.loss.detach()}
        loss, logits = got["evaluated"]
        assert_same("logits", {"logits": got["logits"], "evaluated": logits, "loss": loss}, want, TOLERANCE)
        assert_same("own loss", {"g": got["norm_gradient"]}, {"g": model.model.norm.weight.grad}, TOLERANCE)
