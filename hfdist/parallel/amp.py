"""What mixed precision means here, the same at all stages and in one process.

Masters are fp32 and sharded as the stage says. `compute` chooses what a forward sees:

    "mixed"     parameters gathered in the compute dtype, autocast on for what needs fp32 (accelerate's FSDP2)
    "cast"      parameters and floating inputs in the compute dtype, no autocast (DeepSpeed)
    "autocast"  fp32 parameters under autocast (accelerate's DDP)

Outputs of the whole model are returned in fp32. Gradients are reduced in fp32 unless told otherwise.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from hfdist.plugins import AmpPlugin

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def mixed_precision_policy(amp: AmpPlugin | None, reduce_dtype: str, model: nn.Module) -> MixedPrecisionPolicy:
    """FSDP2's policy for `amp` and `ZeroPlugin.reduce_dtype`; half-precision models are reduced in fp32."""
    if amp is None and reduce_dtype == "bf16":
        return MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
    if amp is None:
        halves = any(p.dtype in (torch.float16, torch.bfloat16) for p in model.parameters() if p.requires_grad)
        return MixedPrecisionPolicy(reduce_dtype=torch.float32 if halves and reduce_dtype == "fp32" else None)
    compute = DTYPES[amp.dtype]
    reduce = {"fp32": torch.float32, "bf16": torch.bfloat16, "compute": compute}[reduce_dtype]
    return MixedPrecisionPolicy(
        param_dtype=None if amp.compute == "autocast" else compute,
        reduce_dtype=reduce,
        cast_forward_inputs=amp.compute == "cast",
    )


def make_masters(model: nn.Module) -> list[str]:
    """Lift trainable half-precision parameters to fp32 in place; returns the names of those that were lifted."""
    lifted = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype in (torch.float16, torch.bfloat16):
            parameter.data = parameter.data.float()
            lifted.append(name)
    return lifted


def autocast(amp: AmpPlugin | None, device_type: str, **options: Any) -> contextlib.AbstractContextManager[Any]:
    """The autocast that belongs to `amp`, or nothing. `options` are torch.autocast's (`enabled`, `cache_enabled`)."""
    if amp is None or amp.compute == "cast":
        return contextlib.nullcontext()
    # A gathered parameter is freed and refilled in place, so a cast of it must not be cached over a whole forward.
    options.setdefault("cache_enabled", False)
    return torch.autocast(device_type, dtype=DTYPES[amp.dtype], **options)


def to_fp32(output: Any) -> Any:
    """Half-precision tensors anywhere in `output` as fp32 (accelerate's `convert_to_fp32`)."""
    from accelerate.utils.operations import convert_to_fp32

    return convert_to_fp32(output)
