"""Half-precision gradients of several micro-batches, summed in fp32.

Autograd adds to `.grad` in the parameter's dtype, so that m micro-batches round m times. After each backward what it
left is taken to fp32 and added there, as FSDP2 does between the micro-steps of an accumulation window.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn


@torch.no_grad()
def take_half_gradients(
    parameters: Iterable[tuple[nn.Parameter, nn.Parameter]], into: dict[nn.Parameter, Tensor]
) -> None:
    """Move the gradients of half-precision parameters into `into`, added up in fp32.

    parameters: (what the gradient is listed under, what holds it).
    """
    for key, holder in parameters:
        gradient = holder.grad
        if gradient is not None and gradient.dtype.itemsize < 4:
            into[key] = into[key].add_(gradient) if key in into else gradient.float()
            holder.grad = None
