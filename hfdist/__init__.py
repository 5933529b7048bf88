"""hfdist: distributed training for Hugging Face scripts. Name an accelerate config, get the technique, keep the loss.

Nothing is imported until it is asked for, so `import hfdist` costs next to nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hfdist.accelerator import Accelerator
    from hfdist.patching import patch, unpatch
    from hfdist.plugins import AmpPlugin, LossPlugin, PipelineParallelPlugin, TensorParallelPlugin, ZeroPlugin

__version__ = "0.1.0"
__all__ = [
    "Accelerator",
    "AmpPlugin",
    "LossPlugin",
    "PipelineParallelPlugin",
    "TensorParallelPlugin",
    "ZeroPlugin",
    "patch",
    "unpatch",
]

_HOMES = {
    "Accelerator": "hfdist.accelerator",
    "AmpPlugin": "hfdist.plugins",
    "LossPlugin": "hfdist.plugins",
    "PipelineParallelPlugin": "hfdist.plugins",
    "TensorParallelPlugin": "hfdist.plugins",
    "ZeroPlugin": "hfdist.plugins",
    "patch": "hfdist.patching",
    "unpatch": "hfdist.patching",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'hfdist' has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
