"""`Settings`: everything a run was asked for, in one frozen object; made from a `Ledger` whose claims agree."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hfdist.config.ledger import Ledger
from hfdist.config.table import AMP_FIELDS, PIPELINE_FIELDS, TENSOR_FIELDS, ZERO_FIELDS
from hfdist.errors import ConfigError, say
from hfdist.plugins import AmpPlugin, LossPlugin, PipelineParallelPlugin, TensorParallelPlugin, ZeroPlugin


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What was asked for and by whom. Modules to the right read nothing else: no environment, no accelerate plugin."""

    # "native": accelerate's own engine runs the same yaml; the fields below then only record what was read.
    engine: Literal["hfdist", "native"] = "hfdist"
    # Stage 0 for a plain MULTI_GPU yaml and for no config at all.
    zero: ZeroPlugin = dataclasses.field(default_factory=lambda: ZeroPlugin(stage=0))
    # None: full precision.
    amp: AmpPlugin | None = None
    # None: logits of the whole batch, as the model does it.
    loss: LossPlugin | None = None
    # None: no layer is split, no model is cut into stages.
    tensor: TensorParallelPlugin | None = None
    pipeline: PipelineParallelPlugin | None = None
    # Micro-steps per optimizer step.
    gradient_accumulation_steps: int = 1
    # Largest global norm, applied inside optimizer.step. None: nobody asked for clipping.
    gradient_clipping: float | None = None
    # Blocks recompute their forward in backward (HF `gradient_checkpointing_enable`).
    activation_checkpointing: bool = False
    # How often a prepared scheduler steps per update: accelerate's rule, or once.
    scheduler_step: Literal["num_processes", "update"] = "num_processes"
    # Weight of each rank's loss: its label tokens, or the same for all.
    loss_weighting: Literal["tokens", "mean"] = "tokens"
    # What a NaN or infinite loss does outside fp16.
    nonfinite_loss: Literal["raise", "allow"] = "raise"
    # Seconds a collective may wait before ranks compare what they wait for.
    stall_timeout: float = 5.0
    # Lines worth showing once, on the main rank.
    notices: tuple[str, ...] = ()
    # Setting -> where its value came from; what is absent was left at its default.
    origins: dict[str, str] = dataclasses.field(default_factory=dict)


_LOOP_FIELDS = (
    "engine",
    "gradient_accumulation_steps",
    "activation_checkpointing",
    "scheduler_step",
    "loss_weighting",
    "nonfinite_loss",
    "stall_timeout",
)


def build_settings(ledger: Ledger, *, world_size: int | None) -> Settings:
    """The `Settings` of all claims. `world_size` (None: unknown) must be divisible by dp_replicate_size."""
    amp = _build_amp(ledger)
    zero_fields: dict[str, Any] = {name: ledger.value(name) for name in ZERO_FIELDS if name in ledger.claims}
    zero = ZeroPlugin(stage=ledger.value("zero_stage", 0), **zero_fields)  # type: ignore[arg-type]
    sizes = _model_sizes(ledger, world_size)
    tensor, pipeline = _build_tensor(ledger, sizes["tp_size"]), _build_pipeline(ledger, sizes["pp_size"])
    model_ranks = sizes["tp_size"] * sizes["pp_size"]
    if world_size is not None:
        _verify_sizes(ledger, world_size, model_ranks, zero.dp_replicate_size)
    _check_options(ledger, zero, world_size, model_ranks)
    loop: dict[str, Any] = {name: ledger.value(name) for name in _LOOP_FIELDS if name in ledger.claims}
    return Settings(
        zero=zero,
        amp=amp,
        loss=LossPlugin(ledger.value("loss_chunk_size")) if "loss_chunk_size" in ledger.claims else None,  # type: ignore[arg-type]
        tensor=tensor,
        pipeline=pipeline,
        gradient_clipping=ledger.value("gradient_clipping") or None,  # type: ignore[arg-type]
        notices=ledger.all_notices(),
        origins=dict(ledger.origins()),
        **loop,
    )


def _check_options(ledger: Ledger, zero: ZeroPlugin, world_size: int | None, model_ranks: int) -> None:
    """A secondary group must divide a replica; an option that does nothing at the stage a run starts with is said.

    Together with tensor and pipeline parallelism (`model_ranks` above 1) these options have not been made to work.
    """
    options = (
        *("gather_dtype", "secondary_shard_size", "loss_chunk_size"),
        *("escalate_on_oom", "conditional_modules"),  # ranks of other parts of the model would wait for ever
    )
    asked = [name for name in options if ledger.value(name, False) not in (False, "compute")]
    if asked and model_ranks > 1:
        sizes = [name for name in ("tp_size", "pp_size") if ledger.value(name, 1) != 1]
        raise ConfigError(
            say(
                given=f"{', '.join(asked)} ({_named(ledger, asked)}) with {' and '.join(sizes)} above 1",
                expected="one or the other: these options are for data parallelism",
                do="Leave one of them out.",
            )
        )
    if zero.load_sharded and model_ranks > 1:
        ledger.notice(
            f"load_sharded ({ledger.claims['load_sharded'].origin}): no effect with tp_size or pp_size above 1, where "
            "models are loaded whole on every rank and split then"
        )
    secondary = zero.secondary_shard_size
    if secondary is not None and world_size is not None:
        num_shards = world_size // zero.dp_replicate_size
        if num_shards % secondary:
            divisors = [n for n in range(2, num_shards + 1) if num_shards % n == 0]
            raise ConfigError(
                say(
                    given=f"secondary_shard_size = {secondary} from {ledger.claims['secondary_shard_size'].origin} and "
                    f"{num_shards} ranks that share one copy of the model",
                    expected="a size that divides them",
                    do=f"Choose one of {divisors}." if divisors else "Leave it out.",
                )
            )
    if secondary is not None and zero.stage != 3:
        ledger.notice(f"secondary_shard_size = {secondary}: acts at stage 3 only, this run starts at {zero.stage}")
    if zero.gather_dtype == "int8" and zero.stage == 0:
        ledger.notice("gather_dtype = int8: nothing is gathered at stage 0, where this run starts")


