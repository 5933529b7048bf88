"""Claim: the memory a rank really takes is at most bare FSDP2's at stage 3, and at most DeepSpeed's at every stage.

    python examples/benchmarks/resident.py --world-size 2 --out raw.json

Each engine of `engines.py` gets processes of its own. What is printed is the growth of anonymous resident memory from
after the imports to the peak of three steps, looked at every 2 ms, the largest of the ranks; the model as it is built
whole on every rank before an engine shards it is part of it, and so is printed beside the peak of the steps alone.
glibc is told to give freed memory back, or the numbers would mean little.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
from pathlib import Path

import engines
import torch.distributed as dist

MALLOC = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}
PAIRS = {
    ("hfdist 1", "deepspeed 1"),
    ("hfdist 2", "deepspeed 2"),
    ("hfdist 3", "deepspeed 3"),
    ("hfdist 3", "deepspeed 3 saving"),
    ("hfdist 2", "fsdp2 kept"),
    ("hfdist 3", "fsdp2 reshard"),
}


def work(args: argparse.Namespace) -> None:
    """One rank of one engine: print [whole growth, growth in the steps, at rest after them] in bytes as json."""
    from hfdist.measure.resident import anonymous_bytes, sample_resident

    rank, _ = engines.start_ranks()
    (name,) = args.engines
    import hfdist.accelerator
    import hfdist.recipe.wires  # noqa: F401

    if name.startswith("deepspeed"):
        import deepspeed  # noqa: F401
    engines.build_llama(argparse.Namespace(**{**vars(args), "layers": 1, "width": 64, "vocab": 64}))
    gc.collect()
    with sample_resident() as whole:
        step = engines.build_engine(name, lambda: engines.build_llama(args), engines.setting_of(args))
        batches = engines.build_batches(args)
        step(batches)  # the optimizer's state exists from here on
        gc.collect()
        with sample_resident() as steps:
            for _ in range(2):
                step(batches)
        gc.collect()
        rest = (anonymous_bytes() or 0) - whole.start
    seen = engines.over_ranks([float(whole.growth), float(steps.peak - whole.start), float(rest)])
    if rank == 0:
        print("MEASURED " + json.dumps(seen), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def launch(name: str, args: argparse.Namespace) -> dict[str, object]:
    passed = ["--layers", args.layers, "--width", args.width, "--vocab", args.vocab, "--seq-len", args.seq_len]
    passed += ["--batch-size", args.batch_size, "--micro-steps", args.micro_steps, "--precision", args.precision]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    command += ["--nproc-per-node", str(args.world_size), __file__, "--engines", name, "--worker", *map(str, passed)]
    done = subprocess.run(command, env=os.environ | MALLOC, capture_output=True, text=True, timeout=300, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("MEASURED ")]
    if not lines:
        return {"error": (done.stderr.strip().splitlines() or ["nothing was printed"])[-1]}
    whole, steps, rest = (max(ranks) for ranks in zip(*json.loads(lines[0].split(" ", 1)[1]), strict=True))
    return {"whole": whole, "steps": steps, "rest": rest}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    engines.add_arguments(parser)
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args)
        return
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    results = {}
    for name in args.engines:
        row = results[name] = launch(name, args)
        if "error" in row:
            print(f"{name:20} {row['error']}", flush=True)
            continue
        print(
            f"{name:20} peak {row['steps'] / 1e6:7.0f} MB in a step, {row['rest'] / 1e6:7.0f} MB after it, "
            f"{row['whole'] / 1e6:7.0f} MB with the building",
            flush=True,
        )
    for ours, theirs in sorted(PAIRS):
        if all("error" not in results.get(name, {"error": ""}) for name in (ours, theirs)):
            print(f"{ours} / {theirs}: {results[ours]['steps'] / results[theirs]['steps']:.3f} (target 1.00)")
    engines.write_raw(args.out, args, results)


if __name__ == "__main__":
    main()
