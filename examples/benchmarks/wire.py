"""Claim: hfdist puts on the wire what its table says, as the kernel counts it.

    python examples/benchmarks/wire.py --world-size 2

Ranks run in a network namespace of their own (Linux, root); what the loopback sent in one optimizer step is printed per
rank beside our own counters, the plan and the bound, for every stage and 1 and 4 micro-steps. One JSON line per layout.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ.setdefault("OMP_NUM_THREADS", "1")

from hfdist.measure.wire import own_network_namespace


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world-size", type=int, default=2, choices=[2, 4])
    args = parser.parse_args()
    reason = own_network_namespace()
    if reason is not None:
        sys.exit(f"No network namespace of our own: {reason}.")
    # After the namespace exists: what starts from here on lives in it. The same measurement is a test.
    from tests.parity.measured import step_on_the_wire
    from tests.parity.wire_in_namespace import LAYOUTS
    from tests.pool import Pool

    with Pool(args.world_size) as ranks:
        for layout in (entry for entry in LAYOUTS if entry.world_size == args.world_size):
            steps = ranks.run(step_on_the_wire, layout, timeout=300)
            kernel, plan = steps[0].interface / len(steps), steps[0].plan.wire
            row = {
                "stage": layout.stage,
                "micro_steps": layout.micro_steps,
                "precision": layout.precision,
                "replicas": layout.dp_replicate_size,
                "kernel_bytes": round(kernel),
                "counted_bytes": steps[0].wire.total_bytes,
                "planned_bytes": plan.expected,
                "bound_bytes": plan.bound,
                "kernel_over_bound": round(kernel / plan.bound, 4),
            }
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
