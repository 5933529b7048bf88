"""accelerate's `parallelism_config:` (exported as `PARALLELISM_CONFIG_*`) or a `ParallelismConfig` -> claims.

Worked example, 4 processes: dp_replicate_size 2 and dp_shard_size 2 are 2 replicas of a model sharded over 2 ranks
(ZeRO-3 with dp_replicate_size 2); dp_shard_size 4 alone is ZeRO-3 over all; dp_replicate_size 4 alone is plain data
parallel (stage 0). The product must be the number of processes.
"""

from __future__ import annotations

from collections.abc import Mapping

from hfdist.config.ledger import Ledger, Strength
from hfdist.config.values import read_count
from hfdist.errors import ConfigError, nearest, say

_SIZES = ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size")
# They only say how a size above 1 is carried out.
_DETAILS = (
    *("cp_backend", "cp_comm_strategy", "sp_backend", "sp_seq_length", "sp_seq_length_is_variable"),
    "sp_attn_implementation",
)
# Keys of the `parallelism_config:` section.
YAML_KEYS = tuple(f"parallelism_config_{name}" for name in (*_SIZES, *_DETAILS))


def read_parallelism_environment(ledger: Ledger, environ: Mapping[str, str]) -> None:
    """Claims of a yaml's parallelism_config. An unknown variable is an error with the nearest name."""
    prefix = "PARALLELISM_CONFIG_"
    sizes: dict[str, object] = {}
    for variable, value in environ.items():
        if not variable.startswith(prefix):
            continue
        key = variable.removeprefix(prefix).lower()
        if key in _SIZES:
            sizes[key] = value
        elif key not in _DETAILS:
            raise ConfigError(
                say(
                    given=f"the unknown variable {variable}",
                    expected="a variable accelerate has",
                    do=f"Correct the name{nearest(key, (*_SIZES, *_DETAILS))} or remove it.",
                )
            )
    _claim_sizes(ledger, sizes, environ, origin="the yaml's parallelism_config")


def read_parallelism_object(ledger: Ledger, config: object, environ: Mapping[str, str]) -> None:
    """Claims of a `ParallelismConfig` object."""
    sizes = {key: getattr(config, key) for key in _SIZES}
    _claim_sizes(ledger, sizes, environ, origin="Accelerator(parallelism_config=)")


def _claim_sizes(ledger: Ledger, given: Mapping[str, object], environ: Mapping[str, str], *, origin: str) -> None:
    for key in ("cp_size", "sp_size"):
        ledger.later(key, given.get(key), origin=origin)
    replicas, shards, tensor = (_size(given.get(key), key, origin) for key in _SIZES[:3])
    world = environ.get("WORLD_SIZE", "")
    if replicas * shards * tensor == 1:
        return
    if tensor > 1:
        ledger.claim("tp_size", tensor, origin=f"{origin}, tp_size")
    if world.isdigit() and replicas * shards * tensor != int(world):
        ledger.refuse(
            f"dp_replicate_size {replicas} x dp_shard_size {shards} x tp_size {tensor}",
            origin=origin,
            why=f"a product of {world}, the number of processes",
            do="Correct the sizes or num_processes.",
        )
    if shards == 1:
        ledger.claim("zero_stage", 0, origin=f"{origin}, dp_replicate_size without dp_shard_size")
        return
    # A yaml's fsdp or deepspeed section may choose 2 instead: a default only.
    ledger.claim("zero_stage", 3, origin=f"{origin}, dp_shard_size", strength=Strength.DEFAULT)
    ledger.claim("dp_replicate_size", replicas, origin=f"{origin}, dp_replicate_size")


def _size(value: object, key: str, origin: str) -> int:
    try:
        return 1 if value is None else read_count(value)
    except ValueError as error:
        raise ConfigError(
            say(given=f"{key} = {value!r} from {origin}", expected=str(error), do="Leave it out for 1.")
        ) from None
