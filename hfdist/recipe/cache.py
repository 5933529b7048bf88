"""What is made once and kept: the trained tokenizer, the packed tokens, unpacked real data.

Guarantee: whatever is found under `cache_dir()` is whole. It is built beside its place and moved there in one
rename, and of several ranks (or recipes) that want the same thing one builds while the others wait. A killed builder
leaves no lock: the lock is the kernel's and ends with the process."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from hfdist.errors import ConfigError, say


def cache_dir() -> Path:
    """`$HFDIST_CACHE`, else `hfdist` under `$XDG_CACHE_HOME` or `~/.cache`."""
    named = os.environ.get("HFDIST_CACHE")
    if named:
        return Path(named).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").expanduser() / "hfdist"


def build_once(name: str, build: Callable[[Path], None]) -> Path:
    """The path `cache_dir()/name`; if it does not exist, `build(temporary_path)` makes it (a file or a directory)."""
    from filelock import FileLock

    target = cache_dir() / name
    if target.exists():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{target}.lock"):
            if not target.exists():
                for left in target.parent.glob(f".{target.name}.*"):  # by a builder that was killed: the lock is ours
                    shutil.rmtree(left, ignore_errors=True)
                # Same directory, so that the rename is one and never a copy across file systems.
                scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
                try:
                    build(scratch / "new")
                    os.replace(scratch / "new", target)
                finally:
                    shutil.rmtree(scratch, ignore_errors=True)
    except OSError as error:
        raise ConfigError(
            say(
                given=f"the cache directory {cache_dir()} ({error})",
                expected="a directory that can be written, with room for what is built",
                do="Set HFDIST_CACHE to one.",
            )
        ) from error
    return target
