"""Resident memory of this process as the system counts it; None where the system does not say.

`anonymous_bytes()` is what the process itself allocated. Weights that a loader maps from a file are left out: the
system may drop them at any time, while the usual high-water mark (`peak_resident_bytes`) counts them.

glibc keeps freed memory below a threshold that grows while a program runs, so a number taken after a peak still shows
it. For figures that mean something start the process with
`MALLOC_MMAP_THRESHOLD_=131072 MALLOC_TRIM_THRESHOLD_=131072`.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


def _status_bytes(field: str) -> int | None:
    """A line of /proc/self/status (`RssAnon:   1234 kB`) in bytes, or None where there is none."""
    try:
        with open("/proc/self/status") as status:
            for line in status:
                if line.startswith(field + ":"):
                    return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        return None
    return None


def anonymous_bytes() -> int | None:
    """Anonymous resident bytes now (Linux)."""
    return _status_bytes("RssAnon")


def resident_bytes() -> int | None:
    """Resident bytes now, file mappings included."""
    import psutil

    return int(psutil.Process().memory_info().rss)


def peak_resident_bytes() -> int | None:
    """The most resident bytes this process ever had, file mappings included (Linux, macOS)."""
    peak = _status_bytes("VmHWM")
    if peak is not None:
        return peak
    try:
        import resource
    except ImportError:  # Windows
        return None
    # The one field whose unit differs: bytes on macOS, KiB elsewhere.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


@dataclass
class ResidentSampler:
    """Anonymous resident bytes over a block: when it began, the most seen, and how often it was looked at."""

    start: int = 0
    peak: int = 0
    num_samples: int = 0

    @property
    def growth(self) -> int:
        """The peak above where the block began."""
        return self.peak - self.start

    def sample(self) -> None:
        now = anonymous_bytes()
        if now is not None:
            self.peak = max(self.peak, now)
            self.num_samples += 1


@contextmanager
def sample_resident(interval: float = 0.002) -> Iterator[ResidentSampler]:
    """Look at anonymous resident memory every `interval` seconds from a thread until the block ends.

    A peak shorter than the interval can be missed; an allocation counts once its pages are written. Raises RuntimeError
    where the system does not tell (`anonymous_bytes()` is None).
    """
    start = anonymous_bytes()
    if start is None:
        raise RuntimeError(
            f"Got {sys.platform}, which does not say how much memory is anonymous. Expected Linux with /proc. "
            "Use peak_resident_bytes() instead."
        )
    sampler = ResidentSampler(start=start, peak=start)
    done = threading.Event()

    def watch() -> None:
        while not done.wait(interval):
            sampler.sample()

    thread = threading.Thread(target=watch, name="hfdist-resident", daemon=True)
    thread.start()
    try:
        yield sampler
    finally:
        done.set()
        thread.join()
        sampler.sample()
