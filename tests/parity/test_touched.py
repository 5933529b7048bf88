"""What scripts do to a model between the lines: weights written, parameters frozen, hooks, own criteria, own outputs.

Each is equal to one process in fp64, or refused by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.models import VOCAB, Window, build_lm, concatenate, make_windows, seeded
from tests.oracle import Tensors, assert_same
from tests.parity.loops import whole_parameters
from tests.pool import Pools
from tests.worker import make_accelerator

STAGES = [0, 1, 2, 3]
TOLERANCE = 1e-10


class Net(nn.Module):
    """5 -> 7 -> residual blocks -> 3."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(5, 7)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(7, 7), nn.Tanh()) for _ in range(2)])
        self.head = nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


class Held:
    """An output class that nothing but its script knows."""

    def __init__(self, y: Tensor) -> None:
        self.y = y


class HeldNet(Net):
    def forward(self, x: Tensor) -> Held:  # type: ignore[override]
        return Held(super().forward(x))


class HeldLinear(nn.Module):
    """The same, in one unit: no block of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.only = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Held:
        return Held(self.only(x))


def _inputs(rank: int) -> Tensor:
    return torch.linspace(-1, 1, 20, dtype=torch.float64).view(4, 5) * (rank + 1)


def _loss(output: Any) -> Tensor:
    y = output.y if isinstance(output, Held) else output
    return y.pow(2).mean() + y.sin().mean()


def _sgd(parameters: Any) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, lr=0.3, momentum=0.9)


def write(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data.clamp_(-0.2, 0.2)


def freeze(model: nn.Module) -> None:
    for parameter in list(model.parameters())[:3]:
        parameter.requires_grad_(False)


def nothing(model: nn.Module) -> None:
    pass


def _double(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(2)


TOUCHES: dict[str, Callable[[nn.Module], None]] = {"write": write, "freeze": freeze, "late optimizer": nothing}


def _touch_after_eval(stage: int, what: str, cls: type[nn.Module]) -> Tensors:
    from hfdist import ZeroPlugin

    accelerator = make_accelerator(plugins=[ZeroPlugin(stage=stage)])
    rank = accelerator.process_index
    model = accelerator.prepare(seeded(cls, dtype=torch.float64))
    optimizer = None if what == "late optimizer" else accelerator.prepare(_sgd(model.parameters()))
    for step in range(3):
        with torch.no_grad():
            model(_inputs(rank))
        if step == 0:
            TOUCHES[what](model)
            optimizer = optimizer or accelerator.prepare(_sgd(model.parameters()))
        assert optimizer is not None
        accelerator.backward(_loss(model(_inputs(rank))))
        optimizer.step()
        optimizer.zero_grad()
    return whole_parameters(accelerator, model)


def _one_process(cls: type[nn.Module], touch: Callable[[nn.Module], None], *, factor: float = 1.0) -> Tensors:
    model = seeded(cls, dtype=torch.float64)
    optimizer = _sgd(model.parameters())
    touch(model)
    for _ in range(3):
        loss = (_loss(model(_inputs(0))) + _loss(model(_inputs(1)))) / 2
        (factor * loss).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("what", list(TOUCHES))
def test_parameters_after_an_evaluation_are_those_that_train(pool: Pools, stage: int, what: str) -> None:
    for seen in pool(2).run(_touch_after_eval, stage, what, Net):
        assert_same(what, seen, _one_process(Net, TOUCHES[what]), TOLERANCE)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("cls", [HeldNet, HeldLinear])
def test_an_output_class_of_ones_own(pool: Pools, stage: int, cls: type[nn.Module]) -> None:
    for seen in pool(2).run(_touch_after_eval, stage, "write", cls):
        assert_same("own output", seen, _one_process(cls, write), TOLERANCE)


def _abandon(stage: int) -> Tensors:
    from hfdist import ZeroPlugin

    accelerator = make_accelerator(plugins=[ZeroPlugin(stage=stage)])
    rank = accelerator.process_index
    model = seeded(Net, dtype=torch.float64)
    model, optimizer = accelerator.prepare(model, _sgd(model.parameters()))
    for _ in range(3):
        with accelerator.no_sync(model):
            accelerator.backward(7 * _loss(model(_inputs(rank))))
        model.zero_grad()
        accelerator.backward(_loss(model(_inputs(rank))))
        optimizer.step()
        model.zero_grad()
    return whole_parameters(accelerator, model)


@pytest.mark.parametrize("stage", STAGES)
def test_model_zero_grad_drops_a_window_that_was_given_up(pool: Pools, stage: int) -> None:
    for seen in pool(2).run(_abandon, stage):
        assert_same("parameters", seen, _one_process(Net, nothing), TOLERANCE)


def _hooked(stage: int, switch_to: int | None, when: str) -> Tensors:
    from hfdist import ZeroPlugin

    accelerator = make_accelerator(plugins=[ZeroPlugin(stage=stage)])
    rank = accelerator.process_index
    model = seeded(Net, dtype=torch.float64)
    optimizer = _sgd(model.parameters())
    if when == "after":
        model, optimizer = accelerator.prepare(model, optimizer)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(_double)
        parameter.note = "mine"  # type: ignore[attr-defined]
    if when == "before":
        model, optimizer = accelerator.prepare(model, optimizer)
    for step in range(3):
        if step == 1 and switch_to is not None:
            accelerator.set_zero_stage(switch_to)
        accelerator.backward(_loss(model(_inputs(rank))))
        optimizer.step()
        optimizer.zero_grad()
    accelerator.engine.models[0].reshard()
    assert all(parameter.note == "mine" for parameter in model.parameters())  # type: ignore[attr-defined]
    return whole_parameters(accelerator, model)


@pytest.mark.parametrize(
    ("stage", "switch_to", "when"),
    [(0, None, "before"), (2, None, "before"), (3, None, "after"), (0, 3, "before"), (3, 0, "after")],
)
def test_hooks_on_gradients_go_along(pool: Pools, stage: int, switch_to: int | None, when: str) -> None:
    for seen in pool(2).run(_hooked, stage, switch_to, when):
        assert_same("parameters", seen, _one_process(Net, nothing, factor=2.0), TOLERANCE)


def _refusals(stage: int) -> dict[str, str]:
    from hfdist import ZeroPlugin

    accelerator = make_accelerator(plugins=[ZeroPlugin(stage=stage)])
    said = {}

    def attempt(name: str, action: Callable[[], object]) -> None:
        try:
            action()
        except Exception as error:
            said[name] = f"{type(error).__name__}: {error}"

    early = nn.Linear(3, 2)
    early.weight.register_hook(lambda gradient: gradient * 2)
    attempt("hook before", lambda: accelerator.prepare(early))
    attempt("max_norm", lambda: accelerator.prepare(nn.Sequential(nn.Embedding(5, 3, max_norm=1.0))))
    model = nn.Linear(3, 2)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model.weight.register_hook(lambda gradient: gradient * 2)
    accelerator.backward(model(torch.ones(3)).sum())
    attempt("hook after", optimizer.step)
    attempt("uneven", lambda: accelerator.join_uneven_inputs([model]).__enter__())
    return said


@pytest.mark.parametrize("stage", [0, 3])
def test_what_sharding_would_lose_is_refused_by_name(pool: Pools, stage: int) -> None:
    for said in pool(2).run(_refusals, stage):
        assert "a hook on weight" in said["hook before"]
        assert "max_norm=1.0" in said["max_norm"]
        assert "a hook on weight" in said["hook after"]
        assert "join_uneven_inputs" in said["uneven"]
        assert all(text.startswith("ConfigError") for text in said.values())


def _own_criterion(stage: int, windows: list[Window]) -> Tensors:
    from hfdist import ZeroPlugin

    accelerator = make_accelerator(plugins=[ZeroPlugin(stage=stage)], gradient_accumulation_steps=len(windows[0]))
    rank = accelerator.process_index
    model = build_lm("llama", tied=True, dtype=torch.float64)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for window in windows:
        for micro in window:
            with accelerator.accumulate(model):
                output = model(**micro[rank])  # labels go in, and the loss that comes out is not used
                accelerator.backward(output.logits.pow(2).mean())
                optimizer.step()
                optimizer.zero_grad()
    return whole_parameters(accelerator, model)


@pytest.mark.parametrize("stage", STAGES)
def test_an_own_criterion_beside_labels_is_a_plain_mean(pool: Pools, stage: int) -> None:
    windows = make_windows(vocab=VOCAB["llama"], steps=2, gas=3, world_size=2)
    model = build_lm("llama", tied=True, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for window in windows:
        losses = [model(**batch).logits.pow(2).mean() for micro in window for batch in micro]
        torch.stack(losses).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    want = {name: p.detach() for name, p in model.named_parameters()}
    for seen in pool(2).run(_own_criterion, stage, windows):
        assert_same("parameters", seen, want, TOLERANCE)


class SumForCTC(nn.Module):
    """Named as transformers names models whose loss is a sum over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(1))

    def forward(self, values: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.w * values)[labels != -100].sum()}


