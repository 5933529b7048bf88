"""What the ranks saw of one technique on one type -> a verdict. Pure.

verified   loss and all gradients are one process's, and the model was really split
refused    hfdist said no, before any work; the text is what the user reads
unsplit    right, but a rank holds more than its share, or a block is on no stage or two, or exchanged nothing
wrong      a loss or a gradient differs
failed     an error that is not a refusal
died       a rank was killed, or did not answer in time
"""

from __future__ import annotations

from dataclasses import dataclass

from hfdist.verify.check import TECHNIQUES, Seen

TOLERANCE = 1e-5  # fp32, relative, loss and gradients
SHARE = 0.6  # of the blocks' bytes that a rank may hold, for each axis of size 2


@dataclass(frozen=True)
class Verdict:
    """One cell of the table."""

    status: str
    reason: str = ""
    gradient_difference: float | None = None
    block_share: float | None = None  # the largest part of the blocks' bytes that a rank holds


def judge(technique: str, seen: list[Seen]) -> Verdict:
    """The verdict on ranks that all came to the end."""
    pp_size, tp_size, _ = TECHNIQUES[technique]
    whole = sum(seen[0].blocks_of_one.values())
    share = max(sum(rank.blocks.values()) for rank in seen) / max(whole, 1)
    difference, worst = max((rank.gradient_difference, rank.worst) for rank in seen)

    def verdict(status: str, reason: str = "") -> Verdict:
        return Verdict(status, reason, difference, share)

    for rank in seen:
        if not abs(rank.loss - rank.loss_of_one) <= TOLERANCE * max(1.0, abs(rank.loss_of_one)):
            return verdict("wrong", f"loss {rank.loss:.7f}, of one process {rank.loss_of_one:.7f}")
    if difference > TOLERANCE:
        return verdict("wrong", f"gradient of {worst} differs by {difference:.1e}")
    if not whole:
        return verdict("unsplit", "no blocks found in it")
    for block in seen[0].blocks_of_one:
        stages = {rank.pp_rank for rank in seen if block in rank.blocks}
        if len(stages) != 1:
            return verdict("unsplit", f"{block} is on {len(stages)} stages")
    bound = SHARE ** (1 if technique == "zero3" else (pp_size > 1) + (tp_size > 1))
    if share > bound:
        return verdict("unsplit", f"a rank holds {share:.0%} of the blocks, more than {bound:.0%}")
    if tp_size > 1 and min(rank.all_reduces for rank in seen) < 1:
        return verdict("unsplit", "a block without an all-reduce")
    return verdict("verified")


def judge_errors(errors: list[tuple[str, str]]) -> Verdict:
    """The verdict on (kind, text) of the ranks that failed: the cause, not what it did to the others."""

    def consequence(error: tuple[str, str]) -> int:
        kind, text = error
        if kind == "ConfigError":
            return 0
        # A rank that waits for one that is gone.
        gone = "onnection closed" in text or "onnection reset" in text or "Broken pipe" in text
        return 3 if gone else 2 if kind in ("Died", "Timeout") else 1

    kind, text = min(errors, key=consequence)
    if kind == "ConfigError":
        return Verdict("refused", text)
    if kind in ("Died", "Timeout"):
        return Verdict("died", text)
    return Verdict("failed", f"{kind}: {' '.join(text.split())}"[:300])


def first_sentence(text: str) -> str:
    """What a table has room for: the text to its first full stop that ends a sentence."""
    head = text.split(". ")[0].rstrip(".")
    return head if len(head) <= 160 else head[:157] + "..."
