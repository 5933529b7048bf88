"""The Accelerators a script gets under `hfdist compare`: one class an engine, each with the probe in it.

    build_class(...)     the class that takes the place of accelerate.Accelerator and hfdist.Accelerator in the script
    install(cls)         puts it there

All but hfdist's own stand on `NativeAccelerator`, accelerate's Accelerator as `HFDIST_ENGINE=native` starts it.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import nn

from hfdist.accelerator import Accelerator as HfdistAccelerator
from hfdist.compare.one_process import OneProcess
from hfdist.compare.probe import Probe
from hfdist.config import resolve_engine
from hfdist.errors import ConfigError, say
from hfdist.native import NativeAccelerator, deepspeed_plugin, describe_deepspeed, use_cpu_adam


class BareFsdp2(NativeAccelerator):
    """`fully_shard` of every block and of the root, nothing else: what a user of torch alone would write.

    Same units, dtypes and policy as the stage: parameters are resharded after forward at stage 3 and kept at 0 to 2;
    within an accumulation window gradients are reduced every micro-step at 2 and 3, and once, at its end, at 0 and 1.
    """

    asked_stage = 3
    asked_reduce_dtype = "fp32"

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Models first: optimizers are pointed to the sharded parameters."""
        self._sharded: dict[nn.Parameter, nn.Parameter] = getattr(self, "_sharded", {})
        for item in args:
            if isinstance(item, nn.Module):
                self._shard(item)
        for item in args:
            if isinstance(item, torch.optim.Optimizer):
                for group in item.param_groups:
                    group["params"] = [self._sharded.get(p, p) for p in group["params"]]
        return super().prepare(*args, device_placement=device_placement)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """accelerate's placement and autocast, without its DDP: the model is sharded already."""
        return super().prepare_model(model, device_placement=False, evaluation_mode=True)

    def _shard(self, model: nn.Module) -> None:
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        from hfdist.models.blocks import find_blocks
        from hfdist.parallel.amp import mixed_precision_policy

        model.to(self.device)
        before = dict(model.named_parameters(remove_duplicate=False))
        for tensor in (*model.parameters(), *model.buffers()):
            dist.broadcast(tensor.data, 0)  # as DDP does
        mesh = init_device_mesh(self.device.type, (self.num_processes,))
        policy = mixed_precision_policy(self.settings.amp, self.asked_reduce_dtype, model)
        for module in (*(block for _, block in find_blocks(model)), model):
            fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=self.asked_stage == 3)
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self._sharded[before[name]] = parameter

    @contextlib.contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """A micro-step that is not the last of its window: at stages 0 and 1 its gradients stay whole."""
        if self.asked_stage <= 1:
            model.set_requires_gradient_sync(False)  # type: ignore[operator]
        try:
            yield
        finally:
            model.set_requires_gradient_sync(True)  # type: ignore[operator]

    def clip_grad_norm_(
        self, parameters: Iterable[torch.Tensor] | torch.Tensor, max_norm: float, norm_type: float = 2
    ) -> torch.Tensor:
        """torch's own; the norm of all ranks as a plain tensor."""
        norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type=norm_type)
        return norm.full_tensor() if hasattr(norm, "full_tensor") else norm


_BASES: dict[str, type[Any]] = {
    "hfdist": HfdistAccelerator,
    "native": NativeAccelerator,
    "native-memory": NativeAccelerator,
    "native-cpuadam": NativeAccelerator,
    "ddp": NativeAccelerator,
    "fsdp2": BareFsdp2,
    "single": OneProcess,
}


