"""One rank of a test pool: what runs inside the worker process.

Imported once by the fork server (see `tests.pool`), so that torch, accelerate and transformers are loaded a single time
and a new rank costs a fork. Every call starts as a fresh `accelerate launch` would: own default process group on gloo,
environment, accelerate state, seeds and torch defaults as at the start.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import gc
import importlib
import os
import pickle
import random
import signal
import sys
import threading
import traceback
from collections.abc import Mapping
from multiprocessing.connection import Connection, wait
from multiprocessing.process import parent_process
from typing import Any

import numpy
import torch
import torch.distributed as dist
import torch.distributed.fsdp
import torch.distributed.tensor
import transformers.models.gpt2.modeling_gpt2
import transformers.models.llama.modeling_llama  # noqa: F401  (loaded here so that no rank pays for it)
from accelerate.state import AcceleratorState, GradientState

gc.collect()
gc.freeze()  # what is loaded now is shared between ranks by copy on write, and never collected again

# A function bound before hfdist was ever imported, as a script's first lines bind it.
EARLY_CLIP = torch.nn.utils.clip_grad_norm_
# A collective that waits longer than this raises in its rank; `Pool.run` normally ends the call before.
GROUP_TIMEOUT = datetime.timedelta(seconds=120)


# Accelerators of the running call: freed at its end, or their process groups (and gloo's threads) would pile up.
_made: list[Any] = []


def launch_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """What a child of `accelerate launch` on a CPU machine finds in its environment, for one node."""
    env = {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "ACCELERATE_MIXED_PRECISION": "no"}
    if world_size > 1:
        env |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
    return env


def make_accelerator(*, env: Mapping[str, str] | None = None, **kwargs: Any) -> Any:
    """`hfdist.Accelerator(**kwargs)` in this rank, with `env` on top of what `accelerate launch` sets.

    Called again in one test it forgets the accelerator before it, as a new process would.
    """
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    os.environ.update(env or {})
    accelerator = importlib.import_module("hfdist").Accelerator(**kwargs)
    _made.append(accelerator)
    return accelerator


def serve(rank: int, world_size: int, conn: Connection, log_path: str, stack_path: str, paths: list[str]) -> None:
    """Run the calls that arrive on `conn` until it closes. Entry point of a rank's process.

    A call is the pickle of (function, args, kwargs); the answer `("ok", value)` or `("error", type, text, traceback)`.
    """
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    # The file must outlive this frame: faulthandler keeps only its descriptor.
    stacks = open(stack_path, "w")  # noqa: SIM115
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    faulthandler.enable(file=stacks)
    sys.path[:] = paths
    threading.Thread(target=_follow_parent, daemon=True).start()
    torch.set_num_threads(1)

    store: dist.Store | None = None
    port = 0
    if world_size > 1:
        store, port = _meet(rank, world_size, conn)
    for name in [n for n in os.environ if n.startswith(("ACCELERATE_", "HFDIST_", "FSDP_", "MEGATRON_"))]:
        del os.environ[name]
    os.environ.update(launch_environment(rank, world_size, port))
    environment = dict(os.environ)
    call = 0
    while True:
        try:
            message = conn.recv_bytes()
        except (EOFError, OSError):
            os._exit(0)
        call += 1
        try:
            _start_call(rank, world_size, store, call)
            function, args, kwargs = pickle.loads(message)
            answer = pickle.dumps(("ok", function(*args, **kwargs)))
        except BaseException as error:
            answer = pickle.dumps(("error", type(error).__name__, str(error), traceback.format_exc()))
            error.__traceback__ = None
        sys.stdout.flush()
        sys.stderr.flush()
        conn.send_bytes(answer)
        _end_call(environment)


def _meet(rank: int, world_size: int, conn: Connection) -> tuple[dist.Store, int]:
    """A TCP store on a port that the system chose: rank 0 tells the pool, the pool tells the others."""
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, world_size, is_master=True, wait_for_workers=False)
        conn.send(store.port)
        return store, store.port
    port = conn.recv()
    return dist.TCPStore("127.0.0.1", port, world_size, is_master=False), port


def _start_call(rank: int, world_size: int, store: dist.Store | None, call: int) -> None:
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)
    if store is not None:
        # New group and new keys for each call: no collective, counter or subgroup of the last one can be met again.
        prefixed = dist.PrefixStore(f"call{call}", store)
        dist.init_process_group("gloo", store=prefixed, rank=rank, world_size=world_size, timeout=GROUP_TIMEOUT)


def _end_call(environment: dict[str, str]) -> None:
    while _made:
        with contextlib.suppress(Exception):  # after a failed call anything may be half done; the pool is replaced
            _made.pop().free_memory()
    hfdist = sys.modules.get("hfdist")
    if hfdist is not None and "hfdist.launch" in sys.modules:
        with contextlib.suppress(AttributeError):
            hfdist.unpatch()
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()
    os.environ.clear()
    os.environ.update(environment)
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(False)


def _follow_parent() -> None:
    """End this rank when the pool's process is gone, also in the middle of a collective."""
    parent = parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
