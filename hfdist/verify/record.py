"""The results of `hfdist models --verify`: a JSON file written after every type, a table, a page.

    {"llama": {"key": "3f0c...", "versions": {"torch": "2.13.0", ...}, "date": "2026-12-01", "seconds": 4.1,
               "not_built": "", "verdicts": {"zero3": {"status": "verified", ...}, "tp": {...}}}, ...}

A result counts as long as its key does: versions, and hfdist's sources but for those that only start or show things.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
from collections import Counter
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.table import Table

from hfdist.verify.check import TECHNIQUES
from hfdist.verify.judge import Verdict, first_sentence

HEADINGS = {"zero3": "ZeRO-3", "tp": "TP 2", "pp": "PP 2", "3d": "3D 2x2"}


_PACKAGE = Path(__file__).parents[1]
# Sources that no result depends on.
_ASIDE = ("cli.py", "compare", "configs", "native.py", "recipe", "report", "run.py")
_ASIDE_HERE = ("verify/__init__.py", "verify/command.py", "verify/record.py")


@dataclass(frozen=True)
class Result:
    """What is known of one type."""

    key: str
    versions: dict[str, str]
    date: str
    seconds: float = 0.0
    not_built: str = ""  # why there is no tiny model, instead of verdicts
    verdicts: dict[str, Verdict] = field(default_factory=dict)


def versions() -> dict[str, str]:
    """Of what a result depends on."""
    return {name: version(name) for name in ("torch", "transformers", "accelerate")}


def current_key() -> str:
    """Of the installed versions and hfdist's sources; a result with another key is out of date."""
    digest = hashlib.sha256(json.dumps(versions(), sort_keys=True).encode())
    for path in sorted(_PACKAGE.rglob("*.py")):
        name = path.relative_to(_PACKAGE)
        if name.parts[0] not in _ASIDE and name.as_posix() not in _ASIDE_HERE:
            digest.update(name.as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def new_result(key: str, *, seconds: float, not_built: str = "", verdicts: dict[str, Verdict] | None = None) -> Result:
    """A result of today; `key` as it was when the ranks started, which keep the sources they loaded."""
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    return Result(key, versions(), today, round(seconds, 1), not_built, verdicts or {})


def load_results(path: Path) -> dict[str, Result]:
    """Type -> result, of `path`; empty when there is no such file."""
    if not path.exists():
        return {}
    rows: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return {
        name: Result(**{**row, "verdicts": {t: Verdict(**cell) for t, cell in row["verdicts"].items()}})
        for name, row in rows.items()
    }


def save_results(path: Path, results: dict[str, Result]) -> None:
    """Write all of `results`; a run that is killed meanwhile leaves the file as it was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".tmp")
    rows = {name: asdict(result) for name, result in sorted(results.items())}
    beside.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    os.replace(beside, path)


def cells(result: Result | None) -> list[str]:
    """The row of a type after its name: a word per technique, and the reason for what is not verified."""
    if result is None:
        return [*["" for _ in TECHNIQUES], "not run"]
    if result.not_built:
        return [*["-" for _ in TECHNIQUES], f"not built tiny: {first_sentence(result.not_built)}"]
    reasons: dict[str, list[str]] = {}
    for technique, verdict in result.verdicts.items():
        if verdict.status != "verified":
            reasons.setdefault(first_sentence(verdict.reason), []).append(HEADINGS[technique])
    said = "; ".join(f"{', '.join(names)}: {reason}" for reason, names in reasons.items())
    return [*[result.verdicts[t].status if t in result.verdicts else "" for t in TECHNIQUES], said]


def totals(types: list[str], results: dict[str, Result]) -> list[str]:
    """One line a technique, of `types` only: how many are verified, how many are what else."""
    present = [results[name] for name in types if name in results]
    built = [result for result in present if not result.not_built]
    lines = [f"{len(types)} types, {len(present)} run, {len(built)} of them built tiny"]
    for technique, heading in HEADINGS.items():
        counts = Counter(r.verdicts[technique].status for r in built if technique in r.verdicts)
        rest = ", ".join(f"{count} {status}" for status, count in counts.most_common() if status != "verified")
        lines.append(f"{heading}: {counts['verified']} verified" + (f", {rest}" if rest else ""))
    return lines


def table(types: list[str], results: dict[str, Result], *, key: str) -> Table:
    """A rich table of `types`; a result of other versions or sources is marked old."""
    shown = Table("type", *HEADINGS.values(), "", header_style="bold", row_styles=["", "dim"])
    for name in types:
        result = results.get(name)
        old = " (old)" if result is not None and result.key != key else ""
        shown.add_row(name + old, *(_colored(cell) for cell in cells(result)))
    return shown


def _colored(cell: str) -> str:
    cell = cell.replace("[", "\\[")
    color = {"verified": "green", "refused": "yellow", "unsplit": "yellow"}.get(cell)
    color = color or ("red" if cell in ("wrong", "failed", "died") else None)
    return f"[{color}]{cell}[/]" if color else cell


def page(types: list[str], results: dict[str, Result]) -> str:
    """The results as Markdown, with the dates and versions they are of."""
    present = [results[name] for name in types if name in results]
    dates = sorted({result.date for result in present})
    known = sorted({", ".join(f"{n} {v}" for n, v in result.versions.items()) for result in present})
    lines = [
        "# Causal language models",
        "",
        "Every type that `AutoModelForCausalLM` has, built tiny, trained one step and compared with one process in",
        "fp32: loss and all gradients within 1e-5. Verified means really split as well: at most 0.6 of the blocks'",
        "parameters on a rank for each axis of size 2, every block on one stage, an all-reduce in every block of TP.",
        "Where TP or PP refuses a type, 3D is not tried: it refuses with the same words.",
        "",
        "- verified: all of that holds",
        "- refused: an error before any work, whose first sentence is in the last column",
        "- unsplit: the numbers are right, but it is not split as above",
        "- wrong, failed, died: a number differs; an error on the way; a rank that ended or did not answer",
        "",
        f"{' to '.join(dict.fromkeys([dates[0], dates[-1]])) if dates else 'Not run'}; {'; '.join(known)}.",
        "Made by `hfdist models --verify all --page docs/models.md`.",
        "",
        *(f"- {line}" for line in totals(types, results)),
        "",
        "| type | " + " | ".join(HEADINGS.values()) + " | why not |",
        "|---" * (len(HEADINGS) + 2) + "|",
    ]
    for name in types:
        lines.append("| " + " | ".join([name, *(c.replace("|", "\\|") for c in cells(results.get(name)))]) + " |")
    return "\n".join(lines) + "\n"
