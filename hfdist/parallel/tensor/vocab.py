"""Cross-entropy over a vocabulary of which each rank has a part: no rank ever holds full logits in training.

    loss(t) = log sum_v exp(z[t, v]) - z[t, target]     the maximum and both sums over all ranks: two small all-reduces

The head leaves its part of the logits (..., own part of the vocabulary) in the model's output, where they are gathered
when someone reads `outputs.logits` (a collective: all ranks of the group read them, or none).
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers.loss.loss_utils import ForCausalLMLoss, ForMaskedLMLoss
from transformers.utils import ModelOutput

from hfdist import comm
from hfdist.parallel.tensor import collectives
from hfdist.parallel.tensor.collectives import Ranks

LABEL = "tp loss"


class _CrossEntropy(torch.autograd.Function):
    """(N, own part of V), targets (N,) to the loss of each target (N,), 0 where it is `ignored`."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, ranks: Ranks, start: int, ignored: int) -> Tensor:
        own, num_rows = logits.shape[1], logits.shape[0]
        maximum = logits.max(dim=1).values if own else logits.new_full((num_rows,), -torch.inf)
        comm.all_reduce(maximum, ranks.group, dist.ReduceOp.MAX, label=LABEL)
        shifted = logits - maximum[:, None]
        here = (targets >= start) & (targets < start + own)
        index = (targets - start).masked_fill(~here, 0)
        at_target = shifted.gather(1, index[:, None])[:, 0] if own else maximum
        exponentials = shifted.exp_()
        sums = torch.stack([exponentials.sum(dim=1), at_target.masked_fill(~here, 0)])  # (2, N)
        comm.all_reduce(sums, ranks.group, label=LABEL)
        kept = targets != ignored
        ctx.save_for_backward(exponentials.div_(sums[0][:, None]), index, here, kept)
        return (sums[0].log() - sums[1]) * kept

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        probabilities, index, here, kept = ctx.saved_tensors
        result = probabilities.clone()
        if result.shape[1]:
            result.scatter_add_(1, index[:, None], -here[:, None].to(result.dtype))
        return result.mul_((gradient * kept)[:, None]), None, None, None, None


def cross_entropy(
    logits: Tensor,  # (N, own part of the vocabulary)
    targets: Tensor,  # (N,) over the whole vocabulary
    ranks: Ranks,
    *,
    start: int,
    num_items: Tensor | int | None,
    ignored: int,
) -> Tensor:
    """As transformers': the mean over targets that are not `ignored`, or the sum divided by `num_items`."""
    losses = _CrossEntropy.apply(logits, targets, ranks, start, ignored)
    if num_items is None:
        return losses.sum() / (targets != ignored).sum()
    return losses.sum() / (num_items.to(losses.device) if isinstance(num_items, Tensor) else num_items)


@dataclass(frozen=True)
class VocabularyLoss:
    """Stands in for a model's `loss_function`; `whole` is the vocabulary as split over `ranks`."""

    ranks: Ranks
    whole: int
    original: Callable[..., Tensor]

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor,
        vocab_size: int | None = None,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """The loss from this rank's part of the logits, the same on every rank; from whole logits the original's."""
        if logits.shape[-1] == self.whole:
            if shift_labels is not None:
                kwargs["shift_labels"] = shift_labels
            arguments = {"num_items_in_batch": num_items_in_batch, "ignore_index": ignore_index, **kwargs}
            return self.original(logits=logits, labels=labels, vocab_size=vocab_size, **arguments)
        if logits.dtype in (torch.float16, torch.bfloat16):
            logits = logits.float()
        if self.original is ForCausalLMLoss:
            if shift_labels is None:
                shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
            labels = shift_labels
        start, _ = self.ranks.slice_of(self.whole)
        return cross_entropy(
            logits.reshape(-1, logits.shape[-1]),
            labels.reshape(-1).to(logits.device),
            self.ranks,
            start=start,
            num_items=num_items_in_batch,
            ignored=ignore_index,
        )


def splits_loss(model: nn.Module) -> bool:
    """Whether the model's loss can work on parts: it calls its `loss_function`, and that is one known here."""
    code = getattr(inspect.unwrap(type(model).forward), "__code__", None)
    known = getattr(model, "loss_function", None) in (ForCausalLMLoss, ForMaskedLMLoss)
    return known and code is not None and "loss_function" in code.co_names


def takes_labels(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call of the model asks for its loss."""
    if kwargs.get("labels") is not None:
        return True
    if len(args) < 2:
        return False
    names = list(inspect.signature(type(model).forward).parameters)[1 : len(args) + 1]
    return "labels" in names and args[names.index("labels")] is not None


@dataclass(frozen=True)
class LazyLogits:
    """Model outputs whose `logits`, of which this rank holds a part of `whole`, are gathered when they are read."""

    ranks: Ranks
    whole: int
    _classes: dict[type, type] = field(default_factory=dict)

    def wrap(self, output: ModelOutput) -> ModelOutput:
        """The same output; `items()` still gives the part."""
        kind = self._classes.setdefault(type(output), self._class_for(type(output)))
        return kind(**dict(output.items()))

    def _class_for(self, base: type) -> type:
        """A class and not an instance's attribute, so that what rebuilds an output (pytree, accelerate) keeps it."""
        if base in self._classes:
            return self._classes[base]

        # Weak: transformers keeps every class of outputs for ever, and with it would go the process group.
        weak = weakref.ref(self)

        def gathered(local: Any) -> Any:
            lazy = weak()
            if lazy is None or not isinstance(local, Tensor) or local.shape[-1] == lazy.whole:
                return local
            return collectives.gather(local, lazy.ranks, lazy.whole)

        class Lazy(base):  # type: ignore[misc, valid-type]
            def __getattribute__(self, name: str) -> Any:
                value = super().__getattribute__(name)
                return gathered(value) if name == "logits" else value

            def __getitem__(self, key: Any) -> Any:
                if isinstance(key, int):
                    return self[list(self.keys())[key]]
                if isinstance(key, slice):
                    return tuple(self[name] for name in list(self.keys())[key])
                return gathered(super().__getitem__(key)) if key == "logits" else super().__getitem__(key)

        Lazy.__name__, Lazy.__qualname__ = base.__name__, base.__qualname__
        return Lazy
