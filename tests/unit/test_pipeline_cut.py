"""Cuts are pure: costs in, contiguous stages out; what a rank keeps is found on meta."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import nn

from hfdist.errors import ConfigError
from hfdist.models.stages import StageParts, find_stage_parts
from hfdist.parallel.pipeline.apply import apply_cut
from hfdist.parallel.pipeline.cut import plan_cut, rank_of_stage, stages_of_rank
from hfdist.parallel.pipeline.stand_ins import BlockForm
from hfdist.parallel.pipeline.view import View
from tests.parity.pipelines import Spec


def parts_of(costs: tuple[int, ...], before: int = 0, after: int = 0) -> StageParts:
    names = tuple(f"layers.{index}" for index in range(len(costs)))
    return StageParts(names, (), (), (), (), costs, before, after, (1, 3, 5), torch.float32, 1, 3)


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4, 5])
def test_the_dearest_stage_is_as_cheap_as_can_be(num_stages: int) -> None:
    costs = (7, 3, 5, 5, 1, 11, 2)
    cut = plan_cut(parts_of(costs, before=6, after=9), num_stages)
    assert sum(cut.sizes) == len(costs)
    assert min(cut.sizes) >= 1
    every = [
        max(plan_cut(parts_of(costs, 6, 9), num_stages, split=split).costs)
        for split in itertools.product(range(1, len(costs) + 1), repeat=num_stages)
        if sum(split) == len(costs)
    ]
    assert max(cut.costs) == min(every)


def test_a_large_head_moves_the_cut() -> None:
    assert plan_cut(parts_of((1,) * 5), 2).sizes in ((2, 3), (3, 2))
    assert plan_cut(parts_of((1,) * 5, after=2), 2).sizes == (4, 1) or plan_cut(
        parts_of((1,) * 5, after=2), 2
    ).costs == (3, 4)
    assert plan_cut(parts_of((1,) * 5, after=3), 2).sizes == (4, 1)


@pytest.mark.parametrize("split", [[3, 3], [5, 0], [5], [2, 2, 1]])
def test_a_split_that_does_not_add_up(split: list[int]) -> None:
    with pytest.raises(ConfigError, match="add up to 5"):
        plan_cut(parts_of((1,) * 5), 2, split=split)


def test_where_stages_lie() -> None:
    assert [rank_of_stage("interleaved", stage, 2) for stage in range(6)] == [0, 1, 0, 1, 0, 1]
    assert [rank_of_stage("zbv", stage, 3) for stage in range(6)] == [0, 1, 2, 2, 1, 0]
    assert stages_of_rank("zbv", 0, 3, 6) == (0, 5)


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3", "gemma"])
def test_parts_are_found_by_structure(family: str) -> None:
    parts = find_stage_parts(Spec(family, tied=True).build())
    prefix = {"gpt2": "transformer"}.get(family, "model")
    before = {"gpt2": ["transformer.wte", "transformer.wpe"]}.get(family, ["model.embed_tokens"])
    after = {"gpt2": ["transformer.ln_f", "lm_head"]}.get(family, ["model.norm", "lm_head"])
    assert [part.name for part in parts.before] == before
    assert [part.name for part in parts.after] == after
    assert parts.blocks_prefix == f"{prefix}.{'h' if family == 'gpt2' else 'layers'}"
    assert parts.everywhere == ()
    assert parts.ties == ((f"{before[0]}.weight", "lm_head.weight"),)


def test_a_model_that_defines_its_head_first() -> None:
    """OPT defines its final norm before its layers: parts are told apart by when they run."""
    from transformers import OPTConfig, OPTForCausalLM

    config = OPTConfig(
        vocab_size=13, hidden_size=6, ffn_dim=7, num_hidden_layers=3, num_attention_heads=2, word_embed_proj_dim=4
    )
    parts = find_stage_parts(OPTForCausalLM(config))
    late = {part.name.rpartition(".")[2] for part in parts.after}
    early = {part.name.rpartition(".")[2] for part in parts.before}
    assert early == {"embed_tokens", "embed_positions", "project_in"}
    assert late == {"final_layer_norm", "project_out", "lm_head"}


class _SharedBias(nn.Module):
    """A bias made once and used by every block."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.bias = nn.Embedding(3, 4)
        self.layers = nn.ModuleList([_Block() for _ in range(3)])

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden, bias = self.embed(input_ids), self.bias(torch.arange(input_ids.shape[1]))
        for layer in self.layers:
            hidden = layer(hidden, bias)
        return hidden


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, hidden: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return self.linear(hidden) + bias


@pytest.mark.parametrize("frozen", [False, True])
def test_what_all_blocks_use_stays_on_every_stage(frozen: bool) -> None:
    model = _SharedBias()
    model.bias.requires_grad_(not frozen)
    parts = find_stage_parts(model)
    assert parts.everywhere == ("bias.weight",)
    assert model.bias.weight.requires_grad is not frozen
    applied = apply_cut(model, plan_cut(parts, 3), 1, num_ranks=3)
    assert applied.names == ("bias.weight", "layers.1.linear.weight", "layers.1.linear.bias")
    assert [(entry.names, entry.ranks) for entry in applied.shared] == [(("bias.weight",), (0, 1, 2))]


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_every_parameter_is_on_one_rank_under_its_name(device: str, num_ranks: int) -> None:
    every = {name for name, _ in Spec(tied=False).build().named_parameters()}
    kept: list[str] = []
    for rank in range(num_ranks):
        model = Spec().build().to(device)
        applied = apply_cut(model, plan_cut(model, num_ranks), rank, num_ranks=num_ranks)
        assert {name for name, _ in model.named_parameters()} == set(applied.names)
        kept += applied.names
    assert sorted(kept) == sorted(every)


def test_encoder_decoders_are_refused_by_name() -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=11, d_model=4, d_kv=2, d_ff=5, num_layers=2, num_heads=2)
    with pytest.raises(ConfigError, match="T5ForConditionalGeneration"):
        find_stage_parts(T5ForConditionalGeneration(config))


class _Recurrent(_SharedBias):
    """Walks its blocks twice."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden, bias = self.embed(input_ids), self.bias(torch.arange(input_ids.shape[1]))
        for layer in [*self.layers, *self.layers]:
            hidden = layer(hidden, bias)
        return hidden


@pytest.mark.parametrize("stage", [0, 1])
def test_blocks_that_run_twice_are_refused_where_it_would_be_wrong(stage: int) -> None:
    """The last stage sees it; the ones before have left by then."""
    model = _Recurrent()
    applied = apply_cut(model, plan_cut(model, 2), stage, num_ranks=2)
    view = View(model, applied, stage, BlockForm())
    ids = torch.zeros(2, 3, dtype=torch.int64)
    if stage == 0:
        assert view(None, {"input_ids": ids}).shape == (2, 3, 4)
    else:
        with pytest.raises(ConfigError, match="more than once"):
            view(torch.zeros(2, 3, 4), {"input_ids": ids})


def test_what_is_done_between_blocks_is_done_once() -> None:
    """Two stages in a row give what the whole model gives, with a bias added by every block and frozen embeddings."""
    torch.manual_seed(0)
    whole = _SharedBias()
    ids = torch.randint(0, 7, (5, 3))
    want = whole(ids)
    hidden = None
    for stage in range(3):
        part = copy.deepcopy(whole)
        applied = apply_cut(part, plan_cut(part, 3), stage, num_ranks=3)
        hidden = View(part, applied, stage, BlockForm())(hidden, {"input_ids": ids})
    assert torch.equal(hidden, want)
