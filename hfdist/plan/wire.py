"""Bytes one rank sends per optimizer step, for k micro-steps on N ranks.

Each collective below moves (N-1)/N of its tensor: P parameters in the compute dtype (gathers) or the trainable ones in
the reduction's dtype (reductions). An all-reduce counts as two.

    stage   gathers   reductions     P = 1e6, fp32, N = 2, k = 1      and k = 4
    0       -         2              1 x 4e6       =  4.0 MB           4.0 MB
    1       1         1              0.5 x 4e6 x 2 =  4.0 MB           4.0 MB
    2       1         k              0.5 x 4e6 x 2 =  4.0 MB          10.0 MB
    3       2k        k              0.5 x 4e6 x 3 =  6.0 MB          24.0 MB

`bound` is this table. `expected` is what the engine sends: at stage 3 the root stays gathered from forward to backward,
so it moves k times, not 2k; and rows are padded to a multiple of N. With R replicas of N/R shards each, gathers and
reductions stay inside a replica, and once per step an all-reduce runs across replicas over one rank's shard.
"""

from __future__ import annotations

from dataclasses import dataclass

from hfdist.plan.sizes import Layout, ModelSize


@dataclass(frozen=True, kw_only=True)
class WirePlan:
    """Bytes sent by one rank per optimizer step."""

    gather: int
    reduce_scatter: int
    all_reduce: int
    bound: int

    @property
    def expected(self) -> int:
        """What the engine sends."""
        return self.gather + self.reduce_scatter + self.all_reduce


def plan_wire(model: ModelSize, layout: Layout) -> WirePlan:
    """Bytes one rank sends per optimizer step, small agreements (norms, codes; under 1 KB each) left out.

    >>> size = ModelSize.of(1_000_000)
    >>> [plan_wire(size, Layout(stage=s, world_size=2, micro_steps=4)).bound for s in range(4)]
    [4000000, 4000000, 10000000, 24000000]
    """
    shards, replicas, k = layout.num_shards, layout.num_replicas, layout.micro_steps
    root, blocks = model.root, model.blocks
    gathered = {
        0: 0,
        1: sum(unit.shard(shards) for unit in model.units),
        2: sum(unit.shard(shards) for unit in model.units),
        3: k * (root.shard(shards) + 2 * sum(block.shard(shards) for block in blocks)),
    }[layout.stage]
    num_gathers = {0: 0, 1: 1, 2: 1, 3: 2 * k}[layout.stage]
    num_reductions = {0: 0, 1: 1, 2: k, 3: k}[layout.stage]
    trainable_shard = sum(unit.trainable_shard(shards) for unit in model.units)
    all_reduce = 2 * (replicas - 1) * trainable_shard * layout.reduce_bytes // replicas
    bound = (
        num_gathers * (shards - 1) * model.num_parameters * layout.compute_bytes // shards
        + num_reductions * (shards - 1) * model.num_trainable * layout.reduce_bytes // shards
        + 2 * (replicas - 1) * model.num_trainable * layout.reduce_bytes // shards // replicas
    )
    return WirePlan(
        gather=(shards - 1) * gathered * layout.compute_bytes,
        reduce_scatter=num_reductions * (shards - 1) * trainable_shard * layout.reduce_bytes,
        all_reduce=all_reduce,
        bound=bound,
    )
