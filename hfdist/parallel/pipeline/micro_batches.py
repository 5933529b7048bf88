"""A batch in equal micro-batches, each with the weight of its label tokens.

5 rows, 2 micro-batches     rows 0 1 2 | 3 4 and a copy of row 0 whose labels are all -100
label tokens n = (10, 6)    weights 10/16, 6/16: the sum of weighted means is the mean over all label tokens
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hfdist.errors import ConfigError, say
from hfdist.models.labels import IGNORED, count_labels

Batch = dict[str, Any]


@dataclass(frozen=True)
class MicroBatches:
    """`batches[i]` are the keyword arguments of micro-batch i, `weights[i]` its share of the loss (0: no label)."""

    batches: list[Batch]
    weights: list[float]
    num_rows: int  # of the whole batch, without padding
    rows_each: int
    length: int | None  # tokens in a row


def split_batch(
    model: nn.Module, batch: Mapping[str, Any], num_micro_batches: int, *, pad: bool = True
) -> MicroBatches:
    """Cut the rows of `batch`. `pad=False` (no labels needed): fewer and unequal micro-batches instead of padding.

    Raises ConfigError when rows would have to be padded and their labels cannot be left out.
    """
    rows = _num_rows(batch)
    length = batch["input_ids"].shape[1] if isinstance(batch.get("input_ids"), Tensor) else None
    each = -(-rows // num_micro_batches)
    missing = each * num_micro_batches - rows
    if missing and pad:
        batch = {name: _padded(name, value, rows, missing) for name, value in batch.items()}
    starts = range(0, each * num_micro_batches if pad else rows, each)
    total = rows + (missing if pad else 0)
    batches = [
        {name: value[start : start + each] if _is_rowwise(value, total) else value for name, value in batch.items()}
        for start in starts
    ]
    return MicroBatches(batches, _weights(model, batches), rows, each, length)


def _num_rows(batch: Mapping[str, Any]) -> int:
    for name in ("input_ids", "inputs_embeds", "labels"):
        if isinstance(batch.get(name), Tensor):
            return batch[name].shape[0]
    tensors = [value for value in batch.values() if isinstance(value, Tensor) and value.ndim]
    if not tensors:
        raise ConfigError(
            say(
                given=f"a batch of {', '.join(batch) or 'nothing'}",
                expected="tensors by keyword, rows first",
                do="Call the model as model(**batch).",
            )
        )
    return tensors[0].shape[0]


def _is_rowwise(value: Any, rows: int) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0 and value.shape[0] == rows


def _padded(name: str, value: Any, rows: int, missing: int) -> Any:
    if not _is_rowwise(value, rows):
        return value
    filler = value[:1].expand(missing, *value.shape[1:])
    if name == "labels":
        if value.is_floating_point():
            raise ConfigError(
                say(
                    given=f"{rows} rows of real-valued labels for {missing + rows} places in the micro-batches",
                    expected="a number of rows that the micro-batches divide",
                    do="Choose a batch size that is a multiple of num_micro_batches, or drop the last batch.",
                )
            )
        filler = torch.full_like(filler, IGNORED)
    return torch.cat([value, filler])


def _weights(model: nn.Module, batches: list[Batch]) -> list[float]:
    if isinstance(batches[0].get("labels"), Tensor):
        counts = [int(count_labels(model, batch["labels"])) for batch in batches]
    else:
        counts = [1] * len(batches)
    total = sum(counts)
    # No label at all: every weight 1/m, so that the loss is what it is in one process (not a number).
    return [count / total for count in counts] if total else [1 / len(counts)] * len(counts)
