"""DeepSpeed's json, key by key: honoured, named in a notice, or refused. deepspeed itself is not imported."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from pathlib import Path

import pytest

from hfdist.config import Settings, resolve_settings
from hfdist.config import deepspeed_keys as keys
from hfdist.errors import ConfigError
from hfdist.plugins import AmpPlugin, PipelineParallelPlugin, TensorParallelPlugin

ZERO = {"zero_optimization": {"stage": 3}}


def settle(content: dict[str, object], **environ: str) -> Settings:
    variables = {
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_DEEPSPEED_CONFIG_FILE": json.dumps(content),
        **environ,
    }
    return resolve_settings(accelerator_kwargs={}, environ=variables)[0]


def refused(content: dict[str, object], *words: str, **environ: str) -> None:
    with pytest.raises(ConfigError) as error:
        settle(content, **environ)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_a_path_the_text_and_base64(tmp_path: Path):
    path = tmp_path / "zero.json"
    path.write_text(json.dumps(ZERO))
    for source in (str(path), json.dumps(ZERO), base64.urlsafe_b64encode(json.dumps(ZERO).encode()).decode()):
        settings = settle({}, ACCELERATE_DEEPSPEED_CONFIG_FILE=source)
        assert settings.zero.stage == 3
    assert str(path) in settle({}, ACCELERATE_DEEPSPEED_CONFIG_FILE=str(path)).origins["zero_stage"]
    for source in (str(tmp_path / "absent.json"), "{broken", "[1]"):
        refused({}, ACCELERATE_DEEPSPEED_CONFIG_FILE=source)


def test_transformers_own_template_is_accepted_without_its_optimizer():
    """The zero3 json of transformers' documentation (all "auto"); the script builds optimizer and scheduler itself."""
    settings = settle(
        {
            "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16,
                     "hysteresis": 2, "min_loss_scale": 1},
            "bf16": {"enabled": "auto"},
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "none", "pin_memory": True},
                "offload_param": {"device": "none", "pin_memory": True},
                "overlap_comm": True,
                "contiguous_gradients": True,
                "sub_group_size": 1e9,
                "reduce_bucket_size": "auto",
                "stage3_prefetch_bucket_size": "auto",
                "stage3_param_persistence_threshold": "auto",
                "stage3_max_live_parameters": 1e9,
                "stage3_max_reuse_distance": 1e9,
                "stage3_gather_16bit_weights_on_model_save": True,
            },
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto",
            "steps_per_print": 2000,
            "train_batch_size": "auto",
            "train_micro_batch_size_per_gpu": "auto",
            "wall_clock_breakdown": False,
        },
        ACCELERATE_MIXED_PRECISION="bf16",
    )  # fmt: skip
    assert settings.zero.stage == 3
    assert settings.amp == AmpPlugin(dtype="bf16")
    assert settings.gradient_clipping is None
    hints = next(line for line in settings.notices if "ignored" in line)
    assert "zero_optimization.overlap_comm" in hints
    assert "steps_per_print" in hints
    assert "reduce_bucket_size" not in hints  # "auto" asks for nothing


def test_values_that_become_settings():
    settings = settle({**ZERO, "gradient_accumulation_steps": "8", "gradient_clipping": 0.5})
    assert (settings.gradient_accumulation_steps, settings.gradient_clipping) == (8, 0.5)
    assert settle({**ZERO, "gradient_clipping": 0.0}).gradient_clipping is None


def test_b49_in_a_json():
    eight = {**ZERO, "gradient_accumulation_steps": "8"}
    assert settle(eight, ACCELERATE_GRADIENT_ACCUMULATION_STEPS="8").gradient_accumulation_steps == 8
    refused(
        {**ZERO, "gradient_accumulation_steps": 4},
        "4",
        "8",
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
        ACCELERATE_GRADIENT_ACCUMULATION_STEPS="8",
    )
    text = '{"zero_optimization": {"stage": 3}, "gradient_clipping": 1.0, "gradient_clipping": 2.0}'
    refused({}, "gradient_clipping", "twice", ACCELERATE_DEEPSPEED_CONFIG_FILE=text)


