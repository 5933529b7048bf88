"""The tables of a comparison on the terminal: losses and time, memory and wire, and what must be known to read them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from hfdist.compare.engines import BASE
from hfdist.compare.figures import LOSS_TOLERANCE, WARM_UP, Row, Spread, load, rounding, rows
from hfdist.report.runs import size


def show(path: Path, *, console: Console | None = None) -> None:
    """Print the comparison of a compare.json."""
    comparison = load(path)
    listed = rows(comparison)
    if console is None:
        console = Console()
        if not console.is_terminal:
            console = Console(width=max(console.width, 120))  # a log has no edge at 80
    console.print()
    console.print(Text(title(comparison, listed), style="bold"))
    console.print(_times(listed))
    console.print(_memory(listed, by_kernel=bool(comparison["counted_by_the_kernel"])))
    if any(row.deepspeed for row in listed):
        console.print(_deepspeed(listed))
    for line in (*notes(comparison, listed), *errors(listed)):
        console.print(line)
    console.print(f"Everything: {path}", soft_wrap=True)


def title(comparison: Mapping[str, Any], listed: Sequence[Row]) -> str:
    """`zero3.yaml: DEEPSPEED stage 3, 2 ranks, fp32, 9.4 M parameters, 20 steps x 5`."""
    asked = comparison["asked"]
    numel = next((row.num_parameters for row in listed if row.num_parameters), None)
    rounds = max((row.rounds for row in listed), default=0)
    parts = [
        f"{Path(comparison['script']).name} under {Path(comparison['config']).name}",
        f"{asked['distributed_type']} stage {asked['stage']}",
        f"{asked['num_processes']} ranks",
        {"no": "fp32"}.get(asked["precision"], asked["precision"]),
        *([f"{numel / 1e6:.1f} M parameters" if numel > 100_000 else f"{numel:,} parameters"] if numel else []),
        f"{comparison['steps']} steps, {rounds} round{'s' * (rounds != 1)}",
    ]
    return ", ".join(parts)


def _table(name: str, columns: Iterable[str]) -> Table:
    table = Table(title=name, title_justify="left", title_style="bold cyan", header_style="dim", box=box.SIMPLE_HEAD)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", no_wrap=number == 0)
    return table


def _times(listed: Sequence[Row]) -> Table:
    table = _table(
        "Loss and time of a step: median (least to most of the rounds)",
        ("engine", "loss off", "from", "wall ms", "CPU ms", "hfdist/it, wall", "hfdist/it, CPU", "tokens/s"),
    )
    for row in listed:
        if row.wall is None:
            table.add_row(row.engine, *["-"] * 7, style="dim")
            continue
        table.add_row(
            row.engine,
            "base" if row.engine == BASE else _off(row.loss_off_most),
            "-" if row.differs_from is None else str(row.differs_from),
            spread(row.wall, 1e3, ".0f"),
            spread(row.cpu, 1e3, ".0f"),
            spread(None if row.engine == BASE else row.wall_ratio, 1, ".2f"),
            spread(None if row.engine == BASE else row.cpu_ratio, 1, ".2f"),
            "-" if row.tokens_per_second is None else f"{row.tokens_per_second:,.0f}",
            style="bold" if row.engine == BASE else None,
        )
    return table


def _memory(listed: Sequence[Row], *, by_kernel: bool) -> Table:
    on_device = any(row.allocated is not None for row in listed)
    columns = ["engine", "peak", *(["allocated"] if on_device else []), "params", "grads"]
    columns += ["optimizer", "buffers", "sent", *(["kernel"] if by_kernel else []), "first step"]
    table = _table("Memory and wire of a rank, start-up", columns)
    for row in listed:
        cells = [size(row.peak), *([size(row.allocated)] if on_device else [])]
        cells += [size(row.held.get(owner)) for owner in ("parameters", "gradients", "optimizer", "communication")]
        cells += [size(row.wire), *([size(row.kernel)] if by_kernel else [])]
        cells += ["-" if row.startup is None else f"{row.startup.median:.1f} s"]
        table.add_row(row.engine, *cells, style="bold" if row.engine == BASE else None)
    return table


def _deepspeed(listed: Sequence[Row]) -> Table:
    """Settings that decide DeepSpeed's work, wire and memory, as its engine had them after all defaults."""
    having = [row for row in listed if row.deepspeed]
    table = _table("What DeepSpeed ran with", ("", *(row.engine for row in having)))
    for name in having[0].deepspeed:
        table.add_row(name, *(_short(row.deepspeed.get(name)) for row in having))
    return table


def notes(comparison: Mapping[str, Any], listed: Sequence[Row]) -> list[str]:
    """What a reader has to know, each a line."""
    asked = comparison["asked"]
    lines = [
        f"CPU ms: of all ranks together. The first {WARM_UP} steps are not timed. hfdist/it: round by round, below 1 "
        "hfdist takes less.",
        f"loss off: largest difference to hfdist in a step; from: the first step where it exceeds {LOSS_TOLERANCE:g}.",
        "peak: resident, above imports. params to buffers: held just before the update. sent: in a step, as counted "
        "where collectives are issued; kernel: as the kernel counted. first step: from the launch to its end.",
    ]
    micro = next((row.micro_steps for row in listed if row.micro_steps), asked["accumulation"])
    clipping = "nothing is clipped" if asked["clipping"] is None else f"clipping at {asked['clipping']:g}"
    lines.append(
        f"All engines: {clipping}, {micro} micro-step{'s' * (micro != 1)}, the script's optimizer (but native-cpuadam)."
    )
    plain = rounding(listed)
    if plain is not None:
        since = "" if plain[1] is None else f", by more than {LOSS_TOLERANCE:g} from step {plain[1]} on"
        lines.append(f"What rounding does: ddp and single differ from each other by up to {plain[0]:.1e}{since}.")
    for row in listed:
        if row.learning_rate_differs_from is not None:
            lines.append(
                f"{row.engine}: another learning rate than hfdist from step {row.learning_rate_differs_from} on "
                "(its scheduler steps otherwise)."
            )
        if row.loss_repeat_off:
            lines.append(f"{row.engine}: losses of its own rounds differ by up to {row.loss_repeat_off:.1e}.")
    return [escape(line) for line in lines]


def errors(listed: Sequence[Row]) -> list[str]:
    """A line for each engine that failed, in its own words."""
    return [f"[red]{escape(row.engine)} failed:[/red] {escape(row.error)}" for row in listed if row.error]


def spread(value: Spread | None, factor: float, form: str) -> str:
    """`78 (76-81)`, the parentheses only where there are several values."""
    if value is None:
        return "-"
    median, least, most = (f"{v * factor:{form}}" for v in (value.median, value.least, value.most))
    return median if value.least == value.most else f"{median} ({least}-{most})"


def _off(value: float | None) -> str:
    if value is None:
        return "-"
    return "0" if value == 0 else f"{value:.1e}"


def _short(value: object) -> str:
    number = isinstance(value, int) and not isinstance(value, bool)
    return f"{value:g}" if number and abs(int(str(value))) >= 1_000_000 else str(value)
