"""`-m hfdist.compare.child TASK.json SCRIPT args...`: one rank of a compared launch.

TASK.json is written by `session.py`: engine, number of steps, where records go, what the yaml asks. The script sees its
own `sys.argv` and `sys.path`, as if python had run it. Leaves `rank<r>.json`: what the probe saw, or the error.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import traceback
from pathlib import Path


def main() -> None:
    """Entry point. Exit code 0 when the steps were measured (or the script ended by itself after fewer)."""
    from hfdist import launch

    launch.end_with_parent()
    task = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    script, folder = sys.argv[2], Path(sys.argv[1]).parent
    from hfdist.compare import peers
    from hfdist.compare.probe import Probe, ScriptDone
    from hfdist.recipe.run import Run

    probe = Probe(
        folder,
        num_steps=task["steps"],
        count=task["count"],
        own_counters=task["engine"] == "hfdist",
        in_namespace=task["in_namespace"],
    )
    if task["engine"] == "hfdist":
        launch.take_sections(os.environ)
        launch.ensure_one_group(os.environ)
    peers.install(peers.build_class(task["engine"], probe, task["asked"], task["overrides"]))
    Run.measured_elsewhere = True
    sys.argv = sys.argv[2:]
    sys.path[0] = str(Path(script).resolve().parent)
    try:
        _run(script, stop=ScriptDone)
        peers.verify_observed(probe, task["engine"], script=script)
    except BaseException as error:
        probe.write(error=_say(error), traceback=traceback.format_exc())
        raise
    probe.write(num_parameters=peers.parameters_of(probe.models))
    _leave()


def _run(script: str, *, stop: type[BaseException]) -> None:
    """The script, until it ends or `stop` leaves it."""
    try:
        runpy.run_path(script, run_name="__main__")
    except stop:
        pass
    except SystemExit as end:
        if end.code not in (None, 0):
            raise


def _say(error: BaseException) -> str:
    text = str(error).strip() or "no message"
    return f"{type(error).__name__}: {text}"


def _leave() -> None:
    """End this rank once all have written; no teardown, in which engines differ and some wait for each other."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
