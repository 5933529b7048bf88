"""What a rank of a pipeline allocates for weights: those of its stages and nothing else, from meta on."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.parity.pipelines import make_batch, pipeline_of
from tests.pool import Pools

CONSTANT = 4 * 2**20  # bytes besides the stage's weights: buffers, tiny activations, the allocator


def _allocate() -> tuple[int, int, int, float]:
    """Build on meta, cut, allocate what is kept, run: (stage's bytes, whole model's bytes, grown by, loss)."""
    from hfdist.measure.resident import anonymous_bytes

    config = LlamaConfig(
        vocab_size=61, hidden_size=512, intermediate_size=1031, num_hidden_layers=7, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=31, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    whole = sum(p.nbytes for p in model.parameters())
    pipeline = pipeline_of(model, schedule="1f1b", num_micro_batches=2)
    before = anonymous_bytes()
    model.to_empty(device="cpu")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0 if "norm" in name else 1e-3)
    model.model.rotary_emb.__init__(config)
    grown = anonymous_bytes() - before
    model.eval()
    loss = model(**make_batch(2, 7)).loss.item()
    assert {name for name, _ in model.named_parameters()} == set(pipeline.applied.names)
    return sum(p.nbytes for p in model.parameters()), whole, grown, loss


def test_a_rank_allocates_its_stage(pool: Pools) -> None:
    ranks = pool(2).run(_allocate)
    for stage, whole, grown, loss in ranks:
        assert stage <= 0.62 * whole
        assert grown <= stage + CONSTANT
        assert loss == pytest.approx(ranks[0][3])
