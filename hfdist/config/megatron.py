"""Megatron-LM's vocabulary -> claims: the `megatron_lm_config:` section (exported as `MEGATRON_LM_*`) and a
`MegatronLMPlugin`. hfdist runs what it can of it on its own engine; megatron itself is not needed.

The launcher exports gradient_clipping 1.0 when the yaml has no such key, so 1.0 is not taken for a wish.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from hfdist.config.ledger import Ledger
from hfdist.config.values import is_unsaid, read_bool, read_float
from hfdist.errors import ConfigError, nearest, say

_CLAIMED = {
    "tp_degree": "tp_size",
    "pp_degree": "pp_size",
    "num_micro_batches": "num_micro_batches",
    "sequence_parallelism": "sequence_parallel",
}
_LATER = {
    "context_parallel_size": "cp_size",
    "expert_model_parallel_size": "ep_size",
    "expert_tensor_parallel_size": "ep_size",
    "optimizer_cpu_offload": "offload_optimizer",
}
_HINTS = (
    "recompute_granularity",
    "recompute_method",
    "recompute_num_layers",
    "attention_backend",
    "is_train_batch_min",
)
# key -> (values that ask for nothing, what to do). The model is the user's own HF model, not Megatron's.
_REFUSED = {
    "use_custom_fsdp": (("false",), "For sharded parameters use a DEEPSPEED yaml with zero_stage: 3 or an FSDP yaml."),
    "decoder_last_pipeline_num_layers": ((), 'Give the layers of all stages as HFDIST_PP_SPLIT or "pp_split" instead.'),
    "num_layers_per_virtual_pipeline_stage": (
        (),
        "Give HFDIST_NUM_VIRTUAL_STAGES and an interleaved HFDIST_PP_SCHEDULE.",
    ),
    "pipeline_model_parallel_split_rank": ((), "Remove it; encoder-decoder models are not cut into stages."),
    "overlap_cpu_optimizer_d2h_h2d": (("false",), "Remove it."),
    "use_precision_aware_optimizer": (("false",), "Remove it; optimizer state is fp32."),
    "no_load_optim": (("false",), "Remove it and load only the model in the script."),
    "no_save_optim": (("false",), "Remove it and save only the model in the script."),
    "eod_mask_loss": (("false",), "Remove it and set labels to -100 there."),
    "attention_dropout": (("0.0", "0"), "Set the dropout in the model's config."),
    "hidden_dropout": (("0.0", "0"), "Set the dropout in the model's config."),
    "attention_softmax_in_fp32": (("true",), "Remove it; the model's own attention decides."),
    "use_rotary_position_embeddings": (("true",), "Remove it; the model's own config decides."),
}
_HONOURED = ("gradient_clipping", "recompute_activations", "use_distributed_optimizer", "calculate_per_token_loss")
_KNOWN = (*_CLAIMED, *_LATER, *_HINTS, *_REFUSED, *_HONOURED)
# Keys of the `megatron_lm_config:` section.
YAML_KEYS = tuple(f"megatron_lm_{name}" for name in _KNOWN)


def read_megatron_environment(ledger: Ledger, environ: Mapping[str, str]) -> None:
    """Claims of a MEGATRON_LM yaml. An unknown `MEGATRON_LM_*` variable is an error with the nearest name."""
    prefix = "MEGATRON_LM_"
    for variable, value in environ.items():
        if variable.startswith(prefix):
            key = variable.removeprefix(prefix).lower()
            _read(ledger, key, value, origin=f"the yaml's megatron_lm_config, megatron_lm_{key}")


def read_megatron_plugin(ledger: Ledger, plugin: object) -> None:
    """Claims of a `MegatronLMPlugin`: fields its constructor fills are read as in the yaml, others must be defaults."""
    defaults = {field.name: field.default for field in dataclasses.fields(plugin)}  # type: ignore[arg-type]
    for key, default in defaults.items():
        value = getattr(plugin, key)
        origin = f"Accelerator(megatron_lm_plugin=), {key}"
        if key == "context_parallel_size" and value == 2:
            continue  # accelerate's constructor writes 2 when nobody said (1.15), and then never uses it
        if key in _KNOWN:
            _read(ledger, key, value, origin=origin)
        elif value != default:
            ledger.refuse(f"{key} = {value!r}", origin=origin, why="no Megatron-LM objects", do="Remove it.")


def _read(ledger: Ledger, key: str, value: object, *, origin: str) -> None:
    if key not in _KNOWN:
        raise ConfigError(
            say(
                given=f"the unknown key {key!r} ({origin})",
                expected="a key accelerate has",
                do=f"Correct the name{nearest(key, _KNOWN)} or remove it.",
            )
        )
    if is_unsaid(value):
        return
    if key in _CLAIMED:
        ledger.claim(_CLAIMED[key], value, origin=origin)
    elif key in _LATER:
        ledger.later(_LATER[key], value, origin=origin)
    elif key in _HINTS:
        if key not in ("is_train_batch_min",):
            ledger.hint(key, origin="Megatron-LM")
    elif key in _REFUSED:
        harmless, do = _REFUSED[key]
        if str(value).strip().lower() not in harmless:
            why = f"{key} = {harmless[0]}" if harmless else f"a configuration without {key}"
            ledger.refuse(f"{key} = {value!r}", origin=origin, why=why, do=do)
    elif key == "gradient_clipping":
        _read_clipping(ledger, value, origin=origin)
    elif key == "recompute_activations":
        if _flag(value, origin):
            ledger.claim("activation_checkpointing", True, origin=origin)
    elif key == "use_distributed_optimizer":
        if _flag(value, origin):
            ledger.claim("zero_stage", 1, origin=f"{origin} (a distributed optimizer is ZeRO-1)")
    elif key == "calculate_per_token_loss":
        ledger.claim("loss_weighting", "tokens" if _flag(value, origin) else "mean", origin=origin)


def _read_clipping(ledger: Ledger, value: object, *, origin: str) -> None:
    try:
        limit = read_float(value)
    except ValueError as error:
        raise ConfigError(say(given=f"{value!r} from {origin}", expected=str(error), do="0 clips nothing.")) from None
    if limit == 1.0:
        ledger.notice(
            f"{origin} = 1.0 is also what the launcher exports when the key is absent: nothing is clipped; "
            "HFDIST_GRADIENT_CLIPPING=1.0 clips"
        )
    else:
        ledger.claim("gradient_clipping", limit, origin=origin)


def _flag(value: object, origin: str) -> bool:
    try:
        return read_bool(value)
    except ValueError as error:
        raise ConfigError(say(given=f"{value!r} from {origin}", expected=str(error), do="Correct it.")) from None
