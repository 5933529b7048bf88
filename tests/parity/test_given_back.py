"""What a script writes into prepared objects or loads into them stays, or is refused by name. Against one process."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.models import VOCAB, Window, build_lm, make_windows
from tests.oracle import Tensors, assert_same
from tests.parity.loops import whole_parameters
from tests.pool import Pools
from tests.worker import make_accelerator

STAGES = [0, 1, 3]  # 2 treats weights and optimizer state as 1 does
TOLERANCE = 1e-10


class _Net(nn.Module):
    """x (batch, 5) -> (batch, 3) in fp64; no width divides by the number of ranks. `bias=False`: matrices only."""

    def __init__(self, *, seed: int = 0, bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.inp = nn.Linear(5, 7, bias=bias)
        self.layers = nn.ModuleList(nn.Linear(7, 7, bias=bias) for _ in range(2))
        self.head = nn.Linear(7, 3, bias=bias)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(x)


def _optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    if name == "adafactor":
        return torch.optim.Adafactor(model.parameters(), lr=0.01)
    if name == "muon":
        return torch.optim.Muon(model.parameters(), lr=0.02)
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def _inputs(step: int, world_size: int = 2) -> Tensor:
    return torch.randn(4 * world_size, 5, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, accelerator: Any = None) -> None:
    """Steps on the whole batch, or on this rank's part of it."""
    for step in steps:
        x = _inputs(step)
        if accelerator is None:
            model(x).square().mean().backward()
        else:
            accelerator.backward(model(x.chunk(accelerator.num_processes)[accelerator.process_index]).square().mean())
        optimizer.step()
        optimizer.zero_grad()


def _accelerator(stage: int) -> Any:
    from hfdist.plugins import ZeroPlugin

    return make_accelerator(plugins=[ZeroPlugin(stage=stage)])


def _parameters(model: nn.Module) -> Tensors:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


# ------------------------------------------------------------ gathered_parameters


def _write(model: Any, how: str) -> None:
    if how == "freeze":
        model.layers[0].requires_grad_(False)
    elif how == "assign":
        model.head.weight = nn.Parameter(torch.full((3, 7), 0.25, dtype=torch.float64))
    else:
        model.load_state_dict(_Net(seed=9).state_dict())


def _gathered(stage: int, how: str, modifier_rank: int | None) -> Tensors:
    accelerator = _accelerator(stage)
    model = _Net()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    _step(model, optimizer, range(1), accelerator)
    with accelerator.gathered_parameters(model, modifier_rank=modifier_rank):
        if modifier_rank in (None, accelerator.process_index):
            _write(model, how)
    _step(model, optimizer, range(1, 3), accelerator)
    return whole_parameters(accelerator, model)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(("how", "modifier_rank"), [("freeze", None), ("freeze", 1), ("assign", 1), ("load", None)])
def test_what_is_left_in_gathered_parameters_stays(
    pool: Pools, stage: int, how: str, modifier_rank: int | None
) -> None:
    """Frozen, assigned anew or loaded inside the block, and trained on."""
    want = _Net()
    optimizer = torch.optim.SGD(want.parameters(), lr=0.1)
    _step(want, optimizer, range(1))
    _write(want, how)
    if how == "assign":
        optimizer = torch.optim.SGD(want.parameters(), lr=0.1)
    _step(want, optimizer, range(1, 3))
    for rank, seen in enumerate(pool(2).run(_gathered, stage, how, modifier_rank)):
        assert_same(f"rank {rank}", seen, _parameters(want), TOLERANCE)


def _gathered_wrong(stage: int) -> tuple[str, Tensors]:
    accelerator = _accelerator(stage)
    model = accelerator.prepare(_Net())
    text = ""
    try:
        with accelerator.gathered_parameters(model):
            model.head.weight = nn.Parameter(torch.zeros(2, 7, dtype=torch.float64))
            nn.init.zeros_(model.head.bias)
    except ValueError as error:
        text = str(error)
    return text, whole_parameters(accelerator, model)


@pytest.mark.parametrize("stage", STAGES)
def test_another_shape_in_gathered_parameters_is_refused(pool: Pools, stage: int) -> None:
    want = _parameters(_Net()) | {"head.bias": torch.zeros(3, dtype=torch.float64)}
    for text, seen in pool(2).run(_gathered_wrong, stage):
        assert "head.weight of shape (2, 7) instead of (3, 7)" in text
        assert_same("kept", seen, want, 0.0)


# ---------------------------------------------------------------- optimizer state


