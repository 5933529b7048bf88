"""`hfdist.config.resolve_settings`: every source, what agrees, what disagrees, what is refused. No processes."""

from __future__ import annotations

import pytest
from accelerate.utils import (
    AutocastKwargs,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProfileKwargs,
)

from hfdist.config import Settings, launched_sections, read_native_settings, resolve_engine, resolve_settings
from hfdist.config.table import LATER, SETTINGS
from hfdist.errors import ConfigError
from hfdist.plugins import AmpPlugin, LossPlugin, ZeroPlugin

# What `accelerate launch` exports for a DEEPSPEED yaml with the keys named.
DEEPSPEED = {
    "ACCELERATE_USE_DEEPSPEED": "true",
    "ACCELERATE_MIXED_PRECISION": "no",
    "ACCELERATE_CONFIG_DS_FIELDS": "zero_stage,gradient_clipping,gradient_accumulation_steps,mixed_precision",
    "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "8",
    "ACCELERATE_GRADIENT_CLIPPING": "0.5",
}


def settle(environ: dict[str, str] | None = None, plugins: tuple = (), **kwargs: object) -> Settings:
    return resolve_settings(plugins=plugins, accelerator_kwargs=kwargs, environ=environ or {})[0]


def left(environ: dict[str, str] | None = None, **kwargs: object) -> dict[str, object]:
    return resolve_settings(accelerator_kwargs=kwargs, environ=environ or {})[1]


def refused(*words: str, environ: dict[str, str] | None = None, plugins: tuple = (), **kwargs: object) -> str:
    with pytest.raises(ConfigError) as error:
        settle(environ, plugins, **kwargs)
    text = str(error.value)
    assert all(word in text for word in words), text
    return text


def test_nothing_said_is_plain_data_parallel():
    settings = settle()
    assert settings.engine == "hfdist"
    assert settings.zero == ZeroPlugin(stage=0)
    assert settings.amp is None
    assert settings.gradient_accumulation_steps == 1
    assert settings.gradient_clipping is None
    assert (settings.notices, settings.origins) == ((), {})


def test_a_deepspeed_yaml():
    settings = settle(DEEPSPEED)
    assert settings.zero.stage == 2
    assert settings.gradient_accumulation_steps == 8
    assert settings.gradient_clipping == 0.5
    assert "zero_stage" in settings.origins["zero_stage"]
    assert settings.notices == ()


def test_b49_equal_steps_from_two_sources_are_accepted_and_different_ones_name_both():
    assert settle(DEEPSPEED, gradient_accumulation_steps=8).gradient_accumulation_steps == 8
    assert settle(DEEPSPEED, gradient_accumulation_steps="8").gradient_accumulation_steps == 8
    text = refused("4", "8", environ=DEEPSPEED, gradient_accumulation_steps=4)
    assert "Accelerator(gradient_accumulation_steps=)" in text
    assert "ACCELERATE_GRADIENT_ACCUMULATION_STEPS" in text


@pytest.mark.parametrize(
    ("name", "variable", "first", "second"),
    [
        ("zero_stage", "ACCELERATE_DEEPSPEED_ZERO_STAGE", "2", "3"),
        ("gradient_clipping", "ACCELERATE_GRADIENT_CLIPPING", "0.5", "1.0"),
        ("mixed_precision", "ACCELERATE_MIXED_PRECISION", "bf16", "fp16"),
        ("gradient_accumulation_steps", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "8", "2"),
    ],
)
def test_b49_siblings_the_launcher_and_hfdists_own_variables(name, variable, first, second):
    environ = {**DEEPSPEED, variable: first}
    own = f"HFDIST_{name.upper()}"
    same = settle({**environ, own: first})
    assert own in same.origins[name]
    refused(name, first, second, own, environ={**environ, own: second})


