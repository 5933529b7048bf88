"""`save_state` and `load_state`: training state to disk and back into the same layout.

Model and optimizer go through torch.distributed.checkpoint, keyed by the model's own parameter names, sharded tensors
in their logical shape: a reader in another layout finds what it needs. The rest (schedulers, samplers, scaler, random
streams of every rank, registered objects, step) is written by accelerate, in accelerate's own files.

    DIR/hfdist/            .metadata, *.distcp: model.<name>, optimizer.<i>.<name>.<key>
    DIR/hfdist_layout.json stage, world size, optimizer groups: what must agree
    DIR/scheduler.bin, scaler.pt, random_states_<rank>.pkl, custom_checkpoint_<i>.pkl, ...
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.checkpoint as dcp
from accelerate.checkpointing import (
    load_accelerator_state,
    load_custom_state,
    save_accelerator_state,
    save_custom_state,
)
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from hfdist import comm
from hfdist.engine.norm import local_tensor
from hfdist.errors import ConfigError, DistributedError, say

if TYPE_CHECKING:
    from hfdist.accelerator import Accelerator
    from hfdist.engine.core import Engine

_TENSORS = "hfdist"
_LAYOUT = "hfdist_layout.json"


def save_state(accelerator: Accelerator, output_dir: str | os.PathLike[str] | None) -> str:
    """Write everything needed to go on; returns the directory. Every rank calls it, between two optimizer steps."""
    _refuse_window(accelerator, "save_state()")
    accelerator.engine.meeting.run(comm.SAVE)
    directory = _output_directory(accelerator, output_dir)
    directory.mkdir(parents=True, exist_ok=True)
    for zero in accelerator.engine.models:
        zero.reshard()
    _run_save_hooks(accelerator, directory)
    if accelerator.is_main_process:  # from here to the end the directory is not a checkpoint
        (directory / _LAYOUT).unlink(missing_ok=True)
    accelerator.wait_for_everyone()
    tensors = _tensors(accelerator.engine)
    dcp.save(
        tensors,
        checkpoint_id=str(_tensor_directory(accelerator.engine, directory)),
        process_group=accelerator.engine.mesh.group,
    )
    save_accelerator_state(
        str(directory),
        [],
        [],
        accelerator._schedulers,
        accelerator._dataloaders,
        accelerator.process_index,
        accelerator.step,
        accelerator.scaler,
        save_on_each_node=accelerator.project_configuration.save_on_each_node,
    )
    for index, custom in enumerate(accelerator._custom_objects):
        save_custom_state(
            custom, str(directory), index, save_on_each_node=accelerator.project_configuration.save_on_each_node
        )
    layout = json.dumps(_layout(accelerator), indent=2)
    if accelerator.engine.grid.model_groups:
        if accelerator.engine.mesh.rank == 0:
            (_tensor_directory(accelerator.engine, directory) / _LAYOUT).write_text(layout)
        accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        (directory / _LAYOUT).write_text(layout)
    accelerator.project_configuration.iteration += 1
    accelerator.wait_for_everyone()
    return str(directory)


def load_state(accelerator: Accelerator, input_dir: str | os.PathLike[str] | None) -> None:
    """Bring everything prepared to the state that `save_state` wrote. Every rank calls it.

    Raises ConfigError when the directory is none of `save_state`'s, or was written in another layout.
    """
    _refuse_window(accelerator, "load_state()")
    accelerator.engine.meeting.run(comm.SAVE)
    directory = _input_directory(accelerator, input_dir)
    _check_layout(accelerator, directory)
    for zero in accelerator.engine.models:
        zero.reshard()
    for hook in accelerator._load_model_state_pre_hook.values():
        # A copy: hooks take out what accelerate is not to load; here the models are loaded in any case.
        hook(list(accelerator._models), str(directory))
    _allocate_optimizer_state(accelerator.engine, directory)
    tensors = _tensors(accelerator.engine)
    dcp.load(
        tensors,
        checkpoint_id=str(_tensor_directory(accelerator.engine, directory)),
        process_group=accelerator.engine.mesh.group,
    )
    own = _tensor_directory(accelerator.engine, directory) if accelerator.engine.grid.model_groups else directory
    _put_back(accelerator.engine, tensors, json.loads((own / _LAYOUT).read_text()))
    attributes = load_accelerator_state(
        str(directory),
        [],
        [],
        accelerator._schedulers,
        accelerator._dataloaders,
        accelerator.process_index,
        accelerator.scaler,
        map_location=None,
        load_kwargs={"weights_only": False},
    )
    if "step" in attributes:
        accelerator.step = attributes["step"]
    for index, custom in enumerate(accelerator._custom_objects):
        load_custom_state(custom, str(directory), index)
    accelerator.engine.weights.end_window()
    accelerator.wait_for_everyone()


def _tensor_directory(engine: Engine, directory: Path) -> Path:
    """Where the ranks that share one part of the model write: one folder, or one for each tensor and pipeline rank."""
    grid = engine.grid
    return directory / _TENSORS / f"pp{grid.pp_rank}_tp{grid.tp_rank}" if grid.model_groups else directory / _TENSORS


def _run_save_hooks(accelerator: Accelerator, directory: Path) -> None:
    """accelerate's hooks get models and whole weights, one each, which they may take out of the lists.

    The models are saved in any case: `load_state` needs them.
    """
    hooks = accelerator._save_model_state_pre_hook.values()
    if not hooks:
        return
    models = list(accelerator._models)
    weights = [accelerator.get_state_dict(model) for model in models]
    for hook in hooks:
        hook(models, weights, str(directory))


# ------------------------------------------------------------------- tensors


def _tensors(engine: Engine) -> dict[str, Any]:
    """Flat {key: tensor} of models and optimizers; state that is split like its parameter is wrapped as DTensor."""
    flat: dict[str, Any] = {}
    for index, zero in enumerate(engine.models):
        for name, value in zero.model.state_dict().items():
            flat[f"model.{index}.{name}"] = value
    names = _names(engine)
    for index, optimizer in enumerate(engine.optimizers):
        held = optimizer.local.held_here()
        for parameter, state in optimizer.optimizer.state.items():
            name = names[parameter]
            for key, value in state.items():
                if not isinstance(value, torch.Tensor):
                    continue
                flat[f"optimizer.{index}.{name}.{key}"] = value if held.get(parameter) else _as_split(value, parameter)
    return flat


def _names(engine: Engine) -> dict[torch.Tensor, str]:
    """Names for keys: the model's own; by place for what an optimizer holds beside the prepared models."""
    names: dict[torch.Tensor, str] = {
        p: f"{index}.{name}" for index, zero in enumerate(engine.models) for name, p in zero.model.named_parameters()
    }
    for optimizer in engine.optimizers:
        for place, parameter in enumerate(optimizer.parameters()):
            names.setdefault(parameter, f"unprepared.{place}")
    return names


