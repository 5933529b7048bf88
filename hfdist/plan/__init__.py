"""Pure arithmetic before anything runs: memory per rank and bytes on the wire for each ZeRO stage. Numbers in bytes.

    model = ModelSize.of(124_000_000)
    step = plan_step(model, Layout(stage=2, world_size=8, precision="bf16"))
    step.memory.at_rest.optimizer      # 124 M x 8 / 8 = 124,000,000
    step.memory.peak_total             # the most at one moment of a step, activations excluded
    step.wire.bound, step.wire.expected
    stage_that_fits(2 * 2**30, model, Layout(stage=0, world_size=8))
    print(explain(model, Layout(stage=2, world_size=8, precision="bf16")))

No torch here; `hfdist.models.size.model_size(model)` turns a module into a `ModelSize`.
"""

from hfdist.plan.memory import MemoryPlan, Owned, paper_bytes, plan_memory
from hfdist.plan.sizes import Layout, ModelSize, Unit
from hfdist.plan.step import StepPlan, plan_step
from hfdist.plan.table import explain, format_bytes, stage_that_fits
from hfdist.plan.wire import WirePlan, plan_wire

__all__ = [
    "Layout",
    "MemoryPlan",
    "ModelSize",
    "Owned",
    "StepPlan",
    "Unit",
    "WirePlan",
    "explain",
    "format_bytes",
    "paper_bytes",
    "plan_memory",
    "plan_step",
    "plan_wire",
    "stage_that_fits",
]
