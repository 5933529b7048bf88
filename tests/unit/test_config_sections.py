"""FSDP, MEGATRON_LM and parallelism_config: their yaml variables and accelerate's plugin objects."""

from __future__ import annotations

import os

import pytest
import torch
from accelerate.utils import (
    DeepSpeedPlugin,
    FullyShardedDataParallelPlugin,
    MegatronLMPlugin,
    ParallelismConfig,
    TorchTensorParallelPlugin,
)

from hfdist.config import Settings, resolve_settings
from hfdist.errors import ConfigError
from hfdist.plugins import PipelineParallelPlugin, TensorParallelPlugin, ZeroPlugin

# Exactly what accelerate 1.15's launcher exports for `distributed_type: FSDP`, `fsdp_version: 2`.
FSDP = {
    "ACCELERATE_USE_FSDP": "true",
    "ACCELERATE_MIXED_PRECISION": "no",
    "FSDP_VERSION": "2",
    "FSDP_SHARDING_STRATEGY": "FULL_SHARD",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_OFFLOAD_PARAMS": "false",
    "FSDP_MIN_NUM_PARAMS": "100000000",
    "FSDP_FORWARD_PREFETCH": "false",
    "FSDP_USE_ORIG_PARAMS": "true",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
    "FSDP_SYNC_MODULE_STATES": "true",
    "FSDP_ACTIVATION_CHECKPOINTING": "false",
    "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": "false",
}
MEGATRON = {
    "ACCELERATE_USE_MEGATRON_LM": "true",
    "MEGATRON_LM_TP_DEGREE": "1",
    "MEGATRON_LM_PP_DEGREE": "1",
    "MEGATRON_LM_USE_CUSTOM_FSDP": "False",
    "MEGATRON_LM_NO_LOAD_OPTIM": "False",
    "MEGATRON_LM_GRADIENT_CLIPPING": "1.0",
}
MESH = {
    "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
    "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "1",
    "PARALLELISM_CONFIG_DP_SHARD_SIZE": "1",
    "PARALLELISM_CONFIG_TP_SIZE": "1",
    "PARALLELISM_CONFIG_CP_SIZE": "1",
    "PARALLELISM_CONFIG_CP_BACKEND": "torch",
    "PARALLELISM_CONFIG_SP_SIZE": "1",
    "PARALLELISM_CONFIG_SP_BACKEND": "deepspeed",
}


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch):
    """accelerate's plugin objects read, and some write, os.environ."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


def settle(environ: dict[str, str] | None = None, **kwargs: object) -> Settings:
    return resolve_settings(accelerator_kwargs=kwargs, environ=environ or {})[0]


def refused(*words: str, environ: dict[str, str] | None = None, **kwargs: object) -> None:
    with pytest.raises(ConfigError) as error:
        settle(environ, **kwargs)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_fsdp_2():
    assert settle(FSDP).zero == ZeroPlugin(stage=3)
    assert settle(FSDP).notices == ()
    assert settle({**FSDP, "FSDP_RESHARD_AFTER_FORWARD": "false"}).zero.stage == 2
    blocks = {**FSDP, "FSDP_TRANSFORMER_CLS_TO_WRAP": "LlamaDecoderLayer,Other"}
    assert settle(blocks).zero.block_classes == ("LlamaDecoderLayer", "Other")
    assert settle({**FSDP, "FSDP_ACTIVATION_CHECKPOINTING": "true"}).activation_checkpointing
    refused("offload", "not in this release", environ={**FSDP, "FSDP_OFFLOAD_PARAMS": "true"})
    refused("activation offload", environ={**FSDP, "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": "true"})
    refused("FSDP_RESHARD_AFTER", "did you mean", environ={**FSDP, "FSDP_RESHARD_AFTER": "true"})
    refused("true or false", environ={**FSDP, "FSDP_RESHARD_AFTER_FORWARD": "FULL_SHARD"})


def test_fsdp_keys_that_only_tune_are_named():
    settings = settle({**FSDP, "FSDP_BACKWARD_PREFETCH": "BACKWARD_PRE", "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT"})
    assert any("fsdp_backward_prefetch, fsdp_state_dict_type" in line for line in settings.notices)
    wrapped = settle({**FSDP, "FSDP_AUTO_WRAP_POLICY": "SIZE_BASED_WRAP"})
    assert any("block by block" in line for line in wrapped.notices)


@pytest.mark.parametrize(
    ("strategy", "stage"),
    [("FULL_SHARD", 3), ("1", 3), ("SHARD_GRAD_OP", 2), ("2", 2), ("NO_SHARD", 0), ("3", 0)],
)
def test_fsdp_1_strategies(strategy, stage):
    settings = settle({**FSDP, "FSDP_VERSION": "1", "FSDP_SHARDING_STRATEGY": strategy})
    assert settings.zero.stage == stage
    assert any("fsdp_version 1" in line for line in settings.notices)


def test_fsdp_1_hybrid_replicates_between_machines():
    environ = {**FSDP, "FSDP_VERSION": "1", "FSDP_SHARDING_STRATEGY": "HYBRID_SHARD"}
    two = settle({**environ, "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"})
    assert two.zero == ZeroPlugin(stage=3, dp_replicate_size=2)
    one = settle({**environ, "FSDP_SHARDING_STRATEGY": "5", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"})
    assert one.zero == ZeroPlugin(stage=2)
    refused("FULL_SHRD", "did you mean 'FULL_SHARD'", environ={**environ, "FSDP_SHARDING_STRATEGY": "FULL_SHRD"})


def test_fsdp_plugin_objects():
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, reshard_after_forward=False, transformer_cls_names_to_wrap=["A"], activation_checkpointing=True
    )
    settings = settle(fsdp_plugin=plugin)
    assert settings.zero == ZeroPlugin(stage=2, block_classes=("A",))
    assert settings.activation_checkpointing
    # the launcher's "true" may be nobody's choice; its "false" is the yaml's
    assert settle(FSDP, fsdp_plugin=plugin).zero.stage == 2
    full = FullyShardedDataParallelPlugin(fsdp_version=2, reshard_after_forward=True)
    refused("zero_stage", "fsdp_plugin", environ={**FSDP, "FSDP_RESHARD_AFTER_FORWARD": "false"}, fsdp_plugin=full)
    refused("offload", fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2, cpu_offload=True))
    first = FullyShardedDataParallelPlugin(fsdp_version=1, sharding_strategy="SHARD_GRAD_OP")
    assert settle(fsdp_plugin=first).zero.stage == 2


def test_fsdp_plugin_precision():
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    settings = settle(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2, mixed_precision_policy=policy))
    assert settings.amp.dtype == "bf16"
    assert settings.zero.reduce_dtype == "fp32"
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, mixed_precision_policy=policy)
    assert settle(fsdp_plugin=plugin).zero.reduce_dtype == "compute"
    refused("bf16", "fp16", fsdp_plugin=plugin, mixed_precision="fp16")


def test_megatron():
    settings = settle(MEGATRON)
    assert settings.zero.stage == 0
    assert settings.gradient_clipping is None
    assert any("MEGATRON" not in line and "nothing is clipped" in line for line in settings.notices)
    assert settle({**MEGATRON, "MEGATRON_LM_GRADIENT_CLIPPING": "0.5"}).gradient_clipping == 0.5
    assert settle({**MEGATRON, "MEGATRON_LM_USE_DISTRIBUTED_OPTIMIZER": "true"}).zero.stage == 1
    assert settle({**MEGATRON, "MEGATRON_LM_RECOMPUTE_ACTIVATIONS": "true"}).activation_checkpointing
    assert settle({**MEGATRON, "MEGATRON_LM_CALCULATE_PER_TOKEN_LOSS": "false"}).loss_weighting == "mean"


@pytest.mark.parametrize(
    ("key", "value", "word"),
    [
        ("NUM_LAYERS_PER_VIRTUAL_PIPELINE_STAGE", "2", "NUM_VIRTUAL_STAGES"),
        ("CONTEXT_PARALLEL_SIZE", "2", "context parallelism"),
        ("EXPERT_MODEL_PARALLEL_SIZE", "2", "expert parallelism"),
        ("OPTIMIZER_CPU_OFFLOAD", "True", "optimizer offload"),
        ("USE_CUSTOM_FSDP", "True", "zero_stage: 3"),
        ("ATTENTION_DROPOUT", "0.1", "model's config"),
        ("NO_LOAD_OPTIM", "True", "no_load_optim"),
        ("TP_DEGRE", "1", "did you mean 'tp_degree'"),
    ],
)
def test_megatron_refusals(key, value, word):
    refused(word, environ={**MEGATRON, f"MEGATRON_LM_{key}": value})


def test_megatron_plugin_objects():
    assert settle(megatron_lm_plugin=MegatronLMPlugin(use_distributed_optimizer=True)).zero.stage == 1
    plugin = MegatronLMPlugin(tp_degree=2, pp_degree=4, num_micro_batches=8, sequence_parallelism=True)
    settings = settle(megatron_lm_plugin=plugin)
    assert settings.tensor == TensorParallelPlugin(tp_size=2, sequence_parallel=True)
    assert settings.pipeline == PipelineParallelPlugin(pp_size=4, num_micro_batches=8)
    refused("custom_loss_function", megatron_lm_plugin=MegatronLMPlugin(custom_loss_function=len))


@pytest.mark.parametrize(
    ("replicate", "shard", "expected"),
    [
        ("1", "1", ZeroPlugin(stage=0)),
        ("4", "1", ZeroPlugin(stage=0)),
        ("1", "4", ZeroPlugin(stage=3)),
        ("2", "2", ZeroPlugin(stage=3, dp_replicate_size=2)),
    ],
)
def test_parallelism_config(replicate, shard, expected):
    environ = {
        **MESH,
        "WORLD_SIZE": "4",
        "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": replicate,
        "PARALLELISM_CONFIG_DP_SHARD_SIZE": shard,
    }
    assert settle(environ).zero == expected
    config = ParallelismConfig(dp_replicate_size=int(replicate), dp_shard_size=int(shard))
    assert settle({"WORLD_SIZE": "4"}, parallelism_config=config).zero == expected


def test_parallelism_config_with_an_fsdp_section():
    environ = {**FSDP, **MESH, "WORLD_SIZE": "4", "PARALLELISM_CONFIG_DP_SHARD_SIZE": "2"}
    environ["PARALLELISM_CONFIG_DP_REPLICATE_SIZE"] = "2"
    environ["FSDP_RESHARD_AFTER_FORWARD"] = "false"
    assert settle(environ).zero == ZeroPlugin(stage=2, dp_replicate_size=2)


@pytest.mark.parametrize(("key", "word"), [("CP", "context"), ("SP", "sequence")])
def test_other_axes_are_refused_by_name(key, word):
    refused(word, environ={**MESH, f"PARALLELISM_CONFIG_{key}_SIZE": "2"})


def test_parallelism_errors():
    refused("2", "4", environ={**MESH, "WORLD_SIZE": "4", "PARALLELISM_CONFIG_DP_SHARD_SIZE": "2"})
    refused("did you mean", environ={**MESH, "PARALLELISM_CONFIG_DP_SHARD_SIZ": "2"})
    assert settle(torch_tp_plugin=TorchTensorParallelPlugin(tp_size=2)).tensor == TensorParallelPlugin(tp_size=2)
    mesh = {**MESH, "PARALLELISM_CONFIG_TP_SIZE": "2", "PARALLELISM_CONFIG_DP_SHARD_SIZE": "2"}
    settings = settle({**mesh, "WORLD_SIZE": "4"})
    assert (settings.tensor, settings.zero.stage) == (TensorParallelPlugin(tp_size=2), 3)
    refused("tp_size 2", environ={**mesh, "WORLD_SIZE": "8"})


def test_deepspeed_plugin_objects():
    plugin = DeepSpeedPlugin(zero_stage=3, gradient_accumulation_steps=2, gradient_clipping=1.0)
    settings = settle(deepspeed_plugin=plugin)
    assert (settings.zero.stage, settings.gradient_accumulation_steps, settings.gradient_clipping) == (3, 2, 1.0)
    assert settle(deepspeed_plugins={"one": plugin}).zero.stage == 3
    refused("2 DeepSpeed plugins", deepspeed_plugins={"one": plugin, "two": plugin})
    refused("optimizer offload", deepspeed_plugin=DeepSpeedPlugin(zero_stage=2, offload_optimizer_device="cpu"))
    environ = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"}
    refused("zero_stage = 2", "3", "deepspeed_plugin", environ=environ, deepspeed_plugin=plugin)
    content = {"zero_optimization": {"stage": 1}, "hfdist": {"scheduler_step": "update"}}
    settings = settle(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=content))
    assert (settings.zero.stage, settings.scheduler_step) == (1, "update")
    assert settings.gradient_accumulation_steps == 1
