"""B19: norms on local heads get their gradient from all ranks exactly once, whatever the accumulation."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from tests.models import Recipe, Window, make_windows
from tests.oracle import Tensors, assert_same, parameters_of, train
from tests.parity.grids import GridCell, check_grid
from tests.parity.test_tensor import VOCAB, Exact, build
from tests.pool import Pools

TOLERANCE = 1e-10
SHAPE: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8}


def _train(windows: list[Window], shape: dict[str, Any]) -> tuple[Tensors, Tensors]:
    """(whole parameters, this rank's own copies of what is whole on every rank)."""
    from hfdist.parallel.tensor import Replicated, apply_tensor_parallel

    model = build("qwen3", **shape)
    assert dist.group.WORLD is not None
    handle = apply_tensor_parallel(model, dist.group.WORLD)
    (optimizer,) = Recipe("sgd", lr=0.1).build(model)
    with Exact():
        for window in windows:
            for micro in window:
                (model(**micro[0]).loss / len(window)).backward()
            handle.reduce_partial_gradients()
            optimizer.step()
            optimizer.zero_grad()
    own: dict[str, Tensor] = {
        name: p.detach().clone() for name, p in model.named_parameters() if isinstance(handle.layouts[name], Replicated)
    }
    handle.undo()
    return parameters_of(model), own


@pytest.mark.parametrize("gas", [1, 2, 3, 4])
@pytest.mark.parametrize("shape", [SHAPE, {**SHAPE, "num_key_value_heads": 1}], ids=["heads", "one-kv-head"])
def test_query_and_key_norms(pool: Pools, gas: int, shape: dict[str, Any]) -> None:
    windows = make_windows(vocab=VOCAB, steps=5, gas=gas, world_size=1)
    with Exact():
        want = train(build("qwen3", **shape), windows, optimizers=Recipe("sgd", lr=0.1).build, weighting="mean")
    results = pool(2).run(_train, windows, shape)
    for whole, _ in results:
        assert_same("after 5 steps", whole, want[-1].parameters, TOLERANCE)
    (_, first), (_, second) = results
    assert any("q_norm" in name for name in first)
    assert_same("on both ranks", first, second, 0.0)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_at_every_stage(pool: Pools, stage: int) -> None:
    """Through `accelerator.prepare`, three micro-steps: stages 2 and 3 reduce in each of them."""
    check_grid(pool(2), GridCell(tp=2, stage=stage, family="qwen3", gas=3, optimizer="sgd"))
