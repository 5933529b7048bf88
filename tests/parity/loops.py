"""Training loops that run in every rank and record what the oracle records.

The loop is what a user writes against accelerate; only the recording is ours. Whole tensors are collected with
DTensor's own `full_tensor` (gradients) and `accelerator.get_state_dict` (parameters), so both roads are tested too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.models import Batch, Family, Recipe, Window, build_lm, count_label_tokens
from tests.oracle import Step, Tensors
from tests.worker import make_accelerator

DTYPES = {"fp64": torch.float64, "fp32": torch.float32}
# Small against the gradient norms of these models (1 to 5), so that clipping always acts.
CLIP = 0.25
# No gradient is cut at this: the call only tells the norm.
NEVER = 1e12


@dataclass(frozen=True)
class Cell:
    """One point of the parity matrix."""

    stage: int
    gas: int
    clip: bool
    optimizer: Literal["sgd", "adamw", "adafactor", "muon"]
    world_size: int
    family: Family
    tied: bool
    dtype: Literal["fp64", "fp32"]

    @property
    def name(self) -> str:
        """Short and unique: test id and key of the matrix's record."""
        clip, tied = ("clip" if self.clip else "noclip"), ("tied" if self.tied else "untied")
        return (
            f"{self.family}-{tied}-{self.dtype}-stage{self.stage}-gas{self.gas}-{clip}-{self.optimizer}"
            f"-w{self.world_size}"
        )


@dataclass(frozen=True)
class RankRun:
    """What one rank brings back: all `steps` (rank 0 only), the norms, and a digest of its whole parameters."""

    steps: list[Step]
    norms: list[float]
    digest: str


def train_cell(cell: Cell, recipe: Recipe, windows: list[Window]) -> RankRun:
    """Train as `cell` says, with `accelerator.accumulate` around each micro-batch."""
    from hfdist.plugins import ZeroPlugin

    accelerator = make_accelerator(plugins=[ZeroPlugin(stage=cell.stage)], gradient_accumulation_steps=cell.gas)
    model = build_lm(cell.family, tied=cell.tied, dtype=DTYPES[cell.dtype])
    optimizers = recipe.build(model)
    model, *optimizers = accelerator.prepare(model, *optimizers)
    return run_windows(accelerator, model, optimizers, windows, clip=CLIP if cell.clip else None)


def run_windows(
    accelerator: Any,
    model: nn.Module,
    optimizers: list[Any],
    windows: list[Window],
    *,
    clip: float | None,
    schedulers: Sequence[Any] = (),
    between: Callable[[int], None] | None = None,
) -> RankRun:
    """The loop of accelerate's documentation over `windows`, recorded at each optimizer step.

    `between(index)` runs before each window: what a test wants done between two steps.
    """
    rank = accelerator.process_index
    recorder = Recorder(accelerator, model, optimizers)
    for index, window in enumerate(windows):
        if between is not None:
            between(index)
        scale = 1.0 if accelerator.scaler is None else accelerator.scaler.get_scale()
        for micro in window:
            with accelerator.accumulate(model):
                loss = model(**micro[rank]).loss
                recorder.loss(loss, micro[rank])
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.unscale_gradients()
                    recorder.gradients()
                    norm = accelerator.clip_grad_norm_(model.parameters(), NEVER if clip is None else clip)
                    recorder.norm(norm, clipped=clip is not None)
                for optimizer in optimizers:
                    optimizer.step()
                for scheduler in schedulers:
                    scheduler.step()
                for optimizer in optimizers:
                    optimizer.zero_grad()
        recorder.step(skipped=accelerator.optimizer_step_was_skipped, scale=scale)
    return recorder.result()


class Recorder:
    """Collects `Step`s in a rank. All its methods are collective."""

    def __init__(self, accelerator: Any, model: nn.Module, optimizers: list[Any]) -> None:
        self._accelerator, self._model, self._optimizers = accelerator, model, optimizers
        self._steps: list[Step] = []
        self._norms: list[float] = []
        self._begin()

    def _begin(self) -> None:
        self._loss_sum, self._tokens = 0.0, 0
        self._gradients: Tensors = {}
        self._clipped: Tensors = {}
        self._norm = float("nan")

    def loss(self, loss: Tensor, batch: Batch) -> None:
        """A local mean loss; together they must make the loss of the whole window."""
        count = count_label_tokens(batch)
        self._loss_sum += loss.item() * count
        self._tokens += count

    def gradients(self) -> None:
        """Whole gradients after backward, before clipping, and the learning rates that will be used."""
        self._gradients = whole_gradients(self._model)
        self._lrs = [group["lr"] for optimizer in self._optimizers for group in optimizer.param_groups]

    def norm(self, norm: Tensor, *, clipped: bool) -> None:
        """What `clip_grad_norm_` returned: a plain 0-dim tensor."""
        assert type(norm) is Tensor, f"clip_grad_norm_ returned {type(norm).__name__}, not a plain tensor"
        assert norm.ndim == 0, f"clip_grad_norm_ returned shape {tuple(norm.shape)}"
        self._norm = norm.item()
        if clipped:
            self._clipped = whole_gradients(self._model)

    def step(self, *, skipped: bool = False, scale: float = 1.0) -> None:
        """After the update: whole parameters."""
        sums = torch.tensor([self._loss_sum, float(self._tokens)], dtype=torch.float64)
        if dist.is_initialized():
            dist.all_reduce(sums)
        loss = (sums[0] / sums[1]).item()
        parameters = whole_parameters(self._accelerator, self._model)
        step = Step(loss, self._norm, self._gradients, self._clipped, parameters, self._lrs, scale, skipped)
        self._steps.append(step)
        self._norms.append(self._norm)
        self._begin()

    def result(self) -> RankRun:
        """The steps on rank 0, a digest everywhere."""
        steps = self._steps if self._accelerator.process_index == 0 else []
        return RankRun(steps, self._norms, digest(self._steps[-1].parameters))


def whole(tensor: Tensor) -> Tensor:
    """The global tensor, plain, on every rank."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def whole_gradients(model: nn.Module) -> Tensors:
    """All gradients that exist, whole, by parameter name."""
    return {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def whole_parameters(accelerator: Any, model: nn.Module) -> Tensors:
    """All parameters, whole, by name (a tie once)."""
    state = accelerator.get_state_dict(model)
    names = [name for name, _ in model.named_parameters()]
    for name in names:
        assert not isinstance(state[name], DTensor), f"get_state_dict gave a DTensor for {name}"
    return {name: state[name].detach().clone() for name in names}


def digest(tensors: Tensors) -> str:
    """One hash of all bytes: equal on two ranks when the tensors are bitwise equal."""
    total = hashlib.sha256()
    for name in sorted(tensors):
        total.update(name.encode())
        total.update(tensors[name].contiguous().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()
