"""Bytes one rank sends per optimizer step, for k micro-steps on N ranks.

Each collective below moves (N-1)/N of its tensor: P parameters in the compute dtype (gathers) or the trainable ones in
the reduction's dtype (reductions). An all-reduce counts as two.

    stage   gathers   reductions     P = 1e6, fp32, N = 2, k = 1      and k = 4
    0       -         2              1 x 4e6       =  4.0 MB           4.0 MB
    1       1         1              0.5 x 4e6 x 2 =  4.0 MB           4.0 MB
    2       1         k              0.5 x 4e6 x 2 =  4.0 MB          10.0 MB
    3       2k        k              0.5 x 4e6 x 3 =  6.0 MB          24.0 MB

`bound` is this table. `expected` is what the engine sends: at stage 3 the root stays gathered from forward to backward,
so it moves k times, not 2k; and rows are padded to a multiple of N. With `gather_dtype="int8"` a matrix moves 260 bytes
for every 256 values. With `secondary_shard_size=n` the blocks' gathers in backward move (n-1)/n of P in the compute
dtype, all of it inside groups of n ranks. With R replicas of N/R shards each, gathers and
reductions stay inside a replica, and once per step an all-reduce runs across replicas over one rank's shard.
"""

from __future__ import annotations

from dataclasses import dataclass

from hfdist.plan.sizes import INT8_BLOCK, Layout, ModelSize


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
    compute, int8, secondary = layout.compute_bytes, layout.gather_dtype == "int8", layout.secondary
    parts = [(shards - 1) * unit.travelling_bytes(shards, compute_bytes=compute, int8=int8) for unit in model.units]
    forward, root = sum(parts), parts[-1]
    backward = forward - root
    whole = model.num_parameters * (INT8_BLOCK + 4) // INT8_BLOCK if int8 else model.num_parameters * compute
    least = (shards - 1) * whole // shards
    least_backward = least
    if secondary is not None:
        padded = shards * sum(block.shard(shards) for block in model.blocks) * compute
        backward = (secondary - 1) * padded // secondary
        least_backward = (secondary - 1) * model.num_parameters * compute // secondary
    gathered = {0: 0, 1: forward, 2: forward, 3: k * (forward + backward)}[layout.stage]
    least_gathered = {0: 0, 1: least, 2: least, 3: k * (least + least_backward)}[layout.stage]
    num_reductions = {0: 0, 1: 1, 2: k, 3: k}[layout.stage]
    trainable_shard = sum(unit.trainable_shard(shards) for unit in model.units)
    all_reduce = 2 * (replicas - 1) * trainable_shard * layout.reduce_bytes // replicas
    bound = (
        least_gathered
        + num_reductions * (shards - 1) * model.num_trainable * layout.reduce_bytes // shards
        + 2 * (replicas - 1) * model.num_trainable * layout.reduce_bytes // shards // replicas
    )
    return WirePlan(
        gather=gathered,
        reduce_scatter=num_reductions * (shards - 1) * trainable_shard * layout.reduce_bytes,
        all_reduce=all_reduce,
        bound=bound,
    )
