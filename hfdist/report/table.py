"""The tables a recipe ends with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hfdist.report.runs import ROWS, RecordedRun, load_run, row_bytes, size

# With more ranks than this the table shows the least and the most instead of each.
MAX_RANK_COLUMNS = 4


def print_run(path: Path, *, plot: Path | None = None, console: Console | None = None) -> None:
    """Print one run: losses and speed, memory next to the formula, the wire next to its bound, where the record is."""
    run = load_run(path)
    console = console or Console()
    console.print()
    console.print(Text(run.title(), style="bold"))
    console.print(_training(run))
    if run.ranks:
        console.print(_memory(run))
    if run.switches:
        console.print(_switches(run))
    if run.summary.get("wire"):
        console.print(_wire(run))
    console.print(f"Run record: {path}", soft_wrap=True)
    if plot is not None:
        console.print(f"Plot: {plot}", soft_wrap=True)


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold cyan", header_style="dim")
    table.add_column(columns[0])
    for column in columns[1:]:
        table.add_column(column, justify="right")
    return table


def _training(run: RecordedRun) -> Table:
    table = _table("Training", ("", "first", "last"))
    summary = run.summary
    table.add_row("loss", f"{summary['loss_from']:.4f}", f"{summary['loss_to']:.4f}")
    if summary["held_out_from"] is not None:
        table.add_row("held-out loss", f"{summary['held_out_from']:.4f}", f"{summary['held_out_to']:.4f}")
    settings = run.header["settings"]
    table.add_row("steps", "1", str(summary["steps"]))
    table.add_row("tokens per step", "", f"{settings['batch_size'] * settings['seq_len']:,}")
    table.add_row("tokens per second", "", f"{summary['tokens_per_second']:,.0f}")
    if summary["loss_scale"] is not None:
        table.add_row("loss scale", "", f"{summary['loss_scale']:,.0f}")
        table.add_row("skipped steps", "", str(summary["skipped_steps"]))
    return table


def _memory(run: RecordedRun) -> Table:
    ranks = run.ranks
    each = len(ranks) <= MAX_RANK_COLUMNS
    columns = [f"rank {index}" for index in range(len(ranks))] if each else ["least", "most"]
    table = _table(
        f"Memory per rank at the end of a step (ZeRO stage {run.summary['memory_stage']})",
        ("", *columns, "formula"),
    )

    def cells(values: Sequence[int | None]) -> list[str]:
        known = [value for value in values if value is not None]
        if not known:
            return ["-"] * len(columns)
        return [size(value) for value in (values if each else (min(known), max(known)))]

    for row in ROWS:
        table.add_row(row, *cells([row_bytes(rank, row) for rank in ranks]), size(run.formula.get(row)))
    totals = [sum(row_bytes(rank, row) for row in ROWS) for rank in ranks]
    formula = run.formula_total()
    table.add_row("all three", *cells(totals), size(formula), style="bold")
    table.add_row(
        "peak in a step", *cells([rank.get("peak_total") for rank in ranks]), size(run.formula.get("peak_total"))
    )
    table.add_row("whole process, peak", *cells([rank.get("resident_peak") for rank in ranks]), "-", style="dim")
    return table


def _switches(run: RecordedRun) -> Table:
    table = _table("Memory of rank 0 after each switch", ("", *ROWS, "formula of all"))
    for switch in run.switches:
        memory = switch["memory"]
        table.add_row(
            f"step {switch['step']}: stage {switch['stage']}",
            *(size(row_bytes(memory, row)) for row in ROWS),
            size(switch.get("formula")),
        )
    return table


def _wire(run: RecordedRun) -> Table:
    table = _table("Sent by rank 0 per optimizer step", ("", "bytes"))
    wire = run.summary["wire"]
    for op, num_bytes in sorted(wire.items(), key=lambda item: -item[1]):
        table.add_row(op, size(num_bytes))
    table.add_row("together", size(sum(wire.values())), style="bold")
    table.add_row("bound", size(run.formula.get("wire_bound")))
    return table
