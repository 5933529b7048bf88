"""Where hfdist's collectives start: what the engines miss on gloo, and the promise that no rank waits for ever.

Before the data of a collective moves, the ranks *meet*: each sends one 8-byte code that says what it is about to do
(operation, unit, which parameters). Only when all codes agree is data sent, so a rank that runs another module can
neither exchange wrong values in silence nor abort the process inside gloo (which kills on a size mismatch), and a rank
that failed can say so instead of leaving the others in a wait.

    rank dp=0   meet("gather", model.layers.2) --+-- codes agree --> all-gather
    rank dp=1   meet("gather", model.layers.2) --+
    rank dp=1   meet("gather", model.layers.3)       codes differ --> the same DistributedError on every rank

Meetings run on an own gloo group: with gloo always, with a device backend only where a feature needs them (62 us of
CPU each at 2 ranks, `NOTES.md`). Elsewhere the backend's own watchdog ends a wait.
"""

from __future__ import annotations

import datetime
import logging
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

import torch
import torch.distributed as dist

from hfdist.errors import DistributedError
from hfdist.measure import wire
from hfdist.waits import LostPartner, is_lost_partner, lost_partner, waiting

logger = logging.getLogger(__name__)

# Operations a meeting can announce. The code on the wire is op * 2**48 + unit * 2**32 + detail.
GATHER, REDUCE, STEP, DONE, SWITCH, ABORT, SAVE, SCALARS, LOAD = range(1, 10)
_OP_NAMES = {
    GATHER: "gathers",
    REDUCE: "reduces the gradients of",
    STEP: "steps the optimizer",
    DONE: "has finished its pass",
    SWITCH: "changes the layout",
    ABORT: "gave up the step",
    SAVE: "gathers whole parameters",
    SCALARS: "agrees on a number",
    LOAD: "loads a model into shards (all ranks call from_pretrained together, or HFDIST_LOAD_SHARDED=0 lets each load "
    "it whole)",
}


