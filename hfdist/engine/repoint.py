"""What was made before `prepare` refers to whole parameters; sharding makes new ones, and references must follow.

optimizer = AdamW(model.parameters())      # whole parameters
model = accelerator.prepare(model)         # engine.replaced: whole -> sharded
accelerator.prepare(optimizer)             # its groups now hold the sharded ones, its state their rows
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from hfdist.engine.core import Engine
from hfdist.engine.local_step import LocalStep
from hfdist.engine.optimizer_state import place_state
from hfdist.errors import ConfigError, say
from hfdist.parallel import fsdp


def follow(
    engine: Engine, before: dict[str, nn.Parameter], model: nn.Module, optimizers: Iterable[torch.optim.Optimizer]
) -> None:
    """Remember which parameter of `before` (by name; emptied) became which of `model`, and point `optimizers` there.

    What `model` has no more belongs to another pipeline stage.
    """
    kept = dict(model.named_parameters(remove_duplicate=False))
    alive = {id(before[name]) for name in kept}
    for old in before.values():
        if id(old) not in alive:
            engine.elsewhere[old] = True
    became = {
        before[name]: parameter  # a tied one has several names
        for name, parameter in kept.items()
        if before[name] is not parameter
    }
    for old, new in became.items():
        fsdp.carry_over(old, new)
        engine.replaced[old] = new
    before.clear()
    for optimizer in optimizers:
        point_to_shards(engine, getattr(optimizer, "optimizer", optimizer))


def point_to_shards(engine: Engine, optimizer: torch.optim.Optimizer) -> None:
    """Put sharded parameters into the optimizer's groups, and what this rank holds of the state for each.

    Raises ConfigError for state of parameters that were split or cut since.
    """
    if engine.grid.model_groups and any(optimizer.state.values()):
        raise ConfigError(
            say(
                given=f"{type(optimizer).__name__} with state, and a model split over tensor or pipeline ranks",
                expected="an optimizer that has not stepped",
                do="Build it anew after accelerator.prepare(model), and load its state with accelerator.load_state().",
            )
        )
    states = {}
    for group in optimizer.param_groups:
        group["params"] = [p for p in group["params"] if p not in engine.elsewhere]
        for position, old in enumerate(group["params"]):
            if old not in engine.replaced:
                continue
            new = group["params"][position] = engine.replaced[old]
            state = optimizer.state.pop(old, None)
            if state:
                states[new] = state
    if states:
        place_state(engine, LocalStep(optimizer, engine.meeting), states)
