"""B27: vocabulary 11, hidden 8, tied, 5 Adam steps: the copies on first and last rank stay bitwise equal, and right."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from tests.models import causal_lm_loss
from tests.parity.pipelines import _use_exact_norms, pipeline_of
from tests.pool import Pools


def _build(family: str) -> nn.Module:
    state = torch.get_rng_state()
    torch.manual_seed(3)
    if family == "llama":
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=11, hidden_size=8, intermediate_size=9, num_hidden_layers=4, num_attention_heads=2,
                tie_word_embeddings=True, bos_token_id=None, eos_token_id=None, initializer_range=0.2,
            )
        )  # fmt: skip
    else:
        model = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=11, n_embd=8, n_layer=4, n_head=2, n_positions=9, initializer_range=0.2, embd_pdrop=0.0,
                resid_pdrop=0.0, attn_pdrop=0.0, bos_token_id=None, eos_token_id=None,
            )
        )  # fmt: skip
    torch.set_rng_state(state)
    model = model.to(torch.float64)
    model.loss_function = causal_lm_loss
    _use_exact_norms(model)
    return model


def _train(family: str, schedule: str | None) -> dict[str, Tensor]:
    model = _build(family)
    if schedule is not None:
        pipeline_of(model, schedule=schedule, num_micro_batches=2)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-5)
    for step in range(5):
        ids = torch.randint(0, 11, (4, 7), generator=torch.Generator().manual_seed(step))
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach().clone() for name, p in model.named_parameters(remove_duplicate=False)}


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize(("pp", "schedule"), [(2, "1f1b"), (4, "gpipe"), (2, "zbv")])
def test_tied_copies(pool: Pools, family: str, pp: int, schedule: str) -> None:
    want = _train(family, None)
    ranks = pool(pp).run(_train, family, schedule)
    embedding = "transformer.wte.weight" if family == "gpt2" else "model.embed_tokens.weight"
    copies = [rank[name] for rank in ranks for name in (embedding, "lm_head.weight") if name in rank]
    assert len(copies) == 2
    assert torch.equal(*copies)
    for rank in ranks:
        for name, tensor in rank.items():
            assert float((tensor - want[name]).abs().max()) <= 1e-10, name
