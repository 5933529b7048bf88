"""Claim: with `LossPlugin(chunk_size=...)` a step's peak memory no longer holds the logits of the whole batch.

    python examples/benchmarks/chunked_loss.py --out raw.json

Trains a small Llama with a large vocabulary (one process, stage 0) with whole logits and with chunks of them, each in a
process of its own, and prints the growth of anonymous resident memory over a step, the loss, and CPU seconds per step.
glibc is told to give freed memory back, or the numbers would mean little.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys

import engines
import torch

MALLOC = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}


def work(args: argparse.Namespace, chunk_size: int) -> None:
    """One process: print the growth in a step (bytes), the loss after `--steps`, and CPU seconds per step."""
    from hfdist import Accelerator, LossPlugin, ZeroPlugin
    from hfdist.measure.resident import sample_resident

    torch.set_num_threads(1)
    plugins = [ZeroPlugin(stage=0), *([LossPlugin(chunk_size)] if chunk_size else [])]
    accelerator = Accelerator(plugins=plugins)
    model = engines.build_llama(args)
    model, optimizer = accelerator.prepare(model, engines.build_optimizer(model))
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, args.vocab, (args.batch_size, args.seq_len), generator=generator)

    def step() -> float:
        loss = model(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    step()  # the optimizer's state exists from here on
    clock = engines.Clock()
    with sample_resident() as seen, clock:
        for _ in range(args.steps):
            loss = step()
    print("MEASURED " + json.dumps({"growth": seen.growth, "loss": loss, "cpu_seconds": clock.cpu / args.steps}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    engines.add_arguments(parser)
    parser.set_defaults(layers=2, width=192, vocab=32_000, batch_size=4, seq_len=512)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--chunks", type=int, nargs="*", default=[0, 1024, 256, 64], help="0: whole logits")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker is not None:
        work(args, args.worker)
        return
    logits = args.batch_size * args.seq_len * args.vocab * 4
    print(f"fp32 logits of {args.batch_size} x {args.seq_len} tokens: {logits / 1e6:.0f} MB")
    results = {}
    for chunk in args.chunks:
        command = [sys.executable, __file__, *sys.argv[1:], "--worker", str(chunk)]
        done = subprocess.run(
            command, env=os.environ | MALLOC, capture_output=True, text=True, timeout=300, check=False
        )
        lines = [line for line in done.stdout.splitlines() if line.startswith("MEASURED ")]
        if not lines:
            sys.exit(done.stderr[-4000:])
        row = results[chunk] = json.loads(lines[0].split(" ", 1)[1])
        base = results[args.chunks[0]]
        print(
            f"chunk {chunk or 'none':>5}  grows by {row['growth'] / 1e6:6.0f} MB in a step "
            f"({row['growth'] / base['growth']:.3f}), loss {row['loss']:.6f}, {row['cpu_seconds']:.2f} CPU s a step "
            f"({row['cpu_seconds'] / base['cpu_seconds']:.2f})",
            flush=True,
        )
    engines.write_raw(args.out, args, results)


if __name__ == "__main__":
    main()
