"""Ranks for tests: one pool of gloo worker processes per world size, kept alive between tests.

    def loss_of(rank_batches):            # module level, runs in every rank
        accelerator = make_accelerator(plugins=[ZeroPlugin(stage=3)])
        ...
    def test_it(pool):
        losses = pool(2).run(loss_of, batches)      # [value of rank 0, value of rank 1]

Guarantees: a call ends within its timeout; the errors of all ranks come back with rank and traceback, those of ranks
that hang with their Python stacks, those of dead ranks with the signal. After a failed call the ranks are replaced, so
no test inherits another's half-finished collective. Nothing uses a fixed port. A test that kills ranks uses
`Pool(world_size)` as a context manager (a fork server makes that cheap) instead of the shared fixture.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# Loading torch, accelerate and transformers once takes 6-12 s on two busy cores.
START_TIMEOUT = 120.0
CALL_TIMEOUT = 120.0
# Once a rank has failed the others get this long to fail or finish by themselves.
GRACE = 10.0


@dataclass(frozen=True)
class Outcome:
    """How one call ended in one rank: with a `value`, or with an `error` (type name) and its `text`."""

    rank: int
    value: Any = None
    error: str | None = None
    text: str = ""
    traceback: str = ""

    def report(self) -> str:
        """The error with everything that helps to find it."""
        return f"--- rank {self.rank}: {self.error}: {self.text}\n{self.traceback}"


class RankErrors(AssertionError):
    """A call failed in some ranks; `outcomes` has all ranks'."""

    def __init__(self, message: str, outcomes: list[Outcome]) -> None:
        super().__init__(message)
        self.outcomes = outcomes


class Pool:
    """`world_size` worker processes in one gloo group."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._directory: Path | None = None
        self._processes: list[BaseProcess] = []
        self._conns: list[Connection] = []

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        """Process ids by rank; starts the ranks when they are not there yet."""
        self._start()
        return [process.pid or 0 for process in self._processes]

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = CALL_TIMEOUT, **kwargs: Any) -> list[Any]:
        """Call the module-level `function` in all ranks: their values by rank, or `RankErrors` with all errors."""
        outcomes = self.outcomes(function, *args, timeout=timeout, **kwargs)
        failed = [outcome for outcome in outcomes if outcome.error is not None]
        if failed:
            name = f"{function.__module__}.{function.__qualname__}"
            heads = "\n".join(f"rank {outcome.rank}: {outcome.error}: {outcome.text}" for outcome in failed)
            details = "\n".join(outcome.report() for outcome in failed)
            message = f"{len(failed)} of {self.world_size} ranks failed in {name}\n{heads}\n{details}"
            raise RankErrors(message, outcomes)
        return [outcome.value for outcome in outcomes]

    def outcomes(
        self,
        function: Callable[..., Any],
        *args: Any,
        timeout: float = CALL_TIMEOUT,
        grace: float = GRACE,
        **kwargs: Any,
    ) -> list[Outcome]:
        """As `run`, but errors are returned: for tests that expect them. A rank that hangs has `error="Timeout"`."""
        self._start()
        message = pickle.dumps((function, args, kwargs))
        ends: dict[int, Outcome] = {}
        for rank, conn in enumerate(self._conns):
            try:
                conn.send_bytes(message)
            except OSError:
                ends[rank] = self._death(rank)
        deadline = time.monotonic() + timeout
        while len(ends) < self.world_size:
            waiting = [rank for rank in range(self.world_size) if rank not in ends]
            ready = wait([self._conns[rank] for rank in waiting], max(0.0, deadline - time.monotonic()))
            if not ready:
                ends |= self._stacks(waiting, timeout)
                break
            for rank in waiting:
                if self._conns[rank] in ready:
                    ends[rank] = self._receive(rank)
                    if ends[rank].error is not None:
                        deadline = min(deadline, time.monotonic() + grace)
        outcomes = [ends[rank] for rank in range(self.world_size)]
        if any(outcome.error is not None for outcome in outcomes):
            self.close()
        return outcomes

    def close(self) -> None:
        """Kill the ranks; the next call starts new ones."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for conn in self._conns:
            conn.close()
        self._processes, self._conns = [], []
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None

    def _start(self) -> None:
        if self._processes:
            return
        context = _context()
        self._directory = Path(tempfile.mkdtemp(prefix="pool-"))
        from tests.worker import serve

        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            log, stack = str(self._file("log", rank)), str(self._file("stack", rank))
            args = (rank, self.world_size, theirs, log, stack, sys.path)
            process = context.Process(target=serve, args=args, daemon=True, name=f"rank{rank}of{self.world_size}")
            process.start()
            theirs.close()
            self._processes.append(process)
            self._conns.append(ours)
        if self.world_size > 1:
            if not self._conns[0].poll(START_TIMEOUT):
                self.close()
                raise TimeoutError(f"rank 0 of a pool of {self.world_size} did not start in {START_TIMEOUT:.0f} s")
            port = self._conns[0].recv()
            for conn in self._conns[1:]:
                conn.send(port)

    def _receive(self, rank: int) -> Outcome:
        try:
            kind, *rest = pickle.loads(self._conns[rank].recv_bytes())
        except (EOFError, OSError):
            return self._death(rank)
        if kind == "ok":
            return Outcome(rank, value=rest[0])
        error, text, traceback = rest
        return Outcome(rank, error=error, text=text, traceback=traceback + self._tail("log", rank))

    def _death(self, rank: int) -> Outcome:
        process = self._processes[rank]
        process.join(5)
        code = process.exitcode
        how = f"killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
        return Outcome(rank, error="Died", text=how, traceback=self._tail("stack", rank) + self._tail("log", rank))

    def _stacks(self, ranks: list[int], timeout: float) -> dict[int, Outcome]:
        """Ask hanging ranks for the Python stacks of all their threads (written by faulthandler on SIGUSR1)."""
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._processes[rank].pid or 0, signal.SIGUSR1)
        time.sleep(0.5)
        return {
            rank: Outcome(
                rank,
                error="Timeout",
                text=f"no answer (limit {timeout:.0f} s, {GRACE:.0f} s once another rank failed)",
                traceback=self._tail("stack", rank) + self._tail("log", rank),
            )
            for rank in ranks
        }

    def _file(self, kind: str, rank: int) -> Path:
        assert self._directory is not None
        return self._directory / f"{kind}{rank}.txt"

    def _tail(self, kind: str, rank: int, characters: int = 4000) -> str:
        with contextlib.suppress(OSError):
            text = self._file(kind, rank).read_text(errors="replace")[-characters:]
            if text.strip():
                return f"[{kind} of rank {rank}]\n{text}\n"
        return ""


class Pools:
    """One `Pool` per world size, started on first use: `pools(3)`."""

    def __init__(self) -> None:
        self._pools: dict[int, Pool] = {}

    def __call__(self, world_size: int) -> Pool:
        return self._pools.setdefault(world_size, Pool(world_size))

    def close(self) -> None:
        """End all ranks."""
        for pool in self._pools.values():
            pool.close()


def _context() -> multiprocessing.context.ForkServerContext:
    """The fork server with torch, accelerate and transformers loaded; started once a session."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.worker"])
    # Read once, at the start of the server: threads before torch loads, where `tests` lies.
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    # glibc gives memory back at once, or resident memory says nothing.
    malloc = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}
    with _environment(OMP_NUM_THREADS="1", PYTHONPATH=path, **malloc):
        forkserver.ensure_running()
    return context


@contextlib.contextmanager
def _environment(**values: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
