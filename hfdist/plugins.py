"""What a user may ask for, as frozen dataclasses; the only shape in which a setting travels inside hfdist.

`config.py` makes these from an accelerate yaml, a DeepSpeed json, `HFDIST_*` or explicit arguments; everything to its
right reads them. A value that can never be right is refused here, on construction.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from hfdist.errors import ConfigError, say

ComputeMode = Literal["mixed", "cast", "autocast"]
ReduceDtype = Literal["fp32", "compute", "bf16"]
GatherDtype = Literal["compute", "int8"]
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble", "zbv", "pipedream")


def _require(ok: bool, *, given: str, expected: str, do: str) -> None:
    if not ok:
        raise ConfigError(say(given=given, expected=expected, do=do))


@dataclass(frozen=True, kw_only=True)
class ZeroPlugin:
    """ZeRO, Rajbhandari et al. 2020 (arXiv:1910.02054), on torch FSDP2. One switch, also live."""

    # 0 replicates, 1 shards optimizer state, 2 also gradients, 3 also parameters.
    stage: int = 3
    # Number of replicas of the sharded model (hybrid sharding); must divide the world size. 1 shards over all ranks.
    dp_replicate_size: int = 1
    # dtype of gradient reductions: "fp32" (always at least the parameters' own), "compute" (the compute dtype, half
    # the wire under AMP, less exact) or "bf16" (the same half in an fp32 run). Sums are formed in fp32 on CPU ranks.
    reduce_dtype: ReduceDtype = "fp32"
    # How weights travel when they are gathered: "compute" (the compute dtype) or "int8" (ZeRO++, arXiv:2306.10209,
    # section 3.1: matrices as blocks of 256 signed bytes and a scale, a quarter of fp32's bytes, less exact). Where
    # nothing is gathered (stage 0, one process) it does nothing.
    gather_dtype: GatherDtype = "compute"
    # Stage 3: from forward to backward each group of this many neighbouring ranks keeps blocks among themselves, so
    # that backward gathers inside the group (ZeRO++, section 3.2). Must divide the ranks of one replica.
    secondary_shard_size: int | None = None
    # Class names of the modules to shard as one unit each. None: found from the model's own structure.
    block_classes: tuple[str, ...] | None = None
    # Ranks may run different modules in one step. Right at the price of one small exchange per collective.
    conditional_modules: bool = False
    # `run_step` answers an allocation failure by raising the stage on all ranks and running the step again.
    escalate_on_oom: bool = False
    # `from_pretrained` loads straight into shards while an Accelerator lives. None: at stage 3.
    load_sharded: bool | None = None

    def __post_init__(self) -> None:
        _require(
            type(self.stage) is int and 0 <= self.stage <= 3,
            given=f"ZeroPlugin(stage={self.stage!r})",
            expected="stage 0, 1, 2 or 3",
            do="Choose 0 (replicate), 1 (shard optimizer), 2 (and gradients) or 3 (and parameters).",
        )
        _require(
            type(self.dp_replicate_size) is int and self.dp_replicate_size >= 1,
            given=f"ZeroPlugin(dp_replicate_size={self.dp_replicate_size!r})",
            expected="a whole number of replicas, 1 or more",
            do="Leave it out to shard over all ranks.",
        )
        _require(
            self.reduce_dtype in ("fp32", "compute", "bf16"),
            given=f"ZeroPlugin(reduce_dtype={self.reduce_dtype!r})",
            expected='"fp32", "compute" or "bf16"',
            do='Use "fp32" unless the wire is what limits you.',
        )
        _require(
            self.gather_dtype in ("compute", "int8"),
            given=f"ZeroPlugin(gather_dtype={self.gather_dtype!r})",
            expected='"compute" or "int8"',
            do='Use "compute" unless the wire is what limits you.',
        )
        secondary = self.secondary_shard_size
        _require(
            secondary is None or (type(secondary) is int and secondary >= 2),
            given=f"ZeroPlugin(secondary_shard_size={secondary!r})",
            expected="a whole number of ranks, 2 or more",
            do="Give the number of ranks of one machine, or leave it out. To keep whole copies, use stage 2.",
        )
        _require(
            secondary is None or not self.conditional_modules,
            given=f"ZeroPlugin(secondary_shard_size={secondary}, conditional_modules=True)",
            expected="one of the two: a rank that skipped a module has nothing of it to share in backward",
            do="Leave secondary_shard_size out.",
        )


@dataclass(frozen=True, kw_only=True)
class AmpPlugin:
    """Mixed precision with fp32 masters (Micikevicius et al. 2018, arXiv:1710.03740); the same at all stages."""

    # Compute dtype: "bf16", or "fp16" with dynamic loss scaling.
    dtype: Literal["fp16", "bf16"] = field(default="bf16", kw_only=False)
    # "mixed": parameters gathered in the compute dtype, autocast on (accelerate's FSDP2). "cast": the same without
    # autocast (DeepSpeed). "autocast": fp32 parameters under autocast (accelerate's DDP).
    compute: ComputeMode = "mixed"
    # First loss scale; fp16 only, as is everything below.
    init_scale: float = 65536.0
    # Good steps in a row before the scale grows.
    growth_interval: int = 2000
    # What the scale is multiplied by when it grows (> 1).
    growth_factor: float = 2.0
    # What the scale is multiplied by on overflow (between 0 and 1).
    backoff_factor: float = 0.5
    # Overflows in a row before the scale backs off.
    hysteresis: int = 1
    # The scale is never lowered below this; an overflow at it is an error that names the parameter.
    min_scale: float = 1.0
    # Skipped steps in a row after which training stops with an error that names the parameter. None: no limit.
    max_skipped_steps: int | None = None

    def __post_init__(self) -> None:
        _require(
            self.dtype in ("fp16", "bf16"),
            given=f"AmpPlugin(dtype={self.dtype!r})",
            expected='"fp16" or "bf16"',
            do="Leave the plugin out for full precision.",
        )
        _require(
            self.compute in ("mixed", "cast", "autocast"),
            given=f"AmpPlugin(compute={self.compute!r})",
            expected='"mixed", "cast" or "autocast"',
            do='"mixed" is what accelerate\'s FSDP2 does.',
        )
        _require(
            self.init_scale > 0 and self.min_scale > 0 and self.growth_factor > 1 and 0 < self.backoff_factor < 1,
            given=f"init_scale={self.init_scale}, min_scale={self.min_scale}, growth_factor={self.growth_factor}, "
            f"backoff_factor={self.backoff_factor}",
            expected="positive scales, growth_factor above 1, backoff_factor between 0 and 1",
            do="The defaults (65536, 1, 2, 0.5) suit most models.",
        )
        _require(
            self.growth_interval >= 1 and self.hysteresis >= 1,
            given=f"growth_interval={self.growth_interval}, hysteresis={self.hysteresis}",
            expected="whole numbers, 1 or more",
            do="The defaults are 2000 and 1.",
        )


@dataclass(frozen=True, kw_only=True)
class LossPlugin:
    """How a causal language model's own loss is computed (`parallel/chunked_loss.py`)."""

    # The loss is computed over this many tokens at a time, so that logits of no more tokens exist; training only.
    chunk_size: int = field(kw_only=False)

    def __post_init__(self) -> None:
        _require(
            type(self.chunk_size) is int and self.chunk_size >= 1,
            given=f"LossPlugin(chunk_size={self.chunk_size!r})",
            expected="a whole number of tokens, 1 or more",
            do="1024 suits most vocabularies; leave the plugin out for logits of the whole batch.",
        )


