"""Groups of ranks for `hfdist models --verify`: started once, alive from type to type, made anew after a failure.

A type may kill a rank or hang it; the caller gets that as the rank's error and goes on. Ranks are forks of a server
that has torch and transformers loaded, meet in a file, and work on the CPU with gloo whatever devices there are.
"""

from __future__ import annotations

import contextlib
import datetime
import gc
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.process import parent_process
from pathlib import Path
from typing import Any

# How long the others may still answer once a rank has failed.
GRACE = 1.5


class Group:
    """`world_size` ranks that run `check.check`; use as a context."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._processes: list[Any] = []
        self._conns: list[Connection] = []
        self._directory: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def run(self, model_type: str, technique: str, timeout: float) -> list[Any]:
        """What each rank answers: a `Seen`, or (kind, text) of its error; "Died" and "Timeout" are kinds."""
        self._start()
        answers: dict[int, Any] = {}
        for rank, conn in enumerate(self._conns):
            try:
                conn.send((model_type, technique))
            except OSError:
                answers[rank] = self._death(rank)
        deadline = time.monotonic() + timeout
        while len(answers) < self.world_size:
            waiting = [rank for rank in range(self.world_size) if rank not in answers]
            ready = wait([self._conns[rank] for rank in waiting], max(0.0, deadline - time.monotonic()))
            if not ready:
                answers |= dict.fromkeys(waiting, ("Timeout", f"no answer in {timeout:.0f} s"))
                break
            for rank in waiting:
                if self._conns[rank] in ready:
                    try:
                        answers[rank] = self._conns[rank].recv()
                    except (EOFError, OSError):
                        answers[rank] = self._death(rank)
                    if isinstance(answers[rank], tuple):
                        deadline = min(deadline, time.monotonic() + GRACE)
        result = [answers[rank] for rank in range(self.world_size)]
        # Where all ranks raised the same, before any work, they are as good as new.
        kinds = {answer[0] if isinstance(answer, tuple) else "" for answer in result}
        if not kinds <= {""} and kinds not in ({"ConfigError"}, {"NotBuilt"}):
            self.close()
        return result

    def close(self) -> None:
        """Kill the ranks; the next `run` starts new ones."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for conn in self._conns:
            conn.close()
        self._processes, self._conns = [], []
        if self._directory is not None:
            self._directory.cleanup()
            self._directory = None

    def _start(self) -> None:
        if self._processes:
            return
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["hfdist.verify.check", "transformers.models.llama.modeling_llama"])
        with _environment(OMP_NUM_THREADS="1", PYTHONPATH=os.pathsep.join(path for path in sys.path if path)):
            forkserver.ensure_running()
        self._directory = tempfile.TemporaryDirectory(prefix="hfdist-")
        store = str(Path(self._directory.name) / "store")
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.world_size, theirs, store), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._conns.append(ours)

    def _death(self, rank: int) -> tuple[str, str]:
        process = self._processes[rank]
        process.join(5)
        code = process.exitcode
        how = f"killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
        return "Died", f"a rank ended ({how})"


def _serve(rank: int, world_size: int, conn: Connection, store: str) -> None:
    """A rank: answer (model type, technique) after (model type, technique) until the pipe closes."""
    import torch
    import torch.distributed as dist
    from accelerate.state import AcceleratorState, GradientState

    from hfdist.verify.check import check

    _be_silent()
    threading.Thread(target=_follow_parent, daemon=True).start()
    torch.set_num_threads(1)
    for name in [n for n in os.environ if n.startswith(("ACCELERATE_", "HFDIST_", "FSDP_", "MEGATRON_"))]:
        del os.environ[name]
    size = {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
    os.environ.update({"ACCELERATE_USE_CPU": "true", "RANK": str(rank), "LOCAL_RANK": str(rank), **size})
    environment = dict(os.environ)
    shared = dist.FileStore(store, world_size)
    call = 0
    while True:
        try:
            model_type, technique = conn.recv()
        except (EOFError, OSError):
            os._exit(0)
        call += 1
        torch.manual_seed(0)
        # New keys for each call: nothing of the last one can be met again.
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(f"call{call}", shared),
            rank=rank,
            world_size=world_size,
            timeout=datetime.timedelta(seconds=120),
        )
        answer: Any
        try:
            answer = check(model_type, technique, rank)
        except BaseException as error:
            answer = (type(error).__name__, " ".join([str(error)[:2000], *getattr(error, "__notes__", ())]))
            error.__traceback__ = None
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
        gc.collect()
        if dist.is_initialized():
            dist.destroy_process_group()
        os.environ.clear()
        os.environ.update(environment)
        conn.send(answer)


def _be_silent() -> None:
    """Advice of libraries on hundreds of models is nobody's reading; errors travel by the pipe."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)


def _follow_parent() -> None:
    parent = parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


@contextlib.contextmanager
def _environment(**values: str) -> Any:
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
