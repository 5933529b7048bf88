"""Tensor parallelism against one process in fp64: loss, every gradient, norm and parameter, what ranks hold and send."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from tests.models import Recipe, Window, make_windows
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
            **{"hidden_size": 20, "ffn_dim": 52, "num_hidden_layers": 2, "num_attention_heads": 4, "dropout": 0.0},
            **{"max_position_embeddings": 32, "word_embed_proj_dim": 13, "pad_token_id": 1},
        },
    ),
    "bloom": ("Bloom", {"hidden_size": 20, "n_layer": 2, "n_head": 4, **_NO_DROP}),
    "falcon-alibi": (
        "Falcon",
        {"hidden_size": 20, "num_hidden_layers": 2, "num_attention_heads": 4, "alibi": True, "multi_query": False}
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
    """Casts of fp64 tensors to fp32, of which transformers does many, do nothing: all of a model is computed in fp64."""

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
    """What a rank saw: steps with whole tensors, bytes of its blocks' parameters, collectives of the last micro-step."""

    steps: list[Step]
    block_bytes: int
    collectives: dict[str, int]
    undone: Tensors


def _train(family: str, tied: bool, windows: list[Window], recipe: Recipe, build_args: dict[str, Any]) -> Trained:
    from hfdist.measure.wire import record_wire
    from hfdist.models.blocks import find_blocks
    from hfdist.parallel.tensor import apply_tensor_parallel

    model = build(family, tied=tied, **build_args)
    optimizers = recipe.build(model)
    assert dist.group.WORLD is not None
    handle = apply_tensor_parallel(model, dist.group.WORLD)
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


def check(pool: Pools, family: str, *, size: int, tied: bool, gas: int, optimizer: str, **build_args: Any) -> None:
    """Five optimizer steps over `size` ranks against one process."""
    from hfdist.models.blocks import find_blocks

    windows = make_windows(vocab=VOCAB, steps=5, gas=gas, world_size=1)
    recipe = Recipe(optimizer)  # type: ignore[arg-type]
    model = build(family, tied=tied, **build_args)
    block_bytes = sum(p.nbytes for _, block in find_blocks(model) for p in block.parameters())
    with Exact():
        want = train(model, windows, optimizers=recipe.build, weighting="mean")
    for rank, trained in enumerate(pool(size).run(_train, family, tied, windows, recipe, build_args)):
        for number, (ours, theirs) in enumerate(zip(trained.steps, want, strict=True)):
            where = f"{family} rank {rank} step {number}"
            assert_near(f"{where}: loss", ours.loss, theirs.loss, TOLERANCE)
            assert_same(f"{where}: gradients", ours.gradients, theirs.gradients, TOLERANCE)
            assert_near(f"{where}: norm", ours.norm, theirs.norm, TOLERANCE)
            assert_same(f"{where}: parameters", ours.parameters, theirs.parameters, TOLERANCE)
        assert_same(f"{family} rank {rank}: undone", trained.undone, want[-1].parameters, TOLERANCE)
        assert trained.block_bytes <= (0.6 if size == 2 else 0.45) * block_bytes


@pytest.mark.parametrize("family", FAMILIES)
def test_families(pool: Pools, family: str) -> None:
    check(pool, family, size=2, tied=False, gas=1, optimizer="adamw")
