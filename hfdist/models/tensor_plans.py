"""Tensor-parallel plans: which style each module of a model gets, as data (concrete name -> style name).

user's dict          wildcards expanded; a rule that matches nothing is an error with the nearest name
the model's own      transformers' `tp_plan`, where it reaches into the blocks
inferred             from the names that projections of attention and MLP have in transformers; families without a
                     plan are found here. Never used unverified: what is fused (q, k, v) can be packed in more than
                     one way, so there may be several candidates, and a forward and backward tells which is right
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from torch import nn

from hfdist.errors import ConfigError, nearest, say
from hfdist.models.blocks import find_blocks

Plan = dict[str, str]

_COLUMN = {
    *("q_proj", "k_proj", "v_proj", "query", "key", "value", "q_lin", "k_lin", "v_lin", "q_attn"),
    *("fc1", "c_fc", "fc_in", "dense_h_to_4h", "up_proj", "gate_proj", "lin1", "w1", "w3", "wi", "wi_0", "wi_1"),
}
_FUSED = {"c_attn", "query_key_value", "Wqkv", "qkv_proj", "qkv", "W_pack", "att_proj"}
_ROW = {
    *("o_proj", "out_proj", "out_lin", "dense", "c_proj", "attn_out"),
    *("fc2", "fc_out", "dense_4h_to_h", "down_proj", "lin2", "w2", "wo", "ff_out"),
}
# Where a `dense` is told apart by its place only (BERT and its kin).
_COLUMN_PLACES = re.compile(r"(^|\.)intermediate\.dense$")
_ROW_PLACES = re.compile(r"(^|\.)output\.dense$")
# Parameters with one entry a query head.
_HEAD_PARAMETERS = {"sinks"}


def is_linear(module: nn.Module) -> bool:
    """A projection: torch's Linear or transformers' Conv1D (whose weight is (in, out))."""
    return isinstance(module, nn.Linear) or is_conv1d(module)


def is_conv1d(module: nn.Module) -> bool:
    """Whether the weight is (in, out), as in GPT-2."""
    from transformers.pytorch_utils import Conv1D

    return isinstance(module, Conv1D)


def plans_for(model: nn.Module, plan: str | Plan = "auto") -> list[Plan]:
    """Candidate plans, best first, each concrete and complete as to ties; one when it is given by user or model.

    Raises ConfigError for an empty plan, a rule that matches nothing, and a model for which none can be found.
    """
    if isinstance(plan, dict):
        return [complete(model, expand(model, plan, strict=True))]
    own = expand(model, _own_plan(model), strict=False)
    blocks = tuple(name + "." for name, _ in find_blocks(model))
    reaches_blocks = bool(blocks) and any(name.startswith(blocks) for name in own)
    candidates = [own] if reaches_blocks else _inferred(model, blocks)
    if not candidates:
        raise ConfigError(
            say(
                given=f"{type(model).__name__}, which has no tensor-parallel plan",
                expected="projections of attention and MLP under names known in transformers",
                do="Pass plan={'layers.*.self_attn.q_proj': 'colwise', ...} with a rule for each module to split.",
            )
        )
    experts = _experts(model, blocks)
    candidates = [{**experts, **candidate} for candidate in candidates]
    # Last, what needs to know nothing of a module's inside: its weights are split, its heads are not.
    candidates += [_gathered(candidates[-1], attention_only=True), _gathered(candidates[-1], attention_only=False)]
    if experts:
        candidates += [{name: style for name, style in c.items() if name not in experts} for c in candidates]
    return [complete(model, candidate) for candidate in candidates]


def _own_plan(model: nn.Module) -> Plan:
    return dict(getattr(model, "tp_plan", None) or {})


def expand(model: nn.Module, plan: Plan, *, strict: bool) -> Plan:
    """`*` stands for one part of a dotted name. `strict`: an empty plan, or an unmatched rule, is a ConfigError."""
    if strict and not plan:
        raise ConfigError(
            say(given="an empty plan", expected="a rule for each module to split", do='Or say plan="auto".')
        )
    names = [name for name, _ in model.named_modules() if name]
    names += [name for name, _ in model.named_parameters(remove_duplicate=False)]
    concrete: Plan = {}
    for pattern, style in plan.items():
        matcher = re.compile(re.escape(pattern).replace(r"\*", r"[^.]+"))
        matches = [name for name in names if matcher.fullmatch(name)]
        if strict and not matches:
            known = {re.sub(r"(?<=\.)\d+(?=\.)", "*", name) for name in names}
            raise ConfigError(
                say(
                    given=f"plan rule {pattern!r}",
                    expected=f"the name of a module or parameter of {type(model).__name__}{nearest(pattern, known)}",
                    do="Correct or remove the rule.",
                )
            )
        concrete |= dict.fromkeys(matches, style)
    return concrete


def complete(model: nn.Module, plan: Plan) -> Plan:
    """Mark the head, and give modules that share a split weight with others (tied embeddings) their rule too."""
    plan = dict(plan)
    head = output_head(model)
    if head is not None and plan.get(head, "").startswith("colwise"):
        plan[head] = "vocabulary_head"
    owners: dict[nn.Parameter, list[tuple[str, nn.Module]]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        for parameter in module._parameters.values():
            if parameter is not None:
                owners.setdefault(parameter, []).append((name, module))
    for sharing in owners.values():
        if len(sharing) > 1 and any(plan.get(name) in ("embedding_rowwise", "vocabulary_head") for name, _ in sharing):
            for name, module in sharing:
                if isinstance(module, nn.Embedding):
                    plan.setdefault(name, "embedding_rowwise")
                elif is_linear(module):
                    plan.setdefault(name, "vocabulary_head" if name == head else "colwise_gather_output")
    return plan


def output_head(model: nn.Module) -> str | None:
    """Name of the module that puts out logits over the vocabulary, or None."""
    find = getattr(model, "get_output_embeddings", None)
    head = find() if find is not None else None
    return _name_of(model, head) if isinstance(head, nn.Module) and is_linear(head) else None


def _name_of(model: nn.Module, wanted: nn.Module) -> str | None:
    return next((name for name, module in model.named_modules() if module is wanted), None)


def _inferred(model: nn.Module, blocks: Iterable[str]) -> list[Plan]:
    plan: Plan = {}
    fused = []
    for block in blocks:
        linears = [(name, m) for name, m in model.named_modules() if name.startswith(block) and is_linear(m)]
        rules = {name: _rule(name) for name, _ in linears}
        columns = [name for name, rule in rules.items() if rule in ("colwise", "fused")]
        rows = [name for name, rule in rules.items() if rule == "rowwise"]
        for name in columns:
            if any(_same_pair(name, row, block) for row in rows):
                plan[name] = "colwise"
                if rules[name] == "fused":
                    fused.append(name)
        for name in rows:
            if any(_same_pair(column, name, block) for column in columns):
                plan[name] = "rowwise"
        for name, _ in model.named_parameters():
            if name.startswith(block) and name.rpartition(".")[2] in _HEAD_PARAMETERS:
                plan[name] = "colwise"
    if not plan:
        return []
    head = output_head(model)
    if head is not None:
        plan[head] = "colwise_gather_output"
    find = getattr(model, "get_input_embeddings", None)
    embeddings = find() if find is not None else None
    if isinstance(embeddings, nn.Embedding) and (name := _name_of(model, embeddings)):
        plan[name] = "embedding_rowwise"
    if not fused:
        return [plan]
    # Packed as q, k, v, or head by head; the first is what the name c_attn and Wqkv stand for, the others the second.
    return [{**plan, **dict.fromkeys(fused, "fused_colwise")}, plan]


def _experts(model: nn.Module, blocks: tuple[str, ...]) -> Plan:
    """Rules for experts whose weights are stacked: gate_up_proj (experts, 2 x inside, hidden) and down_proj."""
    plan: Plan = {}
    for name, module in model.named_modules():
        up, down = module._parameters.get("gate_up_proj"), module._parameters.get("down_proj")
        if up is None or down is None or up.ndim != 3 or not name.startswith(blocks):
            continue
        # Biases are added by every rank.
        if up.shape[1] == 2 * down.shape[2] and not any("bias" in kind for kind in module._parameters):
            plan |= {f"{name}.gate_up_proj": "packed_colwise", f"{name}.down_proj": "rowwise", name: "moe_tp_experts"}
    return plan


def _gathered(plan: Plan, *, attention_only: bool) -> Plan:
    """The plan with an all-gather after each column-parallel layer, for modules that cannot have fewer heads."""
    instead = {
        "colwise": "colwise_gather_output",
        "fused_colwise": "colwise_gather_output",
        "packed_colwise": "colwise_gather_output",
        "rowwise": "rowwise_split_input",
        "replicated_with_grad_allreduce": "replicate",
    }
    result = {}
    for name, style in plan.items():
        parent, _, last = name.rpartition(".")
        inside = "expert" in parent or style not in instead
        if inside or (attention_only and "att" not in parent.lower()):
            result[name] = style
        elif last not in _HEAD_PARAMETERS:
            result[name] = instead[style]
    return result


def _rule(name: str) -> str | None:
    last = name.rpartition(".")[2]
    if _COLUMN_PLACES.search(name) or last in _COLUMN:
        return "colwise"
    if last in _FUSED:
        return "fused"
    if _ROW_PLACES.search(name) or last in _ROW:
        return "rowwise"
    return None


def _same_pair(column: str, row: str, block: str) -> bool:
    """Whether what `column` puts out is what `row` takes in, by their places in the block.

    Children of one module are a pair; so are attention.self.query and attention.output.dense, and intermediate.dense
    and output.dense.
    """
    above, below = (name.removeprefix(block).split(".")[:-1] for name in (column, row))
    if above == below:
        return True
    return (
        len(above) == len(below) > 0 and above[:-1] == below[:-1] and above[-1] != below[-1] and below[-1] == "output"
    )
