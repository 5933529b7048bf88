"""The rest of accelerate's face: clipping by config and by other norms, one process, data, copies, compiled blocks."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from tests.models import VOCAB, Recipe, Window, build_lm, concatenate, make_windows
from tests.oracle import assert_same, gradients_of, train
from tests.parity.cells import check_cell
from tests.parity.loops import CLIP, Cell, digest, whole_gradients, whole_parameters
from tests.pool import Pools
from tests.worker import make_accelerator

STAGES = [0, 1, 2, 3]


@pytest.mark.parametrize("stage", STAGES)
def test_one_process_is_the_same_code(pool: Pools, stage: int) -> None:
    """A world of one rank at each stage: accumulation, clipping, 1e-10 in fp64."""
    check_cell(pool(1), Cell(stage, 3, True, "adamw", 1, "llama", True, "fp64"))


def _train_clipped_by_config(stage: int, optimizer: str, gas: int, windows: list[Window]) -> Any:
    from hfdist.plugins import ZeroPlugin

    accelerator = make_accelerator(
        plugins=[ZeroPlugin(stage=stage)], gradient_accumulation_steps=gas, env={"HFDIST_GRADIENT_CLIPPING": str(CLIP)}
    )
    model = build_lm("gpt2", tied=True, dtype=torch.float64)
    model, *optimizers = accelerator.prepare(model, *Recipe(optimizer, lr=1e-3).build(model))  # type: ignore[arg-type]
    records = []
    for window in windows:
        for micro in window:
            with accelerator.accumulate(model):
                accelerator.backward(model(**micro[accelerator.process_index]).loss)
                for each in optimizers:
                    each.step()
                for each in optimizers:
                    each.zero_grad()
        records.append(whole_parameters(accelerator, model))
    return records


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(("optimizer", "gas"), [("sgd", 1), ("adamw", 3), ("muon", 1)])
def test_clipping_by_config(pool: Pools, stage: int, optimizer: str, gas: int) -> None:
    """Asked for in the configuration, never called by the script: by the norm of all gradients, two optimizers too."""
    recipe = Recipe(optimizer, lr=1e-3)  # type: ignore[arg-type]
    windows = make_windows(vocab=VOCAB["gpt2"], steps=3, gas=gas, world_size=2)
    want = train(build_lm("gpt2", tied=True, dtype=torch.float64), windows, optimizers=recipe.build, clip=CLIP)
    assert want[0].norm > 2 * CLIP
    for rank, records in enumerate(pool(2).run(_train_clipped_by_config, stage, optimizer, gas, windows)):
        for step, (ours, theirs) in enumerate(zip(records, want, strict=True)):
            assert_same(f"rank {rank}, step {step}", ours, theirs.parameters, 1e-9)


NORM_TYPES = [1.0, 2.0, 3.0, math.inf]


def _norms(stage: int, window: Window) -> list[tuple[float, float, Any]]:
    """(accelerator's norm, torch's norm, clipped gradients) per norm type; and of half of the parameters."""
    from hfdist.plugins import ZeroPlugin

    accelerator = make_accelerator(plugins=[ZeroPlugin(stage=stage)])
    model = build_lm("llama", tied=True, dtype=torch.float64)
    model = accelerator.prepare(model)
    accelerator.backward(model(**window[0][accelerator.process_index]).loss)
    kept = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    seen = []
    for norm_type in NORM_TYPES:
        for parameters in (list(model.parameters()), list(model.parameters())[::2]):
            measured = torch.nn.utils.clip_grad_norm_(parameters, 1e9, norm_type)
            clipped = accelerator.clip_grad_norm_(parameters, CLIP, norm_type)
            seen.append((clipped.item(), measured.item(), whole_gradients(model)))
            for name, parameter in model.named_parameters():
                parameter.grad = kept[name].clone()
    return seen


@pytest.mark.parametrize("stage", STAGES)
def test_other_norms_and_parts(pool: Pools, stage: int) -> None:
    """1-, 2-, 3- and max-norm, of all parameters and of every second one: value and clipped gradients."""
    window = make_windows(vocab=VOCAB["llama"], steps=1, gas=1, world_size=3)[0]
    model = build_lm("llama", tied=True, dtype=torch.float64)
    model(**concatenate(window[0])).loss.backward()
    kept = gradients_of(model)
    want = []
    for norm_type in NORM_TYPES:
        for parameters in (list(model.parameters()), list(model.parameters())[::2]):
            norm = torch.nn.utils.clip_grad_norm_(parameters, CLIP, norm_type).item()
            want.append((norm, gradients_of(model)))
            for name, parameter in model.named_parameters():
                parameter.grad = kept[name].clone()
    for rank, seen in enumerate(pool(3).run(_norms, stage, window)):
        for index, ((clipped, measured, gradients), (norm, clipped_gradients)) in enumerate(
            zip(seen, want, strict=True)
        ):
            assert clipped == pytest.approx(norm, rel=1e-12), index
            assert measured == pytest.approx(norm, rel=1e-12), index
            assert_same(f"rank {rank}, norm {index}", gradients, clipped_gradients, 1e-10)


def _metrics(stage: int, size: int) -> tuple[list[int], list[int], float]:
    from hfdist.plugins import ZeroPlugin

    accelerator = make_accelerator(plugins=[ZeroPlugin(stage=stage)])
    model, loader = accelerator.prepare(torch.nn.Linear(1, 1), DataLoader(list(range(size)), batch_size=4))
    gathered: list[int] = []
    local: list[int] = []
    with torch.no_grad():
        for batch in loader:
            model(batch.float().unsqueeze(-1))
            local += batch.tolist()
            gathered += accelerator.gather_for_metrics(batch).tolist()
    total = accelerator.reduce(torch.tensor(float(accelerator.process_index + 1)), reduction="sum").item()
    return gathered, local, total


@pytest.mark.parametrize(("stage", "world_size", "size"), [(3, 2, 19), (0, 3, 19), (2, 3, 24)])
def test_metrics_see_each_sample_once(pool: Pools, stage: int, world_size: int, size: int) -> None:
    """An odd number of samples: each once in `gather_for_metrics`, in order; `reduce` sums over ranks."""
    for gathered, _, total in pool(world_size).run(_metrics, stage, size):
        assert gathered == list(range(size))
        assert total == sum(range(1, world_size + 1))


def _copy(stage: int) -> dict[str, Any]:
    from hfdist.plugins import ZeroPlugin

    accelerator = make_accelerator(plugins=[ZeroPlugin(stage=stage)])
    model = build_lm("llama", tied=True)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    batch = make_windows(vocab=61, steps=1, gas=1, world_size=1)[0][0][0]
    accelerator.backward(model(**batch).loss)
    optimizer.step()
    optimizer.zero_grad()
    before = digest(whole_parameters(accelerator, model))
    result: dict[str, Any] = {"before": before, "error": "", "copy": ""}
    try:
        twin = copy.deepcopy(model)
    except Exception as error:
        result["error"] = f"{type(error).__name__}: {error}"
    else:
        result["copy"] = digest({name: p.detach() for name, p in twin.named_parameters()})
    accelerator.backward(model(**batch).loss)
    optimizer.step()
    result["after"] = digest(whole_parameters(accelerator, model))
    return result


@pytest.mark.parametrize("stage", STAGES)
def test_deepcopy_works_or_is_refused_by_name(pool: Pools, stage: int) -> None:
    """A copy has the whole weights, or the error says what to call; the model trains on."""
    for seen in pool(2).run(_copy, stage):
        if seen["error"]:
            assert "deepcopy" in seen["error"]
            assert "get_state_dict" in seen["error"] or "gathered_parameters" in seen["error"]
        else:
            assert seen["copy"] == seen["before"]
        assert seen["after"] != seen["before"]


def _compiled(stage: int, windows: list[Window]) -> Any:
    from hfdist.plugins import ZeroPlugin

    accelerator = make_accelerator(plugins=[ZeroPlugin(stage=stage)], dynamo_backend="aot_eager")
    model = build_lm("llama", tied=True)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    records = []
    for window in windows:
        accelerator.backward(model(**window[0][dist.get_rank()]).loss)
        records.append(whole_gradients(model))
        optimizer.step()
        optimizer.zero_grad()
        records.append(whole_parameters(accelerator, model))
    return records


def test_compiled_blocks(pool: Pools) -> None:
    """`dynamo_backend` compiles block by block: the same numbers."""
    windows = make_windows(vocab=61, steps=2, gas=1, world_size=2, ragged=False)
    model = build_lm("llama", tied=True)
    steps = train(model, windows, optimizers=lambda m: [torch.optim.AdamW(m.parameters(), lr=1e-3)])
    want = [record for step in steps for record in (step.gradients, step.parameters)]
    for rank, records in enumerate(pool(2).run(_compiled, 3, windows, timeout=200)):
        for index, (ours, theirs) in enumerate(zip(records, want, strict=True)):
            assert_same(f"rank {rank}, record {index}", ours, theirs, 1e-5)
