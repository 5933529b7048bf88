"""Make a model its rank's part of a pipeline: what other ranks own is replaced by stand-ins and freed.

    Llama, 4 layers, rank 1 of 2     model.layers.2, model.layers.3, model.norm, lm_head keep parameters and names

Works on meta too, so that only own weights need be loaded afterwards. Not undone: what was freed is gone.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from hfdist.models.stages import StageParts
from hfdist.parallel.pipeline.cut import Cut, rank_of_stage, stages_of_rank
from hfdist.parallel.pipeline.stand_ins import PassThrough, Shell, Stub


@dataclass(frozen=True)
class Shared:
    """One logical parameter on several ranks: its names, the first one saved; `names_here` is empty where it is not."""

    names: tuple[str, ...]
    names_here: tuple[str, ...]
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Applied:
    """What a rank has after the cut."""

    cut: Cut
    schedule: str
    rank: int
    num_ranks: int
    stages: tuple[int, ...]  # model stages of this rank
    names: tuple[str, ...]  # parameters it keeps, global names
    shared: tuple[Shared, ...]  # parameters that other ranks keep too; the same tuple order on all ranks

    def rank_of(self, stage: int) -> int:
        """The rank that has `stage`."""
        return rank_of_stage(self.schedule, stage, self.num_ranks)

    @property
    def last_rank(self) -> int:
        """The rank that computes the loss."""
        return self.rank_of(self.cut.num_stages - 1)


def apply_cut(model: nn.Module, cut: Cut, rank: int, *, num_ranks: int, schedule: str = "1f1b") -> Applied:
    """Replace in `model`, in place, what `rank` of `num_ranks` does not own."""
    parts = cut.parts
    every = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    owners = {name: _ranks_of(name, cut, num_ranks, schedule) for name in every}
    stages = stages_of_rank(schedule, rank, num_ranks, cut.num_stages)
    own = {name for stage in stages for name in cut.names_of(stage)}
    dtype, device = parts.hidden_dtype, next(model.parameters()).device
    # Ties are found before anything is replaced, and are the same on all ranks.
    shared = _shared(parts, owners, sorted(every), rank)
    for name in parts.blocks:
        if name not in own:
            _replace(model, name, PassThrough(model.get_submodule(name)))
    for part in parts.before:
        if 0 not in stages and not _shares_all(parts, part.name):
            stub = Stub(model.get_submodule(part.name), shape=part.shape, dtype=dtype, device=device)
            _replace(model, part.name, stub)
    for part in parts.after:
        if cut.num_stages - 1 not in stages and not _shares_all(parts, part.name):
            _replace(model, part.name, Shell(model.get_submodule(part.name)))
    names = tuple(name for name, _ in model.named_parameters(remove_duplicate=False))
    return Applied(cut, schedule, rank, num_ranks, stages, names, shared)


def _ranks_of(name: str, cut: Cut, num_ranks: int, schedule: str) -> tuple[int, ...]:
    """The ranks that keep the parameter `name`."""
    parts = cut.parts
    for stage in range(cut.num_stages):
        if name.startswith(tuple(f"{block}." for block in cut.names_of(stage))):
            return (rank_of_stage(schedule, stage, num_ranks),)
    for stage, several in ((0, parts.before), (cut.num_stages - 1, parts.after)):
        for part in several:
            if name.startswith(f"{part.name}.") and not _shares_all(parts, part.name):
                return (rank_of_stage(schedule, stage, num_ranks),)
    return tuple(range(num_ranks))


def _shares_all(parts: StageParts, part: str) -> bool:
    return any(name.startswith(f"{part}.") for name in parts.everywhere)


def _shared(parts: StageParts, owners: dict[str, tuple[int, ...]], names: list[str], rank: int) -> tuple[Shared, ...]:
    groups = [*parts.ties, *((name,) for name in names if not any(name in tie for tie in parts.ties))]
    found = []
    for group in groups:
        ranks = sorted({owner for name in group for owner in owners[name]})
        if len(ranks) > 1:
            here = tuple(name for name in group if rank in owners[name])
            found.append(Shared(tuple(group), here, tuple(ranks)))
    return tuple(found)


def _replace(model: nn.Module, name: str, stand_in: nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    stand_in.train(model.get_submodule(name).training)
    module = model.get_submodule(parent)
    if last.isdigit() and isinstance(module, nn.ModuleList):
        module[int(last)] = stand_in
    else:
        setattr(module, last, stand_in)
