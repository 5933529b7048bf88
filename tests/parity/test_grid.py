"""Tensor, pipeline and data parallelism together under `accelerator.prepare`, against one process in fp64."""

from __future__ import annotations

import pytest
import torch

from tests.parity.grids import TOLERANCE, GridCell, check_grid, plugins_of
from tests.parity.test_tensor import VOCAB, Exact
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
    GridCell(tp=2, dp=2, stage=2, family="llama-kv2", gas=3, sequence_parallel=True),
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


def _evaluate_between(cell: GridCell) -> list[tuple[float, torch.Tensor, float]]:
    """Before and after an update: loss and logits without gradients, then the loss in training."""
    accelerator = make_accelerator(plugins=plugins_of(cell))
    model = cell.build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    seen = []
    with Exact():
        for window in cell.windows()[:2]:
            batch = window[0][0]
            model.eval()
            with torch.no_grad():
                output = model(**batch)
            model.train()
            assert all(type(p.data).__name__ == "DTensor" for p in model.parameters())
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            seen.append((output.loss.item(), output.logits, loss.item()))
    return seen


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("axes", [{"pp": 2, "micro_batches": 4}, {"tp": 2}, {"pp": 2, "tp": 2}], ids=str)
def test_evaluation_between_steps(pool: Pools, axes: dict[str, int], stage: int) -> None:
    """Every rank has the loss and the logits of the whole batch, and parameters are at rest afterwards."""
    cell = GridCell(stage=stage, family="llama-kv2", **axes)
    model = cell.build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    want = []
    with Exact():
        for window in cell.windows()[:2]:
            output = model(**window[0][0])
            output.loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            want.append(output)
    for rank, seen in enumerate(pool(cell.world_size).run(_evaluate_between, cell)):
        for (evaluated, logits, trained), output in zip(seen, want, strict=True):
            assert abs(evaluated - output.loss.item()) < TOLERANCE, rank
            assert abs(trained - output.loss.item()) < TOLERANCE, rank
            assert float((logits - output.logits).abs().max()) < TOLERANCE, rank
