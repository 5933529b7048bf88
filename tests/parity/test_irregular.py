"""Loops off the straight road: micro-steps without a backward, several optimizers and models in a window, references
made before `prepare`, 0-dim parameters, and what is refused by name. Each against one process, fp64."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.models import VOCAB, ScalarToy, Window, build_lm, make_windows, seeded
from tests.oracle import Tensors, assert_same, train
from tests.parity.loops import CLIP, whole_gradients, whole_parameters
from tests.pool import Pools
from tests.worker import make_accelerator

STAGES = [0, 1, 2, 3]
TOLERANCE = 1e-10


def _sgd(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)]


def _train_with_skips(stage: int, windows: list[Window], skipped: list[int]) -> list[Tensors]:
    from hfdist.plugins import ZeroPlugin

    accelerator = make_accelerator(plugins=[ZeroPlugin(stage=stage)], gradient_accumulation_steps=len(windows[0]))
    model = build_lm("llama", tied=True, dtype=torch.float64)
    model, optimizer = accelerator.prepare(model, *_sgd(model))
    records = []
    for window in windows:
        for number, micro in enumerate(window):
            with accelerator.accumulate(model):
                loss = model(**micro[accelerator.process_index]).loss
                if number not in skipped:
                    accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        records.append(whole_parameters(accelerator, model))
    return records


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("skipped", [[0], [1], [0, 1]])
def test_a_micro_step_without_backward_does_not_count(pool: Pools, stage: int, skipped: list[int]) -> None:
    """3 micro-steps, of which some end after their forward on all ranks: the mean over the tokens of the others."""
    windows = make_windows(vocab=VOCAB["llama"], steps=3, gas=3, world_size=2)
    kept = [[micro for number, micro in enumerate(window) if number not in skipped] for window in windows]
    want = train(build_lm("llama", tied=True, dtype=torch.float64), kept, optimizers=_sgd)
    for rank, records in enumerate(pool(2).run(_train_with_skips, stage, windows, skipped)):
        for step, (ours, theirs) in enumerate(zip(records, want, strict=True)):
            assert_same(f"rank {rank}, step {step}", ours, theirs.parameters, TOLERANCE)


class _Slopes(nn.Module):
    """(a + b) times the mean of x (batch, 1): where x is 1, both gradients are 1."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros(1))
        self.b = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return ((self.a + self.b) * x).mean()


def _tail_of_two_optimizers(stage: int, gas: int, num_micro: int) -> dict[str, float]:
    from hfdist.plugins import ZeroPlugin

    accelerator = make_accelerator(plugins=[ZeroPlugin(stage=stage)], gradient_accumulation_steps=gas)
    model = _Slopes()
    first, second = (torch.optim.SGD([p], lr=1.0) for p in (model.a, model.b))
    loader = DataLoader([torch.ones(1)] * (num_micro * accelerator.num_processes), batch_size=1)
    model, first, second, loader = accelerator.prepare(model, first, second, loader)
    for x in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(x))
            for optimizer in (first, second):  # the one's update must not end the other's window
                optimizer.step()
                optimizer.zero_grad()
    return {name: value.item() for name, value in whole_parameters(accelerator, model).items()}


@pytest.mark.parametrize("stage", STAGES)
def test_two_optimizers_in_a_window_cut_short(pool: Pools, stage: int) -> None:
    """10 micro-batches, GAS 4: three updates of exactly 1 by each optimizer."""
    for seen in pool(2).run(_tail_of_two_optimizers, stage, 4, 10):
        assert seen == pytest.approx({"a": -3.0, "b": -3.0}, abs=1e-6)


def _clip_listed_before(stage: int, window: Window, how: str) -> tuple[float, Tensors]:
    from hfdist.plugins import ZeroPlugin

    accelerator = make_accelerator(plugins=[ZeroPlugin(stage=stage)])
    model = build_lm("gpt2", tied=True, dtype=torch.float64)
    listed = list(model.parameters())  # before prepare, as many scripts do
    model = accelerator.prepare(model)
    accelerator.backward(model(**window[0][accelerator.process_index]).loss)
    clip = accelerator.clip_grad_norm_ if how == "accelerator" else torch.nn.utils.clip_grad_norm_
    return clip(listed, CLIP).item(), whole_gradients(model)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("how", ["accelerator", "torch"])
