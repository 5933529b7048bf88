"""Where a model can be cut into pipeline stages: its blocks, what runs before them, what runs after them, ties.

Found by running the model up to its first block on a few tokens (on meta for a model on meta), so no family is named:

    LlamaForCausalLM    before: model.embed_tokens      after: model.norm, lm_head      everywhere: -
    OPTForCausalLM      before: embed_tokens, embed_positions      after: final_layer_norm, lm_head (defined first!)

What the blocks use besides the hidden state (a bias computed once for all layers) is found by autograd and stays on
every stage. Raises ConfigError, naming what stands in the way, for models that cannot be cut right.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from hfdist.errors import ConfigError, say
from hfdist.models.blocks import find_blocks

_PROBE_ROWS, _PROBE_TOKENS = 2, 3


class _AfterFirstBlock(BaseException):
    """Leaves a probing forward; not an Exception, so that no model catches it."""


@dataclass(frozen=True)
class Part:
    """A module with parameters outside of all blocks. `shape`: of its output, see `_template`; None: no tensor."""

    name: str
    shape: tuple[int | str, ...] | None = None


@dataclass(frozen=True)
class Form:
    """What a block returns: the hidden state (`kind` None), or a tuple or list `kind` of it and `others`."""

    kind: type | None = None
    others: tuple[bool, ...] = ()  # whether there is something, by place after the hidden state

    @classmethod
    def of(cls, output: Any) -> Form | None:
        """That of `output`; None for anything else."""
        if isinstance(output, Tensor):
            return cls()
        if isinstance(output, (tuple, list)) and output and isinstance(output[0], Tensor):
            return cls(type(output), tuple(value is not None for value in output[1:]))
        return None


@dataclass(frozen=True)
class StageParts:
    """What a cut needs to know. Names are the model's own; `ties` are groups of parameter names with one value."""

    blocks: tuple[str, ...]
    before: tuple[Part, ...]
    after: tuple[Part, ...]
    everywhere: tuple[str, ...]  # parameters (by name) that all stages use
    ties: tuple[tuple[str, ...], ...]
    block_costs: tuple[int, ...]  # parameters
    before_cost: int
    after_cost: int
    hidden_shape: tuple[int, ...]  # at the first block, for the example batch
    hidden_dtype: torch.dtype
    example_rows: int
    example_length: int | None  # dim 1 of the hidden state is the sequence; None: it is not
    block_form: Form | None = None  # what the first block returned; None where it cannot run on the example

    @property
    def blocks_prefix(self) -> str:
        """Name of the list that holds the blocks."""
        return self.blocks[0].rpartition(".")[0]

    def hidden_shape_of(self, num_rows: int, length: int | None) -> tuple[int, ...]:
        """Shape of the hidden state between blocks for `num_rows` rows of `length` tokens."""
        rest = self.hidden_shape[1:]
        if self.example_length is not None and length is not None:
            rest = (length, *rest[1:])
        return (num_rows, *rest)


def find_stage_parts(model: nn.Module, *, example: Mapping[str, Any] | None = None) -> StageParts:
    """Where `model` can be cut. `example`: a batch for a model that does not take `input_ids`."""
    blocks = _blocks_of(model)
    names = tuple(name for name, _ in blocks)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    if example is None:
        example = {"input_ids": torch.zeros(_PROBE_ROWS, _PROBE_TOKENS, dtype=torch.int64, device=device)}
    candidates = _parts_outside(model, names)
    called, hidden, others, form = _probe(model, blocks[0][1], candidates, example)
    rows, length = _rows_and_length(example)
    if hidden.ndim < 2 or hidden.shape[0] != rows:
        raise ConfigError(
            say(
                given=f"{type(model).__name__}, whose blocks take a hidden state of shape {tuple(hidden.shape)} for "
                f"{rows} row(s)",
                expected="rows of the batch in the first dimension",
                do="Use tensor parallelism or ZeRO for this model.",
            )
        )
    needed = _parameters_behind(model, others)
    inside = {name for part in candidates for name in _parameter_names(model, part)}
    loose = [
        name
        for name, _ in model.named_parameters(remove_duplicate=False)
        if name not in inside and not name.startswith(tuple(f"{block}." for block in names))
    ]
    everywhere = tuple(dict.fromkeys([*loose, *sorted(needed)]))
    before = tuple(Part(name, _template(called[name], rows, length)) for name in candidates if name in called)
    after = tuple(Part(name) for name in candidates if name not in called)
    return StageParts(
        blocks=names,
        before=before,
        after=after,
        everywhere=everywhere,
        ties=_ties(model),
        block_costs=tuple(sum(p.numel() for p in block.parameters()) for _, block in blocks),
        before_cost=_cost(model, before),
        after_cost=_cost(model, after),
        hidden_shape=tuple(hidden.shape),
        hidden_dtype=hidden.dtype,
        example_rows=rows,
        example_length=length if length is not None and hidden.ndim > 2 and hidden.shape[1] == length else None,
        block_form=form,
    )


