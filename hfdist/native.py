"""`HFDIST_ENGINE=native`: the same yaml on accelerate's own engine, on a machine without accelerator too.

    DEEPSPEED   gloo handed to DeepSpeed's own initialisation (ACCELERATE_USE_CPU would turn DeepSpeed off)
    FSDP        a gloo group made first and shown to accelerate as MULTI_GPU, the only type it turns into FSDP
    MULTI_GPU   ACCELERATE_USE_CPU=true

Nothing else changes: yaml, json and arguments reach accelerate as they are. DeepSpeed ignores the json's "hfdist" key.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import shutil
import sys
import time
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import accelerate

from hfdist import launch
from hfdist.config import Settings, launched_sections, read_native_settings
from hfdist.errors import ConfigError, say

logger = logging.getLogger(__name__)

_LOCK_WAIT = 30.0  # seconds another rank may take to remove a lock that a killed build left


# What hfdist.Accelerator adds to accelerate's.
_ONLY_HFDIST = (
    *("set_zero_stage", "zero_stage", "run_step", "gathered_parameters"),
    *("explain", "memory_report", "dtype_report", "dp_size", "dp_rank", "count_parameters"),
)


class NativeAccelerator(accelerate.Accelerator):
    """accelerate's Accelerator, unchanged but for its start. `settings.engine` is "native".

    Raises ConfigError for `plugins=`, which only hfdist's engine reads, and for a missing compiler under DeepSpeed.
    """

    def __getattr__(self, name: str) -> NoReturn:
        if name in _ONLY_HFDIST:
            raise AttributeError(
                say(
                    given=f"accelerator.{name} under HFDIST_ENGINE=native",
                    expected="what accelerate's own Accelerator has",
                    do=f'Guard it with `if hasattr(accelerator, "{name}"):`, or leave HFDIST_ENGINE out.',
                )
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __init__(self, *args: Any, plugins: Sequence[object] = (), **kwargs: Any) -> None:
        if plugins:
            raise ConfigError(
                say(
                    given="HFDIST_ENGINE=native and Accelerator(plugins=[...])",
                    expected="settings that accelerate's own engine reads",
                    do="Write them in the yaml, or leave HFDIST_ENGINE out.",
                )
            )
        self.settings: Settings = read_native_settings(os.environ)
        launch.verify_not_alone(os.environ)
        launch.forget_lonely_state(os.environ)
        sections = launched_sections(os.environ)
        if "DEEPSPEED" in sections:
            prepare_op_build(os.environ)
        if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not launch.has_accelerator_each(os.environ):
            if "DEEPSPEED" in sections:
                kwargs["kwargs_handlers"] = _with_gloo(kwargs.get("kwargs_handlers") or [])
            elif "FSDP" in sections:
                _start_gloo_as_multi_gpu(kwargs.get("kwargs_handlers") or [])
            else:
                os.environ["ACCELERATE_USE_CPU"] = "true"
        super().__init__(*args, **kwargs)
        if self.is_main_process:
            for notice in self.settings.notices:
                logger.warning(notice)

    @property
    def zero_stage(self) -> int:
        """The ZeRO stage that the yaml asks for, whatever the engine that runs it makes of it."""
        return self.settings.zero.stage


def _with_gloo(handlers: Sequence[Any]) -> list[Any]:
    """The handlers with an `InitProcessGroupKwargs` whose backend is gloo; a given one keeps its timeout."""
    from accelerate.utils import InitProcessGroupKwargs

    kept = [handler for handler in handlers if not isinstance(handler, InitProcessGroupKwargs)]
    given = [handler for handler in handlers if isinstance(handler, InitProcessGroupKwargs)]
    own = dataclasses.replace(given[0], backend="gloo") if given else InitProcessGroupKwargs(backend="gloo")
    return [*kept, own]


def _start_gloo_as_multi_gpu(handlers: Sequence[Any]) -> None:
    """Make the gloo group and accelerate's `PartialState`, and call it MULTI_GPU: AcceleratorState then enters FSDP.

    accelerate 1.15 asks for one of its accelerator types before it looks at FSDP; its FSDP2 itself runs on gloo
    (checked: gradients, clipping, gather, get_state_dict).
    """
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType, InitProcessGroupKwargs

    if PartialState._shared_state:
        return  # a second Accelerator
    given = [handler.to_kwargs() for handler in handlers if isinstance(handler, InitProcessGroupKwargs)]
    options = {name: value for name, value in (given[0] if given else {}).items() if name != "backend"}
    PartialState(cpu=True, **options)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


def prepare_op_build(environ: MutableMapping[str, str]) -> None:
    """DeepSpeed builds an op at first use. Give it a directory of its own, ninja, a compiler, and no left-over lock.

    Raises ConfigError when there is no compiler, or when a lock of a killed build cannot be removed.
    """
    environ.setdefault("TORCH_EXTENSIONS_DIR", str(_cache_directory(environ) / "torch_extensions"))
    if shutil.which("ninja", path=environ.get("PATH")) is None:
        environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environ.get('PATH', '')}"
    compiler = environ.get("CXX", "c++")
    if shutil.which(compiler) is None and shutil.which("g++") is None:
        raise ConfigError(
            say(
                given=f"HFDIST_ENGINE=native with a DEEPSPEED yaml, and no C++ compiler ({compiler}, g++)",
                expected="a compiler: DeepSpeed builds an op when it first runs",
                do="Install one (g++), or run hfdist's own engine, which needs none.",
            )
        )
    folder = Path(environ["TORCH_EXTENSIONS_DIR"])
    if not any(folder.glob("**/*.so")):
        launch.log_once("DeepSpeed builds an op first, once: a minute or two of compiler time, in silence")
    deadline = time.monotonic() + _LOCK_WAIT
    while stale := find_stale_locks(folder):
        if environ.get("LOCAL_RANK", "0") == "0":
            launch.log_once(f"removing what a killed DeepSpeed build left: {', '.join(map(str, stale))}")
            for lock in stale:
                lock.unlink(missing_ok=True)
        elif time.monotonic() > deadline:
            raise ConfigError(
                say(
                    given=f"{stale[0]}, the lock of a DeepSpeed build that no process works on",
                    expected="no lock, since DeepSpeed would wait for it for ever",
                    do="Delete that file and start again.",
                )
            )
        else:
            time.sleep(0.2)


def build_ops(*, cpu_adam: bool) -> list[str]:
    """Build what DeepSpeed would build at its first use on this machine's CPU; returns the names, built or found.

    `cpu_adam`: its DeepSpeedCPUAdam too. Call `prepare_op_build` first. Raises ConfigError without
    deepspeed, and what DeepSpeed's builder raises.
    """
    try:
        from deepspeed.accelerator import get_accelerator
    except ModuleNotFoundError as error:
        raise ConfigError(
            say(
                given=f"an engine that runs DeepSpeed, and {error}",
                expected="the package deepspeed",
                do="pip install 'hfdist[deepspeed]', or leave this engine out.",
            )
        ) from None

    names = ["ShareMemCommBuilder"] if get_accelerator().device_name() == "cpu" else []
    names += ["CPUAdamBuilder"] if cpu_adam else []
    for name in names:
        get_accelerator().create_op_builder(name).load(verbose=False)
    return names


def deepspeed_plugin(given: Any, overrides: Mapping[str, Any]) -> Any:
    """accelerate's DeepSpeedPlugin, `given` by the script or else of the launched yaml, with `overrides` over it."""
    import deepspeed  # noqa: F401  imported here, so that resident memory at the start has it
    from accelerate.utils import DeepSpeedPlugin

    plugin = DeepSpeedPlugin() if given is None else given

    def put(section: dict[str, Any], values: Mapping[str, Any]) -> None:
        for key, value in values.items():
            if isinstance(value, Mapping):
                put(section.setdefault(key, {}), value)
            else:
                section[key] = value

    put(plugin.deepspeed_config, overrides)
    return plugin


