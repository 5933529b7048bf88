"""FSDP's vocabulary -> claims: the `fsdp_config:` section of an accelerate yaml (exported as `FSDP_*`) and a
`FullyShardedDataParallelPlugin`.

Worked example. `fsdp_version: 2`, `fsdp_reshard_after_forward: true` is ZeRO-3; `false` is ZeRO-2. Version 1 names
strategies instead: FULL_SHARD is 3, SHARD_GRAD_OP 2, NO_SHARD 0, and the HYBRID ones shard inside a machine and
replicate between machines, so 2 machines of 4 processes have dp_replicate_size 2. The launcher exports every key,
chosen or not; values equal to its defaults count as unsaid.
"""

from __future__ import annotations

from collections.abc import Mapping

from hfdist.config.deepspeed import claim_reduce_dtype
from hfdist.config.ledger import Ledger, Strength
from hfdist.config.values import is_unsaid, read_bool
from hfdist.errors import ConfigError, nearest, say

# What `accelerate launch` exports for keys the yaml leaves out; None: not exported then. They only tune FSDP.
_HINTS: dict[str, str | None] = {
    "BACKWARD_PREFETCH": None,
    "FORWARD_PREFETCH": "false",
    "USE_ORIG_PARAMS": "true",
    "SYNC_MODULE_STATES": "true",
    "CPU_RAM_EFFICIENT_LOADING": "true",
    "STATE_DICT_TYPE": None,
    "LIMIT_ALL_GATHERS": None,
    "MIN_NUM_PARAMS": "100000000",
}
_HANDLED = (
    *("VERSION", "SHARDING_STRATEGY", "RESHARD_AFTER_FORWARD", "OFFLOAD_PARAMS", "AUTO_WRAP_POLICY"),
    *("TRANSFORMER_CLS_TO_WRAP", "ACTIVATION_CHECKPOINTING", "ACTIVATION_CHECKPOINTING_OFFLOAD", "IGNORED_MODULES"),
)
_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
_STAGES = {"FULL_SHARD": 3, "SHARD_GRAD_OP": 2, "NO_SHARD": 0, "HYBRID_SHARD": 3, "HYBRID_SHARD_ZERO2": 2}
# Keys of the `fsdp_config:` section.
YAML_KEYS = tuple(
    f"fsdp_{name.lower()}".replace("transformer_cls", "transformer_layer_cls") for name in (*_HANDLED, *_HINTS)
)


def read_fsdp_environment(ledger: Ledger, environ: Mapping[str, str]) -> None:
    """Claims of an FSDP yaml, version 1 or 2. An unknown `FSDP_*` variable is an error with the nearest name."""
    given = {name.removeprefix("FSDP_"): value for name, value in environ.items() if name.startswith("FSDP_")}
    for name in given:
        if name not in _HANDLED and name not in _HINTS:
            raise ConfigError(
                say(
                    given=f"the unknown variable FSDP_{name}",
                    expected="a variable accelerate has",
                    do=f"Correct the name{nearest('FSDP_' + name, ['FSDP_' + k for k in (*_HANDLED, *_HINTS)])} "
                    "or remove it.",
                )
            )
    if given.get("VERSION", "1") == "2":
        _claim_reshard(ledger, given.get("RESHARD_AFTER_FORWARD", "true"), origin=_yaml("reshard_after_forward"))
    else:
        strategy = given.get("SHARDING_STRATEGY", "FULL_SHARD")
        _claim_strategy(ledger, strategy, environ, origin=_yaml("sharding_strategy"))
    ledger.later("offload_param", given.get("OFFLOAD_PARAMS"), origin=_yaml("offload_params"))
    _claim_checkpointing(
        ledger,
        given.get("ACTIVATION_CHECKPOINTING", "false"),
        given.get("ACTIVATION_CHECKPOINTING_OFFLOAD", "false"),
        origin=_yaml("activation_checkpointing"),
    )
    ledger.claim("block_classes", given.get("TRANSFORMER_CLS_TO_WRAP"), origin=_yaml("transformer_layer_cls_to_wrap"))
    policy = given.get("AUTO_WRAP_POLICY", "")
    if policy.upper() in ("NO_WRAP", "SIZE_BASED_WRAP"):
        ledger.notice(
            f"{_yaml('auto_wrap_policy')} = {policy}: hfdist always shards block by block, as the model names"
        )
    if not is_unsaid(given.get("IGNORED_MODULES")):
        _refuse_ignored(ledger, origin=_yaml("ignored_modules"))
    for name, default in _HINTS.items():
        if name in given and given[name].lower() not in (default, "none"):
            ledger.hint(f"fsdp_{name.lower()}", origin="the yaml's fsdp_config")


