"""Pipelines against one process in fp64: losses, all gradients, the norm, all parameters after 5 steps."""

from __future__ import annotations

from typing import Any

import pytest

from tests.parity.pipelines import Spec, Trained, make_batch, train_one_process, train_pipeline
from tests.pool import Pools

TOLERANCE = 1e-10


def assert_parity(ranks: list[Trained], want: Trained) -> None:
    """Every rank's losses and norms, and each of its tensors under its global name; together all tensors."""
    seen: set[str] = set()
    for rank, got in enumerate(ranks):
        assert got.losses == pytest.approx(want.losses, rel=TOLERANCE, abs=TOLERANCE), f"losses of rank {rank}"
        assert got.norms == pytest.approx(want.norms, rel=TOLERANCE, abs=TOLERANCE), f"norms of rank {rank}"
        for kind in ("gradients", "parameters"):
            mine, theirs = getattr(got, kind), getattr(want, kind)
            for name, tensor in mine.items():
                worst = float((tensor - theirs[name]).abs().max())
                assert worst <= TOLERANCE, f"{kind} of {name} on rank {rank}: {worst}"
        seen |= got.parameters.keys()
    assert seen == want.parameters.keys()


def windows_of(rows: int, gas: int, padding: Any, steps: int = 5) -> list[list[Any]]:
    """Lengths change between steps."""
    return [
        [make_batch(rows, 7 + (step % 2) * 4, padding, seed=10 * step + micro) for micro in range(gas)]
        for step in range(steps)
    ]


SMOKE = ["gpipe", "1f1b", "interleaved", "zero-bubble", "zbv"]


@pytest.mark.parametrize("schedule", SMOKE)
def test_schedules(pool: Pools, schedule: str) -> None:
    spec = Spec("llama", layers=5, tied=True)
    windows = windows_of(4, 1, "left")
    want = train_one_process(spec, windows)
    got = pool(2).run(train_pipeline, spec, windows, {"schedule": schedule, "num_micro_batches": 4})
    assert_parity(got, want)
