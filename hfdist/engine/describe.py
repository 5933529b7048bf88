"""What was prepared, in the words of `hfdist.plan`: sizes and layout, for formulas beside measurements."""

from __future__ import annotations

from dataclasses import replace

from hfdist.engine.core import Engine
from hfdist.engine.norm import local_tensor
from hfdist.errors import coordinates
from hfdist.models.size import model_size
from hfdist.parallel.split import SplitModel
from hfdist.parallel.tensor.layout import Replicated
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
        if zero.split is not None:
            lines += _split_lines(zero.split)
        lines.append(explain(model_size(zero.model, zero.blocks), now))
    return "\n".join(lines) or "Nothing is prepared yet."


def _split_lines(split: SplitModel) -> list[str]:
    """Grid, who has what, and what each axis sends, of a model over tensor or pipeline ranks."""
    grid = split.grid
    mine = sum(p.numel() for p in split.model.parameters())
    lines = [
        f"Grid pp {grid.pp_size} x dp {grid.data.size} x tp {grid.tp_size}; this is rank {grid.rank}, "
        f"{coordinates(pp=grid.pp_rank, dp=grid.dp_rank, tp=grid.tp_rank)}, of {split.num_parameters:,} parameters it "
        f"has {mine:,} before ZeRO. The table is of those, and of the data axis."
    ]
    if split.pipeline is not None:
        lines += split.pipeline.describe().splitlines()
        lines.append("Sent by pipeline ranks per cut and batch: hidden x tokens forward, as much backward.")
    if split.tensor is not None:
        whole = sum(isinstance(layout, Replicated) for layout in split.tensor.layouts.values())
        lines.append(
            f"Tensor parallel: {len(split.tensor.layouts) - whole} parameters split, {whole} whole on every rank; "
            f"{split.tensor.block_share:.0%} of the blocks' elements here; {split.tensor.num_all_reduces} all-reduces "
            "of hidden x tokens in a forward of the whole model, about as many in its backward."
        )
    return lines


def higher_stages(engine: Engine, now: Layout) -> str:
    """What one rank would hold at each stage above the current one, in words."""
    said = []
    for stage in range(now.stage, 4):
        there = replace(now, stage=stage)
        sizes = [model_size(zero.model, zero.blocks) for zero in engine.models]
        total = sum(plan_step(size, there).memory.peak_total for size in sizes)
        said.append(f"stage {stage} holds {format_bytes(total)} a rank at its peak")
    return "Without activations, " + ", ".join(said) + "."
