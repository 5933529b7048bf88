"""The engines that can be compared, and how each is launched from one and the same yaml.

    name              what runs the script                             launched with
    hfdist            hfdist's own engine: the base, always            the yaml as it is
    native            accelerate's own engine for the yaml's type      the yaml as it is, equal work (`equal_work`)
    native-memory     DeepSpeed at its own best for memory             the same, and `MEMORY_SAVING`
    native-cpuadam    DeepSpeed with its own DeepSpeedCPUAdam          the same, the optimizer replaced
    fsdp2             bare `fully_shard` of blocks and root            MULTI_GPU
    ddp               accelerate's plain DDP                           MULTI_GPU
    single            one process with the global batch                NO, 1 process

`native` in `--against` brings its two other columns along when the yaml is a DEEPSPEED one (`extras`).

Equal work. DeepSpeed clips at 1.0 where nobody asked for clipping: it is told the yaml's value, or 0. In bf16 and fp16
it reduces and accumulates gradients in that dtype: it is told fp32, as hfdist does, unless hfdist was asked for
`reduce_dtype: compute`. Under CPU offload it replaces the script's optimizer: it is told not to. What remains of its
own (when ZeRO-3 drops parameters after forward, the sizes of its buckets) is left at its defaults in `native`, shown in
the report, and turned to memory in `native-memory`, which at stage 3 is the policy hfdist has. The engines launched as
MULTI_GPU clip and accumulate as the DEEPSPEED yaml says, since their own yaml has no key for it.
"""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from hfdist.errors import ConfigError, nearest, say

BASE = "hfdist"
ENGINES: dict[str, str] = {
    "hfdist": "hfdist's own engine",
    "native": "accelerate's own engine for the same yaml",
    "native-memory": "DeepSpeed, set for least memory",
    "native-cpuadam": "DeepSpeed with DeepSpeedCPUAdam in place of the script's Adam",
    "fsdp2": "bare fully_shard",
    "ddp": "accelerate's DDP",
    "single": "one process, the global batch",
}
_EXTRAS = ("native-memory", "native-cpuadam")

# ZeRO-3 frees a unit after its forward, as hfdist does; buckets of 1 M elements at all stages.
MEMORY_SAVING: dict[str, Any] = {
    "zero_optimization": {
        "stage3_max_live_parameters": 0,
        "stage3_max_reuse_distance": 0,
        "stage3_param_persistence_threshold": 0,
        "stage3_prefetch_bucket_size": 0,
        "reduce_bucket_size": 1_000_000,
        "allgather_bucket_size": 1_000_000,
    }
}


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What the yaml asks of every engine."""

    # DEEPSPEED, FSDP, MULTI_GPU, ...
    distributed_type: str
    num_processes: int
    stage: int = 0
    clipping: float | None = None
    accumulation: int = 1
    # "no", "bf16" or "fp16".
    precision: str = "no"
    # "fp32", or "compute" for reductions in `precision`.
    reduce_dtype: str = "fp32"
    # What the launcher exports for the yaml: how hfdist gets a DEEPSPEED yaml where deepspeed is not installed, which
    # accelerate's launcher would need for that type. Empty where it is.
    exported: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Recipe:
    """How one engine is launched: its yaml's content, extra environment, and what the ranks are told."""

    content: dict[str, Any]
    environ: dict[str, str] = field(default_factory=dict)
    # Merged into DeepSpeed's own configuration.
    overrides: dict[str, Any] = field(default_factory=dict)


def parse_against(text: str, *, distributed_type: str, extras: bool = True) -> list[str]:
    """`native,fsdp2` -> the engines to run, hfdist first, each once. Raises ConfigError for a name that is none."""
    chosen = [BASE]
    for name in (word.strip() for word in text.split(",")):
        if name and name not in ENGINES:
            raise ConfigError(
                say(
                    given=f"--against {name}{nearest(name, ENGINES)}",
                    expected=f"names out of {', '.join(list(ENGINES)[1:])}, separated by commas",
                    do="Correct the name or leave it out.",
                )
            )
        with_extras = name == "native" and extras and distributed_type == "DEEPSPEED"
        for engine in (name, *(_EXTRAS if with_extras else ())):
            if engine and engine not in chosen:
                chosen.append(engine)
    return chosen


