"""Whole state out of and into sharded models: state dicts, gathered parameters, HF export, save and load, replicas."""

from __future__ import annotations

import hashlib
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from tests.models import VOCAB, Family, Recipe, Window, build_lm, make_windows
from tests.oracle import Tensors, assert_same, assert_steps, parameters_of, train
from tests.parity.cells import assert_ranks_agree
from tests.parity.loops import CLIP, RankRun, digest, run_windows, whole_parameters
from tests.pool import Pools
from tests.worker import make_accelerator

STAGES = [0, 1, 2, 3]


def _prepared(stage: int, family: Family = "llama", *, tied: bool = True, seed: int = 7, **kwargs: Any) -> Any:
    """(accelerator, model, optimizer) after one step, so that gathered copies have been made and freed."""
    from hfdist.plugins import ZeroPlugin

    accelerator = make_accelerator(plugins=[ZeroPlugin(stage=stage)], **kwargs)
    model = build_lm(family, tied=tied, seed=seed)
    return accelerator, *accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))


def _step(accelerator: Any, model: Any, optimizer: Any) -> None:
    vocab = model.config.vocab_size
    batch = make_windows(vocab=vocab, steps=1, gas=1, world_size=2, seed=9)[0][0][dist.get_rank() % 2]
    accelerator.backward(model(**batch).loss)
    optimizer.step()
    optimizer.zero_grad()


def _state_dicts(stage: int, family: Family, tied: bool) -> dict[str, Any]:
    accelerator, model, optimizer = _prepared(stage, family, tied=tied)
    before = accelerator.get_state_dict(model)
    _step(accelerator, model, optimizer)
    after = accelerator.get_state_dict(model)
    kinds = {type(value).__name__ for value in after.values()}
    unwrapped = accelerator.unwrap_model(model)
    return {
        "before": before,
        "kinds": kinds,
        "digest": digest(after),
        "same": unwrapped is model,
    }


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(("family", "tied", "world_size"), [("llama", False, 2), ("gpt2", True, 3)])
def test_state_dict_is_whole_on_every_rank(
    pool: Pools, stage: int, family: Family, tied: bool, world_size: int
) -> None:
    """Names and bits of the model that was prepared; plain tensors; the same on all ranks, after a step too."""
    want = build_lm(family, tied=tied).state_dict()
    ranks = pool(world_size).run(_state_dicts, stage, family, tied)
    for rank, seen in enumerate(ranks):
        assert_same(f"rank {rank}", seen["before"], want, 0.0)
        assert list(seen["before"]) == list(want)
        assert seen["kinds"] == {"Tensor"}
        assert seen["digest"] == ranks[0]["digest"]
        assert seen["same"]


def _gather(stage: int, modifier_rank: int | None) -> dict[str, Any]:
    accelerator, model, optimizer = _prepared(stage)
    _step(accelerator, model, optimizer)
    whole = whole_parameters(accelerator, model)
    seen: Tensors = {}
    with accelerator.gathered_parameters(model, modifier_rank=modifier_rank):
        for name, parameter in model.named_parameters():
            assert not isinstance(parameter, DTensor), f"{name} is not plain inside gathered_parameters"
            seen[name] = parameter.detach().clone()
        writer = modifier_rank is None or dist.get_rank() == modifier_rank
        with torch.no_grad():
            if writer:
                model.model.norm.weight.fill_(0.5)
                model.model.embed_tokens.weight[3] = 2.0
            elif modifier_rank is not None:
                model.model.norm.weight.fill_(-9.0)
    after = whole_parameters(accelerator, model)
    _step(accelerator, model, optimizer)  # and training goes on
    return {"whole": whole, "seen": seen, "after": after, "last": digest(whole_parameters(accelerator, model))}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("modifier_rank", [None, 1])
