"""Claim: ranks of a pipeline idle as the papers' formulas say, and hold as many activations, through the engine.

    torchrun --standalone --nproc-per-node 2 examples/benchmarks/bubble.py --out raw.json
    torchrun --standalone --nproc-per-node 4 examples/benchmarks/bubble.py --out raw.json

`accelerator.prepare` and `model(**batch)` on a Llama whose blocks sleep: in the forward, in the backward for inputs and
in that for weights, apart, so that a backward takes two forwards and any number of ranks fits on two cores. All else is
tiny. Two blocks a rank, which is one a stage where a rank has two. One batch is measured, the third; of pipedream,
three, between the first backward and the last forward of every rank.

    gpipe, 1f1b     (p-1)/(m+p-1), within 3 points         zero-bubble, zbv    below half of 1f1b's formula
    interleaved     (p-1)/(vm+p-1), within 3 points        pipedream           below 5 % once it runs

Sleeping ranks leave the machine free, but a machine that is not free wakes them late: see the load in the record.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

import engines
import torch
import torch.distributed as dist
from torch import Tensor, nn

from hfdist.plan.schedule import SCHEDULES, plan_schedule

WIDTH, VOCAB, LENGTH, BLOCKS = 16, 61, 5, 2
ABOVE = 0.03  # how far from the formula


class _SleepInBackward(torch.autograd.Function):
    """The identity; its backward sleeps for `clock[0]` seconds."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, clock: list[float]) -> Tensor:
        ctx.clock = clock
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        time.sleep(ctx.clock[0])
        return gradient, None


class SleepingLinear(nn.Linear):
    """A linear layer that sleeps in its forward, in the backward of its input and in that of its weight."""

    clock: list[float]

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.clock[0])
        weight = _SleepInBackward.apply(self.weight, self.clock)
        return nn.functional.linear(_SleepInBackward.apply(x, self.clock), weight, self.bias)


def build_model(num_layers: int, clock: list[float]) -> nn.Module:
    """A tiny Llama, each block of which sleeps once, in its MLP."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=WIDTH, num_hidden_layers=num_layers,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=32,
    )  # fmt: skip
    model = LlamaForCausalLM(config).train()
    for layer in model.model.layers:
        layer.mlp.down_proj.__class__ = SleepingLinear
        layer.mlp.down_proj.clock = clock
    return model


def measure(name: str, *, num_micro_batches: int, sleep: float) -> dict[str, Any]:
    """One schedule on all ranks: idle share, formula, activations held, all spans."""
    from hfdist import Accelerator, PipelineParallelPlugin
    from hfdist.measure.timeline import as_record, gather_timeline, num_recorded, record_timeline, schedule_of
    from hfdist.plan.timeline import plan_timeline, steady_bubble

    p = dist.get_world_size()
    planned = plan_schedule(name, num_ranks=p, num_micro_batches=num_micro_batches)
    plugin = PipelineParallelPlugin(
        pp_size=p,
        schedule=name,
        num_micro_batches=num_micro_batches,
        num_virtual_stages=planned.num_virtual_stages,
        split=(BLOCKS // planned.num_virtual_stages,) * planned.num_stages,
    )
    clock = [0.0]
    accelerator = Accelerator(plugins=[plugin])
    model = build_model(BLOCKS * p, clock)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    ids = torch.randint(VOCAB, (num_micro_batches, LENGTH), generator=torch.Generator().manual_seed(1))

    def step() -> None:
        accelerator.backward(model(input_ids=ids, labels=ids).loss)
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):  # connections and buffers are made
        step()
    pipeline = accelerator.engine.of(model).split.pipeline
    with record_timeline(pipeline) as events:
        clock[0] = sleep
        for _ in range(num_recorded(name)):
            step()
    timeline = gather_timeline(events, pipeline.group)
    order = schedule_of(pipeline)
    accelerator.free_memory()
    return {
        "idle": steady_bubble(order, timeline),
        "ideal": steady_bubble(order, plan_timeline(order)),
        "formula": order.bubble_formula,
        "held": [timeline.activations_held(rank, order.num_virtual_stages) for rank in range(p)],
        "load": os.getloadavg()[0],
        **as_record(order, timeline),
    }


def target(name: str, *, num_ranks: int, num_micro_batches: int) -> tuple[float, float, str]:
    """(least, most, in words) that a schedule may idle."""
    formula = plan_schedule(name, num_ranks=num_ranks, num_micro_batches=num_micro_batches).bubble_formula
    if name == "pipedream":
        return 0.0, 0.05, "below 5 %"
    if formula is not None:
        words, value = formula
        return value - ABOVE, value + ABOVE, f"{words} = {100 * value:.1f} %, within {100 * ABOVE:.0f} points"
    one = plan_schedule("1f1b", num_ranks=num_ranks, num_micro_batches=num_micro_batches).bubble_formula
    assert one is not None
    return 0.0, one[1] / 2, f"below {100 * one[1] / 2:.1f} %, half of 1f1b's"


def show(name: str, row: dict[str, Any], *, num_micro_batches: int) -> None:
    least, most, words = target(name, num_ranks=dist.get_world_size(), num_micro_batches=num_micro_batches)
    reached = "reached" if least <= row["idle"] <= most else "MISSED"
    held = ", ".join(f"{count:g}" for count in row["held"])
    print(
        f"{name:12} idle {100 * row['idle']:5.1f} % (ideal {100 * row['ideal']:4.1f} %; target {words}: {reached}); "
        f"micro-batches held at most: {held}; load {row['load']:.1f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", nargs="*", default=list(SCHEDULES), choices=list(SCHEDULES))
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--sleep", type=float, default=0.1, help="seconds of a block's forward (a backward: twice)")
    parser.add_argument("--out", type=Path, help="write everything measured to this json file")
    args = parser.parse_args()
    rank, num_ranks = engines.start_ranks()
    if rank == 0:
        print(f"{num_ranks} ranks, {args.micro_batches} micro-batches, commit {engines.commit()}", flush=True)
    results = {}
    for name in args.schedules:
        results[name] = measure(name, num_micro_batches=args.micro_batches, sleep=args.sleep)
        if rank == 0:
            show(name, results[name], num_micro_batches=args.micro_batches)
    if rank == 0:
        engines.write_raw(args.out, args, results)
    sys.stdout.flush()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
