"""What one process computes with plain torch: the truth that distributed runs are compared with.

Imports nothing of hfdist. Two forms:
- `train` sees an optimizer step as one concatenated batch of all ranks and micro-batches: no weighting formula.
- `train_amp` computes each rank's micro-batch apart, because rounding in half precision depends on how work is cut, and
  combines the gradients in fp32 by label tokens: the semantics of mixed precision, not its speed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from tests.models import Batch, Window, concatenate, count_label_tokens

Tensors = dict[str, Tensor]
Build = Callable[[nn.Module], list[torch.optim.Optimizer]]
ComputeMode = Literal["mixed", "cast", "autocast"]


@dataclass
class Step:
    """One optimizer step. `gradients` are before clipping, `clipped` after it (empty without clipping), both before the
    update; `parameters` after it. `norm` is the total 2-norm before clipping."""

    loss: float
    norm: float
    gradients: Tensors
    clipped: Tensors
    parameters: Tensors
    lrs: list[float]
    scale: float = 1.0
    skipped: bool = False


def train(
    model: nn.Module,
    windows: Iterable[Window],
    *,
    optimizers: Build,
    clip: float | None = None,
    schedulers: Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler] | None = None,
    weighting: Literal["tokens", "mean"] = "tokens",
) -> list[Step]:
    """Train `model` in place, one optimizer step per window, one scheduler step per update.

    weighting "tokens": the loss of the whole window as one batch. "mean": the plain mean over ranks and micro-batches
    of their own means.
    """
    built = optimizers(model)
    schedules = [schedulers(optimizer) for optimizer in built] if schedulers else []
    steps = []
    for window in windows:
        model.zero_grad()
        if weighting == "tokens":
            loss = model(**concatenate([batch for micro in window for batch in micro])).loss
        else:
            losses = [model(**batch).loss for micro in window for batch in micro]
            loss = torch.stack(losses).mean()
        loss.backward()
        steps.append(update(model, built, loss=loss.item(), clip=clip))
        for schedule in schedules:
            schedule.step()
    return steps


def update(model: nn.Module, optimizers: list[torch.optim.Optimizer], *, loss: float, clip: float | None) -> Step:
    """Clip, step and record, with gradients already in place."""
    gradients = gradients_of(model)
    norm = math.sqrt(sum(float(g.double().pow(2).sum()) for g in gradients.values()))
    clipped: Tensors = {}
    if clip is not None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        clipped = gradients_of(model)
    lrs = [group["lr"] for optimizer in optimizers for group in optimizer.param_groups]
    for optimizer in optimizers:
        optimizer.step()
    return Step(loss, norm, gradients, clipped, parameters_of(model), lrs)


def gradients_of(model: nn.Module) -> Tensors:
    """Copies of all gradients that exist, by parameter name (a tie once)."""
    return {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}


def parameters_of(model: nn.Module) -> Tensors:
    """Copies of all parameters, by name (a tie once)."""
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@dataclass
class LossScale:
    """Dynamic loss scale, written from its description: multiply by `backoff` after `hysteresis` overflows in a row (a
    good step starts the count anew), by `growth` after `interval` good steps in a row."""

    value: float = 65536.0
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000
    hysteresis: int = 1
    minimum: float = 1.0
    _good: int = field(default=0, init=False)
    _bad: int = field(default=0, init=False)

    def update(self, overflow: bool) -> None:
        """Take the outcome of one step into account."""
        if overflow:
            self._good, self._bad = 0, self._bad + 1
            if self._bad >= self.hysteresis:
                self.value = max(self.value * self.backoff, self.minimum)
            return
        self._good, self._bad = self._good + 1, 0
        if self._good == self.interval:
            self.value, self._good = self.value * self.growth, 0


def train_amp(
    model: nn.Module,
    windows: Iterable[Window],
    *,
    optimizers: Build,
    dtype: torch.dtype,
    compute: ComputeMode,
    clip: float | None = None,
    scale: LossScale | None = None,
) -> list[Step]:
    """Train `model` (fp32 masters) in place with forward and backward in `dtype`.

    Each rank's micro-batch is one forward and backward of its own mean loss (times the loss scale); its gradient is
    taken to fp32, unscaled, and averaged with its label tokens as weight. A step with a non-finite gradient is skipped.
    """
    built = optimizers(model)
    steps = []
    for window in windows:
        total: Tensors = {}
        tokens = 0
        loss_sum = 0.0
        factor = scale.value if scale else 1.0
        for micro in window:
            for batch in micro:
                loss, gradients = half_gradients(model, batch, dtype=dtype, compute=compute, scale=factor)
                count = count_label_tokens(batch)
                tokens += count
                loss_sum += count * loss
                for name, gradient in gradients.items():
                    total[name] = total.get(name, torch.zeros_like(gradient)) + gradient * (count / factor)
        for name, parameter in model.named_parameters():
            parameter.grad = total[name] / tokens
        overflow = not all(bool(g.isfinite().all()) for g in total.values())
        if overflow:
            assert scale is not None, "non-finite gradients without a loss scale"
            lrs = [group["lr"] for optimizer in built for group in optimizer.param_groups]
            step = Step(loss_sum / tokens, math.inf, gradients_of(model), {}, parameters_of(model), lrs)
        else:
            step = update(model, built, loss=loss_sum / tokens, clip=clip)
        step.scale, step.skipped = factor, overflow
        if scale is not None:
            scale.update(overflow)
        steps.append(step)
    return steps


def half_gradients(
    model: nn.Module, batch: Batch, *, dtype: torch.dtype, compute: ComputeMode, scale: float = 1.0
) -> tuple[float, Tensors]:
    """The mean loss of one batch and its gradients (fp32, still times `scale`).

    "mixed": half copies of the parameters, autocast on; "cast": the copies without autocast; "autocast": the fp32
    parameters under autocast.
    """
    names = [name for name, _ in model.named_parameters()]
    leaves = [p.detach().to(dtype if compute != "autocast" else p.dtype).requires_grad_() for p in model.parameters()]
    replaced = dict(zip(names, leaves, strict=True))
    for alias, name in ties_of(model).items():
        replaced[alias] = replaced[name]
    with torch.autocast("cpu", dtype, enabled=compute != "cast"):
        loss = torch.func.functional_call(model, replaced, kwargs=dict(batch), tie_weights=False).loss
    gradients = torch.autograd.grad(loss.float() * scale, leaves)
    return loss.item(), {name: g.float() for name, g in zip(names, gradients, strict=True)}


def ties_of(model: nn.Module) -> dict[str, str]:
    """Other names of parameters that have several: alias -> the name in `named_parameters()`."""
    first = {parameter: name for name, parameter in model.named_parameters()}
    every = model.named_parameters(remove_duplicate=False)
    return {name: first[parameter] for name, parameter in every if first[parameter] != name}


def differences(got: Tensors, want: Tensors) -> dict[str, float]:
    """Largest absolute difference by name; a missing, extra or misshapen tensor, or a NaN on one side, is infinite."""
    result = dict.fromkeys(got.keys() ^ want.keys(), math.inf)
    for name in got.keys() & want.keys():
        a, b = got[name].double(), want[name].double()
        if a.shape != b.shape:
            result[name] = math.inf
        elif a.numel():
            gap = (a - b).abs().max().item()
            result[name] = math.inf if math.isnan(gap) else gap
    return result


def assert_same(what: str, got: Tensors, want: Tensors, tolerance: float) -> None:
    """Fail with the names and differences of the tensors that are further apart than `tolerance`, the worst first."""
    gaps = sorted(differences(got, want).items(), key=lambda item: -item[1])
    wrong = [f"{name} {gap:.3e}" for name, gap in gaps if not gap <= tolerance]
    if wrong:
        raise AssertionError(
            f"{what}: {len(wrong)} of {len(gaps)} differ by more than {tolerance:g}: " + ", ".join(wrong)
        )


def assert_near(what: str, got: float, want: float, tolerance: float) -> None:
    """Fail with both numbers when they are further apart than `tolerance`."""
    if not abs(got - want) <= tolerance:
        raise AssertionError(f"{what}: got {got!r}, one process has {want!r}, {abs(got - want):.3e} > {tolerance:g}")


def assert_steps(got: list[Step], want: list[Step], *, tolerance: float, loss_tolerance: float | None = None) -> None:
    """Compare two runs step by step: loss, norm, gradients before and after clipping, parameters, learning rates."""
    if len(got) != len(want):
        raise AssertionError(f"{len(got)} steps, one process has {len(want)}")
    for index, (ours, theirs) in enumerate(zip(got, want, strict=True)):
        assert_near(f"step {index}: loss", ours.loss, theirs.loss, loss_tolerance or tolerance)
        assert_same(f"step {index}: gradients", ours.gradients, theirs.gradients, tolerance)
        assert_near(f"step {index}: norm", ours.norm, theirs.norm, tolerance)
        assert_same(f"step {index}: clipped gradients", ours.clipped, theirs.clipped, tolerance)
        assert_same(f"step {index}: parameters", ours.parameters, theirs.parameters, tolerance)
        if ours.lrs != theirs.lrs:
            raise AssertionError(f"step {index}: learning rates {ours.lrs}, one process has {theirs.lrs}")
