"""Tensor parallelism: each rank holds a part of every block and all ranks of a group work on the same batch.

    layout        where a whole parameter lies over ranks (pure)
    collectives   what is sent, as autograd functions
    styles        one table: what each style of a plan means
    layouts       plan -> layouts, attributes, hooks to set; all checks
    vocab         loss on a split vocabulary
    sequence      tokens split between the pairs of a block
    streams       random numbers of what is whole and what is split
    gradients     sums owed before an update, the norm
    apply         in place, and back
    verify        a plan tried on a small copy

Parameters are plain tensors holding this rank's part, so ZeRO over the data-parallel axes sees ordinary ones.
"""

from hfdist.parallel.tensor.apply import TensorParallel, apply_tensor_parallel
from hfdist.parallel.tensor.layout import Layout, Replicated, Split

__all__ = ["Layout", "Replicated", "Split", "TensorParallel", "apply_tensor_parallel"]
