"""What `model(**batch)` returns in training: a loss whose backward hands out gradients that are computed already."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers.utils import ModelOutput

from hfdist.errors import ConfigError, say


@dataclass
class PipelineOutput(ModelOutput):
    """`loss`: the same on every rank. There are no logits: the schedule has run its backward."""

    loss: torch.FloatTensor | None = None

    @property
    def logits(self) -> NoReturn:
        """Raises: the schedule needs the loss inside."""
        raise ConfigError(
            say(
                given="`outputs.logits` of a pipeline in training",
                expected="the loss to be computed on the last stage, where the logits are, before the backward",
                do="Pass labels=, or give PipelineParallelPlugin(loss_fn=...) a function of (outputs, batch).",
            )
        )

    def __getitem__(self, key: Any) -> Any:
        return self.logits if key == "logits" else super().__getitem__(key)


class _HandOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, value: Tensor, hand_out: Callable[[Tensor], None]) -> Tensor:
        ctx.hand_out = hand_out
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:  # type: ignore[override]
        ctx.hand_out(gradient)
        return None, None, None


def loss_with(value: Tensor, hand_out: Callable[[Tensor], None]) -> Tensor:
    """`value` () as a loss: its backward calls `hand_out(gradient of the loss)` once for each backward."""
    anchor = torch.zeros((), dtype=value.dtype, device=value.device, requires_grad=True)
    return _HandOut.apply(anchor, value, hand_out)
