"""`hfdist.launch`, `hfdist.run` and `hfdist.patching` without starting processes."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import TorchDynamoPlugin

from hfdist import launch, run
from hfdist.config import Settings, launched_sections
from hfdist.config.launcher import (
    LaunchCommand,
    environment_of_yaml,
    load_yaml,
    parse_launch_command,
    verify_yaml_sections,
)
from hfdist.errors import ConfigError

CONFIGS = Path(launch.__file__).parent / "configs"
STEMS = (
    *("data_parallel", "ddp", "spawn", "accelerate_plain", "amp_fp16", "amp_bf16", "zero1", "zero2", "zero3"),
    *("zero_switch", "fsdp", "deepspeed_native"),
)


@pytest.fixture(autouse=True)
def environ():
    """A launch-free environment; whatever a test does to it is undone."""
    before = dict(os.environ)
    for name in list(os.environ):
        if name.startswith(("ACCELERATE_", "HFDIST_", "FSDP_")) or name in ("WORLD_SIZE", "RANK", "LOCAL_WORLD_SIZE"):
            del os.environ[name]
    yield os.environ
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def no_accelerator(monkeypatch):
    monkeypatch.setattr("torch.accelerator.current_accelerator", lambda check_available=False: None)


def test_sections_are_taken_once_and_for_good():
    environ = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_USE_FSDP": "false", "OTHER": "1"}
    for _ in range(2):
        launch.take_sections(environ)
        assert environ == {"HFDIST_LAUNCHED_AS": "DEEPSPEED", "OTHER": "1"}
    plain: dict[str, str] = {}
    launch.take_sections(plain)
    assert plain == {}


def test_the_engines_environment(environ, no_accelerator):
    environ.update({"ACCELERATE_USE_FSDP": "true", "WORLD_SIZE": "2"})
    with launch.engine_environment(Settings()):
        assert "ACCELERATE_USE_FSDP" not in environ
        assert environ["ACCELERATE_USE_CPU"] == "true"
    assert launched_sections(environ) == ("FSDP",)


def test_the_native_engine_keeps_its_environment(environ, no_accelerator):
    environ.update({"ACCELERATE_USE_FSDP": "true", "WORLD_SIZE": "2"})
    with launch.engine_environment(Settings(engine="native")):
        assert environ["ACCELERATE_USE_FSDP"] == "true"
        assert "ACCELERATE_USE_CPU" not in environ


def test_one_process_is_left_on_its_device(no_accelerator):
    environ: dict[str, str] = {}
    launch.ensure_one_group(environ)
    assert environ == {}


def test_ranks_that_would_share_a_gpu_run_on_the_cpu(monkeypatch, caplog):
    import torch

    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    assert launch.has_accelerator_each({"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"})  # one on each of two machines
    assert not launch.has_accelerator_each({"WORLD_SIZE": "2"})
    assert "2 processes on this machine and 1 cuda device" in caplog.text
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("mps"))
    assert not launch.has_accelerator_each({"WORLD_SIZE": "2"})


def test_a_state_that_believes_it_is_alone_is_made_anew(environ, caplog):
    shared, accelerator = dict(PartialState._shared_state), dict(AcceleratorState._shared_state)
    try:
        AcceleratorState._reset_state(reset_partial_state=True)
        PartialState(cpu=True)
        launch.forget_lonely_state({"WORLD_SIZE": "1"})
        assert PartialState._shared_state
        launch.forget_lonely_state({"WORLD_SIZE": "2"})
        assert not PartialState._shared_state
        assert "1 process of 2" in caplog.text
        PartialState(cpu=True)
        AcceleratorState(cpu=True, dynamo_plugin=TorchDynamoPlugin(), _from_accelerator=True)
        with pytest.raises(ConfigError, match=r"1 process instead of 2.*hfdist"):
            launch.forget_lonely_state({"WORLD_SIZE": "2"})
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        PartialState._shared_state.update(shared)
        AcceleratorState._shared_state.update(accelerator)


# --- the launcher's command line


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("python /venv/bin/accelerate launch --config_file a.yaml x.py --config_file b", LaunchCommand("a.yaml")),
        ("accelerate launch --num_processes 3 x.py --num_processes 9", LaunchCommand(None, 3)),
        ("python -m accelerate.commands.launch --num-processes=4 x.py", LaunchCommand(None, 4)),
        ("accelerate-launch --mixed_precision bf16 -m hfdist.run --num_processes 3", LaunchCommand(None, None, "bf16")),
        ("/usr/bin/python /site/accelerate/commands/launch.py x.py", LaunchCommand()),
        ("torchrun --nproc_per_node 2 x.py", None),
        ("python accelerate.py launch", None),
        ("pytest -q", None),
    ],
)
def test_launch_commands(words, expected):
    assert parse_launch_command(words.split()) == expected


def test_asked_processes(tmp_path):
    assert LaunchCommand(num_processes=3).asked_processes == 3
    assert LaunchCommand(str(CONFIGS / "zero3.yaml")).asked_processes == 2
    assert LaunchCommand(str(tmp_path / "absent.yaml")).asked_processes is None


def test_a_launch_of_several_that_started_one_is_an_error(monkeypatch):
    monkeypatch.setattr(launch, "find_launch_command", lambda: LaunchCommand(num_processes=3))
    launch.verify_not_alone({"WORLD_SIZE": "3"})
    with pytest.raises(ConfigError, match=r"3 processes from --num_processes.*--multi_gpu"):
        launch.verify_not_alone({})
    monkeypatch.setattr(launch, "find_launch_command", lambda: LaunchCommand(num_processes=1))
    launch.verify_not_alone({})


# --- the yaml files


@pytest.mark.parametrize("stem", STEMS)
def test_every_config_is_accepted_by_accelerates_launcher(stem):
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser

    path = launch.config_path(stem)
    verify_yaml_sections(path)
    args, _, _ = _validate_launch_command(launch_command_parser().parse_args(["--config_file", str(path), "x.py"]))
    alone = load_yaml(path)["distributed_type"] == "NO"
    assert args.num_processes == (1 if alone else 2)
    assert args.main_process_port == 0
    assert (args.use_deepspeed or args.use_fsdp or args.multi_gpu) is not alone


def test_configs_have_the_same_keys_in_the_same_order_and_there_are_no_others():
    keys = [list(load_yaml(CONFIGS / f"{stem}.yaml")) for stem in STEMS]
    assert all(key == keys[0] for key in keys)
    assert {path.stem for path in CONFIGS.glob("*.yaml")} >= set(STEMS)


def test_an_unknown_config_names_the_nearest():
    with pytest.raises(ConfigError, match="zero3"):
        launch.config_path("zero33")


@pytest.mark.parametrize(
    ("section", "key", "near"),
    [
        ("fsdp_config", "fsdp_reshard_after_forwrd", "fsdp_reshard_after_forward"),
        ("deepspeed_config", "zero_stge", "zero_stage"),
        ("megatron_lm_config", "megatron_lm_tp_degre", "megatron_lm_tp_degree"),
        ("parallelism_config", "parallelism_config_tp_siz", "parallelism_config_tp_size"),
    ],
)
def test_keys_that_the_launcher_would_lose_are_errors(tmp_path, section, key, near):
    path = tmp_path / "my.yaml"
    path.write_text(f"distributed_type: MULTI_GPU\n{section}:\n  {near}: 1\n")
    verify_yaml_sections(path)
    path.write_text(f"distributed_type: MULTI_GPU\n{section}:\n  {key}: 1\n")
    with pytest.raises(ConfigError, match=f"{key}.*did you mean '{near}'"):
        verify_yaml_sections(path)


def test_the_yaml_keys_are_those_of_accelerates_launcher():
    """Each section's keys, as its argument parser knows them: a new version's keys are noticed here."""
    from accelerate.commands.launch import launch_command_parser

    from hfdist.config import fsdp, megatron, parallelism

    options = {action.dest for action in launch_command_parser()._actions}
    for prefix, known in (("fsdp_", fsdp.YAML_KEYS), ("megatron_lm_", megatron.YAML_KEYS),
                          ("parallelism_config_", parallelism.YAML_KEYS)):  # fmt: skip
        assert {option for option in options if option.startswith(prefix)} <= set(known), prefix


def test_the_environment_of_a_yaml_is_what_the_launcher_would_export(environ):
    exported = environment_of_yaml(CONFIGS / "zero3.yaml", num_processes=2)
    assert exported["ACCELERATE_USE_DEEPSPEED"] == "true"
    assert exported["ACCELERATE_DEEPSPEED_ZERO_STAGE"] == "3"
    assert exported["ACCELERATE_GRADIENT_CLIPPING"] == "1.0"
    assert environment_of_yaml(CONFIGS / "fsdp.yaml", num_processes=2)["FSDP_VERSION"] == "2"
    assert environment_of_yaml(CONFIGS / "amp_fp16.yaml", num_processes=3)["ACCELERATE_MIXED_PRECISION"] == "fp16"


# --- relaunching a recipe


@pytest.fixture
def executed(monkeypatch) -> list[list[str]]:
    """The command lines this process would have become."""
    calls: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda program, words: calls.append(words))
    monkeypatch.setattr(launch, "find_launch_command", lambda: None)
    monkeypatch.setattr(launch, "end_with_parent", lambda: None)
    monkeypatch.setattr(launch, "_default_processes", lambda config: 2)
    return calls


def test_a_recipe_alone_becomes_a_launch(executed):
    launch.relaunch_if_alone("recipes/fsdp.py", argv=["--steps", "3"])
    (words,) = executed
    assert words[0] == sys.executable
    assert words[words.index("--config_file") + 1] == str(CONFIGS / "fsdp.yaml")
    assert words[words.index("--num_processes") + 1] == "2"
    assert words[words.index("--main_process_port") + 1] == "0"
    assert words[-3:] == ["recipes/fsdp.py", "--steps", "3"]


def test_hfdists_own_engine_is_launched_without_deepspeed_and_the_native_one_with_it(executed, environ):
    launch.relaunch_if_alone("recipes/zero3.py", argv=[])
    del environ["HFDIST_RELAUNCHED"]
    environ["HFDIST_ENGINE"] = "native"
    launch.relaunch_if_alone("recipes/zero3.py", argv=[])
    own, native = executed
    assert "--multi_gpu" in own
    assert "--config_file" not in own
    assert "--config_file" in native


def test_the_number_of_processes_of_a_relaunch(executed, environ, monkeypatch):
    for given, launcher in ((4, None), (None, LaunchCommand(num_processes=3)), (4, LaunchCommand(num_processes=3))):
        monkeypatch.setattr(launch, "find_launch_command", lambda launcher=launcher: launcher)
        launch.relaunch_if_alone("recipes/ddp.py", num_processes=given, argv=[])
        del environ["HFDIST_RELAUNCHED"]
    assert [words[words.index("--num_processes") + 1] for words in executed] == ["4", "3", "4"]


def test_one_process_adopts_the_yaml_where_it_is(executed, environ):
    launch.relaunch_if_alone("recipes/zero1.py", num_processes=1, argv=[])
    assert executed == []
    assert environ["ACCELERATE_DEEPSPEED_ZERO_STAGE"] == "1"


def test_a_launch_that_starts_no_group_is_not_repeated_without_end(executed):
    launch.relaunch_if_alone("recipes/zero1.py", argv=[])
    with pytest.raises(ConfigError, match=r"without WORLD_SIZE"):
        launch.relaunch_if_alone("recipes/zero1.py", argv=[])
    assert len(executed) == 1


def test_a_worker_adopts_the_yaml_unless_its_launch_said_something(executed, environ, monkeypatch):
    environ["WORLD_SIZE"] = "2"
    environ["ACCELERATE_MIXED_PRECISION"] = "bf16"
    launch.relaunch_if_alone("recipes/zero2.py", argv=[])
    assert executed == []
    assert environ["ACCELERATE_DEEPSPEED_ZERO_STAGE"] == "2"
    assert environ["ACCELERATE_MIXED_PRECISION"] == "bf16"
    launch.relaunch_if_alone("recipes/zero3.py", argv=[])  # sections are there by now
    assert environ["ACCELERATE_DEEPSPEED_ZERO_STAGE"] == "2"


def test_a_worker_of_a_named_config_takes_nothing_else(executed, environ, monkeypatch):
    environ["WORLD_SIZE"] = "2"
    monkeypatch.setattr(launch, "find_launch_command", lambda: LaunchCommand(config_file=str(CONFIGS / "ddp.yaml")))
    launch.relaunch_if_alone("recipes/zero3.py", argv=[])
    assert launched_sections(environ) == ()


def test_a_named_config_of_one_process_is_obeyed(executed, monkeypatch):
    monkeypatch.setattr(launch, "find_launch_command", lambda: LaunchCommand(config_file=str(CONFIGS / "spawn.yaml")))
    launch.relaunch_if_alone("recipes/zero3.py", argv=[])
    assert executed == []


# --- hfdist.run


def test_flags_of_run():
    command = run.parse(
        ["--zero-stage", "3", "--compute=cast", "--conditional-modules", "train.py", "--zero-stage", "1"]
    )
    assert command == run.Command(
        settings={"zero_stage": "3", "compute": "cast", "conditional_modules": "true"},
        target="train.py",
        is_module=False,
        args=("--zero-stage", "1"),
    )
    assert run.parse(["-m", "package.train", "x"]) == run.Command({}, "package.train", True, ("x",))
    assert run.parse(["--escalate-on-oom", "false", "t.py"]).settings == {"escalate_on_oom": "false"}


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("--zero-stge 3 t.py", "did you mean 'zero_stage'"),
        ("--zero-stage 3", "a script"),
        ("--zero-stage", "a value"),
        ("", "a script"),
    ],
)
def test_bad_flags_of_run(argv, words):
    with pytest.raises(ConfigError, match=words):
        run.parse(argv.split())


def test_flags_become_variables_and_disagree_with_other_ones():
    environ = {"HFDIST_ZERO_STAGE": "2"}
    run.apply_settings({"zero_stage": "2", "compute": "cast"}, environ)
    assert environ == {"HFDIST_ZERO_STAGE": "2", "HFDIST_COMPUTE": "cast"}
    with pytest.raises(ConfigError, match=r"--zero-stage 3 and HFDIST_ZERO_STAGE=2"):
        run.apply_settings({"zero_stage": "3"}, environ)


def test_help_lists_every_setting():
    from hfdist.config.table import SETTINGS

    assert all(f"--{name.replace('_', '-')}" in run.usage() for name in SETTINGS)


# --- patch


def test_patch_and_unpatch():
    import types

    import accelerate
    import accelerate.accelerator

    import hfdist

    script = types.ModuleType("a_script_imported_before")
    script.Renamed = accelerate.Accelerator
    sys.modules[script.__name__] = script
    original = accelerate.Accelerator
    try:
        hfdist.patch()
        hfdist.patch()
        assert accelerate.Accelerator is hfdist.Accelerator
        assert accelerate.accelerator.Accelerator is hfdist.Accelerator
        assert script.Renamed is hfdist.Accelerator
        assert issubclass(hfdist.Accelerator, original)
        from hfdist.native import NativeAccelerator

        assert NativeAccelerator.__bases__ == (original,)  # not hfdist's, which would make one again, without end
        from hfdist.config import resolve_settings

        resolve_settings(accelerator_kwargs={"cpu": True}, environ={})  # still knows accelerate's own arguments
    finally:
        hfdist.unpatch()
        del sys.modules[script.__name__]
    hfdist.unpatch()
    assert accelerate.Accelerator is original
    assert script.Renamed is original


# --- native


def test_locks_of_killed_builds(tmp_path):
    from hfdist.native import find_stale_locks

    (tmp_path / "op").mkdir()
    lock = tmp_path / "op" / "lock"
    assert find_stale_locks(tmp_path) == []
    with lock.open("w"):
        assert find_stale_locks(tmp_path) == []  # a living process holds it
    assert find_stale_locks(tmp_path) == [lock]


def test_a_build_gets_its_own_directory_and_no_stale_lock(tmp_path, monkeypatch):
    from hfdist import native

    environ = {"HFDIST_CACHE": str(tmp_path), "PATH": os.environ["PATH"], "CXX": sys.executable}
    lock = tmp_path / "torch_extensions" / "op" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    native.prepare_op_build(environ)
    assert environ["TORCH_EXTENSIONS_DIR"] == str(tmp_path / "torch_extensions")
    assert not lock.exists()
    lock.touch()
    monkeypatch.setattr(native, "_LOCK_WAIT", 0.0)
    with pytest.raises(ConfigError, match="lock"):
        native.prepare_op_build({**environ, "LOCAL_RANK": "1"})  # rank 0 would have removed it by now
    monkeypatch.setattr(native.shutil, "which", lambda *_args, **_kwargs: None)
    with pytest.raises(ConfigError, match="compiler"):
        native.prepare_op_build(environ)


def test_native_refuses_plugins(environ):
    from hfdist.native import NativeAccelerator
    from hfdist.plugins import ZeroPlugin

    environ["HFDIST_ENGINE"] = "native"
    with pytest.raises(ConfigError, match="HFDIST_ENGINE=native"):
        NativeAccelerator(plugins=[ZeroPlugin()])


def test_gloo_for_native_deepspeed_keeps_the_scripts_timeout():
    from datetime import timedelta

    from accelerate.utils import AutocastKwargs, InitProcessGroupKwargs

    from hfdist.native import _with_gloo

    other, given = AutocastKwargs(), InitProcessGroupKwargs(timeout=timedelta(seconds=7))
    handlers = _with_gloo([other, given])
    assert handlers[0] is other
    assert (handlers[1].backend, handlers[1].timeout) == ("gloo", timedelta(seconds=7))
    assert _with_gloo([])[0].backend == "gloo"