def _verify_sizes(ledger: Ledger, world_size: int, model_ranks: int, replicas: int) -> None:
    if world_size % model_ranks:
        sizes = [name for name in ("tp_size", "pp_size") if name in ledger.claims]
        raise ConfigError(
            say(
                given=f"{' x '.join(f'{name} = {ledger.value(name)}' for name in sizes)} ({_named(ledger, sizes)}) and "
                f"{world_size} processes",
                expected="a product that divides the number of processes",
                do=f"Start {model_ranks} processes or a multiple, or choose smaller sizes.",
            )
        )
    num_ranks = world_size // model_ranks
    if num_ranks % replicas:
        raise ConfigError(
            say(
                given=f"dp_replicate_size = {replicas} from {ledger.claims['dp_replicate_size'].origin} and "
                + (f"{world_size} processes" if model_ranks == 1 else f"{num_ranks} data-parallel ranks"),
                expected="a number of replicas that divides the number of processes",
                do=f"Choose one of {[n for n in range(1, num_ranks + 1) if num_ranks % n == 0]}.",
            )
        )


def _model_sizes(ledger: Ledger, world_size: int | None) -> dict[str, int]:
    """tp_size and pp_size with "all" resolved; an unknown number of processes is one."""
    names = ("tp_size", "pp_size")
    sizes = {name: ledger.value(name, 1) for name in names}
    if sizes["tp_size"] == sizes["pp_size"] == "all":
        raise ConfigError(
            say(
                given=f'tp_size and pp_size "all" ({_named(ledger, names)})',
                expected="one of them as a number",
                do="Name how many ranks split a layer.",
            )
        )
    known = math.prod(size for size in sizes.values() if isinstance(size, int))
    rest = max((world_size or 1) // known, 1)
    return {name: size if isinstance(size, int) else rest for name, size in sizes.items()}


def _build_tensor(ledger: Ledger, tp_size: int) -> TensorParallelPlugin | None:
    claimed = [name for name in TENSOR_FIELDS if name in ledger.claims]
    if tp_size == 1:
        others = [name for name in claimed if name != "tp_size" and ledger.value(name)]
        if others:
            ledger.notice(f"{_named(ledger, others)}: no effect with tp_size 1")
        return None
    fields: dict[str, Any] = {TENSOR_FIELDS[name]: ledger.value(name) for name in claimed}
    return TensorParallelPlugin(**{**fields, "tp_size": tp_size})


def _build_pipeline(ledger: Ledger, pp_size: int) -> PipelineParallelPlugin | None:
    claimed = [name for name in PIPELINE_FIELDS if name in ledger.claims]
    if pp_size == 1:
        others = [name for name in claimed if name != "pp_size" and ledger.value(name) != 1]
        if others or ledger.loss_fn is not None:
            ledger.notice(f"{_named(ledger, others) or 'loss_fn'}: no effect with pp_size 1")
        return None
    fields: dict[str, Any] = {PIPELINE_FIELDS[name]: ledger.value(name) for name in claimed}
    return PipelineParallelPlugin(loss_fn=ledger.loss_fn, **{**fields, "pp_size": pp_size})


def _build_amp(ledger: Ledger) -> AmpPlugin | None:
    dtype = ledger.value("mixed_precision", "no")
    claimed = [name for name in AMP_FIELDS if name in ledger.claims]
    if dtype == "no":
        if claimed:
            ledger.notice(f"{_named(ledger, claimed)}: no effect without mixed_precision fp16 or bf16")
        return None
    if dtype == "bf16":
        scaling = [name for name in claimed if name != "compute"]
        if scaling:
            ledger.notice(f"{_named(ledger, scaling)}: no effect under bf16, which needs no loss scale")
            claimed = [name for name in claimed if name == "compute"]
    fields: dict[str, Any] = {name: ledger.value(name) for name in claimed}
    return AmpPlugin(dtype=dtype, **fields)  # type: ignore[arg-type]


def _named(ledger: Ledger, names: Sequence[str]) -> str:
    if not names:
        return ""
    origins = sorted({ledger.claims[name].origin for name in names})
    return f"{', '.join(names)} ({', '.join(origins)})"
