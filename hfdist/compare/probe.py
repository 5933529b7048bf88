"""What one rank sees of a script's training: per optimizer step its losses, tokens, time; once, its memory and wire.

    forward of a prepared model in training    tokens and label tokens of the micro-step
    accelerator.backward(loss)                 the loss, as the script has it (kept on the device, read at the end)
    step of the first prepared optimizer       when gradients are synchronised: the step ends here

A step's time goes from the end of the step before to its own end, data loading, logging and scheduler included: what a
user waits for. In the first step engines set themselves up: it is the start-up time, and no step time.

A timed launch only keeps time. A counting launch (`count=True`) has no times that mean anything: around its last
`COUNTED_STEPS` steps it counts collectives and, where it can, the kernel's bytes, with barriers before and after, and
it looks at who holds memory just before each inner optimizer step of the last one, when gradients are reduced in every
engine. When `num_steps` are done `ScriptDone` leaves the script, on all ranks in the same step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hfdist.measure import resident
from hfdist.measure.memory import measure_memory
from hfdist.measure.wire import WireRecorder, interface_bytes, record_wire
from hfdist.models.labels import count_labels

COUNTED_STEPS = 2
# What one engine or another imports when it prepares or steps for the first time; `datasets` (accelerate, for several
# ranks only) alone is 90 MB.
_IMPORTED_LATE = (
    *("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor", "datasets", "hfdist.accelerator"),
)
# Engines set themselves up, and DeepSpeed's ZeRO-3 learns the order of modules, in the first two.
STEPS_OF_A_COUNT = COUNTED_STEPS + 2


class ScriptDone(BaseException):
    """Enough steps: leaves the script. Not an `Exception`, which a script may catch."""


@dataclasses.dataclass
class _MicroStep:
    loss: torch.Tensor
    labels: torch.Tensor | None  # label tokens, 0-dim; None when the batch had none
    tokens: int


class Probe:
    """Measures one rank; `write()` leaves `rank<r>.json` in `folder`."""

    def __init__(self, folder: Path, *, num_steps: int, count: bool, own_counters: bool, in_namespace: bool) -> None:
        """`own_counters`: the engine reports its collectives itself (hfdist's does)."""
        self.folder, self.num_steps, self.count = folder, num_steps, count
        self.own_counters, self.in_namespace = own_counters, in_namespace
        self.rank = int(os.environ.get("RANK", "0"))
        self.steps: list[dict[str, Any]] = []
        self.models: list[torch.nn.Module] = []
        self.optimizers: list[Any] = []
        self.engine: dict[str, Any] = {}
        self.floor: int | None = None
        self.made = False  # an Accelerator
        self.learning_rates: list[float] = []
        self._micro: list[_MicroStep] = []
        self._tokens = 0
        self._labels: torch.Tensor | None = None
        self._losses: list[list[_MicroStep]] = []
        self._held: dict[str, int] = {}
        self._wire: WireRecorder | None = None
        self._kernel: list[int | None] = []
        self._watching = contextlib.ExitStack()
        self._device: torch.device | None = None
        self.start_clock()

    def start_clock(self) -> None:
        """Step times count from here."""
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def accelerator_made(self, device: torch.device) -> None:
        """The process group stands: the first step counts from here."""
        self._device, self.made = device, True
        self.start_clock()

    def before_prepare(self, models: list[torch.nn.Module]) -> None:
        """The floor of resident memory: what the process has before engine and optimizer, without the weights.

        Imports, tokenizer and data are in it. What engines import late, and would else count as their memory, is
        imported now (in a counting launch; it takes seconds).
        """
        if self.floor is not None or not models:
            return
        if self.count:
            for name in _IMPORTED_LATE:
                importlib.import_module(name)
        self.floor = (resident.resident_bytes() or 0) - measure_memory(models).total

    # ------------------------------------------------------------------------------------- what the script does

    def watch_model(self, model: torch.nn.Module) -> None:
        """Count what goes through the forward of a prepared model."""
        if any(model is known for known in self.models):
            return
        self.models.append(model)
        model.register_forward_pre_hook(self._saw_forward, with_kwargs=True)

    def _saw_forward(self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if not (torch.is_grad_enabled() and model.training):
            return
        inputs = kwargs.get("input_ids", args[0] if args else None)
        if inputs is None:
            inputs = next((value for value in kwargs.values() if isinstance(value, torch.Tensor)), None)
        if isinstance(inputs, torch.Tensor):
            self._tokens += inputs.numel() if not inputs.is_floating_point() else len(inputs)
        labels = kwargs.get("labels")
        if isinstance(labels, torch.Tensor):
            counted = count_labels(getattr(model, "module", model), labels)
            self._labels = counted if self._labels is None else self._labels + counted

    def saw_backward(self, loss: torch.Tensor) -> None:
        """One micro-step's loss, before backward."""
        self._micro.append(_MicroStep(loss.detach().clone(), self._labels, self._tokens))
        self._labels, self._tokens = None, 0

    def ended_step(self) -> None:
        """The first optimizer stepped with synchronised gradients. Raises ScriptDone after the last step."""
        if self._device is not None and self._device.type != "cpu":
            torch.accelerator.synchronize()
        wall, cpu = time.perf_counter(), time.process_time()
        self.steps.append(
            {
                "wall": wall - self._wall,
                "cpu": cpu - self._cpu,
                "tokens": sum(micro.tokens for micro in self._micro),
                "lr": float(self.optimizers[0].param_groups[0]["lr"]),
            }
        )
        self._losses.append(self._micro)
        self._micro = []
        if len(self.steps) == 1:
            self.engine["first_step_at"] = time.time()
        if self.count:
            self._count_around()
        if len(self.steps) == self.num_steps:
            raise ScriptDone
        # What the probe itself did is in no step.
        self.start_clock()

    # --------------------------------------------------------------------------------------- the counting launch

    def _count_around(self) -> None:
        left = self.num_steps - len(self.steps)
        if left == COUNTED_STEPS:
            _barrier()
            if self.in_namespace:
                self._kernel = [interface_bytes()]
            _barrier()
            self._wire = self._watching.enter_context(record_wire())
            if not self.own_counters:
                from hfdist.recipe.wires import watch_collectives

                self._watching.enter_context(watch_collectives())
        elif left == 1:
            from torch.optim.optimizer import register_optimizer_step_pre_hook

            self._watching.callback(register_optimizer_step_pre_hook(lambda *_: self._look_at_memory()).remove)
        elif left == 0:
            self._watching.close()
            _barrier()
            if self.in_namespace:
                self._kernel.append(interface_bytes())
            _barrier()

    def _look_at_memory(self) -> None:
        """Who holds what; of several inner optimizer steps the moment that holds most."""
        report = measure_memory([getattr(m, "module", m) for m in self.models], self.optimizers)
        held = {
            "parameters": report.parameters + report.gathered,
            "gradients": report.gradients,
            "optimizer": report.optimizer,
            "communication": report.communication,
        }
        if sum(held.values()) > sum(self._held.values()):
            self._held = held

    # ------------------------------------------------------------------------------------------------- the record

    def record(self) -> dict[str, Any]:
        """All that was seen, ready for json."""
        for step, micro_steps in zip(self.steps, self._losses, strict=True):
            step["losses"] = [float(micro.loss) for micro in micro_steps]
            step["labels"] = [None if micro.labels is None else int(micro.labels) for micro in micro_steps]
        peak = resident.peak_resident_bytes()
        record: dict[str, Any] = {
            "rank": self.rank,
            "steps": self.steps,
            "engine": self.engine,
            "resident_floor": self.floor,
            "resident_peak": peak,
            "peak_allocated": _peak_allocated(self._device),
            "threads": torch.get_num_threads(),
        }
        if self.count and len(self.steps) == self.num_steps and self._wire is not None:
            record["held"] = self._held
            record["wire"] = {op: nbytes / COUNTED_STEPS for op, nbytes in self._wire.by_op.items()}
            record["calls"] = {op: calls / COUNTED_STEPS for op, calls in self._wire.calls_by_op.items()}
            known = [value for value in self._kernel if value is not None]
            # Of all ranks together: the loopback is theirs.
            record["kernel"] = (known[1] - known[0]) / COUNTED_STEPS if len(known) == 2 else None
        return record

    def write(self, **more: Any) -> None:
        """Leave the record, whole or not at all."""
        path = self.folder / f"rank{self.rank}.json"
        path.with_suffix(".part").write_text(json.dumps({**self.record(), **more}), encoding="utf-8")
        path.with_suffix(".part").replace(path)


def _barrier() -> None:
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier()


def _peak_allocated(device: torch.device | None) -> int | None:
    if device is None or device.type != "cuda":
        return None
    return int(torch.cuda.max_memory_allocated(device))