def equal_work(asked: Asked) -> dict[str, Any]:
    """DeepSpeed settings that give it the work that hfdist has under the same yaml."""
    overrides: dict[str, Any] = {
        "gradient_clipping": asked.clipping or 0.0,
        "zero_force_ds_cpu_optimizer": False,
    }
    if asked.precision != "no" and asked.reduce_dtype == "fp32":
        overrides["communication_data_type"] = "fp32"
        overrides["data_types"] = {"grad_accum_dtype": "fp32"}
    return overrides


def launch_recipe(engine: str, content: Mapping[str, Any], asked: Asked) -> Recipe:
    """How `engine` is launched. Raises ConfigError when it cannot run such a yaml; the text is its row."""
    content = {**copy.deepcopy(dict(content)), "num_processes": asked.num_processes, "main_process_port": 0}
    if engine == BASE:
        if not asked.exported:
            return Recipe(content)
        return Recipe({**content, "distributed_type": "MULTI_GPU", "deepspeed_config": {}}, dict(asked.exported))
    if engine.startswith("native"):
        if engine != "native" and asked.distributed_type != "DEEPSPEED":
            raise ConfigError(
                say(
                    given=f"{engine} and a yaml of type {asked.distributed_type}",
                    expected="distributed_type: DEEPSPEED",
                    do="Leave it out, or compare such a yaml.",
                )
            )
        overrides = equal_work(asked) if asked.distributed_type == "DEEPSPEED" else {}
        if engine == "native-memory":
            overrides = merge(overrides, MEMORY_SAVING)
        return Recipe(content, {"HFDIST_ENGINE": "native"}, overrides)
    if engine == "fsdp2" and asked.precision == "fp16":
        raise ConfigError(
            say(
                given="fsdp2 with mixed_precision: fp16",
                expected="bf16 or full precision: bare fully_shard has no loss scaler",
                do="Compare in bf16.",
            )
        )
    kind = "NO" if engine == "single" else "MULTI_GPU"
    content["distributed_type"] = kind
    for section in ("deepspeed_config", "fsdp_config", "megatron_lm_config", "parallelism_config"):
        content[section] = {}
    if engine == "single":
        content["num_processes"] = 1
    environ = {"HFDIST_ENGINE": "native"}
    if asked.accumulation > 1:
        environ["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] = str(asked.accumulation)
    return Recipe(content, environ)


def merge(into: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """`into` with `more` over it, sections merged."""
    result = dict(into)
    for key, value in more.items():
        both = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
        result[key] = merge(result[key], value) if both else copy.deepcopy(value)
    return result


def read_asked(config: str, *, num_processes: int | None, environ: Mapping[str, str]) -> tuple[dict[str, Any], Asked]:
    """The yaml's content and what it asks, read by accelerate's own code and hfdist's. Raises ConfigError."""
    from hfdist.config import read_native_settings
    from hfdist.config.launcher import environment_of_yaml, load_yaml, verify_yaml_sections

    verify_yaml_sections(config)
    content = dict(load_yaml(config))
    count = num_processes or content.get("num_processes")
    ranks = count if isinstance(count, int) and count > 0 else 1
    launched = environment_of_yaml(config, num_processes=ranks)
    settings = read_native_settings({**environ, **launched})
    type_ = str(content.get("distributed_type", "NO"))
    return content, Asked(
        distributed_type=type_,
        num_processes=ranks,
        stage=settings.zero.stage,
        clipping=settings.gradient_clipping,
        accumulation=settings.gradient_accumulation_steps,
        precision=settings.amp.dtype if settings.amp else "no",
        reduce_dtype=settings.zero.reduce_dtype,
        exported={} if type_ != "DEEPSPEED" or importlib.util.find_spec("deepspeed") else launched,
    )


def as_json(asked: Asked) -> dict[str, Any]:
    """`Asked` for compare.json and for the ranks."""
    return asdict(asked)
