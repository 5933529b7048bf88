"""Plan -> living process groups: the grid of all ranks, and the device mesh of data parallelism inside it.

`Grid` deals the ranks, pipeline stage outermost and tensor parallelism (the most traffic) innermost. Eight ranks,
pp 2 x dp 2 x tp 2:

    pp=0   dp=0: ranks 0 1   dp=1: ranks 2 3        tp groups 0 1 | 2 3 | 4 5 | 6 7
    pp=1   dp=0: ranks 4 5   dp=1: ranks 6 7        dp groups 0 2 | 1 3 | 4 6 | 5 7, pp groups 0 4 | 1 5 | 2 6 | 3 7

`DataMesh` is one column of it: the ranks that have the same part of the model and share the data between them. Its
axes, outermost first: `dp_replicate` (copies of the sharded model) x `dp_shard` (the shards; named "fsdp" where it is
the only axis, see `_build`). Four ranks:

    stage 1-3, dp_replicate_size=1   (1, 4)   ranks 0 1 2 3 hold one quarter each
    stage 1-3, dp_replicate_size=2   (2, 2)   ranks 0 1 | 2 3 hold halves; 0-2 and 1-3 hold the same half
    stage 0                          (4, 1)   everyone holds everything

Groups are made once per shape and kept: a stage switch goes back and forth between two shapes.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.debug import _clear_fast_path_sharding_prop_cache, _clear_python_sharding_prop_cache

from hfdist.errors import ConfigError, coordinates, say
from hfdist.waits import DESCRIBED


@dataclass
class Grid:
    """All ranks of a run as pp x dp x tp, and the groups along its axes.

    `device_type` is torch's ("cpu", "cuda"); with no process group it is one rank. Groups of one rank are None, but for
    the data axis, which FSDP2 wants in any case. Raises ConfigError for sizes that do not divide the ranks.
    """

    device_type: str
    world_size: int
    rank: int
    _: KW_ONLY
    pp_size: int = 1
    tp_size: int = 1
    dp_replicate_size: int = 1
    timeout: datetime.timedelta | None = None  # of the groups' collectives; None: torch's default
    data: DataMesh = field(init=False)
    pp_group: dist.ProcessGroup | None = field(init=False, default=None)
    tp_group: dist.ProcessGroup | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        model_ranks = self.pp_size * self.tp_size
        if self.world_size % model_ranks:
            raise ConfigError(
                say(
                    given=f"pp_size={self.pp_size} x tp_size={self.tp_size} on {self.world_size} ranks",
                    expected="a product that divides the number of ranks",
                    do=f"Start a multiple of {model_ranks} processes, or choose smaller sizes.",
                )
            )
        if not dist.is_initialized():
            # One process is the same code with communication absent; FSDP2 wants a mesh, so it gets one of size 1.
            dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
        ranks = torch.arange(self.world_size).view(self.pp_size, -1, self.tp_size)
        self.pp_rank, self.dp_rank, self.tp_rank = (int(index) for index in (ranks == self.rank).nonzero()[0])
        columns = [ranks[pp, :, tp].tolist() for pp in range(self.pp_size) for tp in range(self.tp_size)]
        self.data = DataMesh(self.device_type, columns, self.rank, self.dp_replicate_size, self.timeout, self._name)
        if self.pp_size > 1:
            self.pp_group = self._group(ranks.flatten(1).T)
        if self.tp_size > 1:
            self.tp_group = self._group(ranks.flatten(0, 1))

    @property
    def model_groups(self) -> tuple[dist.ProcessGroup, ...]:
        """Groups of ranks that hold different parts of the model (pipeline, then tensor)."""
        return tuple(group for group in (self.pp_group, self.tp_group) if group is not None)

    def _group(self, rows: torch.Tensor) -> dist.ProcessGroup:
        return make_group(rows.tolist(), self.rank, timeout=self.timeout, name=self._name(self.dp_rank))

    def _name(self, dp_rank: int) -> str:
        model = {"pp": self.pp_rank} if self.pp_size > 1 else {}
        inner = {"tp": self.tp_rank} if self.tp_size > 1 else {}
        return coordinates(**model, dp=dp_rank, **inner)


@dataclass
class DataMesh:
    """The ranks that hold the same part of the model: one of `columns` (global ranks), and the meshes over it.

    Every rank lists all columns, in one order, since every rank makes every group.
    """

    device_type: str
    columns: list[list[int]]
    global_rank: int
    dp_replicate_size: int = 1
    timeout: datetime.timedelta | None = None
    coordinates: Callable[[int], str] = lambda rank: coordinates(dp=rank)  # rank here -> `dp=1`, as messages name it
    _meshes: dict[tuple[int, int], DeviceMesh] = field(default_factory=dict)  # by shape; (0, n): groups of n ranks

    def __post_init__(self) -> None:
        self.ranks = next(column for column in self.columns if self.global_rank in column)
        self.size, self.rank = len(self.ranks), self.ranks.index(self.global_rank)
        if self.size % self.dp_replicate_size:
            raise ConfigError(
                say(
                    given=f"dp_replicate_size={self.dp_replicate_size} on {self.size} ranks",
                    expected="a number of replicas that divides the number of ranks",
                    do=f"Choose one of {[n for n in range(1, self.size + 1) if self.size % n == 0]}.",
                )
            )
        self.group = self._make(self.columns)
        forget_meshes()

    def shape(self, stage: int) -> tuple[int, int]:
        """(dp_replicate, dp_shard) at `stage`."""
        if stage == 0:
            return self.size, 1
        return self.dp_replicate_size, self.size // self.dp_replicate_size

    def for_stage(self, stage: int) -> DeviceMesh:
        """2-D mesh ("dp_replicate", "dp_shard"), or the 1-D one ("fsdp",) where nothing is replicated."""
        shape = self.shape(stage)
        if shape not in self._meshes:
            self._meshes[shape] = self._build(shape)
        return self._meshes[shape]

    def secondary(self, size: int) -> DeviceMesh:
        """2-D mesh of groups of `size` neighbouring ranks (dim 1), which must divide the shards of a replica."""
        if (0, size) not in self._meshes:
            num_shards = self.size // self.dp_replicate_size
            if num_shards % size:
                raise ConfigError(
                    say(
                        given=f"secondary_shard_size={size} on {num_shards} ranks that share one copy of the model",
                        expected="a size that divides them",
                        do=f"Choose one of {[n for n in range(2, num_shards + 1) if num_shards % n == 0]}.",
                    )
                )
            grids = [torch.tensor(column).view(-1, size) for column in self.columns]
            across = self._group_of([row for grid in grids for row in grid.T.tolist()])
            inside = self._group_of([row for grid in grids for row in grid.tolist()])
            self._meshes[0, size] = DeviceMesh.from_group(
                [across, inside],
                self.device_type,
                mesh=torch.tensor(self.ranks).view(-1, size),
                mesh_dim_names=("across", "inside"),
            )
        return self._meshes[0, size]

    def _build(self, shape: tuple[int, int]) -> DeviceMesh:
        grids = [torch.tensor(column).view(shape) for column in self.columns]
        shard_group = self._group_of([row for grid in grids for row in grid.tolist()])
        if shape[0] == 1:
            # PEFT sizes adapters by the local rows, as under tensor parallelism, unless all axes have this name.
            return DeviceMesh.from_group(shard_group, self.device_type, mesh_dim_names=("fsdp",))
        replicate_group = self._group_of([row for grid in grids for row in grid.T.tolist()])
        return DeviceMesh.from_group(
            [replicate_group, shard_group],
            self.device_type,
            mesh=torch.tensor(self.ranks).view(shape),
            mesh_dim_names=("dp_replicate", "dp_shard"),
        )

    def _group_of(self, rows: list[list[int]]) -> dist.ProcessGroup:
        """A row that is the whole column has the column's group: each gloo group has threads that wake a hundred times
        a second."""
        return self.group if rows == self.columns else self._make(rows)

    def gloo_group(self, timeout: datetime.timedelta) -> dist.ProcessGroup:
        """One more group of these ranks, on gloo; all ranks of the grid call this together."""
        name = self.coordinates(self.rank)
        return make_group(self.columns, self.global_rank, timeout=timeout, name=name, backend="gloo")

    def _make(self, rows: list[list[int]]) -> dist.ProcessGroup:
        return make_group(rows, self.global_rank, timeout=self.timeout, name=self.coordinates(self.rank))


def make_group(
    rows: list[list[int]], rank: int, *, timeout: datetime.timedelta | None, name: str, backend: str | None = None
) -> dist.ProcessGroup:
    """Every rank makes the group of every row, in one order; returns the one that `rank` is in.

    `name`: this rank's coordinates, for messages about the group (`waits.name_in`).
    """
    described = DESCRIBED + name
    groups = [(row, dist.new_group(row, timeout=timeout, backend=backend, group_desc=described)) for row in rows]
    return next(group for row, group in groups if rank in row)


def forget_meshes() -> None:
    """Clear DTensor's memory of results, keyed by meshes that compare equal.

    A mesh of a destroyed group must not come back from it, and one out of use must not be kept alive by it: every gloo
    group has four threads.
    """
    _clear_fast_path_sharding_prop_cache()
    _clear_python_sharding_prop_cache()
