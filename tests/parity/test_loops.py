"""Unmodified user loops, each equal to one process at every stage."""

from __future__ import annotations

import functools
import time

import pytest
import torch
import torch.distributed as dist

from tests.models import VOCAB, Batch, Family, build_lm, concatenate, make_windows
from tests.oracle import assert_same
from tests.parity import user_loops
from tests.parity.user_loops import EVEN_LOOPS, RAGGED_LOOPS, Loop, OneProcess, PlainLog, Records, ShardedLog
from tests.pool import Pools
from tests.worker import make_accelerator

TOLERANCE = 1e-10
STEPS = 4


def _batches(family: Family, world_size: int, ragged: bool) -> list[list[Batch]]:
    """By step, then by rank."""
    windows = make_windows(vocab=VOCAB[family], steps=STEPS, gas=1, world_size=world_size, ragged=ragged)
    return [window[0] for window in windows]


def _run(loop: str, family: Family, stage: int, batches: list[list[Batch]]) -> Records:
    from hfdist.plugins import ZeroPlugin

    accelerator = make_accelerator(plugins=[ZeroPlugin(stage=stage)])
    model = build_lm(family, tied=True, dtype=torch.float64)
    log = ShardedLog(accelerator, model)
    getattr(user_loops, loop)(accelerator, model, [step[accelerator.process_index] for step in batches], log)
    return log.records if accelerator.process_index < 2 else []


@functools.lru_cache(maxsize=64)
def _oracle(loop: str, family: Family, world_size: int, ragged: bool) -> Records:
    model = build_lm(family, tied=True, dtype=torch.float64)
    log = PlainLog(model)
    batches = [concatenate(step) for step in _batches(family, world_size, ragged)]
    getattr(user_loops, loop)(OneProcess(), model, batches, log)
    return log.records


def _check(pools: Pools, loop: Loop, stage: int, ragged: bool) -> None:
    # Odd stages with Llama on 2 ranks, even ones with GPT-2 on 3.
    family: Family = "llama" if stage % 2 else "gpt2"
    world_size = 2 if stage % 2 else 3
    runs = pools(world_size).run(_run, loop.__name__, family, stage, _batches(family, world_size, ragged))
    want = _oracle(loop.__name__, family, world_size, ragged)
    assert len(want) >= STEPS // 2
    for rank in range(2):
        assert len(runs[rank]) == len(want), f"rank {rank} logged {len(runs[rank])} times, one process {len(want)}"
        for index, (ours, theirs) in enumerate(zip(runs[rank], want, strict=True)):
            assert_same(f"rank {rank}, record {index} of {loop.__name__}", ours, theirs, TOLERANCE)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("loop", RAGGED_LOOPS, ids=lambda loop: loop.__name__)
def test_loop_equals_one_process(pool: Pools, loop: Loop, stage: int) -> None:
    """Ragged batches, labels given to the model."""
    _check(pool, loop, stage, ragged=True)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("loop", EVEN_LOOPS, ids=lambda loop: loop.__name__)
def test_loop_with_its_own_loss_equals_one_process(pool: Pools, loop: Loop, stage: int) -> None:
    """Even batches, a loss of the user's own."""
    _check(pool, loop, stage, ragged=False)


def _skip_alone(stage: int, batches: list[list[Batch]]) -> str:
    from hfdist.errors import DistributedError
    from hfdist.plugins import ZeroPlugin

    accelerator = make_accelerator(plugins=[ZeroPlugin(stage=stage)])
    model = build_lm("llama", tied=True)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    rank = dist.get_rank()
    start = time.monotonic()
    try:
        for index, step in enumerate(batches):
            loss = model(**step[rank]).loss
            if index == 1 and rank == 1:
                continue  # this rank alone found its loss not good enough
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    except DistributedError as error:
        return f"{time.monotonic() - start:.0f} {error}"
    return "no error"


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_rank_that_skips_alone_is_an_error(pool: Pools, stage: int) -> None:
    """One rank leaves a batch out that the other trains on: both end with an error within 10 s, none hangs."""
    for text in pool(2).run(_skip_alone, stage, _batches("llama", 2, True)):
        seconds, _, message = text.partition(" ")
        assert seconds.isdigit(), text
        assert int(seconds) <= 10
        assert "dp=0" in message
        assert "dp=1" in message
