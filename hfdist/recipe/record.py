"""The run record: one JSON object a line, so that a run that dies leaves all that it had.

{"kind": "header", "recipe": "zero3", "world_size": 2, "settings": {...}, "versions": {...}, ...}
{"kind": "held_out", "step": 0, "loss": 9.06}
{"kind": "step", "step": 1, "loss": 9.05, "lr": 0.0002, "seconds": 0.41}
{"kind": "summary", "loss_from": ..., "tokens_per_second": ..., "memory": [one object a rank], "wire": {...}}
"""

from __future__ import annotations

import json
import platform
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("hfdist", "torch", "accelerate", "transformers", "deepspeed", "datasets", "tokenizers")


class RecordWriter:
    """Appends lines to a new file; each is on the disk's side of the process when `write` returns."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._file = path.open("w", encoding="utf-8", buffering=1)

    def write(self, kind: str, **values: Any) -> None:
        self._file.write(json.dumps({"kind": kind, **values}) + "\n")

    def close(self) -> None:
        self._file.close()


def read_record(path: Path) -> list[dict[str, Any]]:
    """The lines of a record, oldest first; a last line that was cut short is left out."""
    lines = path.read_text(encoding="utf-8").split("\n")
    complete, rest = lines[:-1], lines[-1]
    del rest  # Empty, or what a killed run had half written.
    return [json.loads(line) for line in complete]


def new_record_path(recipe: str) -> Path:
    """`runs/zero3-20261201-030501.jsonl`, with a number behind it if that second is taken."""
    stem = f"{recipe}-{time.strftime('%Y%m%d-%H%M%S')}"
    path = Path("runs") / f"{stem}.jsonl"
    number = 1
    while path.exists():
        number += 1
        path = Path("runs") / f"{stem}-{number}.jsonl"
    return path


def versions() -> dict[str, str]:
    """What ran: Python, the platform and the packages that matter here."""
    found = {"python": platform.python_version(), "platform": platform.platform(terse=True)}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
