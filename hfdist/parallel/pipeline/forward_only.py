"""A pipeline without backward: every micro-batch through all stages, its output from the last stage to every rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hfdist.measure import wire
from hfdist.parallel.pipeline.apply import Applied
from hfdist.parallel.pipeline.stage import LABEL
from hfdist.parallel.pipeline.view import View

Hidden = tuple[tuple[int, ...], torch.dtype]


def run_forward(
    views: Mapping[int, View],
    applied: Applied,
    batches: Sequence[dict[str, Any]],
    hidden: Sequence[Hidden],
    *,
    device: torch.device,
    group: dist.ProcessGroup,
) -> list[Any] | None:
    """Outputs of the model by micro-batch on the rank of the last stage, None on the others.

    `hidden[i]`: shape and dtype of the hidden state of micro-batch i.
    """
    outputs: list[Any] = []
    waits: list[tuple[Any, Tensor]] = []
    for number, kwargs in enumerate(batches):
        local: Tensor | None = None
        for index in sorted(views):
            received = local
            if index and local is None:
                shape, dtype = hidden[number]
                received = torch.empty(shape, dtype=dtype, device=device)
                dist.recv(received, group=group, group_src=applied.rank_of(index - 1))
            output = views[index](received, kwargs)
            local = None
            if views[index].is_last:
                outputs.append(output)
            elif index + 1 in views:
                local = output
            else:
                output = output.contiguous()
                wire.record("send", output.nbytes, group_size=2, label=LABEL)
                work = dist.isend(output, group=group, group_dst=applied.rank_of(index + 1))
                waits.append((work, output))
    for work, _ in waits:
        work.wait()
    return outputs if applied.rank == applied.last_rank else None


def merge_outputs(outputs: Sequence[Any], rows: Sequence[int]) -> tuple[type, dict[str, Tensor]]:
    """(type, tensors with one row per row of the batch) of the micro-batches' outputs; what has no rows is left out."""
    first = outputs[0]
    tensors = {}
    for name in _items(first):
        parts = [_items(output)[name] for output in outputs]
        if all(isinstance(p, Tensor) and p.ndim and p.shape[0] == n for p, n in zip(parts, rows, strict=True)):
            tensors[name] = torch.cat(parts) if len(parts) > 1 else parts[0]
    return type(first), tensors


def _items(output: Any) -> dict[str, Any]:
    if isinstance(output, Mapping):
        return dict(output)
    if isinstance(output, (tuple, list)):
        return {str(index): value for index, value in enumerate(output)}
    return {"": output}


def share_outputs(
    merged: tuple[type, dict[str, Tensor]] | None, *, source: int, device: torch.device, group: dist.ProcessGroup
) -> tuple[type, dict[str, Tensor]]:
    """`merged` of rank `source`, on every rank."""
    rank = dist.get_rank(group)
    facts: list[Any] = [None]
    if merged is not None:
        facts = [(merged[0], {name: (tuple(t.shape), t.dtype) for name, t in merged[1].items()})]
    dist.broadcast_object_list(facts, group=group, group_src=source, device=device)
    kind, shapes = facts[0]
    tensors = {}
    for name, (shape, dtype) in shapes.items():
        tensor = torch.empty(shape, dtype=dtype, device=device) if merged is None else merged[1][name].contiguous()
        if rank == source:
            wire.record("broadcast", tensor.nbytes, group_size=dist.get_world_size(group), label="pipeline outputs")
        dist.broadcast(tensor, group=group, group_src=source)
        tensors[name] = tensor
    return kind, tensors


def as_output(kind: type, tensors: dict[str, Tensor], extra: Callable[[type], dict[str, Any]]) -> Any:
    """An output of `kind` again; `extra(kind)`: fields that each rank has of its own."""
    if issubclass(kind, Mapping):
        return kind(**tensors, **extra(kind))
    if issubclass(kind, (tuple, list)):
        return kind(tensors.values())
    return tensors[""]
