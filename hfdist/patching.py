"""`hfdist.patch()`: scripts that say `from accelerate import Accelerator` get hfdist's; `hfdist.unpatch()` undoes it.

Needs to run before the script makes an Accelerator; modules imported before and after are both served. Guarantee: every
place and every environment variable is remembered, so `unpatch()` leaves what was there, and calling either twice
changes nothing. A module that is imported in between keeps the class that it found.
"""

from __future__ import annotations

import os
import sys
from types import ModuleType

from hfdist import launch
from hfdist.config import resolve_engine

_replaced: list[tuple[ModuleType, str, object]] = []
_environment: dict[str, str | None] = {}  # what variables were before `patch()`; None: not set


def patch() -> None:
    """Put `hfdist.Accelerator` wherever accelerate's own is bound now, and where later imports will look for it.

    Also takes the yaml's sections from the environment, since `TrainingArguments` reads them before an Accelerator
    exists (not under `HFDIST_ENGINE=native`).
    """
    if _replaced:
        return
    if resolve_engine(os.environ) == "hfdist":
        before = dict(os.environ)
        launch.take_sections(os.environ)
        launch.ensure_one_group(os.environ)
        changed = {name for name in before.keys() | os.environ.keys() if before.get(name) != os.environ.get(name)}
        _environment.update({name: before.get(name) for name in changed})
    import accelerate

    import hfdist.native  # noqa: F401  its class is made from accelerate's own, which is about to be replaced
    from hfdist.accelerator import Accelerator

    original = accelerate.Accelerator
    for module in list(sys.modules.values()):
        if not isinstance(module, ModuleType) or module.__name__.split(".")[0] == "hfdist":
            continue
        for name, value in list(vars(module).items()):
            if value is original:
                _replaced.append((module, name, original))
                setattr(module, name, Accelerator)


def unpatch() -> None:
    """Undo `patch()`. Accelerators already made stay what they are."""
    while _replaced:
        module, name, original = _replaced.pop()
        setattr(module, name, original)
    while _environment:
        variable, value = _environment.popitem()
        if value is None:
            os.environ.pop(variable, None)
        else:
            os.environ[variable] = value
