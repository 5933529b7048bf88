"""Live switching of the ZeRO stage: the curve of one process, memory as the stage says, peak, nothing on disk."""

from __future__ import annotations

import itertools
import os
import resource
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from tests.models import VOCAB, Family, Recipe, Window, build_lm, make_windows
from tests.oracle import assert_near, assert_same, assert_steps, train
from tests.parity.cells import assert_ranks_agree
from tests.parity.loops import CLIP, RankRun, run_windows, whole_parameters
from tests.pool import Pool, Pools
from tests.worker import make_accelerator

ROUTE = (0, 3, 1, 2, 0, 2, 3, 0)
TOLERANCE = 1e-10


def linear_decay(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """From 1 to 0 over twelve updates."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 12)


def _train(
    family: Family, recipe: Recipe, windows: list[Window], route: tuple[int, ...], gas: int, amp: dict[str, Any] | None
) -> tuple[RankRun, list[float], list[int]]:
    """One window at each stage of `route`; also the scaler's scale and the number of stage changes per window."""
    from hfdist.plugins import AmpPlugin, ZeroPlugin

    plugins: list[Any] = [ZeroPlugin(stage=route[0])]
    if amp is not None:
        plugins.append(AmpPlugin(**amp))
    accelerator = make_accelerator(
        plugins=plugins, gradient_accumulation_steps=gas, env={"HFDIST_SCHEDULER_STEP": "update"}
    )
    model = build_lm(family, tied=True, dtype=torch.float32 if amp else torch.float64)
    optimizers = recipe.build(model)
    schedulers = [linear_decay(optimizer) for optimizer in optimizers]
    model, *prepared = accelerator.prepare(model, *optimizers, *schedulers)
    optimizers, schedulers = prepared[: len(optimizers)], prepared[len(optimizers) :]
    scales: list[float] = []
    stages: list[int] = []

    def between(index: int) -> None:
        accelerator.set_zero_stage(route[index])
        scales.append(1.0 if accelerator.scaler is None else accelerator.scaler.get_scale())
        stages.append(accelerator.zero_stage)

    run = run_windows(accelerator, model, optimizers, windows, clip=CLIP, schedulers=schedulers, between=between)
    return run, scales, stages


@pytest.mark.parametrize("gas", [1, 2])
@pytest.mark.parametrize(
    ("world_size", "family", "optimizer"),
    [(2, "llama", "adamw"), (3, "gpt2", "sgd"), (2, "gpt2", "adafactor"), (4, "llama", "muon"), (3, "llama", "adamw")],
)
def test_switching_changes_nothing(pool: Pools, world_size: int, family: Family, optimizer: str, gas: int) -> None:
    """0-3-1-2-0-2-3-0 in the middle of training, with optimizer state and scheduler: one process's steps, in fp64."""
    windows = make_windows(vocab=VOCAB[family], steps=len(ROUTE), gas=gas, world_size=world_size)
    recipe = Recipe(optimizer)  # type: ignore[arg-type]
    results = pool(world_size).run(_train, family, recipe, windows, ROUTE, gas, None)
    runs = [run for run, _, _ in results]
    model = build_lm(family, tied=True, dtype=torch.float64)
    want = train(model, windows, optimizers=recipe.build, clip=CLIP, schedulers=linear_decay)
    assert_steps(runs[0].steps, want, tolerance=TOLERANCE)
    assert_ranks_agree(runs)
    assert [stages for _, _, stages in results] == [list(ROUTE)] * world_size


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_pair_of_stages(pool: Pools, world_size: int) -> None:
    """Any stage to any other (an Euler tour of all twelve changes)."""
    route = (0, 1, 2, 3, 2, 1, 3, 1, 0, 3, 0, 2, 0)
    assert len(set(itertools.pairwise(route))) == 12
    windows = make_windows(vocab=VOCAB["llama"], steps=len(route), gas=1, world_size=world_size)
    recipe = Recipe("adamw", lr=1e-3)
    runs = [run for run, _, _ in pool(world_size).run(_train, "llama", recipe, windows, route, 1, None)]
    model = build_lm("llama", tied=True, dtype=torch.float64)
    want = train(model, windows, optimizers=recipe.build, clip=CLIP, schedulers=linear_decay)
    assert_steps(runs[0].steps, want, tolerance=TOLERANCE)


@pytest.mark.parametrize("world_size", [2, 3])
def test_switching_keeps_the_fp16_scaler(pool: Pools, world_size: int) -> None:
    """Scale, growth count and masters are those of the run that stayed at each stage of the route."""
    windows = make_windows(vocab=VOCAB["llama"], steps=len(ROUTE), gas=1, world_size=world_size, ragged=False)
    amp = {"dtype": "fp16", "init_scale": 2.0**20, "growth_interval": 3}
    arguments = ("llama", Recipe("sgd"), windows)
    switched, scales, _ = pool(world_size).run(_train, *arguments, ROUTE, 1, amp)[0]
    stayed, want_scales, _ = pool(world_size).run(_train, *arguments, (1,) * len(ROUTE), 1, amp)[0]
    assert scales == want_scales
    assert len(set(scales)) > 2, "the scale never moved: nothing was tested"
    assert any(step.skipped for step in stayed.steps)
    for index, (ours, theirs) in enumerate(zip(switched.steps, stayed.steps, strict=True)):
        if not theirs.skipped:
            assert_near(f"step {index}: norm", ours.norm, theirs.norm, 1e-4 * max(1.0, theirs.norm))
        assert_same(f"step {index}: parameters", ours.parameters, theirs.parameters, 1e-6)
        assert ours.skipped == theirs.skipped


class Blocks(nn.Module):
    """`depth` blocks of width x width, so that a block is most of what a unit can be."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(depth)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def held(model: nn.Module, optimizer: Any) -> dict[str, int]:
    """Elements that this rank's storages hold: parameters, gradients, optimizer state; each storage once."""

    def elements(tensors: list[torch.Tensor]) -> int:
        storages = {}
        for tensor in tensors:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            storages[local.untyped_storage().data_ptr()] = local.untyped_storage().nbytes() // local.element_size()
        storages.pop(0, None)
        return sum(storages.values())

    parameters = list(model.parameters())
    state = [value for entry in optimizer.state.values() for value in entry.values() if isinstance(value, torch.Tensor)]
    return {
        "parameters": elements(parameters),
        "gradients": elements([p.grad for p in parameters if p.grad is not None]),
        "optimizer": elements([value for value in state if value.ndim]),
    }


def _held_on_the_way() -> list[tuple[int, dict[str, int], dict[str, int]]]:
    """(stage, held at rest, held after backward) along the route."""
    from hfdist.plugins import ZeroPlugin

    accelerator = make_accelerator(plugins=[ZeroPlugin(stage=ROUTE[0])])
    torch.manual_seed(0)
    model = Blocks(36, 4)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    seen = []
    for stage in ROUTE:
        accelerator.set_zero_stage(stage)
        x = torch.randn(5, 36)
        accelerator.backward(model(x).pow(2).mean())
        in_step = held(model, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        seen.append((stage, held(model, optimizer), in_step))
    accelerator.set_zero_stage(3)
    seen.append((3, held(model, optimizer), {}))
    return seen


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_each_rank_holds_what_the_stage_says(pool: Pools, world_size: int) -> None:
    """Along the route: shards are 1/N (within one row of padding a tensor), stage 0 holds everything everywhere."""
    total = sum(p.numel() for p in Blocks(36, 4).parameters())
    padding = 36 * len(list(Blocks(36, 4).parameters()))
    ranks = pool(world_size).run(_held_on_the_way)
    for rank, seen in enumerate(ranks):
        for index, (stage, rest, in_step) in enumerate(seen):
            where = f"rank {rank}, change {index} to stage {stage}"
            whole, part = (total, total), (total // world_size, total // world_size + padding)
            low, high = whole if stage == 0 else part
            assert low - padding <= rest["parameters"] <= high, (where, rest)
            assert 2 * (low - padding) <= rest["optimizer"] <= 2 * high, (where, rest)
            assert rest["gradients"] == 0, (where, rest)
            if in_step:
                assert low - padding <= in_step["gradients"] <= high, (where, in_step)
    for index, (stage, _, _) in enumerate(ranks[0]):
        for kind, copies in (("parameters", 1), ("optimizer", 2)):
            together = sum(seen[index][1][kind] for seen in ranks)
            assert together >= total * copies * (world_size if stage == 0 else 1), (index, stage, kind, together)


WIDTH, DEPTH = 1024, 8
# Resident memory is counted in pages and moves by itself: sockets, pickles, Python's own heap.
MARGIN = 2 * 2**20
BLOCK_BYTES = (WIDTH * WIDTH + WIDTH) * 4


def _peak(route: tuple[int, ...], directory: str) -> list[tuple[int, int, int, int]]:
    """(from, to, peak above the larger layout, larger layout) in bytes of anonymous memory for each change."""
    from hfdist.plugins import ZeroPlugin

    os.chdir(directory)
    accelerator = make_accelerator(plugins=[ZeroPlugin(stage=route[0])])
    model = Blocks(WIDTH, DEPTH)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9))
    accelerator.backward(model(torch.randn(2, WIDTH)).pow(2).mean())
    optimizer.step()
    optimizer.zero_grad()
    for stage in (*route, *route):  # what is allocated once and kept (groups, caches) is not a switch's peak
        accelerator.set_zero_stage(stage)
    seen = []
    for before, after in itertools.pairwise(route):
        at_rest = _resident()
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
        # Nothing may reach the disk: any write to a file fails.
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
        try:
            accelerator.set_zero_stage(after)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        peak, rest = _high_water(), _resident()
        seen.append((before, after, peak - max(at_rest, rest), max(at_rest, rest)))
        dist.barrier()
    return seen


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def _resident() -> int:
    return _status("VmRSS:")


def _high_water() -> int:
    return _status("VmHWM:")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc; a macOS counterpart would lift this")
@pytest.mark.parametrize("world_size", [2, 4])
def test_peak_of_a_switch(world_size: int, tmp_path: Path) -> None:
    """At most the larger of both layouts and one block (its parameters and momentum), nothing written to disk."""
    with Pool(world_size) as fresh:
        ranks = fresh.run(_peak, (0, 3, 1, 2, 0, 2, 3, 0), str(tmp_path))
    allowed = 2 * BLOCK_BYTES + MARGIN
    for rank, seen in enumerate(ranks):
        for before, after, over, larger in seen:
            message = f"rank {rank}, {before} -> {after}: {over / 2**20:.1f} MB over {larger / 2**20:.1f} MB"
            assert over <= allowed, message
    assert list(tmp_path.iterdir()) == []


def _switch_in_a_window(stage: int) -> tuple[str, int, list[float]]:
    from hfdist.errors import DistributedError
    from hfdist.plugins import ZeroPlugin

    accelerator = make_accelerator(plugins=[ZeroPlugin(stage=stage)], gradient_accumulation_steps=2)
    model = build_lm("llama", tied=True, dtype=torch.float64)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    batch = make_windows(vocab=61, steps=1, gas=1, world_size=1)[0][0][0]
    text = ""
    for micro in range(2):
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            if micro == 0:
                try:
                    accelerator.set_zero_stage((stage + 1) % 4)
                except (DistributedError, ValueError) as error:
                    text = str(error)
            optimizer.step()
            optimizer.zero_grad()
    return text, accelerator.zero_stage, [p.sum().item() for p in whole_parameters(accelerator, model).values()]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_switch_inside_a_window_waits_or_is_refused(pool: Pools, stage: int) -> None:
    """Either way the window's update is one process's; a refusal says why."""
    model = build_lm("llama", tied=True, dtype=torch.float64)
    batch = make_windows(vocab=61, steps=1, gas=1, world_size=1)[0][0][0]
    want = train(
        model, [[[batch, batch], [batch, batch]]], optimizers=lambda m: [torch.optim.SGD(m.parameters(), lr=0.1)]
    )
    sums = [p.sum().item() for p in want[0].parameters.values()]
    for text, after, got in pool(2).run(_switch_in_a_window, stage):
        assert after == (stage if text else (stage + 1) % 4)
        if text:
            assert "window" in text
        assert got == pytest.approx(sums, abs=1e-9)
