"""`python -m hfdist.compare.ops RECORD.json [--cpu-adam]`: builds the ops DeepSpeed needs, in hfdist's cache.

A build that is killed leaves a lock for which the next start would wait for ever: `native.prepare_op_build` removes one
that no process holds, or says why it cannot; so it does for a missing compiler. The record holds the reason, if any.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path


def main() -> None:
    """Entry point. Exit code 1 and the reason in the record when nothing could be built."""
    from hfdist import launch

    launch.end_with_parent()
    record = {"rank": 0, "steps": [], "engine": {}, "error": None}
    try:
        from hfdist import native

        native.prepare_op_build(os.environ)
        native.build_ops(cpu_adam="--cpu-adam" in sys.argv)
    except (Exception, SystemExit) as error:  # DeepSpeed's builders and torch's raise of many kinds
        record["error"] = f"{type(error).__name__}: {str(error).strip()[:2000]}"
    Path(sys.argv[1]).write_text(json.dumps(record), encoding="utf-8")
    sys.exit(record["error"] is not None)


if __name__ == "__main__":
    main()