def _blocks_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    config = getattr(model, "config", None)
    if getattr(config, "is_encoder_decoder", False):
        raise ConfigError(
            say(
                given=f"{type(model).__name__}, an encoder-decoder model, for a pipeline",
                expected="one stack of blocks",
                do="Use ZeRO or tensor parallelism for it.",
            )
        )
    blocks = find_blocks(model)
    modules = dict(model.named_modules())
    lists = {name.rpartition(".")[0] for name, _ in blocks}
    repeated = {name for name in lists if isinstance(modules.get(name), nn.ModuleList)}
    if len(blocks) < 2 or len(lists) != 1 or not repeated:
        where = ", ".join(sorted(lists)) or "none that own their parameters alone"
        raise ConfigError(
            say(
                given=f"{type(model).__name__} with {len(blocks)} block(s) in: {where}",
                expected="two blocks or more, all in one list, sharing no parameter",
                do="Use ZeRO or tensor parallelism for it.",
            )
        )
    (only,) = lists
    children = list(modules[only].named_children())
    if [f"{only}.{name}" for name, _ in children] != [name for name, _ in blocks]:
        missing = sorted({f"{only}.{name}" for name, _ in children} - {name for name, _ in blocks})
        raise ConfigError(
            say(
                given=f"{type(model).__name__}, where {', '.join(missing[:3])} share parameters with other modules",
                expected="layers that own their parameters",
                do="Use ZeRO or tensor parallelism for it.",
            )
        )
    return blocks


def _parts_outside(model: nn.Module, blocks: tuple[str, ...]) -> list[str]:
    """The outermost modules with parameters that are neither in a block nor around the blocks."""
    ancestors = {""}
    for block in blocks:
        pieces = block.split(".")
        ancestors |= {".".join(pieces[:end]) for end in range(1, len(pieces))}
    found: list[str] = []
    for name, module in model.named_modules(remove_duplicate=True):
        if name in ancestors or name in blocks or name.startswith(tuple(f"{block}." for block in blocks)):
            continue
        if name.startswith(tuple(f"{other}." for other in found)):
            continue
        if any(True for _ in module.parameters()):
            found.append(name)
    return found


