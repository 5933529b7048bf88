"""Bytes this rank holds for training, by owner, each storage once.

    owner           what is counted
    parameters      what `model.parameters()` store here: shards at ZeRO 1-3 (padding included), whole at 0
    gathered        whole parameters that a unit needs while it runs (FSDP2's all-gather outputs that are allocated),
                    and the part of them that a secondary group keeps for backward
    gradients       reduced gradients (`p.grad`) and whole ones that wait for their reduction; what wrappers of an
                    optimizer (DeepSpeed's) keep in attributes named after gradients
    optimizer       state of the optimizers, and masters that only they hold
    buffers         buffers of the modules
    communication   buffers of collectives that are still referenced (inputs of reductions, outputs of gathers), and
                    all else that wrappers of an optimizer keep

A tied or viewed storage counts once, for the first owner in this order. `measure_memory` looks now; `sample_memory`
looks at every collective, module boundary, accumulated gradient and optimizer step of a block, and keeps the peaks.
Activations are not counted: see `resident` for all of the process.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, is_dataclass, replace
from typing import TYPE_CHECKING, Any

from hfdist.measure import resident, wire

if TYPE_CHECKING:
    from typing import TypeAlias

    import torch
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    Models: TypeAlias = torch.nn.Module | Iterable[torch.nn.Module]
    Optimizers: TypeAlias = torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None

OWNERS = ("parameters", "gathered", "gradients", "optimizer", "buffers", "communication")


@dataclass(frozen=True, kw_only=True)
class MemoryReport:
    """Bytes on this rank. `peak_*` are of a sampled block (None otherwise); an owner's peak has its own moment."""

    parameters: int = 0
    gathered: int = 0
    gradients: int = 0
    optimizer: int = 0
    buffers: int = 0
    communication: int = 0
    # Without padding: elements of the local parameters and of their reduced gradients times their size.
    logical_parameters: int = 0
    logical_gradients: int = 0
    peak_parameters: int | None = None
    peak_gathered: int | None = None
    peak_gradients: int | None = None
    peak_optimizer: int | None = None
    peak_buffers: int | None = None
    peak_communication: int | None = None
    # The most of everything at one moment.
    peak_total: int | None = None
    # Of the whole process, as the system counts it; None where it does not say.
    resident: int | None = None
    resident_peak: int | None = None

    @property
    def total(self) -> int:
        """All owners together."""
        return sum(getattr(self, owner) for owner in OWNERS)


def measure_memory(models: Models, optimizers: Optimizers = None) -> MemoryReport:
    """What this rank holds now. Optimizers may be torch's or wrapped (`.optimizer`)."""
    owned, logical = _count(_listed(models), _listed(optimizers))
    return MemoryReport(
        **owned,
        logical_parameters=logical[0],
        logical_gradients=logical[1],
        resident=resident.resident_bytes(),
        resident_peak=resident.peak_resident_bytes(),
    )


class MemorySampler:
    """Peaks of a block; `report` holds them next to what is held at the end of it."""

    def __init__(self, models: list[torch.nn.Module], optimizers: list[Any]) -> None:
        from torch.utils.weak import WeakIdKeyDictionary

        self.models, self.optimizers = models, optimizers
        self.peaks = dict.fromkeys(OWNERS, 0)
        self.peak_total = 0
        self.at_peak_total: dict[str, int] = dict(self.peaks)
        self.num_samples = 0
        self.report = MemoryReport()
        # Weak: a parameter that goes (a stage switch) must not be kept alive by being watched.
        self._watched = WeakIdKeyDictionary()

    def sample(self) -> None:
        """Look now."""
        owned, _ = _count(self.models, self.optimizers)
        for owner, nbytes in owned.items():
            self.peaks[owner] = max(self.peaks[owner], nbytes)
        total = sum(owned.values())
        if total > self.peak_total:
            self.peak_total, self.at_peak_total = total, owned
        self.num_samples += 1

    def finish(self) -> None:
        self.sample()
        peaks: dict[str, Any] = {f"peak_{owner}": nbytes for owner, nbytes in self.peaks.items()}
        self.report = replace(measure_memory(self.models, self.optimizers), **peaks, peak_total=self.peak_total)

    def watch_gradients(self, module: torch.nn.Module) -> None:
        """Look whenever a gradient of one of `module`'s own parameters was accumulated (FSDP2 swaps these objects)."""
        for parameter in module._parameters.values():
            if (
                parameter is not None
                and parameter.requires_grad
                and parameter.is_leaf
                and parameter not in self._watched
            ):
                self._watched[parameter] = parameter.register_post_accumulate_grad_hook(lambda _: self.sample())

    def unwatch_gradients(self) -> None:
        for handle in list(self._watched.values()):
            handle.remove()
        self._watched.clear()


