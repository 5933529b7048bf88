"""What the benchmarks share: the engines, built alike, and how they are stepped, timed and written down.

Every engine trains the same Llama from the same weights on the same tokens with the same fused torch AdamW, nothing
clipped, in one group of gloo processes:

    ddp                  DistributedDataParallel, gradients as bucket views; bf16: autocast, as accelerate does
    fsdp2 kept           fully_shard, parameters kept from a window's first forward to its last backward (as ZeRO-2)
    fsdp2 reshard        fully_shard, parameters freed after every forward and backward (as ZeRO-3)
    hfdist 0..3          hfdist.Accelerator at that ZeRO stage
    alone                no engine, every rank for itself: what the work costs without distribution
    deepspeed 1..3       deepspeed.initialize; 3 with its defaults, which keep a small model gathered
    deepspeed 3 saving   3 with what makes it free parameters: no live parameters, no reuse, no persistence

In bf16 all hold fp32 masters and reduce gradients in fp32 (`--reduce bf16`: in bf16, where the engine has that).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("ACCELERATE_USE_CPU", "true")

import torch
import torch.distributed as dist
from torch import nn

# One optimizer step on k micro-batches of (batch, seq) token ids; returns the mean of their losses, detached.
Step = Callable[[list[torch.Tensor]], torch.Tensor]

RECORDS = Path(__file__).resolve().parent / "records"
LEARNING_RATE = 1e-4
ENGINES = (
    *("ddp", "fsdp2 kept", "fsdp2 reshard", "hfdist 0", "hfdist 1", "hfdist 2", "hfdist 3"),
    *("deepspeed 1", "deepspeed 2", "deepspeed 3", "deepspeed 3 saving"),
)
ALL_ENGINES = ("alone", *ENGINES)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What all engines of a run are given."""

    precision: str = "fp32"  # "fp32" or "bf16"
    reduce: str = "fp32"  # dtype of gradient reductions in bf16 runs
    micro_steps: int = 1
    batch_size: int = 2  # sequences per micro-step and rank


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What a benchmark on the Llama takes; the defaults are its 34 M parameters."""
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--batch-size", type=int, default=2, help="sequences per micro-step and rank")
    parser.add_argument("--seq-len", type=int, default=64)
    parser.add_argument("--micro-steps", type=int, default=1, help="gradient accumulation")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--reduce", choices=["fp32", "bf16"], default="fp32", help="gradient reductions in a bf16 run")
    parser.add_argument("--engines", nargs="*", default=list(ENGINES), choices=list(ALL_ENGINES))
    parser.add_argument("--out", type=Path, help="write everything measured to this json file")


def setting_of(args: argparse.Namespace) -> Setting:
    return Setting(
        precision=args.precision, reduce=args.reduce, micro_steps=args.micro_steps, batch_size=args.batch_size
    )


def build_llama(args: argparse.Namespace) -> nn.Module:
    """The same weights at every call (fp32)."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=args.vocab,
            hidden_size=args.width,
            intermediate_size=args.width * 43 // 16,
            num_hidden_layers=args.layers,
            num_attention_heads=8,
            num_key_value_heads=8,
            use_cache=False,
        )
    ).train()


