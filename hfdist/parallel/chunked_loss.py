"""A causal language model's own loss without the logits of the whole batch.

transformers' loss wants fp32 logits of every token: batch x sequence x vocabulary x 4 bytes, and as much again for
their gradient. Here the head gives back its input instead (`UnbuiltLogits`), and the loss applies it to `chunk_size`
tokens at a time; a chunk's logits are freed after its forward and computed again in its backward
(`torch.utils.checkpoint`).

    4 x 512 tokens, 32,000 words     logits 262 MB fp32     chunk_size=256: 33 MB, and the head computed twice

The value is that of transformers' `ForCausalLMLoss` (mean over labels that are not -100, or their sum over
`num_items_in_batch`). What a model does to its logits on the way to the loss (Gemma's soft cap, Cohere's and Granite's
scale) is noted and done to every chunk. Only while training with labels: in eval mode, without gradients and without
labels logits are built as ever. An output whose logits were not built says so when they are used.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hfdist.errors import ConfigError, say
from hfdist.models.labels import IGNORED


class UnbuiltLogitsError(ConfigError, AttributeError):
    """Logits were used that the chunked loss did not build. An AttributeError too, so that `hasattr` says no."""


def _refuse(what: str) -> NoReturn:
    raise UnbuiltLogitsError(
        say(
            given=f"{what} of logits that were not built: the loss was computed over chunks of them",
            expected="only the loss of an output of training with LossPlugin(chunk_size=...)",
            do="Call model.eval() or torch.no_grad() for a forward whose logits you need, leave out labels, or turn "
            "the chunked loss off.",
        )
    )


class UnbuiltLogits:
    """Stands for the logits (batch, seq, vocab) of a head: its input, and what is to be done to its output.

    Scaling, tanh and changes of dtype are noted; anything else raises UnbuiltLogitsError.
    """

    __slots__ = ("_head", "_hidden", "_then")

    def __init__(self, head: Callable[[torch.Tensor], torch.Tensor], hidden: torch.Tensor) -> None:
        self._head, self._hidden = head, hidden
        self._then: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = ()

    def _noting(self, operation: Callable[[torch.Tensor], torch.Tensor]) -> UnbuiltLogits:
        noted = UnbuiltLogits(self._head, self._hidden)
        noted._then = (*self._then, operation)
        return noted

    def build(self, hidden: torch.Tensor) -> torch.Tensor:
        """The logits of `hidden` (tokens, width): (tokens, vocab)."""
        logits = self._head(hidden)
        for operation in self._then:
            logits = operation(logits)
        return logits

    @property
    def hidden(self) -> torch.Tensor:
        """What the head was given: (batch, seq, width)."""
        return self._hidden

    def __mul__(self, factor: float) -> UnbuiltLogits:
        return self._noting(lambda logits: logits * factor)

    __rmul__ = __mul__

    def __truediv__(self, divisor: float) -> UnbuiltLogits:
        return self._noting(lambda logits: logits / divisor)

    def tanh(self) -> UnbuiltLogits:
        return self._noting(torch.tanh)

    def float(self) -> UnbuiltLogits:
        return self._noting(lambda logits: logits.float())

    def to(self, target: Any) -> UnbuiltLogits:
        return self._noting(lambda logits: logits.to(target))

    def contiguous(self) -> UnbuiltLogits:
        return self

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.tanh and len(args) == 1 and not kwargs:
            return args[0].tanh()
        _refuse(f"torch.{getattr(func, '__name__', func)}")

    def __getattr__(self, name: str) -> NoReturn:
        _refuse(f".{name}")

    def __getitem__(self, index: object) -> NoReturn:
        _refuse("a part")

    def __iter__(self) -> NoReturn:
        _refuse("parts")

    def __len__(self) -> NoReturn:
        _refuse("the length")

    def __repr__(self) -> str:
        return "<logits that were not built: the loss was computed over chunks of them>"


def apply_chunked_loss(model: nn.Module, chunk_size: int) -> Callable[[], None]:
    """Let `model` (or the model inside its adapters) compute its loss over chunks of tokens; returns the undo.

    Raises ConfigError for a model without a language-model head or whose loss is not transformers' ForCausalLMLoss.
    """
    inner = verify_chunked_loss(model)
    before = {name: inner.__dict__[name] for name in ("forward", "_loss_function") if name in inner.__dict__}
    forward = inner.forward

    @functools.wraps(forward)
    def forward_over_chunks(*args: Any, **kwargs: Any) -> Any:
        if not inner.training or not torch.is_grad_enabled() or kwargs.get("labels") is None:
            return forward(*args, **kwargs)
        head = inner.get_output_embeddings()  # now: the vocabulary may have been resized
        build, patched = head.forward, head.__dict__.get("forward")
        head.forward = lambda hidden: UnbuiltLogits(build, hidden)
        try:
            return forward(*args, **kwargs)
        finally:
            del head.forward
            if patched is not None:
                head.forward = patched

    @functools.wraps(inner.loss_function)
    def loss_over_chunks(logits: Any, labels: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if isinstance(logits, UnbuiltLogits):
            return chunked_loss(logits, labels, *args, chunk_size=chunk_size, **kwargs)
        from transformers.loss.loss_utils import ForCausalLMLoss

        return ForCausalLMLoss(logits, labels, *args, **kwargs)

    inner.forward, inner._loss_function = forward_over_chunks, loss_over_chunks

    def undo() -> None:
        for name, ours in (("forward", forward_over_chunks), ("_loss_function", loss_over_chunks)):
            if inner.__dict__.get(name) is ours:
                del inner.__dict__[name]
                if name in before:
                    inner.__dict__[name] = before[name]

    return undo


def verify_chunked_loss(model: nn.Module) -> Any:
    """The module whose loss it is. Raises ConfigError as `apply_chunked_loss` does, and changes nothing."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    base: Callable[[], nn.Module] | None = getattr(model, "get_base_model", None)
    inner: Any = model if base is None else base()
    name = type(inner).__name__.removeprefix("FSDP")
    embeddings = getattr(inner, "get_output_embeddings", None)
    if embeddings is None or not isinstance(embeddings(), nn.Module):
        found = f"{name}, which has no language-model head"
    elif getattr(inner, "loss_function", None) is not ForCausalLMLoss:
        loss = getattr(inner, "loss_function", None)
        found = f"{name}, whose loss is {getattr(loss, '__name__', loss)}"
    else:
        return inner
    raise ConfigError(
        say(
            given=f"LossPlugin(chunk_size=...) for {found}",
            expected="a causal language model of transformers with its own loss (ForCausalLMLoss)",
            do="Leave the plugin (HFDIST_LOSS_CHUNK_SIZE) out for this model.",
        )
    )


