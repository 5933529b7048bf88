"""Mixed precision against the AMP oracle: bf16 and fp16, three compute modes, all stages, one process too.

Two kinds of data. Even: every micro-batch has 16 label tokens, so all weights are powers of two and the half-precision
work of a rank is, bit for bit, the oracle's; only fp32 sums differ. Ragged: weights round in half precision too.

Bounds, in one place below: `EVEN` for the first step of even data (it tells the compute modes apart: they differ by
1e-3 and more); `RAGGED` times a tensor's largest gradient for ragged data, about ten units of the dtype's rounding
(2^-8 for bf16, 2^-11 for fp16; CPU layer norm sums its weight's gradient in half precision); `LATER` for parameters
after all steps, when an fp32 difference may have moved a rounding of a half-precision copy.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
import torch

from tests.models import VOCAB, Family, Recipe, Window, build_lm, make_windows
from tests.oracle import ComputeMode, LossScale, Step, assert_near, assert_same, train_amp
from tests.parity.cells import assert_ranks_agree, cover
from tests.parity.loops import CLIP, RankRun, run_windows
from tests.pool import Pools
from tests.worker import make_accelerator

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
EVEN = 1e-6
RAGGED = {"bf16": 4e-2, "fp16": 5e-3}
LATER = {"bf16": 2e-4, "fp16": 5e-5}
RECIPE = Recipe("sgd", lr=1e-2)
STEPS = 4
# Small enough that nothing overflows; growth every second step is part of what is compared.
SCALE = {"init_scale": 1024.0, "growth_interval": 2}


@dataclass(frozen=True)
class AmpCell:
    """One point of the mixed-precision matrix."""

    stage: int
    dtype: str
    compute: ComputeMode
    gas: int
    clip: bool
    world_size: int
    family: Family
    tied: bool

    @property
    def name(self) -> str:
        """Test id."""
        clip, tied = ("clip" if self.clip else "noclip"), ("tied" if self.tied else "untied")
        model, step = f"{self.family}-{tied}-{self.dtype}-{self.compute}", f"stage{self.stage}-gas{self.gas}-{clip}"
        return f"{model}-{step}-w{self.world_size}"


FACTORS = [
    (0, 1, 2, 3),
    ("bf16", "fp16"),
    ("mixed", "cast", "autocast"),
    (1, 2),
    (False, True),
    (1, 2, 3),
    ("llama", "gpt2"),
    (False, True),
]
CELLS = [AmpCell(*row) for row in cover(FACTORS, list(itertools.combinations(range(len(FACTORS)), 2)))]


def _train(cell: AmpCell, windows: list[Window]) -> RankRun:
    from hfdist.plugins import AmpPlugin, ZeroPlugin

    scale = SCALE if cell.dtype == "fp16" else {}
    plugins = [ZeroPlugin(stage=cell.stage), AmpPlugin(dtype=cell.dtype, compute=cell.compute, **scale)]  # type: ignore[arg-type]
    accelerator = make_accelerator(plugins=plugins, gradient_accumulation_steps=cell.gas)
    model = build_lm(cell.family, tied=cell.tied)
    model, *optimizers = accelerator.prepare(model, *RECIPE.build(model))
    return run_windows(accelerator, model, optimizers, windows, clip=CLIP if cell.clip else None)


def _both(pools: Pools, cell: AmpCell, *, ragged: bool) -> tuple[list[Step], list[Step]]:
    vocab = VOCAB[cell.family]
    windows = make_windows(vocab=vocab, steps=STEPS, gas=cell.gas, world_size=cell.world_size, ragged=ragged)
    runs = pools(cell.world_size).run(_train, cell, windows)
    assert_ranks_agree(runs)
    scale = LossScale(SCALE["init_scale"], interval=int(SCALE["growth_interval"])) if cell.dtype == "fp16" else None
    want = train_amp(
        build_lm(cell.family, tied=cell.tied),
        windows,
        optimizers=RECIPE.build,
        dtype=DTYPES[cell.dtype],
        compute=cell.compute,
        clip=CLIP if cell.clip else None,
        scale=scale,
    )
    return runs[0].steps, want


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_even_batches_equal_the_oracle(pool: Pools, cell: AmpCell) -> None:
    """First step within fp32 rounding; parameters and the loss scale all the way."""
    got, want = _both(pool, cell, ragged=False)
    assert_near("step 0: loss", got[0].loss, want[0].loss, EVEN)
    assert_same("step 0: gradients", got[0].gradients, want[0].gradients, EVEN)
    assert_near("step 0: norm", got[0].norm, want[0].norm, 1e-5)
    assert_same("step 0: clipped gradients", got[0].clipped, want[0].clipped, EVEN)
    assert_same("step 0: parameters", got[0].parameters, want[0].parameters, EVEN)
    for step in range(STEPS):
        assert_same(f"step {step}: parameters", got[step].parameters, want[step].parameters, LATER[cell.dtype])
    assert [step.scale for step in got] == [step.scale for step in want]
    assert not any(step.skipped for step in got)
    assert all(tensor.dtype == torch.float32 for tensor in got[-1].parameters.values())


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_ragged_batches_are_near_the_oracle(pool: Pools, dtype: str, stage: int) -> None:
    """Token weights and a window of 3: gradients of the first step within a few roundings, parameters all the way."""
    family: Family = "llama" if stage % 2 else "gpt2"
    cell = AmpCell(stage, dtype, "mixed", 3, False, 2 + stage % 2, family, True)
    got, want = _both(pool, cell, ragged=True)
    for name, gradient in want[0].gradients.items():
        bound = RAGGED[dtype] * gradient.abs().max().item() + 1e-6
        assert_same("step 0: gradients", {name: got[0].gradients[name]}, {name: gradient}, bound)
    for step in range(STEPS):
        bound = RECIPE.lr * RAGGED[dtype] * 10
        assert_same(f"step {step}: parameters", got[step].parameters, want[step].parameters, bound)


def _dtypes(dtype: str, compute: ComputeMode) -> dict[str, str]:
    from hfdist.plugins import AmpPlugin, ZeroPlugin

    seen: dict[str, str] = {}
    amp = AmpPlugin(dtype=dtype, compute=compute)  # type: ignore[arg-type]
    accelerator = make_accelerator(plugins=[ZeroPlugin(stage=3), amp])
    model = build_lm("llama", tied=True)
    block = model.model.layers[0].mlp.up_proj
    block.register_forward_hook(
        lambda module, _, out: seen.update(weight=str(module.weight.dtype), output=str(out.dtype))
    )
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    batch = make_windows(vocab=61, steps=1, gas=1, world_size=1)[0][0][0]
    outputs = model(**batch)
    seen["logits"] = str(outputs.logits.dtype)
    accelerator.backward(outputs.loss)
    parameter = next(iter(model.parameters()))
    assert parameter.grad is not None
    seen |= {"master": str(parameter.dtype), "gradient": str(parameter.grad.dtype)}
    optimizer.step()
    state = optimizer.state[parameter]["exp_avg"]
    seen["optimizer"] = str(state.dtype)
    return seen


@pytest.mark.parametrize("compute", ["mixed", "cast", "autocast"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_dtypes_while_it_runs(pool: Pools, dtype: str, compute: ComputeMode) -> None:
    """What a hook in the model sees: half weights in "mixed" and "cast", fp32 ones in "autocast"; fp32 masters."""
    half, full = str(DTYPES[dtype]), "torch.float32"
    want = {"weight": full if compute == "autocast" else half, "output": half, "logits": full}
    want |= {"master": full, "gradient": full, "optimizer": full}
    for seen in pool(2).run(_dtypes, dtype, compute):
        assert seen == want
