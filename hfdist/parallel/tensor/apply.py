"""Make a model tensor-parallel in place, and back.

    handle = apply_tensor_parallel(model, group)      # every rank of `group` holds the same whole model before
    loss = model(**batch).loss; loss.backward()       # the same batch on every rank; the loss is one process's
    handle.reduce_partial_gradients()                 # once per optimizer step
    optimizer.step()                                  # on local tensors; built before or after

Parameters stay the same objects and hold this rank's part; hooks on the existing modules carry the collectives.
The order: find a plan, try it on a small copy (`verify`), work out layouts (raises before anything moves), cut, hook.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers.utils import ModelOutput

from hfdist.models.blocks import find_blocks
from hfdist.models.heads import HEAD_ARGUMENTS, MASK_ARGUMENT, Heads
from hfdist.models.tensor_plans import Plan, output_head, plans_for
from hfdist.parallel.tensor import collectives, gradients, sequence, vocab
from hfdist.parallel.tensor.collectives import Ranks
from hfdist.parallel.tensor.layout import Layout, Split
from hfdist.parallel.tensor.layouts import plan_changes
from hfdist.parallel.tensor.streams import Streams, has_dropout
from hfdist.parallel.tensor.styles import Run, Site, Style


@dataclass
class TensorParallel:
    """A model that was made tensor-parallel: where its parameters are, and how to get it back."""

    model: nn.Module
    ranks: Ranks
    plan: Plan  # module or parameter name -> style, as applied
    layouts: dict[str, Layout]  # by parameter name, a tie once
    num_all_reduces: int  # of one forward; a backward has as many but for those of the embeddings
    block_share: float  # of the elements of all blocks, how many this rank holds
    run: Run
    output_hook: RemovableHandle | None = None  # gives the model's output its lazy logits
    _undos: list[Callable[[], None]] = field(default_factory=list)

    def finish_last(self) -> None:
        """Run the output's hook after all that the model has by now: FSDP2's reads every field, and so would gather."""
        if self.output_hook is not None:
            self.model._forward_hooks.move_to_end(self.output_hook.id)  # type: ignore[attr-defined]

    def reduce_partial_gradients(self) -> None:
        """Sum gradients that are partial (`gradients`); once per optimizer step, on all ranks."""
        named = self.model.named_parameters()
        gradients.reduce_partial_gradients([(p.grad, self.layouts[name]) for name, p in named], self.ranks)

    def norm(self, norm_type: float = 2.0) -> Tensor:
        """Norm of the whole model's gradient, the same on every rank. After `reduce_partial_gradients`."""
        found = {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}
        return gradients.total_norm(found, self.layouts, self.ranks, norm_type)

    def whole(self, name: str, local: Tensor | None = None) -> Tensor:
        """The whole parameter `name`, or what lies like it (`local`: gradient, optimizer state); all ranks call."""
        local = self.model.get_parameter(name) if local is None else local
        layout = self.layouts[name]
        if not isinstance(layout, Split):
            return local.detach().clone()
        parts = collectives.gathered(local.detach(), self.ranks, dim=layout.dim, label="tp whole")
        return layout.join(parts)

    @torch.no_grad()
    def undo(self) -> None:
        """The model whole on every rank again, with the values it has now; gradients are dropped. All ranks call."""
        for name, parameter in self.model.named_parameters():
            whole = self.whole(name)
            parameter.grad = None
            parameter.data = whole
        while self._undos:
            self._undos.pop()()


def apply_tensor_parallel(
    model: nn.Module,
    group: dist.ProcessGroup,
    *,
    plan: str | Plan = "auto",
    sequence_parallel: bool = False,
    verify: bool = True,
) -> TensorParallel:
    """Split `model`, the same whole one on every rank of `group`, over its ranks.

    plan: "auto" (the model's own, else inferred), or rules {name with wildcards: style} that replace it.
    sequence_parallel: between the pairs of a block each rank holds a part of the tokens (`sequence`).
    verify: try the plan on a small copy first; a plan that is wrong for the model is a ConfigError and nothing changes.

    Raises ConfigError for heads or sizes that do not divide, unknown styles, rules without a match, no plan.
    """
    candidates = plans_for(model, plan)
    ranks = Ranks.of(group)
    if verify:
        from hfdist.parallel.tensor.verify import verified_plan  # it applies plans to copies

        candidates = [verified_plan(model, candidates, ranks, sequence_parallel=sequence_parallel)]
    return apply_plan(model, candidates[0], ranks, sequence_parallel=sequence_parallel)


