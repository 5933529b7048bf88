"""Optimizer state from elsewhere -> what this rank holds: its rows, or, where it owns a whole-stepped parameter, all.

    state of one process, parameter (8, 5), 2 ranks       rank 0             rank 1
    "element" (AdamW): exp_avg (8, 5)                     rows 0-3           rows 4-7
    "whole" (Muon):    momentum_buffer (8, 5)             (8, 5), the owner  nothing

Shards of two ranks look alike, so `state_dict()` says whose they are (one more top-level key, which torch ignores), and
a shard of another place is refused instead of being taken for this one's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hfdist import comm
from hfdist.engine.local_step import LocalStep
from hfdist.engine.norm import local_tensor, shard_groups
from hfdist.errors import ConfigError, say
from hfdist.parallel import fsdp

if TYPE_CHECKING:
    from hfdist.engine.core import Engine

_PLACE = "hfdist"  # key in a state dict: {"shard": which, "num_shards": of how many}


def place_state(engine: Engine, local: LocalStep, given: dict[nn.Parameter, dict[str, Any]]) -> None:
    """Put what this rank holds of the `given` states (whole, or its own part already) into the optimizer's state.

    Raises ConfigError for rows that are those of another number of ranks.
    """
    shards = {id(p.sharded_param): p for zero in engine.models for p in fsdp.iterate_params(zero.modules)}
    held = local.held_here() if any(shard_groups(parameter) for parameter in given) else {}
    for parameter, state in given.items():
        local.optimizer.state.pop(parameter, None)
        param = shards.get(id(parameter))
        if param is None or not shard_groups(parameter) or held.get(parameter):
            local.optimizer.state[parameter] = state
        elif parameter in held:
            local.optimizer.state[parameter] = {k: _own_rows(engine, param, k, v) for k, v in state.items()}


def _own_rows(engine: Engine, param: fsdp.FSDPParam, key: str, value: Any) -> Any:
    whole, mine = param._orig_size, local_tensor(param.sharded_param).shape
    if not isinstance(value, torch.Tensor) or value.ndim == 0:
        return value
    if value.shape == whole:
        return fsdp.take_shard(param, value)
    if value.ndim == len(whole) and value.shape[1:] == whole[1:] and value.shape != mine:
        raise ConfigError(
            say(
                given=f"optimizer state {key} of shape {tuple(value.shape)} for {engine.name_of(param.sharded_param)}",
                expected=f"{tuple(whole)}, whole, or this rank's {tuple(mine)}",
                do="Load the state of one process, or keep training state with accelerator.save_state() and "
                "load_state().",
            )
        )
    return value


def name_place(state_dict: dict[str, Any], parameters: list[nn.Parameter]) -> dict[str, Any]:
    """`state_dict` with the place of the shards in it; as it is when there are none."""
    place = _place_of(parameters)
    return state_dict if place is None else {**state_dict, _PLACE: place}


def check_place(state_dict: dict[str, Any], parameters: list[nn.Parameter], meeting: comm.Meeting) -> dict[str, Any]:
    """`state_dict` without its place. Raises ConfigError on every rank when it is not the place of one of them."""
    saved, now = state_dict.get(_PLACE), _place_of(parameters)
    wrong = saved is not None and saved != now
    flags = [wrong] if now is None else meeting.numbers(comm.SCALARS, int(wrong))
    if any(flags):
        where = ", ".join(meeting.coordinates(rank) for rank, flag in enumerate(flags) if flag)
        raise ConfigError(
            say(
                given="an optimizer state dict that another rank, or another number of ranks, got from state_dict()"
                + (f" (on {where})" if now is not None else ""),
                expected="this rank's own part, or the state dict of one process",
                do="Keep training state with accelerator.save_state() and load_state(), which serve all ranks.",
            )
        )
    return {key: value for key, value in state_dict.items() if key != _PLACE}


def _place_of(parameters: list[nn.Parameter]) -> dict[str, int] | None:
    for parameter in parameters:
        for group in shard_groups(parameter):
            return {"shard": group.rank(), "num_shards": group.size()}
    return None