def test_clipping_a_list_made_before_prepare(pool: Pools, stage: int, how: str) -> None:
    windows = make_windows(vocab=VOCAB["gpt2"], steps=1, gas=1, world_size=2)
    want = train(build_lm("gpt2", tied=True, dtype=torch.float64), windows, optimizers=_sgd, clip=CLIP)[0]
    for norm, gradients in pool(2).run(_clip_listed_before, stage, windows[0], how):
        assert norm == pytest.approx(want.norm, abs=TOLERANCE)
        assert_same("clipped gradients", gradients, want.clipped, TOLERANCE)


def _forward_while_gathered(stage: int, window: Window) -> tuple[str, list[Tensors]]:
    from hfdist.plugins import ZeroPlugin

    accelerator = make_accelerator(plugins=[ZeroPlugin(stage=stage)])
    model = build_lm("llama", tied=False, dtype=torch.float64)
    model, optimizer = accelerator.prepare(model, *_sgd(model))
    batch = window[0][accelerator.process_index]
    error = ""
    try:
        with accelerator.gathered_parameters(model):
            model(**batch)
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    accelerator.backward(model(**batch).loss)
    optimizer.step()
    return error, [whole_parameters(accelerator, model)]


@pytest.mark.parametrize("stage", [0, 3])
def test_a_forward_inside_gathered_parameters_is_refused_and_leaves_the_model_whole(pool: Pools, stage: int) -> None:
    windows = make_windows(vocab=VOCAB["llama"], steps=1, gas=1, world_size=2)
    want = train(build_lm("llama", tied=False, dtype=torch.float64), windows, optimizers=_sgd)[0]
    for error, (parameters,) in pool(2).run(_forward_while_gathered, stage, windows[0]):
        assert error.startswith("DistributedError")
        assert "gathered_parameters" in error
        assert_same("after the next step", parameters, want.parameters, TOLERANCE)


def _two_models(stage: int, clip: float, both_first: bool) -> dict[str, Tensors]:
    """Alternating updates of two models, as a GAN does; clipping asked for by the configuration."""
    from hfdist.plugins import ZeroPlugin

    env = {"HFDIST_GRADIENT_CLIPPING": str(clip)}
    accelerator = make_accelerator(plugins=[ZeroPlugin(stage=stage)], env=env)
    models = [seeded(nn.Linear, 5, 3, seed=seed, dtype=torch.float64) for seed in (1, 2)]
    models = list(accelerator.prepare(*models))
    optimizers = [accelerator.prepare(torch.optim.SGD(model.parameters(), lr=1.0)) for model in models]
    x = torch.arange(5.0, dtype=torch.float64) + accelerator.process_index
    for _ in range(2):
        if both_first:  # gradients of both wait while either is updated
            for model in models:
                accelerator.backward(model(x).pow(2).sum())
        for model, optimizer in zip(models, optimizers, strict=True):
            if not both_first:
                accelerator.backward(model(x).pow(2).sum())
            optimizer.step()
            optimizer.zero_grad()
    return {str(index): whole_parameters(accelerator, model) for index, model in enumerate(models)}


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("both_first", [False, True])
def test_each_model_is_clipped_by_its_own_norm(pool: Pools, stage: int, both_first: bool) -> None:
    models = [seeded(nn.Linear, 5, 3, seed=seed, dtype=torch.float64) for seed in (1, 2)]
    x = torch.arange(5.0, dtype=torch.float64)
    for model in models:
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        for _ in range(2):
            ((model(x).pow(2).sum() + model(x + 1).pow(2).sum()) / 2).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
    for seen in pool(2).run(_two_models, stage, CLIP, both_first):
        for index, model in enumerate(models):
            want = {name: p.detach() for name, p in model.named_parameters()}
            assert_same(f"model {index}", seen[str(index)], want, TOLERANCE)