def _as_split(value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """State of a parameter that is stepped by rows; that of one stepped whole may have the shape of rows by chance."""
    if isinstance(parameter, DTensor) and value.ndim and value.shape == parameter._local_tensor.shape:
        return DTensor.from_local(
            value, parameter.device_mesh, parameter.placements, shape=parameter.shape, stride=parameter.stride()
        )
    return value


def _allocate_optimizer_state(engine: Engine, directory: Path) -> None:
    """Empty tensors for every state entry the checkpoint has, for torch.distributed.checkpoint to fill."""
    saved = dcp.FileSystemReader(str(_tensor_directory(engine, directory))).read_metadata().state_dict_metadata
    names = _names(engine)
    for index, optimizer in enumerate(engine.optimizers):
        held = optimizer.local.held_here()
        for parameter in optimizer.parameters():
            prefix = f"optimizer.{index}.{names[parameter]}."
            for key, entry in saved.items():
                if not key.startswith(prefix) or parameter not in held:
                    continue
                assert isinstance(entry, TensorStorageMetadata)
                shape = entry.size
                local = local_tensor(parameter)
                split = tuple(shape) == tuple(parameter.shape) and shape and not held[parameter]
                value = torch.empty(local.shape if split else shape, dtype=entry.properties.dtype, device=local.device)
                if not shape:
                    value = value.cpu()
                optimizer.optimizer.state[parameter][key.removeprefix(prefix)] = value


def _put_back(engine: Engine, tensors: dict[str, Any], layout: dict[str, Any]) -> None:
    for index, zero in enumerate(engine.models):
        prefix = f"model.{index}."
        state = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
        zero.model.load_state_dict(state)
    names = _names(engine)
    for optimizer, groups in zip(engine.optimizers, layout["optimizers"], strict=True):
        for group, saved in zip(optimizer.optimizer.param_groups, groups, strict=True):
            for key, value in saved.items():
                if isinstance(group.get(key), torch.Tensor):
                    group[key].fill_(value)
                else:
                    group[key] = tuple(value) if isinstance(group.get(key), tuple) else value
        scalars = layout["scalars"][engine.optimizers.index(optimizer)]
        held = optimizer.local.held_here()
        for parameter in optimizer.parameters():
            extra = scalars.get(names[parameter])
            if extra and parameter in held:
                optimizer.optimizer.state[parameter].update(extra)


# -------------------------------------------------------------------- layout


def _layout(accelerator: Accelerator) -> dict[str, Any]:
    engine = accelerator.engine
    names = _names(engine)
    return {
        "version": 1,
        "zero_stage": accelerator.zero_stage,
        "num_processes": accelerator.num_processes,
        "dp_replicate_size": engine.mesh.dp_replicate_size,
        "pp_size": engine.grid.pp_size,
        "tp_size": engine.grid.tp_size,
        "optimizers": [
            [
                {k: _plain(v) for k, v in group.items() if k not in ("params", "param_names")}
                for group in optimizer.optimizer.param_groups
            ]
            for optimizer in engine.optimizers
        ],
        "scalars": [
            {
                names[parameter]: {
                    k: v for k, v in state.items() if isinstance(v, (int, float, bool, str)) or v is None
                }
                for parameter, state in optimizer.optimizer.state.items()
            }
            for optimizer in engine.optimizers
        ],
    }


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) and value.ndim == 0 else value