def build_class(engine: str, probe: Probe, asked: Mapping[str, Any], overrides: Mapping[str, Any]) -> type[Any]:
    """The Accelerator class of `engine`. `asked`: an `engines.Asked` as a dict; `overrides`: DeepSpeed's settings."""
    base = _BASES[engine]
    runs_deepspeed = engine.startswith("native") and asked["distributed_type"] == "DEEPSPEED"
    # DeepSpeed and hfdist clip by the yaml themselves; accelerate's other engines have no key for it.
    clips = engine in ("ddp", "fsdp2", "single") and asked["clipping"] is not None

    class Accelerator(base):  # type: ignore[misc, valid-type]
        """The engine's own, observed."""

        if engine == "fsdp2":
            asked_stage = asked["stage"]
            asked_reduce_dtype = asked["reduce_dtype"]
        if engine == "single":
            ranks = asked["num_processes"]

        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            if engine == "hfdist" and resolve_engine(os.environ) == "native":
                raise _chooses_itself(engine)
            return super().__new__(cls)

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            if runs_deepspeed:
                kwargs["deepspeed_plugin"] = deepspeed_plugin(kwargs.get("deepspeed_plugin"), overrides)
            super().__init__(*args, **kwargs)
            self._clipped_by_script = False
            probe.accelerator_made(self.device)

        def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
            probe.before_prepare([item for item in args if isinstance(item, nn.Module)])
            given = args
            if engine == "native-cpuadam":
                given = tuple(use_cpu_adam(item) if isinstance(item, torch.optim.Optimizer) else item for item in args)
            result = super().prepare(*given, device_placement=device_placement)
            for model in self._models:
                probe.watch_model(model)
            for optimizer in self._optimizers:
                if not any(optimizer is known for known in probe.optimizers):
                    probe.optimizers.append(optimizer)
                    self._watch(optimizer, first=len(probe.optimizers) == 1)
            if runs_deepspeed and self.deepspeed_engine_wrapped is not None:
                probe.engine["deepspeed"] = describe_deepspeed(self.deepspeed_engine_wrapped.engine)
            return result

        def _watch(self, optimizer: Any, *, first: bool) -> None:
            original = optimizer.step

            def step(*args: Any, **kwargs: Any) -> Any:
                if clips and self.sync_gradients and not self._clipped_by_script:
                    self.clip_grad_norm_(
                        [p for group in optimizer.param_groups for p in group["params"]], asked["clipping"]
                    )
                value = original(*args, **kwargs)
                if first and self.sync_gradients:
                    self._clipped_by_script = False
                    probe.ended_step()
                return value

            optimizer.step = step

        def clip_grad_norm_(self, *args: Any, **kwargs: Any) -> Any:
            self._clipped_by_script = True
            return super().clip_grad_norm_(*args, **kwargs)

        def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
            probe.saw_backward(loss)
            super().backward(loss, **kwargs)

    return Accelerator


def install(cls: type[Any]) -> None:
    """Put `cls` where scripts find an Accelerator: in accelerate, in hfdist, and wherever either is bound already."""
    import accelerate

    from hfdist import accelerator as home

    replaced: tuple[object, ...] = (accelerate.Accelerator, home.Accelerator)
    for module in list(sys.modules.values()):
        if not isinstance(module, ModuleType) or module.__name__.startswith("hfdist."):
            continue
        for name, value in list(vars(module).items()):
            if any(value is known for known in replaced):
                setattr(module, name, cls)
    # hfdist's modules use accelerate's class by attribute and must keep theirs; scripts import from these two.
    # The package's own name is a lazy one: set before anybody asks for it.
    setattr(sys.modules["hfdist"], "Accelerator", cls)  # noqa: B010
    setattr(home, "Accelerator", cls)  # noqa: B010


def _chooses_itself(engine: str) -> ConfigError:
    return ConfigError(
        say(
            given=f"a script that sets HFDIST_ENGINE={os.environ.get('HFDIST_ENGINE')} itself, under {engine}",
            expected="one that leaves the choice of the engine to its launch",
            do="Compare one that does (recipes/zero3.py).",
        )
    )


def verify_observed(probe: Probe, engine: str, *, script: str) -> None:
    """Raises ConfigError when the script ended and nothing was measured; says what it did instead."""
    if probe.steps:
        return
    if not probe.made:
        given = f"{script}, which made no Accelerator"
    elif not probe.optimizers:
        given = f"{script}, which prepared no optimizer"
    else:
        given = f"{script}, which ended before its first optimizer step"
    raise ConfigError(
        say(
            given=f"{given} ({engine})",
            expected="a script that trains with accelerate's or hfdist's Accelerator",
            do="Compare one that does (recipes/zero3.py, examples/accelerate_loop.py).",
        )
    )


def parameters_of(models: Sequence[nn.Module]) -> int:
    """Number of elements of all parameters, whole ones under DeepSpeed's ZeRO-3 too."""
    seen = {id(p): getattr(p, "ds_numel", p.numel()) for model in models for p in model.parameters()}
    return sum(seen.values())
