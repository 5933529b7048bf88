"""Tensor, pipeline and data parallelism together under `accelerator.prepare`, against one process in fp64."""

from __future__ import annotations

import pytest

from tests.parity.grids import GridCell, check_grid
from tests.pool import Pools

CELLS = [
    # tensor parallelism and ZeRO
    GridCell(tp=2, family="qwen3", gas=3),
    GridCell(tp=2, dp=2, stage=0, family="llama-kv1", gas=3, tied=True),
    GridCell(tp=2, dp=2, stage=1, family="gpt2", gas=3),
    GridCell(tp=2, dp=2, stage=2, family="qwen3", gas=3, tied=True),
    GridCell(tp=2, dp=2, stage=3, family="llama-kv2", gas=3, optimizer="sgd"),
    GridCell(tp=4, stage=0, family="llama-kv2", gas=1),
    # pipeline and ZeRO
    GridCell(pp=2, stage=0, family="llama", gas=3, tied=True),
    GridCell(pp=2, dp=2, stage=0, family="gpt2", schedule="gpipe", gas=1, tied=True),
    GridCell(pp=2, dp=2, stage=1, family="llama", schedule="1f1b", gas=3, micro_batches=3),
    GridCell(pp=2, dp=2, stage=2, family="qwen3", layers=5, schedule="interleaved", gas=3, tied=True, micro_batches=4),
    GridCell(pp=2, dp=2, stage=3, family="llama", layers=5, schedule="zero-bubble", gas=3, micro_batches=4),
    GridCell(pp=2, dp=2, stage=3, family="gpt2", layers=4, schedule="zbv", gas=1, micro_batches=4),
    # all three
    GridCell(pp=2, tp=2, family="llama-kv1", gas=3, tied=True),
    GridCell(pp=2, tp=2, dp=2, stage=2, family="qwen3", gas=3, tied=True),
    GridCell(pp=2, tp=2, dp=2, stage=3, family="gpt2", gas=1),
]


@pytest.mark.parametrize("cell", sorted(CELLS, key=lambda cell: cell.world_size), ids=lambda cell: cell.name)
def test_grids(pool: Pools, cell: GridCell) -> None:
    check_grid(pool(cell.world_size), cell)


@pytest.mark.parametrize(
    "cell",
    [GridCell(tp=2, dp=2, stage=0, family="qwen3", gas=3), GridCell(pp=2, dp=2, stage=3, family="llama", gas=3)],
    ids=lambda cell: cell.name,
)
def test_stages_switch_live_on_a_grid(pool: Pools, cell: GridCell) -> None:
    check_grid(pool(cell.world_size), cell, switch=[3, 1, 0, 2])