def test_one_step_is_accelerates_default_so_it_yields():
    assert settle(DEEPSPEED, gradient_accumulation_steps=1).gradient_accumulation_steps == 8
    plugin = GradientAccumulationPlugin(num_steps=1, sync_each_batch=True)
    assert settle(DEEPSPEED, gradient_accumulation_plugin=plugin).gradient_accumulation_steps == 8
    final = left(DEEPSPEED, gradient_accumulation_plugin=plugin)["gradient_accumulation_plugin"]
    assert (final.num_steps, final.sync_each_batch) == (8, True)
    assert plugin.num_steps == 1  # the script's own object is left alone


def test_an_accumulation_plugin_that_disagrees():
    refused("4", "8", "gradient_accumulation_plugin", environ=DEEPSPEED,
            gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=4))  # fmt: skip


def test_explicit_plugins_win_over_everything():
    environ = {**DEEPSPEED, "HFDIST_DP_REPLICATE_SIZE": "2", "ACCELERATE_MIXED_PRECISION": "fp16", "WORLD_SIZE": "4"}
    settings = settle(environ, (ZeroPlugin(stage=3), AmpPlugin(dtype="bf16", compute="cast")))
    assert settings.zero == ZeroPlugin(stage=3, dp_replicate_size=2)  # what the plugin leaves at its default is kept
    assert settings.amp == AmpPlugin(dtype="bf16", compute="cast")
    assert "plugins" in settings.origins["zero_stage"]


def test_two_plugins_that_disagree_and_one_that_is_none():
    refused("zero_stage", "number 1", "number 2", plugins=(ZeroPlugin(stage=1), ZeroPlugin(stage=2)))
    refused("plugins[0]", "str", plugins=("zero3",))


def test_a_clip_of_zero_asks_for_none():
    assert settle({**DEEPSPEED, "ACCELERATE_GRADIENT_CLIPPING": "0.0"}).gradient_clipping is None
    assert settle({**DEEPSPEED, "ACCELERATE_GRADIENT_CLIPPING": "none"}).gradient_clipping is None


def test_an_absent_clip_is_a_notice_and_no_clipping():
    environ = {name: value for name, value in DEEPSPEED.items() if name != "ACCELERATE_GRADIENT_CLIPPING"}
    settings = settle(environ)
    assert settings.gradient_clipping is None
    assert any("gradient_clipping" in line and "1.0" in line for line in settings.notices)


def test_an_absent_stage_is_accelerates_default_and_a_notice():
    environ = {name: value for name, value in DEEPSPEED.items() if name != "ACCELERATE_DEEPSPEED_ZERO_STAGE"}
    settings = settle(environ)
    assert settings.zero.stage == 2
    assert any("zero_stage" in line for line in settings.notices)
    assert settle({**environ, "HFDIST_ZERO_STAGE": "3"}).zero.stage == 3


def test_an_unknown_key_of_the_deepspeed_section_names_the_nearest():
    refused("zero_stag", "did you mean 'zero_stage'", environ={**DEEPSPEED, "ACCELERATE_CONFIG_DS_FIELDS": "zero_stag"})


@pytest.mark.parametrize("part", ["OPTIMIZER", "PARAM"])
def test_offload_is_not_in_this_release(part):
    name = f"ACCELERATE_DEEPSPEED_OFFLOAD_{part}_DEVICE"
    refused("offload", "not in this release", "native", environ={**DEEPSPEED, name: "cpu"})
    assert settle({**DEEPSPEED, name: "none"}).zero.stage == 2


# --- HFDIST_*


