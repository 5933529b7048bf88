"""What must hold before torch, accelerate or transformers exist in a process, and how a recipe starts its own ranks.

    accelerate launch (yaml) --> N workers, ACCELERATE_USE_<section>=true
        hfdist.Accelerator: take_sections() moves those to HFDIST_LAUNCHED_AS, so that accelerate sees plain
        data parallel, then ensure_one_group(): on a machine without accelerator ACCELERATE_USE_CPU=true, because N
        workers would otherwise each believe they are alone. Under `HFDIST_ENGINE=native` neither happens.

Guarantee: inside `engine_environment`, `accelerate.Accelerator.__init__` of N launched workers makes one group of N.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from hfdist.config import LAUNCHED_AS, SECTIONS, Settings, launched_sections, resolve_engine
from hfdist.config.launcher import environment_of_yaml, find_launch_command, load_yaml
from hfdist.errors import ConfigError, nearest, say

logger = logging.getLogger(__name__)

_RELAUNCHED = "HFDIST_RELAUNCHED"


@contextmanager
def engine_environment(settings: Settings) -> Iterator[None]:
    """Inside, accelerate's constructor sees no yaml section and, without accelerator, is told to use the CPU.

    The variables stay changed afterwards: `TrainingArguments`, `from_pretrained` and a second `Accelerator` read them
    too. `resolve_settings` still finds the sections, through HFDIST_LAUNCHED_AS. Does nothing for the native engine.
    """
    if settings.engine == "hfdist":
        verify_not_alone(os.environ)
        take_sections(os.environ)
        ensure_one_group(os.environ)
        forget_lonely_state(os.environ)
    yield


def take_sections(environ: MutableMapping[str, str]) -> None:
    """Move `ACCELERATE_USE_<section>` of every section to HFDIST_LAUNCHED_AS. Calling it again changes nothing."""
    sections = launched_sections(environ)
    for section in SECTIONS:
        environ.pop(f"ACCELERATE_USE_{section}", None)
    if sections:
        environ[LAUNCHED_AS] = ",".join(sections)


def ensure_one_group(environ: MutableMapping[str, str]) -> None:
    """Set ACCELERATE_USE_CPU=true where the workers have no accelerator each, so that they form one gloo group."""
    if int(environ.get("WORLD_SIZE", "1")) > 1 and not has_accelerator_each(environ):
        environ["ACCELERATE_USE_CPU"] = "true"


def has_accelerator_each(environ: MutableMapping[str, str]) -> bool:
    """True when every local worker can have a device of its own that its ranks can talk through.

    MPS cannot (neither accelerate nor gloo has collectives on it). One GPU shared by two ranks cannot: NCCL refuses it.
    """
    import torch

    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None or device.type == "mps":
        return False
    local = int(environ.get("LOCAL_WORLD_SIZE", environ.get("WORLD_SIZE", "1")))
    count = torch.accelerator.device_count()
    if local > count:
        log_once(f"{local} processes on this machine and {count} {device.type} device(s): running on the CPU with gloo")
        return False
    return True


def forget_lonely_state(environ: MutableMapping[str, str]) -> None:
    """Undo a `PartialState` that something made before hfdist was asked and that believes it is alone.

    Raises ConfigError when a whole accelerate.Accelerator was made: objects it prepared would keep the wrong world.
    """
    world = int(environ.get("WORLD_SIZE", "1"))
    from accelerate.state import AcceleratorState, PartialState

    if world == 1 or not PartialState._shared_state or PartialState().num_processes == world:
        return
    if AcceleratorState._shared_state:
        raise ConfigError(
            say(
                given=f"an accelerate.Accelerator made earlier in this process, with 1 process instead of {world}",
                expected="hfdist.Accelerator to be made first",
                do="Import Accelerator from hfdist instead of accelerate, or launch with -m hfdist.run.",
            )
        )
    PartialState._reset_state()
    log_once(f"accelerate's state was made before hfdist.Accelerator and saw 1 process of {world}: made anew")


def override_accumulation(environ: MutableMapping[str, str], num_steps: int) -> None:
    """A command line's own micro-steps per update, in place of what the launcher exported from the yaml."""
    environ["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] = str(num_steps)


def log_once(text: str) -> None:
    """A warning on the main rank only, before there is any accelerate state to ask who that is."""
    if os.environ.get("RANK", "0") == "0":
        logger.warning(text)


def relaunch_if_alone(
    recipe_file: str | Path, *, num_processes: int | None = None, argv: Sequence[str] | None = None
) -> None:
    """Run the recipe under its own yaml, whatever started it. Call it before torch, accelerate or transformers exist.

    Alone (no WORLD_SIZE: `python recipes/X.py`, or `accelerate launch recipes/X.py` on a machine without accelerator):
    this process becomes `accelerate launch --config_file hfdist/configs/X.yaml recipes/X.py ...`; it does not return.
    A worker (WORLD_SIZE set), or one process that is to stay one, takes the sections of X.yaml, if its launch carried
    none and named no config, and returns.

    The number of processes is `num_processes`, else what the launcher was asked for, else X.yaml's, but no more than
    there are accelerators where there are some. A config named on the command line that starts one process is obeyed.
    """
    config = config_path(Path(recipe_file).stem)
    command = find_launch_command()
    if "WORLD_SIZE" in os.environ:
        if command is not None or "TORCHELASTIC_RUN_ID" in os.environ:
            end_with_parent()
        if not launched_sections(os.environ) and (command is None or command.config_file is None):
            _adopt(config, os.environ)
        return
    if command is not None and command.config_file is not None:
        verify_not_alone(os.environ)
        return
    asked = num_processes or (command.asked_processes if command else None) or _default_processes(config)
    if asked == 1 and resolve_engine(os.environ) == "hfdist":
        _adopt(config, os.environ)
        return
    if _RELAUNCHED in os.environ:  # a launcher that starts no group would be asked again without end
        raise ConfigError(
            say(
                given=f"{recipe_file}, launched under {config.name} and again without WORLD_SIZE",
                expected="the launcher to start a group of processes",
                do=f"Unset {_RELAUNCHED} if it is left over, and give {config.name} a distributed_type that does.",
            )
        )
    os.environ[_RELAUNCHED] = "1"
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    words = [sys.executable, "-m", "accelerate.commands.launch"]
    if _launcher_imports_deepspeed(config):
        # The workers adopt the yaml. "no" is what the launcher says unasked, so the yaml's precision still counts.
        words += ["--multi_gpu", "--num_machines", "1", "--dynamo_backend", "no", "--mixed_precision", precision]
    else:
        words += ["--config_file", str(config), *(["--mixed_precision", precision] if precision != "no" else [])]
    words += ["--num_processes", str(asked), "--main_process_port", "0"]
    words += [str(recipe_file), *(sys.argv[1:] if argv is None else argv)]
    if command is not None:
        end_with_parent()
    sys.stdout.flush()
    sys.stderr.flush()
    # In place of this process: its exit code is the launcher's, and signals reach the launcher, which ends its workers.
    os.execv(sys.executable, words)


def verify_not_alone(environ: Mapping[str, str]) -> None:
    """Raises ConfigError when `accelerate launch` was asked for several processes and started one (facts of CPUs)."""
    if "WORLD_SIZE" in environ:
        return
    command = find_launch_command()
    asked = command.asked_processes if command is not None else None
    if asked is not None and asked > 1:
        source = command.config_file if command is not None and command.num_processes is None else "--num_processes"
        raise ConfigError(
            say(
                given=f"{asked} processes from {source}, of which accelerate launch started 1",
                expected="a launch that starts them all on this machine too",
                do="Use distributed_type: MULTI_GPU (or DEEPSPEED, FSDP) in the yaml, or add --multi_gpu: without an "
                "accelerator hfdist makes the processes a gloo group.",
            )
        )


def config_path(stem: str) -> Path:
    """The yaml of a recipe, `hfdist/configs/<stem>.yaml`. Raises ConfigError with the nearest name."""
    folder = Path(__file__).parent / "configs"
    path = folder / f"{stem}.yaml"
    if not path.is_file():
        known = sorted(file.stem for file in folder.glob("*.yaml"))
        raise ConfigError(
            say(
                given=f"the config {stem!r}{nearest(stem, known)}",
                expected=f"one of {', '.join(known)}",
                do="A recipe and its config share their name.",
            )
        )
    return path


def end_with_parent() -> None:
    """On Linux: SIGTERM for this process when its parent ends, so that a killed launcher leaves no ranks behind."""
    if not sys.platform.startswith("linux"):
        return
    import ctypes
    import signal

    parent = os.getppid()
    pr_set_pdeathsig = 1
    ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:  # it ended in between
        os.kill(os.getpid(), signal.SIGTERM)


def _default_processes(config: Path) -> int:
    """num_processes of the yaml, at most one for each accelerator where the machine has some."""
    wanted = load_yaml(config).get("num_processes")
    count = int(wanted) if isinstance(wanted, int) else 2
    has_device_files = any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/kfd").exists()
    if has_device_files:  # only then is importing torch for the answer worth its seconds
        import torch

        count = min(count, max(torch.accelerator.device_count(), 1))
    return count


def _launcher_imports_deepspeed(config: Path) -> bool:
    """True for a DEEPSPEED yaml on hfdist's engine: accelerate's launcher would need deepspeed, and hfdist does not."""
    return load_yaml(config).get("distributed_type") == "DEEPSPEED" and resolve_engine(os.environ) == "hfdist"


def _adopt(config: Path, environ: MutableMapping[str, str]) -> None:
    """Put the sections of `config` in `environ`; a precision that the launch itself was told stays."""
    for name, value in environment_of_yaml(config, num_processes=int(environ.get("WORLD_SIZE", "1"))).items():
        if name == "ACCELERATE_DEEPSPEED_CONFIG_FILE" and value != "none":
            value = str(config.parent / Path(value).name)  # the json beside the yaml, wherever the recipe is started
        said = environ.get(name)
        if said is None or (name == "ACCELERATE_MIXED_PRECISION" and said == "no"):
            environ[name] = value
    log_once(f"launched without a config: running {config.name}")
