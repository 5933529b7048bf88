"""Dynamic loss scale for fp16 (Micikevicius et al. 2018, section 3.2), agreed by all ranks.

A `torch.amp.GradScaler` by interface, so that accelerate and existing scripts can use it; in place of torch's fused
update it has DeepSpeed's vocabulary (hysteresis, smallest scale, a limit of skips in a row) and looks at local shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from hfdist.engine.norm import local_tensor
from hfdist.errors import DistributedError, say
from hfdist.plugins import AmpPlugin


class LossScaler(torch.amp.GradScaler):
    """Scales losses, unscales gradients, and skips an update on all ranks when one rank's gradients overflow.

    `any_rank(flag)`: whether the flag is set on any rank; `name_parameter(p)` names a parameter in messages. With
    several optimizers one window backs off or grows once.
    """

    def __init__(
        self,
        amp: AmpPlugin,
        device_type: str,
        any_rank: Callable[[bool], bool],
        name_parameter: Callable[[torch.Tensor], str],
    ) -> None:
        super().__init__(
            device_type,
            init_scale=amp.init_scale,
            growth_factor=amp.growth_factor,
            backoff_factor=amp.backoff_factor,
            growth_interval=amp.growth_interval,
        )
        self.amp, self.any_rank, self.name_parameter = amp, any_rank, name_parameter
        self.current = float(amp.init_scale)
        self._in_gradients = self.current  # the scale of the gradients that wait for an update
        self._good_steps = 0
        self._hysteresis_left = amp.hysteresis
        self.skipped_in_a_row = 0
        self.num_skipped = 0
        # Optimizer -> overflow found, of those whose gradients are unscaled; since the last backward: whether the scale
        # was looked at, and lowered.
        self._unscaled: dict[torch.optim.Optimizer, bool] = {}
        self._window_updated = self._backed_off = False
        self._overflow_name: str | None = None

    def scale(self, outputs: Any) -> Any:
        """`outputs` (a loss, or losses) times the scale."""
        # What was unscaled (for clipping) and still waits gets its scale back, so that all that waits has one scale.
        waiting = {id(p.grad): p.grad for o in self._unscaled for p in _parameters(o) if p.grad is not None}
        for gradient in waiting.values():
            local_tensor(gradient).mul_(self.current)
        self._in_gradients = self.current
        self._window_updated = self._backed_off = False
        self._unscaled.clear()
        if isinstance(outputs, torch.Tensor):
            return outputs * self.current
        return type(outputs)(self.scale(output) for output in outputs)

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients of `optimizer` by their scale, once per window, and agree on whether any overflowed."""
        if optimizer in self._unscaled:
            return
        grads = [local_tensor(p.grad) for p in _parameters(optimizer) if p.grad is not None]
        self._unscaled[optimizer] = self.any_rank(unscale_local(grads, 1.0 / self._in_gradients))

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """`optimizer.step()` unless an overflow was found on any rank; returns None for a skipped step."""
        self.unscale_(optimizer)
        return None if self._unscaled[optimizer] else optimizer.step(*args, **kwargs)

    def found_overflow(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether this window's gradients of `optimizer` overflowed (after `unscale_`)."""
        return self._unscaled.get(optimizer, False)

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Back off after an overflow, grow after `growth_interval` good steps; once per window.

        Raises DistributedError on all ranks, naming the first non-finite parameter, when nothing is left to lower or
        `max_skipped_steps` is passed.
        """
        if new_scale is not None:
            self.current = float(new_scale)
            return
        overflow = any(self._unscaled.values())
        if overflow and not self._backed_off:
            self._backed_off = True
            self._after_overflow()
        elif not overflow and not self._window_updated:
            self._after_good_step()
        self._window_updated = True

    def note_overflow(self, optimizer: torch.optim.Optimizer) -> None:
        """Remember the name of the first parameter of `optimizer` whose local gradient is not finite."""
        self._overflow_name = None
        for parameter in _parameters(optimizer):
            if parameter.grad is not None and not torch.isfinite(local_tensor(parameter.grad)).all():
                self._overflow_name = self.name_parameter(parameter)
                return

    def _after_overflow(self) -> None:
        self.num_skipped += 1
        self.skipped_in_a_row += 1
        self._good_steps = 0
        self._hysteresis_left -= 1
        at_bottom = self.current <= self.amp.min_scale
        if self._hysteresis_left <= 0:
            self.current = max(self.current * self.amp.backoff_factor, self.amp.min_scale)
            self._hysteresis_left = 1
        too_many = self.amp.max_skipped_steps is not None and self.skipped_in_a_row > self.amp.max_skipped_steps
        if at_bottom or too_many:
            where = self._overflow_name or "a parameter on another rank"
            raise DistributedError(
                say(
                    given=f"gradients that overflow {self.skipped_in_a_row} steps in a row, down to loss scale "
                    f"{self.current:g} (first non-finite: {where})",
                    expected=f"an overflow to end by scale {self.amp.min_scale:g}"
                    + (f" and within {self.amp.max_skipped_steps} steps" if too_many else ""),
                    do="Look for inf or nan in the data or that layer, lower the learning rate, or train in bf16.",
                )
            )

    def _after_good_step(self) -> None:
        self.skipped_in_a_row = 0
        self._hysteresis_left = self.amp.hysteresis
        self._good_steps += 1
        if self._good_steps >= self.amp.growth_interval:
            self.current *= self.amp.growth_factor
            self._good_steps = 0

    def get_scale(self) -> float:
        """The scale of the next loss."""
        return self.current

    def is_enabled(self) -> bool:
        """Always: the scaler exists only under fp16."""
        return True

    def state_dict(self) -> dict[str, Any]:
        """Everything that decides future scales."""
        return {
            "scale": self.current,
            "growth_factor": self.amp.growth_factor,
            "backoff_factor": self.amp.backoff_factor,
            "growth_interval": self.amp.growth_interval,
            "_growth_tracker": self._good_steps,
            "hysteresis_left": self._hysteresis_left,
            "skipped_in_a_row": self.skipped_in_a_row,
            "num_skipped": self.num_skipped,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Also takes what `torch.amp.GradScaler.state_dict` wrote."""
        self.current = self._in_gradients = float(state_dict["scale"])
        self._good_steps = int(state_dict["_growth_tracker"])
        self._hysteresis_left = int(state_dict.get("hysteresis_left", self.amp.hysteresis))
        self.skipped_in_a_row = int(state_dict.get("skipped_in_a_row", 0))
        self.num_skipped = int(state_dict.get("num_skipped", 0))


def _parameters(optimizer: torch.optim.Optimizer) -> Iterable[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


@torch.no_grad()
def unscale_local(grads: list[torch.Tensor], factor: float) -> bool:
    """Multiply local gradients by `factor` in place; whether any value was not finite."""
    overflow = False
    for dtype in {g.dtype for g in grads}:
        same = [g for g in grads if g.dtype == dtype and g.numel()]
        if same:
            torch._foreach_mul_(same, factor)
            overflow |= not bool(torch.isfinite(torch.stack(torch._foreach_norm(same, float("inf")))).all())
    return overflow