@pytest.mark.parametrize(
    ("variable", "value", "got"),
    [
        ("ZERO_STAGE", "3", lambda s: s.zero.stage == 3),
        ("DP_REPLICATE_SIZE", "2", lambda s: s.zero.dp_replicate_size == 2),
        ("REDUCE_DTYPE", "compute", lambda s: s.zero.reduce_dtype == "compute"),
        ("REDUCE_DTYPE", "bf16", lambda s: s.zero.reduce_dtype == "bf16"),
        ("GATHER_DTYPE", "int8", lambda s: s.zero.gather_dtype == "int8"),
        ("SECONDARY_SHARD_SIZE", "4", lambda s: s.zero.secondary_shard_size == 4),
        ("LOSS_CHUNK_SIZE", "512", lambda s: s.loss == LossPlugin(512)),
        ("CONDITIONAL_MODULES", "true", lambda s: s.zero.conditional_modules),
        ("ESCALATE_ON_OOM", "1", lambda s: s.zero.escalate_on_oom),
        ("LOAD_SHARDED", "false", lambda s: s.zero.load_sharded is False),
        ("BLOCK_CLASSES", "B, A", lambda s: s.zero.block_classes == ("A", "B")),
        ("MIXED_PRECISION", "fp16", lambda s: s.amp == AmpPlugin(dtype="fp16")),
        ("GRADIENT_ACCUMULATION_STEPS", "3", lambda s: s.gradient_accumulation_steps == 3),
        ("GRADIENT_CLIPPING", "1.0", lambda s: s.gradient_clipping == 1.0),
        ("ACTIVATION_CHECKPOINTING", "yes", lambda s: s.activation_checkpointing),
        ("SCHEDULER_STEP", "update", lambda s: s.scheduler_step == "update"),
        ("LOSS_WEIGHTING", "mean", lambda s: s.loss_weighting == "mean"),
        ("NONFINITE_LOSS", "allow", lambda s: s.nonfinite_loss == "allow"),
        ("STALL_TIMEOUT", "2.5", lambda s: s.stall_timeout == 2.5),
        ("ENGINE", "hfdist", lambda s: s.engine == "hfdist"),
    ],
)
def test_own_variables(variable, value, got):
    assert got(settle({f"HFDIST_{variable}": value}))


def test_options_of_wire_and_loss_are_off_unless_asked_for():
    settings = settle({})
    assert settings.loss is None
    assert (settings.zero.reduce_dtype, settings.zero.gather_dtype) == ("fp32", "compute")
    assert settings.zero.secondary_shard_size is None


def test_options_of_wire_and_loss_by_plugin():
    zero = ZeroPlugin(stage=3, gather_dtype="int8", secondary_shard_size=2, reduce_dtype="bf16")
    settings = settle({"WORLD_SIZE": "4", "HFDIST_LOSS_CHUNK_SIZE": "7"}, plugins=(zero, LossPlugin(1024)))
    assert settings.zero == zero
    assert settings.loss == LossPlugin(1024)
    assert settings.notices == ()


def test_an_option_that_does_nothing_where_a_run_starts_is_said():
    early = settle({"HFDIST_SECONDARY_SHARD_SIZE": "2", "HFDIST_ZERO_STAGE": "2"})
    assert any("secondary_shard_size = 2: acts at stage 3 only" in line for line in early.notices)
    whole = settle({"HFDIST_GATHER_DTYPE": "int8", "HFDIST_ZERO_STAGE": "0"})
    assert any("nothing is gathered at stage 0" in line for line in whole.notices)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ZeroPlugin(gather_dtype="int4"), "int8"),
        (lambda: ZeroPlugin(reduce_dtype="fp16"), "bf16"),
        (lambda: ZeroPlugin(secondary_shard_size=1), "2 or more"),
        (lambda: ZeroPlugin(secondary_shard_size=2, conditional_modules=True), "one of the two"),
        (lambda: LossPlugin(0), "1 or more"),
    ],
)
def test_options_that_can_never_be_right_are_refused_on_construction(make, words):
    with pytest.raises(ConfigError, match=words):
        make()


@pytest.mark.parametrize("size", ["TP_SIZE", "PP_SIZE"])
@pytest.mark.parametrize(
    ("option", "value"), [("GATHER_DTYPE", "int8"), ("SECONDARY_SHARD_SIZE", "2"), ("LOSS_CHUNK_SIZE", "64")]
)
def test_options_of_data_parallelism_are_refused_beside_tensor_and_pipeline(size, option, value):
    environ = {"WORLD_SIZE": "4", "HFDIST_ZERO_STAGE": "3", f"HFDIST_{size}": "2", f"HFDIST_{option}": value}
    with pytest.raises(ConfigError, match=f"{option.lower()} .*{size.lower()} above 1"):
        settle(environ)
    assert settle({**environ, f"HFDIST_{size}": "1"}).zero.stage == 3


