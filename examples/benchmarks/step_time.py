"""Claim: a step of hfdist costs about what torch's own engines cost.

    torchrun --nproc-per-node 2 examples/benchmarks/step_time.py --layers 8 --width 512

Every engine trains the same Llama on the same tokens: torch DDP, bare FSDP2 (kept and resharded after forward), and
hfdist at stages 0 to 3. They take turns, step by step, so that a busy machine disturbs all alike, and CPU time is
compared (not the wall clock), as seconds per step of the slower rank and as a ratio to DDP. Losses must agree. One JSON
line per engine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("ACCELERATE_USE_CPU", "true")

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

from hfdist import Accelerator, ZeroPlugin
from hfdist.measure.wire import record_wire

# Trains one step on (batch, seq) token ids and returns the loss.
Step = Callable[[torch.Tensor], torch.Tensor]


def build_model(args: argparse.Namespace) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=args.vocab,
        hidden_size=args.width,
        intermediate_size=args.width * 8 // 3,
        num_hidden_layers=args.layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def build_optimizer(model: torch.nn.Module, *, fused: bool) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=fused)


def plain_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def step(ids: torch.Tensor) -> torch.Tensor:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def ddp(args: argparse.Namespace, *, fused: bool) -> Step:
    model = DistributedDataParallel(build_model(args), gradient_as_bucket_view=True)
    return plain_step(model, build_optimizer(model, fused=fused))


def fsdp2(args: argparse.Namespace, *, reshard: bool) -> Step:
    model = build_model(args)
    for layer in model.model.layers:
        fully_shard(layer, reshard_after_forward=reshard)
    fully_shard(model, reshard_after_forward=reshard)
    return plain_step(model, build_optimizer(model, fused=True))


def hfdist(args: argparse.Namespace, *, stage: int) -> Step:
    accelerator = Accelerator(plugins=[ZeroPlugin(stage=stage)])
    model = build_model(args)
    model, optimizer = accelerator.prepare(model, build_optimizer(model, fused=True))

    def step(ids: torch.Tensor) -> torch.Tensor:
        loss = model(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


ENGINES: dict[str, Callable[[argparse.Namespace], Step]] = {
    "ddp": lambda args: ddp(args, fused=False),
    "ddp fused": lambda args: ddp(args, fused=True),
    "fsdp2 kept": lambda args: fsdp2(args, reshard=False),
    "fsdp2 reshard": lambda args: fsdp2(args, reshard=True),
    "hfdist 0": lambda args: hfdist(args, stage=0),
    "hfdist 1": lambda args: hfdist(args, stage=1),
    "hfdist 2": lambda args: hfdist(args, stage=2),
    "hfdist 3": lambda args: hfdist(args, stage=3),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--seq-len", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5, help="timed steps of each engine")
    parser.add_argument("--engines", nargs="*", default=list(ENGINES), choices=list(ENGINES))
    args = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(rank)
    ids = torch.randint(0, args.vocab, (args.batch_size, args.seq_len), generator=generator)
    steps = {name: ENGINES[name](args) for name in args.engines}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    losses: dict[str, list[float]] = {name: [] for name in steps}
    sent: dict[str, int] = {}
    for round_number in range(args.rounds + 1):
        for name, step in steps.items():
            dist.barrier()
            with record_wire() as wire:
                started = time.process_time()
                loss = step(ids)
                spent = torch.tensor(time.process_time() - started)
            dist.all_reduce(spent, dist.ReduceOp.MAX)
            dist.all_reduce(loss)
            losses[name].append(float(loss) / world_size)
            sent[name] = wire.total_bytes
            if round_number:  # in the first, engines set themselves up
                seconds[name].append(float(spent))
    if rank == 0:
        numel = sum(p.numel() for p in build_model(args).parameters())
        print(f"{numel:,} parameters, {world_size} ranks, torch {torch.__version__}, {args.rounds} interleaved rounds")
        first = next(iter(steps))
        for name in steps:
            median = statistics.median(seconds[name])
            worst = max(abs(a - b) for a, b in zip(losses[name], losses[first], strict=True))
            row = {
                "engine": name,
                "cpu_seconds": round(median, 4),
                "ratio": round(median / statistics.median(seconds[first]), 3),
                "least": round(min(seconds[name]), 4),
                "loss_off": worst,
                "wire_in_P": round(sent[name] / numel / 4, 3) if name.startswith("hfdist") else None,
            }
            print(json.dumps(row), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
