"""A whole comparison: every engine launched in turn, what all of them left, in one compare.json.

    counting     hfdist  native  ddp  single      short launches: memory by owner, peak, wire; nothing is timed
    round 1      hfdist  native  ddp  single      times and losses
    round 2      native  ddp  single  hfdist      the order rotates, so that a busy minute hits all alike
    ...

An engine that fails is a row with its own error text and is not launched again; the others go on. compare.json is
written anew after every launch: a comparison that is broken off keeps what it has. In `DIR/launches/<engine>-<round>/`
are each launch's output and the raw records of its ranks, in `DIR/configs/` the yaml each engine was launched with.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hfdist.compare import engines, launches, start
from hfdist.compare.launches import Outcome
from hfdist.compare.probe import STEPS_OF_A_COUNT
from hfdist.errors import ConfigError, say
from hfdist.recipe.record import versions

COUNTING = "count"
# DeepSpeed's ops: two compilers on a slow machine.
_BUILD_LIMIT = 1800.0


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What to compare. `chosen`: engines, hfdist first; `asked` and `content`: the yaml (`engines.read_asked`)."""

    config: Path
    script: str
    args: tuple[str, ...]
    chosen: tuple[str, ...]
    asked: engines.Asked
    content: Mapping[str, Any]
    steps: int
    repeats: int
    out: Path
    # Seconds that one launch may take.
    timeout: float = 900.0
    command: str = ""


# Called as follow(what, done): in a few words what happens now, and how many launches are done.
Follow = Callable[[str, int], None]


@dataclass
class _Engine:
    name: str
    recipe: engines.Recipe | None = None
    error: str | None = None
    launched: list[dict[str, Any]] = field(default_factory=list)


class Session:
    """Runs a `Comparison`."""

    def __init__(self, comparison: Comparison, follow: Follow) -> None:
        self.comparison, self.follow = comparison, follow
        self.engines = [_Engine(name) for name in comparison.chosen]
        self.in_namespace = False
        self.done = 0
        self.header: dict[str, Any] = {}

    def run(self) -> Path:
        """All launches; the path of compare.json."""
        what = self.comparison
        (what.out / "configs").mkdir(parents=True, exist_ok=True)
        self._follow("looking at the machine")
        self.in_namespace = start.can_isolate()
        self.header = self._header()
        for engine in self.engines:
            try:
                engine.recipe = engines.launch_recipe(engine.name, what.content, what.asked)
                _write_yaml(self._config(engine), engine.recipe.content)
            except ConfigError as error:
                engine.error = str(error)
        self._prepare_ops()
        for number, order in enumerate(plan_rounds(len(self.engines), what.repeats)):
            name = COUNTING if number == 0 else str(number)
            for index in order:
                engine = self.engines[index]
                if engine.error is None:
                    self._launch(engine, name)
                    self._save()
                self.done += 1
        return self._save()

    def _follow(self, text: str) -> None:
        self.follow(text, self.done)

    # ---------------------------------------------------------------------------------------------------- launches

    def _launch(self, engine: _Engine, name: str) -> None:
        what, recipe = self.comparison, engine.recipe
        assert recipe is not None
        counting = name == COUNTING
        self._follow(f"{engine.name}, " + ("counting" if counting else f"round {name} of {what.repeats}"))
        folder = what.out / "launches" / f"{engine.name}-{name}"
        folder.mkdir(parents=True, exist_ok=True)
        for left in folder.glob("rank*"):  # by an earlier comparison with the same --out
            left.unlink()
        steps = STEPS_OF_A_COUNT if counting else what.steps
        isolated = counting and self.in_namespace
        task = {
            "engine": engine.name,
            "steps": steps,
            "count": counting,
            "in_namespace": isolated,
            "asked": engines.as_json(what.asked),
            "overrides": recipe.overrides,
        }
        (folder / "task.json").write_text(json.dumps(task), encoding="utf-8")
        outcome = launches.run_launch(
            launches.command(self._config(engine), folder / "task.json", what.script, what.args, isolated=isolated),
            folder,
            environ=self._environ({**recipe.environ, **(launches.GIVE_MEMORY_BACK if counting else {})}),
            num_ranks=1 if engine.name == "single" else what.asked.num_processes,
            num_steps=steps,
            timeout=what.timeout,
        )
        engine.error = outcome.error
        engine.launched.append({"round": name, **_as_json(outcome)})

    def _environ(self, more: Mapping[str, str]) -> dict[str, str]:
        # The package that compares is the package that is compared, wherever the script lies.
        home = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(part for part in (home, os.environ.get("PYTHONPATH", "")) if part)
        return launches.clean_environment(os.environ, {"PYTHONPATH": path, **more})

    def _config(self, engine: _Engine) -> Path:
        return self.comparison.out / "configs" / f"{engine.name}.yaml"

    def _prepare_ops(self) -> None:
        """Build DeepSpeed's ops once, before anything is timed. What fails is the error of the engines that need it."""
        using = [e for e in self.engines if e.name.startswith("native") and e.error is None]
        if not using or self.comparison.asked.distributed_type != "DEEPSPEED":
            return
        self._follow("preparing DeepSpeed's ops, once (a minute or two of compiler time if they are new)")
        error = self._build("")
        for engine in using:
            engine.error = error
        adam = [engine for engine in using if engine.name == "native-cpuadam"]
        if adam and error is None:
            adam[0].error = self._build("--cpu-adam")

    def _build(self, flag: str) -> str | None:
        """Build in a process of its own, whose compilers can be ended; the reason when it could not be done."""
        folder = self.comparison.out / "launches" / f"ops{flag}"
        folder.mkdir(parents=True, exist_ok=True)
        words = [sys.executable, "-m", "hfdist.compare.ops", str(folder / "rank0.json"), *([flag] if flag else [])]
        (folder / "rank0.json").unlink(missing_ok=True)
        outcome = launches.run_launch(
            words,
            folder,
            environ=self._environ({}),
            num_ranks=1,
            num_steps=0,
            timeout=_BUILD_LIMIT,
        )
        return None if outcome.error is None else f"DeepSpeed's ops could not be built: {outcome.error}"

    # ---------------------------------------------------------------------------------------------------- the record

    def _header(self) -> dict[str, Any]:
        what = self.comparison
        return {
            "kind": "comparison",
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "command": what.command,
            "config": str(what.config),
            "yaml": dict(what.content),
            "script": what.script,
            "args": list(what.args),
            "steps": what.steps,
            "repeats": what.repeats,
            "asked": engines.as_json(what.asked),
            "counted_by_the_kernel": self.in_namespace,
            "versions": versions(),
            "commit": _commit(),
            "hardware": hardware(),
            "threads": os.environ.get("OMP_NUM_THREADS", "1"),
        }

    def _save(self) -> Path:
        path = self.comparison.out / "compare.json"
        content = {
            **self.header,
            "engines": {
                engine.name: {
                    "what": engines.ENGINES[engine.name],
                    "error": engine.error,
                    "overrides": engine.recipe.overrides if engine.recipe else {},
                    "environ": engine.recipe.environ if engine.recipe else {},
                    "launches": engine.launched,
                }
                for engine in self.engines
            },
        }
        part = path.with_suffix(".part")
        part.write_text(json.dumps(content, indent=1), encoding="utf-8")
        part.replace(path)
        return path


