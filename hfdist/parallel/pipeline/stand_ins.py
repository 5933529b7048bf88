"""What stands in a stage's model where other stages own a module: nothing to compute, no parameters.

    rank 1 of 2, 4 layers    embed_tokens: stub    layers: [pass, pass -> received, own, own]    norm, lm_head: own

A pass-through keeps its index in the list and the plain attributes of the block (`attention_type`, `layer_idx`, ...),
accepts what a block accepts and returns what a block returns. The one just before a stage's first own block puts in the
received hidden state; the one just after its last own block ends the forward with what that block returned. So what a
model does between two blocks is done once, by the stage that receives. A key-value cache is kept as long as it would
be, since models read positions from it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hfdist.errors import ConfigError, say
from hfdist.models.stages import split_arguments

_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)


class StageEnds(BaseException):
    """Leaves a forward with the hidden state that goes to the next stage; not an Exception, so no model catches it."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__("the stage's last block has run")
        self.hidden = hidden


class Shell(nn.Module):
    """The plain attributes of a module that is not here, and of those inside it."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self.stands_for = type(original).__name__.removeprefix("FSDP")
        for name, value in vars(original).items():
            if not name.startswith("_") and (isinstance(value, _PLAIN) or name == "config"):
                setattr(self, name, value)
        for name, child in original.named_children():
            self.add_module(name, Shell(child))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Never right: what calls this module needs parameters that another stage owns."""
        raise ConfigError(
            say(
                given=f"a forward that calls {self.stands_for}, which another pipeline stage owns",
                expected="a model that uses it before its first block or after its last one only",
                do="Use ZeRO or tensor parallelism for this model.",
            )
        )


class Passage:
    """What the stand-ins of one view share: the hidden states that come in and go out for the batch that runs now."""

    def __init__(self) -> None:
        self.received: Tensor | None = None
        self.sent: Tensor | None = None

    def note_output(self, block: nn.Module, _: Any, output: Any) -> None:
        """Forward hook of the last own block."""
        self.sent = output if isinstance(output, Tensor) else output[0]


class PassThrough(Shell):
    """Instead of a block of another stage. See the module's docstring."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__(original)
        # In plain boxes: the blocks and the passage of a view are not this module's children.
        self._follow: tuple[Passage, nn.Module, BlockForm] | None = None
        self._leaves: Passage | None = None
        self._layers = range(0)

    def before_own(self, passage: Passage, block: nn.Module, form: BlockForm, layers: range) -> PassThrough:
        """A copy that puts in what `passage` received, in the form of `block`; `layers`: it stands for these."""
        copy = self._copy()
        copy._follow, copy._layers = (passage, block, form), layers
        return copy

    def after_own(self, passage: Passage, layers: range) -> PassThrough:
        """A copy that ends the forward, for all `layers` to come."""
        copy = self._copy()
        copy._leaves, copy._layers = passage, layers
        return copy

    def _copy(self) -> PassThrough:
        copy = type(self).__new__(type(self))
        copy.__dict__ = dict(self.__dict__)
        return copy

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The hidden state that came in, or that was received, in the form that a block returns."""
        hidden, _ = split_arguments(self, args, kwargs)
        _lengthen_caches(kwargs, self._layers, hidden)
        if self._leaves is not None:
            assert self._leaves.sent is not None
            raise StageEnds(self._leaves.sent)
        if self._follow is None:
            return hidden
        passage, block, form = self._follow
        if passage.received is not None:
            hidden = passage.received
        return form.wrap(hidden, block, args, kwargs)


class BlockForm:
    """Whether blocks return a tensor or a tuple around it; learned from the first own block, without gradients."""

    def __init__(self) -> None:
        self._length: int | None = None  # 0: a tensor
        self._kind: type = tuple

    def wrap(self, hidden: Tensor, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`hidden` as `block` would return it."""
        if self._length is None:
            self._learn(block, args, kwargs)
        if not self._length:
            return hidden
        return self._kind([hidden, *[None] * (self._length - 1)])

    def _learn(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        kwargs = {name: None if name in _CACHES else value for name, value in kwargs.items()}
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            output = block(*args, **kwargs)
        if isinstance(output, Tensor):
            self._length = 0
            return
        if not isinstance(output, (tuple, list)) or not output or not isinstance(output[0], Tensor):
            raise _cannot(block, f"returns {type(output).__name__}")
        if any(isinstance(value, Tensor) and value.is_floating_point() for value in output[1:]):
            raise _cannot(block, f"returns {len(output)} values, more than one of them a tensor")
        self._length, self._kind = len(output), type(output)


def _lengthen_caches(kwargs: dict[str, Any], layers: range, hidden: Tensor) -> None:
    """Keep a cache of `layers` that are elsewhere as long as the sequence; keys of no width take no memory."""
    for cache in (kwargs[name] for name in _CACHES if kwargs.get(name) is not None):
        nothing = hidden.new_empty((hidden.shape[0], 1, hidden.shape[1], 0))
        for layer in layers:
            cache.update(nothing, nothing, layer)


_CACHES = ("cache", "past_key_values", "past_key_value", "layer_past", "cache_params")


def _cannot(block: nn.Module, what: str) -> ConfigError:
    return ConfigError(
        say(
            given=f"a block {type(block).__name__} that {what}",
            expected="blocks that hand on one hidden state",
            do="Use ZeRO or tensor parallelism for this model.",
        )
    )


class Stub(Shell):
    """Instead of a module before the blocks: zeros of the shape that it would return, without memory.

    x (..., ) of integers -> (..., width); x (..., d) of floats -> (..., width).
    """

    def __init__(self, original: nn.Module, *, width: int | None, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(original)
        self._width, self._dtype = width, dtype
        # Models ask an embedding for its weight's dtype and device.
        self.weight = torch.empty(0, dtype=dtype, device=device)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Zeros; what is computed from them is replaced at the first own block."""
        tensor = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
        if tensor is None or self._width is None:
            return super().forward()
        lead = tensor.shape[:-1] if tensor.is_floating_point() else tensor.shape
        return torch.zeros((), dtype=self._dtype, device=tensor.device).expand(*lead, self._width)
