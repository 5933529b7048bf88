"""Does the harness see what it should? Plain torch DDP, done right, equals the oracle; each planted fault does not.

Needs nothing of hfdist: when these fail, the fault is in the tests.
"""

from __future__ import annotations

import re
from typing import Literal

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from tests.models import Recipe, Window, build_lm, concatenate, count_label_tokens, make_windows
from tests.oracle import LossScale, Step, Tensors, assert_steps, gradients_of, half_gradients, train, train_amp, update
from tests.parity.cells import oracle_of, windows_of
from tests.parity.loops import CLIP, DTYPES, Cell
from tests.pool import Pools

Fault = Literal["none", "mean_of_means", "one_gradient", "stale_rank", "local_norm", "lost_micro_batch"]
CELL = Cell(0, 3, True, "adamw", 2, "llama", True, "fp64")


def _train_ddp(cell: Cell, windows: list[Window], fault: Fault) -> list[Step]:
    """DDP by hand with token weights; `fault` plants one mistake."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = build_lm(cell.family, tied=cell.tied, dtype=DTYPES[cell.dtype])
    ddp = DistributedDataParallel(model)
    optimizers = Recipe(cell.optimizer).build(model)
    steps = []
    for window in windows:
        tokens = sum(count_label_tokens(batch) for micro in window for batch in micro)
        model.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        micros = window[:-1] if fault == "lost_micro_batch" else window
        for micro in micros:
            loss = ddp(**micro[rank]).loss
            share = count_label_tokens(micro[rank]) / tokens * world_size
            if fault == "mean_of_means":
                share = 1 / len(window)
            (loss * share).backward()
            total += loss.detach() * count_label_tokens(micro[rank]) / tokens
        dist.all_reduce(total)
        if fault == "one_gradient":
            model.model.layers[1].mlp.up_proj.weight.grad[5, 3] += 1e-8  # type: ignore[index]
        clip = CLIP
        if fault == "local_norm":
            half = [p.grad for p in list(model.parameters())[::2]]
            clip = CLIP * float(torch.nn.utils.get_total_norm(gradients_of(model).values()))
            clip /= float(torch.nn.utils.get_total_norm([g for g in half if g is not None]))
        step = update(model, optimizers, loss=total.item(), clip=clip)
        if fault == "stale_rank":
            step.parameters["model.norm.weight"] = step.parameters["model.norm.weight"] + 1e-9 * rank
        steps.append(step)
    return steps


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_ddp_done_right_equals_the_oracle(pool: Pools, world_size: int, family: str) -> None:
    """Ragged batches, token weights, three micro-batches, clipping: 1e-10 in fp64 on every rank."""
    cell = Cell(0, 3, True, "adamw", world_size, family, True, "fp64")  # type: ignore[arg-type]
    for steps in pool(world_size).run(_train_ddp, cell, windows_of(cell), "none"):
        assert_steps(steps, oracle_of(cell), tolerance=1e-10)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("mean_of_means", r"step 0: gradients: \d+ of \d+ differ"),
        (
            "one_gradient",
            r"step 0: gradients: 1 of \d+ differ by more than 1e-10: model.layers.1.mlp.up_proj.weight 1.000e-08",
        ),
        ("local_norm", r"step 0: clipped gradients"),
        ("lost_micro_batch", r"step 0: loss"),
    ],
)
def test_a_planted_fault_is_seen(pool: Pools, fault: Fault, message: str) -> None:
    """The comparison fails at the first step and names what is wrong."""
    steps = pool(2).run(_train_ddp, CELL, windows_of(CELL), fault)[0]
    with pytest.raises(AssertionError, match=message):
        assert_steps(steps, oracle_of(CELL), tolerance=1e-10)


def test_a_rank_that_drifts_is_seen(pool: Pools) -> None:
    """Rank 1's parameters are 1e-9 off: its steps fail, rank 0's do not."""
    steps = pool(2).run(_train_ddp, CELL, windows_of(CELL), "stale_rank")
    assert_steps(steps[0], oracle_of(CELL), tolerance=1e-10)
    with pytest.raises(AssertionError, match=re.escape("step 0: parameters: 1 of")):
        assert_steps(steps[1], oracle_of(CELL), tolerance=1e-10)


def test_the_concatenated_batch_is_the_weighted_mean() -> None:
    """One forward on the padded whole equals the label-token mean of the parts' losses, in fp64."""
    for family in ("llama", "gpt2"):
        model = build_lm(family, tied=False, dtype=torch.float64)
        batches = make_windows(vocab=61, steps=1, gas=1, world_size=5)[0][0]
        counts = [count_label_tokens(batch) for batch in batches]
        parts = sum(model(**batch).loss * n for batch, n in zip(batches, counts, strict=True)) / sum(counts)
        assert abs((model(**concatenate(batches)).loss - parts).item()) < 1e-13
        assert len(set(counts)) > 2, "the batches do not differ enough to test anything"


