"""The whole parity matrix, resumable: `python -m tests.matrix [--axis grid] [--only llama] [--limit 100]`.

Every cell of `tests.parity.axes` (ZeRO, pipeline, tensor, and grids of the three) is compared with one process. Each
result is written at once, so an interrupted run goes on where it stopped; results made by other sources or other
versions do not count and are dropped. Ends with code 1 when a cell failed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tests.parity.axes import all_cells
from tests.pool import ROOT, Pools


def fingerprint() -> dict[str, str]:
    """What a result depends on: the sources of hfdist and of the tests, and the versions beneath."""
    digest = hashlib.sha256()
    for path in sorted(
        [*(ROOT / "hfdist").rglob("*.py"), *(ROOT / "tests").glob("*.py"), *(ROOT / "tests/parity").glob("*.py")]
    ):
        digest.update(path.relative_to(ROOT).as_posix().encode())
        digest.update(path.read_bytes())
    versions = {name: version(name) for name in ("torch", "accelerate", "transformers")}
    return {"sources": digest.hexdigest(), **versions}


def load(path: Path, made_by: dict[str, str]) -> dict[str, Any]:
    """The cells done before by the same sources and versions; empty when there are none."""
    if path.exists():
        record = json.loads(path.read_text())
        if record["made_by"] == made_by:
            return record["cells"]
    return {}


def save(path: Path, made_by: dict[str, str], cells: dict[str, Any]) -> None:
    """Write the record in one go: a run that is killed leaves the old or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps({"made_by": made_by, "cells": cells}, indent=1))
    os.replace(temporary, path)


def main(arguments: list[str] | None = None) -> int:
    """Run what is not done yet; 0 when every chosen cell passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path, default=Path("runs/matrix.json"), help="where results are kept")
    parser.add_argument("--axis", default="", help="cells of one axis: zero, pipeline, tensor or grid")
    parser.add_argument("--only", default="", help="cells whose name contains this")
    parser.add_argument("--limit", type=int, default=None, help="stop after so many cells that were not done")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    made_by = fingerprint()
    done = load(options.record, made_by)
    chosen = [cell for cell in all_cells() if options.axis in ("", cell.axis) and options.only in cell.name]
    if not chosen:
        print(
            f"No cell of axis {options.axis or 'any'!r} has {options.only!r} in its name; one cell is "
            f"{all_cells()[0].name}, of axis {all_cells()[0].axis}.",
            file=sys.stderr,
        )
        return 2
    todo = [cell for cell in chosen if done.get(cell.name, {}).get("error", "not run") is not None]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    pools, world_size = Pools(), 0
    try:
        with Progress(*columns) as progress:
            task = progress.add_task("parity", total=len(chosen), completed=len(chosen) - len(todo))
            for cell in todo[: options.limit]:
                if cell.world_size != world_size:
                    pools.close()
                    world_size = cell.world_size
                progress.update(task, description=cell.name)
                start, error = time.perf_counter(), None
                try:
                    cell.check(pools)
                except AssertionError as failure:
                    error = str(failure)
                    progress.console.print(f"{cell.name}: {error.splitlines()[0]}", markup=False)
                done[cell.name] = {"error": error, "seconds": round(time.perf_counter() - start, 2)}
                save(options.record, made_by, done)
                progress.advance(task)
    finally:
        pools.close()
    results = [done.get(cell.name) for cell in chosen]
    failed = sum(result is not None and result["error"] is not None for result in results)
    missing = results.count(None)
    print(
        f"{len(chosen)} cells: {len(chosen) - failed - missing} equal one process, {failed} failed, "
        f"{missing} not run yet"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
