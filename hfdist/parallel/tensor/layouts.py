"""From a plan to what changes: the layout of every parameter and the attributes that count local heads.

Nothing moves here: heads, intermediate sizes and vocabularies are checked against the number of ranks first, and every
fault is a `ConfigError` that names the module, the number, and the sizes that would divide it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor, nn

from hfdist.errors import ConfigError, say
from hfdist.models.heads import Heads, find_heads, local_attributes
from hfdist.models.tensor_plans import Plan, is_conv1d, is_linear
from hfdist.parallel.tensor.collectives import Ranks
from hfdist.parallel.tensor.layout import Layout, Replicated, Split, UnfitPlan
from hfdist.parallel.tensor.styles import Site, Style, style_of


@dataclass
class Changes:
    """What a plan does to a model, before it is done."""

    layouts: dict[str, Layout] = field(default_factory=dict)  # by parameter name, every parameter once
    attributes: list[tuple[nn.Module, str, int | None]] = field(default_factory=list)
    sites: list[tuple[nn.Module, Style, Site]] = field(default_factory=list)  # where hooks go
    attentions: dict[str, Heads] = field(default_factory=dict)  # modules whose heads are spread


def plan_changes(model: nn.Module, plan: Plan, ranks: Ranks) -> Changes:
    """Work out `plan` (concrete names) for this rank."""
    modules, names = dict(model.named_modules()), {p: name for name, p in model.named_parameters()}
    changes = Changes()
    changes.attentions = _attentions(modules, plan, ranks.size)
    found: dict[nn.Parameter, tuple[str, Layout]] = {}

    def lay(parameter: nn.Parameter, layout: Layout, where: str) -> None:
        other = found.setdefault(parameter, (where, layout))
        if other[1] != layout:
            raise ConfigError(
                say(
                    given=f"{where} and {other[0]}, which share a parameter and split it differently",
                    expected="one layout for a shared parameter",
                    do="Give both the same kind of style, or untie them.",
                )
            )

    for name, style_name in plan.items():
        style = style_of(style_name, name)
        if name in modules:
            module = modules[name]
            if style.cut and hasattr(module, "base_layer"):
                raise ConfigError(
                    say(
                        given=f"{name}, which an adapter ({type(module).__name__}) wraps",
                        expected="the model's own layers",
                        do="Use tp_size=1 with adapters, or merge them first.",
                    )
                )
            length = 0
            own = module.named_parameters(recurse=False) if style.cut or style.partial_gradient else ()
            for kind, parameter in own:
                layout = _layout(style, module, parameter, name, changes, ranks)
                lay(parameter, layout, f"{name}.{kind}")
                if isinstance(layout, Split) and kind == "weight":
                    length = parameter.shape[layout.dim]
                    changes.attributes += _own_attributes(style, module, layout, length, ranks)
            if style.before is not None or style.after is not None:
                changes.sites.append(
                    (
                        module,
                        style,
                        Site(
                            name, length, _rope_dim(model, modules, name), name.rpartition(".")[0] in changes.attentions
                        ),
                    )
                )
        else:
            owner, _, kind = name.rpartition(".")
            parameter = modules[owner]._parameters[kind]
            assert parameter is not None
            lay(parameter, _layout(style, modules[owner], parameter, name, changes, ranks), name)
    for name, heads in changes.attentions.items():
        local = local_attributes(modules[name], heads, ranks.size)
        changes.attributes += [(modules[name], attribute, value) for attribute, value in local.items()]
    changes.layouts = {name: found[p][1] if p in found else Replicated() for p, name in names.items()}
    return changes


def _attentions(modules: dict[str, nn.Module], plan: Plan, size: int) -> dict[str, Heads]:
    """Modules with heads among whose own projections is one that spreads them; ConfigError when they cannot be."""
    found = {}
    for parent in dict.fromkeys(name.rpartition(".")[0] for name in plan):
        children = {n: s for n, s in plan.items() if n.rpartition(".")[0] == parent and n in modules}
        spread = [n for n, s in children.items() if s in ("colwise", "fused_colwise") and is_linear(modules[n])]
        rows = [_in_features(modules[n]) for n, s in children.items() if s == "rowwise" and is_linear(modules[n])]
        heads = find_heads(modules[parent], out_width=max(rows, default=None)) if spread else None
        if heads is None:
            continue
        if heads.num % size or not heads.kv_copies(size):
            raise ConfigError(
                say(
                    given=f"tp_size={size} for {parent}, with {heads.num} heads, {heads.num_kv} key-value heads",
                    expected=f"a tp_size that divides them: one of {', '.join(map(str, heads.dividing()))}",
                    do="Change tp_size, or leave the attention out of the plan.",
                )
            )
        found[parent] = heads
    return found


def _in_features(module: nn.Module) -> int:
    assert isinstance(module.weight, Tensor)
    return module.weight.shape[0 if is_conv1d(module) else 1]


def _layout(
    style: Style, module: nn.Module, parameter: nn.Parameter, name: str, changes: Changes, ranks: Ranks
) -> Layout:
    """How one parameter of a module (or named by itself) is cut."""
    if style.cut is None:
        return Replicated(style.partial_gradient)
    dim = _cut_dim(style, module, parameter)
    if dim is None:
        return Replicated()
    length, size = parameter.shape[dim], ranks.size
    if style.cut in ("rows", "columns") and (getattr(module, "max_norm", None) or getattr(module, "sparse", False)):
        raise ConfigError(
            say(
                given=f"{name}, an embedding with max_norm or sparse gradients",
                expected="a plain embedding",
                do="Leave it out of the plan.",
            )
        )
    heads = changes.attentions.get(name.rpartition(".")[0])
    if style.blocks == "qkv":
        if heads is None or length != (heads.num + 2 * heads.num_kv) * heads.dim:
            raise UnfitPlan(
                say(
                    given=f"{name} with {length} outputs as fused q, k, v of {heads}",
                    expected="the queries of all heads, then keys, then values",
                    do="Name another style for it.",
                )
            )
        kv = heads.num_kv * heads.dim
        copies = heads.kv_copies(size)
        return Split(dim, (heads.num * heads.dim, kv, kv), 1 if copies == 1 else (1, copies, copies))
    if heads is not None and heads.num_kv % size and heads.num_kv < heads.num and style.cut == "out":
        if length == heads.num_kv * heads.dim:
            return Split(dim, copies=heads.kv_copies(size))
        if length == (heads.num + 2 * heads.num_kv) * heads.dim:
            raise ConfigError(
                say(
                    given=f"tp_size={size} for {name}, which packs {heads.num_kv} key-value heads with their queries",
                    expected=f"a tp_size that divides {heads.num_kv}",
                    do="Change tp_size, or leave the attention out of the plan.",
                )
            )
    num_blocks = style.blocks
    if style.even and length % (size * num_blocks):
        dividing = [n for n in range(1, length + 1) if length % (n * num_blocks) == 0]
        raise ConfigError(
            say(
                given=f"tp_size={size} for {name}, of which {length} rows or columns are to be split",
                expected=f"a tp_size that divides them: {', '.join(map(str, dividing[:12]))}",
                do="Change tp_size, or leave the module out of the plan.",
            )
        )
    return Split(dim, (length // num_blocks,) * num_blocks if num_blocks > 1 else ())


def _cut_dim(style: Style, module: nn.Module, parameter: nn.Parameter) -> int | None:
    """The dimension that `style` cuts, or None for what stays whole (a row-parallel bias)."""
    if style.cut in ("rows", "columns"):
        return 0 if style.cut == "rows" else parameter.ndim - 1
    if parameter.ndim == 1:
        return 0 if style.cut == "out" else None
    transposed = is_conv1d(module)
    return parameter.ndim - (1 if (style.cut == "in") != transposed else 2)


def _own_attributes(
    style: Style, module: nn.Module, layout: Split, length: int, ranks: Ranks
) -> list[tuple[nn.Module, str, int | None]]:
    """What the split module itself reads: Conv1D its width, an embedding where its padding row is."""
    if is_conv1d(module) and style.cut == "out":
        (local,) = layout.shape((length,), ranks.rank, ranks.size) if layout.dim == 0 else (None,)
        if local is None:
            local = Split(0, layout.blocks, layout.copies).shape((length,), ranks.rank, ranks.size)[0]
        return [(module, "nf", local)]
    if style.cut == "rows" and getattr(module, "padding_idx", None) is not None:
        start, stop = ranks.slice_of(length)
        padding = module.padding_idx
        assert isinstance(padding, int)
        return [(module, "padding_idx", padding - start if start <= padding < stop else None)]
    return []


def _rope_dim(model: nn.Module, modules: dict[str, nn.Module], name: str) -> int:
    """Width of the rotary part of MLA's compressed keys; 0 where there is none."""
    for owner in (modules[name.rpartition(".")[0]], getattr(model, "config", None)):
        if isinstance(dim := getattr(owner, "qk_rope_head_dim", None), int):
            return dim
    return 0
