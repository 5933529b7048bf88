"""Loops as users write them against accelerate, unmodified, and how one process runs them.

A loop gets an accelerator, a model that is not prepared, this process's batches and a `Log` to which it shows the model
after backward (`log.gradients()`) and after an update (`log.parameters()`). `OneProcess` stands in for the accelerator
in the oracle; it does what a plain PyTorch script would.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import get_linear_schedule_with_warmup

from tests.models import ADAM_EPS, IGNORE, Batch
from tests.oracle import Tensors, gradients_of, parameters_of
from tests.parity.loops import whole_gradients, whole_parameters

MAX_NORM = 0.25


class Log(Protocol):
    """What a loop shows."""

    def gradients(self) -> None: ...

    def parameters(self) -> None: ...

    def number(self, value: float | Tensor) -> None: ...


class OneProcess:
    """The part of accelerate's face that the loops use, for one process and nothing else."""

    num_processes = 1
    process_index = 0
    sync_gradients = True

    def prepare(self, *objects: Any) -> Any:
        """Nothing to do."""
        return objects if len(objects) > 1 else objects[0]

    def backward(self, loss: Tensor) -> None:
        """Plain backward."""
        loss.backward()

    def clip_grad_norm_(self, parameters: Iterable[Tensor], max_norm: float) -> Tensor:
        """Plain clipping."""
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm)

    @contextlib.contextmanager
    def accumulate(self, *models: nn.Module) -> Iterator[None]:
        """Windows of one micro-step."""
        yield


class PlainLog:
    """A `Log` in one process."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.records = model, []  # type: ignore[var-annotated]

    def gradients(self) -> None:
        """All gradients."""
        self.records.append(gradients_of(self.model))

    def parameters(self) -> None:
        """All parameters."""
        self.records.append(parameters_of(self.model))

    def number(self, value: float | Tensor) -> None:
        """One number that must be the same everywhere."""
        self.records.append({"number": torch.as_tensor(float(value), dtype=torch.float64)})


class ShardedLog(PlainLog):
    """A `Log` in a rank; the same records, collected whole."""

    def __init__(self, accelerator: Any, model: nn.Module) -> None:
        super().__init__(model)
        self.accelerator = accelerator

    def gradients(self) -> None:
        """All gradients, whole."""
        self.records.append(whole_gradients(self.model))

    def parameters(self) -> None:
        """All parameters, whole."""
        self.records.append(whole_parameters(self.accelerator, self.model))


Records = list[Tensors]
Loop = Callable[[Any, Any, list[Batch], Log], None]


def _adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=ADAM_EPS, weight_decay=0.1)


def zero_before(accelerator: Any, model: Any, batches: list[Batch], log: Log) -> None:
    """zero_grad, forward, backward, step."""
    model, optimizer = accelerator.prepare(model, _adamw(model))
    for batch in batches:
        optimizer.zero_grad()
        accelerator.backward(model(**batch).loss)
        log.gradients()
        optimizer.step()
        log.parameters()


def zero_between(accelerator: Any, model: Any, batches: list[Batch], log: Log) -> None:
    """forward, zero_grad, backward, step."""
    model, optimizer = accelerator.prepare(model, _adamw(model))
    for batch in batches:
        loss = model(**batch).loss
        optimizer.zero_grad()
        accelerator.backward(loss)
        log.gradients()
        optimizer.step()
        log.parameters()


def zero_after(accelerator: Any, model: Any, batches: list[Batch], log: Log) -> None:
    """forward, backward, step, zero_grad; the model's own `zero_grad` in every second step."""
    model, optimizer = accelerator.prepare(model, _adamw(model))
    for index, batch in enumerate(batches):
        accelerator.backward(model(**batch).loss)
        log.gradients()
        optimizer.step()
        log.parameters()
        if index % 2:
            model.zero_grad()
        else:
            optimizer.zero_grad(set_to_none=True)


def accumulation_by_hand(accelerator: Any, model: Any, batches: list[Batch], log: Log) -> None:
    """loss / 2, a step after every second backward."""
    model, optimizer = accelerator.prepare(model, _adamw(model))
    for index, batch in enumerate(batches):
        accelerator.backward(model(**batch).loss / 2)
        if index % 2 == 1:
            log.gradients()
            optimizer.step()
            optimizer.zero_grad()
            log.parameters()