def _switch_two_models(stage: int, to: int) -> tuple[str, int, list[int]]:
    from hfdist.plugins import ZeroPlugin

    accelerator = make_accelerator(plugins=[ZeroPlugin(stage=stage)], gradient_accumulation_steps=2)
    _, second = accelerator.prepare(nn.Linear(5, 3), nn.Linear(5, 3))
    with accelerator.accumulate(second):  # the second model is inside a window, the first is not
        accelerator.backward(second(torch.ones(5)).sum())
    try:
        accelerator.set_zero_stage(to)
    except Exception as error:
        return f"{type(error).__name__}: {error}", accelerator.zero_stage, [z.stage for z in accelerator.engine.models]
    return "", accelerator.zero_stage, []


@pytest.mark.parametrize(("stage", "to"), [(0, 3), (3, 0), (1, 2)])
def test_a_switch_is_refused_before_any_model_moves(pool: Pools, stage: int, to: int) -> None:
    for error, now, each in pool(2).run(_switch_two_models, stage, to):
        assert "inside a gradient accumulation window" in error
        assert now == stage
        assert each == [stage, stage]


def _scalar_parameters(stage: int, gas: int, used: dict[int, list[int]], raw: bool, conditional: bool) -> Any:
    """`used[rank]`: micro-steps in which the rank's loss depends on the 0-dim parameter; the others use the layer."""
    from hfdist.plugins import ZeroPlugin

    plugins = [ZeroPlugin(stage=stage, conditional_modules=conditional)]
    accelerator = make_accelerator(plugins=plugins, gradient_accumulation_steps=gas)
    model = seeded(ScalarToy, True, dtype=torch.float64)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
    rank = accelerator.process_index
    x = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64) + rank
    for _ in range(2):
        for micro in range(gas):
            with accelerator.accumulate(model):
                loss = model(x, scale=micro in used[rank]).sum()
                if raw:
                    loss.backward()
                else:
                    accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
    return whole_parameters(accelerator, model)


def _scalar_oracle(gas: int, used: dict[int, list[int]]) -> Tensors:
    model = seeded(ScalarToy, True, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(2):
        losses = []
        for rank, micros in used.items():
            x = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64) + rank
            for micro in range(gas):
                losses.append(model(x, scale=micro in micros).sum())
        torch.stack(losses).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    ("gas", "used", "raw"),
    [
        (1, {0: [0], 1: [0]}, False),
        (1, {0: [0], 1: [0]}, True),  # loss.backward() by the script itself
        (2, {0: [0], 1: [0]}, False),  # no gradient in the micro-step that ends the window
        (2, {0: [0], 1: [1]}, False),
        (1, {0: [0], 1: []}, False),  # only one rank uses it
    ],
)
def test_0dim_parameters(pool: Pools, stage: int, gas: int, used: dict[int, list[int]], raw: bool) -> None:
    want = _scalar_oracle(gas, used)
    for conditional in [False, True] if stage in (0, 3) else [False]:
        for seen in pool(2).run(_scalar_parameters, stage, gas, used, raw, conditional):
            assert_same(f"conditional={conditional}", seen, want, TOLERANCE)


def _stray_parameter(stage: int) -> str:
    from hfdist.plugins import ZeroPlugin

    accelerator = make_accelerator(plugins=[ZeroPlugin(stage=stage)])
    model, stray = nn.Linear(3, 2), nn.Parameter(torch.zeros(7))
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("hfdist").addHandler(handler)
    try:
        model, optimizer = accelerator.prepare(model, torch.optim.SGD([*model.parameters(), stray], lr=0.1))
        for _ in range(2):
            accelerator.backward(model(torch.ones(3)).sum() * stray.sum())
            optimizer.step()
            optimizer.zero_grad()
    finally:
        logging.getLogger("hfdist").removeHandler(handler)
    return "\n".join(heard)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_parameter_of_no_prepared_model_is_said_once(pool: Pools, stage: int) -> None:
    heard = pool(2).run(_stray_parameter, stage)
    assert heard[0].count("belong to no prepared model") == 1
    assert "(7,)" in heard[0]
    assert heard[1] == ""
