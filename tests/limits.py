"""A limit on a process's own memory, so that an allocation really fails where a test wants it to."""

from __future__ import annotations

import contextlib
import ctypes
import resource
from collections.abc import Iterator


def data_bytes() -> int:
    """What counts against `RLIMIT_DATA` (Linux): private writable memory, written to or not."""
    with open("/proc/self/status") as status:
        for line in status:
            if line.startswith("VmData:"):
                return int(line.split()[1]) * 1024
    raise OSError("no VmData in /proc/self/status")


@contextlib.contextmanager
def limit_data(headroom: int) -> Iterator[None]:
    """Allocations beyond `headroom` bytes more than now fail inside the block: in torch with a RuntimeError of the
    DefaultCPUAllocator, in Python with MemoryError, in C++ with std::bad_alloc.

    Memory that was freed to the allocator but not to the system can be used again without counting; `give_memory_back`
    first. A new thread needs 8 MiB for its stack.
    """
    give_memory_back()
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (data_bytes() + headroom, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def give_memory_back() -> None:
    """From now on glibc returns freed blocks of 128 KiB and more to the system at once, and what it keeps is trimmed.

    Without it the threshold grows with the blocks a program frees (up to 32 MiB), and resident memory shows the past.
    """
    libc = ctypes.CDLL(None)
    trim_threshold, mmap_threshold = -1, -3
    libc.mallopt(trim_threshold, 131072)
    libc.mallopt(mmap_threshold, 131072)
    libc.malloc_trim(0)
