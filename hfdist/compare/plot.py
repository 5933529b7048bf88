"""The picture of a comparison: losses on each other and their differences, time, memory, wire."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from hfdist.compare.figures import LOSS_TOLERANCE, Row, Spread, load, rows
from hfdist.compare.table import title
from hfdist.report.plot import GRID, INK, PEAK, RUN_COLORS, STYLE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.ticker import MaxNLocator

# An engine keeps its color whatever it is compared with.
COLORS = {
    "hfdist": RUN_COLORS[0],
    "native": RUN_COLORS[1],
    "native-memory": RUN_COLORS[4],
    "native-cpuadam": RUN_COLORS[3],
    "fsdp2": RUN_COLORS[2],
    "ddp": RUN_COLORS[5],
    "single": INK,
}
OWNERS = {"parameters": "#0072B2", "gradients": "#E69F00", "optimizer": "#009E73", "communication": "#CC79A7"}
# Where losses that are equal bit by bit are drawn on the logarithmic axis.
_FLOOR = 1e-8


def draw(path: Path, output: Path) -> None:
    """Write the PNG `output` (1,950 x 1,170 pixels) of a compare.json."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    comparison = load(path)
    listed = [row for row in rows(comparison) if row.losses]
    failed = [row.engine for row in rows(comparison) if row.error]
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(2, 3, figsize=(13, 7.8), layout="constrained")
        text = title(comparison, listed) + (f"  (failed: {', '.join(failed)})" if failed else "")
        figure.suptitle(text, fontsize=12.5, fontweight="bold", x=0.01, ha="left")
        _losses(axes[0][0], listed)
        _differences(axes[0][1], listed)
        _bars(axes[0][2], listed, "Wall time of a step, ms", [row.wall for row in listed], 1e3, "{:.0f}")
        _bars(axes[1][0], listed, "CPU time of a step, all ranks, ms", [row.cpu for row in listed], 1e3, "{:.0f}")
        _memory(axes[1][1], listed)
        _wire(axes[1][2], listed, comparison)
        output.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(output, dpi=150)
        plt.close(figure)


def _losses(axes: Axes, listed: Sequence[Row]) -> None:
    for index, row in enumerate(listed):
        # Equal curves hide one another: each later one is thinner, so that all show.
        width = max(1.0, 8.0 - 1.2 * index)
        steps = range(1, len(row.losses) + 1)
        axes.plot(steps, row.losses, color=COLORS[row.engine], linewidth=width, label=row.engine)
    axes.set_title("Loss", loc="left", fontsize=11)
    _steps_below(axes)
    axes.legend(frameon=False, loc="best", fontsize=9)


def _differences(axes: Axes, listed: Sequence[Row]) -> None:
    for row in listed[1:]:
        steps = range(1, len(row.loss_off) + 1)
        values = [max(off, _FLOOR) for off in row.loss_off]
        axes.plot(steps, values, color=COLORS[row.engine], linewidth=1.6, marker="o", markersize=3.5, label=row.engine)
    axes.axhline(LOSS_TOLERANCE, color="#999999", linewidth=0.9, linestyle=(0, (4, 3)))
    axes.annotate(
        f" {LOSS_TOLERANCE:g}", (1.0, LOSS_TOLERANCE), xycoords=("axes fraction", "data"), va="center", color="#666666"
    )
    axes.set_yscale("log")
    axes.set_ylim(bottom=_FLOOR * 0.6)
    axes.set_title("Loss, difference to hfdist (equal: at 1e-8)", loc="left", fontsize=11)
    _steps_below(axes)


def _steps_below(axes: Axes) -> None:
    axes.set_xlabel("optimizer step")
    cast("MaxNLocator", axes.xaxis.get_major_locator()).set_params(integer=True)  # the locator of a linear axis
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)


def _bars(
    axes: Axes, listed: Sequence[Row], name: str, values: Sequence[Spread | None], factor: float, form: str
) -> None:
    """Medians as bars, the least and the most of the rounds as a line over each."""
    shown = [(row, value) for row, value in zip(listed, values, strict=True) if value is not None]
    longest = max((value.most * factor for _, value in shown), default=1.0)
    for position, (row, value) in enumerate(shown):
        median, least, most = (v * factor for v in (value.median, value.least, value.most))
        axes.barh(position, median, 0.62, color=COLORS[row.engine])
        if most > least:
            axes.errorbar(
                median, position, xerr=[[median - least], [most - median]], color="#555555", linewidth=1.2, capsize=3
            )
        axes.text(most + 0.02 * longest, position, form.format(median), va="center", fontsize=9.5)
    _rows_at_left(axes, [row.engine for row, _ in shown], name, longest)


def _rows_at_left(axes: Axes, names: Sequence[str], name: str, longest: float) -> None:
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)  # the first engine on top
    axes.set_xlim(0, longest * 1.16)
    axes.tick_params(axis="y", length=0)
    axes.set_title(name, loc="left", fontsize=11)
    axes.grid(axis="x", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)


def _memory(axes: Axes, listed: Sequence[Row]) -> None:
    """Grey: the most resident above imports (allocated, on a device); in front: who holds what before the update."""
    longest = 1.0
    for position, row in enumerate(listed):
        peak = (row.allocated if row.allocated is not None else row.peak or 0) / 1e6
        axes.barh(position, peak, 0.74, color=PEAK, label="peak" if position == 0 else None)
        left = 0.0
        for owner, color in OWNERS.items():
            width = row.held.get(owner, 0) / 1e6
            axes.barh(
                position,
                width,
                0.42,
                left=left,
                color=color,
                label={"communication": "buffers"}.get(owner, owner) if position == 0 else None,
            )
            left += width
        longest = max(longest, peak, left)
    for position, row in enumerate(listed):
        peak = (row.allocated if row.allocated is not None else row.peak or 0) / 1e6
        axes.text(max(peak, sum(row.held.values()) / 1e6) + 0.02 * longest, position, f"{peak:,.0f}", va="center")
    _rows_at_left(axes, [row.engine for row in listed], "Memory of a rank, MB", longest)
    axes.set_ylim(len(listed) - 0.4, -0.6 - 0.19 * len(listed))  # room for two lines of legend
    axes.legend(frameon=False, ncols=3, loc="upper left", fontsize=9, columnspacing=1.0, handlelength=1.0)


def _wire(axes: Axes, listed: Sequence[Row], comparison: Mapping[str, Any]) -> None:
    by_kernel = bool(comparison["counted_by_the_kernel"]) and all(row.kernel is not None for row in listed)
    values = [row.kernel if by_kernel else row.wire for row in listed]
    longest = max((value / 1e6 for value in values if value is not None), default=1.0) or 1.0
    for position, (row, value) in enumerate(zip(listed, values, strict=True)):
        if value is not None:
            axes.barh(position, value / 1e6, 0.62, color=COLORS[row.engine])
            axes.text(value / 1e6 + 0.02 * longest, position, f"{value / 1e6:,.1f}", va="center", fontsize=9.5)
    _rows_at_left(axes, [row.engine for row in listed], "Sent by a rank in a step, MB", longest)
