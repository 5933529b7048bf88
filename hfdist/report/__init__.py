"""What a run was: tables on the terminal (`table.py`) and a picture (`plot.py`), from its record alone.

    show_report(path, plot=None)      what a recipe ends with; nothing when path is None (not the main rank)
    plot_runs([path, ...], "x.png")   losses of several runs over one another, memory side by side

Sizes are decimal: 1 MB is 1,000,000 bytes, so that a formula in P reads off.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def show_report(record: Path | None, *, plot: Path | None = None) -> None:
    """Print the tables of a finished run; draw it as well when `plot` names a PNG."""
    if record is None:
        return
    from hfdist.report.table import print_run

    if plot is not None:
        plot_runs([record], plot)
    print_run(record, plot=plot)
    draw_timeline(record)


def draw_timeline(record: Path) -> None:
    """Draw the step that a run with `--timeline` recorded, measured next to ideal, to the PNG it named."""
    from hfdist.measure.timeline import from_record
    from hfdist.recipe.record import read_record
    from hfdist.report import gantt

    lines = read_record(record)
    for line in lines:
        if line["kind"] == "timeline":
            output = Path(lines[0]["settings"]["timeline"])
            print(gantt.draw_measured(*from_record(line), output))
            print(f"Timeline: {output}")


def plot_runs(records: Sequence[Path], output: Path) -> None:
    """Draw the runs of `records` to the PNG `output`."""
    from hfdist.report.plot import draw

    draw(records, output)
