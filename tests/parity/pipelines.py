"""Models, batches and loops for pipeline tests: several families, odd depths, prime sizes, in exact float64."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    GemmaConfig,
    GPT2Config,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3Config,
)

from tests.models import IGNORE, Batch, causal_lm_loss

VOCAB = 61
Padding = Literal["none", "left", "right"]


@dataclass(frozen=True)
class Spec:
    """A model: family, depth, ties, dropout."""

    family: str = "llama"
    layers: int = 5
    tied: bool = False
    dropout: float = 0.0

    def build(self, dtype: torch.dtype = torch.float64, seed: int = 7) -> PreTrainedModel:
        """In train mode; under float64 everything is computed in float64."""
        state = torch.get_rng_state()
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(self.config())
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter.add_(torch.randn(parameter.shape) * 0.05)
        torch.set_rng_state(state)
        model.to(dtype).train()
        if dtype == torch.float64:
            model.loss_function = causal_lm_loss
            _use_exact_norms(model)
        return model

    def config(self) -> PretrainedConfig:
        """Odd widths; no family's default is left where it would make the model large."""
        common: dict[str, Any] = {
            "vocab_size": VOCAB,
            "tie_word_embeddings": self.tied,
            "initializer_range": 0.1,
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": None,
        }
        if self.family == "gpt2":
            drop = self.dropout
            return GPT2Config(
                **common, n_embd=15, n_inner=23, n_layer=self.layers, n_head=3, n_positions=31,
                resid_pdrop=drop, embd_pdrop=drop, attn_pdrop=drop,
            )  # fmt: skip
        kind = {"llama": LlamaConfig, "qwen3": Qwen3Config, "gemma": GemmaConfig}[self.family]
        return kind(
            **common, hidden_size=15, intermediate_size=23, num_hidden_layers=self.layers, num_attention_heads=3,
            num_key_value_heads=1, head_dim=6, max_position_embeddings=31, attention_dropout=self.dropout,
        )  # fmt: skip


class _ExactNorm(nn.Module):
    """RMS norm in the dtype of its input; transformers' own goes through float32."""

    def __init__(self, weight: nn.Parameter, eps: float, offset: float) -> None:
        super().__init__()
        self.weight, self.eps, self.offset = weight, eps, offset

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * (self.weight + self.offset)


def _use_exact_norms(model: nn.Module) -> None:
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            kind = type(child).__name__
            if kind.endswith("RMSNorm"):
                eps = getattr(child, "variance_epsilon", None) or child.eps
                setattr(parent, name, _ExactNorm(child.weight, eps, float(kind.startswith("Gemma"))))


def make_batch(rows: int, length: int, padding: Padding = "none", seed: int = 0) -> Batch:
    """Rows with different numbers of label tokens, so that a mean of means is wrong."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCAB, (rows, length), generator=generator)
    mask, labels = torch.ones_like(ids), ids.clone()
    for row in range(rows):
        labels[row, : (row + seed) % 4] = IGNORE
        pads = (row + seed) % 3
        if pads and padding != "none":
            where = slice(0, pads) if padding == "left" else slice(length - pads, length)
            mask[row, where], labels[row, where] = 0, IGNORE
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def build_optimizer(parameters: Any) -> torch.optim.Optimizer:
    """AdamW with an epsilon far above rounding noise: GPT-2's key bias has a gradient of exactly 0."""
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-5, weight_decay=0.1)


@dataclass(frozen=True)
class Trained:
    """What a loop leaves: losses by micro-step, gradients and norm of the first step, parameters after the last."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, Tensor]
    parameters: dict[str, Tensor]


def train_one_process(spec: Spec, windows: list[list[Batch]]) -> Trained:
    """The truth: each window's losses divided by its length, one update a window."""
    model = spec.build()
    optimizer = build_optimizer(model.parameters())
    losses, norms, gradients = [], [], {}
    for window in windows:
        for batch in window:
            loss = model(**batch).loss
            (loss / len(window)).backward()
            losses.append(loss.item())
        norms.append(float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])))
        gradients = gradients or _copies(model, lambda p: p.grad)
        optimizer.step()
        optimizer.zero_grad()
    return Trained(losses, norms, gradients, _copies(model, lambda p: p))


def _copies(model: nn.Module, of: Any) -> dict[str, Tensor]:
    named = model.named_parameters(remove_duplicate=False)
    return {name: of(p).detach().clone() for name, p in named if of(p) is not None}


def pipeline_of(model: nn.Module, **options: Any) -> Any:
    """`apply_pipeline` over all ranks of the pool, in a group whose waits end after 60 s."""
    from hfdist.parallel.pipeline import apply_pipeline

    group = dist.new_group(timeout=datetime.timedelta(seconds=60))
    return apply_pipeline(model, group, **options)


def train_pipeline(spec: Spec, windows: list[list[Batch]], options: dict[str, Any]) -> Trained:
    """The same loop in a rank of a pipeline: not one line differs but the norm over ranks."""
    model = spec.build()
    pipeline = pipeline_of(model, **options)
    optimizer = build_optimizer(model.parameters())
    losses, norms, gradients = [], [], {}
    for window in windows:
        for batch in window:
            loss = model(**batch).loss
            (loss / len(window)).backward()
            losses.append(loss.item())
        squares = sum(float(p.grad.pow(2).sum()) for p in pipeline.owned_once() if p.grad is not None)
        total = torch.tensor(squares, dtype=torch.float64)
        dist.all_reduce(total)
        norms.append(float(total.sqrt()))
        gradients = gradients or _copies(model, lambda p: p.grad)
        optimizer.step()
        optimizer.zero_grad()
    return Trained(losses, norms, gradients, _copies(model, lambda p: p))
