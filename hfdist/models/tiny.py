"""A registered causal language model of transformers, built tiny: a few kilobytes that train in milliseconds.

    tiny_model("llama")     LlamaForCausalLM, 4 layers of width 32, vocabulary 61
    tiny_model("jamba")     4 layers: 2 of Mamba, 2 of attention
    tiny_model("musicgen")  NotBuilt, with the reason in words

The type's default config is shrunk by what its fields are called, in all its sub-configs; lists with one entry a layer
keep a window of neighbours with the most kinds in it. A field that the class computes itself is left out when it says
so. The few whose sizes depend on each other otherwise are in `_SPECIAL`. Nothing is downloaded.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

NUM_LAYERS = 4
VOCAB_SIZE = 61
# Models that stay larger than this have a part that does not shrink (an image tower, a fixed table).
MAX_PARAMETERS = 8_000_000

_HIDDEN, _INNER, _HEADS, _KV_HEADS, _HEAD = 32, 48, 4, 2, 8


class NotBuilt(Exception):
    """The type cannot be built tiny; the text is the reason."""


def _named(value: int, names: str) -> dict[str, int]:
    return dict.fromkeys(names.split(), value)


# What a config's field is called -> its tiny value.
_SIZES: dict[str, Any] = {
    **_named(VOCAB_SIZE, "vocab_size vocab_size_per_layer_input text_vocab_size"),
    **_named(_HIDDEN, "hidden_size n_embd d_model emb_dim embedding_size word_embed_proj_dim attention_dim"),
    **_named(_HIDDEN, "embedding_dim attention_hidden_size lru_width dim model_dim"),
    **_named(_INNER, "intermediate_size ffn_dim n_inner d_ff dff ffn_hidden_size decoder_ffn_dim encoder_ffn_dim"),
    **_named(_INNER, "dim_ff mlp_hidden_size intermediate_size_mlp block_ff_dim"),
    **_named(24, "moe_intermediate_size shared_expert_intermediate_size moe_shared_expert_intermediate_size"),
    **_named(24, "expert_intermediate_size shared_intermediate_size expert_ffn_hidden_size expert_hidden_size"),
    **_named(NUM_LAYERS, "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers num_blocks"),
    **_named(NUM_LAYERS, "num_decoder_layers num_encoder_layers"),
    **_named(_HEADS, "num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads"),
    **_named(_HEADS, "num_decoder_attention_heads num_encoder_attention_heads linear_num_value_heads lightning_nh"),
    **_named(_KV_HEADS, "num_key_value_heads linear_num_key_heads swa_num_key_value_heads"),
    **_named(_HEAD, "head_dim v_head_dim attention_head_dim linear_key_head_dim linear_value_head_dim dim_head"),
    **_named(_HEAD, "global_head_dim swa_head_dim index_head_dim kv_channels attention_head_size"),
    **_named(4, "num_local_experts num_experts n_routed_experts moe_num_experts index_n_heads index_topk"),
    **_named(2, "num_experts_per_tok moe_topk moe_k num_experts_per_token attn_layer_period"),
    **_named(1, "n_group topk_group n_shared_experts num_shared_experts shared_expert_num first_k_dense_replace"),
    **_named(1, "attn_layer_offset zero_expert_num num_dense_layers moe_layer_start_index"),
    **_named(4, "q_lora_rank kv_lora_rank"),
    **_named(8, "rotary_dim qk_rope_head_dim hidden_size_per_layer_input chunk_size"),
    **_named(8, "mamba_chunk_size mamba_d_head mamba_n_heads n_mamba_heads mamba_head_dim mamba_num_heads"),
    **_named(8, "qk_nope_head_dim time_step_rank mamba_dt_rank"),
    **_named(16, "qk_head_dim state_size mamba_d_state ssm_state_size sliding_window attention_window_size"),
    **_named(1, "mamba_n_groups n_groups"),
    **_named(64, "max_position_embeddings n_positions max_seq_len"),
    **_named(0, "num_nextn_predict_layers"),
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# Fields of towers that are not the language model: as small as they go.
_TOWER = ("vision", "audio", "image", "vq", "speech", "codec")
_TOWER_SIZES = {"image_size": 28, "patch_size": 14, "depth": 2, "embed_dim": 32, "out_hidden_size": 32}

_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_NGRAMS = {"ngram_vocab_size_base": VOCAB_SIZE, "make_ngram_vocab_size_divisible_by": 1, "split_ngram_parts": 1}
_INDEXER = {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 8}

# type -> fields whose sizes hang together in another way than the rest, or that have no default.
_SPECIAL: dict[str, dict[str, Any]] = {
    "blt": {"encoder_hash_byte_group_vocab": VOCAB_SIZE},
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "dots3_note": {"text_config": {"num_key_value_heads": _HEADS}},
    "dots3_note_text": {"num_key_value_heads": _HEADS},
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "kimi_linear": {"linear_num_heads": _HEADS, "linear_head_dim": _HEAD},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "mamba2": {"num_heads": 8},
    "qwen4_exp_text": _NGRAMS | _INDEXER | {"indexer_compress_ratio": 2, "hc_lowrank": 8},
    "reformer": {"is_decoder": True, "axial_pos_embds": False},
    "roc_bert": {"shape_vocab_size": VOCAB_SIZE, "pronunciation_vocab_size": VOCAB_SIZE, "shape_embed_dim": 16},
    "xmod": {"default_language": "en_XX"},
    "zamba2": {"attention_hidden_size": 64, "attention_head_dim": 16},
    "zaya": {"num_experts_per_tok": 1},
}
_SPECIAL["qwen4_exp"] = {"text_config": _SPECIAL["qwen4_exp_text"]}


def causal_types() -> list[str]:
    """Every model type that `AutoModelForCausalLM` of the installed transformers has, sorted."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    return sorted(NAMES)