def test_gathered_parameters(pool: Pools, stage: int, modifier_rank: int | None) -> None:
    """Whole plain parameters inside; what is written stays, from the modifier's rank only when one is named."""
    ranks = pool(3).run(_gather, stage, modifier_rank)
    for rank, result in enumerate(ranks):
        assert_same(f"rank {rank}: inside", result["seen"], result["whole"], 0.0)
        want = {name: value.clone() for name, value in ranks[0]["whole"].items()}
        want["model.norm.weight"].fill_(0.5)
        want["model.embed_tokens.weight"][3] = 2.0
        assert_same(f"rank {rank}: after", result["after"], want, 0.0)
        assert result["last"] == ranks[0]["last"]


def _save_model(stage: int, family: Family, tied: bool, directory: str, by: str) -> Tensors:
    accelerator, model, optimizer = _prepared(stage, family, tied=tied)
    _step(accelerator, model, optimizer)
    if by == "save_model":
        accelerator.save_model(model, directory)
    elif by == "save_pretrained with a state dict":
        unwrapped = accelerator.unwrap_model(model)
        state = accelerator.get_state_dict(model)
        unwrapped.save_pretrained(
            directory, is_main_process=accelerator.is_main_process, save_function=accelerator.save, state_dict=state
        )
    else:
        accelerator.unwrap_model(model).save_pretrained(directory, is_main_process=accelerator.is_main_process)
    accelerator.wait_for_everyone()
    before = whole_parameters(accelerator, model)
    _step(accelerator, model, optimizer)  # saving leaves a model that trains
    return before


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("by", ["save_model", "save_pretrained", "save_pretrained with a state dict"])
def test_export_opens_in_plain_from_pretrained(pool: Pools, tmp_path: Path, stage: int, by: str) -> None:
    """Bit for bit, tied and untied, nothing missing or unexpected, without hfdist."""
    for family, tied in (("llama", False), ("llama", True), ("gpt2", True)):
        directory = tmp_path / f"{family}-{tied}"
        want = pool(2).run(_save_model, stage, family, tied, str(directory), by)[0]
        assert list(directory.glob("*.safetensors")), sorted(directory.iterdir())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loaded, info = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
        assert not info["missing_keys"]
        assert not info["unexpected_keys"]
        assert_same(f"{family} tied={tied}", parameters_of(loaded), want, 0.0)
        head, embedding = loaded.get_output_embeddings().weight, loaded.get_input_embeddings().weight
        assert (head is embedding) == tied


def _schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 20)


def _train_save(
    stage: int,
    replicas: int,
    optimizer: str,
    amp: dict[str, Any] | None,
    windows: list[Window],
    directory: str,
    part: str,
) -> tuple[RankRun, list[float], torch.Tensor]:
    """part "first": the first half, save, then the second half. "second": another seed, load, the second half."""
    from hfdist.plugins import AmpPlugin, ZeroPlugin

    plugins: list[Any] = [ZeroPlugin(stage=stage, dp_replicate_size=replicas)]
    if amp is not None:
        plugins.append(AmpPlugin(**amp))
    accelerator = make_accelerator(plugins=plugins)
    model = build_lm("llama", tied=True, seed=7 if part == "first" else 99)
    optimizers = Recipe(optimizer).build(model)  # type: ignore[arg-type]
    schedulers = [_schedule(o) for o in optimizers]
    model, *prepared = accelerator.prepare(model, *optimizers, *schedulers)
    optimizers, schedulers = prepared[: len(optimizers)], prepared[len(optimizers) :]
    scales = []

    def between(index: int) -> None:
        scales.append(1.0 if accelerator.scaler is None else accelerator.scaler.get_scale())

    half = len(windows) // 2
    if part == "first":
        torch.manual_seed(dist.get_rank() + 5)
        run_windows(accelerator, model, optimizers, windows[:half], clip=CLIP, schedulers=schedulers)
        accelerator.save_state(directory)
    else:
        accelerator.load_state(directory)
    drawn = torch.rand(3)
    run = run_windows(accelerator, model, optimizers, windows[half:], clip=CLIP, schedulers=schedulers, between=between)
    return run, scales, drawn


