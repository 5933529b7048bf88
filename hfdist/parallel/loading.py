"""`from_pretrained` straight into shards: no rank ever holds the whole model.

While an Accelerator at stage 3 lives, transformers builds the model on "meta", hfdist shards it there, and
transformers' own loader (which knows every weight conversion) reads just this rank's rows of every tensor. Weights that
the checkpoint lacks are initialised whole on rank 0, one module at a time, and dealt out.

    peak per rank = model / N + the largest tensor that is missing from the checkpoint
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from hfdist import comm
from hfdist.errors import ConfigError, say
from hfdist.parallel import fsdp
from hfdist.parallel.zero import ZeroModel

logger = logging.getLogger(__name__)

# The handle of the model being loaded in this context, or the function that makes it.
_sharder: ContextVar[Callable[[nn.Module], ZeroModel] | None] = ContextVar("hfdist_sharder", default=None)
_loaded: WeakIdKeyDictionary = WeakIdKeyDictionary()  # model -> ZeroModel
# Weak: gives the function that shards a model on meta, or None once its Accelerator has gone.
Sharder = Callable[[], Callable[[nn.Module], ZeroModel] | None]
_installed: list[Callable[[], None]] = []
# Arguments under which transformers places or changes weights by itself.
_NOT_WITH = ("device_map", "tp_plan", "tp_size", "distributed_config", "quantization_config", "gguf_file", "state_dict")


def load_into_shards(shard: Sharder, dtype: torch.dtype | None) -> Callable[[], None]:
    """Make every `from_pretrained` shard with `shard()(model on meta)` as it loads; returns the undo.

    `dtype`: load in this dtype whatever the checkpoint has (fp32 masters under mixed precision); None: as asked for.
    """
    from transformers import PreTrainedModel
    from transformers.distributed.configuration_utils import DistributedConfig

    for undo_previous in list(_installed):  # the newest Accelerator is the one that lives
        undo_previous()
    patched: Any = PreTrainedModel  # its methods are replaced below and put back by the undo
    original = patched.from_pretrained.__func__
    prepare = patched.prepare_distribute_model.__func__
    distribute = patched.maybe_distribute_model.__func__
    initialize = patched._initialize_missing_keys

    @functools.wraps(original)
    def from_pretrained(cls: type, *args: Any, **kwargs: Any) -> Any:
        living = shard()
        if living is None:  # the Accelerator has gone
            return original(cls, *args, **kwargs)
        used = [name for name in _NOT_WITH if kwargs.get(name) is not None]
        if used or not torch.distributed.is_initialized():
            if used:
                logger.warning("from_pretrained(%s=...) loads whole on every rank, then shards.", used[0])
            return original(cls, *args, **kwargs)
        if dtype is not None:
            kwargs.pop("torch_dtype", None)
            kwargs["dtype"] = dtype
        token = _sharder.set(living)
        try:
            # Any config will do: with the three methods below replaced, transformers takes no mesh from it.
            result = original(cls, *args, distributed_config=DistributedConfig(), **kwargs)
        finally:
            _sharder.reset(token)
        model = result[0] if isinstance(result, tuple) else result
        _finish(model)
        return result

    def prepare_distribute_model(cls: type, distributed_config: Any, device_map: Any = None) -> Any:
        if _sharder.get() is None:
            return prepare(cls, distributed_config, device_map)
        return distributed_config, device_map, None

    def maybe_distribute_model(cls: type, model: Any, distributed_config: Any, mesh_manager: Any) -> nn.Module:
        sharder = _sharder.get()
        if sharder is None:
            return distribute(cls, model, distributed_config, mesh_manager)
        with contextlib.suppress(AttributeError):
            del model.config.distributed_config
        model.tie_weights()
        _loaded[model] = sharder(model)
        return model

    def _initialize_missing_keys(model: nn.Module, *args: Any, **kwargs: Any) -> None:
        zero = _loaded.get(model)
        if zero is None:
            initialize(model, *args, **kwargs)
            return
        with _missing_whole(zero):
            initialize(model, *args, **kwargs)

    patched.from_pretrained = classmethod(from_pretrained)
    patched.prepare_distribute_model = classmethod(prepare_distribute_model)
    patched.maybe_distribute_model = classmethod(maybe_distribute_model)
    patched._initialize_missing_keys = _initialize_missing_keys

    def undo() -> None:
        if getattr(patched.from_pretrained, "__func__", None) is from_pretrained:
            patched.from_pretrained = classmethod(original)
            patched.prepare_distribute_model = classmethod(prepare)
            patched.maybe_distribute_model = classmethod(distribute)
            patched._initialize_missing_keys = initialize
        if undo in _installed:
            _installed.remove(undo)

    _installed.append(undo)
    return undo


def loaded_shards(model: nn.Module) -> ZeroModel | None:
    """The handle of a model that was loaded into shards and not prepared yet; the model may sit inside `model`.

    When modules were added around or inside it (adapters, a new head), the units are laid out anew, one at a time.
    Raises ConfigError when `model` has only a part of it.
    """
    for module in model.modules():
        if module in _loaded:
            return _loaded[module]
    mine = {id(p) for p in model.parameters()}
    for loaded in list(_loaded.values()):
        if any(id(p) in mine for p in loaded.model.parameters()):
            name = type(loaded.model).__name__.removeprefix("FSDP")
            raise ConfigError(
                say(
                    given=f"a {type(model).__name__} with a part of a {name} that was loaded straight into shards",
                    expected=f"the whole {name} inside it",
                    do="Load the part itself (AutoModel.from_pretrained gives a body without its head), or set "
                    "HFDIST_LOAD_SHARDED=0.",
                )
            )
    return None


def take_over(loaded: ZeroModel, model: nn.Module, build: Callable[[nn.Module], ZeroModel]) -> ZeroModel:
    """The handle under which `model`, which contains the loaded one, is trained."""
    _loaded.pop(loaded.model, None)
    known = {id(p) for p in model.parameters()} - {id(p) for p in loaded.replicated}
    if loaded.model is model and known == {id(p.sharded_param) for p in fsdp.iterate_params(loaded.modules)}:
        return loaded
    zero = build(model)
    blocks = {id(module) for _, module in zero.blocks}
    old_units = dict(loaded.units)
    for module in [m for m in old_units.values() if id(m) not in blocks and m is not loaded.model]:
        _make_plain(module)
    for name, module in zero.blocks:
        if module in old_units.values():
            _make_plain(module)
        _shard_one(zero, name, module)
    _make_plain(loaded.model)
    _shard_one(zero, *zero.units[-1])
    zero.apply_policy()
    return zero


@contextlib.contextmanager
def plain_root(zero: ZeroModel) -> Iterator[None]:
    """Inside, what belongs to no block (embeddings, head) is whole and plain, to be changed in shape."""
    zero.reshard()
    _make_plain(zero.model)
    yield
    zero.replicated = [p for p in zero.model.parameters() if p.ndim == 0]
    _shard_one(zero, *zero.units[-1])
    zero.apply_policy()


def _make_plain(module: nn.Module) -> None:
    group = fsdp.param_group(module)
    whole = {}
    if group is not None:
        shards = fsdp.shard_group(group)
        for param in group.fsdp_params:
            whole[param] = fsdp.gather_whole(fsdp.local_shard(param).detach(), param._orig_size[0], shards)
    fsdp.undo_fully_shard(module, whole)


def _shard_one(zero: ZeroModel, name: str, module: nn.Module) -> None:
    for parameter in module.parameters():
        if not isinstance(parameter, torch.distributed.tensor.DTensor):
            comm.broadcast(parameter.data, zero.mesh.group, label="added weights")
    zero.shard_unit(name, module)


@contextlib.contextmanager
def _missing_whole(zero: ZeroModel) -> Iterator[None]:
    """Parameters that the checkpoint lacks are whole and plain inside, and rank 0's, dealt out, afterwards."""
    missing = []
    for param in fsdp.iterate_params(zero.modules):
        current = param._module_info.module._parameters[param._module_info.param_name]
        if not getattr(current, "_is_hf_initialized", False):
            missing.append(param)
            plain = nn.Parameter(torch.empty(param._orig_size, dtype=param.sharded_param.dtype, device=param.device))
            param._setattr_on_modules(plain)
    yield
    for param in missing:
        filled = param._module_info.module._parameters[param._module_info.param_name]
        assert filled is not None
        comm.broadcast(filled.data, zero.mesh.group, label="initialised weights")
        shard = nn.Parameter(param.to_sharded_dtensor(fsdp.take_shard(param, filled.data)))
        shard.requires_grad_(filled.requires_grad)
        param._setattr_on_modules(shard)


def _finish(model: nn.Module) -> None:
    """Let FSDP2 take over the parameters that the loader registered; buffers become rank 0's."""
    zero = _loaded.get(model)
    if zero is None:
        return
    for param in fsdp.iterate_params(zero.modules):
        current: Any = param._module_info.module._parameters[param._module_info.param_name]
        # The loader's shards are views into the mapped file: the whole tensor stays mapped, and saving over that file
        # would pull it from under the model.
        current._local_tensor = current._local_tensor.detach().clone()
        param._setattr_on_modules(current)
        param.reset_sharded_param()
    for buffer in model.buffers():
        comm.broadcast(buffer.data, zero.mesh.group, label="buffers")
