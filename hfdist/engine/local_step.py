"""The update itself: `torch.optim` on plain local shards.

An optimizer's `param_groups` and `state` are keyed by the model's DTensor parameters, which is what users and
schedulers see. For the length of one `step()` both are swapped for plain local tensors that share their memory: fused
kernels run, nothing goes through DTensor dispatch. State stays plain and local between steps.

    optimizer.param_groups[0]["params"] = [DTensor (8, 5) sharded]      <- between steps
                                          [Parameter (4, 5)]            <- inside step(), same memory
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hfdist import comm
from hfdist.engine import owner
from hfdist.engine.norm import local_tensor, shard_groups
from hfdist.engine.probe import probe_optimizer
from hfdist.errors import ConfigError, say
from hfdist.parallel.switch import Relayout

# torch optimizers whose fused kernel does the same arithmetic as the loop; used where the user left the choice open.
_FUSED = ("Adam", "AdamW", "SGD", "Adagrad")


@dataclass(eq=False)
class LocalStep:
    """Steps one optimizer on local shards; knows which of its parameters must be stepped whole."""

    optimizer: torch.optim.Optimizer
    meeting: comm.Meeting
    _kinds: dict[tuple[int, int], str] = field(default_factory=dict)
    _locals: dict[nn.Parameter, tuple[torch.Tensor, nn.Parameter]] = field(default_factory=dict)

    def check(self) -> None:
        """Probe every group; raises ConfigError for an optimizer that couples parameters with each other."""
        for index, group in enumerate(self.optimizer.param_groups):
            for parameter in group["params"]:
                self._probed(index, parameter.ndim)

    def _kind(self, index: int, parameter: torch.Tensor) -> str:
        return self._probed(index, parameter.ndim) if shard_groups(parameter) else "element"

    def _probed(self, index: int, ndim: int) -> str:
        key = (index, ndim)
        if key not in self._kinds:
            self._kinds[key] = probe_optimizer(self.optimizer, self.optimizer.param_groups[index], max(ndim, 1))
            if self._kinds[key] == "coupled":
                raise ConfigError(
                    say(
                        given=f"{type(self.optimizer).__name__}, whose update of one parameter depends on the others",
                        expected="an optimizer that treats each parameter by itself, at stages 1 to 3",
                        do="Train at stage 0, or use another optimizer.",
                    )
                )
        return self._kinds[key]

    def owners(self, size: int) -> dict[nn.Parameter, int]:
        """Owner rank, among `size`, of every parameter that is stepped whole; the same for every layout."""
        listed = self.stepped_whole()
        return dict(zip(listed, owner.assign_owners([p.shape for p in listed], size), strict=True))

    def stepped_whole(self) -> list[nn.Parameter]:
        """Parameters whose update needs all of their elements."""
        groups = enumerate(self.optimizer.param_groups)
        return [p for index, group in groups for p in group["params"] if self._probed(index, p.ndim) == "whole"]

    def held_here(self) -> dict[nn.Parameter, bool]:
        """Parameters whose state lives on this rank -> whether it is that of a whole parameter."""
        held: dict[nn.Parameter, bool] = {}
        for index, group in enumerate(self.optimizer.param_groups):
            for parameter in group["params"]:
                if self._kind(index, parameter) == "element":
                    held[parameter] = False
                else:
                    (shards,) = shard_groups(parameter)
                    if self.owners(shards.size())[parameter] == shards.rank():
                        held[parameter] = True
        return held

    @torch.no_grad()
    def step(self) -> None:
        """One `optimizer.step()` on this rank's shards, and on the whole parameters it owns."""
        optimizer = self.optimizer
        groups, state = optimizer.param_groups, optimizer.state
        swapped: list[dict[str, Any]] = []
        local_state: defaultdict[torch.Tensor, Any] = defaultdict(dict)
        keys: dict[torch.Tensor, torch.Tensor] = {}
        exchanges: dict[dist.ProcessGroup, _Exchange] = {}
        placed: list[tuple[list[nn.Parameter], list[nn.Parameter | None]]] = []
        for index, group in enumerate(groups):
            slots: list[nn.Parameter | None] = []
            for parameter in group["params"]:
                if self._kind(index, parameter) == "whole":
                    (shards,) = shard_groups(parameter)
                    if shards not in exchanges:
                        exchanges[shards] = _Exchange(shards, self.owners(shards.size()))
                    exchanges[shards].add(parameter)
                    slots.append(None)
                else:
                    slots.append(self._local(parameter))
            placed.append((group["params"], slots))
        for exchange in exchanges.values():
            self.meeting.run(comm.SCALARS)
            exchange.collect()
        for group, (parameters, slots) in zip(groups, placed, strict=True):
            params = []
            for parameter, slot in zip(parameters, slots, strict=True):
                local = slot if slot is not None else _owned(exchanges, parameter)
                if local is None:
                    continue
                keys[local] = parameter
                if parameter in state:
                    local_state[local] = state[parameter]
                params.append(local)
            swapped.append({**group, "params": params, **self._fused(group, params)})
        optimizer.param_groups, optimizer.state = swapped, local_state
        try:
            optimizer.step()
        finally:
            optimizer.param_groups, optimizer.state = groups, state
            for group, used in zip(groups, swapped, strict=True):
                group.update({k: v for k, v in used.items() if k not in ("params", "fused")})
            for stepped, values in local_state.items():
                state[keys[stepped]] = values
            for stepped, parameter in keys.items():
                if stepped is not parameter:
                    stepped.grad = None  # or it would outlive the user's zero_grad
        for exchange in exchanges.values():
            exchange.hand_back()

    def _local(self, parameter: nn.Parameter) -> nn.Parameter:
        tensor = local_tensor(parameter)
        if tensor is parameter:
            return parameter
        kept = self._locals.get(parameter)
        if kept is None or kept[0] is not tensor:
            kept = self._locals[parameter] = (tensor, nn.Parameter(tensor, requires_grad=parameter.requires_grad))
        kept[1].grad = None if parameter.grad is None else local_tensor(parameter.grad)
        return kept[1]

    def _fused(self, group: dict[str, Any], params: list[nn.Parameter]) -> dict[str, bool]:
        cls = type(self.optimizer)
        known = cls.__module__.startswith("torch.optim") and cls.__name__ in _FUSED and "fused" in group
        if not known or group["fused"] is not None or group.get("foreach") is not None or group.get("differentiable"):
            return {}
        return {"fused": True} if all(p.is_floating_point() and not p.is_sparse for p in params) else {}

    def forget(self, parameter: nn.Parameter) -> None:
        """Drop what is kept for a parameter that no longer exists."""
        self._locals.pop(parameter, None)

    @torch.no_grad()
    def move(self, old: nn.Parameter, new: nn.Parameter, plan: Relayout) -> None:
        """Point the optimizer from `old` to `new`, whose layout differs by `plan`, and move the state along."""
        found = False
        for index, group in enumerate(self.optimizer.param_groups):
            for position, parameter in enumerate(group["params"]):
                if parameter is old:
                    group["params"][position] = new
                    found = True
                    whole = "whole" in (self._kind(index, old), self._kind(index, new))
        self.forget(old)
        if not found:
            return
        state = self.optimizer.state.pop(old, None)
        moved = self._move_whole(state, old, new) if whole else _move_elements(state, plan)
        if moved is not None:
            self.optimizer.state[new] = moved

    def _move_whole(self, state: dict[str, Any] | None, old: nn.Parameter, new: nn.Parameter) -> dict[str, Any] | None:
        """State of a parameter that is stepped whole: everyone's at stage 0, its owner's when sharded."""
        was, becomes = shard_groups(old), shard_groups(new)
        if was and not becomes:
            return _from_the_one_who_has_it(state, was[0])
        if becomes and not was:
            return state if becomes[0].rank() == self.owners(becomes[0].size())[new] else None
        return state