@dataclass(frozen=True, kw_only=True)
class TensorParallelPlugin:
    """Every layer split over `tp_size` ranks (Megatron-LM, Shoeybi et al. 2019, arXiv:1909.08053)."""

    # Ranks that hold one model between them, layer by layer; must divide the number of processes.
    tp_size: int = 2
    # "auto": the model's own plan (transformers' `tp_plan`), or one found from its structure and verified. Else module
    # name with wildcards -> style, in transformers' words: {"model.layers.*.mlp.up_proj": "colwise", ...}.
    plan: Literal["auto"] | Mapping[str, str] = "auto"
    # Norms and dropout between the split layers also split, along the sequence (Korthikanti et al. 2022).
    sequence_parallel: bool = False

    def __post_init__(self) -> None:
        _require(
            type(self.tp_size) is int and self.tp_size >= 1,
            given=f"TensorParallelPlugin(tp_size={self.tp_size!r})",
            expected="a whole number of ranks, 1 or more",
            do="1 splits nothing.",
        )
        _require(
            self.plan == "auto" or (isinstance(self.plan, Mapping) and len(self.plan) > 0),
            given=f"TensorParallelPlugin(plan={self.plan!r})",
            expected='"auto" or a mapping of module names to styles with at least one rule',
            do='Use "auto", or name what is to be split: an empty plan splits nothing and is no tensor parallelism.',
        )


@dataclass(frozen=True, kw_only=True)
class PipelineParallelPlugin:
    """Consecutive layers on `pp_size` ranks, a batch cut into micro-batches that follow each other through them."""

    # Ranks that hold one model between them, stage by stage; must divide the number of processes.
    pp_size: int = 2
    # "gpipe", "1f1b", "interleaved", "zero-bubble", "zbv" or "pipedream" (`hfdist schedule` draws each).
    schedule: str = "1f1b"
    # Micro-batches that each rank's batch is cut into. None: as many as there are stages.
    num_micro_batches: int | None = None
    # Model stages a rank; 1, or 2 where the schedule needs several.
    num_virtual_stages: int | None = None
    # "auto": by the parameters of the layers, embeddings and head counted; or the number of layers of each stage.
    split: Literal["auto"] | tuple[int, ...] = "auto"
    # loss_fn(outputs, batch) -> mean loss of a micro-batch, in place of the model's own.
    loss_fn: Callable[[Any, Mapping[str, Any]], Any] | None = None

    def __post_init__(self) -> None:
        _require(
            type(self.pp_size) is int and self.pp_size >= 1,
            given=f"PipelineParallelPlugin(pp_size={self.pp_size!r})",
            expected="a whole number of ranks, 1 or more",
            do="1 cuts nothing.",
        )
        _require(
            self.schedule in SCHEDULES,
            given=f"PipelineParallelPlugin(schedule={self.schedule!r})",
            expected=f"one of {', '.join(SCHEDULES)}",
            do='"1f1b" holds fewest activations of those without virtual stages.',
        )
        for name in ("num_micro_batches", "num_virtual_stages"):
            value = getattr(self, name)
            _require(
                value is None or (type(value) is int and value >= 1),
                given=f"PipelineParallelPlugin({name}={value!r})",
                expected="a whole number, 1 or more",
                do="Leave it out for the default.",
            )


Plugin = ZeroPlugin | AmpPlugin | LossPlugin | TensorParallelPlugin | PipelineParallelPlugin