def _gradients(model: torch.nn.Module, window: Window) -> Tensors:
    model.zero_grad()
    model(**window[0][0]).loss.backward()
    return gradients_of(model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_amp_oracle_is_near_fp32_and_its_modes_differ(dtype: torch.dtype) -> None:
    """Each compute mode rounds, within 5 % of fp32's gradients; fp32 parameters round elsewhere than half ones.

    Whether autocast is on makes no difference for half parameters here: HF writes its fp32 islands out.
    """
    window = make_windows(vocab=61, steps=1, gas=1, world_size=1, ragged=False)[0]
    model = build_lm("llama", tied=True)
    exact = _gradients(model, window)
    modes = {}
    for compute in ("mixed", "cast", "autocast"):
        _, modes[compute] = half_gradients(model, window[0][0], dtype=dtype, compute=compute)
        for name, gradient in modes[compute].items():
            assert gradient.dtype == torch.float32
            gap, size = (gradient - exact[name]).abs().max(), exact[name].abs().max()
            assert 0 < gap < 0.05 * size, (compute, name)
    assert any(not torch.equal(modes["mixed"][name], modes["autocast"][name]) for name in exact)


def test_amp_oracle_in_fp32_is_the_plain_oracle() -> None:
    """With dtype fp32 and a loss scale of 1024 the AMP oracle must give the plain one's steps."""
    windows = make_windows(vocab=61, steps=3, gas=2, world_size=2)
    plain = train(build_lm("llama", tied=True), windows, optimizers=Recipe("adamw").build, clip=CLIP)
    model = build_lm("llama", tied=True)
    kwargs = {"dtype": torch.float32, "compute": "cast", "clip": CLIP, "scale": LossScale(1024.0)}
    assert_steps(train_amp(model, windows, optimizers=Recipe("adamw").build, **kwargs), plain, tolerance=1e-5)


def test_loss_scale_by_hand() -> None:
    """Backoff after `hysteresis` overflows in a row, growth after `interval` good steps, floor at `minimum`."""

    def walk(scale: LossScale, outcomes: str) -> list[float]:
        values = []
        for outcome in outcomes:
            scale.update(outcome == "x")
            values.append(scale.value)
        return values

    assert walk(LossScale(8.0, interval=2), "..x..") == [8, 16, 8, 8, 16]
    assert walk(LossScale(8.0, hysteresis=2), "x.xx") == [8, 8, 8, 4]
    assert walk(LossScale(2.0), "xxx") == [1, 1, 1]
    assert walk(LossScale(65536.0), "xxxxxxx") == [2.0**15, 2.0**14, 2.0**13, 2.0**12, 2.0**11, 2.0**10, 2.0**9]


def test_oracle_sees_a_nan(pool: Pools) -> None:
    """NaN on one side is a difference, not a match."""
    windows = make_windows(vocab=61, steps=1, gas=1, world_size=1)
    good = train(build_lm("llama", tied=True), windows, optimizers=Recipe("sgd").build)
    bad = train(build_lm("llama", tied=True), windows, optimizers=Recipe("sgd").build)
    nan: Tensor = bad[0].gradients["model.norm.weight"]
    nan[3] = float("nan")
    with pytest.raises(AssertionError, match=r"model.norm.weight inf"):
        assert_steps(bad, good, tolerance=1e-5)
