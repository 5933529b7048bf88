"""Out of memory inside a step: drop the step on all ranks, raise the ZeRO stage, run it again.

The rank that fails announces it at the place where the others wait (`comm.Meeting.abort`), so no collective is left
half done. Until an update begins nothing has changed, and the step can be run again; a failure inside the optimizer's
own update cannot be undone and is an error. Without `ZeroPlugin(escalate_on_oom=True)` the error says what would fit.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from hfdist.comm import StepAborted
from hfdist.engine import describe
from hfdist.errors import DistributedError, say

if TYPE_CHECKING:
    from hfdist.accelerator import Accelerator

logger = logging.getLogger(__name__)


def is_out_of_memory(error: BaseException) -> bool:
    """A failed allocation: torch's own class on a device, a RuntimeError of the default allocator on CPU."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and (
        "DefaultCPUAllocator" in str(error) or "not enough memory" in str(error) or "std::bad_alloc" in str(error)
    )


def run_step(accelerator: Accelerator, fn: Callable[[Any], Any], batch: Any) -> Any:
    """`fn(batch)` with recovery. Returns what `fn` returns.

    Raises DistributedError on all ranks when memory does not suffice and the stage cannot (or may not) be raised.
    """
    engine = accelerator.engine
    started_in_a_window = any(zero.window_open for zero in engine.models)
    while True:
        updates, micro_step = engine.num_updates, accelerator.step
        try:
            return fn(batch)
        except StepAborted as error:
            reason = error.reason
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            reason = str(error).splitlines()[0][:200]
            if engine.updating or engine.num_updates != updates:
                raise DistributedError(
                    say(
                        given=f"out of memory inside an optimizer update ({reason})",
                        expected="memory for the optimizer state; parts of it are already updated",
                        do=f"Start again at a higher stage. {_advice(accelerator)}",
                    )
                ) from error
            with contextlib.suppress(StepAborted):
                engine.meeting.abort(reason)
        _drop_step(accelerator)
        accelerator.step = micro_step
        if started_in_a_window:
            raise DistributedError(
                say(
                    given=f"out of memory ({reason}) inside an accumulation window that was opened before run_step",
                    expected="a function that owns its whole window; no parameter was updated",
                    do="Loop over the micro-batches inside the function that is given to run_step.",
                )
            )
        if not accelerator.settings.zero.escalate_on_oom or accelerator.zero_stage == 3:
            raise DistributedError(
                say(
                    given=f"out of memory at stage {accelerator.zero_stage} ({reason})",
                    expected="a step that fits; no parameter was updated",
                    do=_advice(accelerator),
                )
            )
        stage = accelerator.zero_stage + 1
        logger.warning("Out of memory at stage %d (%s): going on at stage %d.", stage - 1, reason, stage)
        accelerator.set_zero_stage(stage)
        _give_back_to_system()


def _drop_step(accelerator: Accelerator) -> None:
    """Gradients and gathered copies of the interrupted step go; parameters and optimizer state stay as they were."""
    engine = accelerator.engine
    for zero in engine.models:
        zero.reset()
        for parameter in zero.replicated:
            parameter.grad = None
    engine.weights.leave_micro_step()
    engine.weights.end_window()
    gc.collect()
    _give_back_to_system()
    if torch.accelerator.is_available():
        torch.accelerator.memory.empty_cache()


def _give_back_to_system() -> None:
    """glibc keeps freed memory for later; what the next layout needs has other sizes, and the limit is the system's."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def _advice(accelerator: Accelerator) -> str:
    """What each higher stage would hold on this rank, or what is left to do at stage 3."""
    if accelerator.zero_stage == 3:
        return (
            "Stage 3 is the highest; use a smaller batch or sequence, gradient checkpointing, mixed precision, or "
            "more ranks."
        )
    now = describe.layout(accelerator.engine, accelerator.zero_stage, zero=accelerator.settings.zero)
    return f"{describe.higher_stages(accelerator.engine, now)} Set ZeroPlugin(stage=...) or escalate_on_oom=True."
