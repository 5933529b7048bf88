"""One training run, followed: progress while it trains, and the record of losses, time, memory and wire it leaves.

    run = Run(args, data, model, optimizer, accelerator=accelerator)
    run.evaluate(model)                       # held-out loss, the same number on every rank
    for batch in run.batches(loader):
        ...                                   # forward, backward, optimizer.step()
        run.log(loss)                         # before zero_grad: gradients are part of what is measured
    run.evaluate(model)
    path = run.finish()                       # the record on the main rank, None on the others

A step's loss is the mean over ranks and micro-steps. Blocks are full, so it is the loss by tokens of the whole batch
and comparable between recipes. A loss that is not finite ends the run on every rank (not under fp16, whose scaler
skips it)."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hfdist.errors import ConfigError, DistributedError, say
from hfdist.recipe.arguments import RecipeArguments, no_pipeline
from hfdist.recipe.record import RecordWriter, new_record_path, versions
from hfdist.recipe.tokens import Data

if TYPE_CHECKING:
    import accelerate
    import torch

    from hfdist.measure.timeline import Recorder

# Blocks in one forward of `evaluate`.
EVALUATION_BATCH = 4


class Run:
    """Follows one run. All of its methods are called on every rank; only the main rank prints and writes."""

    # Set by `hfdist compare`, which measures by itself: no record, no progress, no step that is watched closely.
    measured_elsewhere = False

    def __init__(
        self,
        args: RecipeArguments,
        data: Data,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        accelerator: accelerate.Accelerator | None = None,
        zero_stage: int | None = None,
        accumulation: int = 1,
    ) -> None:
        """`zero_stage`: whose formula this run is held against; None asks the accelerator, which must be hfdist's."""
        import torch.distributed as dist

        self.args, self.data, self.model, self.optimizer, self.accelerator = args, data, model, optimizer, accelerator
        grouped = dist.is_available() and dist.is_initialized()
        self.rank, self.world_size = (dist.get_rank(), dist.get_world_size()) if grouped else (0, 1)
        self.is_main = self.rank == 0
        self.accumulation = accumulation if accelerator is None else accelerator.gradient_accumulation_steps
        # hfdist's engine counts its collectives itself; others are looked at from outside.
        native = getattr(getattr(accelerator, "settings", None), "engine", None) == "native"
        self._count_by_watching = zero_stage is not None or native
        self._given_stage = zero_stage
        self.device = next(model.parameters()).device if accelerator is None else accelerator.device
        # Ranks that read different data: all of them, but for those that hold parts of one model between them.
        own = accelerator is not None and not native and zero_stage is None
        self.dp_size = accelerator.dp_size if own else self.world_size  # type: ignore[union-attr]
        self.dp_rank = accelerator.dp_rank if own else self.rank  # type: ignore[union-attr]
        self.num_parameters = (
            accelerator.count_parameters(model)  # type: ignore[union-attr]
            if own
            else sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters())
        )
        self.precision = "no" if accelerator is None else str(accelerator.mixed_precision)
        self.step = 0
        self.losses: list[float] = []
        self.held_out: list[float] = []
        self._micro_losses: list[torch.Tensor] = []
        self._seconds: list[float] = []
        self._skipped = 0
        self._wire_bytes: dict[str, int] = {}
        self._wire_steps = 0
        self._memory: dict[str, int | None] = {}
        self._watched_stage = self.zero_stage
        self._formulas: dict[int, dict[str, int]] = {}
        self._wire_bound = 0
        self._watching = contextlib.ExitStack()
        asked = args.timeline is not None and not self.measured_elsewhere
        self._recorder = self._build_recorder(own=own) if asked else None
        shown = self.is_main and not self.measured_elsewhere
        self._progress = _Progress(args) if shown else None
        self._record = RecordWriter(args.record or new_record_path(args.recipe)) if shown else None
        self._write("header", **self._header())

    def batches(self, loader: Iterable[dict[str, torch.Tensor]]) -> Iterator[dict[str, torch.Tensor]]:
        """The batches of `loader` on this rank's device; keeps time and counts the wire around them."""
        from hfdist.measure.wire import record_wire

        with contextlib.ExitStack() as stack:
            if self._progress is not None:
                stack.enter_context(self._progress)
            counts = not self._count_by_watching and not self.measured_elsewhere
            if counts:
                wire = stack.enter_context(record_wire())
            self._started = time.perf_counter()
            for number, batch in enumerate(loader):
                if number == self._watched_step * self.accumulation and not self.measured_elsewhere:
                    self._watch()
                if self._recorder is not None:
                    self._recorder.turn(number)
                yield {name: tensor.to(self.device) for name, tensor in batch.items()}
            if self._recorder is not None:
                self._recorder.stop()
            if counts:
                self._wire_bytes, self._wire_steps = dict(wire.by_op), self.step

    def log(self, loss: torch.Tensor) -> None:
        """Take note of one micro-step's loss. The last one of a step completes that step."""
        self._micro_losses.append(loss.detach().float())
        if len(self._micro_losses) < self.accumulation:
            return
        self._watching.close()
        self.step += 1
        value = self.mean(sum(self._micro_losses) / self.accumulation)  # type: ignore[arg-type]
        self._micro_losses.clear()
        now = time.perf_counter()
        seconds, self._started = now - self._started, now
        scaler = getattr(self.accelerator, "scaler", None)
        if not math.isfinite(value) and scaler is None:
            raise DistributedError(
                say(
                    given=f"a loss of {value} in step {self.step} of {self.args.recipe}",
                    expected="a finite number",
                    do="Lower --lr, lengthen --warmup, or look at the data of this step.",
                )
            )
        self.losses.append(value)
        self._wire_bound += self.formula(self.zero_stage)["wire_bound"]
        self._seconds.append(seconds)
        if scaler is not None:
            self._skipped += bool(self.accelerator.optimizer_step_was_skipped)  # type: ignore[union-attr]
        lr = float(self.optimizer.param_groups[0]["lr"])
        self._write("step", step=self.step, loss=value, lr=lr, seconds=seconds)
        if self._progress is not None:
            self._progress.advance(self.step, value, self._tokens_per_second())

    def evaluate(self, model: torch.nn.Module) -> float:
        """Mean loss over the held-out blocks, which the ranks share; every rank runs the same number of forwards."""
        import torch

        rounds = -(-len(self.data.held_out) // (self.dp_size * EVALUATION_BATCH))
        total = torch.zeros(2, device=self.device)
        model.eval()
        with torch.no_grad():
            for number in range(rounds):
                start = (number * self.dp_size + self.dp_rank) * EVALUATION_BATCH
                mine = range(start, min(start + EVALUATION_BATCH, len(self.data.held_out)))
                # A rank without blocks of its own runs one all the same: its peers may need its shards.
                blocks = [self.data.held_out[index] for index in mine] or [self.data.held_out[0]]
                batch = {name: torch.stack([b[name] for b in blocks]).to(self.device) for name in blocks[0]}
                loss = model(**batch).loss.float()
                total += torch.stack([loss * len(mine), torch.tensor(float(len(mine)), device=self.device)])
        model.train()
        self._all_reduce(total)
        value = float(total[0] / total[1])
        self.held_out.append(value)
        self._write("held_out", step=self.step, loss=value)
        return value

    def switched(self, stage: int) -> None:
        """Note that the run went on at another ZeRO stage: what this rank holds now, and what the formula says."""
        formula = self.formula(stage)
        expected = formula["parameters"] + formula["optimizer"]  # gradients were dropped before the switch
        self._write("switch", step=self.step, stage=stage, memory=self.measure(), formula=expected)

    def mean(self, value: torch.Tensor) -> float:
        """The mean of a 0-dim tensor over all ranks, the same on each."""
        summed = value.detach().clone()
        self._all_reduce(summed)
        return float(summed) / self.world_size

    @property
    def zero_stage(self) -> int:
        """The stage this run is at now."""
        return self.accelerator.zero_stage if self._given_stage is None else self._given_stage  # type: ignore[union-attr]

    def formula(self, stage: int) -> dict[str, int]:
        """What `hfdist.plan` says of this run's model at a ZeRO stage: bytes per rank, Adam, by row of the report."""
        if stage not in self._formulas:
            self._formulas[stage] = self._plan(stage)
        return self._formulas[stage]

    def _plan(self, stage: int) -> dict[str, int]:
        from hfdist.models.size import model_size
        from hfdist.plan import Layout, plan_step

        layout = Layout(
            stage=stage,
            world_size=self.dp_size,
            precision={"bf16": "bf16", "fp16": "fp16"}.get(self.precision, "fp32"),  # type: ignore[arg-type]
            micro_steps=self.accumulation,
        )
        step = plan_step(model_size(getattr(self.model, "module", self.model)), layout)
        at_rest = step.memory.at_rest
        return {
            "parameters": at_rest.parameters + at_rest.gathered,
            "gradients": at_rest.gradients,
            "optimizer": at_rest.optimizer,
            "peak_total": step.memory.peak_total,
            "wire_bound": step.wire.bound,
        }

    def measure(self) -> dict[str, int | None]:
        """Bytes this rank holds now, by owner, and the most this process has held."""
        from hfdist.measure.memory import measure_memory

        return asdict(measure_memory(self.model, self.optimizer))

    def finish(self) -> Path | None:
        """Write the summary and close the record. Its path on the main rank, None on the others."""
        import torch.distributed as dist

        now = self.measure()
        self._memory.update(resident=now["resident"], resident_peak=now["resident_peak"])
        memory = [self._memory]
        if self.world_size > 1:
            memory = [{} for _ in range(self.world_size)]
            dist.all_gather_object(memory, self._memory)
        if self._recorder is not None:
            from hfdist.measure.timeline import as_record

            self._write("timeline", **as_record(self._recorder.schedule, self._recorder.gather()))
        scaler = getattr(self.accelerator, "scaler", None)
        steps = max(1, self._wire_steps)
        self._write(
            "summary",
            steps=self.step,
            loss_from=self.losses[0],
            loss_to=self.losses[-1],
            held_out_from=self.held_out[0] if self.held_out else None,
            held_out_to=self.held_out[-1] if self.held_out else None,
            tokens_per_second=self._tokens_per_second(),
            memory=memory,
            memory_stage=self._watched_stage,
            # Of the watched step, and for the wire the mean over the steps, which may have run at several stages.
            formula={**self.formula(self._watched_stage), "wire_bound": self._wire_bound / max(1, self.step)},
            wire={op: count / steps for op, count in self._wire_bytes.items()},
            skipped_steps=self._skipped,
            loss_scale=None if scaler is None else float(scaler.get_scale()),
        )
        if self._record is None:
            return None
        self._record.close()
        return self._record.path

    @property
    def _watched_step(self) -> int:
        # Not the first: engines set themselves up in it.
        return min(1, self.args.steps - 1)

    def _watch(self) -> None:
        """Look closely at one step: peaks of memory by owner and, for engines that do not count, the wire."""
        from hfdist.measure.memory import sample_memory
        from hfdist.measure.wire import record_wire
        from hfdist.recipe.wires import watch_collectives

        self._watched_stage = self.zero_stage
        # Last in, first out: the report exists once the sampler has left.
        self._watching.callback(lambda: self._memory.update(asdict(sampler.report)))
        sampler = self._watching.enter_context(sample_memory(self.model, self.optimizer))
        if self._count_by_watching:
            self._watching.callback(lambda: self._wire_bytes.update(wire.by_op))
            wire = self._watching.enter_context(record_wire())
            self._watching.enter_context(watch_collectives())
            self._wire_steps = 1

    def _build_recorder(self, *, own: bool) -> Recorder:
        """Of one step, with `--timeline`. Raises ConfigError where there is no pipeline, or too few steps to see it."""
        from hfdist.measure.timeline import Recorder, num_recorded

        split = self.accelerator.engine.of(self.model).split if own else None  # type: ignore[union-attr]
        pipeline = None if split is None else split.pipeline
        if pipeline is None:
            raise no_pipeline(self.args.recipe)
        batches, needed = self.args.steps * self.accumulation, num_recorded(pipeline.runs)
        if batches < needed:
            raise ConfigError(
                say(
                    given=f"--timeline with --steps {self.args.steps}",
                    expected=f"{needed} batches of {pipeline.schedule}, which is never flushed",
                    do=f"Use --steps {needed} or more.",
                )
            )
        # Neither the first step nor the one whose memory is looked at, which is slower for it.
        first = (self._watched_step + 1) * self.accumulation
        return Recorder(pipeline, first=min(first, batches - needed))

    def _tokens_per_second(self) -> float:
        """Over all ranks, without the first step, in which engines set themselves up, and the one that was watched."""
        watched = self._watched_step
        timed = [s for step, s in enumerate(self._seconds) if step > 0 and step != watched] or self._seconds
        return len(timed) * self.args.batch_size * self.args.seq_len / sum(timed)

    def _all_reduce(self, tensor: torch.Tensor) -> None:
        if self.world_size > 1:
            import torch.distributed as dist

            dist.all_reduce(tensor)

    def _write(self, kind: str, **values: Any) -> None:
        if self._record is not None:
            self._record.write(kind, **values)

    def _header(self) -> dict[str, Any]:
        settings = {name: str(v) if isinstance(v, Path) else v for name, v in asdict(self.args).items()}
        return {
            "recipe": self.args.recipe,
            "world_size": self.world_size,
            "zero_stage": self.zero_stage,
            "precision": {"no": "fp32"}.get(self.precision, self.precision),
            "accumulation": self.accumulation,
            "num_parameters": self.num_parameters,
            "num_tokens": self.data.num_tokens,
            "device": str(self.device),
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "settings": settings,
            "versions": versions(),
        }


class _Progress(contextlib.AbstractContextManager["_Progress"]):
    """A bar on a terminal; ten lines in a log file."""

    def __init__(self, args: RecipeArguments) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._steps, self._recipe = args.steps, args.recipe
        self._console = Console(file=sys.stdout)
        self._bar = Progress(
            TextColumn("[bold cyan]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss [bold]{task.fields[loss]}"),
            TextColumn("{task.fields[speed]} tokens/s"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task(self._recipe, total=self._steps, loss="-", speed="-")

    def __enter__(self) -> _Progress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def advance(self, step: int, loss: float, tokens_per_second: float) -> None:
        self._bar.update(self._task, completed=step, loss=f"{loss:.4f}", speed=f"{tokens_per_second:,.0f}")
        tenth = max(1, self._steps // 10)
        if not self._console.is_terminal and (step % tenth == 0 or step in (1, self._steps)):
            print(
                f"{self._recipe}  step {step}/{self._steps}  loss {loss:.4f}  {tokens_per_second:,.0f} tokens/s",
                flush=True,
            )
