"""Bytes one rank stores, at rest and over one optimizer step, by walking the step as the engine runs it.

At rest (P parameters, T of them trainable, N shards, Adam), rows padded to a multiple of N:

    stage   parameters   gradients   optimizer     P = T = 1e6, N = 2, MB
    0       4P           4T          8T            4 + 4 + 8 = 16
    1-3     4P/N         4T/N        8T/N          2 + 2 + 4 =  8

the same in fp32, bf16 and fp16: the stored parameters are the fp32 masters, and reduced gradients are fp32. What
differs is what lives *during* a step, in the compute dtype of c bytes (fp32 4, bf16 and fp16 2, with
`compute="autocast"` 4):

    stage   gathered copies        gradients (k = 1 -> k > 1 micro-steps)
    0       c (root + a block)     4T              -> 4T, plus c new when c is not 4   (no copies when c is 4)
    1       c P                    4T/N + c new    -> 4T (whole until the last micro-step), plus c new when c is not 4
    2       c P                    4T/N + c new    -> 4T/N + c new
    3       c (root + a block)     4T/N + c new    -> 4T/N + c new

with `secondary_shard_size=n` stage 3 also keeps c (blocks) / n of the gathered copies from forward to backward.

where "new" are the gradients that exist whole beside those already reduced or added up: at most the root's and one
block's; with k = 1 the shards of units that come later are not there yet. `plan_memory` finds the exact peak. The paper
(arXiv:1910.02054, Adam, half precision) has 16P, 4P + 12P/N, 2P + 14P/N and 16P/N for stages 0 to 3, gathered copies at
3 left out; `paper_bytes` is that, for comparison.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hfdist.plan.sizes import Layout, ModelSize, Unit

# Bytes of a stored parameter, of a reduced gradient and of one value of optimizer state.
MASTER = 4


@dataclass(kw_only=True)
class Owned:
    """Bytes by owner; the names are those of `measure.memory.MemoryReport`."""

    parameters: int = 0
    gathered: int = 0
    gradients: int = 0
    optimizer: int = 0
    communication: int = 0

    @property
    def total(self) -> int:
        """All owners together."""
        return self.parameters + self.gathered + self.gradients + self.optimizer + self.communication


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """`at_rest`: after an update, gradients not yet dropped. `peak`: the most of each owner, at its own moment."""

    at_rest: Owned
    peak: Owned
    peak_total: int  # the most of everything at one moment

    @property
    def at_rest_total(self) -> int:
        """Parameters, gradients and optimizer state."""
        return self.at_rest.total


def paper_bytes(num_parameters: int, *, stage: int, num_shards: int) -> int:
    """The ZeRO paper's model states for Adam in half precision (section 3.1), in bytes per rank.

    >>> [paper_bytes(1_000_000, stage=s, num_shards=4) for s in range(4)]
    [16000000, 7000000, 5500000, 4000000]
    """
    whole, shared = {0: (16, 0), 1: (4, 12), 2: (2, 14), 3: (0, 16)}[stage]
    return whole * num_parameters + shared * num_parameters // num_shards


def plan_memory(model: ModelSize, layout: Layout) -> MemoryPlan:
    """Walk a steady step (optimizer state exists, gradients were dropped after the last update).

    >>> size = ModelSize.of(1_000_000, num_blocks=8, num_root=200_000)
    >>> plan = plan_memory(size, Layout(stage=3, world_size=2))
    >>> plan.at_rest.parameters, plan.at_rest.gradients, plan.at_rest.optimizer
    (2000000, 2000000, 4000000)
    >>> plan.peak.gathered  # 4 x (root 200,000 + block 100,000)
    1200000
    """
    walk = _Walk(model, layout)
    for micro_step in range(layout.micro_steps):
        walk.last = micro_step == layout.micro_steps - 1
        walk.first = micro_step == 0
        walk.forward()
        walk.backward()
    return MemoryPlan(at_rest=Owned(**vars(walk.now)), peak=walk.peak, peak_total=walk.peak_total)


@dataclass
class _Walk:
    """State of one rank while the step is walked; units are numbered, the root is the last."""

    model: ModelSize
    layout: Layout
    now: Owned = field(default_factory=Owned)
    peak: Owned = field(default_factory=Owned)
    peak_total: int = 0
    first: bool = True
    last: bool = True
    _gathered: set[int] = field(default_factory=set)
    _prefetched: int | None = None  # unit whose all-gather output waits to be copied out
    _kept_output: int = 0  # bytes of the last all-gather output of a forward
    _kept_input: int = 0  # bytes of the last reduction's input
    _pending: int = 0  # bytes of gradients that autograd has in part
    _secondary: dict[int, int] = field(default_factory=dict)  # unit -> bytes kept for its backward
    _whole: dict[int, int] = field(default_factory=dict)  # unit -> bytes of gradients that wait whole

    def __post_init__(self) -> None:
        shards, layout = self.layout.num_shards, self.layout
        self.units: list[Unit] = [*self.model.blocks, self.model.root]
        self.root = len(self.units) - 1
        self.now.parameters = MASTER * sum(unit.shard(shards) for unit in self.units)
        self.now.optimizer = MASTER * layout.optimizer_values * sum(unit.trainable_shard(shards) for unit in self.units)
        self._look()

    # Stage rules, as in `parallel/zero.py`.

    @property
    def _reduces(self) -> bool:
        return self.last or self.layout.stage >= 2

    @property
    def _frees_after_backward(self) -> bool:
        return self.last or self.layout.stage in (0, 3)

    def forward(self) -> None:
        self._gather(self.root, keep_output=True)
        for block in range(self.root):
            self._gather(block, keep_output=True)
            if self.layout.stage in (0, 3):
                self._free(block)
            self._keep_secondary(block)
        if self.layout.stage == 0:
            self._free(self.root)
        self._drop_output()

    def backward(self) -> None:
        compute = self.layout.compute_bytes
        self._gather(self.root, keep_output=False)
        self._prefetch(self.root - 1)
        # A tied weight's gradient is complete after its last use; until then autograd holds the head's part.
        self._pending = compute * self.model.root_tied.num_trainable
        self._arrive(self.root, compute * self.model.root_early.num_trainable)
        for block in reversed(range(self.root)):
            self._gather(block, keep_output=False)
            self._prefetch(block - 1)
            self._arrive(block, compute * self.units[block].num_trainable)
            self._post_backward(block)
        self._pending = 0
        self._arrive(self.root, compute * (self.model.root_late.num_trainable + self.model.root_tied.num_trainable))
        self._post_backward(self.root)
        self.now.communication -= self._kept_input
        self._kept_input = 0

    def _gather(self, unit: int, *, keep_output: bool) -> None:
        if unit in self._gathered:
            return
        nbytes = self._copy_bytes(unit)
        if self.layout.num_shards > 1:
            if self._prefetched == unit:
                self._prefetched = None
            else:
                self.now.communication += nbytes
                self._look()
            self._drop_output()
        self.now.gathered += nbytes
        self._gathered.add(unit)
        self._look()
        self.now.gathered -= self._secondary.pop(unit, 0)
        if self.layout.num_shards > 1:
            if keep_output:
                self._kept_output = nbytes
            else:
                self.now.communication -= nbytes

    def _prefetch(self, unit: int) -> None:
        """Backward gathers the next block's output while this one runs."""
        if unit >= 0 and unit not in self._gathered and self.layout.num_shards > 1:
            self.now.communication += self._copy_bytes(unit)
            self._prefetched = unit
            self._look()

    def _keep_secondary(self, unit: int) -> None:
        if self.layout.secondary is not None:
            self._secondary[unit] = self._copy_bytes(unit) // self.layout.secondary
            self.now.gathered += self._secondary[unit]
            self._look()

    def _drop_output(self) -> None:
        self.now.communication -= self._kept_output
        self._kept_output = 0

    def _free(self, unit: int) -> None:
        if unit in self._gathered:
            self._gathered.remove(unit)
            self.now.gathered -= self._copy_bytes(unit)

    def _arrive(self, unit: int, nbytes: int) -> None:
        """Autograd finished whole gradients of `unit`; in the accumulated dtype they add up in place."""
        accumulates_in_place = self.layout.accumulate_bytes == self.layout.compute_bytes
        if accumulates_in_place and self._accumulated(unit):
            return
        self._whole[unit] = self._whole.get(unit, 0) + nbytes
        self.now.gradients += nbytes
        self._look()

    def _accumulated(self, unit: int) -> bool:
        return not self.first and self.layout.stage <= 1

    def _post_backward(self, unit: int) -> None:
        layout, shards = self.layout, self.layout.num_shards
        trainable = self.units[unit].num_trainable
        if not self._reduces:
            if self._frees_after_backward:
                self._free(unit)
            kept = layout.accumulate_bytes * trainable
            self._look(extra=kept if layout.accumulate_bytes != layout.compute_bytes and self.first else 0)
            self.now.gradients += kept - self._whole.get(unit, 0)
            self._whole[unit] = kept
            self._look()
            return
        if self._frees_after_backward:
            self._free(unit)
        self.now.communication -= self._kept_input
        padded = layout.reduce_bytes * self.units[unit].trainable_shard(shards) * shards
        self.now.communication += padded
        self._kept_input = padded
        self._look()
        self.now.gradients -= self._whole.pop(unit, 0)
        reduced = layout.reduce_bytes * self.units[unit].trainable_shard(shards)
        # The exchange that stands for a reduce-scatter on gloo receives the other ranks' rows.
        received = padded - padded // shards
        stored = MASTER * self.units[unit].trainable_shard(shards)
        self._look(extra=reduced + received)
        accumulates = layout.stage >= 2 and not self.first
        if accumulates:
            self._look(extra=reduced + (stored if layout.reduce_bytes != MASTER else 0))
        else:
            self.now.gradients += stored
            self._look(extra=reduced if layout.reduce_bytes != MASTER else 0)

    def _copy_bytes(self, unit: int) -> int:
        """A gathered unit, rows padded; nothing where the stored parameters serve."""
        shards = self.layout.num_shards
        if shards == 1 and self.layout.compute_bytes == MASTER:
            return 0
        return self.layout.compute_bytes * self.units[unit].shard(shards) * shards

    def _look(self, extra: int = 0) -> None:
        for owner, nbytes in vars(self.now).items():
            setattr(self.peak, owner, max(getattr(self.peak, owner), nbytes))
        self.peak_total = max(self.peak_total, self.now.total + self._pending + extra)