def tiny_model(model_type: str, *, seed: int = 0) -> nn.Module:
    """A tiny fp32 model of `model_type` in training mode without dropout, the same for the same seed.

    Norms and biases are moved off ones and zeros, so that their gradients matter. Raises NotBuilt with the reason, also
    when its loss is not finite or differs from call to call.
    """
    from transformers import AutoModelForCausalLM

    config = tiny_config(model_type)
    with _quiet(), torch.random.fork_rng(devices=[]):
        try:
            with torch.device("meta"):
                size = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
        except Exception:
            size = 0  # some compute with their weights while they are built
        if size > MAX_PARAMETERS:
            raise NotBuilt(f"{size / 1e6:.0f} M parameters remain when its config is shrunk")
        torch.manual_seed(seed)
        try:
            model: nn.Module = AutoModelForCausalLM.from_config(config).float().train()
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter.data += torch.randn_like(parameter) * 0.02
            _without_dropout(model)
            batch = tiny_batch()
            with torch.no_grad():
                first, second = (model(**batch).loss for _ in range(2))
        except Exception as error:
            raise NotBuilt(_reason(error)) from error
    if first is None or not torch.isfinite(first):
        raise NotBuilt("its loss on plain token ids is not finite")
    if not torch.equal(first, second):
        raise NotBuilt("its loss differs from call to call")
    return model


def tiny_batch(rows: int = 4, length: int = 9) -> dict[str, Tensor]:
    """Token ids and labels (rows, length), always the same."""
    ids = torch.randint(3, VOCAB_SIZE, (rows, length), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids.clone()}


def tiny_config(model_type: str) -> Any:
    """The shrunk config of `model_type`; raises NotBuilt."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    with _quiet():
        try:
            default = CONFIG_MAPPING[model_type]()
        except Exception as error:
            raise NotBuilt(f"its config has no defaults ({_reason(error)})") from error
        fields = _shrink(default)
        for name, value in _SPECIAL.get(model_type, {}).items():
            fields[name] = fields.get(name, {}) | value if name.endswith("_config") else value
        return _construct(type(default), fields)


def _shrink(config: Any, *, tower: bool = False) -> dict[str, Any]:
    """The fields of `config` that change, sub-configs as dicts."""
    sizes = _SIZES | _TOWER_SIZES if tower else _SIZES
    plain = config.to_dict()
    depth = next((plain[n] for n in ("num_hidden_layers", "n_layer", "num_layers") if n in plain), None)
    fields: dict[str, Any] = {}
    for name, value in {**plain, **vars(config)}.items():
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            fields[name] = _shrink(value, tower=tower or name.startswith(_TOWER))
            fields[name]["model_type"] = value.model_type
        elif name in sizes and (isinstance(value, int) or name.endswith("token_id") or name in _FILLED):
            fields[name] = sizes[name]
        elif isinstance(value, float) and ("drop" in name or "jitter" in name):
            fields[name] = 0.0
        elif isinstance(value, list) and depth and len(value) == depth:
            fields[name] = _window(value, NUM_LAYERS)
    if "kv_lora_rank" in fields and "num_key_value_heads" in fields:
        fields["num_key_value_heads"] = _HEADS  # latent attention has as many
    fields.setdefault("pad_token_id", 0)
    fields["use_cache"] = False
    return fields


# Of these None means "by a rule of its own", which tiny sizes would break.
_FILLED = ("n_inner", "num_key_value_heads", "head_dim")


def _window(values: list[Any], length: int) -> list[Any]:
    """`length` neighbours of `values` with the most kinds in them, the first such."""
    starts = range(max(1, len(values) - length + 1))
    best = max(starts, key=lambda i: (len({str(v) for v in values[i : i + length]}), -i))
    window = values[best : best + length]
    return window + window[-1:] * (length - len(window))


def _construct(cls: type, fields: dict[str, Any]) -> Any:
    """`cls(**fields)`, without the fields that the class says it has no place for."""
    fields = dict(fields)
    while True:
        try:
            return cls(**fields)
        except Exception as error:
            named = [name for name in re.findall(r"['\"`](\w+)['\"`]", str(error)) if name in fields]
            if not named or isinstance(error, KeyError):
                raise NotBuilt(_reason(error)) from error
            del fields[named[0]]


def _without_dropout(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if isinstance(value, float) and ("drop" in name or "jitter" in name):
                setattr(module, name, 0.0)


def _reason(error: BaseException) -> str:
    """The first line of an error that says something, with the error's kind."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = next((line for line in lines if not line.startswith("Class validation")), "")
    return f"{type(error).__name__}: {text}"[:160]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No advice of transformers while configs are tried."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