def test_a_secondary_group_must_divide_the_ranks():
    with pytest.raises(ConfigError, match=r"4 from HFDIST_SECONDARY_SHARD_SIZE and 6 ranks .*\[2, 3, 6\]"):
        settle({"HFDIST_SECONDARY_SHARD_SIZE": "4", "WORLD_SIZE": "6"})


@pytest.mark.parametrize(
    ("field", "value"),
    [("INIT_SCALE", 8.0), ("GROWTH_INTERVAL", 7), ("GROWTH_FACTOR", 4.0), ("BACKOFF_FACTOR", 0.25),
     ("HYSTERESIS", 3), ("MIN_SCALE", 2.0), ("MAX_SKIPPED_STEPS", 9), ("COMPUTE", "autocast")],
)  # fmt: skip
def test_own_variables_of_amp(field, value):
    settings = settle({"HFDIST_MIXED_PRECISION": "fp16", f"HFDIST_{field}": str(value)})
    assert getattr(settings.amp, field.lower()) == value
    without = settle({f"HFDIST_{field}": str(value)})
    assert without.amp is None
    assert any(field.lower() in line for line in without.notices)


@pytest.mark.parametrize(
    ("variable", "value", "field", "expected"),
    [
        ("TP_SIZE", "4", "tp_size", 4),
        ("TP_PLAN", '{"lm_head": "colwise"}', "plan", {"lm_head": "colwise"}),
        ("SEQUENCE_PARALLEL", "true", "sequence_parallel", True),
        ("PP_SIZE", "4", "pp_size", 4),
        ("PP_SCHEDULE", "GPipe", "schedule", "gpipe"),
        ("NUM_MICRO_BATCHES", "8", "num_micro_batches", 8),
        ("NUM_VIRTUAL_STAGES", "2", "num_virtual_stages", 2),
        ("PP_SPLIT", "3, 1", "split", (3, 1)),
    ],
)
def test_own_variables_of_model_axes(variable, value, field, expected):
    """Each counts beside a size of its axis, and is a notice without one."""
    settings = settle({"HFDIST_TP_SIZE": "2", "HFDIST_PP_SIZE": "2", f"HFDIST_{variable}": value})
    plugin = settings.tensor if hasattr(settings.tensor, field) else settings.pipeline
    assert getattr(plugin, field) == expected
    if not variable.endswith("_SIZE"):
        settings = settle({f"HFDIST_{variable}": value})
        assert (settings.tensor, settings.pipeline) == (None, None)
        assert any(variable.lower() in line for line in settings.notices)


@pytest.mark.parametrize(
    "option", ["GATHER_DTYPE=int8", "SECONDARY_SHARD_SIZE=2", "LOSS_CHUNK_SIZE=8", "ESCALATE_ON_OOM=1",
               "CONDITIONAL_MODULES=1"]
)  # fmt: skip
def test_options_of_data_parallelism_alone(option):
    name, value = option.split("=")
    for size in ("TP_SIZE", "PP_SIZE"):
        environ = {f"HFDIST_{name}": value, f"HFDIST_{size}": "2", "WORLD_SIZE": "4"}
        refused(name.lower(), size.lower(), environ=environ)
    settle({f"HFDIST_{name}": "0" if value == "1" else value, "WORLD_SIZE": "4"})


def test_loading_into_shards_has_no_effect_on_split_models():
    environ = {"HFDIST_LOAD_SHARDED": "1", "HFDIST_TP_SIZE": "2", "WORLD_SIZE": "4"}
    assert any("load_sharded" in line for line in settle(environ).notices)
    assert not any("load_sharded" in line for line in settle({**environ, "HFDIST_TP_SIZE": "1"}).notices)


def test_all_is_as_many_ranks_as_are_left():
    assert settle({"HFDIST_PP_SIZE": "all", "HFDIST_TP_SIZE": "2", "WORLD_SIZE": "8"}).pipeline.pp_size == 4
    assert settle({"HFDIST_TP_SIZE": "all", "WORLD_SIZE": "3"}).tensor.tp_size == 3
    assert settle({"HFDIST_TP_SIZE": "all"}).tensor is None
    refused("all", "tp_size", environ={"HFDIST_PP_SIZE": "all", "HFDIST_TP_SIZE": "all", "WORLD_SIZE": "4"})


