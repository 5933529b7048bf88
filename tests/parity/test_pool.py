"""The pool itself: values by rank, every rank's error, stacks of a hang, death, nothing left between calls."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist

from tests.pool import Pool, Pools, RankErrors


def _sum_of_ranks() -> tuple[int, int, float]:
    total = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(total)
    return dist.get_rank(), dist.get_world_size(), total.item()


def _fail(ranks: list[int]) -> int:
    if dist.get_rank() in ranks:
        raise ValueError(f"rank {dist.get_rank()} cannot")
    return dist.get_rank()


def _hang_on_rank_1() -> None:
    if dist.get_rank() == 1:
        threading.Event().wait()


def _die(rank: int) -> None:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.2)


def _leave_traces() -> None:
    os.environ["HFDIST_TRACE"] = "1"
    os.environ["ACCELERATE_USE_CPU"] = "no"
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(dist.get_rank() + 17)
    dist.new_group([0])


def _traces() -> tuple[str | None, str | None, torch.dtype, float, int]:
    groups = len(dist.distributed_c10d._world.pg_map)
    env = os.environ
    return env.get("HFDIST_TRACE"), env["ACCELERATE_USE_CPU"], torch.get_default_dtype(), torch.rand(()).item(), groups


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_values_come_back_by_rank(pool: Pools, world_size: int) -> None:
    """Each rank sees its own rank and the group of `world_size`."""
    total = sum(range(world_size))
    assert pool(world_size).run(_sum_of_ranks) == [(rank, world_size, total) for rank in range(world_size)]


def test_all_errors_are_collected_and_the_pool_recovers(pool: Pools) -> None:
    """Two of three ranks fail: both are reported with a traceback, and the next call works."""
    with pytest.raises(RankErrors) as caught:
        pool(3).run(_fail, [0, 2])
    text = str(caught.value)
    assert "rank 0 cannot" in text
    assert "rank 2 cannot" in text
    assert "in _fail" in text
    assert "rank 1:" not in text
    assert [outcome.value for outcome in pool(3).outcomes(_fail, [])] == [0, 1, 2]


def test_a_hang_ends_with_the_stack(pool: Pools) -> None:
    """A rank that waits for ever fails the call with the line it waits in."""
    start = time.monotonic()
    with pytest.raises(RankErrors, match="_hang_on_rank_1"):
        pool(2).run(_hang_on_rank_1, timeout=1.0)
    assert time.monotonic() - start < 10
    assert pool(2).run(_sum_of_ranks)[1] == (1, 2, 1.0)


def test_a_dead_rank_is_named() -> None:
    """SIGKILL in a rank: the signal is reported, the other rank's outcome too."""
    with Pool(2) as throwaway:
        outcomes = throwaway.outcomes(_die, 1)
        assert outcomes[1].error == "Died"
        assert "SIGKILL" in outcomes[1].text
        assert outcomes[0].error is None


def test_calls_do_not_see_each_other(pool: Pools) -> None:
    """Environment, default dtype, seeds and groups are as at the start in every call."""
    first = pool(2).run(_traces)
    pool(2).run(_leave_traces)
    assert pool(2).run(_traces) == first
    assert first[0][:3] == (None, "true", torch.float32)
    assert first[0][4] == 1
