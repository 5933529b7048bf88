"""Pipeline schedules as data: which rank computes what in which order, before anything runs.

    plan_schedule("1f1b", num_ranks=2, num_micro_batches=3)
    rank 0   F0 F1 B0 F2 B1 B2        F forward, B backward, I / W the halves of a backward for inputs / weights
    rank 1   F0 B0 F1 B1 F2 B2

`gpipe` (Huang et al. 2019), `1f1b` (Narayanan et al. 2019, with a flush), `interleaved` (Narayanan et al. 2021, section
2.2), `zero-bubble` and `zbv` (Qi et al. 2024), `pipedream` (PipeDream-2BW, Narayanan et al. 2020: 1f1b without a flush,
shown over `NUM_UNFLUSHED` batches). The orders with several stages a rank are torch's own (`torch.distributed.
pipelining`); those with one are written here, since torch 2.13's 1F1B order leaves out a forward on the last rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Literal

from hfdist.errors import ConfigError, nearest, say

Kind = Literal["F", "B", "I", "W"]
NUM_UNFLUSHED = 3  # batches of an asynchronous schedule that are planned one after the other
_TORCH_NAMES = {
    "interleaved": "Interleaved1F1B",
    "zero-bubble": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
}
SCHEDULES = ("gpipe", "1f1b", *_TORCH_NAMES, "pipedream")


@dataclass(frozen=True)
class Action:
    """One computation: `kind` of `micro_batch` on model stage `stage` (0 is the first)."""

    stage: int
    kind: Kind
    micro_batch: int


@dataclass(frozen=True)
class Schedule:
    """`orders[rank]`: what a rank computes, in order. Stages are numbered through the model, whatever rank has them."""

    name: str
    num_ranks: int
    num_micro_batches: int
    num_virtual_stages: int
    orders: tuple[tuple[Action, ...], ...]

    @property
    def num_stages(self) -> int:
        return self.num_ranks * self.num_virtual_stages

    @property
    def bubble_formula(self) -> tuple[str, float] | None:
        """The papers' idle share for equal stages and a backward of two forwards; None where it has no such form."""
        p, m, v = self.num_ranks, self.num_micro_batches, self.num_virtual_stages
        if self.name in ("gpipe", "1f1b"):
            return "(p-1)/(m+p-1)", (p - 1) / (m + p - 1)
        if self.name == "interleaved":
            return "(p-1)/(vm+p-1)", (p - 1) / (v * m + p - 1)
        if self.name == "pipedream":
            return "0 once it runs", 0.0
        return None


def plan_schedule(
    name: str, *, num_ranks: int, num_micro_batches: int, num_virtual_stages: int | None = None
) -> Schedule:
    """The schedule `name` (one of `SCHEDULES`). `num_virtual_stages`: model stages a rank; 1, or 2 where it needs more.

    Raises ConfigError for a name or sizes that do not go together.
    """
    if name not in SCHEDULES:
        raise ConfigError(
            say(
                given=f"schedule {name!r}{nearest(name, SCHEDULES)}",
                expected=f"one of {', '.join(SCHEDULES)}",
                do="Name one of them.",
            )
        )
    if num_ranks < 2 or num_micro_batches < 1:
        raise ConfigError(
            say(
                given=f"{num_ranks} ranks and {num_micro_batches} micro-batches",
                expected="at least 2 ranks and 1 micro-batch",
                do="Split the model over more ranks, or the batch into micro-batches.",
            )
        )
    several = name in _TORCH_NAMES
    virtual = num_virtual_stages or (2 if several else 1)
    if (name == "zbv" and virtual != 2) or (not several and virtual != 1) or virtual < 1:
        raise ConfigError(
            say(
                given=f"{virtual} virtual stages with {name}",
                expected="2 stages a rank for zbv, any number for interleaved and zero-bubble, 1 for the others",
                do="Leave --virtual-stages out, or choose interleaved.",
            )
        )
    if name in _TORCH_NAMES:
        orders = _torch_orders(name, num_ranks, num_micro_batches, virtual)
    elif name == "gpipe":
        orders = [_gpipe(rank, num_micro_batches) for rank in range(num_ranks)]
    else:
        count = num_micro_batches * (NUM_UNFLUSHED if name == "pipedream" else 1)
        orders = [_one_forward_one_backward(rank, num_ranks, count) for rank in range(num_ranks)]
    return Schedule(name, num_ranks, num_micro_batches, virtual, tuple(tuple(order) for order in orders))


def _gpipe(rank: int, num_micro_batches: int) -> list[Action]:
    kinds: tuple[Kind, Kind] = ("F", "B")
    return [Action(rank, kind, number) for kind in kinds for number in range(num_micro_batches)]


def _one_forward_one_backward(rank: int, num_ranks: int, num_micro_batches: int) -> list[Action]:
    """A rank runs ahead by as many forwards as there are ranks after it, then alternates, then drains."""
    ahead = min(num_ranks - 1 - rank, num_micro_batches)
    order = [Action(rank, "F", number) for number in range(ahead)]
    for number in range(num_micro_batches):
        if ahead + number < num_micro_batches:
            order.append(Action(rank, "F", ahead + number))
        order.append(Action(rank, "B", number))
    return order


def _torch_orders(name: str, num_ranks: int, num_micro_batches: int, num_virtual: int) -> list[list[Action]]:
    """The order torch's runtime works off; its constructor reads a few numbers of a stage and nothing else."""
    from torch.distributed.pipelining.schedules import get_schedule_class
    from torch.nn import Module

    num_stages = num_ranks * num_virtual
    stages = [
        SimpleNamespace(
            num_stages=num_stages,
            group_size=num_ranks,
            group_rank=0,
            stage_index=index,
            is_first=index == 0,
            is_last=index == num_stages - 1,
            group=None,
            submod=Module(),
        )
        for index in range(0, num_stages, num_ranks)
    ]
    try:
        planned = get_schedule_class(_TORCH_NAMES[name])(
            stages, n_microbatches=num_micro_batches, loss_fn=lambda *unused: None, scale_grads=False
        )
    except ValueError as error:
        raise ConfigError(
            say(
                given=f"{num_micro_batches} micro-batches on {num_ranks} ranks with {name}",
                expected=f"sizes that torch's schedule takes ({error})",
                do=f"Use a multiple of {num_ranks} micro-batches.",
            )
        ) from None
    return [
        [Action(a.stage_index, a.computation_type.value, a.microbatch_index) for a in planned.pipeline_order[rank] if a]
        for rank in range(num_ranks)
    ]
