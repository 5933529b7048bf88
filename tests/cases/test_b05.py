"""B05: parameters that get no gradient: in some steps on all ranks, or on some ranks only."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.models import ChoiceToy, SkippingBlocks, seeded
from tests.oracle import Tensors, assert_same, gradients_of, parameters_of
from tests.parity.loops import whole_gradients, whole_parameters
from tests.pool import Pools
from tests.worker import make_accelerator

STAGES = [0, 1, 2, 3]


def _x(rank: int, width: int) -> torch.Tensor:
    return torch.randn(5, width, generator=torch.Generator().manual_seed(rank))


def _optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)


def _prepare(stage: int, model: torch.nn.Module, **options: Any) -> Any:
    from hfdist.plugins import ZeroPlugin

    accelerator = make_accelerator(plugins=[ZeroPlugin(stage=stage, **options)])
    return accelerator, *accelerator.prepare(model, _optimizer(model))


def _by_parity(stage: int) -> list[Tensors]:
    accelerator, model, optimizer = _prepare(stage, seeded(ChoiceToy))
    records = []
    for step in range(4):
        use = ["left"] if step % 2 == 0 else ["right"]
        accelerator.backward(model(_x(accelerator.process_index, 4), use).pow(2).mean())
        records.append(whole_gradients(model))
        optimizer.step()
        optimizer.zero_grad()
        records.append(whole_parameters(accelerator, model))
    return records


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("world_size", [2, 3])
def test_all_ranks_leave_the_same_out(pool: Pools, stage: int, world_size: int) -> None:
    """(i) The step's parity picks a layer: gradients exist where one process has them, no decay where there is none."""
    model = seeded(ChoiceToy)
    optimizer = _optimizer(model)
    want = []
    for step in range(4):
        use = ["left"] if step % 2 == 0 else ["right"]
        optimizer.zero_grad()
        torch.stack([model(_x(rank, 4), use).pow(2).mean() for rank in range(world_size)]).mean().backward()
        want.append(gradients_of(model))
        optimizer.step()
        want.append(parameters_of(model))
    for rank, records in enumerate(pool(world_size).run(_by_parity, stage)):
        for index, (ours, theirs) in enumerate(zip(records, want, strict=True)):
            assert_same(f"rank {rank}, record {index}", ours, theirs, 1e-6)


def _apart(stage: int, kind: str, conditional: bool) -> dict[str, Any]:
    """One step in which rank 0 and the others run different modules."""
    from hfdist.errors import DistributedError

    model, arguments = _differing(kind, dist.get_rank())
    accelerator, model, optimizer = _prepare(stage, model, conditional_modules=conditional)
    before = _local_parameters(optimizer)
    start = time.monotonic()
    result: dict[str, Any] = {"error": ""}
    try:
        output = model(_x(accelerator.process_index, 6 if kind.startswith("block") else 4), arguments)
        result["output"] = output.detach().clone()
        accelerator.backward(output.pow(2).mean())
        if conditional:
            result["gradients"] = whole_gradients(model)
        optimizer.step()
    except DistributedError as error:
        result["error"] = str(error)
    result["seconds"] = time.monotonic() - start
    if not result["error"]:
        result["parameters"] = whole_parameters(accelerator, model)
    else:
        result["steps"] = len(optimizer.state)
        result["unchanged"] = all(torch.equal(ours, before[n]) for n, ours in _local_parameters(optimizer).items())
    return result


def _local_parameters(optimizer: Any) -> dict[int, torch.Tensor]:
    """This rank's part of every parameter, as the optimizer sees it (no communication: the ranks are apart)."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return {n: (p.to_local() if hasattr(p, "to_local") else p).detach().clone() for n, p in enumerate(parameters)}


def _differing(kind: str, rank: int) -> tuple[torch.nn.Module, Any]:
    if kind == "layers":
        return seeded(ChoiceToy), ["left"] if rank == 0 else ["right"]
    if kind == "order":
        return seeded(ChoiceToy), ["left", "right"] if rank == 0 else ["left"]
    index = int(kind.removeprefix("block "))
    return seeded(SkippingBlocks), [index] if rank == 1 else []


KINDS = [("layers", 2), ("layers", 3), ("order", 2), ("block 0", 2), ("block 1", 2), ("block 1", 3), ("block 2", 2)]
NAMES = {
    "layers": (r"\bleft\b", r"\bright\b"),
    "order": (r"\bright\b",),
    "block 0": (r"blocks\.0\b",),
    "block 1": (r"blocks\.1\b",),
    "block 2": (r"blocks\.2\b",),
}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(("kind", "world_size"), KINDS)
def test_ranks_that_differ_are_an_error(pool: Pools, stage: int, kind: str, world_size: int) -> None:
    """(ii) On every rank, before the update, in 10 s, naming modules, ranks and the option."""
    for seen in pool(world_size).run(_apart, stage, kind, False):
        message = seen["error"]
        assert message, "no error"
        assert seen["seconds"] < 10
        assert "conditional_modules" in message
        assert "dp=0" in message
        assert "dp=1" in message
        for name in NAMES[kind]:
            assert re.search(name, message), message
        assert seen["steps"] == 0, "the optimizer has state: it stepped"
        assert seen["unchanged"], "parameters changed"


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(("kind", "world_size"), KINDS)
def test_conditional_modules(pool: Pools, stage: int, kind: str, world_size: int) -> None:
    """With the option: forward unchanged, gradients are means over all ranks (0 where a rank did not run the module),
    and what no rank ran has no gradient and no weight decay."""
    losses, outputs = [], []
    model, _ = _differing(kind, 0)
    for rank in range(world_size):
        _, arguments = _differing(kind, rank)
        output = model(_x(rank, 6 if kind.startswith("block") else 4), arguments)
        outputs.append(output.detach())
        losses.append(output.pow(2).mean())
    torch.stack(losses).mean().backward()
    gradients = gradients_of(model)
    _optimizer(model).step()
    parameters = parameters_of(model)
    for rank, seen in enumerate(pool(world_size).run(_apart, stage, kind, True)):
        assert not seen["error"], seen["error"]
        assert_same(f"rank {rank}: output", {"output": seen["output"]}, {"output": outputs[rank]}, 1e-6)
        assert_same(f"rank {rank}: gradients", seen["gradients"], gradients, 1e-6)
        assert_same(f"rank {rank}: parameters", seen["parameters"], parameters, 1e-6)
    if kind == "layers":
        assert "never.weight" not in gradients
        fresh = parameters_of(seeded(ChoiceToy))
        assert torch.equal(parameters["never.weight"], fresh["never.weight"])