@torch.no_grad()
def apply_plan(model: nn.Module, plan: Plan, ranks: Ranks, *, sequence_parallel: bool = False) -> TensorParallel:
    """Apply a concrete plan as it is."""
    changes = plan_changes(model, plan, ranks)
    run = Run(ranks, Streams(ranks.rank))
    if sequence_parallel:
        blocks = tuple(name + "." for name, _ in find_blocks(model))
        sequence.verify_plan_allows(plan, blocks)
        changes.layouts = sequence.partial_layouts(changes.layouts, blocks)
        run.sequence = sequence.Sequence(ranks)
    num = sum(style.reduces for _, style, _ in changes.sites)
    whole = _block_elements(model)
    handle = TensorParallel(model, ranks, plan, changes.layouts, num, 1.0, run)
    for name, parameter in model.named_parameters():
        layout = changes.layouts[name]
        if isinstance(layout, Split):
            # A copy: a view would keep the whole alive.
            parameter.data = layout.take(parameter.data, ranks.rank, ranks.size).clone()
            parameter.grad = None
    handle.block_share = _block_elements(model) / max(whole, 1)
    for module, attribute, value in changes.attributes:
        handle._undos.append(_set(module, attribute, value))
    for module, style, site in changes.sites:
        handle._undos += _hook_site(run, module, style, site)
    modules = dict(model.named_modules())
    for name, heads in changes.attentions.items():
        handle._undos += _hook_attention(run, modules[name], heads)
    for name, style_name in plan.items():
        parent = modules[name.rpartition(".")[0]]
        if (
            run.sequence is None
            and style_name in ("colwise", "packed_colwise", "fused_colwise")
            and name in modules
            and has_dropout(parent)
        ):
            handle._undos += _hook_stream(run, modules[name], parent)
    if run.sequence is not None:
        attentions = [modules[name] for name in changes.attentions]
        handle._undos += run.sequence.hook(model, attentions, run.streams.enter, run.streams.leave)
    handle._undos += _hook_model(handle, run, model, plan)
    return handle


def _block_elements(model: nn.Module) -> int:
    return sum(p.numel() for _, block in find_blocks(model) for p in block.parameters())


def _set(module: nn.Module, attribute: str, value: int | None) -> Callable[[], None]:
    before = getattr(module, attribute)
    setattr(module, attribute, value)
    return lambda: setattr(module, attribute, before)


def _hook_site(run: Run, module: nn.Module, style: Style, site: Site) -> list[Callable[[], None]]:
    undos = []
    if (before := style.before) is not None:

        def pre(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
            return before(run, site, module, args, kwargs)

        undos.append(module.register_forward_pre_hook(pre, with_kwargs=True).remove)
    if (after := style.after) is not None:

        def post(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            return after(run, site, module, output)

        # Also when the layer raises: what `before` set aside has to come back.
        undos.append(module.register_forward_hook(post, always_call=True).remove)
    return undos


def _hook_attention(run: Run, attention: nn.Module, heads: Heads) -> list[Callable[[], None]]:
    """Cut arguments with a row a head to this rank's: (heads or batch * heads, ...), masks (batch, heads, ...)."""
    names = list(inspect.signature(type(attention).forward).parameters)[1:]
    start, stop = run.ranks.slice_of(heads.num)

    def local(name: str, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if name == MASK_ARGUMENT and value.ndim == 4 and value.shape[1] == heads.num:
            return value[:, start:stop]
        if name in HEAD_ARGUMENTS and value.shape[0] % heads.num == 0:
            return value.unflatten(0, (-1, heads.num))[:, start:stop].flatten(0, 1)
        return value

    def pre(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        positional = tuple(local(name, value) for name, value in zip(names, args, strict=False))
        return (*positional, *args[len(names) :]), {name: local(name, value) for name, value in kwargs.items()}

    if not {*HEAD_ARGUMENTS, MASK_ARGUMENT} & set(names):
        return []
    return [attention.register_forward_pre_hook(pre, with_kwargs=True).remove]


def _hook_stream(run: Run, column: nn.Module, parent: nn.Module) -> list[Callable[[], None]]:
    """From a column-parallel layer on, random numbers are this rank's own; the pair's end or its module's ends that."""

    def enter(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if module.training:
            run.streams.enter(output.device)

    def leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        run.streams.leave()

    return [
        column.register_forward_hook(enter).remove,
        parent.register_forward_hook(leave, always_call=True).remove,
    ]


def _hook_model(handle: TensorParallel, run: Run, model: nn.Module, plan: Plan) -> list[Callable[[], None]]:
    """The loss on parts of the logits, and no state of a pair left behind at the forward's end."""
    head = output_head(model)
    undos: list[Callable[[], None]] = []
    lazy: vocab.LazyLogits | None = None
    if head is not None and plan.get(head) == "vocabulary_head" and vocab.splits_loss(model):
        whole = _whole_vocabulary(model.get_submodule(head))
        lazy = vocab.LazyLogits(run.ranks, whole)
        undos.append(_set_loss(model, vocab.VocabularyLoss(run.ranks, whole, model.loss_function)))  # type: ignore[arg-type]

    def pre(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        run.leave()
        returns_dict = kwargs.get("return_dict", getattr(getattr(module, "config", None), "return_dict", True))
        # A loss that was set after this model was split gets whole logits.
        known = lazy is not None and isinstance(module.loss_function, vocab.VocabularyLoss)
        asked = known and torch.is_grad_enabled() and returns_dict is not False
        run.local_logits = asked and vocab.takes_labels(module, args, kwargs)

    def post(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        run.leave()
        local, run.local_logits = run.local_logits, False
        return lazy.wrap(output) if local and lazy is not None and isinstance(output, ModelOutput) else output

    undos.append(model.register_forward_pre_hook(pre, with_kwargs=True).remove)
    handle.output_hook = model.register_forward_hook(post, always_call=True)
    undos.append(handle.output_hook.remove)
    return undos


def _whole_vocabulary(head: nn.Module) -> int:
    assert isinstance(head, nn.Linear)
    return head.out_features


def _set_loss(model: nn.Module, loss: vocab.VocabularyLoss) -> Callable[[], None]:
    before = model.__dict__.get("_loss_function")
    model.loss_function = loss  # type: ignore[assignment]

    def undo() -> None:
        if before is None:
            del model._loss_function
        else:
            model.loss_function = before

    return undo
