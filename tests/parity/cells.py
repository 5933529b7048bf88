"""The parity matrix: all cells, the few that CI runs, and how one is judged.

CI's choice is a covering array: every pair of values of any two factors meets in some cell, and so does every triple of
(stage, accumulation, optimizer) and of (stage, family, tied). `make matrix` runs all of them.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Sequence

from tests.models import VOCAB, Recipe, Window, build_lm, make_windows
from tests.oracle import Step, assert_steps, train
from tests.parity.loops import CLIP, DTYPES, Cell, RankRun, train_cell
from tests.pool import Pool

STEPS = 5
FACTORS: dict[str, tuple] = {
    "stage": (0, 1, 2, 3),
    "gas": (1, 3),
    "clip": (False, True),
    "optimizer": ("sgd", "adamw", "adafactor", "muon"),
    "world_size": (2, 3, 4),
    "family": ("llama", "gpt2"),
    "tied": (False, True),
    "dtype": ("fp64", "fp32"),
}
TRIPLES = (("stage", "gas", "optimizer"), ("stage", "family", "tied"))
# Largest absolute difference of gradients, norm, parameters and loss after up to 5 steps.
TOLERANCE = {"fp64": 1e-10, "fp32": 1e-5}


def all_cells() -> list[Cell]:
    """The whole matrix."""
    return [Cell(**dict(zip(FACTORS, values, strict=True))) for values in itertools.product(*FACTORS.values())]


def pairwise_cells() -> list[Cell]:
    """Few cells that cover every pair of factor values, and every one of `TRIPLES`."""
    names = list(FACTORS)
    subsets = [(names.index(a), names.index(b)) for a, b in itertools.combinations(names, 2)]
    subsets += [tuple(names.index(name) for name in triple) for triple in TRIPLES]
    rows = cover([FACTORS[name] for name in names], subsets)
    return [Cell(**dict(zip(names, row, strict=True))) for row in rows]


def cover(factors: Sequence[Sequence], subsets: Sequence[tuple[int, ...]]) -> list[tuple]:
    """Rows such that, for each subset of factor indices, every combination of their values appears in some row.

    Greedy: the next row is one that covers most of what is still missing; of those, the one whose values were used
    least so far; of those, the first in product order, so that the result is the same on every machine.
    """
    rows = list(itertools.product(*factors))
    parts = [[(index, tuple(row[i] for i in subset)) for index, subset in enumerate(subsets)] for row in rows]
    missing = set(itertools.chain.from_iterable(parts))
    used: Counter[tuple[int, object]] = Counter()
    chosen = []
    while missing:

        def worth(i: int) -> tuple[int, float, int]:
            shares = [used[index, value] * len(factors[index]) for index, value in enumerate(rows[i])]
            return sum(part in missing for part in parts[i]), -sum(shares), -i

        best = max(range(len(rows)), key=worth)
        chosen.append(rows[best])
        used.update(enumerate(rows[best]))
        missing.difference_update(parts[best])
    return chosen


def windows_of(cell: Cell) -> list[Window]:
    """The cell's data: ragged over ranks and micro-batches."""
    return make_windows(vocab=VOCAB[cell.family], steps=STEPS, gas=cell.gas, world_size=cell.world_size)


def recipe_of(cell: Cell) -> Recipe:
    """The cell's optimizer, in fp32 with a learning rate so small that rounding stays below the tolerance.

    Muon orthogonalises in bf16 inside: where inputs differ by fp32's rounding an element may round the other way, which
    moves a parameter by up to 1e-2 of the learning rate. Adam and Adafactor divide by the size of the gradient: noise
    of 1e-8 over their epsilon of 1e-5 moves it by 1e-3 of the rate (1.016e-5 at rate 1e-2, seen on one CPU of two).
    """
    if cell.dtype == "fp64" or cell.optimizer == "sgd":
        return Recipe(cell.optimizer)
    return Recipe(cell.optimizer, lr=5e-5 if cell.optimizer == "muon" else 1e-3)


def oracle_of(cell: Cell) -> list[Step]:
    """One process on the same data; the stage plays no part, so its four cells share the run."""
    return _oracle(cell.gas, cell.clip, cell.optimizer, cell.world_size, cell.family, cell.tied, cell.dtype)


@functools.lru_cache(maxsize=64)
def _oracle(gas: int, clip: bool, optimizer: str, world_size: int, family: str, tied: bool, dtype: str) -> list[Step]:
    cell = Cell(0, gas, clip, optimizer, world_size, family, tied, dtype)  # type: ignore[arg-type]
    model = build_lm(cell.family, tied=tied, dtype=DTYPES[dtype])
    recipe = recipe_of(cell)
    return train(model, windows_of(cell), optimizers=recipe.build, clip=CLIP if clip else None)


def check_cell(pool: Pool, cell: Cell) -> None:
    """Run `cell` in `pool` and compare it with one process; AssertionError with names and differences."""
    runs = pool.run(train_cell, cell, recipe_of(cell), windows_of(cell))
    assert_steps(runs[0].steps, oracle_of(cell), tolerance=TOLERANCE[cell.dtype])
    assert_ranks_agree(runs)


def assert_ranks_agree(runs: list[RankRun]) -> None:
    """Norms and parameters are the same bits on every rank."""
    for rank, run in enumerate(runs):
        if run.norms != runs[0].norms:
            raise AssertionError(f"norms on rank {rank} are {run.norms}, on rank 0 {runs[0].norms}")
        if run.digest != runs[0].digest:
            raise AssertionError(f"whole parameters on rank {rank} are not those of rank 0")
