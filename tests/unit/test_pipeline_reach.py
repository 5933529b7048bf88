"""A stage that uses more of earlier stages than the hidden state is refused, without processes: views run in turn."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hfdist.errors import ConfigError
from hfdist.parallel.pipeline.apply import apply_cut
from hfdist.parallel.pipeline.cut import plan_cut
from hfdist.parallel.pipeline.stand_ins import BlockForm
from hfdist.parallel.pipeline.view import View

WIDTH, VOCAB, LAYERS = 5, 7, 4


class Block(nn.Module):
    """`takes_more`: returns a tuple, and has a second width that its arguments must fit."""

    def __init__(self, *, width: int | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.width = width

    def forward(self, hidden: Tensor, angles: Tensor | None = None) -> Tensor | tuple[Tensor]:
        if self.width is None:
            return hidden + self.linear(hidden)
        assert angles is not None
        return (hidden + self.linear(hidden) + (torch.ones(self.width) * angles).sum(),)


class Stack(nn.Module):
    """Blocks in a loop; `uses`: what the model does beside handing the hidden state on."""

    def __init__(self, uses: str) -> None:
        super().__init__()
        self.uses = uses
        self.embed = nn.Embedding(VOCAB, WIDTH)
        two_kinds = uses == "two kinds"
        self.blocks = nn.ModuleList(Block(width=2 + index % 2 if two_kinds else None) for index in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, input_ids: Tensor) -> Any:
        hidden = embedded = self.embed(input_ids)
        history: list[Tensor] = []
        for index, block in enumerate(self.blocks):
            history.append(hidden)
            if self.uses == "two kinds":
                hidden = block(hidden, torch.ones(2 + index % 2))[0]
                continue
            hidden = block(hidden)
            if self.uses == "scale":
                hidden = hidden * 0.5
        if self.uses == "embedding":
            hidden = hidden + embedded
        if self.uses == "history":
            hidden = hidden + torch.stack(history).sum(0)
        if self.uses == "input before":
            hidden = hidden + history[-2]
        return {"logits": self.head(hidden)}


def _run(model: Stack, num_stages: int, split: list[int]) -> Tensor:
    """Logits of the stages' views, one after the other."""
    ids = torch.tensor([[1, 2, 3], [4, 5, 6]])
    cut = plan_cut(model, num_stages, split=split)
    received: Any = None
    for rank in range(num_stages):
        part = copy.deepcopy(model)
        applied = apply_cut(part, cut, rank, num_ranks=num_stages)
        received = View(part, applied, rank, BlockForm(cut.parts.block_form))(received, {"input_ids": ids})
    return received["logits"]


def _model(uses: str) -> Stack:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return Stack(uses).double()


@pytest.mark.parametrize("uses", ["nothing", "scale", "input before", "two kinds"])
@pytest.mark.parametrize("split", [[2, 2], [1, 3], [1, 1, 2]])
def test_runs_when_nothing_else_crosses_the_cut(uses: str, split: list[int]) -> None:
    model = _model(uses)
    expected = model(torch.tensor([[1, 2, 3], [4, 5, 6]]))["logits"]
    torch.testing.assert_close(_run(model, len(split), split), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("uses", ["embedding", "history"])
@pytest.mark.parametrize("split", [[2, 2], [3, 1], [1, 1, 2]])
def test_refused_when_something_else_crosses_the_cut(uses: str, split: list[int]) -> None:
    with pytest.raises(ConfigError, match="Use ZeRO or tensor parallelism"):
        _run(_model(uses), len(split), split)


def test_refused_where_an_input_is_of_another_stage() -> None:
    """`input before` is right for two blocks on the last stage, and crosses the cut for one."""
    with pytest.raises(ConfigError, match="Use ZeRO or tensor parallelism"):
        _run(_model("input before"), 2, [3, 1])


def test_the_models_own_error_says_where_it_came_from() -> None:
    model = _model("nothing")
    model.blocks[3].register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(KeyError("mine")))
    with pytest.raises(KeyError, match="mine") as caught:
        _run(model, 2, [2, 2])
    assert "pipeline stage 1 of 2 (blocks.2 to blocks.3)" in caught.value.__notes__[0]
