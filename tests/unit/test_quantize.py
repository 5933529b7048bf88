"""Weights as int8: how far a value may move, and what must come back exactly."""

from __future__ import annotations

import pytest
import torch

from hfdist.parallel import quantize
from hfdist.plan.sizes import INT8_BLOCK, packed_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("numel", [1, 255, 256, 257, 1009])
def test_a_value_moves_by_at_most_half_a_step(numel: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(numel)
    values = torch.randn(numel, generator=generator).mul(torch.rand(numel, generator=generator).mul(3)).to(dtype)
    packed = quantize.pack(values)
    assert packed.dtype == torch.uint8
    assert packed.numel() == packed_bytes(numel)
    out = torch.empty(numel, dtype=torch.float32)
    quantize.unpack(packed, out)
    for start in range(0, numel, INT8_BLOCK):
        block = values[start : start + INT8_BLOCK].float()
        step = block.abs().max() / 127
        assert (out[start : start + INT8_BLOCK] - block).abs().max() <= step / 2 * 1.0001


def test_what_int8_can_hold_comes_back() -> None:
    values = torch.tensor([0.0, 127.0, -127.0, 5.0, -3.0])
    for expected in (values, torch.zeros(5), torch.full((5,), -7.25)):
        out = torch.empty(5)
        quantize.unpack(quantize.pack(expected), out)
        assert torch.equal(out, expected)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_is_not_hidden(value: float) -> None:
    values = torch.ones(300)
    values[7] = value
    out = torch.empty(300)
    quantize.unpack(quantize.pack(values), out)
    assert not out[:256].isfinite().any()
    assert torch.equal(out[256:], torch.ones(44))
