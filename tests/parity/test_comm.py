"""hfdist's own collectives against what they stand for, on ranks: values, and the bytes they count."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist

from hfdist import comm
from hfdist.measure.wire import record_wire, ring_bytes
from tests.pool import Pools

NUMEL = 10  # elements of a shard
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def _whole(rank: int, world_size: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(world_size * NUMEL, generator=generator, dtype=torch.float64).to(dtype)


def gather_and_reduce() -> list[str]:
    """Differences found on this rank; empty when all is right."""
    group = dist.group.WORLD
    rank, size = dist.get_rank(), dist.get_world_size()
    wrong = []
    for dtype in DTYPES:
        wholes = [_whole(other, size, dtype) for other in range(size)]
        mine = wholes[rank].clone()
        expected = torch.cat([whole[:NUMEL] for whole in wholes])
        output = torch.empty_like(mine)
        with record_wire() as wire:
            comm.all_gather(output, mine[:NUMEL].clone(), group)
        if not torch.equal(output, expected) or wire.total_bytes != ring_bytes("all_gather", output.nbytes, size):
            wrong.append(f"all_gather {dtype}: {wire.total_bytes} bytes")
        # As FSDP2 does it: the shard is already in its place in the output.
        output = torch.empty_like(mine)
        output[rank * NUMEL : (rank + 1) * NUMEL] = mine[:NUMEL]
        comm.all_gather(output, output[rank * NUMEL : (rank + 1) * NUMEL], group)
        if not torch.equal(output, expected):
            wrong.append(f"all_gather in place {dtype}")
        for mean in (False, True):
            reduced = torch.empty(NUMEL, dtype=dtype)
            with record_wire() as wire:
                comm.reduce_scatter(reduced, mine, group, mean=mean)
            exact = torch.stack(wholes).double().sum(0)[rank * NUMEL : (rank + 1) * NUMEL] / (size if mean else 1)
            # Half precision: one rounding of the sum (and one of the division), not one per rank.
            roundings = torch.finfo(dtype).eps * exact.abs().max() * (size if dtype.itemsize >= 4 else 1)
            if (reduced.double() - exact).abs().max() > roundings:
                wrong.append(f"reduce_scatter {dtype} mean={mean}")
            if wire.total_bytes != ring_bytes("reduce_scatter", mine.nbytes, size):
                wrong.append(f"reduce_scatter counted {wire.total_bytes}")
            if not torch.equal(mine, wholes[rank]):
                wrong.append(f"reduce_scatter changed its input ({dtype})")
    return wrong


def many_in_a_row() -> bool:
    """Different sizes one after another: messages of one call must not land in the next."""
    group = dist.group.WORLD
    rank, size = dist.get_rank(), dist.get_world_size()
    for number, numel in itertools.product(range(20), (1, 1000, 3)):
        output = torch.empty(size * numel)
        comm.all_gather(output, torch.full((numel,), float(100 * number + rank)), group)
        if output.view(size, numel)[:, 0].tolist() != [100.0 * number + other for other in range(size)]:
            return False
        reduced = torch.empty(numel)
        comm.reduce_scatter(reduced, torch.full((size * numel,), float(number)), group, mean=False)
        if not torch.equal(reduced, torch.full((numel,), float(number * size))):
            return False
    return True


def exchange_many(direct_bytes: int) -> list[str]:
    """Differences of `parallel.exchange` from what it stands for, shapes with uneven and missing rows among them."""
    from hfdist.parallel import exchange

    kept = exchange.DIRECT_BYTES, exchange.DIRECT_ALL_REDUCE_BYTES
    exchange.DIRECT_BYTES = exchange.DIRECT_ALL_REDUCE_BYTES = direct_bytes
    group = dist.group.WORLD
    rank, size = dist.get_rank(), dist.get_world_size()
    shapes = [(4 * size, 3), (5, 2), (1,), (size + 1, 7, 2), (size,)]
    wrong = []
    try:
        for dtype in DTYPES:
            wholes = [
                [
                    torch.randn(s, generator=torch.Generator().manual_seed(10 * r + i)).to(dtype)
                    for i, s in enumerate(shapes)
                ]
                for r in range(size)
            ]
            means = [torch.stack(grads).double().mean(0) for grads in zip(*wholes, strict=True)]
            # One rounding of each sum and of the division, relative to the largest element.
            tolerance = 4 * torch.finfo(dtype).eps * max(mean.abs().max() for mean in means)
            outputs = [torch.zeros(size, 6, dtype=dtype) for _ in shapes]
            for i, output in enumerate(outputs):
                output[rank] = 10 * rank + i
            exchange.gather(outputs, group, label="")
            for i, output in enumerate(outputs):
                if not torch.equal(output[:, 0].double(), 10.0 * torch.arange(size, dtype=torch.float64) + i):
                    wrong.append(f"gather {dtype} {i}")
            reduced = exchange.ReduceScatter([grad.clone() for grad in wholes[rank]], group, "").run()
            for mine, mean in zip(reduced, means, strict=True):
                chunk = -(-mean.size(0) // size)
                expected = mean[rank * chunk : (rank + 1) * chunk]
                if mine.shape != expected.shape or not torch.allclose(mine.double(), expected, rtol=0, atol=tolerance):
                    wrong.append(f"reduce-scatter {dtype} {tuple(mean.shape)}")
            for mine, mean in zip(
                exchange.AllReduce([g.clone() for g in wholes[rank]], group, "").run(), means, strict=True
            ):
                if mine.shape != mean.shape or not torch.allclose(mine.double(), mean, rtol=0, atol=tolerance):
                    wrong.append(f"all-reduce {dtype} {tuple(mean.shape)}")
    finally:
        exchange.DIRECT_BYTES, exchange.DIRECT_ALL_REDUCE_BYTES = kept
    return wrong


@pytest.mark.parametrize("direct_bytes", [0, 24, 1 << 20], ids=["direct", "mixed", "packed"])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_exchange_of_many(pool: Pools, world_size: int, direct_bytes: int) -> None:
    assert pool(world_size).run(exchange_many, direct_bytes) == [[]] * world_size


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_gather_and_reduce(pool: Pools, world_size: int) -> None:
    assert pool(world_size).run(gather_and_reduce) == [[]] * world_size


@pytest.mark.parametrize("world_size", [2, 4])
def test_calls_do_not_mix(pool: Pools, world_size: int) -> None:
    assert all(pool(world_size).run(many_in_a_row))
