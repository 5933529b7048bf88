"""Runs layouts in a network namespace where nobody else talks: `python -m tests.parity.wire_in_namespace OUT W...`.

Writes a pickle of {layout: [MeasuredStep of each rank]} to OUT, or of a string that says why there is no namespace.
"""

from __future__ import annotations

import itertools
import pickle
import sys
from pathlib import Path

from hfdist.measure.wire import own_network_namespace
from hfdist.plan import Layout

LAYOUTS = [
    *(
        Layout(stage=stage, world_size=world_size, micro_steps=k, optimizer_values=0)
        for world_size, stage, k in itertools.product((2, 4), (0, 1, 2, 3), (1, 4))
    ),
    *(Layout(stage=stage, world_size=2, precision="bf16", optimizer_values=0) for stage in (0, 3)),
    *(Layout(stage=s, world_size=4, dp_replicate_size=2, micro_steps=2, optimizer_values=0) for s in (2, 3)),
]


def main(out: str, *world_sizes: str) -> None:
    """Measure every layout of the world sizes named."""
    reason = own_network_namespace()
    measured: object = reason
    if reason is None:
        # After the namespace exists: what is started from here lives in it.
        from tests.parity.measured import step_on_the_wire
        from tests.pool import Pool

        measured = {}
        for world_size in map(int, world_sizes):
            with Pool(world_size) as ranks:
                for layout in LAYOUTS:
                    if layout.world_size == world_size:
                        measured[layout] = ranks.run(step_on_the_wire, layout)
    Path(out).write_bytes(pickle.dumps(measured))


if __name__ == "__main__":
    main(*sys.argv[1:])
