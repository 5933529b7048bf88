"""Settings of a run: from an accelerate yaml, a DeepSpeed json, `HFDIST_*`, or arguments of `Accelerator`.

The only part of hfdist that reads the environment and yaml. Each source puts claims in a `Ledger`; two that disagree
are an error with both origins; what hfdist does not do is an error or a named notice, never silence.

    yaml --accelerate launch--> ACCELERATE_*, FSDP_*, MEGATRON_LM_*, PARALLELISM_CONFIG_*  --.
    deepspeed_config_file: x.json, DeepSpeed's words and "hfdist": {...}                   --+--> Ledger --> Settings
    HFDIST_*                                                                               --|
    Accelerator(deepspeed_plugin=, fsdp_plugin=, kwargs_handlers=, ..., plugins=[...])     --'
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from hfdist.config.deepspeed import read_deepspeed_environment, read_deepspeed_json
from hfdist.config.fsdp import read_fsdp_environment, read_fsdp_plugin
from hfdist.config.handlers import read_handlers
from hfdist.config.launcher import find_launch_command, verify_yaml_sections
from hfdist.config.ledger import Ledger, Strength
from hfdist.config.megatron import read_megatron_environment, read_megatron_plugin
from hfdist.config.own import read_own_environment, read_plugins
from hfdist.config.parallelism import read_parallelism_environment, read_parallelism_object
from hfdist.config.settings import Settings, build_settings
from hfdist.config.table import SETTINGS
from hfdist.config.values import is_unsaid
from hfdist.errors import ConfigError, nearest, say

__all__ = [
    "LAUNCHED_AS",
    "SECTIONS",
    "Settings",
    "launched_sections",
    "read_native_settings",
    "resolve_engine",
    "resolve_settings",
]

# Sections of a yaml, as `ACCELERATE_USE_<section>`; `launch` moves them to HFDIST_LAUNCHED_AS before accelerate looks.
SECTIONS = ("DEEPSPEED", "MEGATRON_LM", "FSDP", "PARALLELISM_CONFIG")
LAUNCHED_AS = "HFDIST_LAUNCHED_AS"

_SECTION_READERS = {
    "DEEPSPEED": read_deepspeed_environment,
    "MEGATRON_LM": read_megatron_environment,
    "FSDP": read_fsdp_environment,
    "PARALLELISM_CONFIG": read_parallelism_environment,
}
# Arguments of accelerate.Accelerator that are translated here and never reach it.
_TRANSLATED = (
    *("deepspeed_plugin", "deepspeed_plugins", "fsdp_plugin", "megatron_lm_plugin", "torch_tp_plugin"),
    "parallelism_config",
)


def launched_sections(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Sections of the yaml this process was launched with, whether or not they were already taken from accelerate."""
    taken = environ.get(LAUNCHED_AS, "").split(",")
    return tuple(
        name for name in SECTIONS if name in taken or environ.get(f"ACCELERATE_USE_{name}", "").lower() in ("true", "1")
    )


def resolve_engine(environ: Mapping[str, str]) -> str:
    """ "hfdist" or "native": HFDIST_ENGINE alone, without reading anything else."""
    value = environ.get("HFDIST_ENGINE")
    if is_unsaid(value):
        return "hfdist"
    try:
        return str(SETTINGS["engine"].read(value))
    except ValueError as error:
        raise ConfigError(
            say(given=f"HFDIST_ENGINE={value}", expected=str(error), do=SETTINGS["engine"].help)
        ) from None


