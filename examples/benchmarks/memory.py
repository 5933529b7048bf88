"""Claim: a rank stores what the formula says, at rest and at the peak of a step.

    python examples/benchmarks/memory.py --world-size 2 --micro-steps 2 --precision bf16

Prints for every stage what one rank was seen to hold beside `hfdist.plan`, by owner. One JSON line per stage.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ.setdefault("OMP_NUM_THREADS", "1")

from hfdist.plan import Layout
from tests.parity.measured import step_in_memory
from tests.pool import Pool


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--micro-steps", type=int, default=1)
    parser.add_argument("--precision", choices=["fp32", "bf16", "fp16"], default="fp32")
    parser.add_argument("--family", choices=["llama", "gpt2"], default="llama")
    args = parser.parse_args()
    with Pool(args.world_size) as ranks:
        for stage in (0, 1, 2, 3):
            layout = Layout(
                stage=stage, world_size=args.world_size, micro_steps=args.micro_steps, precision=args.precision
            )
            step = ranks.run(step_in_memory, layout, args.family, args.family == "gpt2", timeout=300)[0]
            seen, plan = step.memory, step.plan.memory
            row = {
                "stage": stage,
                "parameters": [seen.parameters, plan.at_rest.parameters],
                "gradients": [seen.gradients, plan.at_rest.gradients],
                "optimizer": [seen.optimizer, plan.at_rest.optimizer],
                "peak_gathered": [seen.peak_gathered, plan.peak.gathered],
                "peak_gradients": [seen.peak_gradients, plan.peak.gradients],
                "peak_total": [seen.peak_total, plan.peak_total],
            }
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