def _move_elements(state: dict[str, Any] | None, plan: Relayout) -> dict[str, Any] | None:
    if state is None:
        return None
    return {
        key: plan.move(value) if isinstance(value, torch.Tensor) and plan.is_like_shard(value) else value
        for key, value in state.items()
    }


def _from_the_one_who_has_it(state: dict[str, Any] | None, group: dist.ProcessGroup) -> dict[str, Any] | None:
    has = torch.zeros(group.size())
    has[group.rank()] = state is not None and len(state) > 0
    comm.all_reduce(has, group, label="owner of state")
    if not has.any():
        return None
    holder = [state]
    dist.broadcast_object_list(holder, group=group, group_src=int(has.argmax()))
    return holder[0]


class _Exchange:
    """The whole-stepped parameters of one shard group, for one step."""

    def __init__(self, group: dist.ProcessGroup, owners: dict[nn.Parameter, int]) -> None:
        self.group, self.owner_of = group, owners
        self.parameters: list[nn.Parameter] = []
        self.whole: dict[nn.Parameter, nn.Parameter] = {}

    def add(self, parameter: nn.Parameter) -> None:
        if parameter.grad is not None:  # without a gradient an optimizer leaves it alone
            self.parameters.append(parameter)

    def collect(self) -> None:
        if not self.parameters:
            return
        self.shapes = [p.shape for p in self.parameters]
        self.owners = [self.owner_of[p] for p in self.parameters]
        self.shards = [local_tensor(p).detach() for p in self.parameters]
        grads = [local_tensor(p.grad) for p in self.parameters if p.grad is not None]
        values = owner.to_owners(self.shards, self.shapes, self.owners, self.group)
        whole_grads = owner.to_owners(grads, self.shapes, self.owners, self.group)
        mine = [p for p, o in zip(self.parameters, self.owners, strict=True) if o == self.group.rank()]
        for parameter, value, gradient in zip(mine, values, whole_grads, strict=True):
            self.whole[parameter] = nn.Parameter(value)
            self.whole[parameter].grad = gradient

    def hand_back(self) -> None:
        if self.parameters:
            whole = [p.detach() for p in self.whole.values()]
            owner.from_owners(whole, self.shards, self.shapes, self.owners, self.group)


def _owned(exchanges: dict[dist.ProcessGroup, _Exchange], parameter: nn.Parameter) -> nn.Parameter | None:
    for exchange in exchanges.values():
        if parameter in exchange.whole:
            return exchange.whole[parameter]
    return None