def use_cpu_adam(optimizer: Any) -> Any:
    """DeepSpeedCPUAdam over the groups of an Adam or AdamW; schedulers of the old one reach it, the groups are shared.

    Raises ConfigError for any other optimizer.
    """
    import torch
    from accelerate.utils.deepspeed import map_pytorch_optim_to_deepspeed

    if not isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)):
        raise ConfigError(
            say(
                given=f"{type(optimizer).__name__}, to be replaced by DeepSpeedCPUAdam",
                expected="Adam or AdamW",
                do="Leave out native-cpuadam.",
            )
        )
    return map_pytorch_optim_to_deepspeed(optimizer)


# What decides how much work, wire and memory DeepSpeed's ZeRO has; `describe_deepspeed` shows their values.
_TELLING = (
    *("stage", "overlap_comm", "contiguous_gradients", "reduce_scatter", "round_robin_gradients"),
    *("reduce_bucket_size", "allgather_bucket_size", "prefetch_bucket_size"),
    *("max_live_parameters", "max_reuse_distance", "param_persistence_threshold"),
)


def describe_deepspeed(engine: Any) -> dict[str, Any]:
    """The settings a DeepSpeed engine really has, after all defaults."""
    zero = engine._config.zero_config
    inner = engine.optimizer
    while hasattr(inner, "optimizer"):
        inner = inner.optimizer
    return {
        **{name: getattr(zero, name) for name in _TELLING},
        "gradient_clipping": engine.gradient_clipping(),
        "reductions in": str(engine.communication_data_type).removeprefix("torch."),
        "optimizer": type(inner).__name__,
        "optimizer fused": bool(getattr(inner, "defaults", {}).get("fused")),
        "micro-steps": engine.gradient_accumulation_steps(),
    }


def find_stale_locks(folder: Path) -> list[Path]:
    """Lock files of torch's extension builds under `folder` that no living process holds open."""
    locks = [path for path in folder.glob("**/lock") if path.is_file()]
    if not locks:
        return []
    import psutil

    held: set[str] = set()
    for process in psutil.process_iter():
        try:
            held.update(file.path for file in process.open_files())
        except (psutil.Error, OSError):
            continue
    return [lock for lock in locks if lock.exists() and str(lock.resolve()) not in held]


def _cache_directory(environ: Mapping[str, str]) -> Path:
    """Where hfdist keeps what it may rebuild: HFDIST_CACHE, else the user's cache directory."""
    root = environ.get("HFDIST_CACHE")
    if root:
        return Path(root)
    return Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hfdist"
