"""Fixtures for all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.pool import Pools

# As in the ranks: in half precision the number of threads decides how sums are cut (CPU layer norm's weight gradient).
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def pool() -> Iterator[Pools]:
    """`pool(world_size)`: running ranks, shared by the whole session (see `tests.pool`)."""
    pools = Pools()
    yield pools
    pools.close()
