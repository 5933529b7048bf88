"""All that `make matrix` compares with one process: ZeRO, pipeline and tensor cells, and grids of the three.

CI runs a pairwise choice of each axis in its own tests; here is the whole of it under one face.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tests.parity import cells, test_pipeline, test_tensor
from tests.parity.grids import GridCell, check_grid
from tests.pool import Pools

# pp, dp, tp. The models have 4 heads, so tensor ranks are 4 at most; ZeRO alone has cells of its own.
GRIDS_OF_4 = ((1, 1, 4), (1, 2, 2), (2, 1, 2), (2, 2, 1), (4, 1, 1))
GRIDS_OF_8 = ((1, 2, 4), (1, 4, 2), (2, 1, 4), (2, 2, 2), (2, 4, 1), (4, 1, 2), (4, 2, 1))


@dataclass(frozen=True)
class MatrixCell:
    """One comparison with one process: `check` raises AssertionError where they differ."""

    axis: str
    name: str
    world_size: int
    check: Callable[[Pools], None]


def zero_cells() -> Iterator[MatrixCell]:
    """Stage x accumulation x clipping x optimizer x world size x model x ties x dtype."""

    def oracle(cell: cells.Cell) -> tuple:  # cells of one oracle follow each other
        return cell.family, cell.dtype, cell.tied, cell.optimizer, cell.gas, cell.clip, cell.stage

    def check(cell: cells.Cell, pools: Pools) -> None:
        cells.check_cell(pools(cell.world_size), cell)

    for cell in sorted(cells.all_cells(), key=oracle):
        yield MatrixCell("zero", cell.name, cell.world_size, functools.partial(check, cell))


def pipeline_cells() -> Iterator[MatrixCell]:
    """Schedule x stages x micro-batches x accumulation x ties x padding x model."""
    for cell in itertools.product(*test_pipeline.FACTORS.values()):
        values = dict(zip(test_pipeline.FACTORS, cell, strict=True))
        name = f"pipeline-{test_pipeline.name_of(cell).replace(' ', '-')}"
        yield MatrixCell("pipeline", name, values["pp"], functools.partial(test_pipeline.check_pipeline, cell=cell))


def tensor_cells() -> Iterator[MatrixCell]:
    """Model x tensor ranks x ties x accumulation x optimizer."""

    def check(family: str, size: int, tied: bool, gas: int, optimizer: str, pools: Pools) -> None:
        # A key-value head that several ranks hold, and a tied head's copy, leave more than a quarter on each of four.
        test_tensor.check(pools, family, size=size, tied=tied, gas=gas, optimizer=optimizer, limit=0.6)

    for family, size, tied, gas, optimizer in itertools.product(
        test_tensor.FAMILIES, (2, 4), (False, True), (1, 3), ("sgd", "adamw")
    ):
        name = f"tensor-tp{size}-{family}-{'tied' if tied else 'untied'}-gas{gas}-{optimizer}"
        yield MatrixCell("tensor", name, size, functools.partial(check, family, size, tied, gas, optimizer))


def grid_cells() -> Iterator[MatrixCell]:
    """Products of 4 and 8 ranks x ZeRO stage x model x accumulation x schedule."""

    def check(cell: GridCell, pools: Pools) -> None:
        check_grid(pools(cell.world_size), cell)

    for pp, dp, tp in (*GRIDS_OF_4, *GRIDS_OF_8):
        schedules = {1: ("1f1b",)}.get(pp, ("1f1b", "interleaved", "zero-bubble"))
        for stage, (family, tied), gas, schedule in itertools.product(
            range(4), (("llama-kv2", False), ("qwen3", True), ("gpt2", True)), (1, 3), schedules
        ):
            cell = GridCell(
                pp, dp, tp, stage, family, {1: 3, 2: 5, 4: 9}[pp], tied, gas, schedule=schedule, micro_batches=4
            )
            yield MatrixCell("grid", f"grid-{cell.name}", cell.world_size, functools.partial(check, cell))


def all_cells() -> list[MatrixCell]:
    """The whole matrix: cells of one world size follow each other, so that one pool is open at a time."""
    every = [*zero_cells(), *pipeline_cells(), *tensor_cells(), *grid_cells()]
    return sorted(every, key=lambda cell: cell.world_size)