def resolve_settings(
    *, plugins: Sequence[object] = (), accelerator_kwargs: Mapping[str, Any], environ: Mapping[str, str]
) -> tuple[Settings, dict[str, Any]]:
    """All sources -> `Settings` and the keyword arguments left for `accelerate.Accelerator.__init__`.

    In the second value plugin arguments and translated handlers are gone, `mixed_precision` is final, and
    accumulation is a `gradient_accumulation_plugin` with the final number of steps. Raises ConfigError.
    """
    from accelerate import Accelerator

    kwargs = dict(accelerator_kwargs)
    # hfdist.patch() may have put hfdist's class in that place.
    original = next(base for base in Accelerator.__mro__ if base.__module__ == "accelerate.accelerator")
    known = [name for name in inspect.signature(original.__init__).parameters if name != "self"]
    for name in kwargs:
        if name not in known:
            raise ConfigError(
                say(
                    given=f"Accelerator({name}=)",
                    expected="plugins= or an argument of accelerate.Accelerator",
                    do=f"Correct the name{nearest(name, known)} or remove it.",
                )
            )
    command = find_launch_command()
    if command is not None and command.config_file is not None and launched_sections(environ):
        verify_yaml_sections(command.config_file)
    ledger = Ledger()
    read_own_environment(ledger, environ)
    read_plugins(ledger, plugins)
    _read_basic_arguments(ledger, kwargs)
    _read_basic_environment(ledger, environ)
    for section in launched_sections(environ):
        _SECTION_READERS[section](ledger, environ)
    _read_plugin_arguments(ledger, kwargs, environ)
    handlers = read_handlers(ledger, kwargs.pop("kwargs_handlers", None) or ())
    ledger.verify_exclusions()
    world = environ.get("WORLD_SIZE", "")
    settings = build_settings(ledger, world_size=int(world) if world.isdigit() else None)
    for name in _TRANSLATED:
        kwargs.pop(name, None)
    if handlers:
        kwargs["kwargs_handlers"] = handlers
    kwargs["mixed_precision"] = settings.amp.dtype if settings.amp else "no"
    kwargs["gradient_accumulation_plugin"] = _accumulation_plugin(kwargs, settings.gradient_accumulation_steps)
    return settings, kwargs


def read_native_settings(environ: Mapping[str, str]) -> Settings:
    """A record of what the yaml asks of accelerate's own engine, as far as hfdist has words for it.

    Nothing is refused: accelerate reads the yaml itself. `HFDIST_*` settings have no effect there, which is a notice;
    an unknown `HFDIST_*` is an error as ever.
    """
    own = Ledger()
    read_own_environment(own, environ)
    ignored = [f"HFDIST_{name.upper()}" for name in own.claims if name != "engine"]
    ledger = Ledger()
    try:
        _read_basic_environment(ledger, environ)
        for section in launched_sections(environ):
            _SECTION_READERS[section](ledger, environ)
    except ConfigError:
        pass  # something only the native engine does: the claims read so far stand
    settings = build_settings(ledger, world_size=None)
    notice = f"no effect under HFDIST_ENGINE=native: {', '.join(ignored)}"
    # Whatever a json's "hfdist" says, accelerate steps schedulers by its own rule.
    return dataclasses.replace(
        settings, engine="native", scheduler_step="num_processes", notices=(notice,) if ignored else ()
    )


def _read_basic_arguments(ledger: Ledger, kwargs: Mapping[str, Any]) -> None:
    """mixed_precision and accumulation of `Accelerator(...)`; 1 step is accelerate's default, so it claims nothing."""
    precision = kwargs.get("mixed_precision")
    if precision is not None:
        _claim_precision(ledger, str(precision), origin="Accelerator(mixed_precision=)", strength=Strength.SAID)
    steps = kwargs.get("gradient_accumulation_steps")
    ledger.claim(
        "gradient_accumulation_steps",
        steps,
        origin="Accelerator(gradient_accumulation_steps=)",
        strength=Strength.DEFAULT if str(steps) == "1" else Strength.SAID,
    )
    plugin = kwargs.get("gradient_accumulation_plugin")
    if plugin is not None:
        ledger.claim(
            "gradient_accumulation_steps",
            plugin.num_steps,
            origin="Accelerator(gradient_accumulation_plugin=)",
            strength=Strength.DEFAULT if plugin.num_steps == 1 else Strength.SAID,
        )


