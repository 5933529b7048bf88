"""What a script does with a model on a grid besides stepping: fp16, checkpoints, whole weights, loaders, metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.models import Batch
from tests.parity.grids import GridCell, plugins_of, whole_gradients
from tests.parity.test_tensor import Exact
from tests.pool import Pools
from tests.worker import make_accelerator

GRIDS = {
    "tp": GridCell(tp=2, dp=2, stage=3, family="llama-kv2"),
    "pp": GridCell(pp=2, dp=2, stage=2, family="gpt2", tied=True),
    "pp-tp": GridCell(pp=2, tp=2, stage=1, family="llama-kv1", tied=True),
}


def _prepared(cell: GridCell, **options: Any) -> tuple[Any, nn.Module, Any]:
    accelerator = make_accelerator(plugins=[*plugins_of(cell), *options.pop("plugins", [])], **options)
    model = cell.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    return accelerator, model, optimizer


def _step(accelerator: Any, model: nn.Module, optimizer: Any, batch: Batch) -> float:
    loss = model(**batch).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def _resume(cell: GridCell, folder: str) -> list[list[float]]:
    """Losses of two steps after a save, and of the same two after loading it into what was built anew."""
    windows = cell.windows()
    with Exact():
        accelerator, model, optimizer = _prepared(cell)
        batches = [window[0][accelerator.dp_rank] for window in windows]
        for batch in batches[:2]:
            _step(accelerator, model, optimizer, batch)
        accelerator.save_state(folder)
        went_on = [_step(accelerator, model, optimizer, batch) for batch in batches[2:4]]
        accelerator, model, optimizer = _prepared(cell)
        accelerator.load_state(folder)
        resumed = [_step(accelerator, model, optimizer, batch) for batch in batches[2:4]]
    return [went_on, resumed]


@pytest.mark.parametrize("grid", GRIDS)
def test_training_resumes(pool: Pools, grid: str, tmp_path: Path) -> None:
    for rank, (went_on, resumed) in enumerate(pool(4).run(_resume, GRIDS[grid], str(tmp_path))):
        assert went_on == resumed, rank


def _save(cell: GridCell, folder: str) -> dict[str, Tensor]:
    with Exact():
        accelerator, model, optimizer = _prepared(cell)
        _step(accelerator, model, optimizer, cell.windows()[0][0][accelerator.dp_rank])
        accelerator.save_model(model, folder)
        return {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}


def _load(cell: GridCell, state: dict[str, Tensor]) -> dict[str, Tensor]:
    accelerator, model, _ = _prepared(cell)
    model.load_state_dict(state)
    return {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}


@pytest.mark.parametrize("grid", GRIDS)
def test_whole_weights_leave_and_come_back(pool: Pools, grid: str, tmp_path: Path) -> None:
    """`get_state_dict` and `save_model` are one process's, on every rank; `load_state_dict` takes whole weights."""
    cell = GRIDS[grid]
    plain = cell.build()
    states = pool(4).run(_save, cell, str(tmp_path))
    assert states[0].keys() == plain.state_dict().keys()
    for state in states[1:]:
        assert all(torch.equal(state[name], states[0][name]) for name in states[0])
    read = type(plain).from_pretrained(tmp_path, dtype=torch.float64)
    for name, value in read.state_dict().items():
        assert torch.equal(value, states[0][name]), name
    for state in pool(4).run(_load, cell, states[0]):
        assert all(torch.equal(state[name], states[0][name]) for name in states[0])


