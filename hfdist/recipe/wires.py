"""Bytes on the wire of engines that are not ours: every collective of torch.distributed, seen where it is issued.

torch routes each collective through its dispatcher (`c10d::allreduce_`, ...), also those that DDP and FSDP issue
from C++. `watch_collectives()` looks on there and hands what it sees to `hfdist.measure.wire`, by the same ring
formula as our own counters. It slows a step, so that `Run` watches a single one. gloo runs a reduce-scatter as an
all-reduce (twice the bytes, measured); it is counted as what is sent."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from hfdist.measure.wire import Collective, record, ring_bytes

# Name in the dispatcher -> the collective, and which argument holds the whole tensor (the larger side).
_COLLECTIVES: dict[str, tuple[Collective, int]] = {
    "allreduce_": ("all_reduce", 0),
    "allreduce_coalesced_": ("all_reduce", 0),
    "_allgather_base_": ("all_gather", 0),
    "allgather_": ("all_gather", 0),
    "allgather_into_tensor_coalesced_": ("all_gather", 0),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "reduce_scatter_": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "alltoall_base_": ("all_to_all", 1),
    "alltoall_": ("all_to_all", 1),
    "broadcast_": ("broadcast", 0),
    "reduce_": ("reduce", 0),
}


class _Watch(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = func.overloadpacket.__name__
            if name in _COLLECTIVES:
                op, whole = _COLLECTIVES[name]
                _count(op, _nbytes(args[whole]), _group_size(args))
        return func(*args, **(kwargs or {}))


def _group_size(args: tuple[Any, ...]) -> int:
    boxed = (
        a for a in args if isinstance(a, torch.ScriptObject) and a._type().qualified_name().endswith(".ProcessGroup")
    )
    return dist.ProcessGroup.unbox(next(boxed)).size()


def _count(op: Collective, payload_bytes: int, size: int) -> None:
    wire_op: Collective = "all_reduce" if op == "reduce_scatter" and dist.get_backend() == "gloo" else op
    record(op, ring_bytes(wire_op, payload_bytes, size), group_size=size)


def _nbytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    return sum(_nbytes(item) for item in value)


@contextmanager
def watch_collectives() -> Iterator[None]:
    """Report every collective this thread issues inside the block to `hfdist.measure.wire.record`."""
    with _Watch():
        yield
