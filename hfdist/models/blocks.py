"""Which modules of a model are its blocks: the units that are gathered, sharded and freed one at a time.

    LlamaForCausalLM            -> model.layers.0, model.layers.1, ...      (the class names in `_no_split_modules`)
    BertForMaskedLM             -> bert.encoder.layer.0, ...                (none given: repeated children of a list)
    Sequential(Linear, Linear)  -> nothing: the whole model is one unit

What is in no block (embeddings, final norm, head) belongs to the root unit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from torch import nn

from hfdist.errors import ConfigError, nearest, say


def find_blocks(model: nn.Module, block_classes: tuple[str, ...] | None = None) -> list[tuple[str, nn.Module]]:
    """(name, module) of each block, in definition order, none inside another.

    `block_classes` are class names to use instead of what the model says of itself. A block that shares a parameter
    with anything outside of it is left to the root unit, so that tied weights are gathered once.
    Raises ConfigError when `block_classes` names a class that the model does not have.
    """
    named = [(name, module) for name, module in model.named_modules() if name]
    if block_classes is not None:
        present = {_class_name(module) for _, module in named}
        for wanted in block_classes:
            if wanted not in present:
                raise ConfigError(
                    say(
                        given=f"block class {wanted!r}",
                        expected=f"the class of a module in {type(model).__name__}{nearest(wanted, present)}",
                        do="Leave it out to have blocks found from the model's structure.",
                    )
                )
        blocks = [(name, module) for name, module in named if _class_name(module) in block_classes]
    else:
        classes = _own_block_classes(model)
        blocks = [(name, module) for name, module in named if _class_name(module) in classes]
        blocks = blocks or list(_repeated_children(model))
    return _without_shared(model, _outermost(blocks))


def named_blocks(model: nn.Module, names: Iterable[str]) -> list[tuple[str, nn.Module]]:
    """The blocks of these names, as `find_blocks` has them: for a model of which other blocks have been taken out."""
    return _without_shared(model, _outermost([(name, model.get_submodule(name)) for name in names]))


def _class_name(module: nn.Module) -> str:
    # `fully_shard` puts a prefix before the class of a module it manages.
    return type(module).__name__.removeprefix("FSDP")


def _own_block_classes(model: nn.Module) -> set[str]:
    classes: set[str] = set()
    for module in model.modules():
        classes |= set(getattr(module, "_no_split_modules", None) or ())
    # Some families list their embeddings as not to be split over devices; only repeated modules are blocks.
    counts = Counter(_class_name(module) for module in model.modules())
    return {name for name in classes if counts[name] > 1 or not name.endswith("Embeddings")}


def _repeated_children(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) > 1:
            children = list(module.named_children())
            same = len({type(child) for _, child in children}) == 1
            if same and all(_has_forward(child) for _, child in children):
                yield from ((f"{name}.{index}" if name else index, child) for index, child in children)


def _has_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


def _outermost(blocks: list[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    names = {name for name, _ in blocks}
    return [
        (name, module)
        for name, module in blocks
        if not any(name.startswith(other + ".") for other in names) and any(True for _ in module.parameters())
    ]


def _without_shared(model: nn.Module, blocks: list[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    """Drop blocks whose parameters are also used elsewhere (another block, or outside all blocks)."""
    owners: dict[int, set[str]] = {}
    names = [name for name, _ in blocks]
    for full_name, parameter in model.named_parameters(remove_duplicate=False):
        owner = next((name for name in names if full_name.startswith(name + ".")), "")
        owners.setdefault(id(parameter), set()).add(owner)
    shared = {owner for several in owners.values() if len(several) > 1 for owner in several}
    return [(name, module) for name, module in blocks if name not in shared]
