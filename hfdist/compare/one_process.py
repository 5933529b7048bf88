"""One process that trains what W ranks train together: the oracle of `hfdist compare`.

    ranks       step 1: rank 0 takes micro-batch 0, rank 1 micro-batch 1      step 2: 2 and 3
    here        step 1: one batch, 0 and 1 laid end to end                    step 2: 2 and 3

The script is not told: `accelerator.num_processes` says W, so that it computes the batch size of a rank, the length of
its schedule and all else as it does among W ranks; the loader then hands out W of its batches as one. Whatever
accelerate itself does for W ranks is done here too: a shuffling sampler without a generator gets a seeded one, a last
group that is too short is filled up from the first batches (`even_batches`) or dropped (`drop_last`), and a prepared
scheduler steps W times per update. Accumulation stays what it is: k micro-steps, each of them W times as large. A
rank's random numbers (dropout) cannot be matched.

Batches are tensors in dicts, lists and tuples. Two-dimensional integer rows of different lengths (dynamic padding) are
padded at the right, if the batch has an `attention_mask` that hides it: labels with -100, all else with 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from accelerate.scheduler import AcceleratedScheduler
from torch.utils.data import DataLoader, RandomSampler

from hfdist.errors import ConfigError, say
from hfdist.models.labels import IGNORED
from hfdist.native import NativeAccelerator


class OneProcess(NativeAccelerator):
    """A single process with the global batch of `ranks` ranks."""

    ranks = 1

    @property
    def num_processes(self) -> int:
        """What the script would be told among W ranks."""
        return self.ranks

    def prepare_data_loader(
        self, data_loader: Any, device_placement: bool | None = None, slice_fn_for_dispatch: Any = None
    ) -> Any:
        """accelerate's loader for one process, which hands out W batches as one."""
        if getattr(data_loader, "_is_accelerate_prepared", False):
            return data_loader
        sampler = getattr(data_loader, "sampler", None)
        if isinstance(sampler, RandomSampler) and sampler.generator is None and not self.use_seedable_sampler:
            # As accelerate does for several ranks; it takes one number from the global stream.
            sampler.generator = torch.Generator()
            sampler.generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
        drop_last = bool(getattr(data_loader, "drop_last", False))
        ranks, self.ranks = self.ranks, 1  # this process reads all
        try:
            loader = super().prepare_data_loader(data_loader, device_placement, slice_fn_for_dispatch)
        finally:
            self.ranks = ranks
        if self.split_batches:  # a batch is the global one already
            return loader
        together = BatchesTogether(loader, ranks, drop_last=drop_last, even=self.even_batches)
        self._dataloaders[-1] = together
        return together

    def clip_grad_norm_(
        self, parameters: Iterable[torch.Tensor] | torch.Tensor, max_norm: float, norm_type: float = 2
    ) -> torch.Tensor:
        """torch's clipping by a norm that is summed in fp64: the oracle's must not depend on how tensors are cut.

        In fp32 torch's norm of one large tensor is off on a CPU (2.6 M elements: 4.9e-5; halves of it, as two ranks
        have them: 1.7e-5), which a curve shows after ten steps.
        """
        if not self.sync_gradients:
            return torch.zeros((), device=self.device)
        listed = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        norms = [torch.linalg.vector_norm(p.grad, norm_type, dtype=torch.float64) for p in listed if p.grad is not None]
        if not norms:
            return torch.zeros((), device=self.device)
        total = torch.linalg.vector_norm(torch.stack(norms), norm_type).float()
        torch.nn.utils.clip_grads_with_norm_(listed, max_norm, total)
        return total

    def prepare_scheduler(self, scheduler: torch.optim.lr_scheduler.LRScheduler) -> Any:
        """accelerate's wrapper, stepping W times per update as it does among W ranks."""
        wrapped = super().prepare_scheduler(scheduler)
        if isinstance(wrapped, AcceleratedScheduler) and not wrapped.split_batches and wrapped.step_with_optimizer:
            wrapped = _StepsForRanks(wrapped, self.ranks)
            self._schedulers[-1] = wrapped
        return wrapped