def build_batches(args: argparse.Namespace) -> list[torch.Tensor]:
    """This rank's micro-batches, the same every step."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    shape = (args.batch_size, args.seq_len)
    return [torch.randint(0, args.vocab, shape, generator=generator) for _ in range(args.micro_steps)]


# ------------------------------------------------------------------------------------------------------- engines


def build_engine(name: str, build_model: Callable[[], nn.Module], setting: Setting) -> Step:
    """The engine called `name` (see ENGINES) around a new model."""
    kind, *rest = name.split()
    if kind == "alone":
        return _alone(build_model(), setting)
    if kind == "ddp":
        return _ddp(build_model(), setting)
    if kind == "fsdp2":
        return _fsdp2(build_model(), setting, reshard=rest == ["reshard"])
    if kind == "hfdist":
        return _hfdist(build_model(), setting, stage=int(rest[0]))
    return _deepspeed(build_model(), setting, stage=int(rest[0]), saving=rest[1:] == ["saving"])


def build_optimizer(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)


def _loss(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids, labels=ids).loss


def _alone(model: nn.Module, setting: Setting) -> Step:
    optimizer = build_optimizer(model)

    def step(batches: list[torch.Tensor]) -> torch.Tensor:
        losses = []
        for ids in batches:
            with torch.autocast("cpu", torch.bfloat16, enabled=setting.precision == "bf16"):
                loss = _loss(model, ids)
            (loss / len(batches)).backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).mean()

    return step


def _ddp(model: nn.Module, setting: Setting) -> Step:
    from torch.nn.parallel import DistributedDataParallel

    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = build_optimizer(wrapped)
    if setting.reduce == "bf16":
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

        wrapped.register_comm_hook(None, bf16_compress_hook)

    def step(batches: list[torch.Tensor]) -> torch.Tensor:
        losses = []
        for number, ids in enumerate(batches):
            last = number == len(batches) - 1
            with contextlib.nullcontext() if last else wrapped.no_sync():
                with torch.autocast("cpu", torch.bfloat16, enabled=setting.precision == "bf16"):
                    loss = _loss(wrapped, ids)
                (loss / len(batches)).backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).mean()

    return step


def _fsdp2(model: Any, setting: Setting, *, reshard: bool) -> Step:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy()
    if setting.precision == "bf16":
        reduce_dtype = torch.float32 if setting.reduce == "fp32" else torch.bfloat16
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    blocks = model.model.layers if hasattr(model, "model") else model.blocks
    for block in blocks:
        fully_shard(block, reshard_after_forward=reshard, mp_policy=policy)
    fully_shard(model, reshard_after_forward=reshard, mp_policy=policy)
    optimizer = build_optimizer(model)

    def step(batches: list[torch.Tensor]) -> torch.Tensor:
        losses = []
        for number, ids in enumerate(batches):
            if not reshard:
                model.set_reshard_after_backward(number == len(batches) - 1)
            loss = _loss(model, ids)
            (loss / len(batches)).backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).mean()

    return step


def _hfdist(model: nn.Module, setting: Setting, *, stage: int) -> Step:
    from hfdist import Accelerator, AmpPlugin, ZeroPlugin

    plugins: list[Any] = [ZeroPlugin(stage=stage, reduce_dtype="fp32" if setting.reduce == "fp32" else "compute")]
    if setting.precision == "bf16":
        plugins.append(AmpPlugin(dtype="bf16"))
    accelerator = Accelerator(plugins=plugins, gradient_accumulation_steps=setting.micro_steps)
    prepared, optimizer = accelerator.prepare(model, build_optimizer(model))

    def step(batches: list[torch.Tensor]) -> torch.Tensor:
        losses = []
        for ids in batches:
            with accelerator.accumulate(prepared):
                loss = _loss(prepared, ids)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.detach())
        return torch.stack(losses).mean()

    return step


def _deepspeed(model: nn.Module, setting: Setting, *, stage: int, saving: bool) -> Step:
    from hfdist.native import prepare_op_build

    prepare_op_build(os.environ)
    import deepspeed

    zero: dict[str, Any] = {"stage": stage}
    if stage == 3 and saving:
        zero |= {
            "stage3_max_live_parameters": 0,
            "stage3_max_reuse_distance": 0,
            "stage3_param_persistence_threshold": 0,
            "stage3_prefetch_bucket_size": 0,
        }
    config = {
        "train_micro_batch_size_per_gpu": setting.batch_size,
        "gradient_accumulation_steps": setting.micro_steps,
        "gradient_clipping": 0.0,
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
        "wall_clock_breakdown": False,
    }
    if setting.precision == "bf16":
        config |= {"bf16": {"enabled": True}, "communication_data_type": setting.reduce}
        config |= {"data_types": {"grad_accum_dtype": "fp32"}}
    engine, *_ = deepspeed.initialize(model=model, optimizer=build_optimizer(model), config=config)

    def step(batches: list[torch.Tensor]) -> torch.Tensor:
        losses = []
        for ids in batches:
            loss = _loss(engine, ids)
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach())
        return torch.stack(losses).mean()

    return step


# ------------------------------------------------------------------------------------------------------ measuring


def start_ranks() -> tuple[int, int]:
    """Join the gloo group that torchrun describes; (rank, number of ranks)."""
    import logging

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    os.environ.setdefault("DS_LOG_LEVEL", "error")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    return dist.get_rank(), dist.get_world_size()


def sent_bytes(name: str, step: Callable[[], object]) -> int:
    """Bytes this rank sends in one `step()`: ours as counted where issued, others' as seen in torch's dispatcher."""
    from hfdist.measure.wire import record_wire
    from hfdist.recipe.wires import watch_collectives

    with record_wire() as wire, contextlib.nullcontext() if name.startswith("hfdist") else watch_collectives():
        step()
    return wire.total_bytes


@dataclass
class Clock:
    """CPU seconds (all threads of the process) and wall seconds of a block."""

    cpu: float = 0.0
    wall: float = 0.0

    def __enter__(self) -> Clock:
        self._cpu, self._wall = time.process_time(), time.perf_counter()
        return self

    def __exit__(self, *unused: object) -> None:
        self.cpu += time.process_time() - self._cpu
        self.wall += time.perf_counter() - self._wall


def same_on_all(flag: bool) -> bool:
    """Rank 0's `flag`, on every rank."""
    decided = torch.tensor(flag)
    dist.broadcast(decided, 0)
    return bool(decided)


def over_ranks(values: list[float]) -> list[list[float]]:
    """Every rank's `values`, by rank."""
    gathered: list[list[float]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, values)
    return gathered


def versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    found = {"python": platform.python_version()}
    for package in ("torch", "accelerate", "transformers", "deepspeed"):
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def commit() -> str:
    """The commit measured; "+changes" when the working tree differs from it."""

    def git(*command: str) -> str:
        done = subprocess.run(["git", *command], cwd=RECORDS, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", "../../../hfdist")
    return git("rev-parse", "--short", "HEAD") + ("+changes" if changed else "")


def write_raw(out: Path | None, args: argparse.Namespace, results: Any) -> None:
    """Everything measured, with what it was measured on, as json."""
    if out is None:
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    raw = {
        "command": " ".join([Path(sys.argv[0]).name, *(word.replace(str(out), out.name) for word in sys.argv[1:])]),
        "arguments": {key: value.name if isinstance(value, Path) else value for key, value in vars(args).items()},
        "versions": versions(),
        "commit": commit(),
        "cpus": os.cpu_count(),
        "peak_resident_kib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        "results": results,
    }
    out.write_text(json.dumps(raw, indent=1) + "\n")