def _check_layout(accelerator: Accelerator, directory: Path) -> None:
    path = directory / _LAYOUT
    if not path.is_file():
        raise ConfigError(
            say(
                given=f"load_state({str(directory)!r})",
                expected=f"a directory that save_state wrote completely (with {_LAYOUT})",
                do="Check the path; a save that was interrupted lacks this file.",
            )
        )
    saved, now = json.loads(path.read_text()), _layout(accelerator)
    for key in ("zero_stage", "num_processes", "dp_replicate_size", "pp_size", "tp_size"):
        if saved.setdefault(key, 1) != now[key]:
            raise ConfigError(
                say(
                    given=f"a checkpoint written with {key}={saved[key]}",
                    expected=f"this run's {key}={now[key]}",
                    do="Resume in the layout it was written in; loading into another one is not in this release.",
                )
            )
    if len(saved["optimizers"]) != len(now["optimizers"]):
        raise ConfigError(
            say(
                given=f"a checkpoint with {len(saved['optimizers'])} optimizers",
                expected=f"the {len(now['optimizers'])} that are prepared",
                do="Prepare the same optimizers in the same order.",
            )
        )


def _refuse_window(accelerator: Accelerator, what: str) -> None:
    if any(zero.window_open for zero in accelerator.engine.models):
        raise DistributedError(
            say(
                given=f"{what} inside a gradient accumulation window",
                expected="a call between two optimizer steps",
                do="Call it after optimizer.step().",
            )
        )


def _output_directory(accelerator: Accelerator, output_dir: str | os.PathLike[str] | None) -> Path:
    """As accelerate: `output_dir`, or checkpoints/checkpoint_<n> of the project with the oldest removed."""
    project = accelerator.project_configuration
    if not project.automatic_checkpoint_naming:
        if output_dir is None:
            raise ConfigError(
                say(
                    given="save_state() without a directory",
                    expected="output_dir, or ProjectConfiguration(automatic_checkpoint_naming=True)",
                    do="Pass a directory.",
                )
            )
        return Path(output_dir)
    root = Path(accelerator.project_dir) / "checkpoints"
    directory = root / f"checkpoint_{accelerator.save_iteration}"
    if directory.exists():
        raise ConfigError(
            say(
                given=f"{directory}, which exists already",
                expected="a new directory",
                do="Set ProjectConfiguration(iteration=...) to the number to go on with.",
            )
        )
    if accelerator.is_main_process and project.total_limit is not None and root.is_dir():
        kept = sorted(root.iterdir(), key=_number)
        for old in kept[: max(0, len(kept) + 1 - project.total_limit)]:
            shutil.rmtree(old)
    accelerator.wait_for_everyone()
    return directory


def _input_directory(accelerator: Accelerator, input_dir: str | os.PathLike[str] | None) -> Path:
    if input_dir is not None:
        return Path(input_dir).expanduser()
    root = Path(accelerator.project_dir or ".") / "checkpoints"
    folders = sorted(root.iterdir(), key=_number) if root.is_dir() else []
    if not accelerator.project_configuration.automatic_checkpoint_naming or not folders:
        raise ConfigError(
            say(
                given="load_state() without a directory",
                expected="input_dir, or checkpoints under an automatically named project",
                do="Pass the directory that save_state returned.",
            )
        )
    return folders[-1]


def _number(path: Path) -> int:
    found = re.findall(r"\d+", path.name)
    return int(found[-1]) if found else -1
