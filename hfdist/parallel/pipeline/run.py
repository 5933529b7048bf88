"""`model(**batch)` of a pipeline: the whole order, from a batch to a loss.

    agree on the batch -> views over the current parameters -> torch's schedule (forward and backward)
    -> gradients of shared parameters summed -> all gradients set aside -> the loss, on every rank
    ... loss.backward() adds (gradient of the loss) x (what was set aside) to `.grad`

So a loop may clear gradients before, between or after, divide the loss, add to it, drop it, or run an evaluation in
between. The caller of the package fills the hooks `before_run` and
`after_run` (gather parameters, free them), `add_gradients` (where they go; the default is `.grad`) and `loss_scale`
(what the loss is multiplied by inside, for fp16).
"""

from __future__ import annotations

import contextlib
import inspect
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hfdist.errors import ConfigError, say
from hfdist.measure import wire
from hfdist.parallel.pipeline import ties
from hfdist.parallel.pipeline.agree import agree, describe_batch
from hfdist.parallel.pipeline.apply import Applied
from hfdist.parallel.pipeline.asynchronous import Asynchronous, Flight
from hfdist.parallel.pipeline.forward_only import as_output, merge_outputs, run_forward, share_outputs
from hfdist.parallel.pipeline.micro_batches import MicroBatches, split_batch
from hfdist.parallel.pipeline.output import PipelineOutput, loss_with
from hfdist.parallel.pipeline.schedules import build_schedule
from hfdist.parallel.pipeline.stage import Stage
from hfdist.parallel.pipeline.stand_ins import BlockForm
from hfdist.parallel.pipeline.view import View
from hfdist.parallel.pipeline.wide import take_half_gradients
from hfdist.waits import waiting

LossFn = Callable[[Any, Mapping[str, Any]], Tensor]
Gradients = dict[nn.Parameter, Tensor]
CACHES = ("cache", "past_key_values")


def add_to_grad(gradients: Gradients, factor: Tensor) -> None:
    """`.grad += gradient * factor` for each parameter."""
    for parameter, gradient in gradients.items():
        part = (gradient * factor.to(gradient.dtype)).to(parameter.dtype)
        parameter.grad = part if parameter.grad is None else parameter.grad.add_(part)