def _ctc(stage: int) -> float:
    from hfdist import ZeroPlugin

    accelerator = make_accelerator(plugins=[ZeroPlugin(stage=stage)])
    model = accelerator.prepare(SumForCTC())
    labels = torch.tensor([1, 1, -100, -100]) if accelerator.process_index else torch.tensor([1, 1, 1, 1])
    accelerator.backward(model(values=torch.tensor([1.0, 2.0, 3.0, 4.0]), labels=labels)["loss"])
    gradient = model.w.grad
    return float(gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_loss_that_is_a_sum_is_not_weighted_as_a_mean(pool: Pools, stage: int) -> None:
    assert pool(2).run(_ctc, stage) == [pytest.approx((10 + 3) / 2)] * 2


def _two_models_fp16(stage: int) -> list[Tensors]:
    from hfdist import AmpPlugin, ZeroPlugin

    plugins = [ZeroPlugin(stage=stage), AmpPlugin("fp16", init_scale=1024.0)]
    accelerator = make_accelerator(plugins=plugins)
    models = [seeded(nn.Linear, 5, 3, seed=seed) for seed in (1, 2)]
    models = list(accelerator.prepare(*models))
    optimizers = [accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1)) for model in models]
    x = _inputs(accelerator.process_index).float()
    for model in models:  # each is clipped after its own backward, and both wait
        accelerator.backward(model(x).float().pow(2).mean())
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return [whole_parameters(accelerator, model) for model in models]


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_two_models_under_fp16_are_unscaled_once_each(pool: Pools, stage: int) -> None:
    want = []
    for seed in (1, 2):
        model = seeded(nn.Linear, 5, 3, seed=seed)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.cat([_inputs(0), _inputs(1)]).float()
        model(x).pow(2).mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        want.append({name: p.detach() for name, p in model.named_parameters()})
    for seen in pool(2).run(_two_models_fp16, stage):
        for ours, theirs in zip(seen, want, strict=True):
            assert_same("half precision", ours, theirs, 2e-3)


