"""What one rank does to verify a technique on a model type; runs in a rank of `ranks.Group`.

One process is transformers alone: the tiny model, the batch, `loss.backward()`. Then the same model goes through
`hfdist.Accelerator` with the technique's plugins and the loop of a user, and loss and whole gradients are compared.

    zero3   2 ranks, each with half of the batch          one process: the mean of both halves
    tp      2 ranks, the whole batch                      one process: the whole batch
    pp      2 stages, 2 micro-batches                     one process: the mean of both halves
    3d      2 stages x 2 tensor ranks, 2 micro-batches    one process: the mean of both halves
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hfdist.measure.wire import listen
from hfdist.models.blocks import find_blocks
from hfdist.models.tiny import tiny_batch, tiny_model
from hfdist.plugins import PipelineParallelPlugin, Plugin, TensorParallelPlugin, ZeroPlugin

# technique -> (pp_size, tp_size, ranks)
TECHNIQUES: dict[str, tuple[int, int, int]] = {"zero3": (1, 1, 2), "tp": (1, 2, 2), "pp": (2, 1, 2), "3d": (2, 2, 4)}
# A gradient is compared relative to its own largest element, but no closer than this much of the model's largest:
# what cancels to nothing (the bias of keys) has only rounding in it.
FLOOR = 1e-2


@dataclass(frozen=True)
class Seen:
    """What one rank saw of a split model, next to one process."""

    loss: float
    loss_of_one: float
    gradient_difference: float  # the largest relative one
    worst: str  # the parameter with it
    pp_rank: int
    blocks: dict[str, int]  # this rank's blocks -> bytes of their parameters here, between steps
    blocks_of_one: dict[str, int]
    all_reduces: int  # the fewest that a block's forward issued over the tensor ranks


def check(model_type: str, technique: str, rank: int) -> Seen:
    """Train one step of `model_type` in one process and split. Raises what `hfdist` or transformers raise."""
    from hfdist.accelerator import Accelerator

    model = tiny_model(model_type)
    # By name from here on: a stage has stand-ins where other stages' blocks were.
    names = [name for name, _ in find_blocks(model)]
    blocks_of_one = _bytes_of_blocks(model, names)
    halves = [{name: value[i : i + 2] for name, value in tiny_batch().items()} for i in (0, 2)]
    loss_of_one, want = _train_alone(model, [tiny_batch()] if technique == "tp" else halves)

    accelerator = Accelerator(plugins=plugins_of(technique))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    zero = accelerator.engine.of(model)
    blocks = _bytes_of_blocks(model, names)
    with _BlockReduces([model.get_submodule(name) for name in blocks]) as reduces:
        loss = model(**(halves[rank] if technique == "zero3" else tiny_batch())).loss
    accelerator.backward(loss)
    difference, worst = _compare(_whole_gradients(zero, model), want)
    optimizer.step()
    return Seen(
        loss=float(loss),
        loss_of_one=loss_of_one[rank] if technique == "zero3" else sum(loss_of_one) / len(loss_of_one),
        gradient_difference=difference,
        worst=worst,
        pp_rank=zero.split.grid.pp_rank if zero.split is not None else 0,
        blocks=blocks,
        blocks_of_one=blocks_of_one,
        all_reduces=reduces.fewest,
    )


def plugins_of(technique: str) -> list[Plugin]:
    """What `Accelerator(plugins=)` is given for `technique`."""
    pp_size, tp_size, _ = TECHNIQUES[technique]
    plugins: list[Plugin] = [ZeroPlugin(stage=3 if technique == "zero3" else 0)]
    if tp_size > 1:
        plugins.append(TensorParallelPlugin(tp_size=tp_size))
    if pp_size > 1:
        plugins.append(PipelineParallelPlugin(pp_size=pp_size, schedule="1f1b", num_micro_batches=2))
    return plugins


def _train_alone(model: nn.Module, batches: list[dict[str, Tensor]]) -> tuple[list[float], dict[str, Tensor]]:
    """The losses of `batches` in one process, and the gradients of their mean by every name; none stay behind."""
    losses = []
    for batch in batches:
        loss = model(**batch).loss
        (loss / len(batches)).backward()
        losses.append(float(loss))
    named = model.named_parameters(remove_duplicate=False)
    gradients = {name: p.grad.clone() for name, p in named if p.grad is not None}
    model.zero_grad()
    return losses, gradients


def _whole_gradients(zero: Any, model: nn.Module) -> dict[str, Tensor]:
    """Every gradient of the whole model, on every rank; all ranks call it."""
    local = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.grad is not None:
            gradient = parameter.grad
            local[name] = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    return zero.split.whole_state(local, keep=True) if zero.split is not None else local


def _compare(ours: dict[str, Tensor], want: dict[str, Tensor]) -> tuple[float, str]:
    """The largest relative difference, and where; a gradient that one side lacks is zero there."""
    largest = max((float(value.abs().max()) for value in want.values() if value.numel()), default=0.0)
    worst = (0.0, "")
    for name in sorted(ours.keys() | want.keys()):
        one, other = ours.get(name), want.get(name)
        present = other if one is None else one
        assert present is not None
        if present.numel() == 0:
            continue
        difference = float((present if one is None or other is None else one - other).abs().max())
        scale = max(FLOOR * largest, float(other.abs().max()) if other is not None else 0.0)
        # NaN must not pass for small.
        worst = max(worst, (difference / scale if difference == difference else float("inf"), name))
    return worst


def _bytes_of_blocks(model: nn.Module, names: list[str]) -> dict[str, int]:
    """Bytes of the parameters of those blocks that this rank has."""
    modules = dict(model.named_modules())
    sizes = {
        name: sum((p.to_local() if isinstance(p, DTensor) else p).nbytes for p in modules[name].parameters())
        for name in names
        if name in modules
    }
    return {name: size for name, size in sizes.items() if size}


class _BlockReduces:
    """Counts the all-reduces that each block issues in its first forward; `fewest` is the smallest count."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        self._blocks = blocks
        self._counts: dict[int, int] = {}
        self._open: list[int] = []

    @property
    def fewest(self) -> int:
        return min(self._counts.values(), default=0)

    def __enter__(self) -> _BlockReduces:
        self._handles = [block.register_forward_pre_hook(self._enter) for block in self._blocks]
        self._handles += [block.register_forward_hook(self._leave) for block in self._blocks]
        self._listening = listen(self._heard)
        self._listening.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._listening.__exit__(*error)
        for handle in self._handles:
            handle.remove()

    def _enter(self, block: nn.Module, args: Any) -> None:
        self._open.append(-1 if id(block) in self._counts else id(block))
        self._counts.setdefault(id(block), 0)

    def _leave(self, block: nn.Module, args: Any, output: Any) -> None:
        self._open.pop()

    def _heard(self, op: str, nbytes_sent: int, group_size: int, label: str) -> None:
        if op == "all_reduce" and group_size > 1 and self._open and self._open[-1] in self._counts:
            self._counts[self._open[-1]] += 1
