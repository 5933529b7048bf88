"""Stages 0-3 x accumulation x clipping x optimizers x world sizes against one process (CI's part of the matrix)."""

from __future__ import annotations

import itertools

import pytest

from tests.parity.cells import FACTORS, TRIPLES, check_cell, pairwise_cells
from tests.parity.loops import Cell
from tests.pool import Pools


@pytest.mark.parametrize("cell", pairwise_cells(), ids=lambda cell: cell.name)
def test_cell_equals_one_process(pool: Pools, cell: Cell) -> None:
    """Five steps: loss, gradients before and after clipping, norm, parameters."""
    check_cell(pool(cell.world_size), cell)


def test_every_pair_is_covered() -> None:
    """The choice for CI really has each pair of values of two factors, and each triple that is promised."""
    cells = pairwise_cells()
    for names in [*itertools.combinations(FACTORS, 2), *TRIPLES]:
        seen = {tuple(getattr(cell, name) for name in names) for cell in cells}
        assert seen == set(itertools.product(*(FACTORS[name] for name in names))), names
