"""The one file that touches FSDP2's private side (torch 2.13): its parameter groups, whole parameters, undoing it.

`fully_shard` has no public way back. Undoing it here means: hooks removed, the class restored, plain whole parameters
registered again (ties kept), contract state deleted, so that `fully_shard` can be applied anew on another mesh.
Tested against every torch minor version that `pyproject.toml` allows (`tests/parity/test_switch.py`).
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, cast

import torch
from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor

from hfdist import comm
from hfdist.errors import DistributedError, say
from hfdist.parallel.quantize import Part


def as_fsdp(module: nn.Module) -> FSDPModule:
    """The same module after `fully_shard`, which mixes FSDPModule into its class at run time."""
    return cast(FSDPModule, module)


def param_group(module: nn.Module) -> FSDPParamGroup | None:
    """The group of parameters that `fully_shard(module)` manages; None when it has no parameter of its own."""
    return as_fsdp(module)._get_fsdp_state()._fsdp_param_group


def iterate_params(units: list[nn.Module]) -> Iterator[FSDPParam]:
    """Every managed parameter of `units`, each once."""
    for unit in units:
        group = param_group(unit)
        if group is not None:
            yield from group.fsdp_params


def local_shard(param: FSDPParam) -> torch.Tensor:
    """This rank's rows of `param`, the memory itself."""
    return cast(DTensor, param.sharded_param)._local_tensor


def shard_group(group: FSDPParamGroup) -> torch.distributed.ProcessGroup:
    """The process group over which the group's parameters are sharded (size 1 at stage 0)."""
    assert isinstance(group.mesh_info, FSDPMeshInfo)
    return group.mesh_info.shard_process_group


def is_matrix(param: FSDPParam) -> bool:
    """Whether `param` is a floating-point matrix (or more): what travels as int8 where that is asked for."""
    return len(param._orig_size) >= 2 and param.sharded_param.is_floating_point()


def parts(group: FSDPParamGroup) -> list[Part]:
    """What lies one after another in a rank's part of FSDP2's gather buffer."""
    return [
        Part(param.padded_sharded_param_size.numel(), param.param_dtype or param.orig_dtype, is_matrix(param))
        for param in group.fsdp_params
    ]


def keep_secondary(module: nn.Module, mesh: DeviceMesh) -> None:
    """Let a unit that is freed after forward stay sharded over dim 1 of the 2-D `mesh` until its backward gathers it.

    FSDP2's `reshard_after_forward=int`, which its public switch of that policy cannot say.
    """
    group = param_group(module)
    if group is None:
        return
    kept = group.fsdp_params[0].post_forward_mesh_info
    if kept is None or kept.mesh is not mesh:
        kept = HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
        for param in group.fsdp_params:
            param.post_forward_mesh_info = kept
            param._init_sharded_post_forward_param_metadata(torch.empty(param._orig_size, device="meta"))
    group.post_forward_mesh_info = kept


def drop_secondary(module: nn.Module) -> None:
    """Free what a unit at rest kept for a backward that did not come."""
    for param in iterate_params([module]):
        if getattr(param, "_sharded_post_forward_param_data", None) is not None:
            param._sharded_post_forward_param = param._sharded_post_forward_param_data = None


def accumulate_as_computed(group: FSDPParamGroup) -> None:
    """Whole gradients that wait for a later reduction add up in their own dtype where the reduction's is narrower."""
    for param in group.fsdp_params:
        computed = param.param_dtype or param.orig_dtype
        if param.reduce_dtype is not None and param.reduce_dtype.itemsize < computed.itemsize:
            param.reduce_dtype = None  # the group keeps what it reduces in


def has_gradient(param: FSDPParam) -> bool:
    """Whether a whole (not yet reduced) gradient of `param` waits on this rank."""
    if param.unsharded_accumulated_grad is not None:
        return True
    return hasattr(param, "_unsharded_param") and param._unsharded_param.grad is not None


