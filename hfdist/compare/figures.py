"""From the raw samples of compare.json to the figures that are shown. Pure: no torch, no processes.

loss of a step     mean over label tokens of all ranks and micro-steps (over micro-steps where there are no labels)
wall of a step     of the slowest rank; CPU seconds of a step: of all ranks together, all threads
of a round         the median over its steps, without the first ones, in which engines set themselves up
of an engine       median over rounds, with the least and the most of them
ratio              hfdist's round over the engine's same round, pair by pair; below 1 hfdist takes less
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hfdist.compare.engines import BASE
from hfdist.errors import ConfigError, say

# Losses that differ by more than this are said to differ.
LOSS_TOLERANCE = 1e-5
# Steps of a launch that are not timed.
WARM_UP = 2


@dataclass(frozen=True)
class Spread:
    """Median, least and most of some numbers."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        """None of no numbers."""
        return cls(statistics.median(values), min(values), max(values)) if values else None


@dataclass
class Row:
    """One engine. What it did not get to is None or empty."""

    engine: str
    what: str
    error: str | None = None
    rounds: int = 0  # timed launches that went well
    losses: list[float] = field(default_factory=list)
    # By step, against the base.
    loss_off: list[float] = field(default_factory=list)
    loss_off_most: float | None = None
    # The first step, from 1, whose loss differs by more than LOSS_TOLERANCE; None: no step does.
    differs_from: int | None = None
    # Largest difference between two rounds of the engine itself.
    loss_repeat_off: float | None = None
    learning_rate_differs_from: int | None = None
    wall: Spread | None = None
    cpu: Spread | None = None
    wall_ratio: Spread | None = None
    cpu_ratio: Spread | None = None
    tokens_per_second: float | None = None
    startup: Spread | None = None
    # Bytes, of the rank that has most.
    peak: int | None = None  # resident, above what imports and the process group take
    peak_absolute: int | None = None
    allocated: int | None = None
    held: dict[str, int] = field(default_factory=dict)
    wire: float | None = None  # sent per step, as counted where collectives are issued
    kernel: float | None = None  # sent per step and rank, as the kernel counted, headers included
    num_parameters: int | None = None
    micro_steps: int | None = None  # of a step, by the script's own count
    deepspeed: dict[str, Any] = field(default_factory=dict)


def load(path: Path) -> dict[str, Any]:
    """A compare.json. Raises ConfigError for a file that is none."""
    import json

    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _none(path, str(error)) from None
    if not isinstance(content, dict) or content.get("kind") != "comparison":
        raise _none(path, "its kind is another")
    return content


def rows(comparison: Mapping[str, Any]) -> list[Row]:
    """A row for each engine, the base first."""
    engines = comparison["engines"]
    base = engines.get(BASE, {"launches": []})
    base_rounds = _timed(base)
    base_losses = _losses(base_rounds)
    return [_row(name, engine, base_rounds, base_losses) for name, engine in engines.items()]


def step_losses(ranks: Sequence[Mapping[str, Any]]) -> list[float]:
    """The loss of each step that all `ranks` of one launch finished."""
    result = []
    for steps in zip(*(rank["steps"] for rank in ranks), strict=False):
        losses = [loss for step in steps for loss in step["losses"]]
        labels = [count for step in steps for count in step["labels"]]
        if any(count is None for count in labels) or not sum(labels):
            result.append(statistics.fmean(losses))
        else:
            # A micro-step without labels has no loss (nan) and no weight.
            pairs = zip(losses, labels, strict=True)
            result.append(sum(loss * count for loss, count in pairs if count) / sum(labels))
    return result


def first_over(differences: Sequence[float], limit: float = LOSS_TOLERANCE) -> int | None:
    """The first step, counted from 1, whose difference is over `limit` (a nan is)."""
    return next((step for step, off in enumerate(differences, 1) if not off <= limit), None)


def rounding(listed: Sequence[Row]) -> tuple[float, int | None] | None:
    """How far ddp and single differ from each other, and from which step by more than LOSS_TOLERANCE.

    Neither has anything of hfdist's, both are right: what rounding alone does to this script. None without both.
    """
    plain = [row.losses for row in listed if row.engine in ("ddp", "single") and row.losses]
    if len(plain) < 2:
        return None
    off = [abs(a - b) for a, b in zip(*plain, strict=False)]
    return max(off), first_over(off)


def pair_ratios(base: Mapping[str, float], other: Mapping[str, float]) -> list[float]:
    """base / other of the rounds that both have."""
    return [base[name] / other[name] for name in base if name in other and other[name] > 0]


def round_times(launch: Mapping[str, Any]) -> tuple[float, float, float]:
    """(wall, CPU seconds, tokens) of a step: medians over the steps of one launch."""
    ranks = launch["ranks"]
    steps = list(zip(*(rank["steps"] for rank in ranks), strict=False))
    timed = steps[min(WARM_UP, len(steps) - 1) :]
    return (
        statistics.median(max(rank["wall"] for rank in step) for step in timed),
        statistics.median(sum(rank["cpu"] for rank in step) for step in timed),
        statistics.median(sum(rank["tokens"] for rank in step) for step in timed),
    )


def _row(
    name: str, engine: Mapping[str, Any], base_rounds: Mapping[str, Mapping[str, Any]], base_losses: list[float]
) -> Row:
    row = Row(name, engine["what"], engine["error"])
    rounds = _timed(engine)
    row.rounds = len(rounds)
    row.losses = _losses(rounds)
    row.loss_off = [abs(a - b) for a, b in zip(row.losses, base_losses, strict=False)]
    if row.loss_off:
        row.loss_off_most = max(row.loss_off)
        row.differs_from = first_over(row.loss_off)
        row.learning_rate_differs_from = first_over(
            [abs(a - b) for a, b in zip(_rates(rounds), _rates(base_rounds), strict=False)], limit=1e-12
        )
    own = [step_losses(launch["ranks"]) for launch in rounds.values()]
    if len(own) > 1:
        row.loss_repeat_off = max(abs(a - b) for other in own[1:] for a, b in zip(own[0], other, strict=False))
    times = {key: round_times(launch) for key, launch in rounds.items()}
    base_times = {key: round_times(launch) for key, launch in base_rounds.items()}
    row.wall = Spread.of([wall for wall, _, _ in times.values()])
    row.cpu = Spread.of([cpu for _, cpu, _ in times.values()])
    for index, ratio in ((0, "wall_ratio"), (1, "cpu_ratio")):
        pairs = pair_ratios({k: t[index] for k, t in base_times.items()}, {k: t[index] for k, t in times.items()})
        setattr(row, ratio, Spread.of(pairs))
    if row.wall is not None:
        row.tokens_per_second = statistics.median(tokens for _, _, tokens in times.values()) / row.wall.median
    row.startup = Spread.of([launch["startup"] for launch in rounds.values() if launch["startup"] is not None])
    counted = next((launch for launch in engine["launches"] if launch["round"] == "count"), None)
    if counted is not None and counted["ranks"]:
        _add_counts(row, counted["ranks"])
    for launch in engine["launches"]:
        for rank in launch["ranks"]:
            row.deepspeed = row.deepspeed or rank.get("engine", {}).get("deepspeed", {})
            row.num_parameters = row.num_parameters or rank.get("num_parameters")
            row.micro_steps = row.micro_steps or max((len(step["losses"]) for step in rank["steps"]), default=None)
    return row


def _add_counts(row: Row, ranks: Sequence[Mapping[str, Any]]) -> None:
    peaks = [(r["resident_peak"], r["resident_floor"]) for r in ranks if r["resident_peak"] and r["resident_floor"]]
    if peaks:
        row.peak = max(peak - floor for peak, floor in peaks)
        row.peak_absolute = max(peak for peak, _ in peaks)
    allocated = [rank["peak_allocated"] for rank in ranks if rank["peak_allocated"] is not None]
    row.allocated = max(allocated) if allocated else None
    whole = [rank for rank in ranks if "wire" in rank]
    if len(whole) < len(ranks):
        return
    row.held = dict(max(whole, key=lambda rank: sum(rank["held"].values()))["held"])
    row.wire = max(sum(rank["wire"].values()) for rank in whole)
    kernel = whole[0]["kernel"]
    row.kernel = None if kernel is None else kernel / len(whole)


def _timed(engine: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """round -> launch, of the timed launches that went well."""
    return {
        launch["round"]: launch
        for launch in engine["launches"]
        if launch["round"] != "count" and launch["error"] is None and launch["ranks"]
    }


def _losses(rounds: Mapping[str, Mapping[str, Any]]) -> list[float]:
    first = next(iter(rounds.values()), None)
    return step_losses(first["ranks"]) if first else []


def _rates(rounds: Mapping[str, Mapping[str, Any]]) -> list[float]:
    first = next(iter(rounds.values()), None)
    return [step["lr"] for step in first["ranks"][0]["steps"]] if first else []


def _none(path: Path, why: str) -> ConfigError:
    return ConfigError(
        say(given=f"{path} ({why})", expected="a compare.json", do="Name one that `hfdist compare` wrote.")
    )