def plan_rounds(num_engines: int, repeats: int) -> list[list[int]]:
    """The order of engines in the counting round and in each timed one: every round begins one engine later.

    >>> plan_rounds(3, 2)
    [[0, 1, 2], [0, 1, 2], [1, 2, 0]]
    """
    numbers = list(range(num_engines))
    return [numbers, *([*numbers[r % num_engines :], *numbers[: r % num_engines]] for r in range(repeats))]


def verify(comparison: Comparison) -> None:
    """Raises ConfigError for what cannot work, before anything is launched."""
    from hfdist.recipe.arguments import verify_writable

    if not Path(comparison.script).is_file():
        raise ConfigError(say(given=f"the script {comparison.script!r}", expected="a file", do="Give its path."))
    if comparison.steps < 3 or comparison.repeats < 1 or comparison.timeout <= 0:
        raise ConfigError(
            say(
                given=f"--steps {comparison.steps} --repeats {comparison.repeats} --timeout {comparison.timeout:g}",
                expected="3 steps or more (engines set themselves up in the first), 1 repeat or more, some time",
                do="Leave them out for the defaults.",
            )
        )
    verify_writable(comparison.out, option="--out")


@contextlib.contextmanager
def progress(total: int) -> Iterator[Follow]:
    """The `follow` of a `Session`: a bar on a terminal, which redraws itself, and a line a launch in a log."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(file=sys.stdout)
    bar = Progress(
        SpinnerColumn(),
        TextColumn("[bold cyan]{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
    )
    task = bar.add_task("compare", total=total)

    def follow(text: str, done: int) -> None:
        bar.update(task, completed=done, description=text)
        if not console.is_terminal:
            print(f"[{done}/{total}] {text}", flush=True)

    with bar:
        yield follow
        bar.update(task, completed=total)


def _as_json(outcome: Outcome) -> dict[str, Any]:
    return {
        "seconds": outcome.seconds,
        "startup": outcome.startup,
        "exit_code": outcome.exit_code,
        "error": outcome.error,
        "ranks": outcome.ranks,
    }


def _write_yaml(path: Path, content: Mapping[str, Any]) -> None:
    import yaml

    path.write_text(yaml.safe_dump(dict(content), sort_keys=False), encoding="utf-8")


def hardware() -> dict[str, Any]:
    """What the comparison ran on."""
    import psutil
    import torch

    model = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    device = torch.accelerator.current_accelerator(check_available=True)
    names: Sequence[str] = []
    if device is not None and device.type == "cuda":
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    elif device is not None:
        names = [device.type] * torch.accelerator.device_count()
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "memory": psutil.virtual_memory().total,
        "accelerators": list(names),
        "load_at_start": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
    }


def _commit() -> str | None:
    """hfdist's own commit, when it runs out of a checkout."""
    words = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(words, capture_output=True, text=True, timeout=10, check=True)
        return done.stdout.strip() or None
    return None
