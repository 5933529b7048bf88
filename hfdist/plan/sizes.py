"""What a plan is made of: the sizes of a model's units, and the layout it is asked to train in.

A *unit* is what is gathered, reduced and freed as one: each block of the model, and the root (everything else). The
root's parameters come in three parts, since their gradients do: those of the norm and the head before any block's,
those of the input embeddings after all of them, and those of a weight tied to both last as well, though autograd holds
the head's part of it from the start.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from hfdist.errors import ConfigError, say

Precision = Literal["fp32", "bf16", "fp16"]
Shape = tuple[int, ...]

# A matrix that travels as int8: so many values share one fp32 scale.
INT8_BLOCK = 256
_SCALE_BYTES = 4


def packed_bytes(numel: int) -> int:
    """Bytes that `numel` values become as int8 blocks with their scales.

    >>> packed_bytes(256), packed_bytes(257)
    (260, 520)
    """
    return -(-numel // INT8_BLOCK) * (INT8_BLOCK + _SCALE_BYTES)


@dataclass(frozen=True)
class Unit:
    """Parameter shapes that move together. 0-dim parameters are not sharded and not part of a unit."""

    trainable: tuple[Shape, ...] = ()
    frozen: tuple[Shape, ...] = ()

    @property
    def numel(self) -> int:
        """Elements of all parameters."""
        return sum(math.prod(shape) for shape in (*self.trainable, *self.frozen))

    @property
    def num_trainable(self) -> int:
        """Elements of the parameters that get a gradient."""
        return sum(math.prod(shape) for shape in self.trainable)

    def shard(self, num_shards: int) -> int:
        """Elements one rank stores of all parameters; dimension 0 is padded to a multiple of `num_shards`.

        >>> Unit(((5, 3), (4,))).shard(2)  # 3 of 6 padded rows of 3, and 2 of 4
        11
        """
        return sum(_shard_numel(shape, num_shards) for shape in (*self.trainable, *self.frozen))

    def trainable_shard(self, num_shards: int) -> int:
        """The same of the parameters that get a gradient."""
        return sum(_shard_numel(shape, num_shards) for shape in self.trainable)

    def travelling_bytes(self, num_shards: int, *, compute_bytes: int, int8: bool) -> int:
        """Bytes of one rank's part of a gather; as int8 the matrices, vectors in the compute dtype all the same.

        >>> Unit(((512, 3), (4,))).travelling_bytes(2, compute_bytes=4, int8=True)  # 768 values in 3 blocks, and 2
        788
        """
        numels = [(_shard_numel(shape, num_shards), len(shape) >= 2) for shape in (*self.trainable, *self.frozen)]
        return sum(packed_bytes(n) if int8 and matrix else n * compute_bytes for n, matrix in numels)

    def __add__(self, other: Unit) -> Unit:
        return Unit(self.trainable + other.trainable, self.frozen + other.frozen)


def _shard_numel(shape: Shape, num_shards: int) -> int:
    return -(-shape[0] // num_shards) * math.prod(shape[1:])


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """Units in the order of a forward pass."""

    blocks: tuple[Unit, ...] = ()
    root_early: Unit = Unit()  # norm and head: gradients come before the blocks'
    root_late: Unit = Unit()  # input embeddings: gradients come after the blocks'
    root_tied: Unit = Unit()  # weights used on both sides of the blocks: complete after them, held in part before

    @classmethod
    def of(cls, num_parameters: int, *, num_blocks: int = 0, num_root: int = 0, tied: bool = True) -> ModelSize:
        """From counts: `num_blocks` equal blocks share what is left of `num_parameters` after the root's `num_root`.

        Without blocks the whole model is one unit. Tied, all of the root counts as one matrix; untied, half of it as
        input embeddings.
        """
        if num_blocks == 0:
            return cls(root_early=Unit(((num_parameters,),)))
        each, rest = divmod(num_parameters - num_root, num_blocks)
        late = num_root // 2
        sizes = {"root_tied": num_root} if tied else {"root_late": late, "root_early": num_root - late}
        return cls(
            blocks=tuple(Unit(((each + (index < rest),),)) for index in range(num_blocks)),
            **{name: Unit(((numel,),)) for name, numel in sizes.items() if numel},
        )

    @property
    def root(self) -> Unit:
        """Everything outside the blocks."""
        return self.root_early + self.root_late + self.root_tied

    @property
    def units(self) -> tuple[Unit, ...]:
        """Blocks, then the root."""
        return (*self.blocks, self.root)

    @property
    def num_parameters(self) -> int:
        """P, frozen ones included."""
        return sum(unit.numel for unit in self.units)

    @property
    def num_trainable(self) -> int:
        """Elements that get a gradient and optimizer state."""
        return sum(unit.num_trainable for unit in self.units)

    @property
    def largest_block(self) -> int:
        """Elements of the largest block (of the root when there is none)."""
        return max((block.numel for block in self.blocks), default=self.root.numel)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a model is asked to train."""

    stage: int
    world_size: int
    dp_replicate_size: int = 1
    precision: Precision = "fp32"
    # What a forward sees under bf16 and fp16: see `AmpPlugin.compute`.
    compute: Literal["mixed", "cast", "autocast"] = "mixed"
    reduce_dtype: Literal["fp32", "compute", "bf16"] = "fp32"
    # How matrices travel when they are gathered, and the ranks that keep blocks among themselves from forward to
    # backward at stage 3 (`ZeroPlugin`).
    gather_dtype: Literal["compute", "int8"] = "compute"
    secondary_shard_size: int | None = None
    # Micro-steps per optimizer step (gradient accumulation).
    micro_steps: int = 1
    # Optimizer state per parameter in fp32 values: Adam 2, SGD with momentum 1, plain SGD 0.
    optimizer_values: int = 2

    def __post_init__(self) -> None:
        if self.stage not in (0, 1, 2, 3) or self.world_size < 1 or self.micro_steps < 1:
            raise ConfigError(
                say(
                    given=f"stage {self.stage} on {self.world_size} ranks with {self.micro_steps} micro-steps",
                    expected="stage 0 to 3, and at least one rank and one micro-step",
                    do="Correct the number that is out of range.",
                )
            )
        if self.dp_replicate_size < 1 or self.world_size % self.dp_replicate_size:
            raise ConfigError(
                say(
                    given=f"dp_replicate_size={self.dp_replicate_size} on {self.world_size} ranks",
                    expected="a number of replicas that divides the number of ranks",
                    do="Leave it out to shard over all ranks.",
                )
            )

        if self.secondary_shard_size is not None and (
            self.secondary_shard_size < 2 or self.world_size // self.dp_replicate_size % self.secondary_shard_size
        ):
            raise ConfigError(
                say(
                    given=f"secondary_shard_size={self.secondary_shard_size} on "
                    f"{self.world_size // self.dp_replicate_size} ranks that share one copy of the model",
                    expected="2 or more ranks, a number that divides them",
                    do="Leave it out to gather over all of them in backward as well.",
                )
            )

    @property
    def num_shards(self) -> int:
        """Ranks that share one copy of what is sharded; 1 at stage 0."""
        return 1 if self.stage == 0 else self.world_size // self.dp_replicate_size

    @property
    def num_replicas(self) -> int:
        """Ranks that hold the same shard."""
        return self.world_size // self.num_shards

    @property
    def compute_bytes(self) -> int:
        """Bytes of an element of a gathered copy and of a gradient before it is reduced."""
        return 4 if self.precision == "fp32" or self.compute == "autocast" else 2

    @property
    def reduce_bytes(self) -> int:
        """Bytes of an element in a gradient reduction."""
        return {"fp32": 4, "compute": self.compute_bytes, "bf16": 2}[self.reduce_dtype]

    @property
    def accumulate_bytes(self) -> int:
        """Bytes of an element of a whole gradient that waits for a later micro-step's reduction."""
        return max(self.reduce_bytes, self.compute_bytes)

    @property
    def secondary(self) -> int | None:
        """Ranks of the group that backward gathers in where that is not the group of all shards."""
        smaller = self.stage == 3 and self.secondary_shard_size not in (None, self.num_shards)
        return self.secondary_shard_size if smaller else None
