"""`python -m hfdist.run [--zero-stage 3 ...] train.py args...`: an unmodified Accelerate script on hfdist's engine.

    accelerate launch --config_file accelerate_configs/zero3.yaml -m hfdist.run train.py --epochs 1
    accelerate launch --config_file my.yaml -m hfdist.run --scheduler-step update train.py
    accelerate launch --config_file my.yaml -m hfdist.run -m package.train --epochs 1

Flags before the script are hfdist's settings (`--help` lists them), the same names as `HFDIST_*`. The script sees its
own `sys.argv` and `sys.path`, as if python had run it.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hfdist.config.table import LATER, SETTINGS
from hfdist.config.values import read_bool
from hfdist.errors import ConfigError, nearest, say


@dataclass(frozen=True)
class Command:
    """What to run: `target` is a script's path or, when `is_module`, a module's name; `settings` by their own names."""

    settings: dict[str, str]
    target: str
    is_module: bool
    args: tuple[str, ...]


def parse(argv: Sequence[str]) -> Command:
    """Flags up to the first word that is none, then the script and its own arguments. Raises ConfigError."""
    settings: dict[str, str] = {}
    words = list(argv)
    while words and words[0].startswith("--"):
        name, has_value, value = words.pop(0)[2:].replace("-", "_", 1).partition("=")
        name = name.replace("-", "_")
        if name not in SETTINGS and name not in LATER:
            raise ConfigError(
                say(
                    given=f"the flag --{name.replace('_', '-')}",
                    expected="one of hfdist's settings before the script",
                    do=f"Correct it{nearest(name, [*SETTINGS, *LATER])}; python -m hfdist.run --help lists them, and "
                    "the script's own flags come after its name.",
                )
            )
        if not has_value:
            is_switch = name in SETTINGS and SETTINGS[name].read is read_bool
            if is_switch and (not words or not _is_bool(words[0])):
                value = "true"
            elif words:
                value = words.pop(0)
            else:
                raise ConfigError(say(given=f"--{name} alone", expected="a value", do=SETTINGS[name].help))
        settings[name] = value
    is_module = bool(words) and words[0] == "-m"
    if is_module:
        words.pop(0)
    if not words:
        raise ConfigError(
            say(
                given=f"{' '.join(argv) or 'nothing'}",
                expected="a script",
                do="python -m hfdist.run [--zero-stage 3 ...] train.py args...",
            )
        )
    return Command(settings=settings, target=words[0], is_module=is_module, args=tuple(words[1:]))


def apply_settings(settings: dict[str, str], environ: MutableMapping[str, str]) -> None:
    """Each flag becomes its `HFDIST_*` variable; one that is set to something else already is an error."""
    for name, value in settings.items():
        variable = f"HFDIST_{name.upper()}"
        if environ.get(variable, value) != value:
            raise ConfigError(
                say(
                    given=f"--{name.replace('_', '-')} {value} and {variable}={environ[variable]}",
                    expected="sources that agree",
                    do="Keep one of the two, or make them equal.",
                )
            )
        environ[variable] = value


def usage() -> str:
    """The text of --help: one line a setting."""
    lines = [f"  --{name.replace('_', '-'):<30}{setting.help}" for name, setting in SETTINGS.items()]
    return "\n".join([__doc__ or "", "Settings:", *lines])


def main() -> None:
    """Entry point of `-m hfdist.run`."""
    if len(sys.argv) > 1 and sys.argv[1] in ("-h", "--help"):
        print(usage())
        return
    command = parse(sys.argv[1:])
    apply_settings(command.settings, os.environ)
    if not command.is_module and not Path(command.target).is_file():
        raise ConfigError(
            say(given=f"the script {command.target!r}", expected="a file", do="Give its path, or -m and its module.")
        )
    from hfdist.patching import patch

    patch()
    sys.argv = [command.target, *command.args]
    if command.is_module:
        runpy.run_module(command.target, run_name="__main__", alter_sys=True)
    else:
        # `-m hfdist.run` put the working directory first; python puts the script's own there.
        sys.path[0] = str(Path(command.target).resolve().parent)
        runpy.run_path(command.target, run_name="__main__")


def _is_bool(word: str) -> bool:
    try:
        read_bool(word)
    except ValueError:
        return False
    return True


if __name__ == "__main__":
    main()
