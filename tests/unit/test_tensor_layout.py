"""Layouts of tensor parallelism: parts and the whole are each other's inverse, and every element counts once."""

from __future__ import annotations

import pytest
import torch

from hfdist.models.heads import Heads
from hfdist.parallel.tensor.layout import Layout, Replicated, Split

LAYOUTS: list[tuple[Layout, tuple[int, ...], int]] = [
    (Split(0), (61, 5), 2),  # a prime vocabulary
    (Split(0), (61, 5), 4),
    (Split(0), (61,), 3),
    (Split(1), (5, 12), 4),
    (Split(0), (3, 7), 5),  # ranks without a row
    (Split(2), (3, 5, 8), 2),
    (Split(0, (4, 4, 4)), (12, 5), 2),  # fused q, k, v
    (Split(1, (26, 26)), (3, 52), 2),  # gate and up of experts
    (Split(1, (26, 26)), (3, 52, 5), 13),
    (Split(0, copies=2), (12, 5), 4),  # 2 key heads of 6 over 4 ranks
    (Split(0, copies=4), (6,), 4),  # 1 key head over 4 ranks
    (Split(0, copies=3), (14,), 6),
    (Split(0, (24, 6, 6), (1, 4, 4)), (36, 5), 4),  # multi-query, fused
    (Split(0, (24, 12, 12), (1, 2, 2)), (48, 5), 4),
    (Replicated(), (5, 7), 3),
    (Replicated(partial_gradient=True), (5,), 2),
]


@pytest.mark.parametrize(("layout", "shape", "size"), LAYOUTS)
def test_parts_make_the_whole(layout: Layout, shape: tuple[int, ...], size: int) -> None:
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    parts = [layout.take(whole, rank, size) for rank in range(size)]
    assert [tuple(part.shape) for part in parts] == [layout.shape(shape, rank, size) for rank in range(size)]
    assert torch.equal(layout.join(parts), whole)


@pytest.mark.parametrize(("layout", "shape", "size"), LAYOUTS)
def test_every_element_counts_once(layout: Layout, shape: tuple[int, ...], size: int) -> None:
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    counted = [
        part.reshape(-1) for rank in range(size) for part in layout.counted(layout.take(whole, rank, size), rank, size)
    ]
    assert torch.equal(torch.cat(counted).sort().values, whole.reshape(-1))


def test_a_rank_holds_the_rows_of_its_heads() -> None:
    """4 key heads of 3 rows in order of heads: rank r of 8 holds head r // 2."""
    whole = torch.arange(4).repeat_interleave(3)
    assert [Split(0, copies=2).take(whole, rank, 8).tolist() for rank in range(8)] == [[r // 2] * 3 for r in range(8)]


def test_fused_blocks_are_cut_each() -> None:
    q, k, v = torch.arange(0, 8), torch.arange(100, 104), torch.arange(200, 204)
    layout = Split(0, (8, 4, 4), (1, 2, 2))
    parts = [layout.take(torch.cat([q, k, v]), rank, 4).tolist() for rank in range(4)]
    assert parts[0] == [0, 1, 100, 101, 200, 201]
    assert parts[1] == [2, 3, 100, 101, 200, 201]
    assert parts[3] == [6, 7, 102, 103, 202, 203]


@pytest.mark.parametrize(
    ("heads", "dividing"),
    [
        (Heads(9, 3, 64), [1, 3, 9]),
        (Heads(12, 4, 8), [1, 2, 4, 12]),
        (Heads(8, 1, 8), [1, 2, 4, 8]),
        (Heads(24, 6, 4), [1, 2, 3, 6, 12, 24]),
        (Heads(7, 7, 3), [1, 7]),
    ],
)
def test_which_sizes_divide(heads: Heads, dividing: list[int]) -> None:
    assert heads.dividing() == dividing
