"""A loss is a mean over its own tokens; the mean of such means is not the mean over all tokens.

With labels in the batch, the gradient of every local loss is weighted so that the sum over ranks (and over the
micro-steps of an accumulation window) is the gradient of the mean over all label tokens. The loss a user sees keeps
its value. Two ranks, two micro-steps, (tokens, loss) = (10, 1), (2, 3) and (1, 2), (7, 4):

    here        (10*1 + 2*3 + 1*2 + 7*4) / 20 = 2.30
    unweighted  mean of the four              = 2.50

How: the first micro-step's total S1 is known before its backward, so every weight in the window is n * N / S1, and
after the last backward one factor k * S1 / (sum of all S) remains, 1 when all micro-steps have as many tokens. Losses
without labels count 1 each: then the factor is k / (real number of micro-steps), which repairs a window cut short.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from hfdist import comm

Number = float | torch.Tensor


@dataclass(frozen=True)
class Window:
    """What an accumulation window has seen so far."""

    num_micro_steps: int = 0
    firsts: tuple[Number, ...] = ()  # label totals of the first micro-step, by forward
    total: Number = 0.0


@dataclass
class LossWeights:
    """Token counts of the current accumulation window, agreed over the data-parallel ranks."""

    num_ranks: int
    meeting: comm.Meeting
    world_group: dist.ProcessGroup | None
    tokens: bool = True  # weight by label tokens; False: every loss counts the same
    in_window: bool = False  # inside accumulate()
    window: Window = field(default_factory=Window)
    _without_backward: Window | None = None  # the window as it was before a micro-step that has no backward yet
    _forward: int = 0  # forwards with labels in this micro-step
    _weighted: bool = False  # a weighted loss of this window had its backward (else the script has a loss of its own)
    _applied: Number = 1.0  # the factor already multiplied into the gradients of this window
    _inside: bool = False  # between entering and leaving accumulate()
    _ended: bool = False  # updated or dropped inside accumulate(); forgotten when it is left

    def begin_micro_step(self) -> None:
        """`accumulate()` was entered. A micro-step before it that had no backward (a skipped batch) does not count."""
        if self._without_backward is not None:
            self.window = self._without_backward
        self._without_backward = self.window
        self.window = replace(self.window, num_micro_steps=self.window.num_micro_steps + 1)
        self._inside = self.in_window = True
        self._forward = 0

    def leave_micro_step(self) -> None:
        """`accumulate()` was left."""
        self._inside = False
        if self._ended:
            self.end_window()

    def saw_backward(self) -> None:
        """The current micro-step counts."""
        self._without_backward = None

    def end_window(self) -> None:
        """The update is done (or the gradients were dropped).

        Inside accumulate() other optimizers may still have their part of the window to do: it ends when that is left.
        """
        self._ended = self._inside
        if self._inside:
            return
        self._without_backward = None
        self.in_window, self.window, self._forward = False, Window(), 0
        self._applied, self._weighted = 1.0, False

    def saw_weighted(self) -> None:
        """The backward of a loss that was weighted has come by."""
        self._weighted = True

    def weight(self, num_labels: torch.Tensor) -> Number:
        """The weight of a local loss over `num_labels` targets; all ranks call this together."""
        local, total = self._agree(num_labels)
        if not self.in_window:
            return self._ratio(local, total)
        window = self.window
        if window.num_micro_steps == 1:
            # Any positive number would do as the window's reference; a first micro-step without labels has none.
            first = total.clamp(min=1) if isinstance(total, torch.Tensor) else max(total, 1.0)
            window = replace(window, firsts=(*window.firsts, first))
        reference = window.firsts[self._forward] if self._forward < len(window.firsts) else total
        self._forward += 1
        self.window = replace(window, total=window.total + total)
        return self._ratio(local, reference)

    def _agree(self, num_labels: torch.Tensor) -> tuple[Number, Number]:
        if self.meeting.group is not None or self.num_ranks == 1:
            local = int(num_labels)
            return float(local), float(sum(self.meeting.numbers(comm.SCALARS, local)))
        total = num_labels.to(torch.float64 if num_labels.device.type != "mps" else torch.float32)
        return total.clone(), comm.all_reduce(total, self.world_group, label="label tokens")

    def _ratio(self, local: Number, total: Number) -> Number:
        if isinstance(total, torch.Tensor):
            return local * self.num_ranks / total.clamp(min=1)
        return local * self.num_ranks / max(total, 1.0)

    def remaining_factor(self, num_steps: int) -> Number:
        """What the window's gradients must still be multiplied by; each part of it is returned once.

        `num_steps`: what every micro-step's loss was divided by.
        """
        window = self.window
        if not self.in_window or window.num_micro_steps == 0:
            return 1.0
        if window.firsts and self._weighted:
            due = num_steps * sum(window.firsts) / window.total if _positive(window.total) else 1.0
        else:
            due = num_steps / window.num_micro_steps
        factor = due / self._applied
        self._applied = due
        return factor

    def take_back(self) -> Number:
        """Before another backward in a window that was already completed: undo the factor given out so far."""
        applied, self._applied = self._applied, 1.0
        return 1.0 / applied


def _positive(number: Number) -> bool:
    return isinstance(number, torch.Tensor) or number > 0


class _Weigh(torch.autograd.Function):
    """Identity whose gradient is multiplied by a weight; a loss over no label at all (nan) becomes 0."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, weight: Number, seen: Callable[[], None]) -> torch.Tensor:
        ctx.weight, ctx.seen = weight, seen
        if isinstance(weight, torch.Tensor):
            return torch.where(weight > 0, loss, torch.zeros_like(loss))
        return loss.clone() if weight > 0 else torch.zeros_like(loss)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        weight = ctx.weight
        ctx.seen()
        return gradient * (weight.to(gradient.dtype) if isinstance(weight, torch.Tensor) else weight), None, None


def weigh_loss(output: Any, make_weight: Callable[[], Number], seen: Callable[[], None]) -> Any:
    """`output` (a ModelOutput, dict, tuple or the loss itself) with its loss weighted; unchanged when it has none.

    `seen()` is called when the loss has its backward.
    """
    loss = output.get("loss") if isinstance(output, dict) else None
    if loss is None:
        if isinstance(output, tuple) and output and _is_loss(output[0]):
            return (_Weigh.apply(output[0], make_weight(), seen), *output[1:])
        return _Weigh.apply(output, make_weight(), seen) if _is_loss(output) else output
    if _is_loss(loss):
        output["loss"] = _Weigh.apply(loss, make_weight(), seen)
    return output


def _is_loss(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim == 0 and value.requires_grad
