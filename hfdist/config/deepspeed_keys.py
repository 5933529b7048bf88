"""DeepSpeed's json vocabulary (0.19), key by key: what hfdist does with each. Data only; `deepspeed.py` reads with it.

A key is one of: `Honoured` (it becomes a setting), `Hint` (it tunes how DeepSpeed works, not what it computes; named in
one notice), `Later` (a feature of a later release), `Refused` (it would change the result or the memory).
`"auto"`, null and `"none"` ask for nothing anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Honoured:
    """Becomes the setting `name`."""

    name: str


@dataclass(frozen=True)
class Hint:
    """No meaning here and no effect on the result."""


@dataclass(frozen=True)
class Later:
    """The feature `name` of `table.LATER`."""

    name: str


@dataclass(frozen=True)
class Refused:
    """An error, unless the value is one of `harmless` (lower case text)."""

    why: str
    do: str
    harmless: tuple[str, ...] = ("false", "0", "1", "-1", "1.0", "0.0", "{}", "[]")


@dataclass(frozen=True)
class Handled:
    """Read by code of its own in `deepspeed.py`."""


Rule = Honoured | Hint | Later | Refused | Handled

HINT, HANDLED = Hint(), Handled()
_DROP = "Remove it, or run this configuration with HFDIST_ENGINE=native."
_CHANGES = Refused("no setting that changes what is trained and that hfdist does not do", _DROP)
# Sections that do nothing unless they say {"enabled": true}.
_SWITCHED = Refused("this section absent or with enabled = false: hfdist does not do it", _DROP)

TOP: dict[str, Rule] = {
    "hfdist": HANDLED,
    "zero_optimization": HANDLED,
    "fp16": HANDLED,
    "bf16": HANDLED,
    "bfloat16": HANDLED,
    "torch_autocast": HANDLED,
    "optimizer": HANDLED,
    "scheduler": HANDLED,
    "train_batch_size": HANDLED,
    "train_micro_batch_size_per_gpu": HANDLED,
    "communication_data_type": HANDLED,
    "activation_checkpointing": HANDLED,
    "gradient_accumulation_steps": Honoured("gradient_accumulation_steps"),
    "gradient_clipping": Honoured("gradient_clipping"),
    "gradient_allreduce_op": Refused('"mean": gradients are averaged over the data-parallel ranks', _DROP, ("mean",)),
    "data_types": HANDLED,
    "checkpoint": HANDLED,
    "tensor_parallel": HANDLED,
    "expert_parallel": Later("ep_size"),
    "sequence_parallel_size": Later("sp_size"),
    "pipeline": Refused(
        "a configuration without DeepSpeed's own pipeline section", 'Put "pp_size" and "pp_schedule" under "hfdist".'
    ),
    "msamp": Later("fp8"),
    "amp": _SWITCHED,
    "ddp_bf16": _SWITCHED,
    "elasticity": _SWITCHED,
    "autotuning": _SWITCHED,
    "hybrid_engine": _SWITCHED,
    "data_efficiency": _SWITCHED,
    "curriculum_learning": _SWITCHED,
    "progressive_layer_drop": _SWITCHED,
    "eigenvalue": _SWITCHED,
    "quantize_training": _SWITCHED,
    "compression_training": _CHANGES,
    "weight_quantization": _CHANGES,
    "sparse_attention": _CHANGES,
    "dataloader_drop_last": Refused("the script's own data loader to decide", "Set drop_last in the DataLoader."),
    **dict.fromkeys(
        (
            "aio",
            "comet",
            "comms_logger",
            "compile",
            "csv_monitor",
            "datastates",
            "disable_allgather",
            "disable_python_gc",
            "dump_state",
            "flops_profiler",
            "gradient_predivide_factor",
            "log_level",
            "managed_gradient_accumulation",
            "memory_breakdown",
            "monitor_config",
            "nebula",
            "prescale_gradients",
            "seq_parallel_communication_data_type",
            "sparse_gradients",
            "steps_per_print",
            "tensorboard",
            "timers",
            "use_data_before_expert_parallelism",
            "wall_clock_breakdown",
            "wandb",
            "zero_allow_untested_optimizer",
            "zero_force_ds_cpu_optimizer",
        ),
        HINT,
    ),
}

_QUANTIZED = Refused(
    "gradients that are reduced unquantized, and one choice for all weights (zero_quantized_weights)",
    'Remove it; "communication_data_type": "bf16" halves the bytes of reductions.',
    ("false",),
)
_GROUPS = Refused(
    "sharding groups given by dp_replicate_size",
    'Remove it and write "hfdist": {"dp_replicate_size": N} (N replicas of the sharded model).',
)

ZERO: dict[str, Rule] = {
    "stage": Honoured("zero_stage"),
    "offload_optimizer": HANDLED,
    "offload_param": HANDLED,
    "cpu_offload": Later("offload_optimizer"),
    "cpu_offload_param": Later("offload_param"),
    "zenflow": _CHANGES,
    "zero_hpz_partition_size": HANDLED,
    "mics_shard_size": _GROUPS,
    "zero_quantized_weights": HANDLED,
    "zero_quantized_nontrainable_weights": _QUANTIZED,
    "zero_quantized_gradients": _QUANTIZED,
    **dict.fromkeys(
        (
            "allgather_bucket_size",
            "allgather_partitions",
            "allgather_sequential",
            "compute_grad_norm",
            "contiguous_gradients",
            "cpu_offload_use_pin_memory",
            "elastic_checkpoint",
            "enable_sanity_checks",
            "gather_16bit_weights_on_model_save",
            "ignore_unused_parameters",
            "leaf_module",
            "legacy_stage1",
            "load_from_fp32_weights",
            "log_trace_cache_warnings",
            "max_live_parameters",
            "max_reuse_distance",
            "memory_efficient_linear",
            "mics_hierarchical_params_gather",
            "model_persistence_threshold",
            "module_granularity_threshold",
            "overlap_comm",
            "override_module_apply",
            "param_persistence_threshold",
            "parameter_alignment",
            "pipeline_loading_checkpoint",
            "prefetch_bucket_size",
            "reduce_bucket_size",
            "reduce_scatter",
            "round_robin_gradients",
            "save_muon_momentum_buffer_in_memory",
            "stage3_allgather_sequential",
            "stage3_gather_16bit_weights_on_model_save",
            "stage3_gather_fp16_weights_on_model_save",
            "stage3_max_live_parameters",
            "stage3_max_reuse_distance",
            "stage3_model_persistence_threshold",
            "stage3_module_granularity_threshold",
            "stage3_param_persistence_threshold",
            "stage3_prefetch_bucket_size",
            "stage3_use_all_reduce_for_fetch_params",
            "sub_group_size",
            "use_all_reduce_for_fetch_params",
            "use_multi_rank_bucket_allreduce",
        ),
        HINT,
    ),
}

OFFLOAD_OPTIMIZER = (
    *("device", "nvme_path", "buffer_count", "pin_memory", "pipeline_read", "pipeline_write", "pipeline"),
    *("fast_init", "ratio", "super_offload", "cpuadam_cores_perc"),
)
OFFLOAD_PARAM = ("device", "nvme_path", "buffer_count", "buffer_size", "max_in_cpu", "pin_memory")

_MASTERS = Refused("fp32 masters, gradients and optimizer state", _DROP, ("false",))

FP16: dict[str, Rule] = {
    "enabled": HANDLED,
    "auto_cast": HINT,  # under autocast each operation casts its own inputs
    "loss_scale": HANDLED,
    "initial_scale_power": HANDLED,
    "loss_scale_window": Honoured("growth_interval"),
    "hysteresis": Honoured("hysteresis"),
    "consecutive_hysteresis": HANDLED,
    "min_loss_scale": Honoured("min_scale"),
    "fp16_master_weights_and_grads": _MASTERS,
}
# DeepSpeed's own values for keys its "fp16" section leaves out.
FP16_DEFAULTS = {"initial_scale_power": 16, "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1}

BF16: dict[str, Rule] = {
    "enabled": HANDLED,
    "immediate_grad_update": HINT,
    "check_grad_overflow": HINT,  # a non-finite loss is an error here unless nonfinite_loss says otherwise
    "check_overflow": HINT,
    "bf16_master_weights_and_grads": _MASTERS,
    "bf16_optimizer_states": _MASTERS,
}

TORCH_AUTOCAST: dict[str, Rule] = {
    "enabled": HANDLED,
    "dtype": HANDLED,
    "lower_precision_safe_modules": Refused("torch's own list of operations that autocast lowers", _DROP, ("[]",)),
}

ACTIVATION_CHECKPOINTING: dict[str, Rule] = {
    "cpu_checkpointing": Later("offload_activations"),
    "partition_activations": Refused("activations kept whole on their rank", _DROP, ("false",)),
    **dict.fromkeys(
        (
            "contiguous_memory_optimization",
            "number_checkpoints",
            "profile",
            "synchronize_checkpoint_boundary",
        ),
        HINT,
    ),
}

DATA_TYPES: dict[str, Rule] = {
    "grad_accum_dtype": Refused("gradients accumulated in fp32", _DROP, ("fp32", "float32")),
    "param_dtype": Refused("parameters in the dtype the model has", "Load the model in the dtype you want."),
    "buffer_dtype": Refused("buffers in the dtype the model has", "Load the model in the dtype you want."),
    "keep_in_fp32_modules": Refused('"auto": autocast keeps what needs fp32', _DROP, ("[]",)),
}

CHECKPOINT: dict[str, Rule] = {
    "load_universal": Refused("hfdist's own checkpoints", _DROP, ("false",)),
    **dict.fromkeys(("tag_validation", "use_node_local_storage", "parallel_write", "writer"), HINT),
}

TENSOR_PARALLEL: dict[str, Rule] = {
    "autotp_size": HANDLED,
    "tp_size": HANDLED,
    "tp": HINT,
    "dtype": HINT,
    "mpu": HINT,
    "tp_grain_size": HINT,
    "tp_overlap_comm": HINT,
    "partition_config": HINT,
}

# Keys of the `deepspeed_config:` section of an accelerate yaml.
YAML_SECTION = (
    *("zero_stage", "gradient_accumulation_steps", "gradient_clipping", "zero3_init_flag", "zero3_save_16bit_model"),
    *("offload_optimizer_device", "offload_param_device", "offload_optimizer_nvme_path", "offload_param_nvme_path"),
    *("deepspeed_config_file", "deepspeed_moe_layer_cls_names", "deepspeed_hostfile", "deepspeed_multinode_launcher"),
    *("deepspeed_exclusion_filter", "deepspeed_inclusion_filter", "mixed_precision"),
)