def test_stages():
    refused({"zero_optimization": {"stage": 5}}, "stage 0, 1, 2 or 3")
    refused({"fp16": {"enabled": False}}, "zero_optimization")
    assert settle({"zero_optimization": {}}).zero.stage == 0
    assert settle({"zero_optimization": {"stage": "auto"}}).zero.stage == 2
    refused(ZERO, "3", "1", ACCELERATE_DEEPSPEED_ZERO_STAGE="1")


def test_the_json_carries_tensor_and_pipeline_parallelism():
    own = {"pp_size": 2, "pp_schedule": "interleaved", "num_micro_batches": 8, "num_virtual_stages": 2}
    settings = settle({**ZERO, "hfdist": {**own, "pp_split": [2, 1, 1, 3]}}, WORLD_SIZE="4")
    assert settings.pipeline == PipelineParallelPlugin(
        pp_size=2, schedule="interleaved", num_micro_batches=8, num_virtual_stages=2, split=(2, 1, 1, 3)
    )
    assert settings.tensor is None
    plan = {"model.layers.*.mlp.up_proj": "colwise"}
    settings = settle({**ZERO, "hfdist": {"tp_size": 2, "tp_plan": plan, "sequence_parallel": True}})
    assert settings.tensor == TensorParallelPlugin(tp_size=2, plan=plan, sequence_parallel=True)
    assert settle({**ZERO, "tensor_parallel": {"autotp_size": 2}}).tensor == TensorParallelPlugin(tp_size=2)
    refused({**ZERO, "tensor_parallel": {"autotp_size": 2}, "hfdist": {"tp_size": 4}}, "autotp_size", "tp_size = ")
    refused({**ZERO, "hfdist": {"tp_size": 2, "pp_size": 2}}, "6 processes", "tp_size", WORLD_SIZE="6")
    refused({**ZERO, "hfdist": {"tp_size": 2, "dp_replicate_size": 3}}, "2 data-parallel ranks", WORLD_SIZE="4")
    refused({**ZERO, "hfdist": {"pp_size": 2, "pp_schedule": "1f1"}}, "1f1b")


def test_the_hfdist_section():
    own = {"dp_replicate_size": 2, "compute": "cast", "escalate_on_oom": True, "scheduler_step": "update"}
    settings = settle({**ZERO, "bf16": {"enabled": True}, "hfdist": own}, WORLD_SIZE="4")
    assert settings.zero.dp_replicate_size == 2
    assert settings.zero.escalate_on_oom
    assert settings.amp == AmpPlugin(dtype="bf16", compute="cast")
    assert settings.scheduler_step == "update"
    assert '"hfdist"' in settings.origins["scheduler_step"]
    refused({**ZERO, "hfdist": {"dp_replicate_sise": 2}}, "did you mean 'dp_replicate_size'")
    refused({**ZERO, "hfdist": {"ep_size": 2}}, "expert parallelism", "not in this release")
    refused({**ZERO, "hfdist": {"zero_stage": 1}}, "zero_stage", "1", "3")
    refused({**ZERO, "hfdist": [1]}, "json object")


def test_fp16_takes_deepspeeds_defaults_for_what_its_section_leaves_out():
    settings = settle({**ZERO, "fp16": {"enabled": True}})
    assert settings.amp == AmpPlugin(
        dtype="fp16", init_scale=2.0**16, growth_interval=1000, hysteresis=2, min_scale=1.0
    )
    assert any("consecutive_hysteresis" in line for line in settings.notices)
    said = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 50, "hysteresis": 1, "min_loss_scale": 4}
    settings = settle({**ZERO, "fp16": said})
    assert settings.amp == AmpPlugin(dtype="fp16", init_scale=256.0, growth_interval=50, hysteresis=1, min_scale=4.0)
    assert not any("consecutive_hysteresis" in line for line in settings.notices)


def test_fp16_with_a_fixed_scale_never_grows_nor_shrinks():
    settings = settle({**ZERO, "fp16": {"enabled": True, "loss_scale": 128, "min_loss_scale": 1, "hysteresis": 2}})
    assert settings.amp is not None
    assert (settings.amp.init_scale, settings.amp.min_scale) == (128.0, 128.0)
    assert settings.amp.growth_interval > 10**9
    assert any("fixed scale" in line for line in settings.notices)
    refused({**ZERO, "fp16": {"enabled": True, "loss_scale": -1}}, "fp16.loss_scale")


