"""A model of which this rank holds a part: how its parameters lie in the whole, by name.

Tensor parallelism leaves a rank a piece of a parameter (`Layout`), the pipeline whole parameters of some blocks; a tied
one may be on two stages. What is done with whole parameters (a norm, a state dict) asks here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from hfdist import comm
from hfdist.errors import ConfigError, say
from hfdist.mesh import Grid
from hfdist.parallel.pipeline import Pipeline
from hfdist.parallel.tensor import TensorParallel
from hfdist.parallel.tensor.gradients import reduce_partial_gradients
from hfdist.parallel.tensor.layout import Layout, Replicated, Split


@dataclass(eq=False)
class SplitModel:
    """The handles of the tensor split and the pipeline cut of one model, and the shapes it had before both."""

    model: nn.Module
    grid: Grid
    shapes: dict[str, tuple[int, ...]]  # of every parameter of the whole model, tied names too
    num_parameters: int  # of the whole model
    tensor: TensorParallel | None = None
    pipeline: Pipeline | None = None
    _places: dict[tuple[int, str], Layout] = field(default_factory=dict)  # (module, name in it) -> layout

    def own_blocks(self) -> list[str] | None:
        """Names of this stage's blocks; None without a pipeline."""
        if self.pipeline is None:
            return None
        applied = self.pipeline.applied
        return [name for stage in applied.stages for name in applied.cut.names_of(stage)]

    def name_ties(self) -> None:
        """Let the layouts be found by every name of a tied parameter: a stage may have it under the second only."""
        assert self.tensor is not None
        layouts = {id(p): self.tensor.layouts[name] for name, p in self.model.named_parameters()}
        every = self.model.named_parameters(remove_duplicate=False)
        self.tensor.layouts = {name: layouts[id(p)] for name, p in every}

    def layout(self, name: str) -> Layout:
        """How the parameter `name` of this rank lies over the tensor ranks."""
        return Replicated() if self.tensor is None else self.tensor.layouts[name]

    def parts(self) -> list[tuple[nn.Parameter, tuple[dist.ProcessGroup, ...], float]]:
        """This rank's parameters, the groups whose ranks hold other parts of each, and how much of its part counts.

        In a sum over tensor ranks 1 / copies of a split parameter counts, and all of a whole one (which is not summed);
        over the pipeline what is tied counts on its first stage.
        """
        counted = None if self.pipeline is None else {id(p) for p in self.pipeline.owned_once()}
        found = []
        for name, parameter in self.model.named_parameters():
            groups: tuple[dist.ProcessGroup, ...] = ()
            share, layout = 1.0, self.layout(name)
            if isinstance(layout, Split) and self.grid.tp_group is not None:
                groups, share = (self.grid.tp_group,), 1.0 / self._copies(name, layout)
            if counted is not None and id(parameter) not in counted:
                share = 0.0
            found.append((parameter, groups, share))
        return found

    def _copies(self, name: str, layout: Split) -> int:
        if isinstance(layout.copies, int):
            return layout.copies
        raise ConfigError(
            say(
                given=f"{name}, packed of parts with different numbers of copies on {self.grid.tp_size} ranks",
                expected="parts that all ranks share out alike",
                do="Choose a tp_size that divides the number of key-value heads.",
            )
        )

    @torch.no_grad()
    def reduce_partial(self, group: FSDPParamGroup) -> None:
        """Sum over the tensor ranks what they have parts of among the unit's whole gradients, before it is reduced."""
        assert self.tensor is not None
        if not self._places:
            layouts = {id(p): self.tensor.layouts[name] for name, p in self.model.named_parameters()}
            for module in self.model.modules():
                for name, parameter in module._parameters.items():
                    if id(parameter) in layouts:
                        self._places[id(module), name] = layouts[id(parameter)]
        pairs = []
        for param in group.fsdp_params:
            gradient = param.unsharded_accumulated_grad
            if gradient is None and hasattr(param, "_unsharded_param"):
                gradient = param._unsharded_param.grad
            elif gradient is not None:
                param.accumulate_unsharded_grad_if_needed()
            info = param._module_info
            pairs.append((gradient, self._places[id(info.module), info.param_name]))
        reduce_partial_gradients(pairs, self.tensor.ranks)

    @torch.no_grad()
    def whole_state(self, state: dict[str, Any], *, keep: bool) -> dict[str, Any]:
        """`state`, this rank's part of a state dict (by name, whole over the data axis) -> the whole model's.

        All ranks of the grid call it. Tied entries share memory. `keep=False`: take part, keep nothing.
        """
        if self.tensor is not None:
            state = self._join_tensor_parts(state)
        if self.pipeline is not None and self.grid.pp_group is not None:
            state = self._collect_stages(state, self.grid.pp_group)
        return state if keep else {}

    def _join_tensor_parts(self, state: dict[str, Any]) -> dict[str, Any]:
        assert self.tensor is not None
        first_name = {id(p): name for name, p in self.model.named_parameters()}
        named = dict(self.model.named_parameters(remove_duplicate=False))
        joined: dict[str, Any] = {}
        whole: dict[str, Any] = {}
        for name, value in state.items():
            if name not in named:
                whole[name] = value
                continue
            first = first_name[id(named[name])]
            if first not in joined:
                joined[first] = self.tensor.whole(first, value)
            whole[name] = joined[first]
        return whole

    def _collect_stages(self, state: dict[str, Any], group: dist.ProcessGroup) -> dict[str, Any]:
        """Every stage's entries on every stage, in the order of stages."""
        # (name, the first name with the same memory, shape, dtype) of each tensor; anything else as it is.
        firsts: dict[int, str] = {}
        mine: list[tuple[str, Any, Any, Any]] = []
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                first = firsts.setdefault(id(value), name)
                mine.append((name, first, tuple(value.shape), value.dtype))
            else:
                mine.append((name, None, value, None))
        listed: list[Any] = [None] * group.size()
        dist.all_gather_object(listed, mine, group=group)
        whole: dict[str, Any] = {}
        for stage, entries in enumerate(listed):
            for name, first, shape, dtype in entries:
                if name in whole:  # tied, or a buffer that every stage has
                    continue
                if first is None:
                    whole[name] = shape
                elif first != name and first in whole:
                    whole[name] = whole[first]
                else:
                    own = stage == group.rank()
                    device = next(self.model.parameters()).device
                    value = state[name].contiguous() if own else torch.empty(shape, dtype=dtype, device=device)
                    whole[name] = comm.broadcast(value, group, src=stage, label="whole parameter")
        return self._tie(whole)

    def _tie(self, whole: dict[str, Any]) -> dict[str, Any]:
        """Names that are one parameter in the whole model share one tensor, whichever stage they came from."""
        assert self.pipeline is not None
        for shared in self.pipeline.applied.shared:
            present = [name for name in shared.names if name in whole]
            for name in present[1:]:
                whole[name] = whole[present[0]]
        return whole

    def own_part(self, state: dict[str, Any], prefix: str = "") -> None:
        """Make `state`, whole (or already this rank's), this rank's part: what others own is taken out, in place."""
        named = {prefix + name: name for name, _ in self.model.named_parameters(remove_duplicate=False)}
        first_name = {id(p): name for name, p in self.model.named_parameters()}
        for key in [key for key in state if key.startswith(prefix) and key not in named]:
            if key.removeprefix(prefix) in self.shapes:
                del state[key]
        if self.tensor is None:
            return
        ranks = self.tensor.ranks
        for key, name in named.items():
            value, whole_shape = state.get(key), self.shapes.get(name)
            if isinstance(value, torch.Tensor) and whole_shape is not None and tuple(value.shape) == whole_shape:
                first = first_name[id(self.model.get_parameter(name))]
                state[key] = self.layout(first).take(value, ranks.rank, ranks.size).contiguous()
