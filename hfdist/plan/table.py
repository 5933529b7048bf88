"""The arithmetic as a table, and the stage that fits in a given memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from hfdist.plan.memory import paper_bytes
from hfdist.plan.sizes import Layout, ModelSize
from hfdist.plan.step import StepPlan, plan_step

STAGES = (0, 1, 2, 3)


def format_bytes(nbytes: float) -> str:
    """Three digits and a decimal unit, as in the formulas.

    >>> format_bytes(16_000_000), format_bytes(999), format_bytes(1.5e9)
    ('16.0 MB', '999 B', '1.50 GB')
    """
    if abs(nbytes) < 1000:
        return f"{nbytes:.0f} B"
    for unit in ("KB", "MB", "GB", "TB"):
        nbytes /= 1000
        if abs(nbytes) < 999.5 or unit == "TB":
            break
    digits = 2 if abs(nbytes) < 9.995 else 1 if abs(nbytes) < 99.95 else 0
    return f"{nbytes:.{digits}f} {unit}"


def stage_that_fits(
    nbytes: int, model: ModelSize, layout: Layout, *, other_bytes: int = 0, stages: Iterable[int] = STAGES
) -> int | None:
    """The lowest of `stages` whose peak, with `other_bytes` for activations and the process, is at most `nbytes`.

    `layout` says everything but the stage. None when not even the last fits.

    >>> size = ModelSize.of(1_000_000, num_blocks=10)
    >>> layout = Layout(stage=0, world_size=4)
    >>> [stage_that_fits(mb * 1_000_000, size, layout) for mb in (20, 10, 6, 2)]
    [0, 1, 3, None]
    """
    for stage in stages:
        if plan_step(model, replace(layout, stage=stage)).memory.peak_total + other_bytes <= nbytes:
            return stage
    return None


def explain(model: ModelSize, layout: Layout) -> str:
    """Every stage side by side for `layout`'s ranks, precision and micro-steps; `layout`'s own stage is marked."""
    plans = [plan_step(model, replace(layout, stage=stage)) for stage in STAGES]
    rows = [("", *(f"stage {plan.layout.stage}{' *' if plan.layout.stage == layout.stage else ''}" for plan in plans))]
    rows += [(name, *(format_bytes(value(plan)) for plan in plans)) for name, value in _ROWS]
    rows.append(("paper (16P rule)", *(format_bytes(_paper(model, plan)) for plan in plans)))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    table = "\n".join(
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )
    replicas = f" in {layout.dp_replicate_size} replicas" if layout.dp_replicate_size > 1 else ""
    return (
        f"{model.num_parameters:,} parameters ({model.num_trainable:,} trainable), {len(model.blocks)} blocks, on "
        f"{layout.world_size} ranks{replicas}, {layout.precision}, {layout.micro_steps} micro-steps per update.\n"
        f"Bytes per rank, activations excluded:\n{table}"
    )


_ROWS = (
    ("parameters", lambda plan: plan.memory.at_rest.parameters),
    ("gradients", lambda plan: plan.memory.at_rest.gradients),
    ("optimizer", lambda plan: plan.memory.at_rest.optimizer),
    ("at rest", lambda plan: plan.memory.at_rest_total),
    ("peak: gathered", lambda plan: plan.memory.peak.gathered),
    ("peak: gradients", lambda plan: plan.memory.peak.gradients),
    ("peak of a step", lambda plan: plan.memory.peak_total),
    ("wire per update", lambda plan: plan.wire.expected),
    ("wire bound", lambda plan: plan.wire.bound),
)


def _paper(model: ModelSize, plan: StepPlan) -> int:
    layout = plan.layout
    return paper_bytes(model.num_trainable, stage=layout.stage, num_shards=layout.num_shards)
