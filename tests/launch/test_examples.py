"""The examples, launched as their docstrings say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def _run(*command: str) -> str:
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("ACCELERATE_", "HFDIST_"))}
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def _launch(config: str, example: str) -> str:
    return _run(
        "-m", "accelerate.commands.launch", "--config_file", f"accelerate_configs/{config}.yaml", f"examples/{example}"
    )


@pytest.fixture(scope="module")
def one_process() -> list[tuple[float, ...]]:
    """(loss, norm, learning rate) of the printed steps, without a launcher."""
    return _figures(_run("examples/accelerate_loop.py"))


def _figures(text: str) -> list[tuple[float, ...]]:
    rows = re.findall(r"step \d+  loss (\S+)  norm (\S+)  lr (\S+)", text)
    assert len(rows) == 7
    return [tuple(float(number) for number in row) for row in rows]


@pytest.mark.parametrize("config", ["zero1", "zero3"])
def test_the_drop_in_loop_is_one_process_whatever_the_config(config: str, one_process: list[tuple[float, ...]]) -> None:
    for ours, theirs in zip(_figures(_launch(config, "accelerate_loop.py")), one_process, strict=True):
        assert ours == pytest.approx(theirs, rel=2e-4)


def test_switching_shows_the_memory_of_each_stage() -> None:
    rows = re.findall(r"stage (\d): loss (\S+), .* (\S+) MB", _launch("zero_switch", "switch_stage.py"))
    assert [int(stage) for stage, *_ in rows] == [0, 3, 1, 2, 0]
    losses = [float(loss) for _, loss, _ in rows]
    assert losses == sorted(losses, reverse=True)
    held = {int(stage): float(megabytes) for stage, _, megabytes in rows}
    for stage in (1, 2, 3):
        assert held[stage] == pytest.approx(held[0] / 2, rel=0.02)
