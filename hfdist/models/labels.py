"""How many targets of a batch count in a model's own loss."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

IGNORED = -100  # transformers' and torch's index for "no target here"


def count_labels(model: nn.Module, labels: torch.Tensor) -> torch.Tensor:
    """Number of targets that count in the loss, a 0-dim int64 tensor: all but -100; shifted by one in causal models."""
    if labels.is_floating_point():  # regression: every value counts
        return torch.tensor(labels.numel(), device=labels.device)
    shifted = labels.ndim >= 2 and shifts_labels(model)
    return ((labels[..., 1:] if shifted else labels) != IGNORED).sum()


def is_mean_over_labels(model: nn.Module) -> bool:
    """Whether the model's own loss is a mean over its labels; a CTC loss (`config.ctc_loss_reduction`) is not."""
    base: Callable[[], nn.Module] | None = getattr(model, "get_base_model", None)
    inner = model if base is None else base()
    return not any("ForCTC" in cls.__name__ for cls in type(inner).__mro__)


def is_transformers_model(model: nn.Module) -> bool:
    """Whether the model (or what an adapter wraps) is one of transformers', whose losses are known."""
    return any(cls.__module__.startswith(("transformers.", "peft.")) for cls in type(model).__mro__)


def shifts_labels(model: nn.Module) -> bool:
    """Whether the model's loss compares position t with label t + 1 (causal language models of transformers do)."""
    base: Callable[[], nn.Module] | None = getattr(model, "get_base_model", None)
    inner = model if base is None else base()
    config = getattr(inner, "config", None)
    if config is None or getattr(config, "is_encoder_decoder", False):
        return False
    # FSDP2 puts "FSDP" before the class name; the model's own class is somewhere behind it.
    names = {cls.__name__ for cls in type(inner).__mro__}
    return bool(names & _causal_class_names()) or any(
        name.endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")) for name in names
    )


def _causal_class_names() -> set[str]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