class StepAborted(DistributedError):
    """Another rank (or this one) gave up the step before any update; parameters and optimizer state are unchanged."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass
class Meeting:
    """The announcements of the ranks of one data axis before a collective of theirs; `rank` counts along it.

    `names` maps unit numbers to module names, equal on all ranks. `make_group(timeout)` makes the gloo
    group they meet on.
    """

    rank: int
    world_size: int
    coordinates: Callable[[int], str]  # rank -> "dp=1", how messages name a rank
    make_group: Callable[[datetime.timedelta], dist.ProcessGroup] | None = None
    stall_timeout: float = 5.0  # seconds of waiting after which the wait is reported
    timeout: float = 1800.0  # seconds after which a wait is an error
    enabled: bool = True
    names: list[str] = field(default_factory=list)
    num_steps: int = 0  # optimizer steps so far, for messages
    serve: Callable[[int, int], None] | None = None  # conditional modules: take part in (op, unit) that others need
    group: dist.ProcessGroup | None = None
    device: torch.device | None = None  # where numbers are agreed on when there are no meetings
    device_group: dist.ProcessGroup | None = None

    def __post_init__(self) -> None:
        if self.make_group is not None and self.enabled:
            # gloo's own limit comes after ours, whose error says more.
            group = self.make_group(datetime.timedelta(seconds=self.timeout + 60))
            self.group = group if self.world_size > 1 else None
        self._codes = torch.zeros(self.world_size, dtype=torch.int64)
        self._mine = torch.zeros(1, dtype=torch.int64)
        self._awaited: _Awaited | None = None
        if self.group is not None:
            # Here, not at the first long wait: a thread needs memory for its stack.
            threading.Thread(target=_report_stalls, args=(weakref.ref(self),), daemon=True).start()

    def unit(self, name: str) -> int:
        """The number of a unit (registered in the same order on all ranks)."""
        self.names.append(name)
        return len(self.names) - 1

    def run(
        self,
        op: int,
        unit: int = 0,
        detail: int = 0,
        collective: Callable[[], None] | None = None,
        describe: Callable[[], str] | None = None,
    ) -> None:
        """Announce `op` on `unit`; run `collective` once all ranks announce the same.

        `detail` is a 32-bit value that must agree as well; `describe()` says it in words. Raises DistributedError on
        every rank when announcements differ, and StepAborted when a rank gave the step up. With `serve` set, unequal
        announcements are worked off in one order on all ranks, this rank's own among them.
        """
        if self.group is None:
            if collective is not None:
                collective()
            return
        code = (op << 48) | (unit << 32) | (detail & 0xFFFFFFFF)
        codes = self._exchange(code, lambda: self._say(code, describe))
        if all(other == code for other in codes):
            if collective is not None:
                self._carry_out(collective, lambda: self._say(code, describe))
            return
        if any(other >> 48 == ABORT for other in codes):
            self._raise_aborted(codes, "")
        if self.serve is not None and all(other >> 48 in (GATHER, REDUCE, DONE) for other in codes):
            for other in sorted(set(codes)):
                if other != code:
                    self.serve(other >> 48, (other >> 32) & 0xFFFF)
                elif collective is not None:
                    collective()
            return
        self._raise_different(code, describe)

    def _carry_out(self, collective: Callable[[], None], words: Callable[[], str]) -> None:
        """Run what the ranks agreed on; a partner that is lost in the middle of it is named as in a meeting."""
        awaited = self._awaited = _Awaited(words)
        try:
            collective()
        except RuntimeError as error:
            # A collective's own LostPartner is told anew: the meeting knows which step and which unit.
            cause = error.__cause__ if isinstance(error, LostPartner) and error.__cause__ is not None else error
            if isinstance(cause, DistributedError) or not is_lost_partner(cause):
                raise
            raise self._lost(cause, awaited) from cause
        finally:
            self._awaited = None

    def _raise_different(self, code: int, describe: Callable[[], str] | None) -> NoReturn:
        said = self._exchange_words(self._say(code, describe))
        lines = "; ".join(f"{self.coordinates(rank)} {words}" for rank, words in enumerate(said))
        raise DistributedError(
            f"Ranks do different things in step {self.num_steps}: {lines}. Expected every rank to run the same modules "
            "in the same order; no parameter was updated. If your forward chooses modules by its data, set "
            "ZeroPlugin(conditional_modules=True) or HFDIST_CONDITIONAL_MODULES=1."
        )

    def numbers(self, op: int, number: int, describe: Callable[[], str] | None = None) -> list[int]:
        """Announce `op` with a number (0 <= number < 2**32) and return every rank's number, by rank."""
        if self.group is None:
            return [number] if self.world_size == 1 else self._numbers_on_device(number)
        code = (op << 48) | number
        codes = self._exchange(code, lambda: self._say(code, describe))
        if all(other >> 32 == op << 16 for other in codes):
            return [other & 0xFFFFFFFF for other in codes]
        if any(other >> 48 == ABORT for other in codes):
            self._raise_aborted(codes, "")
        self._raise_different(code, describe)

    def _numbers_on_device(self, number: int) -> list[int]:
        """Without meetings (a device backend): the ranks' numbers by that backend, waiting for the device."""
        assert self.device_group is not None
        mine = torch.tensor([number], dtype=torch.int64, device=self.device)
        numbers = torch.empty(self.world_size, dtype=torch.int64, device=self.device)
        all_gather(numbers, mine, self.device_group, label="numbers")
        return numbers.tolist()

    def drain(self) -> None:
        """Serve the others until no rank needs anything in this pass (conditional modules only)."""
        if self.group is None or self.serve is None:
            return
        done = DONE << 48
        while True:
            codes = self._exchange(done, lambda: _OP_NAMES[DONE])
            if any(code >> 48 == ABORT for code in codes):
                self._raise_aborted(codes, "")
            if all(code == done for code in codes):
                return
            for other in sorted(set(codes) - {done}):
                self.serve(other >> 48, (other >> 32) & 0xFFFF)

    def abort(self, reason: str) -> NoReturn:
        """Tell the others, at their next meeting, that this rank gave up the step; raises StepAborted here too."""
        if self.group is None:
            raise StepAborted(f"{self.coordinates(self.rank)} gave up step {self.num_steps}: {reason}", reason)
        codes = self._exchange(ABORT << 48, lambda: "gave up the step")
        self._raise_aborted(codes, reason)

    def _raise_aborted(self, codes: Sequence[int], reason: str) -> NoReturn:
        reasons = self._exchange_words(reason)
        who = [rank for rank, code in enumerate(codes) if code >> 48 == ABORT]
        said = "; ".join(f"{self.coordinates(rank)}: {reasons[rank]}" for rank in who)
        raise StepAborted(f"Step {self.num_steps} was given up before any update. {said}", reasons[who[0]])

    def _say(self, code: int, describe: Callable[[], str] | None) -> str:
        if describe is not None:
            return describe()
        op, unit = code >> 48, (code >> 32) & 0xFFFF
        what = _OP_NAMES[op]
        return f"{what} {self.names[unit]}" if op in (GATHER, REDUCE) else what

    def _exchange(self, code: int, words: Callable[[], str]) -> list[int]:
        wire.record("meet", 8 * (self.world_size - 1), group_size=self.world_size)
        self._mine[0] = self._codes[self.rank] = code
        self._swap(self._mine, [self._codes[rank : rank + 1] for rank in range(self.world_size)], words)
        return self._codes.tolist()

    def _exchange_words(self, words: str) -> list[str]:
        mine = torch.tensor(list(words.encode()), dtype=torch.uint8)
        sizes = self._exchange(mine.numel(), lambda: "says why")
        said = [torch.empty(size, dtype=torch.uint8) for size in sizes]
        said[self.rank] = mine
        self._swap(mine, said, lambda: "says why")
        return [bytes(letters.tolist()).decode() for letters in said]

    def _swap(self, mine: torch.Tensor, theirs: list[torch.Tensor], words: Callable[[], str]) -> None:
        """Send `mine` to every other rank and receive what they send into `theirs` (by rank); empty is not sent.

        One by one costs a sixth of gloo's all-gather (62 against 378 us of CPU, 8 bytes, 2 ranks), and runs no thread
        for the first time when memory is short.
        """
        assert self.group is not None
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        awaited = self._awaited = _Awaited(words)
        try:
            works = [self.group.recv([theirs[rank]], rank, 0) for rank in others if theirs[rank].numel()]
            works += [self.group.send([mine], rank, 0) for rank in others if mine.numel()]
            for work in works:
                work.wait(datetime.timedelta(seconds=self.timeout))
        except RuntimeError as error:
            raise self._lost(error, awaited) from error
        finally:
            self._awaited = None

    def _lost(self, error: BaseException, awaited: _Awaited) -> DistributedError:
        """A wait that failed, in words that name this rank and what it awaited."""
        return lost_partner(
            error,
            name=self.coordinates(self.rank),
            what=f"in step {self.num_steps} while it {awaited.words()}",
            size=self.world_size,
            since=awaited.since,
        )

    def report_stall(self) -> None:
        """Say once, after `stall_timeout`, that this rank waits and for what."""
        awaited = self._awaited
        if awaited is None or awaited.reported:
            return
        waited = time.monotonic() - awaited.since
        if waited >= self.stall_timeout:
            awaited.reported = True
            logger.warning(
                "%s waits for the other ranks since %.0f s in step %d while it %s; slow work on one rank or a rank on "
                "another path. The wait ends after %.0f s.",
                self.coordinates(self.rank), waited, self.num_steps, awaited.words(), self.timeout,
            )  # fmt: skip


