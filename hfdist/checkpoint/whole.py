"""Whole parameters from shards: state dicts, `save_pretrained`, and a window in which a user reads and writes them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hfdist import comm
from hfdist.engine.core import Engine
from hfdist.engine.norm import shard_groups
from hfdist.errors import ConfigError, DistributedError, say
from hfdist.parallel import fsdp, loading
from hfdist.parallel.zero import ZeroModel


def whole_tensor(value: torch.Tensor) -> torch.Tensor:
    """A plain copy of a (possibly sharded) tensor, whole; collective when it is sharded."""
    if not isinstance(value, DTensor):
        return value.detach().clone()
    groups = shard_groups(value)
    if not groups:
        return value._local_tensor.detach().clone()
    return fsdp.gather_whole(value._local_tensor.detach(), value.shape[0], groups[0])


def whole_state_dict(engine: Engine, model: nn.Module, *, keep: bool = True) -> dict[str, Any]:
    """`model.state_dict()` of whole plain tensors, tied entries sharing memory. `keep=False`: take part, keep none."""
    if any(shard_groups(p) for p in model.parameters()):  # whole on every rank: nothing to meet for, as under DDP
        engine.meeting.run(comm.SAVE)
    split = None
    for zero in engine.models:
        if zero.model is model:
            zero.reshard()
            split = zero.split
    named = dict(model.named_parameters(remove_duplicate=False))
    seen: dict[int, torch.Tensor] = {}
    state: dict[str, Any] = {}
    for name, value in model.state_dict().items():
        identity = id(named.get(name, value))
        if identity not in seen:
            whole = whole_tensor(value) if isinstance(value, torch.Tensor) else value
            seen[identity] = whole if keep or split is not None else torch.empty(0)
        if keep or split is not None:
            state[name] = seen[identity]
    return state if split is None else split.whole_state(state, keep=keep)


def let_save_pretrained_gather(engine: Engine, model: nn.Module) -> Callable[[], None]:
    """Make `model.save_pretrained(dir)` right on sharded parameters when all ranks call it; returns the undo."""
    if not hasattr(model, "save_pretrained"):
        return lambda: None
    patched: Any = model  # save_pretrained is no method of nn.Module
    original = patched.save_pretrained

    @functools.wraps(original)
    def save_pretrained(save_directory: Any, is_main_process: bool | None = None, **kwargs: Any) -> Any:
        main = engine.grid.rank == 0 if is_main_process is None else is_main_process
        state = kwargs.pop("state_dict", None)
        if state is None:
            state = whole_state_dict(engine, model, keep=main)
        return original(save_directory, is_main_process=main, state_dict=state, **kwargs) if main else None

    patched.save_pretrained = save_pretrained

    def undo() -> None:
        if model.__dict__.get("save_pretrained") is save_pretrained:
            del model.save_pretrained

    return undo


def let_resize_embeddings(zero: ZeroModel, engine: Engine) -> Callable[[], None]:
    """Make `model.resize_token_embeddings(n)` right on sharded embeddings; returns the undo.

    Raises ConfigError once an optimizer holds them: its state has the old shape.
    """
    model: Any = zero.model  # resize_token_embeddings is no method of nn.Module
    if not hasattr(model, "resize_token_embeddings") or "resize_token_embeddings" in model.__dict__:
        return lambda: None
    original = model.resize_token_embeddings

    @functools.wraps(original)
    def resize_token_embeddings(*args: Any, **kwargs: Any) -> Any:
        root = {id(p.sharded_param) for p in fsdp.iterate_params([model])}
        if any(id(p) in root for optimizer in engine.optimizers for p in optimizer.parameters()):
            raise ConfigError(
                say(
                    given="resize_token_embeddings() on a model whose optimizer is prepared",
                    expected="the final vocabulary before accelerator.prepare(optimizer)",
                    do="Resize the model right after loading it.",
                )
            )
        if not args and not kwargs:
            return original()
        with loading.plain_root(zero):
            return original(*args, **kwargs)

    model.resize_token_embeddings = resize_token_embeddings

    def undo() -> None:
        if model.__dict__.get("resize_token_embeddings") is resize_token_embeddings:
            del model.resize_token_embeddings

    return undo


def let_load_whole(zero: ZeroModel) -> Callable[[], None]:
    """Make `model.load_state_dict()` of whole plain tensors right: each rank takes its rows. Returns the undo.

    Tensors of another shape are left as they are, for torch to name them.
    """

    @torch.no_grad()
    def take_rows(module: nn.Module, state: dict[str, Any], prefix: str, *unused: object) -> None:
        zero.reshard()
        if zero.split is not None:
            zero.split.own_part(state, prefix)
        shards = {id(param.sharded_param): param for param in fsdp.iterate_params(zero.modules)}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            param, value = shards.get(id(parameter)), state.get(prefix + name)
            if param is None or not isinstance(value, torch.Tensor) or isinstance(value, DTensor):
                continue
            if value.shape == param._orig_size:
                rows = fsdp.take_shard(param, value.detach()).to(param.sharded_param.device)
                state[prefix + name] = param.to_sharded_dtensor(rows)

    # The first of the root's, so before those of its children, which get their part of what it leaves.
    return zero.model.register_load_state_dict_pre_hook(take_rows).remove


@contextlib.contextmanager
@torch.no_grad()
def gathered_parameters(engine: Engine, model: nn.Module, modifier_rank: int | None) -> Iterator[None]:
    """Plain whole parameters in place of the sharded ones; on leaving, each rank keeps its rows of what is there.

    What is there counts, also where the block assigned a new Parameter, loaded a state dict or froze something. Raises
    ConfigError, on leaving, for a parameter of another shape, removed or untied; the others are kept.
    """
    zero = engine.of(model)
    if zero.split is not None:
        raise ConfigError(
            say(
                given="gathered_parameters() of a model that is split over tensor or pipeline ranks",
                expected="a model that is sharded by ZeRO alone",
                do="Read with accelerator.get_state_dict(model), write with model.load_state_dict().",
            )
        )
    engine.meeting.run(comm.SAVE)
    zero.reshard()
    params = list(fsdp.iterate_params(zero.modules))
    names = {id(p): name for name, p in zero.model.named_parameters()}
    plain = {}
    for param in params:
        plain[param] = nn.Parameter(whole_tensor(param.sharded_param), requires_grad=param.sharded_param.requires_grad)
        param._setattr_on_modules(plain[param])
        # FSDP2 takes what `load_state_dict` leaves for shards; the attribute hides its method until the block ends.
        param.reset_sharded_param = lambda: None  # type: ignore[method-assign]
    # Before FSDP2's own hooks, which would take the plain parameters for theirs.
    refusals = [module.register_forward_pre_hook(_refuse_forward, prepend=True) for module in zero.modules]
    try:
        yield
    finally:
        for refusal in refusals:
            refusal.remove()
        zero.reshard()
        wrong = []
        for param in params:
            name = names[id(param.sharded_param)]
            found, complaint = _registered(param, name)
            if found is None:
                wrong.append(complaint)
            else:
                plain[param] = found
        _keep(plain, engine, modifier_rank)
        if wrong:
            raise ConfigError(
                say(
                    given=f"gathered_parameters() left with {'; '.join(wrong)}",
                    expected="every parameter in its place and shape (those named keep their value before the block)",
                    do="Change shapes and ties before accelerator.prepare(); give tied places one Parameter.",
                )
            )


def _registered(param: fsdp.FSDPParam, name: str) -> tuple[nn.Parameter | None, str]:
    """What the modules hold in the place of `param`, or None and what is wrong with it."""
    info = param._module_info
    places = [(info.module, info.param_name), *zip(info.shared_modules, info.shared_param_names, strict=True)]
    found = [module._parameters.get(place) for module, place in places]
    first = found[0]
    if first is None:
        return None, f"{name} removed"
    if any(other is not first for other in found):
        return None, f"{name} untied: its {len(found)} places hold different Parameters"
    if first.shape != param._orig_size:
        return None, f"{name} of shape {tuple(first.shape)} instead of {tuple(param._orig_size)}"
    return first, ""


def _keep(plain: dict[fsdp.FSDPParam, nn.Parameter], engine: Engine, modifier_rank: int | None) -> None:
    """Put this rank's rows of the `plain` whole parameters (and what is frozen) into the shards, and register those."""
    trains = torch.tensor([p.requires_grad for p in plain.values()], dtype=torch.uint8, device=engine.device)
    if modifier_rank is not None:
        comm.broadcast(trains, engine.mesh.group, src=modifier_rank, label="what is frozen")
    for (param, written), train in zip(plain.items(), trains.tolist(), strict=True):
        shard = fsdp.local_shard(param)
        values = written.detach().to(shard.device, shard.dtype).contiguous()
        if modifier_rank is not None:
            comm.broadcast(values, engine.mesh.group, src=modifier_rank, label="written parameters")
        shard.copy_(fsdp.take_shard(param, values))
        param.sharded_param.requires_grad_(bool(train))
        param.__dict__.pop("reset_sharded_param", None)
        param._setattr_on_modules(param.sharded_param)


def _refuse_forward(*unused: object) -> NoReturn:
    raise DistributedError(
        say(
            given="a forward inside gathered_parameters()",
            expected="reading and writing of parameters only",
            do="Leave the block first; what was written is kept.",
        )
    )
