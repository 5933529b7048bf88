"""What stands in a stage's model where other stages own a module: nothing to compute, no parameters.

    rank 1 of 2, 4 layers    embed_tokens: stub    layers: [pass, pass -> received, own, own]    norm, lm_head: own

A pass-through keeps its index in the list and the plain attributes of the block (`attention_type`, `layer_idx`, ...),
accepts what a block accepts and returns what a block returns. The one just before a stage's first own block puts in the
received hidden state; the one just after its last own block ends the forward with what that block returned. So what a
model does between two blocks is done once, by the stage that receives. A key-value cache is kept as long as it would
be, since models read positions from it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from hfdist.errors import ConfigError, say
from hfdist.models.stages import Form, split_arguments, tensors_in

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
        for name in set(dir(type(original))) - set(dir(nn.Module)):
            of_class = getattr(type(original), name, None)
            if not name.startswith("_") and isinstance(of_class, (property, *_PLAIN)):
                with contextlib.suppress(Exception):  # a property may need what is not there
                    value = getattr(original, name)
                    if isinstance(value, _PLAIN):
                        self.__dict__[name] = value
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
        self.mark: Tensor | None = None
        self._visited = -1

    def begin(self, received: Tensor | None, mark: Tensor | None = None) -> None:
        """A forward starts. `mark`: a leaf () that all placeholders are then computed from, see `reaches`."""
        self.received, self.sent, self.mark, self._visited = received, None, mark, -1

    def marked(self, placeholder: Tensor) -> Tensor:
        """`placeholder`, so that autograd knows what is computed from it."""
        return placeholder if self.mark is None else placeholder + self.mark.to(placeholder)

    def visit(self, index: int, block: nn.Module) -> None:
        """Block `index`, or what stands for it, is called. Raises ConfigError for a model that calls one again."""
        if index <= self._visited:
            raise _cannot(block, "is called more than once in a forward")
        self._visited = index

    def note_output(self, block: nn.Module, _: Any, output: Any) -> None:
        """Forward hook of the last own block."""
        self.sent = output if isinstance(output, Tensor) else output[0]


class PassThrough(Shell):
    """Instead of a block of another stage. See the module's docstring."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__(original)
        # In plain boxes: the blocks and the passage of a view are not this module's children.
        self._follow: tuple[Passage, Sequence[nn.Module], BlockForm] | None = None
        self._leaves: Passage | None = None
        self._layers = range(0)
        self._visits: Passage | None = None

    def before_own(
        self, passage: Passage, blocks: Sequence[nn.Module], form: BlockForm, index: int, *, enters: bool
    ) -> PassThrough:
        """A copy for block `index` in the form of the own `blocks`; `enters`: it puts in what `passage` received."""
        copy = self._copy()
        copy._follow, copy._layers = (passage if enters else Passage(), blocks, form), range(index, index + 1)
        copy._visits = passage
        return copy

    def after_own(self, passage: Passage, layers: range) -> PassThrough:
        """A copy that ends the forward, for all `layers` to come."""
        copy = self._copy()
        copy._leaves, copy._layers, copy._visits = passage, layers, passage
        return copy

    def _copy(self) -> PassThrough:
        copy = type(self).__new__(type(self))
        copy.__dict__ = dict(self.__dict__)
        return copy

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The hidden state that came in, or that was received, in the form that a block returns."""
        hidden, _ = split_arguments(self, args, kwargs)
        if self._visits is not None:
            self._visits.visit(self._layers.start, self)
        _lengthen_caches([*args, *kwargs.values()], self._layers, hidden)
        if self._leaves is not None:
            assert self._leaves.sent is not None
            raise StageEnds(self._leaves.sent)
        if self._follow is None:
            return hidden
        passage, blocks, form = self._follow
        if passage.received is None:
            hidden = hidden if self._visits is None else self._visits.marked(hidden)
        else:
            # Also where it was passed in: what a stub gave is of another dtype under mixed precision.
            given, hidden = hidden, passage.received
            args = tuple(hidden if value is given else value for value in args)
            kwargs = {name: hidden if value is given else value for name, value in kwargs.items()}
        return form.wrap(hidden, blocks, args, kwargs)


class BlockForm:
    """What a pipeline learns of its model as it runs.

    That is what blocks return (by an own block, without gradients; `probed`: of the first block, where no own one takes
    these arguments), and which stages were seen to compute from nothing of another stage but the hidden state (by
    autograd, see `reaches`).
    """

    def __init__(self, probed: Form | None = None) -> None:
        self.apart: set[int] = set()  # stages
        self._probed = probed
        self._form: Form | None = None

    def wrap(self, hidden: Tensor, blocks: Sequence[nn.Module], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`hidden` as a block would return it."""
        if self._form is None:
            self._form = self._learn(blocks, args, kwargs)
        if self._form.kind is None:
            return hidden
        return self._form.kind([hidden, *[Elsewhere(blocks[0]) if there else None for there in self._form.others]])

    def _learn(self, blocks: Sequence[nn.Module], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Form:
        args = tuple(None if _is_cache(value) else value for value in args)
        kwargs = {name: None if _is_cache(value) else value for name, value in kwargs.items()}
        failed: Exception | None = None
        # Layers of two kinds take masks or angles of two shapes, so that not every block takes these.
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            for block in blocks:
                try:
                    output = block.forward(*args, **kwargs)  # not called: its hooks count real calls
                except Exception as error:
                    failed = failed or error
                    continue
                form = Form.of(output)
                if form is None:
                    raise _cannot(block, f"returns {type(output).__name__}")
                return form
        if self._probed is None:
            assert failed is not None
            raise failed
        return self._probed


def _is_cache(value: Any) -> bool:
    return callable(getattr(value, "update", None)) and callable(getattr(value, "get_seq_length", None))


def _lengthen_caches(values: list[Any], layers: range, hidden: Tensor) -> None:
    """Keep a cache of `layers` that are elsewhere as long as the sequence, by keys of one head and width 1."""
    for cache in {id(value): value for value in values if _is_cache(value)}.values():
        nothing = hidden.new_zeros((hidden.shape[0], 1, hidden.shape[1], 1))
        for layer in layers:
            cache.update(nothing, nothing, layer)


class Elsewhere:
    """A further output of a block of another stage (attention weights, mostly): fine until it is used."""

    def __init__(self, block: nn.Module) -> None:
        self.__dict__["block"] = block

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise _cannot(self.__dict__["block"], "hands on more than its hidden state, which the model uses")

    __getattr__ = __getitem__ = __iter__ = __len__ = __bool__ = _refuse
    __add__ = __radd__ = __mul__ = __rmul__ = __sub__ = __rsub__ = __call__ = _refuse

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in (*args, *(kwargs or {}).values()):
            if isinstance(value, cls):
                value._refuse()
        raise AssertionError("called for an argument of this class")


def reaches(output: Any, mark: Tensor) -> bool:
    """Whether autograd gets from a tensor in `output` to the leaf `mark`.

    What stands for another stage's result is computed from a mark. A model that uses it for more than handing it to the
    next block (a residual over several blocks, an embedding added once more at the end) reaches the mark.
    """
    stack: list[Node | None] = [tensor.grad_fn for tensor in tensors_in(output)]
    seen: set[Node] = set()
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        if getattr(node, "variable", None) is mark:
            return True
        seen.add(node)
        stack.extend(following for following, _ in node.next_functions)
    return False


def refuse_reach(blocks: Sequence[nn.Module]) -> ConfigError:
    """The error for a stage whose output reaches the mark."""
    return _cannot(blocks[0], "is not all that uses the hidden state: other parts of the model use one of before it")


def _cannot(block: nn.Module, what: str) -> ConfigError:
    return ConfigError(
        say(
            given=f"a block {getattr(block, 'stands_for', type(block).__name__)} that {what}",
            expected="blocks that hand on one hidden state",
            do="Use ZeRO or tensor parallelism for this model.",
        )
    )


class Stub(Shell):
    """Instead of a module before the blocks: zeros of the shape that it would return.

    `shape`: its output for the probed batch, with "rows" and "length" where those of the batch stand; None: no tensor.
    """

    def __init__(
        self, original: nn.Module, *, shape: tuple[int | str, ...] | None, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(original)
        self._shape, self._dtype = shape, dtype
        self.sizes: dict[str, int] = {}  # of the batch that runs now
        self.passage = Passage()
        self.device = device

    @property
    def weight(self) -> Tensor:
        """Empty: models ask an embedding for its weight's dtype and device."""
        return torch.empty(0, dtype=self._dtype, device=self.device)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Zeros; what is computed from them is replaced at the first own block."""
        if self._shape is None:
            return super().forward()
        shape = [self.sizes[size] if isinstance(size, str) else size for size in self._shape]
        # Not expanded: models write into it.
        return self.passage.marked(torch.zeros(shape, dtype=self._dtype, device=self.device))
