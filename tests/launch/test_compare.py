"""`hfdist compare` for real: an unmodified loop under three engines, one of which fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hfdist.compare import figures

ROOT = Path(__file__).resolve().parents[2]
STEPS = 5
P = 8 * 32 + 32 + 32 + 1


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str, Path]:
    """(compare.json, what was printed, the directory)."""
    out = tmp_path_factory.mktemp("compared")
    words = ["accelerate_configs/zero3.yaml", "tests/launch/compare_script.py", "--no-ddp"]
    words += ["--against", "single,ddp", "--steps", str(STEPS), "--repeats", "1", "--out", str(out)]
    config = out / "zero3.yaml"
    # The script accumulates by itself; two sources that disagree would be an error.
    config.write_text((ROOT / words[0]).read_text().replace("accumulation_steps: 1", "accumulation_steps: 2"))
    words[0] = str(config)
    done = subprocess.run(
        [sys.executable, "-c", "from hfdist.cli import main; main()", "compare", *words],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "160"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads((out / "compare.json").read_text()), done.stdout, out


def test_one_process_is_the_oracle(compared: tuple[dict[str, Any], str, Path]) -> None:
    """Shuffling, accumulation, clipping and scheduler included: the curve is that of one process."""
    base, single = figures.rows(compared[0])[:2]
    assert (base.engine, single.engine, base.error, single.error) == ("hfdist", "single", None, None)
    assert len(base.losses) == len(single.losses) == STEPS
    assert base.losses == pytest.approx(single.losses, abs=figures.LOSS_TOLERANCE)
    assert len(set(base.losses)) == STEPS
    assert single.differs_from is None
    assert single.learning_rate_differs_from is None
    # 2 ranks x 2 micro-steps x 4 rows; the single process takes two batches as one.
    launch = compared[0]["engines"]["single"]["launches"][1]
    assert [(step["tokens"], len(step["losses"])) for step in launch["ranks"][0]["steps"]] == [(16, 2)] * STEPS


def test_figures_are_measured(compared: tuple[dict[str, Any], str, Path]) -> None:
    base, single = figures.rows(compared[0])[:2]
    for row in (base, single):
        assert row.wall is not None
        assert row.cpu is not None
        assert 0 < row.cpu.median < 60
        assert row.startup is not None
        assert row.peak is not None
        assert row.peak > 0
        assert row.num_parameters == P
    assert single.held["optimizer"] == pytest.approx(8 * P, rel=0.02)
    assert base.held["optimizer"] == pytest.approx(4 * P, rel=0.15)  # shards are padded
    assert (single.wire, bool(base.wire)) == (0, True)
    if compared[0]["counted_by_the_kernel"]:
        assert base.kernel is not None
        assert base.wire is not None
        assert base.kernel > base.wire  # headers


def test_an_engine_that_fails_is_a_row_and_spoils_nothing(compared: tuple[dict[str, Any], str, Path]) -> None:
    content, printed, out = compared
    ddp = figures.rows(content)[2]
    assert ddp.error == "RuntimeError: this model does not like DDP"
    assert [launch["round"] for launch in content["engines"]["ddp"]["launches"]] == ["count"]  # not tried again
    assert "ddp failed: RuntimeError: this model does not like DDP" in printed
    assert (out / "compare.png").read_bytes().startswith(b"\x89PNG")
