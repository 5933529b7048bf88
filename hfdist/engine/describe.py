"""What was prepared, in the words of `hfdist.plan`: sizes and layout, for formulas beside measurements."""

from __future__ import annotations

from dataclasses import replace

from hfdist.engine.core import Engine
from hfdist.engine.norm import local_tensor
from hfdist.models.size import model_size
from hfdist.plan import Layout, explain, format_bytes, plan_step
from hfdist.plugins import ZeroPlugin


def layout(engine: Engine, stage: int, *, zero: ZeroPlugin, micro_steps: int = 1) -> Layout:
    """The layout in force at `stage`; the optimizer's state is counted where it exists, else taken as Adam's."""
    values = 2
    for optimizer in engine.optimizers:
        for parameter, state in optimizer.optimizer.state.items():
            if parameter.ndim and state:  # a 0-dim parameter's state looks like its step count
                local = local_tensor(parameter).numel()
                values = sum(bool(getattr(v, "ndim", 0)) and v.numel() == local for v in state.values())
                break
    return Layout(
        stage=stage,
        world_size=engine.mesh.size,
        dp_replicate_size=engine.mesh.dp_replicate_size,
        precision=engine.amp.dtype if engine.amp else "fp32",
        compute=engine.amp.compute if engine.amp else "mixed",
        reduce_dtype=zero.reduce_dtype,
        gather_dtype=zero.gather_dtype,
        secondary_shard_size=zero.secondary_shard_size,
        micro_steps=micro_steps,
        optimizer_values=values,
    )


def explain_engine(engine: Engine, now: Layout) -> str:
    """Mesh, units and the table of all stages for every prepared model."""
    lines = []
    for zero in engine.models:
        replicas, shards = zero.mesh.shape(now.stage)
        lines.append(
            f"{type(zero.model).__name__.removeprefix('FSDP')} at stage {now.stage}: mesh dp_replicate={replicas} x "
            f"dp_shard={shards}, {len(zero.blocks)} blocks and the root as units."
        )
        lines.append(explain(model_size(zero.model, zero.blocks), now))
    return "\n".join(lines) or "Nothing is prepared yet."


def higher_stages(engine: Engine, now: Layout) -> str:
    """What one rank would hold at each stage above the current one, in words."""
    said = []
    for stage in range(now.stage, 4):
        there = replace(now, stage=stage)
        sizes = [model_size(zero.model, zero.blocks) for zero in engine.models]
        total = sum(plan_step(size, there).memory.peak_total for size in sizes)
        said.append(f"stage {stage} holds {format_bytes(total)} a rank at its peak")
    return "Without activations, " + ", ".join(said) + "."
