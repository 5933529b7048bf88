"""One optimizer step on one rank: its memory and its wire."""

from __future__ import annotations

from dataclasses import dataclass

from hfdist.plan.memory import MemoryPlan, plan_memory
from hfdist.plan.sizes import Layout, ModelSize
from hfdist.plan.wire import WirePlan, plan_wire


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """What a step of `layout` costs one rank."""

    layout: Layout
    memory: MemoryPlan
    wire: WirePlan


def plan_step(model: ModelSize, layout: Layout) -> StepPlan:
    """Memory and wire of `model` in `layout`."""
    return StepPlan(layout=layout, memory=plan_memory(model, layout), wire=plan_wire(model, layout))