class BatchesTogether:
    """Iterates over `loader`, `ranks` of its batches at a time, laid end to end.

    All else (`dataset`, `set_epoch`, ...) is the loader's own. The last group: see the module's docstring.
    """

    def __init__(self, loader: DataLoader[Any], ranks: int, *, drop_last: bool = False, even: bool = True) -> None:
        self._loader, self._ranks, self._drop_last, self._even = loader, ranks, drop_last, even

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __len__(self) -> int:
        whole, rest = divmod(len(self._loader), self._ranks)
        return whole + bool(rest and not self._drop_last)

    def __iter__(self) -> Iterator[Any]:
        first: Any = None
        group: list[Any] = []
        try:
            last = len(self._loader) - 1
        except TypeError:  # of an iterable dataset
            last = -1
        for index, batch in enumerate(self._loader):
            group.append(batch)
            # The last group goes out while the loader still says that it is at its end: accumulation asks for that.
            if len(group) == self._ranks or (index == last and not self._drop_last):
                together = join(group)
                group = []
                first = together if first is None else first
                yield self._filled(together, first)
        if group and not self._drop_last:
            together = join(group)
            yield self._filled(together, together if first is None else first)

    def _filled(self, together: Any, first: Any) -> Any:
        """`together` with rows of `first` behind it, cycled, up to the W batches of a whole group."""
        batch_size = getattr(self._loader, "total_batch_size", None) or 0
        missing = batch_size * self._ranks - _rows(together)
        if self._drop_last or not self._even or missing <= 0:
            return together
        rows = _rows(first)
        parts = [together, *[first] * (missing // rows)]
        if missing % rows:
            parts.append(_head(first, missing % rows))
        return join(parts)


class _StepsForRanks:
    """An AcceleratedScheduler of one process that steps as often as one of `ranks` would."""

    def __init__(self, scheduler: AcceleratedScheduler, ranks: int) -> None:
        self._scheduler, self._ranks = scheduler, ranks

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._scheduler, name)

    def step(self, *args: Any, **kwargs: Any) -> None:
        for _ in range(self._ranks if self._scheduler.gradient_state.sync_gradients else 1):
            self._scheduler.step(*args, **kwargs)


def join(batches: Sequence[Any]) -> Any:
    """Batches of the same structure laid end to end along dim 0. Raises ConfigError where shapes do not allow it."""
    first = batches[0]
    if isinstance(first, torch.Tensor):
        return _cat(batches, fill=None, name="a tensor")
    if isinstance(first, dict) or hasattr(first, "keys"):
        masked = "attention_mask" in first
        joined = {
            key: _cat([b[key] for b in batches], fill=(IGNORED if key == "labels" else 0) if masked else None, name=key)
            if isinstance(first[key], torch.Tensor)
            else join([b[key] for b in batches])
            for key in first.keys()  # noqa: SIM118  a BatchEncoding iterates over other things
        }
        return joined if type(first) is dict else type(first)(joined)
    if isinstance(first, (list, tuple)):
        if first and not isinstance(first[0], (torch.Tensor, dict, list, tuple)):
            return type(first)(item for batch in batches for item in batch)
        return type(first)(join(parts) for parts in zip(*batches, strict=True))
    return first


def _cat(tensors: Iterable[torch.Tensor], *, fill: int | None, name: str) -> torch.Tensor:
    listed = list(tensors)
    shapes = {tuple(t.shape[1:]) for t in listed}
    if len(shapes) == 1:
        return torch.cat(listed)
    if fill is None or any(t.ndim != 2 or t.is_floating_point() for t in listed):
        raise ConfigError(
            say(
                given=f"batches whose {name} has the shapes {', '.join(str(tuple(t.shape)) for t in listed)}",
                expected="equal shapes, or padded integer rows with an attention_mask: one process takes the batches "
                "of all ranks as one",
                do="Pad to a fixed length, or leave out single.",
            )
        )
    longest = max(t.shape[1] for t in listed)
    return torch.cat([torch.nn.functional.pad(t, (0, longest - t.shape[1]), value=fill) for t in listed])


def _leaves(batch: Any) -> Iterator[torch.Tensor]:
    if isinstance(batch, torch.Tensor):
        yield batch
    elif hasattr(batch, "values"):
        for value in batch.values():
            yield from _leaves(value)
    elif isinstance(batch, (list, tuple)):
        for value in batch:
            yield from _leaves(value)


def _rows(batch: Any) -> int:
    return len(next(_leaves(batch)))


def _head(batch: Any, rows: int) -> Any:
    if isinstance(batch, torch.Tensor):
        return batch[:rows]
    if hasattr(batch, "keys"):
        head = {key: _head(batch[key], rows) for key in batch.keys()}  # noqa: SIM118
        return head if type(batch) is dict else type(batch)(head)
    if isinstance(batch, (list, tuple)):
        # A list of values is cut, a list of tensors is a structure.
        structure = batch and isinstance(batch[0], (torch.Tensor, dict, list, tuple))
        return type(batch)(_head(v, rows) for v in batch) if structure else batch[:rows]
    return batch
