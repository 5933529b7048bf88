"""What must hold before torch, accelerate or transformers exist in a process, and how a recipe starts its own ranks.

    accelerate launch (yaml) --> N workers, ACCELERATE_USE_<section>=true
        hfdist.Accelerator: take_sections() moves those to HFDIST_LAUNCHED_AS, so that accelerate sees plain
        data parallel, then ensure_one_group(): on a machine without accelerator ACCELERATE_USE_CPU=true, because N
        workers would otherwise each believe they are alone. Under `HFDIST_ENGINE=native` neither happens.

Guarantee: inside `engine_environment`, `accelerate.Accelerator.__init__` of N launched workers makes one group of N.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager

from hfdist.config import LAUNCHED_AS, SECTIONS, Settings, launched_sections
from hfdist.errors import ConfigError, say

logger = logging.getLogger(__name__)


@contextmanager
def engine_environment(settings: Settings) -> Iterator[None]:
    """Inside, accelerate's constructor sees no yaml section and, without accelerator, is told to use the CPU.

    The variables stay changed afterwards: `TrainingArguments`, `from_pretrained` and a second `Accelerator` read them
    too. `resolve_settings` still finds the sections, through HFDIST_LAUNCHED_AS. Does nothing for the native engine.
    """
    if settings.engine == "hfdist":
        take_sections(os.environ)
        ensure_one_group(os.environ)
        forget_lonely_state(os.environ)
    yield


def take_sections(environ: MutableMapping[str, str]) -> None:
    """Move `ACCELERATE_USE_<section>` of every section to HFDIST_LAUNCHED_AS. Calling it again changes nothing."""
    sections = launched_sections(environ)
    for section in SECTIONS:
        environ.pop(f"ACCELERATE_USE_{section}", None)
    if sections:
        environ[LAUNCHED_AS] = ",".join(sections)


def ensure_one_group(environ: MutableMapping[str, str]) -> None:
    """Set ACCELERATE_USE_CPU=true where the workers have no accelerator each, so that they form one gloo group."""
    if int(environ.get("WORLD_SIZE", "1")) > 1 and not has_accelerator_each(environ):
        environ["ACCELERATE_USE_CPU"] = "true"


def has_accelerator_each(environ: MutableMapping[str, str]) -> bool:
    """True when every local worker can have a device of its own that its ranks can talk through.

    MPS cannot (neither accelerate nor gloo has collectives on it). One GPU shared by two ranks cannot: NCCL refuses it.
    """
    import torch

    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None or device.type == "mps":
        return False
    local = int(environ.get("LOCAL_WORLD_SIZE", environ.get("WORLD_SIZE", "1")))
    count = torch.accelerator.device_count()
    if local > count:
        log_once(f"{local} processes on this machine and {count} {device.type} device(s): running on the CPU with gloo")
        return False
    return True


def forget_lonely_state(environ: MutableMapping[str, str]) -> None:
    """Undo a `PartialState` that something made before hfdist was asked and that believes it is alone.

    Raises ConfigError when a whole accelerate.Accelerator was made: objects it prepared would keep the wrong world.
    """
    world = int(environ.get("WORLD_SIZE", "1"))
    from accelerate.state import AcceleratorState, PartialState

    if world == 1 or not PartialState._shared_state or PartialState().num_processes == world:
        return
    if AcceleratorState._shared_state:
        raise ConfigError(
            say(
                given=f"an accelerate.Accelerator made earlier in this process, with 1 process instead of {world}",
                expected="hfdist.Accelerator to be made first",
                do="Import Accelerator from hfdist instead of accelerate, or launch with -m hfdist.run.",
            )
        )
    PartialState._reset_state()
    log_once(f"accelerate's state was made before hfdist.Accelerator and saw 1 process of {world}: made anew")


def log_once(text: str) -> None:
    """A warning on the main rank only, before there is any accelerate state to ask who that is."""
    if os.environ.get("RANK", "0") == "0":
        logger.warning(text)