def _added_group(stage: int) -> Tensors:
    from hfdist import ZeroPlugin

    accelerator = make_accelerator(plugins=[ZeroPlugin(stage=stage)])
    rank = accelerator.process_index
    model = seeded(Net, dtype=torch.float64)
    first, *later = list(model.parameters())  # before prepare
    model, optimizer = accelerator.prepare(model, _sgd([first]))
    optimizer.add_param_group({"params": later})
    for _ in range(3):
        accelerator.backward(_loss(model(_inputs(rank))))
        optimizer.step()
        optimizer.zero_grad()
    return whole_parameters(accelerator, model)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_group_added_with_references_from_before_prepare_trains(pool: Pools, stage: int) -> None:
    for seen in pool(2).run(_added_group, stage):
        assert_same("parameters", seen, _one_process(Net, nothing), TOLERANCE)


def _t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    config = T5Config(
        vocab_size=61,
        d_model=15,
        d_kv=5,
        d_ff=31,
        num_layers=2,
        num_heads=3,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        pad_token_id=0,
    )
    return T5ForConditionalGeneration(config).double()


def _t5_batch(rank: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    ids = torch.randint(1, 61, (2, 7), generator=generator)
    return {"input_ids": ids, "labels": torch.randint(1, 61, (2, 5), generator=generator)}


def _generate_t5(stage: int) -> list[list[list[int]]]:
    from hfdist import ZeroPlugin

    accelerator = make_accelerator(plugins=[ZeroPlugin(stage=stage)])
    model = _t5()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    batch = _t5_batch(accelerator.process_index)
    seen = []
    for _ in range(2):  # before the first forward, and between two updates
        seen.append(model.generate(batch["input_ids"], max_new_tokens=6, do_sample=False).tolist())
        accelerator.backward(model(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()
    return seen


@pytest.mark.parametrize("stage", STAGES)
def test_an_encoder_decoder_model_generates(pool: Pools, stage: int) -> None:
    model = _t5()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    want: list[list[Any]] = [[], []]
    for _ in range(2):
        for rank in range(2):
            ids = _t5_batch(rank)["input_ids"]
            want[rank].append(model.generate(ids, max_new_tokens=6, do_sample=False).tolist())  # type: ignore[operator]
        loss = sum(model(**_t5_batch(rank)).loss for rank in range(2)) / 2
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert want[0][0] != want[0][1]
    assert pool(2).run(_generate_t5, stage) == want


def test_the_windows_are_ragged() -> None:
    """Or the own criterion's test would not see a weight by tokens."""
    windows = make_windows(vocab=VOCAB["llama"], steps=2, gas=3, world_size=2)
    assert len({concatenate(micro)["input_ids"].shape for micro in windows[0]}) > 1
