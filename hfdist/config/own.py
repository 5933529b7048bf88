"""hfdist's own vocabulary: `HFDIST_*` variables and the plugins handed to `Accelerator(plugins=[...])`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from hfdist.config.ledger import Ledger, Strength
from hfdist.config.table import OTHER_VARIABLES, PIPELINE_FIELDS, TENSOR_FIELDS
from hfdist.errors import ConfigError, say
from hfdist.plugins import AmpPlugin, LossPlugin, PipelineParallelPlugin, TensorParallelPlugin, ZeroPlugin

_KINDS = (ZeroPlugin, AmpPlugin, LossPlugin, TensorParallelPlugin, PipelineParallelPlugin)
# What a plugin is for: counts also at its default.
_ALWAYS = ("stage", "dtype", "chunk_size", "tp_size", "pp_size")
_FIELD_TO_SETTING = {
    "stage": "zero_stage",
    "dtype": "mixed_precision",
    "chunk_size": "loss_chunk_size",
    **{field: setting for setting, field in (*TENSOR_FIELDS.items(), *PIPELINE_FIELDS.items())},
}


def read_own_environment(ledger: Ledger, environ: Mapping[str, str]) -> None:
    """Claims of every `HFDIST_*` variable; one that is not known is an error with the nearest name."""
    for variable, value in environ.items():
        if not variable.startswith("HFDIST_"):
            continue
        name = variable.removeprefix("HFDIST_").lower()
        if not name.startswith(OTHER_VARIABLES):
            ledger.claim_own(name, value, origin=variable)


def read_plugins(ledger: Ledger, plugins: Sequence[object]) -> None:
    """Claims of `Accelerator(plugins=[...])`, stronger than all others.

    A field left at its default says nothing, so that `plugins=[ZeroPlugin(stage=3)]` keeps the yaml's other choices;
    `stage`, `dtype`, `chunk_size`, `tp_size` and `pp_size`, which are what a plugin is for, always count.
    """
    for position, plugin in enumerate(plugins):
        if not isinstance(plugin, _KINDS):
            raise ConfigError(
                say(
                    given=f"plugins[{position}] of class {type(plugin).__name__}",
                    expected=f"objects of {', '.join(f'hfdist.{kind.__name__}' for kind in _KINDS)}",
                    do="accelerate's own plugins go to their own arguments (deepspeed_plugin=, fsdp_plugin=, ...).",
                )
            )
        origin = f"Accelerator(plugins=[...]), {type(plugin).__name__} number {position + 1}"
        for field in dataclasses.fields(plugin):
            value = getattr(plugin, field.name)
            if field.name == "loss_fn":
                ledger.loss_fn = value or ledger.loss_fn
            elif field.name in _ALWAYS or value != field.default:
                name = _FIELD_TO_SETTING.get(field.name, field.name)
                ledger.claim(name, value, origin=origin, strength=Strength.PLUGIN)
