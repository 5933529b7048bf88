"""One `accelerate launch` of a comparison: started, watched, ended within a limit, and what its ranks left.

Guarantee: when `run_launch` returns or raises, no process of the launch lives. Workers of the launcher may be in
sessions of their own, so its descendants are looked up and ended one by one, not only its process group.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_TERMINATE_WAIT = 10.0  # seconds between asking a launch to end and killing it
# Of a launch, and of hfdist's own choosing of an engine.
_FOREIGN = re.compile(
    r"^(ACCELERATE_|FSDP_|MEGATRON_LM_|PARALLELISM_CONFIG_|TORCHELASTIC_|HFDIST_(ENGINE|LAUNCHED|RELAU))"
)
_FOREIGN_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# glibc gives freed memory of 128 KiB and more back at once: only then does resident memory mean anything.
GIVE_MEMORY_BACK = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}


@dataclass
class Outcome:
    """What one launch left. `error` is None when all ranks measured all steps."""

    seconds: float
    exit_code: int | None
    error: str | None
    ranks: list[dict[str, Any]] = field(default_factory=list)
    # From starting the launcher to the end of the first optimizer step on the slowest rank.
    startup: float | None = None


def clean_environment(environ: Mapping[str, str], more: Mapping[str, str]) -> dict[str, str]:
    """`environ` without anything of another launch, then `more`. One thread a rank unless OMP_NUM_THREADS says so."""
    kept = {k: v for k, v in environ.items() if not _FOREIGN.match(k) and k not in _FOREIGN_NAMES}
    kept.setdefault("OMP_NUM_THREADS", "1")
    kept.setdefault("TOKENIZERS_PARALLELISM", "false")
    return {**kept, **more}


def command(config: Path, task: Path, script: str, args: Sequence[str], *, isolated: bool) -> list[str]:
    """The words that start a launch."""
    words = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config)]
    words += ["-m", "hfdist.compare.child", str(task), script, *args]
    return [sys.executable, "-m", "hfdist.compare.start", *(["--isolated"] if isolated else []), *words]


def run_launch(
    words: Sequence[str],
    folder: Path,
    *,
    environ: Mapping[str, str],
    num_ranks: int,
    num_steps: int,
    timeout: float,
) -> Outcome:
    """Run one launch in `folder`, its output in `launch.log`."""
    started_at, started = time.time(), time.monotonic()
    timed_out = False
    with (folder / "launch.log").open("wb") as log:
        launcher = subprocess.Popen(
            words, env=dict(environ), stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
        try:
            while launcher.poll() is None:
                if time.monotonic() - started > timeout:
                    timed_out = True
                    break
                time.sleep(0.2)
        finally:
            end_processes(launcher)
    seconds = time.monotonic() - started
    ranks = read_ranks(folder)
    error = explain(
        ranks,
        exit_code=None if timed_out else launcher.returncode,
        num_ranks=num_ranks,
        num_steps=num_steps,
        timeout=timeout,
        log=(folder / "launch.log").read_text(encoding="utf-8", errors="replace"),
    )
    firsts = [rank["engine"]["first_step_at"] for rank in ranks if "first_step_at" in rank.get("engine", {})]
    return Outcome(
        seconds=seconds,
        exit_code=None if timed_out else launcher.returncode,
        error=error,
        ranks=ranks,
        startup=max(firsts) - started_at if firsts else None,
    )


def end_processes(launcher: subprocess.Popen[bytes]) -> None:
    """End the launcher and all that descends from it: asked first, killed after `_TERMINATE_WAIT` seconds."""
    import psutil

    family: list[psutil.Process] = []
    with contextlib.suppress(psutil.Error):
        parent = psutil.Process(launcher.pid)
        family = [*parent.children(recursive=True), parent]
    if launcher.poll() is None:
        launcher.terminate()
    for process in family:
        with contextlib.suppress(psutil.Error):
            process.terminate()
    _, alive = psutil.wait_procs(family, timeout=_TERMINATE_WAIT)
    for process in alive:
        with contextlib.suppress(psutil.Error):
            process.kill()
    # What was started into the launcher's own group after the look above.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(launcher.pid, signal.SIGKILL)
    launcher.wait(timeout=_TERMINATE_WAIT)


def read_ranks(folder: Path) -> list[dict[str, Any]]:
    """The records that ranks left, by rank."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("rank*.json")]
    return sorted(found, key=lambda record: int(record["rank"]))


def explain(
    ranks: Sequence[Mapping[str, Any]],
    *,
    exit_code: int | None,
    num_ranks: int,
    num_steps: int,
    timeout: float,
    log: str,
) -> str | None:
    """Why a launch is of no use, in the engine's own words; None when it is. `exit_code` None: it ran out of time."""
    said = [str(rank["error"]) for rank in ranks if rank.get("error")]
    if said:
        # A rank that only lost its partner says less than the one that failed first.
        return min(said, key=lambda text: _is_consequence(text))
    done = [len(rank["steps"]) for rank in ranks]
    if len(done) == num_ranks and min(done) >= num_steps:
        return None
    if exit_code is None:
        return f"no end within {timeout:.0f} s (--timeout); {_last_words(log)}"
    if len(done) == num_ranks and exit_code == 0:
        return f"the script ended after {min(done)} of {num_steps} optimizer steps"
    return f"exit code {exit_code}; {_last_words(log)}"


def _is_consequence(text: str) -> bool:
    return bool(re.search(r"closed by peer|Connection reset|pair closure|Broken pipe|SignalException", text, re.I))


def _last_words(log: str) -> str:
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"(\[rank \d+\] ?)?[\w.]*(Error|Exception|Refused)\b.*:", line)]
    own = [line for line in errors if "ChildFailedError" not in line and "CalledProcessError" not in line]
    chosen = (own or errors or lines or ["no output"])[-1]
    return f"its last words: {chosen[:500]}"