def test_every_setting_of_the_table_has_a_test_above():
    tests = (test_own_variables, test_own_variables_of_amp, test_own_variables_of_model_axes)
    tested = {mark.args[1][i][0] for test in tests
              for mark in test.pytestmark for i in range(len(mark.args[1]))}  # fmt: skip
    assert {name.lower() for name in tested} == set(SETTINGS)


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("HFDIST_ZERO_STGE", "3", ["zero_stge", "did you mean 'zero_stage'"]),
        ("HFDIST_ZERO_STAGE", "4", ["stage 0, 1, 2 or 3"]),
        ("HFDIST_ZERO_STAGE", "two", ["whole number"]),
        ("HFDIST_GRADIENT_ACCUMULATION_STEPS", "0", ["1 or more"]),
        ("HFDIST_GRADIENT_ACCUMULATION_STEPS", "1.5", ["whole number"]),
        ("HFDIST_GRADIENT_CLIPPING", "-1", ["0 or more"]),
        ("HFDIST_GRADIENT_CLIPPING", "nan", ["finite"]),
        ("HFDIST_COMPUTE", "fast", ["mixed"]),
        ("HFDIST_STALL_TIMEOUT", "0", ["above 0"]),
        ("HFDIST_CONDITIONAL_MODULES", "maybe", ["true or false"]),
        ("HFDIST_MIXED_PRECISION", "fp8", ["fp8"]),
    ],
)
def test_bad_own_variables(variable, value, words):
    refused(*words, environ={variable: value})


@pytest.mark.parametrize("name", sorted(LATER))
def test_later_features_are_refused_by_name_and_quiet_when_off(name):
    refused("not in this release", name, environ={f"HFDIST_{name.upper()}": "2"})
    settle({f"HFDIST_{name.upper()}": "1"})


def test_replicas_must_divide_the_world():
    refused("dp_replicate_size = 3", "4 processes", environ={"HFDIST_DP_REPLICATE_SIZE": "3", "WORLD_SIZE": "4"})


def test_variables_of_other_parts_are_no_settings():
    settle({"HFDIST_CACHE": "/somewhere", "HFDIST_LAUNCHED_AS": ""})


# --- mixed precision


def test_the_launchers_no_is_nobodys_choice_but_the_scripts_no_is():
    assert settle({"ACCELERATE_MIXED_PRECISION": "no"}, mixed_precision="bf16").amp == AmpPlugin(dtype="bf16")
    refused("bf16", "no", environ={"ACCELERATE_MIXED_PRECISION": "bf16"}, mixed_precision="no")


def test_fp8_is_refused_wherever_it_is_asked_for():
    refused("fp8", environ={"ACCELERATE_MIXED_PRECISION": "fp8"})
    refused("fp8", mixed_precision="fp8")
    refused("fp8", environ={"ACCELERATE_FP8_BACKEND": "TE"})


def test_scaling_under_bf16_is_a_notice():
    settings = settle({"ACCELERATE_MIXED_PRECISION": "bf16", "HFDIST_INIT_SCALE": "4"})
    assert settings.amp == AmpPlugin(dtype="bf16")
    assert any("init_scale" in line for line in settings.notices)


# --- arguments of Accelerator


def test_what_is_left_for_accelerate():
    kwargs = left(cpu=True, log_with=None, mixed_precision="bf16", gradient_accumulation_steps=4)
    assert kwargs["mixed_precision"] == "bf16"
    assert kwargs["gradient_accumulation_plugin"].num_steps == 4
    assert "gradient_accumulation_steps" not in kwargs
    assert kwargs["cpu"] is True
    assert not {"deepspeed_plugin", "fsdp_plugin", "kwargs_handlers", "parallelism_config"} & set(kwargs)


