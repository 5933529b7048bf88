"""The module that a stage runs: a copy of the module objects over the same parameters, made anew for every batch.

A rank with several stages has several views of one model. A view has its own list of blocks (pass-throughs for those of
other stages) and none of FSDP2's hooks and classes; its modules share the `_parameters` and `_buffers` dictionaries of
the originals, so it computes with whatever is in them when it runs, in the mode (train, checkpointing) set right now.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from hfdist.errors import ConfigError
from hfdist.parallel.pipeline.apply import Applied
from hfdist.parallel.pipeline.stand_ins import (
    BlockForm,
    Passage,
    PassThrough,
    StageEnds,
    Stub,
    reaches,
    refuse_reach,
)

_HOOKS = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_backward_pre_hooks",
    "_backward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_always_called",
)


class View(nn.Module):
    """One stage. `forward(received, kwargs)`: the hidden state for the next stage, or the model's output on the last.

    `before(index)` is called as block `index` begins (0 for what comes before the blocks too), for random streams.
    """

    def __init__(self, model: nn.Module, applied: Applied, stage: int, form: BlockForm) -> None:
        super().__init__()
        self.stage = stage
        self.is_last = stage == applied.cut.num_stages - 1
        self._where = f"pipeline stage {stage} of {applied.cut.num_stages} ({_span(applied.cut.names_of(stage))})"
        self._form = form
        self._passage = Passage()
        self._model = build_view(model, applied, stage, self._passage, form)
        self._stubs = [module for module in self._model.modules() if isinstance(module, Stub)]
        self.blocks = [self._model.get_submodule(name) for name in applied.cut.names_of(stage)]

    def use_copies(self) -> dict[nn.Parameter, nn.Parameter]:
        """Compute with copies of the parameters from now on: (the model's -> the copy)."""
        copies: dict[nn.Parameter, nn.Parameter] = {}
        for module in self._model.modules():
            if not any(p is not None for p in module._parameters.values()):
                continue
            for parameter in module._parameters.values():
                if parameter is not None and parameter not in copies:
                    copy = nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)
                    copies[parameter] = copy
            module.__dict__["_parameters"] = {
                name: None if p is None else copies[p] for name, p in module._parameters.items()
            }
        return copies

    def on_block(self, call: Callable[[int], None], first_index: int) -> None:
        """Call `call(index)` before each own block runs. `first_index`: the model's index of the first."""
        for index, block in enumerate(self.blocks, first_index):
            block.register_forward_pre_hook(lambda *_, index=index: call(index))

    def forward(self, received: Tensor | None, kwargs: dict[str, Any]) -> Any:
        """received: (rows, length, hidden), None on the first stage.

        The first one with gradients raises ConfigError if the stage uses more of other stages than that.
        """
        device = next(self.parameters()).device
        looks = torch.is_grad_enabled() and self.stage not in self._form.apart
        mark = torch.zeros((), device=device, requires_grad=True) if looks else None
        self._passage.begin(received, mark)
        sizes = _sizes(kwargs)
        for stub in self._stubs:
            stub.sizes, stub.device, stub.passage = sizes, device, self._passage
        try:
            output = self._model(**kwargs)
            assert self.is_last, "a stage before the last ends at its last block"
        except StageEnds as end:
            output = end.hidden
        except ConfigError:
            raise
        except Exception as error:
            error.add_note(
                f"Raised in {self._where}. If one process can run this batch, the model's blocks use something of "
                "earlier ones beside the hidden state: use ZeRO or tensor parallelism for it."
            )
            raise
        finally:
            self._passage.begin(None)
        if mark is not None:
            if reaches(output, mark):
                raise refuse_reach(self.blocks)
            self._form.apart.add(self.stage)
        return output


def _span(names: tuple[str, ...]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"


def _sizes(kwargs: dict[str, Any]) -> dict[str, int]:
    for name in ("input_ids", "inputs_embeds"):
        if isinstance(kwargs.get(name), Tensor):
            return {"rows": kwargs[name].shape[0], "length": kwargs[name].shape[1]}
    first = next((value for value in kwargs.values() if isinstance(value, Tensor) and value.ndim), None)
    return {} if first is None else {"rows": first.shape[0]}


def build_view(model: nn.Module, applied: Applied, stage: int, passage: Passage, form: BlockForm) -> nn.Module:
    """The copy of `model` for `stage`."""
    cut = applied.cut
    own = cut.range_of(stage)
    copies: dict[int, nn.Module] = {}
    view = _copy(model, copies)
    blocks = view.get_submodule(cut.parts.blocks_prefix)
    owned = [blocks[index] for index in own]  # type: ignore[index]
    if own.stop < len(cut.parts.blocks):
        owned[-1].register_forward_hook(passage.note_output)
    for index, original in enumerate(list(blocks.children())):
        if index in own:
            original.register_forward_pre_hook(lambda block, _, index=index: passage.visit(index, block))
            continue
        through = original if isinstance(original, PassThrough) else PassThrough(original)
        if index < own.start:
            enters = index == own.start - 1  # only the last one puts in what was received
            blocks[index] = through.before_own(passage, owned, form, index, enters=enters)  # type: ignore[operator]
        elif index == own.stop:
            blocks[index] = through.after_own(passage, range(index, len(cut.parts.blocks)))  # type: ignore[operator]
    return view


def _copy(module: nn.Module, copies: dict[int, nn.Module]) -> nn.Module:
    if id(module) in copies:
        return copies[id(module)]
    if not isinstance(module, nn.ModuleList) and not any(True for _ in module.parameters()):
        # What has no parameters may keep state in attributes (rotary embeddings do): one object for all views.
        copies[id(module)] = module
        if not any(isinstance(inner, (PassThrough, FSDPModule)) for inner in module.modules()):
            return module
    kind: type = type(module)
    if isinstance(module, FSDPModule):  # its class is made as (FSDPModule, <the module's own class>)
        kind = next(base for base in kind.__mro__[1:] if not issubclass(base, FSDPModule))
    copy: nn.Module = object.__new__(kind)
    copies[id(module)] = copy
    copy.__dict__ = dict(module.__dict__)
    for name in _HOOKS:
        if name in copy.__dict__:
            copy.__dict__[name] = OrderedDict(
                (key, hook) for key, hook in copy.__dict__[name].items() if not _is_fsdp(module, name, key)
            )
    copy._modules = {name: None if child is None else _copy(child, copies) for name, child in module._modules.items()}
    forward = copy.__dict__.get("forward")
    if forward is not None and hasattr(forward, "pipeline_original"):
        # Ours: what was there before the pipeline, bound to the copy.
        forward = forward.pipeline_original
        copy.__dict__.pop("forward")
        if forward is not None:
            copy.__dict__["forward"] = forward
    if isinstance(forward, MethodType) and forward.__self__ is module:
        copy.__dict__["forward"] = MethodType(forward.__func__, copy)
    return copy


def _is_fsdp(module: nn.Module, name: str, key: Any) -> bool:
    hooks = module._forward_pre_hooks if "pre" in name else module._forward_hooks
    hook = hooks.get(key)
    return getattr(hook, "__module__", "").startswith("torch.distributed.fsdp")
