"""Pipelines against one process in fp64: losses, all gradients, the norm, all parameters after 5 steps."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.parity.cells import cover
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


FACTORS: dict[str, tuple[Any, ...]] = {
    "schedule": ("gpipe", "1f1b", "interleaved", "zero-bubble", "zbv"),
    "pp": (2, 4),
    "m": ("1", "stages-1", "stages", "2 stages", "ragged"),
    "gas": (1, 3),
    "tied": (False, True),
    "padding": ("none", "left", "right"),
    "family": ("llama", "gpt2", "qwen3", "gemma"),
}
PAIRS = tuple(itertools.combinations(range(len(FACTORS)), 2))
CELLS = cover(tuple(FACTORS.values()), PAIRS)


def name_of(cell: tuple[Any, ...]) -> str:
    return "-".join(str(value) for value in cell)


def check_pipeline(pools: Pools, cell: tuple[Any, ...]) -> None:
    """One combination of `FACTORS` against one process."""
    schedule, pp, m, gas, tied, padding, family = cell
    stages = pp * (1 if schedule in ("gpipe", "1f1b") else 2)
    number = {"1": 1, "stages-1": stages - 1, "stages": stages, "2 stages": 2 * stages, "ragged": 3}[m]
    rows = 5 if m == "ragged" else number if number > 2 else 2 * number
    spec = Spec(family, layers={2: 5, 4: 7, 8: 9}[stages], tied=tied)
    windows = windows_of(rows, gas, padding)
    options = {"schedule": schedule, "num_micro_batches": number}
    assert_parity(pools(pp).run(train_pipeline, spec, windows, options), train_one_process(spec, windows))


@pytest.mark.parametrize("cell", CELLS, ids=name_of)
def test_cell_equals_one_process(pool: Pools, cell: tuple[Any, ...]) -> None:
    check_pipeline(pool, cell)


def test_every_pair_is_covered() -> None:
    values = tuple(FACTORS.values())
    for first, second in PAIRS:
        assert {(cell[first], cell[second]) for cell in CELLS} == set(itertools.product(values[first], values[second]))