@pytest.mark.parametrize(
    ("world_size", "stage", "replicas", "optimizer", "amp"),
    [
        (2, 0, 1, "adamw", None),
        (3, 1, 1, "sgd", None),
        (2, 2, 1, "adafactor", None),
        (3, 3, 1, "adamw", None),
        (2, 3, 1, "muon", None),
        (4, 2, 2, "adamw", None),
        (2, 3, 1, "adamw", {"dtype": "fp16", "init_scale": 2.0**20, "growth_interval": 2}),
        (2, 1, 1, "adamw", {"dtype": "bf16"}),
    ],
)
def test_save_state_and_load_state(
    pool: Pools, tmp_path: Path, world_size: int, stage: int, replicas: int, optimizer: str, amp: dict[str, Any] | None
) -> None:
    """Save, go on; start anew from another seed, load, go on: the same bits, rates, scales and random numbers."""
    windows = make_windows(vocab=61, steps=6, gas=1, world_size=world_size, ragged=amp is None)
    arguments = (stage, replicas, optimizer, amp, windows, str(tmp_path / "state"))
    first = pool(world_size).run(_train_save, *arguments, "first")
    second = pool(world_size).run(_train_save, *arguments, "second")
    for rank in range(world_size):
        (run, scales, drawn), (again, scales_again, drawn_again) = first[rank], second[rank]
        assert scales == scales_again
        assert torch.equal(drawn, drawn_again), f"random stream of rank {rank}"
        assert run.digest == again.digest, f"parameters of rank {rank}"
        assert str(run.norms) == str(again.norms)
    for ours, theirs in zip(second[0][0].steps, first[0][0].steps, strict=True):
        assert ours.lrs == theirs.lrs
        assert ours.skipped == theirs.skipped


def _hybrid(stage: int, windows: list[Window]) -> tuple[RankRun, dict[str, str]]:
    """Train with 2 replicas; also a hash of each parameter's local bytes."""
    from hfdist.plugins import ZeroPlugin

    accelerator = make_accelerator(
        plugins=[ZeroPlugin(stage=stage, dp_replicate_size=2)], gradient_accumulation_steps=len(windows[0])
    )
    model = build_lm("llama", tied=True, dtype=torch.float64)
    model, *optimizers = accelerator.prepare(model, *Recipe("adamw").build(model))
    run = run_windows(accelerator, model, optimizers, windows, clip=CLIP)
    hashes = {}
    for name, parameter in model.named_parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        hashes[name] = hashlib.sha256(local.detach().numpy().tobytes()).hexdigest()
        hashes[name + " numel"] = str(local.numel())
    return run, hashes


@pytest.mark.parametrize("gas", [1, 3])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_hybrid_sharding(pool: Pools, stage: int, gas: int) -> None:
    """4 ranks, 2 replicas: one process's steps; halves, the same bits on ranks 0, 2 and 1, 3."""
    windows = make_windows(vocab=VOCAB["llama"], steps=5, gas=gas, world_size=4)
    results = pool(4).run(_hybrid, stage, windows)
    runs = [run for run, _ in results]
    model = build_lm("llama", tied=True, dtype=torch.float64)
    assert_steps(runs[0].steps, train(model, windows, optimizers=Recipe("adamw").build, clip=CLIP), tolerance=1e-10)
    assert_ranks_agree(runs)
    hashes = [h for _, h in results]
    assert hashes[0] == hashes[2]
    assert hashes[1] == hashes[3]
    names = [name for name in hashes[0] if name.endswith(" numel")]
    assert sum(int(hashes[0][n]) + int(hashes[1][n]) for n in names) == sum(p.numel() for p in model.parameters())
    assert int(hashes[0]["model.embed_tokens.weight numel"]) == 31 * 35  # 61 rows over 2 shards