def name_of(param: FSDPParam) -> str:
    """The parameter's name inside its own module, for messages (`Linear.weight`)."""
    if param._param_fqn:
        return param._param_fqn
    return f"{type(param._module_info.module).__name__.removeprefix('FSDP')}.{param._module_info.param_name}"


@torch.no_grad()
def gather_whole(shard: torch.Tensor, num_rows: int, group: torch.distributed.ProcessGroup) -> torch.Tensor:
    """Local rows `shard` (n/N, ...) of a tensor with `num_rows` rows -> the whole (n, ...), in the shard's own dtype.

    Rows are dealt as FSDP2 deals them: ceil(n / N) to each rank, fewer or none to the last ones. Always a copy.
    """
    if group.size() == 1:
        return shard.clone()
    chunk = -(-num_rows // group.size())
    sent = shard.new_zeros((chunk, *shard.shape[1:]))
    sent[: shard.size(0)] = shard
    whole = shard.new_empty((chunk * group.size(), *shard.shape[1:]))
    comm.all_gather(whole.view(-1), sent.view(-1), group, label="whole parameter")
    return whole if whole.size(0) == num_rows else whole[:num_rows].clone()


@torch.no_grad()
def take_shard(param: FSDPParam, whole: torch.Tensor) -> torch.Tensor:
    """This rank's rows of a `whole` (n, ...) shaped like `param`: its own copy, shaped like the local shard."""
    assert isinstance(param.mesh_info, FSDPMeshInfo)
    rows = param.padded_sharded_param_size[0]
    start = min(param.mesh_info.shard_mesh_rank * rows, whole.size(0))
    return whole[start : start + param.sharded_size[0]].clone()


@contextlib.contextmanager
def unmet(group: FSDPParamGroup) -> Iterator[None]:
    """Inside, the group's gather does not announce itself: the ranks have met already."""
    met = group._all_gather_comm
    group._all_gather_comm = met.without_meeting()  # type: ignore[attr-defined]
    try:
        yield
    finally:
        group._all_gather_comm = met


def carry_over(old: nn.Parameter, new: nn.Parameter) -> None:
    """Give `new` the post-accumulate-grad hooks of `old` and the attributes that a script set on it."""
    hooks = cast("dict[int, Callable[[torch.Tensor], None]] | None", old._post_accumulate_grad_hooks)
    for hook in (hooks or {}).values():
        new.register_post_accumulate_grad_hook(hook)
    for name, value in vars(old).items():
        if name not in vars(new):
            setattr(new, name, value)


def announce_backward(root: nn.Module, tensor: torch.Tensor) -> None:
    """Let the gradient of a root's output tell FSDP2 that backward begins, as it does for tensors that it finds."""
    state = as_fsdp(root)._get_fsdp_state()
    state._register_pre_backward_hook(tensor)


def let_generate_gather(model: nn.Module) -> Callable[[], None]:
    """Let `generate` of an encoder-decoder model find its encoder's embeddings, which belong to the root; the undo.

    It calls the encoder by itself, outside of the model's forward, which gathers the root.
    """
    config = getattr(model, "config", None)
    if not getattr(config, "is_encoder_decoder", False) or not hasattr(model, "generate"):
        return lambda: None
    register_fsdp_forward_method(model, "generate")
    return lambda: model.__dict__.pop("generate", None)


def alias_gathered_form(param: FSDPParam) -> bool:
    """Let the gathered form of an unsharded parameter be the stored tensor itself, if both have one dtype.

    `all_gather_outputs` stays empty then: FSDP2 frees what is listed there.
    """
    if param.mesh_info.shard_mesh_size > 1 or param.param_dtype not in (None, param.sharded_param.dtype):  # type: ignore[union-attr]
        return False
    local, kept = local_shard(param), getattr(param, "_unsharded_param", None)
    if kept is None or kept.data_ptr() != local.data_ptr():  # the stored tensor may be replaced (load_state_dict)
        param._unsharded_param = nn.Parameter(local.detach(), requires_grad=param.sharded_param.requires_grad)
    return True


def make_gathered_form(param: FSDPParam) -> None:
    """Give a parameter that was never gathered on this rank the (empty, freed) gathered form that FSDP2 looks for."""
    if alias_gathered_form(param):
        return
    numel = param.padded_sharded_param_size.numel()
    dtype, size = param.param_dtype or param.orig_dtype, param.mesh_info.shard_mesh_size  # type: ignore[union-attr]
    param.init_all_gather_outputs([numel], [dtype], size, param.device)
    param.init_unsharded_param()
    param.free_unsharded_param()


def undo_fully_shard(module: nn.Module, whole: dict[FSDPParam, torch.Tensor]) -> None:
    """Take `fully_shard` off `module` (not off its children), registering the `whole` plain parameters it managed."""
    state = as_fsdp(module)._get_fsdp_state()
    state._pre_forward_hook_handle.remove()
    state._post_forward_hook_handle.remove()
    for group in state._fsdp_param_groups:
        for handles in (
            group._module_to_pre_save_state_dict_hook_handle,
            group._module_to_pre_load_state_dict_hook_handle,
        ):
            for handle in handles.values():
                handle.remove()
            handles.clear()
        for param in group.fsdp_params:
            param._post_load_hook_handle.remove()
            param._setattr_on_modules(nn.Parameter(whole[param], requires_grad=param.sharded_param.requires_grad))
        # Groups and modules refer to each other; cut the circle so that memory goes now, not at the next collection.
        group.fsdp_params = []
        group.modules = ()
        for replaced in ("post_backward", "unshard", "_backward_prefetch"):
            group.__dict__.pop(replaced, None)
    for sharded in state._modules:
        _module_state_mapping.pop(sharded, None)
        for key in (STATE_KEY, REGISTRY_KEY):
            entries = sharded.__dict__.get(key, {})
            for entry in [e for e in entries if e == "fully_shard" or getattr(e, "__name__", "") == "fully_shard"]:
                del entries[entry]
        sharded.__class__ = type(sharded).__mro__[FSDPModule._orig_cls_mro_index]
        for managed in sharded.modules():
            if not isinstance(managed, FSDPModule):
                managed.__dict__.pop("_is_fsdp_managed_module", None)
                managed.__dict__.pop("_fsdp_use_orig_params", None)
    state._fsdp_param_groups = []
    state._modules = ()


def reduce_before_item(meeting: weakref.ref[comm.Meeting]) -> Callable[[], None]:
    """Let `.item()` of a partial DTensor (`p.grad.norm().item()`) give the value over the mesh, after a meeting.

    torch 2.13 gives the local part in silence. Returns the undo.
    """
    handlers = DTensor._op_dispatcher._custom_op_handlers
    scalar = torch.ops.aten._local_scalar_dense.default
    previous = handlers.get(scalar)

    def item(op_call: object, args: tuple[Any, ...], kwargs: object) -> object:
        value: DTensor
        (value,) = args
        alive = meeting()
        if alive is not None and any(placement.is_partial() for placement in value.placements):
            alive.run(comm.SCALARS)
        return value.full_tensor().item()

    handlers[scalar] = item

    def undo() -> None:
        if handlers.get(scalar) is item:
            handlers.pop(scalar)
            if previous is not None:
                handlers[scalar] = previous

    return undo


def _refuse_deepcopy(module: nn.Module, memo: object) -> NoReturn:
    raise DistributedError(
        say(
            given=f"copy.deepcopy() of a sharded {type(module).__name__.removeprefix('FSDP')}",
            expected="a copy that is made of a whole model, before accelerator.prepare() (at stage 3 from_pretrained "
            "loads into shards already)",
            do="Copy first and prepare both (with HFDIST_LOAD_SHARDED=0 at stage 3), or call from_pretrained twice. "
            "accelerator.get_state_dict(model) reads whole values; a moving average can be kept inside "
            "accelerator.gathered_parameters(model).",
        )
    )


def refuse_deepcopy(module: nn.Module) -> None:
    """Say in our words that a sharded module cannot be deep-copied (FSDP2's class says only that it cannot)."""
    type(module).__deepcopy__ = _refuse_deepcopy  # type: ignore[attr-defined]
