"""Tiny models and batches for parity tests: prime vocabularies, widths that no world size divides, tied and untied.

Everything is a function of plain values, so that a rank and the oracle build the same bits from the same arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRMSNorm

Family = Literal["llama", "gpt2"]
Batch = dict[str, Tensor]
# One optimizer step: micro-batches in order, each with one batch per rank.
Window = list[list[Batch]]

VOCAB = {"llama": 61, "gpt2": 67}
IGNORE = -100


def build_lm(family: Family, *, tied: bool, dtype: torch.dtype = torch.float32, seed: int = 7) -> PreTrainedModel:
    """A 2-block causal LM of about 15,000 parameters in train mode, without dropout.

    Under float64 all of it is computed in float64. HF's loss and RMS norms go through float32: there a gradient scaled
    by anything but a power of two (a weight, a mean over 3 ranks) rounds anew, 1e-8 in a comparison that wants 1e-10.
    """
    generator_state = torch.get_rng_state()
    torch.manual_seed(seed)
    if family == "llama":
        config = LlamaConfig(
            vocab_size=VOCAB[family],
            hidden_size=35,
            intermediate_size=53,
            num_hidden_layers=2,
            num_attention_heads=5,
            num_key_value_heads=1,
            head_dim=6,
            max_position_embeddings=19,
            tie_word_embeddings=tied,
            initializer_range=0.1,
            use_cache=False,
            bos_token_id=None,
            eos_token_id=None,
        )
        model: PreTrainedModel = LlamaForCausalLM(config)
    else:
        config = GPT2Config(
            vocab_size=VOCAB[family],
            n_embd=35,
            n_inner=53,
            n_layer=2,
            n_head=5,
            n_positions=19,
            tie_word_embeddings=tied,
            initializer_range=0.1,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            use_cache=False,
            bos_token_id=None,
            eos_token_id=None,
        )
        model = GPT2LMHeadModel(config)
    with torch.no_grad():  # HF starts biases and norms at 0 and 1: symmetric values hide mix-ups
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn(parameter.shape) * 0.05)
    torch.set_rng_state(generator_state)
    model.to(dtype).train()
    if dtype == torch.float64:
        model.loss_function = causal_lm_loss
        _use_exact_norms(model)
    return model


def _use_exact_norms(model: nn.Module) -> None:
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if isinstance(child, LlamaRMSNorm):
                exact = nn.RMSNorm(child.weight.shape[0], eps=child.variance_epsilon)
                exact.weight = child.weight
                setattr(parent, name, exact)


def causal_lm_loss(
    logits: Tensor,  # (batch, seq, vocab)
    labels: Tensor,  # (batch, seq)
    vocab_size: int,
    **_: object,
) -> Tensor:
    """HF's causal-LM loss in the dtype of the logits: mean over label tokens after the shift."""
    shifted = labels[:, 1:].reshape(-1)
    return nn.functional.cross_entropy(logits[:, :-1].reshape(-1, vocab_size), shifted, ignore_index=IGNORE)


def count_label_tokens(batch: Batch) -> int:
    """Tokens that take part in a causal LM's loss: the first label of a row never does."""
    return int((batch["labels"][:, 1:] != IGNORE).sum())


