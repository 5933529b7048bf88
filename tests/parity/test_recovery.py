"""A step that cannot be finished: out of memory on one rank, a rank that dies, a loss that is not finite."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from typing import Any

import pytest
import torch

from tests.conftest import Pools
from tests.limits import give_memory_back, limit_data
from tests.pool import Pool
from tests.worker import make_accelerator

# 19 M parameters in 8 blocks, 75 MB: large enough that a limit in megabytes means something.
HIDDEN, BLOCKS = 512, 8
MEGABYTE = 2**20


def _big_model() -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=BLOCKS,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config)


def _batch(rank: int) -> torch.Tensor:
    return torch.randint(0, 61, (2, 16), generator=torch.Generator().manual_seed(rank))


def _train_in_little_memory(
    stage: int, escalate: bool, headroom: int | None, state_first: bool = False
) -> dict[str, Any]:
    """`state_first`: a step without the limit, so that the optimizer's state exists when memory runs out."""
    from hfdist import ZeroPlugin

    give_memory_back()
    accelerator = make_accelerator(plugins=[ZeroPlugin(stage=stage, escalate_on_oom=escalate)])
    rank = accelerator.process_index
    model = _big_model()
    # Little momentum: what a rank needs beside it at its peak, 85 MB at stage 0, is then far from what stage 3 needs.
    some, others = list(model.model.layers[:2].parameters()), list(model.model.layers[2:].parameters())
    rest = [p for name, p in model.named_parameters() if not name.startswith("model.layers")]
    groups = [{"params": some, "momentum": 0.9}, {"params": [*others, *rest]}]
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(groups, lr=0.1))

    def step(batch: torch.Tensor) -> float:
        loss = model(input_ids=batch, labels=batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return accelerator.reduce(loss.detach(), "mean").item()

    # glibc aborts a process in which a thread's first use of a library finds no memory for its thread-local data, so
    # every thread that the limited steps need does its first work here; nothing is kept of it.
    accelerator.backward(model(input_ids=_batch(rank), labels=_batch(rank)).loss)
    optimizer.zero_grad()
    accelerator.gather_for_metrics(torch.zeros(1))
    before = {n: t.clone() for n, t in accelerator.get_state_dict(model).items()}
    losses, error = [], ""
    try:
        if state_first:
            losses = [accelerator.run_step(step, _batch(rank))]
        with limit_data(headroom) if headroom is not None and rank == 1 else contextlib.nullcontext():
            losses += [accelerator.run_step(step, _batch(rank)) for _ in range(3)]
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    after = accelerator.get_state_dict(model)
    changed = any(not torch.equal(before[n], after[n]) for n in before)
    return {"losses": losses, "stage": accelerator.zero_stage, "error": error, "changed": changed}


def test_running_out_of_memory_raises_the_stage_on_all_ranks_and_keeps_the_curve() -> None:
    with Pool(2) as ranks:
        want = ranks.run(_train_in_little_memory, 0, True, None, True, timeout=200)
        got = ranks.run(_train_in_little_memory, 0, True, 50 * MEGABYTE, True, timeout=200)
    assert [r["error"] for r in got] == ["", ""]
    assert want[0]["stage"] == 0
    assert got[0]["stage"] == got[1]["stage"] > 0
    assert got[0]["losses"] == pytest.approx(want[0]["losses"], abs=1e-5)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_without_leave_to_raise_the_stage_the_error_says_what_would_fit(stage: int) -> None:
    with Pool(2) as ranks:
        got = ranks.run(_train_in_little_memory, stage, False, 30 * MEGABYTE, timeout=200)
    for result in got:
        assert f"out of memory at stage {stage}" in result["error"]
        assert "no parameter was updated" in result["error"]
        assert "stage 3 holds" in result["error"]
        assert not result["changed"]


def test_at_stage_3_the_error_says_what_is_left_to_do() -> None:
    with Pool(2) as ranks:
        got = ranks.run(_train_in_little_memory, 3, True, 10 * MEGABYTE, timeout=200)
    for result in got:
        assert "out of memory at stage 3" in result["error"]
        assert "smaller batch" in result["error"]


def _die_in_a_step(stage: int, victim: int, where: str) -> str:
    from hfdist import ZeroPlugin

    accelerator = make_accelerator(plugins=[ZeroPlugin(stage=stage)])
    model = _big_model()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    batch = _batch(0)
    for number in range(3):
        if number == 1 and accelerator.process_index == victim:
            if where == "forward":
                model.model.layers[1].register_forward_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
            else:  # after the ranks agreed on a collective, before its data
                accelerator.engine.meeting._carry_out = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        started = time.monotonic()
        try:
            accelerator.backward(model(input_ids=batch, labels=batch).loss)
        except Exception as error:
            return f"{time.monotonic() - started:.0f} s {type(error).__name__}: {error}"
        optimizer.step()
        optimizer.zero_grad()
    return "finished"


@pytest.mark.parametrize(
    ("stage", "victim", "where"),
    [(0, 1, "forward"), (1, 2, "forward"), (2, 0, "forward"), (3, 1, "forward"), (0, 2, "data"), (3, 0, "data")],
)
def test_a_killed_rank_ends_the_others_with_an_error_that_names_it(stage: int, victim: int, where: str) -> None:
    with Pool(3) as ranks:
        outcomes = ranks.outcomes(_die_in_a_step, stage, victim, where, timeout=60)
    for outcome in outcomes:
        if outcome.rank == victim:
            assert outcome.error == "Died"
            continue
        assert outcome.error is None, outcome.report()
        seconds, text = outcome.value.split(" s ", 1)
        assert int(seconds) < 30
        assert text.startswith("LostPartner")
        assert f"dp={outcome.rank} lost a partner in step 1" in text


def _loss_of(rank_with_nan: int, stage: int, setting: str) -> tuple[str, bool]:
    from hfdist import ZeroPlugin

    env = {"HFDIST_NONFINITE_LOSS": setting}
    accelerator = make_accelerator(env=env, plugins=[ZeroPlugin(stage=stage)])
    torch.manual_seed(0)
    model = torch.nn.Linear(5, 3)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    before = accelerator.get_state_dict(model)
    loss = model(torch.ones(2, 5)).sum()
    accelerator.backward(loss * float("nan") if accelerator.process_index == rank_with_nan else loss)
    try:
        optimizer.step()
        text = ""
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    after = accelerator.get_state_dict(model)
    return text, all(torch.equal(before[n], after[n]) for n in before)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_loss_that_is_not_finite_stops_all_ranks_before_the_update(pool: Pools, stage: int) -> None:
    for text, unchanged in pool(2).run(_loss_of, 1, stage, "raise"):
        assert "a loss that is not finite on dp=1 in step 0" in text
        assert unchanged
    for text, unchanged in pool(2).run(_loss_of, 1, stage, "allow"):
        assert text == ""
        assert not unchanged
