"""What `hfdist compare` does, from its arguments to the table and the picture."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from hfdist.compare import engines, session
from hfdist.compare.session import Comparison, Session


def compare(
    config: Path,
    script: str,
    args: tuple[str, ...],
    *,
    against: str,
    steps: int,
    repeats: int,
    out: Path | None,
    num_processes: int | None = None,
    timeout: float = 900.0,
    extras: bool = True,
) -> Path:
    """Compare, print, draw; the path of compare.json. Raises ConfigError before anything is launched."""
    content, asked = engines.read_asked(str(config), num_processes=num_processes, environ=os.environ)
    chosen = engines.parse_against(against, distributed_type=asked.distributed_type, extras=extras)
    comparison = Comparison(
        config=config,
        script=script,
        args=args,
        chosen=tuple(chosen),
        asked=asked,
        content=content,
        steps=steps,
        repeats=repeats,
        out=(out or Path("runs") / f"compare-{time.strftime('%Y%m%d-%H%M%S')}").resolve(),
        timeout=timeout,
        command=shlex.join(["hfdist", *sys.argv[1:]]),
    )
    session.verify(comparison)
    # The ranks must not outlive a comparison that is told to end: an exception passes the places that end them.
    before = signal.signal(signal.SIGTERM, _end)
    try:
        with session.progress(len(chosen) * (repeats + 1)) as follow:
            path = Session(comparison, follow).run()
    finally:
        signal.signal(signal.SIGTERM, before)
    show_again([path], path.with_name("compare.png"))
    return path


def show_again(paths: Sequence[Path], plot: Path | None) -> None:
    """Print the comparisons of compare.json files; draw them when `plot` names a PNG (several: numbered)."""
    from hfdist.compare import figures
    from hfdist.compare.plot import draw
    from hfdist.compare.table import show

    for number, path in enumerate(paths, 1):
        show(path)
        if plot is None or not any(row.losses for row in figures.rows(figures.load(path))):
            continue
        picture = plot if len(paths) == 1 else plot.with_stem(f"{plot.stem}-{number}")
        draw(path, picture)
        print(f"Picture: {picture}")


def _end(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
