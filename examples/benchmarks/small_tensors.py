"""Claim: what hfdist spends on each parameter tensor is no more than what native DeepSpeed spends.

    torchrun --standalone --nproc-per-node 2 examples/benchmarks/small_tensors.py --out raw.json

A model of 50 blocks with 20 small linear layers each, 2,000 tensors of 16 x 16 and 16 elements, so that next to nothing
but the engines' own work is left. Overhead per tensor is an engine's CPU time a step less that of the same step without
an engine, over 2,000. Engines take turns as in `step_time.py`.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from typing import Any

import engines
import torch
import torch.distributed as dist
from step_time import add_rounds, measure
from torch import nn
from transformers.modeling_outputs import CausalLMOutput

WIDTH, BLOCKS, LAYERS = 16, 50, 20
PAIRS = {"hfdist 1": "deepspeed 1", "hfdist 2": "deepspeed 2", "hfdist 3": "deepspeed 3"}


class Block(nn.Module):
    """LAYERS linear layers around a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layers(x)


class ManySmall(nn.Module):
    """Token ids (batch, seq) -> loss; the table that stands for embeddings is not trained."""

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.register_buffer("table", torch.randn(vocab, WIDTH))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> CausalLMOutput:
        x = self.table[input_ids]
        for block in self.blocks:
            x = block(x)
        return CausalLMOutput(loss=(x - self.table[labels].roll(1, 0)).pow(2).mean())


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return ManySmall(vocab=64).train()


def show(args: argparse.Namespace, results: dict[str, Any]) -> None:
    num_tensors = len(list(build_model().parameters()))
    print(f"{num_tensors:,} tensors, {dist.get_world_size()} ranks, commit {engines.commit()}")
    alone = statistics.median(results["alone"]["cpu"])
    overhead = {}
    for name in args.engines:
        if "error" in results[name]:
            print(f"{name:20} {results[name]['error'].splitlines()[0]}")
            continue
        cpu, wall = statistics.median(results[name]["cpu"]), statistics.median(results[name]["wall"])
        overhead[name] = (cpu - alone) / num_tensors * 1e6
        print(f"{name:20} CPU {cpu:.4f} s, wall {wall:.4f} s, overhead {overhead[name]:6.1f} us a tensor")
    for ours, theirs in PAIRS.items():
        if ours in overhead and theirs in overhead:
            ratio = overhead[ours] / overhead[theirs]
            print(f"{ours} / {theirs}: {ratio:.3f} (target 1.00, {'reached' if ratio <= 1 else 'MISSED'})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    engines.add_arguments(parser)
    add_rounds(parser)
    args = parser.parse_args()
    args.vocab = 64
    args.engines = ["alone", *(name for name in args.engines if name != "alone")]
    rank, _ = engines.start_ranks()
    results = measure(args, build_model)
    if rank == 0:
        show(args, results)
        engines.write_raw(args.out, args, results)
    sys.stdout.flush()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
