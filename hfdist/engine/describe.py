"""What was prepared, in the words of `hfdist.plan`: sizes and layout, for formulas beside measurements."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from hfdist.engine.core import Engine
from hfdist.parallel import fsdp
from hfdist.parallel.zero import ZeroModel
from hfdist.plan import Layout, ModelSize, Unit, explain, format_bytes, plan_step


def model_size(zero: ZeroModel) -> ModelSize:
    """Shapes of a prepared model's units."""
    embeddings = getattr(zero.model, "get_input_embeddings", lambda: None)()
    early: list[fsdp.FSDPParam] = []
    late: list[fsdp.FSDPParam] = []
    for param in fsdp.iterate_params([zero.model]):
        tied = bool(param._module_info.shared_modules)
        (late if param._module_info.module is embeddings and not tied else early).append(param)
    return ModelSize(
        blocks=tuple(_unit(list(fsdp.iterate_params([module]))) for _, module in zero.blocks),
        root_early=_unit(early),
        root_late=_unit(late),
    )


def _unit(params: list[fsdp.FSDPParam]) -> Unit:
    return Unit(
        trainable=tuple(tuple(p._orig_size) for p in params if p.sharded_param.requires_grad),
        frozen=tuple(tuple(p._orig_size) for p in params if not p.sharded_param.requires_grad),
    )


def layout(
    engine: Engine, stage: int, *, micro_steps: int = 1, reduce_dtype: Literal["fp32", "compute"] = "fp32"
) -> Layout:
    """The layout in force at `stage`; the optimizer's state is counted where it exists, else taken as Adam's."""
    values = 2
    for optimizer in engine.optimizers:
        for parameter, state in optimizer.optimizer.state.items():
            like = [v for v in state.values() if getattr(v, "ndim", 0) and v.numel() == parameter._local_tensor.numel()]
            values = len(like)
            break
    return Layout(
        stage=stage,
        world_size=engine.mesh.world_size,
        dp_replicate_size=engine.mesh.dp_replicate_size,
        precision=engine.amp.dtype if engine.amp else "fp32",
        compute=engine.amp.compute if engine.amp else "mixed",
        reduce_dtype=reduce_dtype,
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
        lines.append(explain(model_size(zero), now))
    return "\n".join(lines) or "Nothing is prepared yet."


def higher_stages(engine: Engine, now: Layout) -> str:
    """What one rank would hold at each stage above the current one, in words."""
    said = []
    for stage in range(now.stage, 4):
        total = sum(plan_step(model_size(z), replace(now, stage=stage)).memory.peak_total for z in engine.models)
        said.append(f"stage {stage} holds {format_bytes(total)} a rank at its peak")
    return "Without activations, " + ", ".join(said) + "."
