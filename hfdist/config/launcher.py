"""What `accelerate launch` was told, read from its command line: the workers it starts are not told.

Worked example, a machine without accelerator: `accelerate launch --num_processes 3 x.py` starts one worker, without
WORLD_SIZE, and the 3 is lost; here it is found again in the parent's command line. Best effort: where the parent cannot
be read (another user's, or none), the answer is None and nothing is checked.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hfdist.config.deepspeed_keys import YAML_SECTION as _DEEPSPEED_KEYS
from hfdist.config.fsdp import YAML_KEYS as _FSDP_KEYS
from hfdist.config.megatron import YAML_KEYS as _MEGATRON_KEYS
from hfdist.config.parallelism import YAML_KEYS as _PARALLELISM_KEYS
from hfdist.errors import ConfigError, nearest, say

_PROGRAMS = ("accelerate", "accelerate-launch", "accelerate.exe", "accelerate-launch.exe")
_MODULES = ("accelerate.commands.launch", "accelerate.commands.accelerate_cli")
_MODULE_FILES = ("accelerate/commands/launch.py", "accelerate/commands/accelerate_cli.py")


@dataclass(frozen=True)
class LaunchCommand:
    """The options of an `accelerate launch` that matter here; None where it has no such option."""

    config_file: str | None = None
    num_processes: int | None = None
    mixed_precision: str | None = None

    @property
    def asked_processes(self) -> int | None:
        """Number of processes asked for by the option, or by the yaml when there is no option."""
        if self.num_processes is not None or self.config_file is None or not Path(self.config_file).is_file():
            return self.num_processes
        value = load_yaml(self.config_file).get("num_processes")
        return int(value) if isinstance(value, int) else None


def find_launch_command() -> LaunchCommand | None:
    """The `accelerate launch` that started this process; None when something else did.

    Its config file as the launcher meant it, whatever folder this process has gone to since.
    """
    import psutil

    try:
        parent = psutil.Process(os.getppid())
        command = parse_launch_command(parent.cmdline())
        if command is not None and command.config_file is not None:
            return replace(command, config_file=str(Path(parent.cwd()) / command.config_file))
    except (psutil.Error, OSError):
        return None
    return command


def parse_launch_command(words: Sequence[str]) -> LaunchCommand | None:
    """Options of `words` up to the training script; None when they are not an accelerate launch.

    `--num_processes 3`, `--num_processes=3` and `--num-processes 3` are the same to accelerate.
    """
    start = next((i for i, word in enumerate(words[:4]) if _is_launcher(word)), None)
    if start is None:
        return None
    found: dict[str, str] = {}
    names = ("config_file", "num_processes", "mixed_precision")
    rest = [word for word in words[start + 1 :] if word != "launch"]
    for i, word in enumerate(rest):
        if word.endswith(".py") and not (i and _name(rest[i - 1]) in names):
            break  # the training script: what follows is its own
        name, _, value = word.partition("=")
        if _name(name) in names:
            found[_name(name)] = value or (rest[i + 1] if i + 1 < len(rest) else "")
        if word in ("-m", "--module"):
            break
    count = found.get("num_processes", "")
    return LaunchCommand(
        config_file=found.get("config_file"),
        num_processes=int(count) if count.isdigit() else None,
        mixed_precision=found.get("mixed_precision"),
    )


def _is_launcher(word: str) -> bool:
    path = word.replace(os.sep, "/")
    return path.rsplit("/", 1)[-1] in _PROGRAMS or word in _MODULES or path.endswith(_MODULE_FILES)


def _name(option: str) -> str:
    return option.lstrip("-").replace("-", "_") if option.startswith("--") else ""


def load_yaml(path: str | Path) -> Mapping[str, object]:
    """The content of an accelerate yaml. Raises ConfigError when it is not one."""
    import yaml

    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(
            say(given=f"{path} ({error})", expected="an accelerate yaml", do="Correct it or name another one.")
        ) from None
    if not isinstance(content, dict):
        raise ConfigError(say(given=f"{path}, not a mapping", expected="an accelerate yaml", do="Name another one."))
    return content


def verify_yaml_sections(path: str | Path) -> None:
    """Raises ConfigError for a key that the launcher accepts inside a section and then silently loses."""
    sections = {
        "deepspeed_config": _DEEPSPEED_KEYS,
        "fsdp_config": _FSDP_KEYS,
        "megatron_lm_config": _MEGATRON_KEYS,
        "parallelism_config": _PARALLELISM_KEYS,
    }
    content = load_yaml(path)
    for section, known in sections.items():
        keys = content.get(section)
        for key in keys if isinstance(keys, dict) else ():
            # accelerate adds fsdp_ itself where it is left out
            if key not in known and not (section == "fsdp_config" and f"fsdp_{key}" in known):
                raise ConfigError(
                    say(
                        given=f"the unknown key {key!r} under {section} in {path}",
                        expected="a key accelerate has",
                        do=f"Correct the name{nearest(key, known)} or remove it.",
                    )
                )


def environment_of_yaml(path: str | Path, *, num_processes: int) -> dict[str, str]:
    """The variables `accelerate launch --config_file path` would export for its sections, by accelerate's own code."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

    words = ["--config_file", str(path), "--num_processes", str(num_processes), "--main_process_port", "0", "none.py"]
    args, defaults, from_config = _validate_launch_command(launch_command_parser().parse_args(words))
    if args.use_deepspeed:
        fields = list(defaults.deepspeed_config) + (["mixed_precision"] if from_config else [])
        args.deepspeed_fields_from_accelerate_config = ",".join(fields)
        _, environ = prepare_deepspeed_cmd_env(args)
    else:
        environ = prepare_multi_gpu_env(args)
    prefixes = ("ACCELERATE_", "FSDP_", "MEGATRON_LM_", "PARALLELISM_CONFIG_")
    return {
        name: value for name, value in environ.items() if name.startswith(prefixes) and os.environ.get(name) != value
    }


def find_json_beside_yaml(environ: Mapping[str, str], config_file: str | None) -> Mapping[str, str]:
    """`environ` with a DeepSpeed json that is not found from here, but beside the yaml that names it, by that path."""
    name = "ACCELERATE_DEEPSPEED_CONFIG_FILE"
    source = environ.get(name, "")
    if config_file is None or not source.endswith(".json") or Path(source).is_file():
        return environ
    beside = Path(config_file).parent / Path(source).name
    return {**environ, name: str(beside)} if beside.is_file() else environ
