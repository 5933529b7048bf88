"""Plan -> living process groups: the device mesh of data parallelism, and this rank's place in it.

Axes, outermost first: `dp_replicate` (copies of the sharded model) x `dp_shard` (the shards; named "fsdp" where it is
the only axis, see `_build`). Four ranks:

    stage 1-3, dp_replicate_size=1   (1, 4)   ranks 0 1 2 3 hold one quarter each
    stage 1-3, dp_replicate_size=2   (2, 2)   ranks 0 1 | 2 3 hold halves; 0-2 and 1-3 hold the same half
    stage 0                          (4, 1)   everyone holds everything

Groups are made once per shape and kept: a stage switch goes back and forth between two shapes.
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.debug import _clear_fast_path_sharding_prop_cache, _clear_python_sharding_prop_cache

from hfdist.errors import ConfigError, coordinates, say


@dataclass
class DataMesh:
    """The meshes of one world. `device_type` is torch's ("cpu", "cuda"); with no process group it is one rank."""

    device_type: str
    world_size: int
    rank: int
    dp_replicate_size: int = 1
    timeout: datetime.timedelta | None = None  # of the groups' collectives; None: torch's default
    _meshes: dict[tuple[int, int], DeviceMesh] = field(default_factory=dict)  # by shape; (0, n): groups of n ranks
    world_group: dist.ProcessGroup | None = None

    def __post_init__(self) -> None:
        if self.world_size % self.dp_replicate_size:
            raise ConfigError(
                say(
                    given=f"dp_replicate_size={self.dp_replicate_size} on {self.world_size} ranks",
                    expected="a number of replicas that divides the number of ranks",
                    do=f"Choose one of {[n for n in range(1, self.world_size + 1) if self.world_size % n == 0]}.",
                )
            )
        if not dist.is_initialized():
            # One process is the same code with communication absent; FSDP2 wants a mesh, so it gets one of size 1.
            dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
        self.world_group = dist.new_group(list(range(self.world_size)), timeout=self.timeout)
        forget_meshes()

    def shape(self, stage: int) -> tuple[int, int]:
        """(dp_replicate, dp_shard) at `stage`."""
        if stage == 0:
            return self.world_size, 1
        return self.dp_replicate_size, self.world_size // self.dp_replicate_size

    def for_stage(self, stage: int) -> DeviceMesh:
        """2-D mesh ("dp_replicate", "dp_shard"), or the 1-D one ("fsdp",) where nothing is replicated."""
        shape = self.shape(stage)
        if shape not in self._meshes:
            self._meshes[shape] = self._build(shape)
        return self._meshes[shape]

    def secondary(self, size: int) -> DeviceMesh:
        """2-D mesh of groups of `size` neighbouring ranks (dim 1), which must divide the shards of a replica."""
        if (0, size) not in self._meshes:
            num_shards = self.world_size // self.dp_replicate_size
            if num_shards % size:
                raise ConfigError(
                    say(
                        given=f"secondary_shard_size={size} on {num_shards} ranks that share one copy of the model",
                        expected="a size that divides them",
                        do=f"Choose one of {[n for n in range(2, num_shards + 1) if num_shards % n == 0]}.",
                    )
                )
            ranks = torch.arange(self.world_size).view(-1, size)
            across, inside = self._make_groups(ranks.T.tolist()), self._make_groups(ranks.tolist())
            self._meshes[0, size] = DeviceMesh.from_group(
                [across, inside], self.device_type, mesh=ranks, mesh_dim_names=("across", "inside")
            )
        return self._meshes[0, size]

    def _build(self, shape: tuple[int, int]) -> DeviceMesh:
        ranks = torch.arange(self.world_size).view(shape)
        shard_group = self._make_groups(ranks.tolist())
        if shape[0] == 1:
            # PEFT sizes adapters by the local rows, as under tensor parallelism, unless all axes have this name.
            return DeviceMesh.from_group(shard_group, self.device_type, mesh_dim_names=("fsdp",))
        replicate_group = self._make_groups(ranks.T.tolist())
        return DeviceMesh.from_group(
            [replicate_group, shard_group], self.device_type, mesh=ranks, mesh_dim_names=("dp_replicate", "dp_shard")
        )

    def _make_groups(self, rows: list[list[int]]) -> dist.ProcessGroup:
        """Every rank makes every group, in one order; returns the one this rank is in.

        A group of all ranks is the world's: each gloo group has threads that wake a hundred times a second.
        """
        if rows == [list(range(self.world_size))]:
            assert self.world_group is not None
            return self.world_group
        groups = [(row, dist.new_group(row, timeout=self.timeout)) for row in rows]
        return next(group for row, group in groups if self.rank in row)

    def coordinates(self, rank: int) -> str:
        """`dp=1`: how messages name a rank."""
        return coordinates(dp=rank)


def forget_meshes() -> None:
    """Clear DTensor's memory of results, keyed by meshes that compare equal.

    A mesh of a destroyed group must not come back from it, and one out of use must not be kept alive by it: every gloo
    group has four threads.
    """
    _clear_fast_path_sharding_prop_cache()
    _clear_python_sharding_prop_cache()