def test_precision_from_json_and_launcher():
    on, off, auto = ({**ZERO, "fp16": {"enabled": value}} for value in (True, False, "auto"))
    assert settle(on, ACCELERATE_MIXED_PRECISION="no").amp.dtype == "fp16"
    assert settle(on, ACCELERATE_MIXED_PRECISION="fp16").amp.dtype == "fp16"
    assert settle(auto, ACCELERATE_MIXED_PRECISION="fp16").amp.hysteresis == 2
    assert settle(auto, ACCELERATE_MIXED_PRECISION="no").amp is None
    refused(on, "fp16", "bf16", ACCELERATE_MIXED_PRECISION="bf16")
    refused(off, "switched off", "fp16.enabled", ACCELERATE_MIXED_PRECISION="fp16")
    refused({**ZERO, "fp16": {"enabled": True}, "bf16": {"enabled": True}}, "fp16", "bf16")
    assert settle({**ZERO, "bf16": {"enabled": True}}).amp == AmpPlugin(dtype="bf16")
    autocast = {**ZERO, "torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
    assert settle(autocast).amp == AmpPlugin(dtype="bf16", compute="autocast")


def test_the_dtype_of_reductions():
    assert settle({**ZERO, "communication_data_type": "fp32"}).zero.reduce_dtype == "fp32"
    bf16 = {**ZERO, "bf16": {"enabled": True}, "communication_data_type": "bfp16"}
    refused(bf16, "bfp16")
    assert settle({**bf16, "communication_data_type": "bf16"}).zero.reduce_dtype == "compute"
    refused({**ZERO, "communication_data_type": "fp16"}, "communication_data_type", "fp16")
    assert settle({**ZERO, "communication_data_type": "bf16"}).zero.reduce_dtype == "bf16"


def test_zero_plus_plus():
    """Weights as int8 and groups of ranks; DeepSpeed's defaults for both ask for nothing."""

    def zero(**keys: object) -> dict[str, object]:
        return {"zero_optimization": {"stage": 3, **keys}}

    settings = settle(zero(zero_quantized_weights=True, zero_hpz_partition_size=4), WORLD_SIZE="8").zero
    assert (settings.gather_dtype, settings.secondary_shard_size) == ("int8", 4)
    for content in (zero(), zero(zero_quantized_weights=False, zero_hpz_partition_size=1)):
        settings = settle(content).zero
        assert (settings.gather_dtype, settings.secondary_shard_size) == ("compute", None)
    refused(zero(zero_hpz_partition_size=4), "zero_hpz_partition_size", "6 ranks", "[2, 3, 6]", WORLD_SIZE="6")
    own = {"hfdist": {"dp_replicate_size": 2}, **zero(zero_hpz_partition_size=4)}
    refused(own, "zero_hpz_partition_size", "2 ranks", "[2]", WORLD_SIZE="4")


def test_batch_sizes_are_checked_or_give_the_accumulation():
    sizes = {**ZERO, "train_batch_size": 32, "train_micro_batch_size_per_gpu": 2}
    settings = settle(sizes, WORLD_SIZE="4")
    assert settings.gradient_accumulation_steps == 4
    assert any("train_batch_size" in line and "data loader" in line for line in settings.notices)
    assert settle({**sizes, "gradient_accumulation_steps": 4}, WORLD_SIZE="4").gradient_accumulation_steps == 4
    refused({**sizes, "gradient_accumulation_steps": 2}, "train_batch_size = 32", "2 accumulation", WORLD_SIZE="4")
    refused({**sizes, "train_batch_size": 30}, "train_batch_size = 30", WORLD_SIZE="4")


@pytest.mark.parametrize("section", ["optimizer", "scheduler"])
def test_sections_that_build_what_the_script_builds(section):
    refused({**ZERO, section: {"type": "auto"}}, section, "Dummy", "build")


@pytest.mark.parametrize(
    ("content", "word"),
    [
        ({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}, "optimizer offload"),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/x"}}}, "parameter offl"),
        ({"zero_optimization": {"stage": 2, "cpu_offload": True}}, "optimizer offload"),
        ({"zero_optimization": {"stage": 3, "zero_quantized_gradients": True}}, "zero_quantized_gradients"),
        (
            {"zero_optimization": {"stage": 3, "zero_quantized_nontrainable_weights": True}},
            "zero_quantized_nontrainable",
        ),
        ({"zero_optimization": {"stage": 3, "zero_quantized_weights": "int4"}}, "zero_quantized_weights"),
        ({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 0}}, "zero_hpz_partition_size"),
        ({"zero_optimization": {"stage": 3, "mics_shard_size": 8}}, "dp_replicate_size"),
        ({"zero_optimization": {"stage": 3, "offload_param": {"devise": "cpu"}}}, "did you mean"),
        ({"zero_optimization": {"stage": 3, "overlap_com": True}}, "did you mean 'zero_optimization.overlap_comm'"),
        ({**ZERO, "gradient_cliping": 1.0}, "did you mean 'gradient_clipping'"),
        ({**ZERO, "fp16": {"enable": True}}, "did you mean 'fp16.enabled'"),
        ({**ZERO, "pipeline": {"stages": 2}}, "pp_schedule"),
        ({**ZERO, "activation_checkpointing": {"cpu_checkpointing": True}}, "activation offload"),
        ({**ZERO, "gradient_allreduce_op": "sum"}, "gradient_allreduce_op"),
        ({**ZERO, "curriculum_learning": {"enabled": True}}, "curriculum_learning"),
        ({**ZERO, "compression_training": {"weight_quantization": {}}}, "compression_training"),
        ({**ZERO, "data_types": {"grad_accum_dtype": "bf16"}}, "grad_accum_dtype"),
        ({**ZERO, "dataloader_drop_last": True}, "drop_last"),
        ({**ZERO, "bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}, "bf16_master_weights_and_grads"),
        ({**ZERO, "msamp": {"enabled": True}}, "fp8"),
        ({"zero_optimization": [3]}, "json object"),
    ],
)
def test_what_would_change_the_result_or_the_memory_is_refused_by_name(content, word):
    refused(content, word)


@pytest.mark.parametrize(
    "content",
    [
        {**ZERO, "curriculum_learning": {"enabled": False}, "elasticity": {"enabled": False, "micro_batch_sizes": [2]}},
        {**ZERO, "tensor_parallel": {"autotp_size": 0}, "activation_checkpointing": {"cpu_checkpointing": False}},
        {**ZERO, "data_types": {"grad_accum_dtype": "fp32"}, "gradient_allreduce_op": "mean"},
        {**ZERO, "gradient_clipping": None, "optimizer": None},
    ],
)
def test_the_same_keys_switched_off_are_fine(content):
    assert settle(content).zero.stage == 3


def test_every_hint_is_accepted_and_named():
    tuned = {key: 7 for key, rule in keys.TOP.items() if isinstance(rule, keys.Hint)}
    zero = {"stage": 3, **{key: 7 for key, rule in keys.ZERO.items() if isinstance(rule, keys.Hint)}}
    settings = settle({**tuned, "zero_optimization": zero})
    line = next(line for line in settings.notices if "ignored" in line)
    assert all(key in line for key in [*tuned, *zero] if key != "stage")


def test_the_table_knows_every_key_of_the_installed_deepspeed():
    """Reads the names of deepspeed's fields out of its source: a new version's keys are noticed, nothing imported."""
    import importlib.util
    import re

    spec = importlib.util.find_spec("deepspeed")
    if spec is None or spec.origin is None:
        pytest.skip("deepspeed is not installed; `pip install hfdist[deepspeed]`")
    source = (Path(spec.origin).parent / "runtime" / "zero" / "config.py").read_text()
    body = source[source.index("class DeepSpeedZeroConfig") :]
    fields = re.findall(r"^    ([a-z][a-z0-9_]*)\s*:[^=\n]*=", body, re.M)
    aliases = re.findall(r"alias=\"([a-z0-9_]+)\"", body)
    assert len(fields) > 30
    assert {*fields, *aliases} <= set(keys.ZERO)


def test_deepspeed_was_not_imported():
    """In a process of its own, whatever other tests have imported."""
    variables = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": json.dumps(ZERO)}
    code = (
        "import sys\nfrom hfdist.config import resolve_settings\n"
        f"settings, _ = resolve_settings(accelerator_kwargs={{}}, environ={variables!r})\n"
        "assert settings.zero.stage == 3\nsys.exit('deepspeed' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
