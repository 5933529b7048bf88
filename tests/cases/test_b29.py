"""B29: left-padded 2 x 6 (2 pads), tiny Llama and GPT-2, pp 2: logits at real tokens and loss equal one process's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.parity.pipelines import Spec, pipeline_of
from tests.pool import Pools


def _batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 61, (2, 6), generator=generator)
    mask, labels = torch.ones_like(ids), ids.clone()
    mask[0, :2], labels[0, :2] = 0, -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def _evaluate(family: str, schedule: str, num_micro_batches: int) -> tuple[float, Tensor, float]:
    model = Spec(family).build()
    pipeline_of(model, schedule=schedule, num_micro_batches=num_micro_batches)
    trained = model(**_batch()).loss.item()
    model.eval()
    with torch.no_grad():
        output = model(**_batch())
    return output.loss.item(), output.logits, trained


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize(("schedule", "number"), [("1f1b", 2), ("gpipe", 3), ("zbv", 1)])
def test_left_padding(pool: Pools, family: str, schedule: str, number: int) -> None:
    with torch.no_grad():
        want = Spec(family).build()(**_batch())
    real = _batch()["attention_mask"].bool()
    for loss, logits, trained in pool(2).run(_evaluate, family, schedule, number):
        assert loss == pytest.approx(want.loss.item(), rel=1e-12)
        assert trained == pytest.approx(want.loss.item(), rel=1e-12)
        assert float((logits - want.logits)[real].abs().max()) <= 1e-10
