"""B16: the loss counts label tokens, not ranks or micro-batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForSequenceClassification, LlamaForTokenClassification, PreTrainedModel

from tests.models import IGNORE, WeightedLoss
from tests.oracle import assert_same, gradients_of
from tests.parity.grids import GridCell, check_grid
from tests.parity.loops import whole_gradients
from tests.pool import Pools
from tests.worker import make_accelerator

# By micro-batch, then by rank: (label tokens, their mean loss).
Case = list[list[tuple[int, float]]]
THE_CASE: Case = [[(10, 1.0), (1, 2.0)], [(2, 3.0), (7, 4.0)]]


def right(case: Case) -> float:
    """The mean over all tokens."""
    parts = [part for micro in case for part in micro]
    return sum(n * loss for n, loss in parts) / sum(n for n, _ in parts)


def mean_of_means(case: Case) -> float:
    """What no weighting gives."""
    parts = [part for micro in case for part in micro]
    return sum(loss for _, loss in parts) / len(parts)


def _batch(tokens: int, loss: float) -> dict[str, torch.Tensor]:
    """`tokens` labels that count among twelve; the values of the others must not matter."""
    values = torch.full((12,), 1000.0)
    values[:tokens] = loss + torch.linspace(-0.5, 0.5, tokens) if tokens > 1 else loss
    labels = torch.full((12,), IGNORE)
    labels[:tokens] = 1
    return {"values": values, "labels": labels}


def _gradient(stage: int, case: Case, weighting: str | None, window: bool) -> tuple[list[float], list[float]]:
    """(gradients of w at each update, losses seen)."""
    from hfdist.plugins import ZeroPlugin

    env = {"HFDIST_LOSS_WEIGHTING": weighting} if weighting else {}
    steps = len(case) if window else 1
    accelerator = make_accelerator(plugins=[ZeroPlugin(stage=stage)], gradient_accumulation_steps=steps, env=env)
    model = WeightedLoss()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
    gradients, losses = [], []
    for micro in case:
        with accelerator.accumulate(model):
            loss = model(**_batch(*micro[accelerator.process_index]))["loss"]
            losses.append(loss.item())
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                gradients.append(whole_gradients(model)["w"].item())
            optimizer.step()
            optimizer.zero_grad()
    return gradients, losses


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_case(pool: Pools, stage: int) -> None:
    """(10 tokens, loss 1), (2, 3) on rank 0; (1, 2), (7, 4) on rank 1: 2.30. Each rank sees its own losses."""
    for rank, (gradients, losses) in enumerate(pool(2).run(_gradient, stage, THE_CASE, None, True)):
        assert gradients == pytest.approx([2.30], abs=1e-6)
        assert losses == pytest.approx([micro[rank][1] for micro in THE_CASE], abs=1e-6)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize(
    "case",
    [
        [[(10, 1.0), (2, 3.0)]],
        [[(5, 1.0), (0, 0.0)], [(1, 2.0), (3, 4.0)]],
        [[(0, 0.0), (3, 2.0)], [(0, 0.0), (1, 5.0)]],
        [[(0, 0.0), (0, 0.0)], [(4, 2.0), (1, 5.0)]],
        [[(12, 0.5), (1, 9.0)], [(1, 7.0), (12, 0.1)], [(3, 2.0), (4, 2.5)]],
    ],
    ids=str,
)
def test_siblings(pool: Pools, stage: int, case: Case) -> None:
    """Ranks and whole micro-batches without any label, windows of one to three."""
    for gradients, _ in pool(2).run(_gradient, stage, case, None, True):
        assert gradients == pytest.approx([right(case)], abs=1e-6)


def test_three_ranks(pool: Pools) -> None:
    """Three ranks, two micro-batches."""
    case: Case = [[(10, 1.0), (1, 2.0), (4, 0.5)], [(2, 3.0), (7, 4.0), (11, 1.5)]]
    for gradients, _ in pool(3).run(_gradient, 2, case, None, True):
        assert gradients == pytest.approx([right(case)], abs=1e-6)


def test_without_a_window(pool: Pools) -> None:
    """Two updates of one micro-batch each: each one over its own tokens."""
    for gradients, _ in pool(2).run(_gradient, 3, THE_CASE, None, False):
        assert gradients == pytest.approx([right([micro]) for micro in THE_CASE], abs=1e-6)


def test_plain_means_on_request(pool: Pools) -> None:
    """HFDIST_LOSS_WEIGHTING=mean: 2.50, as other engines do it."""
    for gradients, _ in pool(2).run(_gradient, 2, THE_CASE, "mean", True):
        assert gradients == pytest.approx([mean_of_means(THE_CASE)], abs=1e-6)


def _classifier(kind: str) -> PreTrainedModel:
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=61,
        hidden_size=20,
        intermediate_size=28,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_labels=3,
        classifier_dropout=0.0,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
    return (LlamaForSequenceClassification if kind == "sequence" else LlamaForTokenClassification)(config)


def _rows(kind: str, rank: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    ids = torch.randint(1, 61, (1 + 2 * rank, 6), generator=generator)
    labels = torch.randint(0, 3, (len(ids),) if kind == "sequence" else ids.shape, generator=generator)
    if kind == "token":
        labels[:, :2] = IGNORE
        labels[0, 4] = IGNORE
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def _classify(kind: str, stage: int) -> Any:
    from hfdist.plugins import ZeroPlugin

    accelerator = make_accelerator(plugins=[ZeroPlugin(stage=stage)])
    model = accelerator.prepare(_classifier(kind))
    accelerator.backward(model(**_rows(kind, accelerator.process_index)).loss)
    return whole_gradients(model)


@pytest.mark.parametrize("kind", ["sequence", "token"])
@pytest.mark.parametrize("stage", [0, 3])
def test_labels_that_are_not_shifted(pool: Pools, kind: str, stage: int) -> None:
    """HF classifiers with 1, 3 and 5 rows: counted by row or by token, the first label too."""
    model = _classifier(kind)
    parts = [_rows(kind, rank) for rank in range(3)]
    model(**{name: torch.cat([part[name] for part in parts]) for name in parts[0]}).loss.backward()
    for rank, gradients in enumerate(pool(3).run(_classify, kind, stage)):
        assert_same(f"rank {rank}", gradients, gradients_of(model), 1e-6)


@pytest.mark.parametrize("axes", [{"tp": 2}, {"pp": 2}], ids=str)
def test_ranks_of_one_model_count_their_tokens_once(pool: Pools, axes: dict[str, int]) -> None:
    """The same over two data ranks of two ranks each; their batches differ in label tokens."""
    check_grid(pool(4), GridCell(dp=2, stage=1, gas=2, optimizer="sgd", **axes))
