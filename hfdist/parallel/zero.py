"""ZeRO 0-3 as one policy over FSDP2: which mesh, what is kept between passes, when gradients are reduced.

    stage   mesh                 after forward   before the last micro-step        gradients
    0       (N, 1) replicated    copy freed      whole, not reduced                all-reduced once
    1       sharded              copy kept       whole, not reduced, copy kept     reduce-scattered once
    2       sharded              copy kept       reduce-scattered, copy kept       reduce-scattered every micro-step
    3       sharded              freed           reduce-scattered, freed           reduce-scattered every micro-step

After the last backward of a window every stage is at rest: `model.parameters()` are the sharded DTensors and their
`.grad` the reduced gradients, so clipping, logging and stepping look the same at all stages. The working copy that
stages 1 and 2 keep is gathered at the next forward: one gather per optimizer step.

Units are the model's blocks and the root (everything else). Ranks meet before every unit's collectives (`hfdist.comm`);
on CPU ranks these move tensors without FSDP2's flat buffers (`direct.py`), and at stage 0 in full precision the copy is
the stored parameter itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.utils.hooks import RemovableHandle

from hfdist import comm
from hfdist.errors import ConfigError, say
from hfdist.mesh import DataMesh
from hfdist.models.blocks import find_blocks, named_blocks
from hfdist.parallel import direct, fsdp, quantize

if TYPE_CHECKING:
    from hfdist.parallel.split import SplitModel


@dataclass(eq=False)
class ZeroModel:
    """A model sharded in place, and what is needed to run, switch and undo it."""

    model: nn.Module
    mesh: DataMesh
    meeting: comm.Meeting
    mp_policy: MixedPrecisionPolicy
    stage: int
    blocks: list[tuple[str, nn.Module]]
    replicated: list[nn.Parameter]  # 0-dim parameters, which FSDP2 refuses: kept whole, gradients all-reduced
    conditional: bool = False
    int8: bool = False  # matrices travel as int8 when they are gathered
    secondary_shard_size: int | None = None  # stage 3: ranks that keep blocks among themselves
    split: SplitModel | None = None  # of a model that is also split over tensor or pipeline ranks
    before_reduce: Callable[[fsdp.FSDPParamGroup], None] | None = None  # with a unit's whole gradients
    window_open: bool = False  # between a micro-step without and the one with gradient synchronisation
    used: set[fsdp.FSDPParam] = field(default_factory=set)  # conditional modules: got a gradient on this rank
    unit_numbers: dict[str, int] = field(default_factory=dict)
    _after_forward: RemovableHandle | None = None

    @property
    def units(self) -> list[tuple[str, nn.Module]]:
        """Blocks, then the root (named after the model's class)."""
        return [*self.blocks, (type(self.model).__name__.removeprefix("FSDP"), self.model)]

    @property
    def modules(self) -> list[nn.Module]:
        return [module for _, module in self.units]

    def parameters(self) -> list[nn.Parameter]:
        """Every parameter in its sharded form, and the 0-dim ones."""
        return [param.sharded_param for param in fsdp.iterate_params(self.modules)] + self.replicated

    def shard_unit(self, name: str, module: nn.Module) -> None:
        """`fully_shard` one unit on the mesh of the current stage and route its collectives through `comm`."""
        if module is self.model and self._after_forward is not None:
            self._after_forward.remove()
        fully_shard(
            module,
            mesh=self.mesh.for_stage(self.stage),
            mp_policy=self.mp_policy,
            ignored_params=set(self.replicated),
            reshard_after_forward=True,
        )
        fsdp.refuse_deepcopy(module)
        if module is self.model:
            # After FSDP2's own hook, so that it also finds the root at rest.
            self._after_forward = module.register_forward_hook(self._rest_after_forward)
            if self.split is not None and self.split.tensor is not None:
                self.split.tensor.finish_last()
        if name not in self.unit_numbers:
            self.unit_numbers[name] = self.meeting.unit(name)
        group = fsdp.param_group(module)
        if group is None:
            return
        unit = self.unit_numbers[name]
        unit_module = fsdp.as_fsdp(module)
        packed = group if self.int8 else None
        unit_module.set_custom_all_gather(_MetAllGather(self.meeting, unit, name, packed))
        unit_module.set_custom_reduce_scatter(_CountedReduceScatter(name))
        if direct.gathers(group):

            def meet(collective: Callable[[], None]) -> None:
                self.meeting.run(comm.GATHER, unit, collective=collective)

            group.unshard = (  # type: ignore[method-assign]
                lambda async_op=False: direct.unshard(group, meet, name, int8=self.int8)
            )
            # A gather is complete when it returns, so that an early one would only hold memory.
            group._backward_prefetch = lambda: None  # type: ignore[method-assign]
        original = group.post_backward
        # FSDP2 has no public place between a unit's backward and its reduction.
        group.post_backward = (  # type: ignore[method-assign]
            lambda *unused: self._post_backward(group, unit, name, original)
        )

    def apply_policy(self) -> None:
        """Set what FSDP2 keeps and frees according to the stage, for the last (or only) micro-step of a window."""
        for _, module in self.blocks:
            fsdp.as_fsdp(module).set_reshard_after_forward(self.stage in (0, 3), recurse=False)
            if self.stage == 3 and self.secondary_shard_size is not None:
                fsdp.keep_secondary(module, self.mesh.secondary(self.secondary_shard_size))
        # The root is needed again at once when backward starts, so stage 3 keeps it, as FSDP2 does by default.
        root = fsdp.as_fsdp(self.model)
        root.set_reshard_after_forward(self.stage == 0, recurse=False)
        root.set_requires_gradient_sync(True)
        root.set_reshard_after_backward(True)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """A micro-step that is not the last of its window."""
        self.window_open = True
        root = fsdp.as_fsdp(self.model)
        if self.stage <= 1:
            root.set_requires_gradient_sync(False)
        else:
            # With replicas: reduce-scatter inside each replica every micro-step, all-reduce across them once.
            root.set_requires_all_reduce(False)
        if self.stage in (1, 2):
            root.set_reshard_after_backward(False)
        try:
            yield
        finally:
            self.apply_policy()

    def reshard(self) -> None:
        """Put every unit at rest: sharded parameters registered, gathered copies freed. No communication."""
        for module in self.modules:
            fsdp.as_fsdp(module).reshard()
            fsdp.drop_secondary(module)

    def _rest_after_forward(self, module: nn.Module, args: object, output: object) -> None:
        """After a forward without gradients every unit is at rest, so that `model.parameters()` are those that train.

        (Stages 1 and 2 gather once more for the next forward: a copy that was kept could also be out of date by then.)
        After one with gradients: the backward must be announced, also of tensors that FSDP2 does not find in `output`.
        """
        if module is not self.model:  # a pipeline stage's view: it is gathered around the whole schedule
            return
        if not torch.is_grad_enabled():
            self.reshard()
            return
        for tensor in _hidden_tensors(output):
            fsdp.announce_backward(self.model, tensor)

    def reset(self) -> None:
        """Forget an interrupted pass (an exception in forward or backward) with its gradients."""
        with contextlib.suppress(RuntimeError):  # raised when no forward ever ran: nothing to reset
            fsdp.as_fsdp(self.model).reset_iter_state()
        self.reshard()
        for param in fsdp.iterate_params(self.modules):
            param.unsharded_accumulated_grad = None
            if hasattr(param, "_unsharded_param"):
                param._unsharded_param.grad = None
            param.sharded_param.grad = None
        self.used.clear()
        self.window_open = False
        self.apply_policy()

    def sharded_of(self) -> dict[int, nn.Parameter]:
        """id(gathered copy) -> sharded parameter, for a caller that holds copies (taken while a unit was gathered)."""
        return {
            id(param._unsharded_param): param.sharded_param
            for param in fsdp.iterate_params(self.modules)
            if hasattr(param, "_unsharded_param")
        }

    def _post_backward(self, group: fsdp.FSDPParamGroup, unit: int, name: str, original: Callable[[], None]) -> None:
        """Meet before a unit's gradients are reduced; the parameters that have one must be the same on all ranks."""
        fsdp.accumulate_as_computed(group)
        flags = [fsdp.has_gradient(param) for param in group.fsdp_params]
        if not group.reduce_grads or not any(flags):
            original()
            return
        if self.before_reduce is not None:
            self.before_reduce(group)
        if self.conditional:
            self.used.update(param for param, flag in zip(group.fsdp_params, flags, strict=True) if flag)
        detail = 0 if self.conditional else comm.checksum(flags)

        def describe() -> str:
            names = [fsdp.name_of(p) for p, flag in zip(group.fsdp_params, flags, strict=True) if flag]
            return f"reduces the gradients of {', '.join(names)}"

        def meet(collective: Callable[[], None]) -> None:
            self.meeting.run(comm.REDUCE, unit, detail, collective, describe)

        if direct.reduces(group):
            direct.reduce(group, meet, name, unused=self.conditional)
            return
        if self.meeting.group is not None:
            _try_buffers(group)

        def reduce() -> None:
            # Conditional modules: ranks reduce the same parameters whatever each used; what it did not use counts zero.
            group.reduce_scatter_unused_params = self.conditional
            try:
                original()
            finally:
                group.reduce_scatter_unused_params = False

        meet(reduce)
        _record_all_reduce(group, flags, name, whole_group=self.conditional)


def _hidden_tensors(output: object) -> list[torch.Tensor]:
    """Tensors with a gradient in the attributes of objects that are no pytree (a custom output class)."""
    leaves = [leaf for leaf in torch.utils._pytree.tree_leaves(output) if hasattr(leaf, "__dict__")]
    held = [vars(leaf) for leaf in leaves if not isinstance(leaf, (torch.Tensor, nn.Module))]
    return [t for t in torch.utils._pytree.tree_leaves(held) if isinstance(t, torch.Tensor) and t.requires_grad]


def build_zero_model(
    model: nn.Module,
    mesh: DataMesh,
    meeting: comm.Meeting,
    *,
    stage: int,
    mp_policy: MixedPrecisionPolicy,
    block_classes: tuple[str, ...] | None = None,
    block_names: Iterable[str] | None = None,
    conditional: bool = False,
    int8: bool = False,
    secondary_shard_size: int | None = None,
) -> ZeroModel:
    """What `apply_zero` will shard, worked out but not yet done. Raises ConfigError for what cannot be sharded.

    `block_names`: a pipeline stage's own blocks, which its structure may no longer show.
    """
    _refuse_what_sharding_loses(model)
    if block_names is None or block_classes is not None:
        blocks = find_blocks(model, block_classes)
    else:
        blocks = named_blocks(model, block_names)
    replicated = [p for p in model.parameters() if p.ndim == 0]
    if secondary_shard_size == mesh.shape(3)[1]:  # the group of all: what stage 3 does anyway
        secondary_shard_size = None
    zero = ZeroModel(
        model, mesh, meeting, mp_policy, stage, blocks, replicated, conditional, int8, secondary_shard_size
    )
    for name, module in zero.units:
        inside = [b for _, b in blocks] if module is model else []
        _check_one_dtype(name, module, inside)
    return zero


def _refuse_what_sharding_loses(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
            raise ConfigError(
                say(
                    given=f"{name} with max_norm={module.max_norm}, which rewrites its weight in every forward",
                    expected="weights that only the optimizer changes; a rewritten gathered copy is lost",
                    do="Build it without max_norm and normalise inside accelerator.gathered_parameters(model).",
                )
            )
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks:
            raise ConfigError(
                say(
                    given=f"a hook on {name} (Tensor.register_hook), which sharding would lose",
                    expected="hooks of register_post_accumulate_grad_hook, which see the reduced gradient",
                    do="Register it so, or read and change p.grad after accelerator.backward().",
                )
            )


def apply_zero(zero: ZeroModel, device: torch.device, *, synchronise: bool = True) -> None:
    """Shard every unit in place, block by block.

    `synchronise`: parameters are first made rank 0's (as DDP does), a unit at a time, so that no rank ever holds more
    than what it had plus one unit. Off for a model on "meta", or one whose ranks are known to be equal.
    """
    for name, module in zero.units:
        if synchronise:
            for parameter in module.parameters():
                if not isinstance(parameter, torch.distributed.tensor.DTensor) and not parameter.is_meta:
                    _make_equal(parameter, device, zero.mesh.group)
        zero.shard_unit(name, module)
    if synchronise:
        for buffer in zero.model.buffers():
            if not buffer.is_meta:
                _make_equal(buffer, device, zero.mesh.group)
    zero.apply_policy()


@torch.no_grad()
def _make_equal(tensor: torch.Tensor, device: torch.device, group: dist.ProcessGroup | None) -> None:
    # FSDP2 wants contiguous parameters; `.data` keeps the Parameter object, which optimizers refer to.
    if tensor.device != device or not tensor.is_contiguous():
        tensor.data = tensor.data.to(device).contiguous()
    comm.broadcast(tensor.data, group, label="initial weights")


def _check_one_dtype(name: str, module: nn.Module, inside: list[nn.Module]) -> None:
    elsewhere = {id(p) for block in inside for p in block.parameters()}
    by_dtype: dict[torch.dtype, str] = {}
    for parameter_name, parameter in module.named_parameters():
        if parameter.requires_grad and parameter.ndim and id(parameter) not in elsewhere:
            by_dtype.setdefault(parameter.dtype, parameter_name)
    if len(by_dtype) > 1:
        found = ", ".join(f"{n} is {str(d).removeprefix('torch.')}" for d, n in by_dtype.items())
        raise ConfigError(
            say(
                given=f"trainable parameters of several dtypes in unit {name} ({found})",
                expected="one dtype for the trainable parameters of a unit",
                do="Load the model in one dtype (`dtype=torch.float32`), or turn on mixed precision, which keeps fp32 "
                "masters of all of them.",
            )
        )


class _MetAllGather(AllGather):
    """FSDP2's all-gather, after the ranks agreed on the unit; the matrices of `packed` travel as int8."""

    def __init__(
        self, meeting: comm.Meeting | None, unit: int, name: str, packed: fsdp.FSDPParamGroup | None = None
    ) -> None:
        self.meeting, self.unit, self.name, self.packed = meeting, unit, name, packed

    def without_meeting(self) -> _MetAllGather:
        """The same gather for a rank that has met the others already."""
        return _MetAllGather(None, self.unit, self.name, self.packed)

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> None:
        def gather() -> None:
            # A secondary group passes on what travelled once already.
            if self.packed is not None and group.size() == fsdp.shard_group(self.packed).size():
                quantize.gather_flat(output_tensor, input_tensor, fsdp.parts(self.packed), group, self.name)
            else:
                comm.all_gather(output_tensor, input_tensor, group, self.name)

        if self.meeting is None:
            gather()
        else:
            if self.meeting.group is not None:
                torch.empty_like(output_tensor)  # as `_try_buffers`: gloo makes a second copy of a gather's output
            self.meeting.run(comm.GATHER, self.unit, collective=gather)


class _CountedReduceScatter(ReduceScatter):
    """FSDP2's reduce-scatter at the bound on gloo too; the ranks met before, in `_post_backward`."""

    def __init__(self, name: str) -> None:
        self.name = name

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        mean = op == dist.ReduceOp.AVG
        comm.reduce_scatter(output_tensor, input_tensor, group, mean=mean, label=self.name)


def _try_buffers(group: fsdp.FSDPParamGroup) -> None:
    """Allocate and free what the reduction will need, so that a rank without memory fails before the others wait."""
    numel = sum(p._orig_size.numel() for p in group.fsdp_params if fsdp.has_gradient(p))
    torch.empty(3 * numel, dtype=group._reduce_dtype or group._orig_dtype, device=group.device)


def _record_all_reduce(group: fsdp.FSDPParamGroup, flags: list[bool], name: str, *, whole_group: bool) -> None:
    """FSDP2 calls the all-reduce over replicas itself; count what it sends."""
    replicas = getattr(group.mesh_info, "replicate_process_group", None)
    if replicas is None or replicas.size() == 1 or not group.all_reduce_grads or not comm.wire.is_recording():
        return
    params = [p for p, flag in zip(group.fsdp_params, flags, strict=True) if flag or whole_group]
    dtype = group._reduce_dtype or params[0].param_dtype or params[0].orig_dtype
    nbytes = sum(p.padded_sharded_param_size.numel() for p in params) * dtype.itemsize
    size = replicas.size()
    comm.wire.record("all_reduce", 2 * nbytes * (size - 1) // size, group_size=size, label=name)
