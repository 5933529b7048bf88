"""Which blocks each pipeline stage gets, and which rank each stage: pure arithmetic on costs.

    costs 1 1 1 1 1, before 0, after 2, 2 stages   ->   [0 1 2 3 | 4]     largest stage 4, not 5
    stage -> rank    loop (interleaved):  s % p          V (zbv):  0 1 1 0

Guarantees: stages are contiguous, every block is in exactly one stage, the dearest stage is as cheap as can be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

from torch import nn

from hfdist.errors import ConfigError, say
from hfdist.models.stages import StageParts, find_stage_parts

Split = Literal["auto"] | Sequence[int]


@dataclass(frozen=True)
class Cut:
    """`sizes[stage]` blocks each, in order; `costs[stage]` parameters, embedding and head counted."""

    parts: StageParts
    sizes: tuple[int, ...]
    costs: tuple[int, ...]

    @property
    def num_stages(self) -> int:
        return len(self.sizes)

    def range_of(self, stage: int) -> range:
        """Indices of the blocks of `stage`."""
        start = sum(self.sizes[:stage])
        return range(start, start + self.sizes[stage])

    def names_of(self, stage: int) -> tuple[str, ...]:
        """Names of the blocks of `stage`."""
        return tuple(self.parts.blocks[index] for index in self.range_of(stage))

    def describe(self) -> str:
        """One line: `stage 0: 3 blocks 12,345 parameters; stage 1: ...`."""
        return "; ".join(
            f"stage {stage}: {size} block{'s' * (size != 1)}, {cost:,} parameters"
            for stage, (size, cost) in enumerate(zip(self.sizes, self.costs, strict=True))
        )


def plan_cut(model: nn.Module | StageParts, num_stages: int, *, split: Split = "auto") -> Cut:
    """Cut `model` (on meta or not) into `num_stages`; `split`: blocks by stage instead of "auto".

    Raises ConfigError when there are fewer blocks than stages or `split` does not add up.
    """
    parts = model if isinstance(model, StageParts) else find_stage_parts(model)
    num_blocks = len(parts.blocks)
    if num_blocks < num_stages:
        raise ConfigError(
            say(
                given=f"{num_blocks} blocks for {num_stages} pipeline stages",
                expected="a block for every stage",
                do=f"Use at most {num_blocks} stages (pp_size x num_virtual_stages).",
            )
        )
    if isinstance(split, str):
        sizes = _balanced(parts, num_stages)
    else:
        sizes = tuple(split)
        if len(sizes) != num_stages or sum(sizes) != num_blocks or min(sizes) < 1:
            raise ConfigError(
                say(
                    given=f"split {list(sizes)} of {num_blocks} blocks over {num_stages} stages",
                    expected=f"{num_stages} positive numbers that add up to {num_blocks}",
                    do='Leave it at "auto", or correct it.',
                )
            )
    return Cut(parts, sizes, _costs(parts, sizes))


def _costs(parts: StageParts, sizes: tuple[int, ...]) -> tuple[int, ...]:
    costs, start = [], 0
    for stage, size in enumerate(sizes):
        cost = sum(parts.block_costs[start : start + size])
        cost += parts.before_cost * (stage == 0) + parts.after_cost * (stage == len(sizes) - 1)
        costs.append(cost)
        start += size
    return tuple(costs)


def _balanced(parts: StageParts, num_stages: int) -> tuple[int, ...]:
    """Sizes with the least largest cost; among those, the least sum of squares (so that no stage idles for nothing)."""
    num_blocks = len(parts.blocks)
    sums = [0]
    for cost in parts.block_costs:
        sums.append(sums[-1] + cost)

    def cost_of(stage: int, start: int, end: int) -> int:
        extra = parts.before_cost * (stage == 0) + parts.after_cost * (stage == num_stages - 1)
        return sums[end] - sums[start] + extra

    @cache
    def best(stage: int, start: int) -> tuple[int, int, tuple[int, ...]]:
        if stage == num_stages - 1:
            cost = cost_of(stage, start, num_blocks)
            return cost, cost * cost, (num_blocks - start,)
        options = []
        for end in range(start + 1, num_blocks - (num_stages - 1 - stage) + 1):
            largest, squares, sizes = best(stage + 1, end)
            cost = cost_of(stage, start, end)
            options.append((max(cost, largest), cost * cost + squares, (end - start, *sizes)))
        return min(options)

    return best(0, 0)[2]


def rank_of_stage(schedule: str, stage: int, num_ranks: int) -> int:
    """The rank that has model stage `stage`: in a loop, or in a V for zbv."""
    turn, place = divmod(stage, num_ranks)
    return num_ranks - 1 - place if schedule == "zbv" and turn % 2 else place


def stages_of_rank(schedule: str, rank: int, num_ranks: int, num_stages: int) -> tuple[int, ...]:
    """The model stages of `rank`, first to last."""
    return tuple(stage for stage in range(num_stages) if rank_of_stage(schedule, stage, num_ranks) == rank)