def _resume(stage: int, name: str, before_prepare: bool, weights: Tensors, state: dict[str, Any]) -> Tensors:
    accelerator = _accelerator(stage)
    model = _Net(seed=5, bias=name != "muon")
    model.load_state_dict(weights)
    optimizer = _optimizer(name, model)
    if before_prepare:
        optimizer.load_state_dict(state)
    model, optimizer = accelerator.prepare(model, optimizer)
    if not before_prepare:
        optimizer.load_state_dict(state)
    _step(model, optimizer, range(2, 4), accelerator)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # this rank's own, which changes nothing
    _step(model, optimizer, range(4, 6), accelerator)
    return whole_parameters(accelerator, model)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("before_prepare", [True, False])
@pytest.mark.parametrize("name", ["adamw", "muon", "adafactor"])
def test_optimizer_state_of_one_process(pool: Pools, stage: int, name: str, before_prepare: bool) -> None:
    """Loaded before or after `prepare`, for optimizers that step rows and that step whole matrices."""
    want = _Net(bias=name != "muon")
    optimizer = _optimizer(name, want)
    _step(want, optimizer, range(2))
    weights, state = copy.deepcopy(want.state_dict()), copy.deepcopy(optimizer.state_dict())
    _step(want, optimizer, range(2, 6))
    for rank, seen in enumerate(pool(2).run(_resume, stage, name, before_prepare, weights, state)):
        assert_same(f"rank {rank}", seen, _parameters(want), TOLERANCE)


def _load_of_rank_0(stage: int, path: str) -> tuple[str, Tensors]:
    accelerator = _accelerator(stage)
    model = _Net()
    model, optimizer = accelerator.prepare(model, _optimizer("adamw", model))
    _step(model, optimizer, range(2), accelerator)
    if accelerator.is_main_process:
        torch.save(optimizer.state_dict(), path)
    accelerator.wait_for_everyone()
    text = ""
    try:
        optimizer.load_state_dict(torch.load(path))
    except ValueError as error:
        text = str(error)
    _step(model, optimizer, range(2, 4), accelerator)
    return text, whole_parameters(accelerator, model)


@pytest.mark.parametrize("stage", STAGES)
def test_optimizer_state_of_another_rank_is_refused(pool: Pools, tmp_path: Path, stage: int) -> None:
    """On every rank, and training goes on as if nothing had been loaded; at stage 0 it is everyone's."""
    want = _Net()
    _step(want, _optimizer("adamw", want), range(4))
    for text, seen in pool(2).run(_load_of_rank_0, stage, str(tmp_path / "optimizer.pt")):
        assert bool(re.search(r"on dp=1.*save_state", text)) == (stage > 0)
        assert_same("after", seen, _parameters(want), TOLERANCE)


def _save_and_load(stage: int, directory: str) -> Tensors:
    accelerator = _accelerator(stage)
    model = _Net()
    model, optimizer = accelerator.prepare(model, _optimizer("adafactor", model))
    _step(model, optimizer, range(2), accelerator)
    accelerator.save_state(directory)
    accelerator = _accelerator(stage)
    model = _Net(seed=5)
    model, optimizer = accelerator.prepare(model, _optimizer("adafactor", model))
    accelerator.load_state(directory)
    _step(model, optimizer, range(2, 4), accelerator)
    return whole_parameters(accelerator, model)


@pytest.mark.parametrize("stage", STAGES)
def test_whole_state_that_looks_like_rows(pool: Pools, tmp_path: Path, stage: int) -> None:
    """torch's Adafactor keeps (1, 7) for the columns of the (3, 7) head, of which rank 1 holds (1, 7)."""
    want = _Net()
    _step(want, _optimizer("adafactor", want), range(4))
    for seen in pool(2).run(_save_and_load, stage, str(tmp_path)):
        assert_same("resumed", seen, _parameters(want), TOLERANCE)


# ------------------------------------------------------------- states and hooks


def _load_whole(stage: int) -> tuple[Tensors, str]:
    accelerator = _accelerator(stage)
    model = _Net()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    _step(model, optimizer, range(1), accelerator)
    text = ""
    try:
        model.load_state_dict({**_Net(seed=9).state_dict(), "head.bias": torch.zeros(2, dtype=torch.float64)})
    except RuntimeError as error:
        text = str(error)
    accelerator.unwrap_model(model).load_state_dict(_Net(seed=9).state_dict())
    _step(model, optimizer, range(1, 3), accelerator)
    return whole_parameters(accelerator, model), text


