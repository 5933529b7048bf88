"""The optimizer a user gets back from `prepare`: accelerate's wrapper, with the step of `engine.local_step` inside."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from accelerate.optimizer import AcceleratedOptimizer

from hfdist.engine import optimizer_state
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

    def state_dict(self) -> dict[str, Any]:
        """torch's, of what this rank holds, and which ranks' part that is; `accelerator.save_state()` keeps all."""
        return optimizer_state.name_place(self.optimizer.state_dict(), self.parameters())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The state of one process, of which this rank takes its part, or what `state_dict()` gave on this rank.

        Raises ConfigError, with the state as it was, for what `state_dict()` gave on another rank.
        """
        given = optimizer_state.check_place(state_dict, self.parameters(), self.engine.meeting)
        before = dict(self.optimizer.state), [dict(group) for group in self.optimizer.param_groups]
        self.optimizer.load_state_dict(given)
        try:
            optimizer_state.place_state(self.engine, self.local, dict(self.optimizer.state))
        except Exception:
            self.optimizer.state.clear()
            self.optimizer.state.update(before[0])
            for group, was in zip(self.optimizer.param_groups, before[1], strict=True):
                group.update(was)
            raise

    def parameters(self) -> list[torch.nn.Parameter]:
        """All parameters of all groups."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]
