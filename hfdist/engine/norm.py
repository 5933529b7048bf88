"""Gradient norm and clipping over the mesh: each logical gradient counted once, one number on every rank.

`torch.nn.utils.clip_grad_norm_`, called by a user on prepared parameters, comes here too while an hfdist Accelerator
has prepared a model (`redirect_torch_clipping`), because torch's own refuses mixed meshes and plain parameters.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard
from torch.nn.utils import clip_grad

from hfdist import comm

_original_clip_grad_norm = clip_grad.clip_grad_norm_


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a (possibly sharded) tensor."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def gradients(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The gradients that exist, each once."""
    unique = {id(p): p for p in parameters}
    return [p.grad for p in unique.values() if p.grad is not None]


def shard_groups(tensor: torch.Tensor) -> tuple[dist.ProcessGroup, ...]:
    """The process groups whose ranks hold different parts of `tensor`."""
    if not isinstance(tensor, DTensor):
        return ()
    mesh = tensor.device_mesh
    groups = [mesh.get_group(i) for i, placement in enumerate(tensor.placements) if isinstance(placement, Shard)]
    return tuple(group for group in groups if group.size() > 1)


@dataclass(frozen=True)
class Part:
    """How a parameter lies over the ranks that hold different parts of the model (not over the data axis)."""

    groups: tuple[dist.ProcessGroup, ...] = ()  # whose ranks hold different parts of it
    share: float = 1.0  # of what this rank holds counts so much: 1 / copies, 0 where another stage counts it


WHOLE = Part()


@torch.no_grad()
def total_norm(
    parameters: Iterable[torch.Tensor],
    norm_type: float = 2.0,
    meeting: comm.Meeting | None = None,
    *,
    part_of: Callable[[torch.Tensor], Part] = lambda parameter: WHOLE,
    stages: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Norm of all gradients of `parameters` seen as one vector: a plain 0-dim tensor, the same on every rank.

    Gradients are DTensors (sharded: parts are added up over their mesh) or plain tensors (whole on every rank), each of
    them a `part_of` a logical gradient. `stages`: a pipeline's ranks, which hold different parameters.
    """
    norm_type = float(norm_type)
    by_part: dict[tuple[tuple[dist.ProcessGroup, ...], float], list[torch.Tensor]] = defaultdict(list)
    device, dtypes = torch.device("cpu"), set()
    for parameter in {id(p): p for p in parameters}.values():
        gradient, part = parameter.grad, part_of(parameter)
        device = parameter.device
        if gradient is not None:
            dtypes.add(gradient.dtype)
            by_part[(*shard_groups(gradient), *part.groups), part.share].append(local_tensor(gradient))
    parts = []
    for (groups, share), tensors in by_part.items():
        norm = _local_norm(tensors, norm_type)
        if share != 1.0 and not math.isinf(norm_type):
            norm = norm * share ** (1.0 / norm_type)
        parts.append(_over_groups(norm, groups, norm_type, meeting))
    total = _combine(torch.stack(parts), norm_type) if parts else torch.zeros((), device=device)
    if stages is not None:
        wide = total.double() if device.type == "cpu" else total
        total = _over_groups(wide, (stages,), norm_type, meeting)
    return total if torch.float64 in dtypes else total.float()


def _local_norm(tensors: list[torch.Tensor], norm_type: float) -> torch.Tensor:
    filled = [t for t in tensors if t.numel()]
    device = tensors[0].device
    if not filled:
        return torch.zeros((), dtype=torch.float64 if device.type == "cpu" else torch.float32, device=device)
    if device.type != "cpu":  # half-precision squares would overflow
        return _combine(torch.stack(torch._foreach_norm([t.float() for t in filled], norm_type)), norm_type)
    # In fp64: torch's fp32 norm of a tensor on the CPU is off by more the longer it is (4.9e-5 at 2.6 M elements), so
    # that the factor of clipping would depend on how a parameter is split.
    norms = [torch.linalg.vector_norm(t, norm_type, dtype=torch.float64) for t in filled]
    return _combine(torch.stack(norms), norm_type)


def _combine(norms: torch.Tensor, norm_type: float) -> torch.Tensor:
    return norms.abs().max() if math.isinf(norm_type) else torch.linalg.vector_norm(norms, norm_type)


def _over_groups(
    norm: torch.Tensor, groups: tuple[dist.ProcessGroup, ...], norm_type: float, meeting: comm.Meeting | None
) -> torch.Tensor:
    for group in groups:
        if meeting is not None:
            meeting.run(comm.SCALARS)
        if math.isinf(norm_type):
            comm.all_reduce(norm, group, dist.ReduceOp.MAX, label="norm")
        else:
            norm = comm.all_reduce(norm**norm_type, group, label="norm") ** (1.0 / norm_type)
    return norm


@torch.no_grad()
def clip_gradients(parameters: Iterable[torch.Tensor], max_norm: float, norm: torch.Tensor) -> None:
    """Scale gradients so that their `norm` is at most `max_norm`, with torch's own formula (1e-6 in the divisor)."""
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    scale_gradients(parameters, factor)


@torch.no_grad()
def scale_gradients(parameters: Iterable[torch.Tensor], factor: torch.Tensor | float) -> None:
    """Multiply all gradients by one factor, in place."""
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = defaultdict(list)
    for gradient in gradients(parameters):
        local = local_tensor(gradient)
        if local.numel():
            by_dtype[local.dtype].append(local)
    for dtype, tensors in by_dtype.items():
        torch._foreach_mul_(tensors, factor.to(dtype) if isinstance(factor, torch.Tensor) else factor)


class Clipper(Protocol):
    """What `torch.nn.utils.clip_grad_norm_` is redirected to: the engine of an Accelerator."""

    def owns(self, parameters: list[torch.Tensor]) -> bool:
        """Whether any of `parameters` is prepared."""

    def clip(
        self, parameters: list[torch.Tensor], max_norm: float, norm_type: float, *, error_if_nonfinite: bool
    ) -> torch.Tensor:
        """Clip, and return the norm before."""


# Weak, so that an Accelerator that goes out of scope takes its process groups with it.
_clippers: weakref.WeakSet[Clipper] = weakref.WeakSet()


def redirect_torch_clipping(clipper: Clipper) -> Callable[[], None]:
    """Let `torch.nn.utils.clip_grad_norm_` call `clipper` for parameters that it owns; returns the undo."""
    _clippers.add(clipper)
    torch.nn.utils.clip_grad_norm_ = _clip_grad_norm_
    clip_grad.clip_grad_norm_ = _clip_grad_norm_

    def undo() -> None:
        _clippers.discard(clipper)
        if not _clippers:
            torch.nn.utils.clip_grad_norm_ = _original_clip_grad_norm
            clip_grad.clip_grad_norm_ = _original_clip_grad_norm

    return undo


@functools.wraps(_original_clip_grad_norm)
def _clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    listed = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    for clipper in list(_clippers):
        if clipper.owns(listed):
            return clipper.clip(listed, max_norm, norm_type, error_if_nonfinite=error_if_nonfinite)
    return _original_clip_grad_norm(listed, max_norm, norm_type, error_if_nonfinite, foreach)
