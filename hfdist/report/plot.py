"""The picture of one run or of several: losses over one another, memory per rank next to its formula."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from hfdist.report.runs import ROWS, RecordedRun, load_run, row_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.ticker import MaxNLocator

# Okabe and Ito's palette: told apart by colour-blind readers.
RUN_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
OWNER_COLORS = {"parameters": "#0072B2", "gradients": "#E69F00", "optimizer": "#009E73"}
INK, GRID, PEAK = "#222222", "#E4E4E4", "#D3DCE6"
STYLE: dict[Any, Any] = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#888888",
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
}


def draw(records: Sequence[Path], output: Path) -> None:
    """Write the PNG `output` (1,650 x 690 pixels)."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    runs = [load_run(path) for path in records]
    with plt.rc_context(STYLE):
        figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.6), width_ratios=(1.15, 1), layout="constrained")
        figure.suptitle(_title(runs), fontsize=12.5, fontweight="bold", x=0.012, ha="left")
        _draw_losses(left, runs)
        _draw_memory(right, runs)
        output.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(output, dpi=150)
        plt.close(figure)


def _title(runs: Sequence[RecordedRun]) -> str:
    if len(runs) == 1:
        return runs[0].title()
    return f"{runs[0].title().split(', ', 1)[1]}: " + ", ".join(run.header["recipe"] for run in runs)


def _draw_losses(axes: Axes, runs: Sequence[RecordedRun]) -> None:
    for index, run in enumerate(runs):
        color = RUN_COLORS[index % len(RUN_COLORS)]
        steps, losses = [line["step"] for line in run.steps], [line["loss"] for line in run.steps]
        # Equal curves hide one another: each later one is thinner, so that all show.
        width = 1.8 if len(runs) == 1 else max(1.2, 7.0 - 1.7 * index)
        label = "training" if len(runs) == 1 else run.header["recipe"]
        axes.plot(steps, losses, color=color, linewidth=width, label=label, solid_capstyle="round")
        held_out_label = "held out" if index == len(runs) - 1 else None
        axes.plot(
            [line["step"] for line in run.held_out],
            [line["loss"] for line in run.held_out],
            linestyle="none",
            marker="o",
            markersize=7,
            markerfacecolor="white",
            markeredgewidth=1.8,
            color=color,
            label=held_out_label,
            clip_on=False,
            zorder=5,
        )
        for switch in run.switches:
            axes.axvline(switch["step"] + 0.5, color="#999999", linewidth=0.9, linestyle=(0, (4, 3)), zorder=0)
            axes.annotate(
                f" stage {switch['stage']}",
                (switch["step"] + 0.5, 0.015),
                xycoords=("data", "axes fraction"),
                va="bottom",
                fontsize=9,
                color="#666666",
            )
    axes.set_title("Loss", loc="left", fontsize=11)
    axes.set_xlabel("optimizer step")
    axes.set_xlim(left=0)
    cast("MaxNLocator", axes.xaxis.get_major_locator()).set_params(integer=True)  # the locator of a linear axis
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.legend(frameon=False, loc="upper right")


def _draw_memory(axes: Axes, runs: Sequence[RecordedRun]) -> None:
    """Stacked bars: what a rank holds at the end of a step, and in grey what it held at the peak of one.

    Lines across: what the formula says of the three together.
    """
    bars: list[tuple[str, dict[str, int], int | None]] = []
    peaks: list[float] = []
    for run in runs:
        expected = run.formula_total()
        ranks = run.ranks if len(runs) == 1 and len(run.ranks) <= 8 else run.ranks[:1]
        for index, memory in enumerate(ranks):
            name = f"rank {index}" if len(runs) == 1 else run.header["recipe"]
            if run.switches:
                name += f"\n(at stage {run.summary['memory_stage']})"
            bars.append((name, {row: row_bytes(memory, row) for row in ROWS}, expected))
            peaks.append((memory.get("peak_total") or 0) / 1e6)
    if not bars:
        axes.set_axis_off()
        return
    width = 0.5
    axes.bar(range(len(bars)), peaks, width, color=PEAK, label="peak in a step")
    bottoms = [0.0] * len(bars)
    for row in ROWS:
        heights = [sizes[row] / 1e6 for _, sizes, _ in bars]
        axes.bar(range(len(bars)), heights, width, bottom=bottoms, color=OWNER_COLORS[row], label=row)
        for position, (bottom, height) in enumerate(zip(bottoms, heights, strict=True)):
            if height > 0.06 * max(sum(sizes.values()) for _, sizes, _ in bars) / 1e6:
                axes.text(
                    position, bottom + height / 2, f"{height:,.1f}", ha="center", va="center", color="white", fontsize=9
                )
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    for position, (_, _, expected) in enumerate(bars):
        if expected is not None:
            axes.hlines(expected / 1e6, position - 0.38, position + 0.38, color=INK, linewidth=2.2, zorder=4)
    if any(expected is not None for _, _, expected in bars):
        axes.plot([], [], color=INK, linewidth=2.2, label="formula")
    axes.set_xticks(range(len(bars)), [name for name, _, _ in bars])
    axes.set_xlim(-0.6, len(bars) - 0.4)
    axes.set_ylim(0, max(*bottoms, *peaks, *((expected or 0) / 1e6 for _, _, expected in bars)) * 1.3)
    axes.set_title("Memory per rank, MB", loc="left", fontsize=11)
    axes.tick_params(axis="x", length=0)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.legend(frameon=False, ncols=3, loc="upper left", columnspacing=1.2, handlelength=1.1)