@pytest.mark.parametrize("stage", STAGES)
def test_whole_weights_loaded_into_a_prepared_model(pool: Pools, stage: int) -> None:
    """Trained on from there; another shape is torch's own error."""
    want = _Net(seed=9)
    _step(want, torch.optim.SGD(want.parameters(), lr=0.1), range(1, 3))
    for seen, text in pool(2).run(_load_whole, stage):
        assert_same("loaded", seen, _parameters(want), TOLERANCE)
        assert "size mismatch for head.bias" in text


def _hooks(stage: int, directory: str) -> tuple[list[Tensors], list[int], Tensors, int]:
    accelerator = _accelerator(stage)
    model = accelerator.prepare(_Net())
    taken: list[Tensors] = []
    counts: list[int] = []

    def save(models: list[nn.Module], weights: list[Tensors], output_dir: str) -> None:
        taken.extend(weights.pop() for _ in models)

    def load(models: list[nn.Module], input_dir: str) -> None:
        while models:
            models.pop()
            counts.append(len(models))

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
    accelerator.save_state(directory)
    with accelerator.gathered_parameters(model), torch.no_grad():
        model.head.weight.zero_()
    accelerator.load_state(directory)
    return taken, counts, whole_parameters(accelerator, model), len(accelerator._models)


@pytest.mark.parametrize("stage", [0, 3])
def test_hooks_may_empty_their_lists(pool: Pools, tmp_path: Path, stage: int) -> None:
    """A save hook gets one whole state dict per model; what a load hook takes out stays prepared, and is loaded."""
    want = _parameters(_Net())
    for taken, counts, loaded, num_models in pool(2).run(_hooks, stage, str(tmp_path)):
        assert len(taken) == 1
        assert_same("weights of the hook", taken[0], want, 0.0)
        assert counts == [0]
        assert_same("loaded", loaded, want, 0.0)
        assert num_models == 1


# ------------------------------------------------------- models loaded into shards


def _from_pretrained(directory: str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory)


def _load_on_rank_0(directory: str) -> str:
    accelerator = _accelerator(3)
    model = accelerator.prepare(_Net())
    try:
        if accelerator.is_main_process:
            _from_pretrained(directory)
        accelerator.get_state_dict(model)
    except RuntimeError as error:
        return str(error)
    return ""


def test_loading_into_shards_on_one_rank_is_named(pool: Pools, tmp_path: Path) -> None:
    build_lm("llama", tied=True).save_pretrained(tmp_path)
    for text in pool(2).run(_load_on_rank_0, str(tmp_path)):
        assert re.search(r"dp=0 loads a model into shards .*from_pretrained together.*dp=1 gathers whole", text), text


def _refused_models(directory: str) -> list[str]:
    accelerator = _accelerator(3)
    model = _from_pretrained(directory)
    texts = []
    for use in (copy.deepcopy, lambda loaded: accelerator.prepare(nn.Sequential(loaded.model))):
        try:
            use(model)
        except (RuntimeError, ValueError) as error:
            texts.append(str(error))
    return texts


def test_copies_and_parts_of_a_loaded_model_are_refused(pool: Pools, tmp_path: Path) -> None:
    build_lm("llama", tied=True).save_pretrained(tmp_path)
    for copied, part in pool(2).run(_refused_models, str(tmp_path)):
        assert "from_pretrained loads into shards" in copied
        assert "a Sequential with a part of a LlamaForCausalLM" in part


def _lora(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    return get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False))


def _adapters(model: nn.Module, parameters: Tensors) -> Tensors:
    return {name: parameters[name] for name, p in model.named_parameters() if p.requires_grad}


def _train_adapters(directory: str, windows: list[Window]) -> Tensors:
    accelerator = _accelerator(3)
    model = _lora(_from_pretrained(directory))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for window in windows:
        accelerator.backward(model(**window[0][accelerator.process_index]).loss)
        optimizer.step()
        optimizer.zero_grad()
    return _adapters(model, whole_parameters(accelerator, model))


def test_adapters_on_a_model_loaded_into_shards(pool: Pools, tmp_path: Path) -> None:
    """PEFT sizes them by the whole layer; two steps as adapters on a model that was built in memory."""
    pytest.importorskip("peft")  # an extra
    build_lm("llama", tied=True).save_pretrained(tmp_path)
    windows = make_windows(vocab=VOCAB["llama"], steps=2, gas=1, world_size=2, ragged=False)
    want = _lora(build_lm("llama", tied=True))
    optimizer = torch.optim.SGD(want.parameters(), lr=0.1)
    for window in windows:
        for micro in window[0]:
            (want(**micro).loss / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    for seen in pool(2).run(_train_adapters, str(tmp_path), windows):
        assert len(seen) == 8
        assert_same("adapters", seen, _adapters(want, _parameters(want)), 1e-5)
