"""What a wait that ended without its partner says: which rank waited, for what, how long.

Backends know no coordinates ("Connection closed by peer"). Groups that `mesh.make_group` makes carry them in their
description, and `waiting` puts them into the error.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import torch.distributed as dist

from hfdist.errors import DistributedError

DESCRIBED = "hfdist "  # before this rank's coordinates in the description of a group


class LostPartner(DistributedError):
    """A wait that ended without its partner: the time-out ran out, or the other rank's process ended."""


def is_lost_partner(error: BaseException) -> bool:
    """The backends' words for a connection that broke, or a wait that reached the group's own limit."""
    text = str(error).lower()
    words = ("connection closed", "connection reset", "broken pipe", "timed out", "timeout")
    return any(word in text for word in words)


def lost_partner(error: BaseException, *, name: str, what: str, size: int, since: float) -> LostPartner:
    """The error of rank `name`, which waited since the monotonic time `since`; `what`: in or during what."""
    said = (str(error).splitlines() or [type(error).__name__])[0]
    if "timed out" in str(error).lower() or "timeout" in str(error).lower():
        return LostPartner(
            f"{name} waited {time.monotonic() - since:.0f} s {what}, and not all of {size} ranks came ({said}). "
            "Expected every rank to take the same path; look at the last line of each rank for the one that stopped, "
            "or raise the time-out."
        )
    return LostPartner(
        f"{name} lost a partner {what}: {said}. Another rank ended or was killed; its own output says why."
    )


@contextlib.contextmanager
def waiting(group: dist.ProcessGroup, what: str) -> Iterator[None]:
    """A wait inside that ends without its partner is a LostPartner that names this rank; `what`: "while it ..."."""
    since = time.monotonic()
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, DistributedError) or not is_lost_partner(error):
            raise
        raise lost_partner(error, name=name_in(group), what=what, size=group.size(), since=since) from error


def name_in(group: dist.ProcessGroup) -> str:
    """`pp=1 dp=0` for a group that `mesh.make_group` made, else `rank 3`."""
    described = group.group_desc
    return described.removeprefix(DESCRIBED) if described.startswith(DESCRIBED) else f"rank {dist.get_rank()}"