@contextmanager
def sample_memory(models: Models, optimizers: Optimizers = None) -> Iterator[MemorySampler]:
    """Keep the peaks of a block, by owner and in total. Slows it: every look walks all parameters."""
    sampler = MemorySampler(_listed(models), _listed(optimizers))

    def before(module: torch.nn.Module, _: Any) -> None:
        sampler.watch_gradients(module)
        sampler.sample()

    with ExitStack() as undo:
        undo.enter_context(wire.listen(lambda *_: sampler.sample()))
        undo.callback(sampler.unwatch_gradients)
        for module in {id(m): m for model in sampler.models for m in model.modules()}.values():
            undo.callback(module.register_forward_pre_hook(before).remove)
            # First in line, while the unit is still whole.
            undo.callback(module.register_forward_hook(lambda *_: sampler.sample(), prepend=True).remove)
        for optimizer in sampler.optimizers:
            inner = _unwrapped(optimizer)
            undo.callback(inner.register_step_pre_hook(lambda *_: sampler.sample()).remove)
            undo.callback(inner.register_step_post_hook(lambda *_: sampler.sample()).remove)
        sampler.sample()
        yield sampler
        sampler.finish()


# --------------------------------------------------------------------------------------------------- counting


class _Storages:
    """Adds up storages, each once."""

    def __init__(self) -> None:
        self._seen: set[int] = set()

    def add(self, tensor: object) -> int:
        """Bytes of the storage behind `tensor` (a DTensor's is its local one) if it is new, else 0."""
        import torch

        if not isinstance(tensor, torch.Tensor) or tensor.device.type == "meta":
            return 0
        storage = _local(tensor).untyped_storage()
        nbytes, address = storage.nbytes(), storage.data_ptr()
        if nbytes == 0 or address in self._seen:
            return 0
        self._seen.add(address)
        return nbytes


def _count(models: list[torch.nn.Module], optimizers: list[Any]) -> tuple[dict[str, int], tuple[int, int]]:
    storages = _Storages()
    owned = dict.fromkeys(OWNERS, 0)
    groups = [group for model in models for group in _fsdp_groups(model)]
    fsdp_params = [param for group in groups for param in group.fsdp_params]
    # While a unit is gathered, `model.parameters()` are its copies: the shards come from FSDP2.
    shards = [param.sharded_param for param in fsdp_params]
    copies = {id(param._unsharded_param) for param in fsdp_params if hasattr(param, "_unsharded_param")}
    # What a secondary group keeps from forward to backward.
    copies |= {id(kept) for param in fsdp_params if (kept := _secondary(param, "_param")) is not None}
    plain = [p for model in models for p in model.parameters() if id(p) not in copies]
    parameters = list({id(p): p for p in (*shards, *plain)}.values())

    for parameter in parameters:
        owned["parameters"] += storages.add(parameter)
        # DeepSpeed's ZeRO-3 keeps the shard beside an empty parameter.
        owned["parameters"] += storages.add(getattr(parameter, "ds_tensor", None))
    for param in fsdp_params:
        for tensor in (*param.all_gather_outputs, *param._unsharded_inner_tensors):
            owned["gathered"] += storages.add(tensor)
        owned["gathered"] += storages.add(_secondary(param, "_param_data"))
    for parameter in parameters:
        owned["gradients"] += storages.add(parameter.grad)
    for param in fsdp_params:
        owned["gradients"] += storages.add(param.unsharded_accumulated_grad)
        if hasattr(param, "_unsharded_param"):
            owned["gradients"] += storages.add(param._unsharded_param.grad)
    for group in groups:
        owned["gradients"] += storages.add(group._partial_reduce_output)
    for optimizer in optimizers:
        inner = _unwrapped(optimizer)
        for tensor in _tensors([*inner.state.values(), *(group["params"] for group in inner.param_groups)]):
            owned["optimizer"] += storages.add(tensor)
        for parameter in (p for settings in inner.param_groups for p in settings["params"]):
            owned["gradients"] += storages.add(parameter.grad)
        for name, tensor in _kept_by_wrappers(optimizer):
            owned["gradients" if "grad" in name else "communication"] += storages.add(tensor)
    for model in models:
        for buffer in model.buffers():
            owned["buffers"] += storages.add(buffer)
    for group in groups:
        for tensor in _in_flight(group):
            owned["communication"] += storages.add(tensor)
    logical = (
        sum(_local(p).nbytes for p in parameters),
        sum(_local(p.grad).nbytes for p in parameters if p.grad is not None),
    )
    return owned, logical


