"""The vocabulary of hfdist itself, in one place: what can be set, how a value is read, and what later releases add.

A name here is `HFDIST_<NAME>` in the environment, `<name>` under `"hfdist"` in a DeepSpeed json, and `--<na-me>` of
`python -m hfdist.run`. Readers of accelerate's and DeepSpeed's vocabularies translate into these names.
"""

from __future__ import annotations

from dataclasses import dataclass

from hfdist.config.values import (
    Reader,
    read_bool,
    read_choice,
    read_count,
    read_counts,
    read_group_size,
    read_names,
    read_nonnegative,
    read_plan,
    read_positive,
    read_precision,
    read_size,
    read_stage,
)
from hfdist.plugins import SCHEDULES


@dataclass(frozen=True)
class Setting:
    """`read` makes the value or raises; `help` is one sentence, used by errors and by `--help`."""

    read: Reader
    help: str


SETTINGS: dict[str, Setting] = {
    "engine": Setting(
        read_choice("hfdist", "native"), "native hands the same yaml to accelerate's own engine; hfdist is the default."
    ),
    # ZeroPlugin
    "zero_stage": Setting(read_stage, "0 replicates, 1 shards optimizer state, 2 also gradients, 3 also parameters."),
    "dp_replicate_size": Setting(read_count, "Number of replicas of the sharded model; must divide the world size."),
    "reduce_dtype": Setting(
        read_choice("fp32", "compute", "bf16"),
        'dtype of gradient reductions: "fp32", "compute" (the compute dtype) or "bf16" for half the wire.',
    ),
    "gather_dtype": Setting(
        read_choice("compute", "int8"), 'How weights travel to be gathered: "compute" (the compute dtype) or "int8".'
    ),
    "secondary_shard_size": Setting(
        read_group_size, "Ranks (of one machine) that keep blocks among themselves from forward to backward; stage 3."
    ),
    "block_classes": Setting(read_names, "Class names of the modules to shard as one unit each, comma-separated."),
    "conditional_modules": Setting(read_bool, "true when ranks may run different modules in one step."),
    "escalate_on_oom": Setting(read_bool, "true: run_step answers an allocation failure by raising the stage."),
    "load_sharded": Setting(read_bool, "true: from_pretrained loads straight into shards."),
    # TensorParallelPlugin
    "tp_size": Setting(read_size, "Ranks that split every layer between them; must divide the number of processes."),
    "tp_plan": Setting(
        read_plan, 'Module name with wildcards -> style ("colwise", "rowwise", ...), instead of "auto".'
    ),
    "sequence_parallel": Setting(read_bool, "true: what is between split layers is split along the sequence."),
    # PipelineParallelPlugin
    "pp_size": Setting(read_size, 'Ranks that have consecutive layers; "all": those that tp_size leaves.'),
    "pp_schedule": Setting(read_choice(*SCHEDULES), "Order of forwards and backwards; `hfdist schedule` draws each."),
    "num_micro_batches": Setting(read_count, "Micro-batches a batch is cut into on its way through the pipeline."),
    "num_virtual_stages": Setting(read_count, "Model stages a rank, for interleaved, zero-bubble and zbv schedules."),
    "pp_split": Setting(read_counts, 'Layers of each stage, comma-separated, instead of "auto".'),
    # AmpPlugin
    "mixed_precision": Setting(read_precision, 'Compute dtype: "no", "fp16" or "bf16" (fp8 is not in this release).'),
    "compute": Setting(
        read_choice("mixed", "cast", "autocast"),
        '"mixed" (parameters gathered in the compute dtype, autocast on), "cast" (no autocast), '
        '"autocast" (fp32 parameters).',
    ),
    "init_scale": Setting(read_positive, "First loss scale; fp16 only."),
    "growth_interval": Setting(read_count, "Good steps in a row before the loss scale grows; fp16 only."),
    "growth_factor": Setting(read_positive, "What the loss scale is multiplied by when it grows; fp16 only."),
    "backoff_factor": Setting(read_positive, "What the loss scale is multiplied by on overflow; fp16 only."),
    "hysteresis": Setting(read_count, "Overflows in a row before the loss scale backs off; fp16 only."),
    "min_scale": Setting(read_positive, "The loss scale is never lowered below this; fp16 only."),
    "max_skipped_steps": Setting(read_count, "Skipped steps in a row after which training stops; fp16 only."),
    # LossPlugin
    "loss_chunk_size": Setting(read_count, "Tokens whose logits exist at one time in a causal model's own loss."),
    # The loop
    "gradient_accumulation_steps": Setting(read_count, "Micro-steps per optimizer step."),
    "gradient_clipping": Setting(read_nonnegative, "Largest global gradient norm; 0 clips nothing."),
    "activation_checkpointing": Setting(read_bool, "true: forward activations of blocks are recomputed in backward."),
    "scheduler_step": Setting(
        read_choice("num_processes", "update"),
        '"num_processes": a prepared scheduler steps that often per update (accelerate\'s rule); "update": once.',
    ),
    "loss_weighting": Setting(
        read_choice("tokens", "mean"), '"tokens": local losses weighted by label tokens; "mean": equally.'
    ),
    "nonfinite_loss": Setting(read_choice("raise", "allow"), '"raise" stops at a NaN or infinite loss; "allow".'),
    "stall_timeout": Setting(read_positive, "Seconds a collective may wait before ranks compare what they wait for."),
}

AMP_FIELDS = (
    "compute",
    "init_scale",
    "growth_interval",
    "growth_factor",
    "backoff_factor",
    "hysteresis",
    "min_scale",
    "max_skipped_steps",
)
ZERO_FIELDS = (
    "dp_replicate_size",
    "reduce_dtype",
    "gather_dtype",
    "secondary_shard_size",
    "block_classes",
    "conditional_modules",
    "escalate_on_oom",
    "load_sharded",
)

# Setting -> field of its plugin.
TENSOR_FIELDS = {"tp_size": "tp_size", "tp_plan": "plan", "sequence_parallel": "sequence_parallel"}
PIPELINE_FIELDS = {
    "pp_size": "pp_size",
    "pp_schedule": "schedule",
    "num_micro_batches": "num_micro_batches",
    "num_virtual_stages": "num_virtual_stages",
    "pp_split": "split",
}

# HFDIST_* variables that are not settings of a run: paths and switches other parts of hfdist read or set.
OTHER_VARIABLES = ("launched_as", "relaunched", "cache", "runs", "test", "tests")


@dataclass(frozen=True)
class Later:
    """A feature other engines have and this release has not; `harmless` values (lower case) ask for none of it."""

    what: str
    do: str
    harmless: tuple[str, ...] = ("1", "0", "-1", "false", "no", "off")


_OFF = "Set it to none, or run this configuration with HFDIST_ENGINE=native."
_ONE = "Set it to 1; ZeRO stage 3 shards the parameters over all ranks instead."

# The one place to turn a feature on: move its name from here to SETTINGS and let its reader claim it.
LATER: dict[str, Later] = {
    "offload_optimizer": Later("optimizer offload", _OFF),
    "offload_param": Later("parameter offload", _OFF),
    "offload_activations": Later("activation offload", "Leave it off; activation checkpointing alone is supported."),
    "nvme_path": Later("NVMe offload", _OFF),
    "cp_size": Later("context parallelism", "Set it to 1 and shorten the sequences."),
    "sp_size": Later("sequence parallelism", "Set it to 1 and shorten the sequences."),
    "ep_size": Later("expert parallelism", _ONE),
    "fp8": Later("fp8", "Use bf16."),
}