def _read_basic_environment(ledger: Ledger, environ: Mapping[str, str]) -> None:
    """What `accelerate launch` exports for every yaml; its mixed_precision "no" is also what it says unasked."""
    precision = environ.get("ACCELERATE_MIXED_PRECISION")
    if precision is not None:
        origin = "the launcher's mixed_precision (ACCELERATE_MIXED_PRECISION)"
        strength = Strength.DEFAULT if precision.lower() == "no" else Strength.SAID
        _claim_precision(ledger, precision, origin=origin, strength=strength)
    for name in ("GRADIENT_ACCUMULATION_STEPS", "GRADIENT_CLIPPING"):
        variable = f"ACCELERATE_{name}"
        value = environ.get(variable)
        # 1 micro-step is what a DEEPSPEED yaml says unasked, and so gives way to a script that asks for more.
        unasked = name == "GRADIENT_ACCUMULATION_STEPS" and value == "1"
        ledger.claim(
            name.lower(),
            value,
            origin=f"the yaml's {name.lower()} ({variable})",
            strength=Strength.DEFAULT if unasked else Strength.SAID,
        )
    if not is_unsaid(environ.get("ACCELERATE_FP8_BACKEND")):
        ledger.later("fp8", environ["ACCELERATE_FP8_BACKEND"], origin="ACCELERATE_FP8_BACKEND")


def _claim_precision(ledger: Ledger, value: str, *, origin: str, strength: Strength) -> None:
    if value.lower() == "fp8":
        ledger.later("fp8", "fp8", origin=origin)
    ledger.claim("mixed_precision", value, origin=origin, strength=strength)


def _read_plugin_arguments(ledger: Ledger, kwargs: Mapping[str, Any], environ: Mapping[str, str]) -> None:
    """deepspeed_plugin(s), fsdp_plugin, megatron_lm_plugin, torch_tp_plugin and parallelism_config."""
    both = [kwargs[name] for name in ("deepspeed_plugin", "deepspeed_plugins") if kwargs.get(name) is not None]
    for plugin in both:
        if isinstance(plugin, dict):
            if len(plugin) != 1:
                ledger.refuse(
                    f"{len(plugin)} DeepSpeed plugins ({', '.join(map(str, plugin))})",
                    origin="Accelerator(deepspeed_plugins=)",
                    why="one configuration for all models of a run",
                    do="Pass one of them.",
                )
            plugin = next(iter(plugin.values()))
        world = environ.get("WORLD_SIZE", "")
        content = _without_filled_in(plugin.deepspeed_config)
        read_deepspeed_json(
            ledger,
            content,
            origin="Accelerator(deepspeed_plugin=)",
            world_size=int(world) if world.isdigit() else None,
        )
    if kwargs.get("fsdp_plugin") is not None:
        read_fsdp_plugin(ledger, kwargs["fsdp_plugin"], environ)
    if kwargs.get("megatron_lm_plugin") is not None:
        read_megatron_plugin(ledger, kwargs["megatron_lm_plugin"])
    if kwargs.get("torch_tp_plugin") is not None:
        ledger.claim("tp_size", kwargs["torch_tp_plugin"].tp_size, origin="Accelerator(torch_tp_plugin=)")
    if kwargs.get("parallelism_config") is not None:
        read_parallelism_object(ledger, kwargs["parallelism_config"], environ)


def _without_filled_in(content: Mapping[str, object]) -> dict[str, object]:
    """A DeepSpeedPlugin's json without what its constructor adds unasked (accumulation 1, steps_per_print inf)."""
    return {
        key: value
        for key, value in content.items()
        if not (key == "gradient_accumulation_steps" and value == 1)
        and not (key == "steps_per_print" and value == float("inf"))
        and not (key in ("fp16", "bf16") and value == {"enabled": False})
    }


def _accumulation_plugin(kwargs: dict[str, Any], num_steps: int) -> object:
    """The script's GradientAccumulationPlugin, or a new one, with `num_steps`; accelerate then reads no environment."""
    from accelerate.utils import GradientAccumulationPlugin

    kwargs.pop("gradient_accumulation_steps", None)
    plugin = kwargs.get("gradient_accumulation_plugin")
    if plugin is None:
        return GradientAccumulationPlugin(num_steps=num_steps)
    return dataclasses.replace(plugin, num_steps=num_steps)
