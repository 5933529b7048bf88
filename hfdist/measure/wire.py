"""Bytes this rank puts on the wire, counted where collectives are issued.

`comm.py` calls `record(op, nbytes_sent, group_size=...)` beside every collective; with nobody recording that is one
truth test of a module global (about 0.1 us). `record_wire()` listens:

    with record_wire() as wire:
        train_step()
    wire.total_bytes            # sent by this rank
    wire.by_op["all_gather"]    # of that, by all-gathers

What a collective has to send at least is `ring_bytes`. Worked for N = 4 ranks and 1,000 fp32 gradients (4,000 bytes):

    all_gather       each rank sends its quarter to 3 others:        (N-1)/N x 4,000 = 3,000
    reduce_scatter   each rank sends 3 quarters away:                (N-1)/N x 4,000 = 3,000
    all_reduce       a reduce-scatter and an all-gather:            2(N-1)/N x 4,000 = 6,000

`interface_bytes()` is the independent check: what the kernel sent through a network interface (Linux only; `None`
elsewhere), of use in a network namespace where nobody else talks (`own_network_namespace`).
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, get_args

Collective = Literal[
    "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "reduce", "scatter", "gather", "send"
]

# Called as listener(op, nbytes_sent, group_size, label) at every collective, in the thread that issues it.
Listener = Callable[[str, int, int, str], None]

# Replaced, never mutated: a thread in `record` iterates over the tuple it saw.
_listeners: tuple[Listener, ...] = ()
_listeners_lock = threading.Lock()
# One for all recorders, so that a recorder is plain data.
_counting_lock = threading.Lock()


def record(op: str, nbytes_sent: int, *, group_size: int, label: str = "") -> None:
    """Say that this rank sends `nbytes_sent` bytes in a collective `op` over `group_size` ranks."""
    if not _listeners:
        return
    for listener in _listeners:
        listener(op, nbytes_sent, group_size, label)


def is_recording() -> bool:
    """Whether anybody listens; lets a caller skip working out a byte count."""
    return bool(_listeners)


@contextmanager
def listen(listener: Listener) -> Iterator[None]:
    """Call `listener(op, nbytes_sent, group_size, label)` at every collective until the block ends."""
    global _listeners
    with _listeners_lock:
        _listeners = (*_listeners, listener)
    try:
        yield
    finally:
        with _listeners_lock:
            # Remove one registration, by identity: the same listener may be registered by a nested block.
            position = max(index for index, entry in enumerate(_listeners) if entry is listener)
            _listeners = _listeners[:position] + _listeners[position + 1 :]


@dataclass
class WireRecorder:
    """Bytes sent by this rank since the block began; calls are collectives."""

    total_bytes: int = 0
    num_calls: int = 0
    by_op: dict[str, int] = field(default_factory=dict)
    calls_by_op: dict[str, int] = field(default_factory=dict)
    by_label: dict[str, int] = field(default_factory=dict)

    def __call__(self, op: str, nbytes_sent: int, group_size: int, label: str) -> None:
        # On an accelerator backward runs in a thread of its own.
        with _counting_lock:
            self.total_bytes += nbytes_sent
            self.num_calls += 1
            self.by_op[op] = self.by_op.get(op, 0) + nbytes_sent
            self.calls_by_op[op] = self.calls_by_op.get(op, 0) + 1
            if label:
                self.by_label[label] = self.by_label.get(label, 0) + nbytes_sent


@contextmanager
def record_wire() -> Iterator[WireRecorder]:
    """Count what this rank sends inside the block. Blocks nest; each counts for itself."""
    recorder = WireRecorder()
    with listen(recorder):
        yield recorder


def ring_bytes(op: Collective, payload_bytes: int, group_size: int) -> int:
    """The least one rank sends in a bandwidth-optimal `op` over `group_size` ranks, rounded down.

    `payload_bytes` is the whole tensor: the output of an all-gather and of a gather, the input of a reduce-scatter, of
    an all-to-all and of a scatter, the tensor of an all-reduce, broadcast, reduce and send. For the rooted ones it is
    what the busiest rank sends in a ring: the root of a broadcast or scatter, any other rank of a reduce or gather.

    >>> [ring_bytes(op, 4000, 4) for op in ("all_gather", "reduce_scatter", "all_to_all", "all_reduce", "broadcast")]
    [3000, 3000, 3000, 6000, 4000]
    >>> ring_bytes("all_reduce", 4000, 1)
    0
    """
    if group_size <= 1:
        return 0
    if op in ("all_gather", "reduce_scatter", "all_to_all", "scatter"):
        return payload_bytes * (group_size - 1) // group_size
    if op == "all_reduce":
        return 2 * payload_bytes * (group_size - 1) // group_size
    if op in ("broadcast", "reduce", "send"):
        return payload_bytes
    if op == "gather":
        return payload_bytes // group_size
    raise ValueError(f"Got collective {op!r}. Expected one of {', '.join(get_args(Collective))}. Name one of these.")


def interface_bytes(interface: str = "lo") -> int | None:
    """Bytes sent through `interface` since it came up (headers included), or None where the system does not say.

    Only sent bytes: on the loopback what one process sends another receives, and both directions count the same.
    """
    try:
        # The thread's own view: /proc/net follows the main thread, whose namespace may differ.
        with open("/proc/thread-self/net/dev") as table:
            for line in table:
                name, _, counters = line.partition(":")
                if name.strip() == interface:
                    return int(counters.split()[8])
    except (OSError, ValueError, IndexError):
        return None
    return None


def own_network_namespace() -> str | None:
    """Move this process into a network namespace of its own with a working loopback; children inherit it.

    Call it first in a fresh process: no thread and no socket from before follows. Returns None when done, otherwise why
    it could not be done (not Linux, not allowed): the caller decides whether to go on without.
    """
    if not sys.platform.startswith("linux"):
        return f"network namespaces exist on Linux only, this is {sys.platform}"
    # Imported here: neither exists everywhere hfdist runs.
    import ctypes
    import fcntl
    import socket
    import struct

    clone_newnet, get_flags, set_flags, flag_up = 0x40000000, 0x8913, 0x8914, 0x1
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(clone_newnet) != 0:
        return f"unshare(CLONE_NEWNET): {os.strerror(ctypes.get_errno())} (needs root)"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        request = fcntl.ioctl(control, get_flags, struct.pack("16sh14x", b"lo", 0))
        (flags,) = struct.unpack_from("h", request, 16)
        try:
            fcntl.ioctl(control, set_flags, struct.pack("16sh14x", b"lo", flags | flag_up))
        except OSError as error:
            return f"bringing up the loopback: {error}"
    return None