def _probe(
    model: nn.Module, first: nn.Module, parts: list[str], example: Mapping[str, Any]
) -> tuple[dict[str, tuple[int, ...] | None], Tensor, list[Tensor], Form | None]:
    """Run the first block: (parts called before with the shape of their output, its hidden state, its other tensors,
    the form of what it returns)."""
    called: dict[str, tuple[int, ...] | None] = {}
    handles = []
    seen: list[tuple[Tensor, list[Tensor]]] = []
    forms: list[Form | None] = []

    def look(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden, others = split_arguments(first, args, kwargs)
        seen.append((hidden, others))

    def leave(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        forms.append(Form.of(output))
        raise _AfterFirstBlock

    def note(name: str) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if not seen:
                called[name] = tuple(output.shape) if isinstance(output, Tensor) else None

        return hook

    modules = dict(model.named_modules())
    handles += [modules[name].register_forward_hook(note(name)) for name in parts]
    handles.append(first.register_forward_pre_hook(look, with_kwargs=True))
    handles.append(first.register_forward_hook(leave))
    # Frozen parameters too: what the blocks get from them is found by autograd.
    frozen = [p for p in model.parameters() if not p.requires_grad and p.is_floating_point()]
    for parameter in frozen:
        parameter.requires_grad_(True)
    try:
        with torch.enable_grad(), torch.random.fork_rng(devices=[]):
            model(**example)
    except _AfterFirstBlock:
        pass
    except Exception:
        # A block that cannot run on meta or on so few tokens was reached all the same.
        if not seen:
            raise
    finally:
        for handle in handles:
            handle.remove()
        for parameter in frozen:
            parameter.requires_grad_(False)
    if not seen:
        raise ConfigError(
            say(
                given=f"{type(model).__name__}, whose forward does not call its blocks one by one",
                expected="a forward that calls each block",
                do="Use ZeRO or tensor parallelism for it.",
            )
        )
    return called, *seen[0], forms[0] if forms else None


def _template(shape: tuple[int, ...] | None, rows: int, length: int | None) -> tuple[int | str, ...] | None:
    """`shape` with "rows" and "length" in its first two places where they stand for the batch's."""
    if shape is None:
        return None
    named: list[int | str] = list(shape)
    if shape and shape[0] == rows:
        named[0] = "rows"
    if length is not None:
        for place in range(min(2, len(shape) - 1)):
            if shape[place] == length and named[place] != "rows":
                named[place] = "length"
    return tuple(named)


def split_arguments(block: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Tensor, list[Tensor]]:
    """(hidden state, all other tensors) in what a block is called with."""
    tensors = list(tensors_in([*args, *kwargs.values()]))
    if args and isinstance(args[0], Tensor):
        hidden = args[0]
    elif isinstance(kwargs.get("hidden_states"), Tensor):
        hidden = kwargs["hidden_states"]
    else:
        raise ConfigError(
            say(
                given=f"a block {type(block).__name__} whose first argument is no tensor",
                expected="the hidden state first",
                do="Use ZeRO or tensor parallelism for this model.",
            )
        )
    return hidden, [tensor for tensor in tensors if tensor is not hidden]


def tensors_in(values: Any) -> Iterator[Tensor]:
    """Every tensor in nested mappings, lists and tuples."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, Mapping):
        for value in values.values():
            yield from tensors_in(value)
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from tensors_in(value)


def _parameters_behind(model: nn.Module, tensors: list[Tensor]) -> set[str]:
    """Names of the parameters that autograd reaches from `tensors`."""
    stack: list[Node | None] = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    leaves = {id(tensor) for tensor in tensors if tensor.is_leaf}
    seen = set()
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None:
            leaves.add(id(variable))
        stack.extend(next_node for next_node, _ in node.next_functions)
    return {name for name, p in model.named_parameters(remove_duplicate=False) if id(p) in leaves}


def _rows_and_length(example: Mapping[str, Any]) -> tuple[int, int | None]:
    if isinstance(example.get("input_ids"), Tensor):
        return example["input_ids"].shape[0], example["input_ids"].shape[1]
    tensor = next(tensors_in(example))
    return tensor.shape[0], None


def _parameter_names(model: nn.Module, part: str) -> list[str]:
    return [f"{part}.{name}" for name, _ in model.get_submodule(part).named_parameters(remove_duplicate=False)]


def _cost(model: nn.Module, parts: tuple[Part, ...]) -> int:
    unique = {id(p): p.numel() for part in parts for p in model.get_submodule(part.name).parameters()}
    return sum(unique.values())


def _ties(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    """Groups of names of one parameter, in the model's order; the first is the name it is saved under."""
    by_identity: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        by_identity.setdefault(id(parameter), []).append(name)
    return tuple(tuple(names) for names in by_identity.values() if len(names) > 1)
