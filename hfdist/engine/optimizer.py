"""The optimizer a user gets back from `prepare`: accelerate's wrapper, with the step of `engine.local_step` inside."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from accelerate.optimizer import AcceleratedOptimizer

from hfdist.engine.local_step import LocalStep

if TYPE_CHECKING:
    from hfdist.engine.core import Engine


class ZeroOptimizer(AcceleratedOptimizer):
    """Updates when gradients are synchronised, after all ranks agreed; `.optimizer` is the user's own.

    `param_groups[i]["params"]` are the model's parameters (DTensors), `state[p]` plain tensors of this rank.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, engine: Engine) -> None:
        super().__init__(optimizer, device_placement=False, scaler=None)
        self.engine = engine
        self.local = LocalStep(optimizer, engine.meeting)
        self.looked_at = False  # whether its parameters were compared with those of the prepared models

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update; the closure, if any, is evaluated once before it (as SGD and Adam do). Returns its value."""
        if not self.gradient_state.sync_gradients:
            return None
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._is_overflow = not self.engine.update(self)
        return loss

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Drop gradients, including those of an abandoned accumulation window."""
        super().zero_grad(set_to_none)
        if self.gradient_state.sync_gradients:
            self.engine.drop_pending(self)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """torch's own; parameters listed before `prepare`, or while a unit was gathered, become the ones that train."""
        self.optimizer.add_param_group({**param_group, "params": self.engine.resolve(param_group["params"])})
        self.looked_at = False

    def parameters(self) -> list[torch.nn.Parameter]:
        """All parameters of all groups."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]
