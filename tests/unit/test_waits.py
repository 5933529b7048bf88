"""What `waiting` says of a backend's error, and what it leaves alone."""

from __future__ import annotations

from typing import Any

import pytest

from hfdist.errors import DistributedError
from hfdist.waits import DESCRIBED, LostPartner, waiting


class Group:
    """As much of a process group as a message needs."""

    group_desc = f"{DESCRIBED}pp=1 dp=0"

    def size(self) -> int:
        return 3


def raised_in_a_wait(error: Exception) -> Exception:
    group: Any = Group()
    with pytest.raises((RuntimeError, ValueError)) as caught, waiting(group, "while it gathers (x)"):
        raise error
    return caught.value


@pytest.mark.parametrize(
    "text", ["Timed out waiting 3000ms for recv operation to complete", "Application timeout caused pair closure"]
)
def test_a_time_out_names_the_rank_and_keeps_the_words_of_the_backend(text: str) -> None:
    error = raised_in_a_wait(RuntimeError(f"{text}\nmore"))
    assert isinstance(error, LostPartner)
    assert "pp=1 dp=0 waited 0 s while it gathers (x), and not all of 3 ranks came" in str(error)
    assert text in str(error)


def test_a_broken_connection_names_the_rank() -> None:
    error = raised_in_a_wait(RuntimeError("Connection closed by peer [::1]:5"))
    assert isinstance(error, LostPartner)
    assert "pp=1 dp=0 lost a partner while it gathers (x): Connection closed by peer" in str(error)


@pytest.mark.parametrize(
    "error", [RuntimeError("shapes differ"), DistributedError("a rank timed out"), ValueError("timeout")]
)
def test_other_errors_pass(error: Exception) -> None:
    assert raised_in_a_wait(error) is error
