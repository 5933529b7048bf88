"""`kwargs_handlers=` of existing scripts: each handler is kept for accelerate, translated, or refused by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from hfdist.config.deepspeed import claim_reduce_dtype
from hfdist.config.ledger import Ledger
from hfdist.errors import ConfigError, say

# accelerate itself reads these and hfdist's subclass leaves that alone.
KEPT = ("InitProcessGroupKwargs", "AutocastKwargs", "ProfileKwargs")
_FP8 = ("FP8RecipeKwargs", "AORecipeKwargs", "TERecipeKwargs", "MSAMPRecipeKwargs")
_SCALER_FIELDS = ("init_scale", "growth_factor", "backoff_factor", "growth_interval")


def read_handlers(ledger: Ledger, handlers: Sequence[object]) -> list[object]:
    """Claims of the handlers; returns those accelerate still needs."""
    kept: list[object] = []
    for handler in handlers:
        name = type(handler).__name__
        if name in KEPT:
            kept.append(handler)
        elif name == "GradScalerKwargs":
            _read_scaler(ledger, handler)
        elif name == "DistributedDataParallelKwargs":
            _read_ddp(ledger, handler)
        elif name in _FP8:
            ledger.later("fp8", name, origin="Accelerator(kwargs_handlers=[...])")
        else:
            raise ConfigError(
                say(
                    given=f"kwargs_handlers=[{name}(...)]",
                    expected=f"one of {', '.join((*KEPT, 'GradScalerKwargs', 'DistributedDataParallelKwargs'))}",
                    do="Remove it; hfdist's own choices go to Accelerator(plugins=[...]).",
                )
            )
    return kept


def _read_scaler(ledger: Ledger, handler: object) -> None:
    """`GradScalerKwargs`: its fields that differ from torch's defaults (which are also AmpPlugin's)."""
    origin = "GradScalerKwargs"
    defaults = {field.name: field.default for field in dataclasses.fields(handler)}  # type: ignore[arg-type]
    if not getattr(handler, "enabled", True):
        ledger.refuse(
            "enabled=False",
            origin=origin,
            why="a loss scaler under fp16, since fp16 gradients underflow without one",
            do="Remove it, or choose bf16, which needs none.",
        )
    for name in _SCALER_FIELDS:
        value = getattr(handler, name)
        if value != defaults[name]:
            ledger.claim(name, value, origin=f"{origin}({name}=)")


def _read_ddp(ledger: Ledger, handler: object) -> None:
    """`DistributedDataParallelKwargs`: unused parameters are always handled; compression hooks map on reduce_dtype."""
    origin = "DistributedDataParallelKwargs"
    hook = str(getattr(handler, "comm_hook", "no")).lower()
    wrapper = str(getattr(handler, "comm_wrapper", "no")).lower()
    for kind, value in (("comm_hook", hook), ("comm_wrapper", wrapper)):
        if value in ("fp16", "bf16"):
            claim_reduce_dtype(ledger, value, origin=f"{origin}({kind}=)")
        elif value != "no":
            ledger.refuse(
                f"{kind}={value}",
                origin=origin,
                why="gradients reduced as they are, in fp32 or the compute dtype",
                do="Remove it: it changes the gradients.",
            )
    if not getattr(handler, "broadcast_buffers", True):
        ledger.notice(f"{origin}(broadcast_buffers=False): buffers are broadcast once, at prepare, and then local")
    for field in dataclasses.fields(handler):  # type: ignore[arg-type]
        tuned = field.name not in ("comm_hook", "comm_wrapper", "find_unused_parameters", "broadcast_buffers")
        if tuned and field.default is not dataclasses.MISSING and getattr(handler, field.name) != field.default:
            ledger.hint(field.name, origin=origin)