def _fsdp_groups(model: torch.nn.Module) -> list[FSDPParamGroup]:
    """FSDP2's units of `model`. Private API of torch 2.13, read only."""
    from torch.distributed.fsdp import FSDPModule

    return [
        group
        for module in model.modules()
        if isinstance(module, FSDPModule)
        for group in module._get_fsdp_state()._fsdp_param_groups
    ]


def _secondary(param: Any, kind: str) -> torch.Tensor | None:
    """FSDP2's attribute for a unit that is sharded over another group after its forward; it comes with the first."""
    return getattr(param, f"_sharded_post_forward{kind}", None)


def _in_flight(group: FSDPParamGroup) -> Iterator[torch.Tensor]:
    """Buffers that FSDP2 keeps until a collective it has issued is no longer needed."""
    results = [group._all_gather_result]
    # The context gets its attributes with the first forward.
    context = vars(group.comm_ctx)
    if context.get("all_gather_state") is not None:
        results.append(context["all_gather_state"].all_gather_result)
    yield from (result.all_gather_output for result in results if result is not None)
    yield from (state.reduce_scatter_input for state in context.get("reduce_scatter_states", ()))
    if group._all_reduce_state is not None:
        yield group._all_reduce_state.all_reduce_input


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of `tensor` on this rank."""
    local = getattr(tensor, "_local_tensor", None)
    return tensor if local is None else local


def _tensors(value: object) -> Iterator[torch.Tensor]:
    """Tensors anywhere in nested dicts, lists and tuples, and in those that a dataclass among them has."""
    import torch

    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for entry in value.values():
            yield from _tensors(entry)
    elif isinstance(value, (list, tuple)):
        for entry in value:
            yield from _tensors(entry)
    elif is_dataclass(value) and not isinstance(value, type):
        # Its own containers only (DeepSpeed's buckets): an object may refer to all the world.
        for entry in vars(value).values():
            if isinstance(entry, (list, tuple, dict)):
                yield from _tensors([item for item in _items(entry) if not is_dataclass(item)])


def _items(container: Any) -> list[Any]:
    return list(container.values()) if isinstance(container, dict) else list(container)


def _kept_by_wrappers(optimizer: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """(attribute, tensor) of what the wrappers around torch's optimizer hold themselves."""
    while hasattr(optimizer, "optimizer"):
        for name, value in vars(optimizer).items():
            yield from ((name, tensor) for tensor in _tensors(value))
        optimizer = optimizer.optimizer


def _unwrapped(optimizer: Any) -> torch.optim.Optimizer:
    """torch's optimizer inside accelerate's or DeepSpeed's wrappers."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def _listed(value: Any) -> list[Any]:
    """None, one or several as a list (a module with children is one, also when it can be iterated)."""
    import torch

    if value is None:
        return []
    if isinstance(value, torch.nn.Module) or not isinstance(value, Iterable):
        return [value]
    return list(value)
