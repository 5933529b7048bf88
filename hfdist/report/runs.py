"""A run record as an object, for the table and the plot."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hfdist.errors import ConfigError, say
from hfdist.plan import format_bytes
from hfdist.recipe.record import read_record

# Owners a person asks about, and which rows of a MemoryReport make them up. What is gathered is parameters too.
ROWS = {
    "parameters": ("parameters", "gathered"),
    "gradients": ("gradients",),
    "optimizer": ("optimizer",),
}


@dataclass(frozen=True)
class RecordedRun:
    """Lines of one record. `summary` is empty when the run did not finish."""

    path: Path
    header: dict[str, Any]
    steps: list[dict[str, Any]]
    held_out: list[dict[str, Any]]
    switches: list[dict[str, Any]]
    summary: dict[str, Any]

    @property
    def ranks(self) -> list[dict[str, Any]]:
        """Memory of each rank."""
        return self.summary.get("memory", [])

    @property
    def formula(self) -> dict[str, int | None]:
        """What the plan says of the rows of `ROWS`, of `peak_total` and of the wire."""
        return self.summary.get("formula", {})

    def formula_total(self) -> int | None:
        """The rows of `ROWS` together; None when the record has no formula for one of them."""
        parts = [self.formula.get(row) for row in ROWS]
        return None if None in parts else sum(part or 0 for part in parts)

    def title(self) -> str:
        """`zero3, 2 ranks, fp32, 9.4 M parameters`."""
        head = self.header
        ranks = f"{head['world_size']} rank" + "s" * (head["world_size"] != 1)
        return f"{head['recipe']}, {ranks}, {head['precision']}, {head['num_parameters'] / 1e6:.1f} M parameters"


def load_run(path: Path) -> RecordedRun:
    """Read a record. Raises ConfigError for a file that is none."""
    try:
        lines = read_record(path)
    except (OSError, ValueError) as error:
        raise _no_record(path, str(error)) from error
    if not lines or lines[0].get("kind") != "header":
        raise _no_record(path, "its first line is no header")

    def of(kind: str) -> list[dict[str, Any]]:
        return [line for line in lines if line["kind"] == kind]

    return RecordedRun(path, lines[0], of("step"), of("held_out"), of("switch"), (of("summary") or [{}])[-1])


def row_bytes(memory: dict[str, Any], row: str) -> int:
    """Bytes of one row of `ROWS` in a MemoryReport written as a dict."""
    return sum(memory.get(owner) or 0 for owner in ROWS[row])


def size(num_bytes: float | None) -> str:
    """`18.9 MB`; `-` for None."""
    return "-" if num_bytes is None else format_bytes(num_bytes)


def _no_record(path: Path, why: str) -> ConfigError:
    return ConfigError(
        say(given=f"{path} ({why})", expected="the jsonl record of a run", do="Name one that a recipe wrote, in runs/.")
    )