def own_criterion(accelerator: Any, model: Any, batches: list[Batch], log: Log) -> None:
    """Labels never reach the model: a criterion on its logits."""
    model, optimizer = accelerator.prepare(model, _adamw(model))
    criterion = nn.CrossEntropyLoss(ignore_index=IGNORE)
    for batch in batches:
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        loss = criterion(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
        accelerator.backward(loss)
        log.gradients()
        optimizer.step()
        optimizer.zero_grad()
        log.parameters()


def label_smoothing(accelerator: Any, model: Any, batches: list[Batch], log: Log) -> None:
    """As transformers' Trainer does it: labels are popped, a smoothed loss is made of the logits by position."""
    model, optimizer = accelerator.prepare(model, _adamw(model))
    for batch in batches:
        inputs = dict(batch)
        labels = inputs.pop("labels")[:, 1:]
        logits = model(**inputs)["logits"][:, :-1]
        log_probabilities = -nn.functional.log_softmax(logits, dim=-1)
        nll = log_probabilities.gather(-1, labels.clamp(min=0).unsqueeze(-1)).mean()
        accelerator.backward(0.9 * nll + 0.1 * log_probabilities.mean())
        log.gradients()
        optimizer.step()
        optimizer.zero_grad()
        log.parameters()


def loss_and_auxiliary(accelerator: Any, model: Any, batches: list[Batch], log: Log) -> None:
    """The model's loss halved, plus a term of the user's own."""
    model, optimizer = accelerator.prepare(model, _adamw(model))
    for batch in batches:
        outputs = model(**batch)
        loss = outputs.loss / 2 + 1e-2 * outputs.logits.pow(2).mean()
        accelerator.backward(loss)
        log.gradients()
        optimizer.step()
        optimizer.zero_grad()
        log.parameters()


def skip_on_nan(accelerator: Any, model: Any, batches: list[Batch], log: Log) -> None:
    """A batch whose loss is not finite is left out."""
    model, optimizer = accelerator.prepare(model, _adamw(model))
    for index, batch in enumerate(batches):
        loss = model(**batch).loss
        if index == 1:
            loss = loss * float("nan")
        if not torch.isfinite(loss):
            optimizer.zero_grad()
            continue
        accelerator.backward(loss)
        log.gradients()
        optimizer.step()
        optimizer.zero_grad()
        log.parameters()


def two_forwards(accelerator: Any, model: Any, batches: list[Batch], log: Log) -> None:
    """Two batches through the model, one backward."""
    model, optimizer = accelerator.prepare(model, _adamw(model))
    for first, second in zip(batches[::2], batches[1::2], strict=True):
        loss = model(**first).loss + 0.5 * model(**second).loss
        accelerator.backward(loss)
        log.gradients()
        optimizer.step()
        optimizer.zero_grad()
        log.parameters()


def two_backwards(accelerator: Any, model: Any, batches: list[Batch], log: Log) -> None:
    """Two forwards, then two backwards in the opposite order, then a step."""
    model, optimizer = accelerator.prepare(model, _adamw(model))
    for first, second in zip(batches[::2], batches[1::2], strict=True):
        one, two = model(**first).loss, model(**second).loss
        accelerator.backward(two)
        accelerator.backward(one)
        log.gradients()
        optimizer.step()
        optimizer.zero_grad()
        log.parameters()


def eval_between(accelerator: Any, model: Any, batches: list[Batch], log: Log) -> None:
    """Evaluation before each step, and between forward and backward; with and without labels."""
    model, optimizer = accelerator.prepare(model, _adamw(model))
    for batch in batches:
        model.eval()
        with torch.no_grad():
            model(**batches[0])
        model.train()
        loss = model(**batch).loss
        with torch.inference_mode():
            model(input_ids=batches[-1]["input_ids"])
        accelerator.backward(loss)
        log.gradients()
        optimizer.step()
        optimizer.zero_grad()
        log.parameters()


def eval_before_step(accelerator: Any, model: Any, batches: list[Batch], log: Log) -> None:
    """Evaluation between backward and step: gradients stay where they are."""
    model, optimizer = accelerator.prepare(model, _adamw(model))
    for batch in batches:
        accelerator.backward(model(**batch).loss)
        with torch.no_grad():
            model(input_ids=batches[0]["input_ids"])
        log.gradients()
        log.number(accelerator.clip_grad_norm_(model.parameters(), MAX_NORM))
        optimizer.step()
        optimizer.zero_grad()
        log.parameters()


def own_clip_late(accelerator: Any, model: Any, batches: list[Batch], log: Log) -> None:
    """torch's clipping, looked up when it is called."""
    _own_clip(accelerator, model, batches, log, lambda *args: torch.nn.utils.clip_grad_norm_(*args))


def own_clip_early(accelerator: Any, model: Any, batches: list[Batch], log: Log) -> None:
    """torch's clipping, imported before hfdist was (as `from torch.nn.utils import clip_grad_norm_` on top)."""
    from tests.worker import EARLY_CLIP

    _own_clip(accelerator, model, batches, log, EARLY_CLIP)


def _own_clip(accelerator: Any, model: Any, batches: list[Batch], log: Log, clip: Callable[..., Tensor]) -> None:
    model, optimizer = accelerator.prepare(model, _adamw(model))
    for batch in batches:
        accelerator.backward(model(**batch).loss)
        norm = clip(model.parameters(), MAX_NORM)
        log.number(norm.item())
        log.gradients()
        optimizer.step()
        optimizer.zero_grad()
        log.parameters()


def clip_value(accelerator: Any, model: Any, batches: list[Batch], log: Log) -> None:
    """Gradients clamped by value with torch's own function."""
    model, optimizer = accelerator.prepare(model, _adamw(model))
    for batch in batches:
        accelerator.backward(model(**batch).loss)
        torch.nn.utils.clip_grad_value_(model.parameters(), 1e-2)
        log.gradients()
        optimizer.step()
        optimizer.zero_grad()
        log.parameters()


def two_optimizers(accelerator: Any, model: Any, batches: list[Batch], log: Log) -> None:
    """One for the matrices, one for the vectors; the second steps every other time only."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    first, second = torch.optim.SGD(matrices, lr=1e-2, momentum=0.9), torch.optim.AdamW(vectors, lr=1e-3, eps=ADAM_EPS)
    model, first, second = accelerator.prepare(model, first, second)
    for index, batch in enumerate(batches):
        accelerator.backward(model(**batch).loss)
        log.number(accelerator.clip_grad_norm_(model.parameters(), MAX_NORM))
        log.gradients()
        first.step()
        if index % 2:
            second.step()
        first.zero_grad()
        second.zero_grad()
        log.parameters()


def checkpointing_before(accelerator: Any, model: Any, batches: list[Batch], log: Log) -> None:
    """HF gradient checkpointing turned on before prepare."""
    model.gradient_checkpointing_enable()
    zero_after(accelerator, model, batches, log)


def checkpointing_after(accelerator: Any, model: Any, batches: list[Batch], log: Log) -> None:
    """HF gradient checkpointing turned on after prepare."""
    model, optimizer = accelerator.prepare(model, _adamw(model))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for batch in batches:
        accelerator.backward(model(**batch).loss)
        log.gradients()
        optimizer.step()
        optimizer.zero_grad()
        log.parameters()


def scheduler(accelerator: Any, model: Any, batches: list[Batch], log: Log) -> None:
    """As in accelerate's examples: step counts times `num_processes`, all prepared together, in another order."""
    optimizer = _adamw(model)
    steps = len(batches)
    schedule = get_linear_schedule_with_warmup(
        optimizer=optimizer,
        num_warmup_steps=2 * accelerator.num_processes,
        num_training_steps=(steps + 1) * accelerator.num_processes,
    )
    optimizer, schedule, model = accelerator.prepare(optimizer, schedule, model)
    for batch in batches:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            log.gradients()
            log.number(schedule.get_last_lr()[0])
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        log.parameters()


def read_gradients(accelerator: Any, model: Any, batches: list[Batch], log: Log) -> None:
    """`p.grad` is looked at after backward: norms for a log, then changed in place."""
    model, optimizer = accelerator.prepare(model, _adamw(model))
    for batch in batches:
        accelerator.backward(model(**batch).loss)
        for parameter in model.parameters():
            if parameter.grad is not None:
                log.number(parameter.grad.norm().item())
                log.number(parameter.grad.abs().max().item())
                parameter.grad.mul_(0.5)
        log.gradients()
        optimizer.step()
        optimizer.zero_grad()
        log.parameters()


def frozen_then_trained(accelerator: Any, model: Any, batches: list[Batch], log: Log) -> None:
    """The first block is frozen before prepare; its parameters are in no optimizer."""
    for name, parameter in model.named_parameters():
        if ".0." in name:
            parameter.requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(trained, lr=1e-2, eps=ADAM_EPS))
    for batch in batches:
        accelerator.backward(model(**batch).loss)
        log.gradients()
        optimizer.step()
        optimizer.zero_grad()
        log.parameters()


# Loops that give labels to the model are right on ragged batches (weighted by tokens); one that makes its own mean is
# right where every rank has as many tokens, as in any data-parallel engine.
RAGGED_LOOPS: list[Loop] = [
    zero_before,
    zero_between,
    zero_after,
    accumulation_by_hand,
    skip_on_nan,
    two_forwards,
    two_backwards,
    eval_between,
    eval_before_step,
    own_clip_late,
    own_clip_early,
    clip_value,
    two_optimizers,
    checkpointing_before,
    checkpointing_after,
    scheduler,
    read_gradients,
    frozen_then_trained,
]
EVEN_LOOPS: list[Loop] = [own_criterion, label_smoothing, loss_and_auxiliary]