class Pipeline:
    """A model cut over the ranks of `group`. Built by `apply_pipeline`; `undo()` gives `model.forward` back."""

    def __init__(
        self,
        model: nn.Module,
        applied: Applied,
        group: dist.ProcessGroup,
        *,
        schedule: str,
        runs: str,
        num_micro_batches: int,
        loss_fn: LossFn | None,
    ) -> None:
        self.model, self.applied, self.group = model, applied, group
        self.schedule = schedule
        self.runs = runs  # the order that really runs: 1f1b with too few micro-batches is gpipe's
        self.num_micro_batches = num_micro_batches
        self.loss_fn = loss_fn
        self.before_run: Callable[[], None] = lambda: None
        self.after_run: Callable[[], None] = lambda: None
        self.add_gradients: Callable[[Gradients, Tensor], None] = add_to_grad
        self.loss_scale: Callable[[], float] = lambda: 1.0
        # Called as watch(stage, kind, micro_batch, begins) around every computation.
        self.watch: Callable[[int, str, int, bool], None] | None = None
        self._after_backward: Callable[[], None] | None = None
        self._form = BlockForm(applied.cut.parts.block_form)
        self._built: tuple[Any, Any, dict[int, Stage]] | None = None
        self._probed_dtype = _dtype_of(model)
        self._accepts = set(inspect.signature(model.forward).parameters)
        self._asynchronous: Asynchronous | None = None
        self._number = 0  # of the micro-batch that runs, over all batches
        self._seed = 0
        self._install()

    # --- the face ---------------------------------------------------------------------------------------------------

    def run(self, batch: Mapping[str, Any]) -> Any:
        """The schedule over `batch` (all ranks the same): in training the loss, otherwise loss and logits."""
        with self._waiting("runs a batch"):
            return self._run(batch)

    def _run(self, batch: Mapping[str, Any]) -> Any:
        trains = self.model.training and torch.is_grad_enabled()
        error: BaseException | None = None
        micro: MicroBatches | None = None
        cached = any(batch.get(name) is not None for name in CACHES)
        try:
            if trains:
                self._check_training(batch, cached)
            elif cached:
                self._check_cache()
            micro = split_batch(self.model, batch, 1 if cached else self.num_micro_batches, pad=trains)
        except Exception as raised:
            error = raised
        seed = int(torch.randint(2**31, ())) if trains else 0
        if self._asynchronous is not None and not trains:
            self.drain()
        if self._asynchronous is not None and not self._asynchronous.is_drained:
            # Ranks do not wait for each other here; messages carry their shape.
            if error is not None:
                raise error
            assert micro is not None
            self.before_run()
            return self._train_asynchronously(micro, self._seed)
        what = f"{describe_batch(batch)}, {'training' if trains else 'evaluation'}, {self._hidden_dtype()}"
        seed = agree(self.group, self.device, what=what, seed=seed, error=error)
        assert micro is not None
        self.before_run()
        try:
            if not trains:
                return self._evaluate(batch, micro)
            if self.schedule == "pipedream":
                return self._train_asynchronously(micro, seed)
            value, gradients = self._train(micro, seed)
        finally:
            self.after_run()
        scale = self._scale
        loss = loss_with(value, lambda factor: self.add_gradients(gradients, factor / scale))
        return PipelineOutput(loss=loss)  # type: ignore[arg-type]

    def owned_once(self, parameters: Iterable[nn.Parameter] | None = None) -> list[nn.Parameter]:
        """Parameters that count on this rank, so that over all ranks each counts once (for a norm)."""
        return ties.owned_once(self.model, self.applied, parameters)

    def describe(self) -> str:
        """Two lines: who has what, and which order runs."""
        order = self.schedule
        if self.runs != self.schedule:
            order += (
                f" (in the order of {self.runs}: {self.num_micro_batches} micro-batches for fewer than a rank each)"
            )
        return f"{self.applied.cut.describe()}\n{order}, {self.num_micro_batches} micro-batches"

    def drain(self) -> None:
        """Finish what an asynchronous schedule has in flight, on all ranks together; nothing for the others."""
        if self._asynchronous is not None:
            with self._waiting("finishes the batches in flight"), torch.random.fork_rng(devices=_devices(self.device)):
                self._asynchronous.drain()

    def undo(self) -> None:
        """Give `model.forward` back. What other ranks own stays away."""
        ours = self.model.__dict__.pop("forward", None)
        original = getattr(ours, "pipeline_original", None)
        if original is not None:
            self.model.__dict__["forward"] = original

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return next(self.model.parameters()).device

    def _waiting(self, does: str) -> contextlib.AbstractContextManager[None]:
        return waiting(self.group, f"while it {does} of the pipeline ({self.schedule})")

    # --- the parts --------------------------------------------------------------------------------------------------

    def _install(self) -> None:
        original = self.model.__dict__.get("forward")
        signature = inspect.signature(self.model.forward)

        def forward(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind_partial(*args, **kwargs)
            batch: dict[str, Any] = {}
            for name, value in bound.arguments.items():
                if signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
                    batch.update(value)
                else:
                    batch[name] = value
            return self.run({name: value for name, value in batch.items() if value is not None})

        forward.pipeline_original = original  # type: ignore[attr-defined]
        # transformers and Trainer read the signature to know which columns of a data set to keep.
        forward.__signature__ = signature  # type: ignore[attr-defined]
        self.model.__dict__["forward"] = forward

    def _check_training(self, batch: Mapping[str, Any], cached: bool) -> None:
        if batch.get("labels") is None and self.loss_fn is None:
            raise ConfigError(
                say(
                    given="a batch without labels in training, and no loss_fn",
                    expected="what the last stage needs to compute a loss, inside the schedule",
                    do="Pass labels=, or give PipelineParallelPlugin(loss_fn=...) a function of (outputs, batch); call "
                    "model.eval() or torch.no_grad() for logits.",
                )
            )
        config = getattr(self.model, "config", None)
        if batch.get("output_router_logits", getattr(config, "output_router_logits", False)):
            raise ConfigError(
                say(
                    given="output_router_logits in the training of a pipeline",
                    expected="no auxiliary loss over all layers' routers: a stage sees its own only",
                    do="Set config.output_router_logits to False, or use expert or tensor parallelism.",
                )
            )
        if cached:
            raise ConfigError(
                say(
                    given="a key-value cache in training",
                    expected="whole sequences",
                    do="Leave the cache out, or run under torch.no_grad().",
                )
            )

    def _check_cache(self) -> None:
        if len(self.applied.stages) > 1:
            raise ConfigError(
                say(
                    given=f"a key-value cache with {self.schedule}, which has several stages on a rank",
                    expected="one stage a rank: the cache's length would change between a rank's stages",
                    do="Call generate(..., use_cache=False), or choose 1f1b or gpipe.",
                )
            )

    def _train(self, micro: MicroBatches, seed: int) -> tuple[Tensor, Gradients]:
        """(the loss, this rank's gradients): the schedule's forward and backward."""
        self._scale = self.loss_scale()
        shape = self.applied.cut.parts.hidden_shape_of(micro.rows_each, micro.length)
        schedule, stages = self._schedule((shape, self._hidden_dtype()))
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        before = {p: p.grad for p in parameters}
        losses: list[Tensor] = []
        for p in parameters:
            p.grad = None
        gradients: Gradients = {}
        self._after_backward = lambda: take_half_gradients(((p, p) for p in parameters), gradients)
        try:
            with torch.random.fork_rng(devices=_devices(self.device)):
                for index, stage in stages.items():
                    stage.bind(self._view(index, stage, seed), self._kwargs(micro, index), self._finish(micro, losses))
                schedule.step(target=torch.arange(self.num_micro_batches), return_outputs=False)
            gradients |= {p: p.grad for p in parameters if p.grad is not None}
        finally:
            self._after_backward = None
            for p, gradient in before.items():
                p.grad = gradient
            for stage in stages.values():
                stage.release()
        ties.sum_shared_gradients(ties.shared_here(self.model, self.applied), gradients, self.group)
        return self._share_loss(losses), gradients

    def _train_asynchronously(self, micro: MicroBatches, seed: int) -> PipelineOutput:
        """The batch goes in; the loss and the gradients of the one before come out."""
        if self._asynchronous is None:
            self._asynchronous = Asynchronous(
                self.group,
                self.device,
                ties.shared_here(self.model, self.applied),
                set_number=lambda number: setattr(self, "_number", number),
                watch=lambda *event: None if self.watch is None else self.watch(*event),
            )
        self._seed, self._scale = seed, self.loss_scale()
        (index,) = self.applied.stages
        view = View(self.model, self.applied, index, self._form)
        view.on_block(lambda block: _reseed(seed, block, self._number), self.applied.cut.range_of(index).start)
        losses: list[Tensor] = []
        flight = Flight(
            view,
            view.use_copies(),
            self._kwargs(micro, index),
            self._finish(micro, losses),
            (self.applied.cut.parts.hidden_shape_of(micro.rows_each, micro.length), self._hidden_dtype()),
            len(micro.batches),
            self._scale,
            losses,
        )
        with torch.random.fork_rng(devices=_devices(self.device)):
            value, batch, done = self._asynchronous.run(flight)
        gradients, scale = (done.gradients, done.scale) if done is not None else ({}, 1.0)
        value = value.to(torch.promote_types(self._hidden_dtype(), torch.float32))
        loss = loss_with(value, lambda factor: self.add_gradients(gradients, factor / scale))
        output = PipelineOutput(loss=loss)  # type: ignore[arg-type]
        object.__setattr__(output, "loss_batch", batch)
        return output

    def _note(self, stage: int, kind: str, micro_batch: int, begins: bool) -> None:
        """A computation of a schedule begins or ends."""
        if self.watch is not None:
            self.watch(stage, kind, micro_batch, begins)
        if not begins and kind in ("B", "W") and self._after_backward is not None:
            self._after_backward()

    def _schedule(self, hidden: tuple[tuple[int, ...], torch.dtype]) -> tuple[Any, dict[int, Stage]]:
        key = (hidden, self.device)
        if self._built is None or self._built[0] != key:
            stages = {
                index: Stage(
                    index,
                    self.applied.cut.num_stages,
                    hidden=hidden,
                    device=self.device,
                    group=self.group,
                    watch=self._note,
                )
                for index in self.applied.stages
            }
            self._built = (key, build_schedule(self.runs, list(stages.values()), self.num_micro_batches), stages)
        return self._built[1], self._built[2]

    def _view(self, index: int, stage: Stage, seed: int) -> View:
        """The stage's modules, each block on a random stream that depends on block and micro-batch only."""
        view = View(self.model, self.applied, index, self._form)
        view.on_block(lambda block: _reseed(seed, block, stage.runner.number), self.applied.cut.range_of(index).start)
        stage.runner.before = lambda: _reseed(seed, -1, stage.runner.number)
        return view

    def _kwargs(self, micro: MicroBatches, stage: int) -> list[dict[str, Any]]:
        """What the stage's model is called with, by micro-batch: the labels on the last stage only."""
        is_last = stage == self.applied.cut.num_stages - 1
        without = set() if is_last and self.loss_fn is None else {"labels", "num_items_in_batch"}
        several = []
        for batch, weight in zip(micro.batches, micro.weights, strict=True):
            left_out = without | ({"labels", "num_items_in_batch"} if not weight else set())
            kwargs = {name: value for name, value in batch.items() if name not in left_out}
            several.append(kwargs | self._settings(batch))
        return several

    def _settings(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        cached = any(batch.get(name) is not None for name in CACHES)
        settings = {"return_dict": True} | ({} if cached else {"use_cache": False})
        return {name: value for name, value in settings.items() if name in self._accepts}

    def _finish(self, micro: MicroBatches, losses: list[Tensor]) -> Callable[[Any, int], Tensor]:
        def finish(output: Any, number: int) -> Tensor:
            loss = self._weighted(output, micro, number)
            losses.append(loss.detach())
            return loss * self._scale

        return finish

    def _weighted(self, output: Any, micro: MicroBatches, number: int) -> Tensor:
        weight, batch = micro.weights[number], micro.batches[number]
        if not weight:  # no label here: nothing to learn, where the model's own mean would not be a number
            return _first_tensor(output).flatten()[:0].sum()
        if self.loss_fn is not None:
            return self.loss_fn(output, batch) * weight
        loss = output["loss"] if isinstance(output, Mapping) else getattr(output, "loss", None)
        if not isinstance(loss, Tensor):
            raise ConfigError(
                say(
                    given=f"{type(self.model).__name__}, which returned no loss for labels",
                    expected="a loss",
                    do="Give PipelineParallelPlugin(loss_fn=...) a function of (outputs, batch).",
                )
            )
        # Divided by the batch's number of items already, where the caller says it.
        return loss if batch.get("num_items_in_batch") is not None else loss * weight

    def _share_loss(self, losses: list[Tensor]) -> Tensor:
        source = self.applied.last_rank
        value = torch.zeros((), dtype=torch.float64, device=self.device)
        if self.applied.rank == source:
            value += torch.stack([loss.to(torch.float64) for loss in losses]).sum()
            wire.record("broadcast", value.nbytes, group_size=self.applied.num_ranks, label="pipeline loss")
        dist.broadcast(value, group=self.group, group_src=source)
        return value.to(torch.promote_types(self._hidden_dtype(), torch.float32))

    def _evaluate(self, batch: Mapping[str, Any], micro: MicroBatches) -> Any:
        applied = self.applied
        rows = [_rows(b, micro) for b in micro.batches]
        hidden = [(applied.cut.parts.hidden_shape_of(number, micro.length), self._hidden_dtype()) for number in rows]
        with torch.no_grad():
            views = {index: View(self.model, applied, index, self._form) for index in applied.stages}
            kwargs = self._kwargs(micro, applied.stages[-1])
            outputs = run_forward(views, applied, kwargs, hidden, device=self.device, group=self.group)
            merged = None
            has_loss = batch.get("labels") is not None or (self.loss_fn is not None and self.model.training)
            if outputs is not None:
                kind, tensors = merge_outputs(outputs, rows)
                if has_loss:
                    tensors["loss"] = torch.stack(
                        [self._weighted(output, micro, number) for number, output in enumerate(outputs)]
                    ).sum()
                merged = kind, tensors
            kind, tensors = share_outputs(merged, source=applied.last_rank, device=self.device, group=self.group)

        def own_cache(kind: type) -> dict[str, Any]:
            fields = getattr(kind, "__dataclass_fields__", {})
            return {name: batch[name] for name in CACHES if batch.get(name) is not None and name in fields}

        return as_output(kind, tensors, own_cache)

    def _hidden_dtype(self) -> torch.dtype:
        """That of the hidden state now: parameters may be gathered in another dtype than the cut has seen."""
        seen = self.applied.cut.parts.hidden_dtype
        return _dtype_of(self.model) if seen == self._probed_dtype else seen


def _dtype_of(model: nn.Module) -> torch.dtype:
    """The dtype of the largest parameter."""
    return max((p for p in model.parameters() if p.is_floating_point()), key=lambda p: p.numel()).dtype


def _rows(batch: Mapping[str, Any], micro: MicroBatches) -> int:
    for name in ("input_ids", "inputs_embeds", "labels"):
        if isinstance(batch.get(name), Tensor):
            return batch[name].shape[0]
    return next(value.shape[0] for value in batch.values() if isinstance(value, Tensor) and value.ndim)


def _first_tensor(output: Any) -> Tensor:
    values = output.values() if isinstance(output, Mapping) else output if isinstance(output, tuple) else [output]
    return next(value for value in values if isinstance(value, Tensor) and value.ndim)


def _devices(device: torch.device) -> list[torch.device]:
    return [] if device.type == "cpu" else [device]


def _reseed(seed: int, block: int, micro_batch: int) -> None:
    torch.manual_seed(zlib.crc32(f"{seed} {block} {micro_batch}".encode()))