def read_fsdp_plugin(ledger: Ledger, plugin: object, environ: Mapping[str, str]) -> None:
    """Claims of a `FullyShardedDataParallelPlugin` (its own constructor already filled fields left out)."""
    origin = "Accelerator(fsdp_plugin=)"
    fields = dict(vars(plugin))
    if fields["fsdp_version"] == 2:
        _claim_reshard(ledger, fields["reshard_after_forward"], origin=f"{origin}, reshard_after_forward")
    else:
        strategy = fields["sharding_strategy"] or fields["reshard_after_forward"]
        name = getattr(strategy, "name", strategy)
        _claim_strategy(ledger, str(name), environ, origin=f"{origin}, sharding_strategy")
    offload = fields["cpu_offload"]
    offloads = getattr(offload, "offload_params", type(offload).__name__ == "CPUOffloadPolicy")
    ledger.later("offload_param", bool(offload and offloads), origin=f"{origin}, cpu_offload")
    _claim_checkpointing(
        ledger,
        fields["activation_checkpointing"],
        fields.get("activation_checkpointing_offload", False),
        origin=f"{origin}, activation_checkpointing",
    )
    names = fields["transformer_cls_names_to_wrap"]
    if names:
        ledger.claim("block_classes", names, origin=f"{origin}, transformer_cls_names_to_wrap")
    if fields["ignored_modules"]:
        _refuse_ignored(ledger, origin=f"{origin}, ignored_modules")
    policy = fields["mixed_precision_policy"]
    if policy is not None and policy.param_dtype is not None:
        ledger.claim("mixed_precision", policy.param_dtype, origin=f"{origin}, mixed_precision_policy.param_dtype")
        if policy.reduce_dtype is not None:
            claim_reduce_dtype(ledger, policy.reduce_dtype, origin=f"{origin}, mixed_precision_policy.reduce_dtype")
    for name in ("state_dict_type", "backward_prefetch", "forward_prefetch", "param_init_fn"):
        if fields.get(name) is not None:
            ledger.hint(name, origin=origin)


def _claim_reshard(ledger: Ledger, value: object, *, origin: str) -> None:
    try:
        reshard = read_bool(value)
    except ValueError as error:
        raise ConfigError(
            say(given=f"{value!r} from {origin}", expected=str(error), do="true is ZeRO-3, false is ZeRO-2.")
        ) from None
    # Exported as "true" when the yaml says nothing, so a script's plugin may say otherwise.
    strength = Strength.DEFAULT if reshard and origin.startswith("the yaml") else Strength.SAID
    ledger.claim("zero_stage", 3 if reshard else 2, origin=origin, strength=strength)


def _claim_strategy(ledger: Ledger, value: str, environ: Mapping[str, str], *, origin: str) -> None:
    """Version 1. `value` is a name or, as FSDP1 allows, its number from 1."""
    name = value.upper()
    if name.isdigit() and 1 <= int(name) <= len(_STRATEGIES):
        name = _STRATEGIES[int(name) - 1]
    name = name.lstrip("_")
    if name not in _STAGES:
        raise ConfigError(
            say(
                given=f"{value!r} from {origin}",
                expected=f"one of {', '.join(_STRATEGIES)}",
                do=f"Correct it{nearest(name, _STRATEGIES)}, or use fsdp_version: 2.",
            )
        )
    ledger.claim("zero_stage", _STAGES[name], origin=f"{origin} = {name} (fsdp_version 1)")
    ledger.notice(f"{origin} = {name}: ZeRO stage {_STAGES[name]} (fsdp_version 1 has no engine of its own here)")
    if name.startswith("HYBRID"):
        world, local = (environ.get(key, "") for key in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
        if world.isdigit() and local.isdigit() and int(local):
            replicas = max(int(world) // int(local), 1)
            ledger.claim("dp_replicate_size", replicas, origin=f"{origin} = {name}, one replica a machine")


def _claim_checkpointing(ledger: Ledger, on: object, offload: object, *, origin: str) -> None:
    ledger.later("offload_activations", offload, origin=f"{origin}_offload")
    if read_bool(on):
        ledger.claim("activation_checkpointing", True, origin=origin)


def _refuse_ignored(ledger: Ledger, *, origin: str) -> None:
    ledger.refuse(
        "modules left out of sharding",
        origin=origin,
        why="every module sharded: a frozen or replicated module costs memory on every rank",
        do="Remove it; frozen modules are supported as they are.",
    )


def _yaml(key: str) -> str:
    return f"the yaml's fsdp_config, fsdp_{key}"