def test_an_unknown_argument_names_the_nearest():
    refused("mixd_precision", "did you mean 'mixed_precision'", mixd_precision="bf16")


def test_handlers_are_kept_translated_or_refused():
    kept = [InitProcessGroupKwargs(), AutocastKwargs(enabled=False), ProfileKwargs()]
    scaler = GradScalerKwargs(init_scale=1024.0, growth_interval=5)
    environ = {"ACCELERATE_MIXED_PRECISION": "fp16"}
    settings, kwargs = resolve_settings(accelerator_kwargs={"kwargs_handlers": [*kept, scaler]}, environ=environ)
    assert kwargs["kwargs_handlers"] == kept
    assert settings.amp == AmpPlugin(dtype="fp16", init_scale=1024.0, growth_interval=5)
    refused("enabled=False", environ=environ, kwargs_handlers=[GradScalerKwargs(enabled=False)])

    class Unknown:
        pass

    refused("Unknown", "GradScalerKwargs", kwargs_handlers=[Unknown()])


def test_ddp_handlers():
    settings = settle(kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)])
    assert settings.notices == ()
    settings = settle(kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True, static_graph=True)])
    assert any("gradient_as_bucket_view, static_graph" in line for line in settings.notices)
    hook = DistributedDataParallelKwargs(comm_hook="fp16")
    assert settle(mixed_precision="fp16", kwargs_handlers=[hook]).zero.reduce_dtype == "compute"
    refused("fp16", "comm_hook", kwargs_handlers=[hook])
    refused("power_sgd", kwargs_handlers=[DistributedDataParallelKwargs(comm_hook="power_sgd")])


# --- sections


def test_sections_are_found_before_and_after_they_were_taken():
    assert launched_sections({"ACCELERATE_USE_DEEPSPEED": "true"}) == ("DEEPSPEED",)
    assert launched_sections({"HFDIST_LAUNCHED_AS": "FSDP,PARALLELISM_CONFIG"}) == ("FSDP", "PARALLELISM_CONFIG")
    assert launched_sections({"ACCELERATE_USE_FSDP": "false"}) == ()
    taken = {name: value for name, value in DEEPSPEED.items() if name != "ACCELERATE_USE_DEEPSPEED"}
    assert settle({**taken, "HFDIST_LAUNCHED_AS": "DEEPSPEED"}).zero.stage == 2


def test_the_engine():
    assert resolve_engine({}) == "hfdist"
    assert resolve_engine({"HFDIST_ENGINE": "native"}) == "native"
    with pytest.raises(ConfigError, match="HFDIST_ENGINE=deepspeed"):
        resolve_engine({"HFDIST_ENGINE": "deepspeed"})


def test_native_settings_record_the_yaml_and_refuse_nothing_it_says():
    environ = {**DEEPSPEED, "HFDIST_ENGINE": "native", "HFDIST_SCHEDULER_STEP": "update"}
    settings = read_native_settings({**environ, "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu"})
    assert (settings.engine, settings.zero.stage) == ("native", 2)
    assert settings.notices == ("no effect under HFDIST_ENGINE=native: HFDIST_SCHEDULER_STEP",)
    with pytest.raises(ConfigError, match="scheduler_step"):
        read_native_settings({**environ, "HFDIST_SCHEDULR_STEP": "update"})


def test_one_micro_step_of_a_yaml_gives_way_to_a_script_that_asks_for_more() -> None:
    environ = {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "1"}
    settings, _ = resolve_settings(accelerator_kwargs={"gradient_accumulation_steps": 4}, environ=environ)
    assert settings.gradient_accumulation_steps == 4
    assert resolve_settings(accelerator_kwargs={}, environ=environ)[0].gradient_accumulation_steps == 1


def test_what_native_lacks_says_so() -> None:
    from hfdist.native import NativeAccelerator

    bare = NativeAccelerator.__new__(NativeAccelerator)
    with pytest.raises(AttributeError, match="HFDIST_ENGINE=native"):
        _ = bare.explain
    assert not hasattr(bare, "set_zero_stage")
    with pytest.raises(AttributeError, match="no attribute"):
        _ = bare.anything