def make_windows(
    *, vocab: int, steps: int, gas: int, world_size: int, ragged: bool = True, seed: int = 3
) -> list[Window]:
    """`steps` windows of `gas` micro-batches of one batch per rank.

    Ragged: rows, lengths and masked labels differ between ranks and micro-batches, so a mean of means is wrong.
    Otherwise 2 rows of 9 tokens, i.e. 16 label tokens everywhere (a power of two: weights are exact in any dtype).
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    def batch() -> Batch:
        rows, length = (draw(1, 3), draw(7, 13)) if ragged else (2, 9)
        ids = torch.randint(0, vocab, (rows, length), generator=generator)
        labels = ids.clone()
        mask = torch.ones_like(ids)
        if ragged:
            for row in range(rows):
                labels[row, : draw(0, length // 2)] = IGNORE  # a prompt
                padding = draw(0, 2)
                if padding:
                    mask[row, -padding:] = 0
                    labels[row, -padding:] = IGNORE
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}

    return [[[batch() for _ in range(world_size)] for _ in range(gas)] for _ in range(steps)]


def concatenate(batches: list[Batch]) -> Batch:
    """One batch of all rows, padded on the right to the longest: what one process would be given."""
    length = max(batch["input_ids"].shape[1] for batch in batches)
    filler = {"input_ids": 0, "attention_mask": 0, "labels": IGNORE}

    def padded(name: str) -> Tensor:
        parts = [b[name] for b in batches]
        return torch.cat([nn.functional.pad(p, (0, length - p.shape[1]), value=filler[name]) for p in parts])

    return {name: padded(name) for name in filler}


@dataclass(frozen=True)
class Recipe:
    """How a model is optimized, by name, so that ranks and oracle build the same optimizers."""

    name: Literal["sgd", "adamw", "adafactor", "muon"]
    lr: float = 1e-2

    def build(self, model: nn.Module) -> list[torch.optim.Optimizer]:
        """One optimizer, or two for Muon (which takes matrices only).

        Epsilons are far above rounding noise: GPT-2's key bias has a gradient of exactly 0 in real arithmetic, and an
        update that divides noise by noise cannot be compared with anything.
        """
        parameters = list(model.parameters())
        matrices = [p for p in parameters if p.ndim == 2]
        vectors = [p for p in parameters if p.ndim != 2]
        if self.name == "sgd":
            return [torch.optim.SGD(parameters, lr=self.lr, momentum=0.9)]
        if self.name == "adamw":
            groups = [
                {"params": matrices, "weight_decay": 0.1},
                {"params": vectors, "weight_decay": 0.0, "lr": self.lr / 3},
            ]
            return [torch.optim.AdamW(groups, lr=self.lr, eps=ADAM_EPS)]
        if self.name == "adafactor":
            return [torch.optim.Adafactor(parameters, lr=self.lr, eps=(ADAM_EPS, 1e-3), weight_decay=0.01)]
        muon = torch.optim.Muon(matrices, lr=self.lr, momentum=0.9, weight_decay=0.05)
        return [muon, torch.optim.AdamW(vectors, lr=self.lr, eps=ADAM_EPS)]


ADAM_EPS = 1e-5


class TiedToy(nn.Module):
    """B01: Embedding(7, 4) tied to Linear(4, 7) without bias; ids (batch,) to logits (batch, vocab)."""

    def __init__(self, vocab: int = 7, width: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embed(ids))


class ScalarToy(nn.Module):
    """B02: one 0-dim parameter, alone or times the output of a layer; x (3,) to (3,). `scale=False`: not used."""

    def __init__(self, beside: bool = False) -> None:
        super().__init__()
        self.s = nn.Parameter(torch.tensor(2.0))
        self.linear = nn.Linear(3, 3) if beside else None

    def forward(self, x: Tensor, scale: bool = True) -> Tensor:
        x = x if self.linear is None else self.linear(x)
        return self.s * x if scale else x


class ChoiceToy(nn.Module):
    """B05: layers of the same shape, of which a call runs those named in `use`; x (batch, width) to the same."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.left = nn.Linear(width, width)
        self.right = nn.Linear(width, width)
        self.never = nn.Linear(width, width)

    def forward(self, x: Tensor, use: Sequence[str]) -> Tensor:
        for name in use:
            x = getattr(self, name)(x)
        return x


class SkippingBlocks(nn.Module):
    """B05's sibling: residual blocks, of which a call leaves out those in `skip`; x (batch, width) to the same."""

    def __init__(self, width: int = 6, depth: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(depth)])

    def forward(self, x: Tensor, skip: Sequence[int] = ()) -> Tensor:
        for index, block in enumerate(self.blocks):
            if index not in skip:
                x = x + block(x)
        return x


class FrozenToy(nn.Module):
    """B07: a frozen Linear(8, 8) filled with .123 under a trained Linear(8, 2); x (batch, 8) to (batch, 2)."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(8, 8)
        self.head = nn.Linear(8, 2)
        for parameter in self.frozen.parameters():
            nn.init.constant_(parameter, 0.123)
            parameter.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.frozen(x))


class WeightedLoss(nn.Module):
    """B16: each token's loss is w times a given value, so the gradient of w is the mean loss at w = 1.

    values, labels (tokens,) to {"loss": mean over labels that are not -100}.
    """

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(1))

    def forward(self, values: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.w * values)[labels != IGNORE].mean()}


class SharedMlp(nn.Module):
    """B14: 16 -> 16 -> 8 x 6 -> 16, the first layer's weight shared with the last."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.down = nn.Linear(16, 8)
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(6)])
        self.up = nn.Linear(8, 16)
        self.last = nn.Linear(16, 16)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.down(torch.tanh(self.first(x))))
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.last(torch.tanh(self.up(x)))


def seeded(build: type[nn.Module], *args: object, seed: int = 7, dtype: torch.dtype = torch.float32) -> nn.Module:
    """`build(*args)` from a fixed seed, the global generator untouched."""
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    model = build(*args).to(dtype)
    torch.set_rng_state(state)
    return model
