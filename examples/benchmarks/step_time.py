"""Claim: a step of hfdist costs less than native DeepSpeed's and about what torch's own engines cost.

    torchrun --standalone --nproc-per-node 2 examples/benchmarks/step_time.py --precision bf16 --out raw.json

All engines (`engines.py`) are built in one group of processes and take turns, step by step, so that a busy machine
disturbs all alike. A round is 8 steps of each; CPU seconds per step (all threads, mean over the ranks) and wall seconds
are medians over the rounds, and ratios are taken round by round before their median. Losses must agree. Bytes sent are
counted in a pass of their own, in P (one copy of the parameters, fp32).
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import engines
import torch
import torch.distributed as dist

# The target ratios of CPU time: (engine, over) -> at most.
TARGETS = {
    ("hfdist 1", "deepspeed 1"): 0.80,
    ("hfdist 2", "deepspeed 2"): 0.78,
    ("hfdist 3", "deepspeed 3"): 0.75,
    ("hfdist 3", "deepspeed 3 saving"): 0.75,
    ("hfdist 0", "ddp"): 1.00,
    ("hfdist 1", "ddp"): 1.08,
    ("hfdist 2", "ddp"): 1.08,
    ("hfdist 3", "ddp"): 1.15,
    ("hfdist 2", "fsdp2 kept"): 0.90,
    ("hfdist 3", "fsdp2 reshard"): 0.90,
}
# And of bytes sent.
WIRE_TARGETS = {
    ("hfdist 1", "deepspeed 1"): 0.68,
    ("hfdist 2", "deepspeed 2"): 0.68,
    ("hfdist 3", "deepspeed 3 saving"): 0.76,
}


def measure(args: argparse.Namespace, build_model: Callable[[], torch.nn.Module]) -> dict[str, Any]:
    """By engine: per round CPU and wall seconds a step (CPU by rank too), losses of all steps, bytes sent."""
    setting, batches = engines.setting_of(args), engines.build_batches(args)
    steps, failed = {}, {}
    for name in args.engines:
        try:
            steps[name] = engines.build_engine(name, build_model, setting)
        except Exception as error:  # the others go on; the row says why
            failed[name] = f"{type(error).__name__}: {error}"
    losses: dict[str, list[float]] = {name: [] for name in steps}
    sent: dict[str, int] = {}
    for _ in range(args.warmup):
        for name, step in steps.items():
            losses[name].append(float(step(batches)))
    for name, step in steps.items():
        sent[name] = engines.sent_bytes(name, lambda: losses[name].append(float(step(batches))))  # noqa: B023
    rounds: dict[str, list[engines.Clock]] = {name: [] for name in steps}
    gc.collect()
    gc.freeze()
    results: dict[str, Any] = {}
    began = time.monotonic()
    for number in range(args.rounds):
        if not engines.same_on_all(number == 0 or time.monotonic() - began < args.seconds):
            break
        clocks = {name: engines.Clock() for name in steps}
        for turn in range(args.steps):
            order = list(steps)
            start = (number * args.steps + turn) % len(order)  # nobody always follows the same engine
            for name in order[start:] + order[:start]:
                dist.barrier()
                with clocks[name]:
                    loss = steps[name](batches)
                losses[name].append(float(loss))
        for name, clock in clocks.items():
            rounds[name].append(clock)
        # After every round, so that what was measured survives a run that is ended early.
        results = {name: _collect(args, rounds[name], losses[name], sent[name]) for name in steps}
        results |= {name: {"error": words} for name, words in failed.items()}
        if dist.get_rank() == 0:
            engines.write_raw(args.out, args, results)
    return results


def _collect(args: argparse.Namespace, rounds: list[engines.Clock], losses: list[float], sent: int) -> dict[str, Any]:
    cpu = engines.over_ranks([clock.cpu / args.steps for clock in rounds])
    wall = engines.over_ranks([clock.wall / args.steps for clock in rounds])
    by_rank = engines.over_ranks(losses)
    return {
        "cpu_by_rank": cpu,
        "cpu": [statistics.mean(ranks) for ranks in zip(*cpu, strict=True)],
        "wall": [max(ranks) for ranks in zip(*wall, strict=True)],
        "losses": [statistics.mean(ranks) for ranks in zip(*by_rank, strict=True)],
        "sent_bytes": engines.over_ranks([sent]),
    }


def ratio(results: dict[str, Any], kind: str, engine: str, over: str) -> float:
    """Median over the rounds of engine / over."""
    pairs = zip(results[engine][kind], results[over][kind], strict=True)
    return statistics.median(mine / theirs for mine, theirs in pairs)


def show(args: argparse.Namespace, results: dict[str, Any]) -> None:
    numel = sum(p.numel() for p in engines.build_llama(args).parameters())
    good = [name for name in args.engines if "error" not in results[name]]
    base = good[0]
    rounds = len(results[base]["cpu"])
    print(
        f"{numel:,} parameters, {dist.get_world_size()} ranks, {args.micro_steps} micro-steps of {args.batch_size} x "
        f"{args.seq_len} tokens, {args.precision} (reductions {args.reduce}), {rounds} rounds of {args.steps} steps, "
        f" torch {torch.__version__}, commit {engines.commit()}"
    )
    over = f"/ {base}"
    print(f"{'engine':20} {'CPU s':>7} {'spread':>7} {over:>7} {'wall s':>7} {over:>7} {'wire P':>7} {'off':>8}")
    for name in args.engines:
        row = results[name]
        if "error" in row:
            print(f"{name:20} {row['error'].splitlines()[0]}")
            continue
        cpu = statistics.median(row["cpu"])
        off = max(abs(a - b) for a, b in zip(row["losses"], results[base]["losses"], strict=True))
        print(
            f"{name:20} {cpu:7.4f} {(max(row['cpu']) - min(row['cpu'])) / cpu:7.1%} "
            f"{ratio(results, 'cpu', name, base):7.3f} {statistics.median(row['wall']):7.4f} "
            f"{ratio(results, 'wall', name, base):7.3f} {row['sent_bytes'][0][0] / numel / 4:7.3f} {off:8.1e}"
        )
    for (engine, over), target in TARGETS.items():
        if engine in good and over in good:
            cpu, wall = ratio(results, "cpu", engine, over), ratio(results, "wall", engine, over)
            said = "reached" if cpu <= target else "MISSED"
            print(f"{engine} / {over:20} CPU {cpu:.3f} (target {target:.2f}, {said}), wall {wall:.3f}")
    for (engine, over), target in WIRE_TARGETS.items():
        if engine in good and over in good:
            wire = results[engine]["sent_bytes"][0][0] / results[over]["sent_bytes"][0][0]
            said = "reached" if wire <= target else "MISSED"
            print(f"{engine} / {over:20} wire {wire:.3f} (target {target:.2f}, {said})")


def add_rounds(parser: argparse.ArgumentParser) -> None:
    """How long `measure` goes on."""
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8, help="steps of each engine in a round")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no further round after so long")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    engines.add_arguments(parser)
    add_rounds(parser)
    args = parser.parse_args()
    rank, _ = engines.start_ranks()
    results = measure(args, lambda: engines.build_llama(args))
    if rank == 0:
        show(args, results)
        engines.write_raw(args.out, args, results)
    sys.stdout.flush()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