@dataclass
class _Awaited:
    """A meeting that this rank has announced itself to and waits for."""

    words: Callable[[], str]  # what this rank is about to do
    since: float = field(default_factory=time.monotonic)
    reported: bool = False


def _report_stalls(meeting: weakref.ref[Meeting]) -> None:
    """Look at a meeting's wait from a thread of its own until the meeting is gone."""
    while (alive := meeting()) is not None:
        alive.report_stall()
        pause = alive.stall_timeout / 4
        del alive
        time.sleep(pause)


def checksum(flags: Sequence[bool]) -> int:
    """32-bit fingerprint of which parameters take part in a collective."""
    return zlib.crc32(bytes(flags))


def all_gather(output: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup, label: str = "") -> None:
    """`output` (N * n,) becomes the shards (n,) of all N ranks; sends (N-1)/N of it."""
    size = group.size()
    wire.record("all_gather", shard.nbytes * (size - 1), group_size=size, label=label)
    with waiting(group, f"while it gathers ({label})"):
        if not _directly(shard, size):
            dist.all_gather_single(output, shard, group=group)
            return
        rows = output.view(size, -1)
        if rows[group.rank()].data_ptr() != shard.data_ptr():
            rows[group.rank()].copy_(shard)
        _exchange_rows([shard] * size, list(rows), group)


