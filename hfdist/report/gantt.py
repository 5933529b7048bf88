"""A pipeline's timeline to look at: coloured rows in the terminal, and a PNG.

Forwards are blue, backwards orange (their weight halves green), darker for later model stages of a rank; the number is
the micro-batch; what is left white is the bubble.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from hfdist.plan.schedule import Schedule
from hfdist.plan.timeline import Span, Timeline, plan_timeline, steady_bubble

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.text import Text

# By kind: fill of the first and of the last model stage that a rank has (Okabe and Ito's hues).
FILLS = {
    "F": ("#9CCBEB", "#0072B2"),
    "B": ("#F3C58B", "#D55E00"),
    "I": ("#F3C58B", "#D55E00"),
    "W": ("#A5DBC8", "#009E73"),
}
KINDS = {"F": "forward", "B": "backward (only for inputs where split)", "W": "backward for weights"}


def describe(schedule: Schedule, timeline: Timeline) -> str:
    """Bubble next to its formula, and the activations every rank holds."""
    held = [timeline.activations_held(rank, schedule.num_virtual_stages) for rank in range(schedule.num_ranks)]
    return f"{_bubble(schedule, timeline)}; micro-batches held at most: {', '.join(f'{count:g}' for count in held)}"


def _bubble(schedule: Schedule, timeline: Timeline) -> str:
    words = f"idle {100 * steady_bubble(schedule, timeline):.1f} %"
    formula = schedule.bubble_formula
    return words if formula is None else f"{words}, formula {formula[0]} = {100 * formula[1]:.1f} %"


def title(schedule: Schedule) -> str:
    """`1f1b, 4 ranks, 8 micro-batches`."""
    stages = f" x {schedule.num_virtual_stages} stages" if schedule.num_virtual_stages > 1 else ""
    return f"{schedule.name}, {schedule.num_ranks} ranks{stages}, {schedule.num_micro_batches} micro-batches"


def rows(schedule: Schedule, timeline: Timeline, width: int) -> list[Text]:
    """One line of at most `width` characters a rank; a character is a tick, a computation shows its micro-batch."""
    from rich.text import Text

    room = width - 9
    # A forward is one tick of a rank's share of the model; with v stages a rank it is 1/v long.
    ticks = schedule.num_virtual_stages * (2 if timeline.end * schedule.num_virtual_stages * 2 <= room else 1)
    scale = min(float(ticks), room / timeline.end)
    lines = []
    for rank in range(schedule.num_ranks):
        line = Text(f"rank {rank}  ")
        column = 0
        for span in sorted((s for s in timeline.spans if s.rank == rank), key=lambda s: s.start):
            start, end = round(span.start * scale), round(span.end * scale)
            if end <= start:
                continue
            line.append(" " * (start - column))
            number = str(span.action.micro_batch % schedule.num_micro_batches)
            line.append(number[-(end - start) :].ljust(end - start), style=f"black on {_fill(schedule, span)}")
            column = end
        lines.append(line)
    return lines


def _fill(schedule: Schedule, span: Span) -> str:
    first, last = FILLS[span.action.kind]
    if schedule.num_virtual_stages == 1:
        return first
    place = _chunk(schedule, span) / (schedule.num_virtual_stages - 1)
    mixed = [round(int(a, 16) * (1 - place) + int(b, 16) * place) for a, b in zip(_rgb(first), _rgb(last), strict=True)]
    return "#" + "".join(f"{value:02X}" for value in mixed)


def _rgb(color: str) -> tuple[str, str, str]:
    return color[1:3], color[3:5], color[5:7]


def _chunk(schedule: Schedule, span: Span) -> int:
    """How many model stages of the same rank come before the span's."""
    mine = sorted({action.stage for action in schedule.orders[span.rank]})
    return mine.index(span.action.stage)


def draw_timelines(pictures: Sequence[tuple[str, Schedule, Timeline]], output: Path) -> None:
    """Write a PNG with one chart for each (caption, schedule, timeline), all on one scale of time."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    longest = max(timeline.end for _, _, timeline in pictures)
    height = sum(0.42 * schedule.num_ranks + 0.85 for _, schedule, _ in pictures) + 0.3
    width = max(10.5, min(16.0, 1.5 + 0.28 * longest))  # a caption has up to 110 characters
    figure, axes = plt.subplots(len(pictures), 1, figsize=(width, height), squeeze=False, layout="constrained")
    kinds: dict[str, str] = {}
    for axis, (caption, schedule, timeline) in zip(axes[:, 0], pictures, strict=True):
        _draw_one(axis, schedule, timeline, narrow=0.12 * longest / width)
        axis.set_title(caption, loc="left", fontsize=10, fontweight="bold")
        axis.set_xlim(0, longest)
        for span in timeline.spans:
            kind = "B" if span.action.kind == "I" else span.action.kind
            kinds.setdefault(KINDS[kind], FILLS[kind][0])
    handles = [plt.Rectangle((0, 0), 1, 1, facecolor=fill, edgecolor="white") for fill in kinds.values()]
    figure.legend(handles, list(kinds), loc="outside lower left", ncols=len(kinds), frameon=False, fontsize=9)
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=150)
    plt.close(figure)


def draw_measured(schedule: Schedule, measured: Timeline, output: Path) -> str:
    """Write a PNG of `measured` (seconds, from 0) above the ideal timeline of `schedule`; return the caption of it.

    Both are drawn on one scale: the ideal takes as long as what was measured would if no rank had ever waited and
    stages were equal, so that the difference in length is what the ideal leaves out.
    """
    ideal = plan_timeline(schedule)
    unit = busy(measured) / busy(ideal)
    captions = (
        f"measured, {title(schedule)}, {1000 * measured.end:,.0f} ms: {_bubble(schedule, measured)}",
        f"ideal, {1000 * ideal.end * unit:,.0f} ms: {_bubble(schedule, ideal)}",
    )
    draw_timelines([(captions[0], schedule, scaled(measured, 1 / unit)), (captions[1], schedule, ideal)], output)
    return captions[0]


def busy(timeline: Timeline) -> float:
    """Time that all ranks together compute."""
    return sum(span.end - span.start for span in timeline.spans)


def scaled(timeline: Timeline, factor: float) -> Timeline:
    """The same in another unit of time."""
    spans = (replace(span, start=span.start * factor, end=span.end * factor) for span in timeline.spans)
    return Timeline(timeline.num_ranks, tuple(spans))


def _draw_one(axis: Axes, schedule: Schedule, timeline: Timeline, narrow: float) -> None:
    """Spans shorter than `narrow` have no room for their number."""
    for span in timeline.spans:
        axis.barh(
            span.rank,
            span.end - span.start,
            left=span.start,
            height=0.86,
            color=_fill(schedule, span),
            edgecolor="white",
            linewidth=0.8,
        )
        if span.end - span.start < narrow:
            continue
        axis.text(
            (span.start + span.end) / 2,
            span.rank,
            str(span.action.micro_batch % schedule.num_micro_batches),
            ha="center",
            va="center",
            fontsize=7.5,
            color="white" if schedule.num_virtual_stages > 1 and _chunk(schedule, span) else "#222222",
        )
    axis.set_yticks(range(schedule.num_ranks), [f"rank {rank}" for rank in range(schedule.num_ranks)])
    axis.set_ylim(schedule.num_ranks - 0.4, -0.6)
    axis.set_xticks([])
    for side in axis.spines.values():
        side.set_visible(False)
    axis.tick_params(length=0)