def chunked_loss(
    logits: UnbuiltLogits,
    labels: torch.Tensor | None,
    vocab_size: int,
    num_items_in_batch: torch.Tensor | int | None = None,
    ignore_index: int = IGNORED,
    shift_labels: torch.Tensor | None = None,
    *,
    chunk_size: int,
    **_: Any,
) -> torch.Tensor:
    """transformers' ForCausalLMLoss for unbuilt `logits` (batch, seq, vocab) and `labels` (batch, seq).

    0-dim, in fp32 (fp64 for fp64 logits). Raises ConfigError when the labels are not as many as the tokens.
    """
    if shift_labels is None:
        assert labels is not None
        shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    hidden = logits.hidden.reshape(-1, logits.hidden.size(-1))  # (tokens, width)
    targets = shift_labels.reshape(-1).to(hidden.device)
    if targets.numel() != hidden.size(0):
        raise ConfigError(
            say(
                given=f"{targets.numel()} labels for {hidden.size(0)} tokens that have logits",
                expected="a label for every token",
                do="Leave out logits_to_keep where labels are given.",
            )
        )

    def loss_of(hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        scores = logits.build(hidden)  # (chunk, vocab)
        scores = scores if scores.dtype == torch.float64 else scores.float()
        return nn.functional.cross_entropy(
            scores.view(-1, vocab_size), targets, ignore_index=ignore_index, reduction="sum"
        )

    losses = [
        checkpoint(loss_of, tokens, wanted, use_reentrant=False, preserve_rng_state=False)
        for tokens, wanted in zip(hidden.split(chunk_size), targets.split(chunk_size), strict=True)
    ]
    total = torch.stack(losses).sum()
    count = (targets != ignore_index).sum() if num_items_in_batch is None else num_items_in_batch
    return total / (count.to(total.device) if isinstance(count, torch.Tensor) else count)
