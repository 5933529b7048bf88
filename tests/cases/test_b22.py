"""B22: fewer key-value heads than ranks: each rank holds the one its query heads use; what cannot be is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.parity.test_tensor import VOCAB, Exact, build, check
from tests.pool import Pools

TOLERANCE = 1e-10


def _ids() -> Tensor:
    return torch.randint(0, VOCAB, (2, 7), generator=torch.Generator().manual_seed(1))


def _logits(family: str, shape: dict[str, Any]) -> tuple[Tensor, tuple[int, ...]]:
    from hfdist.parallel.tensor import apply_tensor_parallel

    model = build(family, **shape)
    assert dist.group.WORLD is not None
    apply_tensor_parallel(model, dist.group.WORLD)
    with torch.no_grad(), Exact():
        logits = model(input_ids=_ids()).logits
    return logits, tuple(model.get_parameter("model.layers.0.self_attn.k_proj.weight").shape)


@pytest.mark.parametrize(("num_heads", "num_kv", "size"), [(4, 2, 4), (4, 1, 2), (4, 1, 4), (8, 2, 4), (6, 2, 2)])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_logits(pool: Pools, family: str, num_heads: int, num_kv: int, size: int) -> None:
    shape = {"num_attention_heads": num_heads, "num_key_value_heads": num_kv, "hidden_size": 5 * num_heads}
    with torch.no_grad(), Exact():
        want = build(family, **shape)(input_ids=_ids()).logits
    for logits, held in pool(size).run(_logits, family, shape):
        assert (logits - want).abs().max() <= TOLERANCE
        assert held == (
            6 * max(num_kv // size, 1),
            5 * num_heads,
        )  # one head of 6 rows where there are fewer heads than ranks


@pytest.mark.parametrize(("num_kv", "size"), [(2, 4), (1, 2), (1, 4)])
@pytest.mark.parametrize("gas", [1, 3])
def test_training(pool: Pools, num_kv: int, size: int, gas: int) -> None:
    """Gradients of copied heads are the sum over the ranks that hold them, and count once in the norm."""
    check(pool, "llama", size=size, tied=False, gas=gas, optimizer="adamw", limit=0.6, num_key_value_heads=num_kv)


def _refusal(shape: dict[str, Any]) -> tuple[str, bool]:
    from hfdist.errors import ConfigError
    from hfdist.parallel.tensor import apply_tensor_parallel

    model = build("llama", **shape)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    assert dist.group.WORLD is not None
    with pytest.raises(ConfigError) as caught:
        apply_tensor_parallel(model, dist.group.WORLD)
    untouched = all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    return str(caught.value), untouched and not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        (
            {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 45},
            ["tp_size=2", "model.layers.0.self_attn", "9 heads", "3 key-value heads", "1, 3, 9"],
        ),
        (
            {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 30},
            ["tp_size=2", "model.layers.0.self_attn", "6 heads", "3 key-value heads", "1, 3, 6"],
        ),
        ({"intermediate_size": 53}, ["tp_size=2", "model.layers.0.mlp.gate_proj", "53", "1, 53"]),
    ],
)
def test_what_does_not_divide_is_refused(pool: Pools, shape: dict[str, Any], words: list[str]) -> None:
    for message, untouched in pool(2).run(_refusal, shape):
        assert untouched
        assert [word for word in words if word not in message] == []
