"""B18: one gradient norm over a tensor-parallel group: what is split counts by parts, what is whole or copied once."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.pool import Pools

TOLERANCE = 1e-6


def _norm_and_clip(norm_type: float, copies: int) -> tuple[float, list[float]]:
    from hfdist.parallel.tensor.collectives import Ranks
    from hfdist.parallel.tensor.gradients import total_norm
    from hfdist.parallel.tensor.layout import Layout, Replicated, Split

    assert dist.group.WORLD is not None
    ranks = Ranks.of(dist.group.WORLD)
    layouts: dict[str, Layout] = {"split": Split(0, copies=copies), "whole": Replicated(partial_gradient=True)}
    own = torch.tensor([[3.0], [4.0]][ranks.rank // copies])
    gradients: dict[str, Tensor] = {"split": own, "whole": torch.tensor([12.0])}
    norm = total_norm(gradients, layouts, ranks, norm_type).item()
    factor = min(1.0, 1.0 / norm)
    return norm, [float(gradients[name] * factor) for name in ("split", "whole")]


@pytest.mark.parametrize(("size", "copies"), [(2, 1), (4, 2)])
@pytest.mark.parametrize(("norm_type", "want"), [(2.0, 13.0), (math.inf, 12.0), (1.0, 19.0), (3.0, 1819 ** (1 / 3))])
def test_every_gradient_counts_once(pool: Pools, size: int, copies: int, norm_type: float, want: float) -> None:
    for rank, (norm, clipped) in enumerate(pool(size).run(_norm_and_clip, norm_type, copies)):
        assert norm == pytest.approx(want, abs=TOLERANCE)
        assert clipped == pytest.approx([(3.0, 4.0)[rank // copies] / want, 12.0 / want], abs=TOLERANCE)


def _empty_part(norm_type: float) -> float:
    from hfdist.parallel.tensor.collectives import Ranks
    from hfdist.parallel.tensor.gradients import total_norm
    from hfdist.parallel.tensor.layout import Split

    assert dist.group.WORLD is not None
    ranks = Ranks.of(dist.group.WORLD)
    layout = Split(0)
    return total_norm({"w": layout.take(torch.tensor([-5.0]), ranks.rank, 2)}, {"w": layout}, ranks, norm_type).item()


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_a_rank_without_a_part(pool: Pools, norm_type: float) -> None:
    assert pool(2).run(_empty_part, norm_type) == pytest.approx([5.0, 5.0])
