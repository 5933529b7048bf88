"""`python -m hfdist.compare.start [--isolated] words...`: becomes `words`, which end when their parent does.

`--isolated` puts them in a network namespace of their own. In there nobody else talks, so what the loopback sends is
what the ranks send. Where that is not allowed (no root, not Linux) they run all the same; `can_isolate()` says so
beforehand.
"""

from __future__ import annotations

import os
import subprocess
import sys

from hfdist.measure.wire import own_network_namespace


def can_isolate() -> bool:
    """Whether a process of ours may have a network namespace. Tried in a child: there is no way back out of one."""
    code = "import sys; from hfdist.measure.wire import own_network_namespace as o; sys.exit(o() is not None)"
    return subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def main() -> None:
    """Entry point."""
    from hfdist.launch import end_with_parent

    # Kept over the exec below: a killed comparison takes its launcher along, and the launcher its ranks.
    end_with_parent()
    words = sys.argv[1:]
    if words[0] == "--isolated":
        words = words[1:]
        reason = own_network_namespace()
        if reason is not None:
            print(f"no network namespace: {reason}", file=sys.stderr, flush=True)
    os.execv(words[0], words)


if __name__ == "__main__":
    main()
