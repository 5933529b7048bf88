"""`generate` and evaluation of a pipeline: the tokens and logits of one process, on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.parity.pipelines import Spec, make_batch, pipeline_of
from tests.pool import Pools


def _prompt() -> dict[str, Tensor]:
    batch = make_batch(3, 6, "left", seed=1)
    return {name: batch[name] for name in ("input_ids", "attention_mask")}


def _generate(spec: Spec, options: dict[str, Any] | None, **settings: Any) -> Tensor:
    model = spec.build().eval()
    if options is not None:
        pipeline_of(model, **options)
    return model.generate(**_prompt(), max_new_tokens=7, do_sample=False, pad_token_id=0, **settings)


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3", "gemma"])
@pytest.mark.parametrize(("schedule", "use_cache"), [("1f1b", True), ("1f1b", False), ("zbv", True)])
def test_generate(pool: Pools, family: str, schedule: str, use_cache: bool) -> None:
    spec = Spec(family, layers=5)
    want = _generate(spec, None, use_cache=use_cache)
    assert len(set(want[:, 6:].flatten().tolist())) > 2
    options = {"schedule": schedule, "num_micro_batches": 2}
    for tokens in pool(2).run(_generate, spec, options, use_cache=use_cache):
        assert torch.equal(tokens, want)


def _evaluate(spec: Spec, rows: int, with_labels: bool) -> tuple[Any, Tensor, bool]:
    model = spec.build()
    pipeline = pipeline_of(model, schedule="interleaved", num_micro_batches=4)
    batch = make_batch(rows, 7, "right")
    if not with_labels:
        del batch["labels"]
    model.eval()
    output = model(**batch)  # no no_grad: evaluation needs none
    pipeline.undo()
    return (output.loss.item() if with_labels else output.loss), output.logits, "forward" in model.__dict__


@pytest.mark.parametrize("rows", [1, 5, 8])
@pytest.mark.parametrize("with_labels", [True, False])
def test_evaluation(pool: Pools, rows: int, with_labels: bool) -> None:
    """Any number of rows; unequal micro-batches."""
    spec = Spec("qwen3", layers=5, tied=True)
    with torch.no_grad():
        want = spec.build().eval()(**make_batch(rows, 7, "right"))
    for loss, logits, patched in pool(2).run(_evaluate, spec, rows, with_labels):
        assert float((logits - want.logits).abs().max()) <= 1e-10
        assert loss == (pytest.approx(want.loss.item(), rel=1e-12) if with_labels else None)
        assert not patched