class _Numbers(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 13

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(index)


def _read(cell: GridCell) -> tuple[list[list[int]], list[int], float]:
    accelerator = make_accelerator(plugins=plugins_of(cell))
    loader = accelerator.prepare(DataLoader(_Numbers(), batch_size=2))  # type: ignore[arg-type]
    mine, metric = [], []
    for batch in loader:
        mine.append(batch.tolist())
        metric += accelerator.gather_for_metrics(batch).tolist()
    return mine, metric, accelerator.reduce(torch.tensor(1.0), "sum").item()


@pytest.mark.parametrize("grid", GRIDS)
def test_ranks_of_one_model_read_the_same_batches(pool: Pools, grid: str) -> None:
    cell = GRIDS[grid]
    runs = pool(4).run(_read, cell)
    by_model: dict[str, int] = {}
    for mine, metric, total in runs:
        by_model[str(mine)] = by_model.get(str(mine), 0) + 1
        assert metric == list(range(13))
        assert total == cell.dp
    assert sorted(by_model.values()) == [cell.pp * cell.tp] * cell.dp


def _overflow(cell: GridCell) -> tuple[list[float], list[bool], bool]:
    """Scales after each of three steps; the second has an infinite gradient on the last rank only."""
    from hfdist.plugins import AmpPlugin

    accelerator = make_accelerator(plugins=[*plugins_of(cell), AmpPlugin("fp16", init_scale=1024.0)])
    model = cell.build().float()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    scales, skipped, kept = [], [], True
    for number, window in enumerate(cell.windows()[:3]):
        loss = model(**window[0][accelerator.dp_rank]).loss
        accelerator.backward(loss)
        before = {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}
        if number == 1 and accelerator.process_index == accelerator.num_processes - 1:
            next(p for p in reversed(list(model.parameters())) if p.grad is not None).grad.to_local().fill_(torch.inf)
        optimizer.step()
        optimizer.zero_grad()
        if number == 1:
            kept = all(torch.equal(value, before[n]) for n, value in accelerator.get_state_dict(model).items())
        scales.append(accelerator.scaler.get_scale())
        skipped.append(accelerator.optimizer_step_was_skipped)
    return scales, skipped, kept


@pytest.mark.parametrize("grid", GRIDS)
def test_an_overflow_on_one_rank_is_all_ranks(pool: Pools, grid: str) -> None:
    """B30 with pp and tp axes: all skip, the scale halves, nothing is updated."""
    for run in pool(4).run(_overflow, GRIDS[grid]):
        assert run == ([1024.0, 512.0, 512.0], [False, True, False], True)


def _refuse(kind: str) -> str:
    from hfdist.errors import ConfigError

    cell = GRIDS["pp-tp"]
    try:
        if kind == "gathered":
            accelerator, model, _ = _prepared(cell)
            with accelerator.gathered_parameters(model):
                pass
        elif kind == "muon":
            accelerator = make_accelerator(plugins=plugins_of(cell))
            model = cell.build()
            matrices = [p for p in model.parameters() if p.ndim == 2]
            accelerator.prepare(model, torch.optim.Muon(matrices, lr=1e-3))
    except ConfigError as error:
        return str(error)
    return "not refused"


@pytest.mark.parametrize(("kind", "word"), [("gathered", "get_state_dict"), ("muon", "element by itself")])
def test_what_is_refused_by_name(pool: Pools, kind: str, word: str) -> None:
    for said in pool(4).run(_refuse, kind):
        assert word in said


def _explain(cell: GridCell) -> str:
    accelerator, _, _ = _prepared(cell)
    return accelerator.explain()


def test_explain_shows_grid_cut_and_split(pool: Pools) -> None:
    for rank, said in enumerate(pool(4).run(_explain, GRIDS["pp-tp"])):
        assert f"pp={rank // 2} dp=0 tp={rank % 2}" in said
        assert "Grid pp 2 x dp 1 x tp 2" in said
        assert "1f1b, 2 micro-batches" in said
        assert "parameters split" in said


def _half(cell: GridCell, dtype: str) -> tuple[dict[str, Tensor], list[str], bool]:
    """Whole gradients of one step, in which dtypes they were handed out, and whether all parameters were in half."""
    from hfdist.plugins import AmpPlugin

    accelerator = make_accelerator(plugins=[*plugins_of(cell), AmpPlugin(dtype)])  # type: ignore[arg-type]
    model = accelerator.prepare(cell.build().float())
    pipeline = accelerator.engine.of(model).split.pipeline
    hand_out, seen = pipeline.add_gradients, []

    def look(gradients: dict[nn.Parameter, Tensor], factor: Tensor) -> None:
        seen.extend((str(g.dtype), p.dtype.itemsize == 2) for p, g in gradients.items())
        hand_out(gradients, factor)

    pipeline.add_gradients = look
    loss = model(**cell.windows()[0][0][0]).loss
    accelerator.backward(loss)
    accelerator.unscale_gradients()
    scale = 1.0 if accelerator.scaler is None else accelerator.scaler.get_scale()
    gradients = {name: g / scale for name, g in whole_gradients(accelerator, model).items()}
    return gradients, sorted({dtype for dtype, _ in seen}), all(half for _, half in seen)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero-bubble"])
@pytest.mark.parametrize(("dtype", "bits"), [("bf16", 8), ("fp16", 11)])
def test_half_precision_adds_micro_batches_in_fp32(pool: Pools, dtype: str, bits: int, schedule: str) -> None:
    """Near the fp32 gradient of one process, by the bits that each product has."""
    cell = GridCell(pp=2, stage=0, family="llama", layers=4, schedule=schedule, micro_batches=4)
    model = cell.build().float()
    model(**cell.windows()[0][0][0]).loss.backward()
    want = {name: p.grad for name, p in model.named_parameters()}
    for gradients, dtypes, half in pool(2).run(_half, cell, dtype):
        assert (dtypes, half) == (["torch.float32"], True)
        off = sum(float((gradients[name] - gradient).pow(2).sum()) for name, gradient in want.items())
        size = sum(float(gradient.pow(2).sum()) for gradient in want.values())
        assert (off / size) ** 0.5 < 8 * 2.0**-bits


def _units(cell: GridCell) -> tuple[list[str], int]:
    accelerator, model, _ = _prepared(cell)
    return [name for name, _ in accelerator.engine.of(model).blocks], accelerator.engine.grid.pp_rank


def test_the_blocks_of_a_stage_are_its_units(pool: Pools) -> None:
    """Also where a family names no block class and the stand-ins make the children's types differ."""
    for names, stage in pool(2).run(_units, GridCell(pp=2, stage=0, family="gpt2", layers=3)):
        assert names == [f"transformer.h.{i}" for i in ([0], [1, 2])[stage]]


def _threads(cell: GridCell) -> int:
    import os

    _prepared(cell)
    return len(os.listdir("/proc/self/task"))


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted in /proc")
@pytest.mark.parametrize("axis", ["tp", "pp"])
def test_no_process_group_outlives_its_accelerator(pool: Pools, axis: str) -> None:
    """Each group of gloo's has four threads."""
    first, *others = (pool(2).run(_threads, GridCell(**{axis: 2}))[0] for _ in range(4))  # type: ignore[arg-type]
    assert max(others) <= first + 3


def _replaced_before_backward(cell: GridCell) -> str:
    from hfdist.errors import DistributedError

    accelerator, model, _ = _prepared(cell)
    loss = model(**cell.windows()[0][0][accelerator.dp_rank]).loss
    accelerator.set_zero_stage(0)
    try:
        accelerator.backward(loss)
    except DistributedError as error:
        return str(error)
    return "not refused"


def test_gradients_of_parameters_that_were_replaced_are_not_lost(pool: Pools) -> None:
    """The schedule has run; a switch to stage 0 makes new parameters before its gradients are handed out."""
    for said in pool(4).run(_replaced_before_backward, GRIDS["pp"]):
        assert "set_zero_stage" in said


def _warnings(plan: str | dict[str, str]) -> tuple[int, list[str]]:
    import logging

    from hfdist.plugins import TensorParallelPlugin

    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("hfdist.parallel.apply")
    logger.addHandler(handler)
    try:
        accelerator = make_accelerator(plugins=[TensorParallelPlugin(tp_size=2, plan=plan)])  # type: ignore[arg-type]
        accelerator.prepare(GridCell(family="llama").build())
    finally:
        logger.removeHandler(handler)
    return accelerator.process_index, records


_MLP_ONLY = {
    "model.layers.*.mlp.gate_proj": "colwise",
    "model.layers.*.mlp.up_proj": "colwise",
    "model.layers.*.mlp.down_proj": "rowwise",
}


@pytest.mark.parametrize(("plan", "warned"), [("auto", False), (_MLP_ONLY, True)], ids=["whole", "mlp-only"])
def test_a_plan_that_splits_little_is_a_warning(pool: Pools, plan: str | dict[str, str], warned: bool) -> None:
    for rank, records in pool(2).run(_warnings, plan):
        assert bool(records) == (warned and rank == 0)