def reduce_scatter(
    output: torch.Tensor, whole: torch.Tensor, group: dist.ProcessGroup, *, mean: bool, label: str = ""
) -> None:
    """`output` (n,) becomes this rank's part of the sum (or mean) of all ranks' `whole` (N * n,); sends (N-1)/N of it.

    gloo's own reduce-scatter costs twice that (an all-reduce inside), an exchange and a local sum do not.
    """
    size = group.size()
    wire.record("reduce_scatter", output.nbytes * (size - 1), group_size=size, label=label)
    with waiting(group, f"while it reduces ({label})"):
        if whole.device.type != "cpu":
            op = dist.ReduceOp.AVG if mean else dist.ReduceOp.SUM
            dist.reduce_scatter_single(output, whole, group=group, op=op)
            return
        if _directly(whole, size) and whole.dtype.itemsize >= 4:
            rank, mine = group.rank(), list(whole.view(size, -1))
            received = list(whole.new_empty(size - 1, output.numel()))
            rows = [*received[:rank], mine[rank], *received[rank:]]
            _exchange_rows(mine, rows, group)
            torch.add(rows[0], rows[1], out=output)
            for row in rows[2:]:
                output.add_(row)
        else:  # half precision is summed in fp32 and rounded once
            parts = torch.empty_like(whole)
            dist.all_to_all_single(parts, whole, group=group)
            torch.sum(parts.view(size, -1), dim=0, out=output)
        if mean:
            output.div_(size)


def _directly(tensor: torch.Tensor, size: int) -> bool:
    """Whether a CPU tensor goes from each rank to each other one by one.

    gloo's all-gather and all-to-all copy everything once more on the way, which costs 1.3 to 1.9 times the CPU time and
    a second buffer (2 and 4 ranks, 0.8 and 7 MB; `NOTES.md`). With many ranks the number of messages would tell.
    """
    return tensor.device.type == "cpu" and 1 < size <= 8


def _exchange_rows(sent: list[torch.Tensor], received: list[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Send `sent[r]` to each other rank r of the group, whose row for this rank lands in `received[r]`."""
    rank, size = group.rank(), group.size()
    works = []
    for distance in range(1, size):
        to, source = (rank + distance) % size, (rank - distance) % size
        works.append(dist.isend(sent[to], group=group, group_dst=to))
        works.append(dist.irecv(received[source], group=group, group_src=source))
    for work in works:
        assert work is not None
        work.wait()


def all_reduce(
    tensor: torch.Tensor,
    group: dist.ProcessGroup | None,
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
    label: str = "",
) -> torch.Tensor:
    """In place; sends 2 (N-1)/N of it. A group of None is one process: nothing to do."""
    if group is not None and group.size() > 1:
        size = group.size()
        wire.record("all_reduce", 2 * tensor.nbytes * (size - 1) // size, group_size=size, label=label)
        with waiting(group, f"while it adds up ({label})"):
            dist.all_reduce(tensor, group=group, op=op)
    return tensor


def broadcast(tensor: torch.Tensor, group: dist.ProcessGroup | None, src: int = 0, label: str = "") -> torch.Tensor:
    """In place, from the group's rank `src`."""
    if group is not None and group.size() > 1:
        if group.rank() == src:
            wire.record("broadcast", tensor.nbytes * (group.size() - 1), group_size=group.size(), label=label)
        with waiting(group, f"while it broadcasts ({label})"):
            dist.broadcast(tensor, group=group, group_src=src)
    return tensor


def all_to_all(
    received: torch.Tensor,
    sent: torch.Tensor,
    received_sizes: list[int],
    sent_sizes: list[int],
    group: dist.ProcessGroup,
    label: str = "",
) -> None:
    """Uneven exchange of 1-D buffers; sizes are element counts by group rank."""
    nbytes = (sum(sent_sizes) - sent_sizes[group.rank()]) * sent.element_size()
    wire.record("all_to_all", nbytes, group_size=group.size(), label=label)
    with waiting(group, f"while it exchanges ({label})"):
        dist.all_to_all_single(received, sent, received_sizes, sent_sizes, group=group)
