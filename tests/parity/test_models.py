"""`hfdist models --verify` on types that change from commit to commit, and on ranks that die or hang."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "models.md"
NUM_TYPES = 4
# Where there is no page or no commit.
FIXED = ["gpt2", "llama", "mixtral", "qwen3"]


def verified(page: str) -> list[str]:
    """The types that `page` says are verified by every technique."""
    rows = [[cell.strip() for cell in line.split("|")[1:6]] for line in page.splitlines() if line.startswith("| ")]
    return [row[0] for row in rows if row[1:] == ["verified"] * 4]


def chosen() -> list[str]:
    """Types of this commit: another commit tries others, the same one the same."""
    git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    types = verified(PAGE.read_text(encoding="utf-8")) if PAGE.exists() else []
    if git.returncode or len(types) < NUM_TYPES:
        return FIXED
    seed = int(hashlib.sha256(git.stdout.strip().encode()).hexdigest(), 16)
    return sorted(random.Random(seed).sample(types, NUM_TYPES))


def test_types_of_this_commit_are_still_verified() -> None:
    from hfdist.verify.command import verify_types

    for name, result in verify_types(chosen()).items():
        assert not result.not_built, name
        for technique, verdict in result.verdicts.items():
            assert verdict.status == "verified", f"{name}, {technique}: {verdict}"
        assert set(result.verdicts) == {"zero3", "tp", "pp", "3d"}


@pytest.mark.parametrize(("how", "kind"), [(signal.SIGKILL, "Died"), (signal.SIGSTOP, "Timeout")])
def test_a_rank_that_dies_or_hangs_is_an_answer_and_the_group_goes_on(how: signal.Signals, kind: str) -> None:
    from hfdist.verify.check import Seen
    from hfdist.verify.ranks import Group

    with Group(2) as group:
        assert all(isinstance(answer, Seen) for answer in group.run("llama", "zero3", 60))
        pids = [process.pid for process in group._processes]
        os.kill(pids[1], how)
        answers = group.run("llama", "zero3", 6)
        assert answers[1][0] == kind
        assert all(isinstance(answer, Seen) for answer in group.run("llama", "zero3", 60))
        assert not set(pids) & {process.pid for process in group._processes}


def test_a_type_that_is_not_built_or_refused_leaves_the_ranks_as_they_are() -> None:
    from hfdist.verify.ranks import Group

    with Group(2) as group:
        assert [kind for kind, _ in group.run("musicgen", "tp", 60)] == ["NotBuilt"] * 2
        pids = [process.pid for process in group._processes]
        assert [kind for kind, _ in group.run("mamba", "tp", 60)] == ["ConfigError"] * 2
        assert pids == [process.pid for process in group._processes]


def test_the_pages_rows_are_read() -> None:
    rows = "| llama | verified | verified | verified | verified |  |\n| zaya | verified | verified | refused | x | y |"
    assert verified(rows) == ["llama"]
