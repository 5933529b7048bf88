"""One process that hands out the batches of W ranks: the same samples in the same step as accelerate deals them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerate.data_loader import prepare_data_loader
from torch.utils.data import DataLoader

from hfdist.compare.one_process import BatchesTogether, join
from hfdist.errors import ConfigError


def loader(length: int, *, batch_size: int = 3, drop_last: bool = False) -> DataLoader[Any]:
    return DataLoader(torch.arange(length), batch_size=batch_size, drop_last=drop_last)  # type: ignore[arg-type]


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("length", [12, 18, 19, 20, 23, 4])
@pytest.mark.parametrize("drop_last", [False, True])
def test_a_step_has_the_samples_of_all_ranks(ranks: int, length: int, drop_last: bool) -> None:
    """Whole and short epochs, filled up or dropped: as accelerate's own sharding has it."""
    sharded = [
        list(prepare_data_loader(loader(length, drop_last=drop_last), num_processes=ranks, process_index=rank))
        for rank in range(ranks)
    ]
    together = [batch.tolist() for batch in BatchesTogether(_one(length, drop_last), ranks, drop_last=drop_last)]
    assert together == [torch.cat(step).tolist() for step in zip(*sharded, strict=True)]
    assert len(BatchesTogether(_one(length, drop_last), ranks, drop_last=drop_last)) == len(together)


def _one(length: int, drop_last: bool) -> Any:
    return prepare_data_loader(loader(length, drop_last=drop_last), num_processes=1, process_index=0)


def test_the_last_batch_goes_out_while_the_loader_says_so() -> None:
    """Accumulation synchronises at the end of the data, also when the last group is short."""
    from accelerate.state import GradientState

    ends = [GradientState().end_of_dataloader for _ in BatchesTogether(_one(9, False), 2)]
    assert ends == [False, True]


def test_batches_of_dicts_lists_and_tuples() -> None:
    batch = {"x": torch.ones(2, 3), "names": ["a", "b"], "pair": (torch.zeros(2), torch.ones(2))}
    joined = join([batch, batch])
    assert joined["x"].shape == (4, 3)
    assert joined["names"] == ["a", "b", "a", "b"]
    assert [part.tolist() for part in joined["pair"]] == [[0, 0, 0, 0], [1, 1, 1, 1]]


def test_padded_rows_of_different_lengths() -> None:
    def rows(length: int) -> dict[str, torch.Tensor]:
        ids = torch.ones(1, length, dtype=torch.long)
        return {"input_ids": ids, "attention_mask": ids, "labels": ids}

    joined = join([rows(2), rows(3)])
    assert joined["attention_mask"].tolist() == [[1, 1, 0], [1, 1, 1]]
    assert joined["labels"].tolist() == [[1, 1, -100], [1, 1, 1]]
    without_mask = [{"input_ids": rows(n)["input_ids"]} for n in (2, 3)]
    with pytest.raises(ConfigError, match="leave out single"):
        join(without_mask)
