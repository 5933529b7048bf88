"""Tensor, pipeline and data parallelism together under `accelerator.prepare`, against one process in fp64."""

from __future__ import annotations

import pytest

from tests.parity.grids import GridCell, check_grid, plugins_of
from tests.parity.test_tensor import VOCAB
from tests.pool import Pools
from tests.worker import make_accelerator

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


def _gathered_bytes(cell: GridCell) -> list[int]:
    from hfdist.measure.wire import record_wire

    accelerator = make_accelerator(plugins=plugins_of(cell))
    model = accelerator.prepare(cell.build())
    batch = cell.windows()[0][0][accelerator.dp_rank]
    sent = []
    for stage in (cell.stage, 3 - cell.stage):
        accelerator.set_zero_stage(stage)
        with record_wire() as wire:
            output = model(**batch)
            output.loss.backward()
        sent.append(wire.by_op.get("all_gather", 0))
    # Whoever reads the logits pays for them.
    with record_wire() as wire:
        assert model(**batch).logits.shape[-1] == VOCAB
    return [*sent, wire.by_op["all_gather"]]


def test_no_rank_gathers_logits_that_nobody_reads(pool: Pools) -> None:
    """Also after a switch between stages, whose hooks on the model are new."""
    for sent in pool(2).run(_gathered_bytes, GridCell(tp=2)):
        assert sent[:2] == [0, 0]
        assert sent[2] > 0
