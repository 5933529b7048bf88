"""The face: `accelerate.Accelerator` whose `prepare`, `backward`, clipping and saving run on hfdist's engine.

    from hfdist import Accelerator          # the one line a script changes

Everything not overridden here is accelerate's own. `prepare` shards the model in place and returns the same object.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import accelerate
import torch
from torch import nn

from hfdist import comm
from hfdist.checkpoint import state as checkpoint
from hfdist.checkpoint import whole
from hfdist.config import resolve_engine, resolve_settings
from hfdist.engine import data, norm, repoint
from hfdist.engine.core import Engine
from hfdist.engine.loss import LossWeights
from hfdist.engine.optimizer import ZeroOptimizer
from hfdist.engine.recover import run_step
from hfdist.engine.scaler import LossScaler
from hfdist.errors import ConfigError, say
from hfdist.launch import engine_environment
from hfdist.mesh import Grid, forget_meshes
from hfdist.parallel import amp as precision
from hfdist.parallel import fsdp, loading
from hfdist.parallel.apply import apply_model_axes, apply_sharding
from hfdist.parallel.chunked_loss import apply_chunked_loss, verify_chunked_loss
from hfdist.parallel.switch import switch_stage, verify_between_steps
from hfdist.parallel.zero import ZeroModel, apply_zero, build_zero_model
from hfdist.plugins import Plugin

logger = logging.getLogger(__name__)


class Accelerator(accelerate.Accelerator):
    """accelerate's Accelerator on hfdist's engine.

    `plugins`: ZeroPlugin, AmpPlugin, LossPlugin, TensorParallelPlugin, PipelineParallelPlugin; they win over the yaml,
    the environment and accelerate's own plugin arguments, which are translated. Under `HFDIST_ENGINE=native` this
    constructs accelerate's own engine for the same yaml. Raises ConfigError, before any work, for a setting that cannot
    be honoured.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        if resolve_engine(os.environ) == "native":
            from hfdist.native import NativeAccelerator

            return NativeAccelerator(*args, **kwargs)
        return super().__new__(cls)

    def __init__(self, *args: Any, plugins: Sequence[Plugin] = (), **kwargs: Any) -> None:
        names = list(inspect.signature(super().__init__).parameters)
        kwargs.update(zip(names, args, strict=False))
        self.settings, kwargs = resolve_settings(plugins=plugins, accelerator_kwargs=kwargs, environ=os.environ)
        with engine_environment(self.settings):
            super().__init__(**kwargs)
        self.engine = self._build_engine()
        self.native_amp = self.settings.amp is not None
        self.scaler = self.engine.scaler
        self._said: set[str] = set()
        self._undo: list[Callable[[], None]] = []  # what hangs on models
        # What is changed outside of models; all of it weak, so that it ends with this object at the latest.
        self._undo_outside = [
            norm.redirect_torch_clipping(self.engine),
            fsdp.reduce_before_item(weakref.ref(self.engine.meeting)),
        ]
        shards_at_load = self.settings.zero.load_sharded or (
            self.settings.zero.load_sharded is None and self.zero_stage == 3
        )
        if shards_at_load and not self.engine.grid.model_groups:  # split and cut models are loaded whole first
            masters = torch.float32 if self.settings.amp is not None else None
            self._undo_outside.append(loading.load_into_shards(weakref.WeakMethod(self._shard_on_meta), masters))
        if self.is_main_process:
            for notice in self.settings.notices:
                logger.warning(notice)

    def _build_engine(self) -> Engine:
        settings = self.settings
        timeout = self.init_handler.timeout if self.init_handler is not None else None
        grid = Grid(
            self.device.type,
            self.num_processes,
            self.process_index,
            pp_size=settings.pipeline.pp_size if settings.pipeline else 1,
            tp_size=settings.tensor.tp_size if settings.tensor else 1,
            dp_replicate_size=settings.zero.dp_replicate_size,
            timeout=timeout,
        )
        mesh = grid.data
        on_gloo = self.device.type == "cpu"
        meeting = comm.Meeting(
            mesh.rank,
            mesh.size,
            mesh.coordinates,
            mesh.gloo_group if self.num_processes > 1 else None,
            stall_timeout=settings.stall_timeout,
            **({"timeout": timeout.total_seconds()} if timeout is not None else {}),
            enabled=on_gloo or settings.zero.conditional_modules or settings.zero.escalate_on_oom,
            device=self.device,
            device_group=mesh.group,
        )
        engine = Engine(
            grid,
            meeting,
            LossWeights(mesh.size, meeting, mesh.group, settings.loss_weighting == "tokens"),
            settings.amp,
            self.device,
            gradient_clipping=settings.gradient_clipping,
            raise_nonfinite=settings.nonfinite_loss == "raise",
            autocast_options=self.autocast_handler.to_kwargs() if self.autocast_handler is not None else {},
        )
        if settings.amp is not None and settings.amp.dtype == "fp16":
            engine.scaler = LossScaler(settings.amp, self.device.type, engine.any_rank, engine.name_of)
        if settings.zero.conditional_modules:
            engine.serve_conditional()
        if settings.zero.escalate_on_oom:
            # gloo starts threads for a new group, and aborts the process when there is no memory left for them.
            mesh.for_stage(0)
            mesh.for_stage(3)
            if settings.zero.secondary_shard_size is not None:
                mesh.secondary(settings.zero.secondary_shard_size)
        self._zero_stage = settings.zero.stage
        return engine

    # ---------------------------------------------------------------- prepare

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """accelerate's `prepare`, models first and schedulers last whatever the order of the arguments."""
        if device_placement is None:
            device_placement = [None] * len(args)  # type: ignore[list-item]
        elif len(device_placement) != len(args):
            raise ValueError(
                say(
                    given=f"device_placement with {len(device_placement)} entries for {len(args)} objects",
                    expected="one entry for each object",
                    do="Leave it out to place everything.",
                )
            )
        for item in args:
            if type(item).__name__ in ("DummyOptim", "DummyScheduler"):
                raise ConfigError(
                    say(
                        given=f"accelerate's {type(item).__name__}, which stands for a section of a DeepSpeed json",
                        expected="a torch optimizer or scheduler",
                        do="Build it in the script; hfdist does not make optimizers from the json.",
                    )
                )
        results: list[Any] = list(args)
        order = (nn.Module, torch.utils.data.DataLoader, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)
        for kind in order:
            for index, (item, placement) in enumerate(zip(args, device_placement, strict=True)):
                if isinstance(item, kind):
                    first_pass = kind is not torch.optim.lr_scheduler.LRScheduler
                    results[index] = self._prepare_one(item, first_pass=first_pass, device_placement=placement)
                    results[index]._is_accelerate_prepared = True
        return tuple(results) if len(results) > 1 else results[0]

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Shard `model` in place as the stage says and run its forward under the precision asked for."""
        if getattr(model, "_is_accelerate_prepared", False):
            if model not in self._models:
                self._models.append(model)
            return model
        inner: Any = _inner(model)
        if self.settings.loss is not None:
            verify_chunked_loss(inner)
        loaded = loading.loaded_shards(inner)
        if loaded is None:
            if self._zero_stage == 3 and self.num_processes > 1 and getattr(inner, "name_or_path", ""):
                self._say_once(
                    f"{type(inner).__name__} was loaded whole on every rank, then sharded. Call from_pretrained "
                    "once the Accelerator exists, and each rank reads only its shard."
                )
            self._shard(inner)
        else:
            if self.state.dynamo_plugin.backend.value.lower() != "no":
                self._say_once(
                    "The dynamo backend is not used for a model that was loaded straight into shards. Compile its "
                    "blocks yourself, or set HFDIST_LOAD_SHARDED=0."
                )
            before = dict(inner.named_parameters(remove_duplicate=False))
            self.engine.models.append(loading.take_over(loaded, inner, self._build_zero))
            repoint.follow(self.engine, before, inner, self._optimizers)
        zero = self.engine.models[-1]
        if self.settings.loss is not None:
            self._undo.append(apply_chunked_loss(inner, self.settings.loss.chunk_size))
        self._undo.append(self.engine.wrap_forward(zero))
        self._undo.append(self.engine.let_zero_grad_drop(zero))
        self._undo.append(fsdp.let_generate_gather(inner))
        self._undo.append(whole.let_save_pretrained_gather(self.engine, inner))
        self._undo.append(whole.let_resize_embeddings(zero, self.engine))
        self._undo.append(whole.let_load_whole(zero))
        if self.settings.activation_checkpointing:
            inner.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self._models.append(model)
        return model

    def _shard(self, model: nn.Module) -> None:
        if self.settings.amp is not None:
            precision.make_masters(model)
        before = dict(model.named_parameters(remove_duplicate=False))
        split = apply_model_axes(model, self.engine.grid, tensor=self.settings.tensor, pipeline=self.settings.pipeline)
        zero = self._build_zero(model, split.own_blocks() if split is not None else None)
        backend = self.state.dynamo_plugin.backend.value.lower()
        if backend != "no":
            for _, block in zero.blocks:
                block.compile(**self.state.dynamo_plugin.to_kwargs())
        scaler = self.engine.scaler
        apply_sharding(zero, split, self.device, loss_scale=(lambda: 1.0) if scaler is None else scaler.get_scale)
        self.engine.models.append(zero)
        repoint.follow(self.engine, before, model, self._optimizers)

    def _build_zero(self, model: nn.Module, block_names: list[str] | None = None) -> ZeroModel:
        settings = self.settings
        return build_zero_model(
            model,
            self.engine.mesh,
            self.engine.meeting,
            stage=self._zero_stage,
            mp_policy=precision.mixed_precision_policy(settings.amp, settings.zero.reduce_dtype, model),
            block_classes=settings.zero.block_classes,
            block_names=block_names,
            conditional=settings.zero.conditional_modules,
            int8=settings.zero.gather_dtype == "int8",
            secondary_shard_size=settings.zero.secondary_shard_size,
        )

    def _shard_on_meta(self, model: nn.Module) -> ZeroModel:
        """Sharding for a model whose weights are about to be loaded: nothing to make equal, nothing to move."""
        self.engine.meeting.run(comm.LOAD)
        if self.settings.amp is not None:
            precision.make_masters(model)
        zero = self._build_zero(model)
        apply_zero(zero, self.device, synchronise=False)
        self._undo.append(whole.let_resize_embeddings(zero, self.engine))
        return zero

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> ZeroOptimizer | torch.optim.Optimizer:
        """Point `optimizer` to the sharded parameters (its groups kept) and wrap it.

        Raises ConfigError for an optimizer that cannot be split (`engine.probe`).
        """
        if getattr(optimizer, "_is_accelerate_prepared", False):
            if optimizer not in self._optimizers:
                self._optimizers.append(optimizer)
            return optimizer
        repoint.point_to_shards(self.engine, optimizer)
        wrapped = ZeroOptimizer(optimizer, self.engine)
        split = any(zero.split is not None for zero in self.engine.models)
        if split or (self._zero_stage > 0 and self.num_processes > 1):
            wrapped.local.check()
        if split:
            self.engine.refuse_whole_updates(wrapped)
        self.engine.optimizers.append(wrapped)
        self._optimizers.append(wrapped)
        return wrapped

    def prepare_data_loader(
        self, data_loader: Any, device_placement: bool | None = None, slice_fn_for_dispatch: Any = None
    ) -> Any:
        """accelerate's loader; ranks that hold different parts of one model get the same batches."""
        if not self.engine.grid.model_groups or getattr(data_loader, "_is_accelerate_prepared", False):
            return super().prepare_data_loader(data_loader, device_placement, slice_fn_for_dispatch)
        prepared = data.shard_data_loader(
            self, data_loader, self.engine.mesh, device_placement=device_placement, slice_fn=slice_fn_for_dispatch
        )
        self._dataloaders.append(prepared)
        return prepared

    def gather(self, tensor: Any) -> Any:
        """accelerate's `gather`, each dp rank's tensors once."""
        return data.gather(tensor, self.engine.mesh) if self.engine.grid.model_groups else super().gather(tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """accelerate's `gather_for_metrics` (what filled the last batch is dropped), each dp rank's data once."""
        tensors = not use_gather_object and data.all_tensors(input_data)
        if tensors or not self.engine.grid.model_groups:
            return super().gather_for_metrics(input_data, use_gather_object)
        listed = data.gather_objects(input_data, self.engine.mesh)
        state = self.gradient_state
        return listed[: state.remainder] if state.end_of_dataloader and state.remainder > 0 else listed

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """accelerate's `reduce`, each dp rank's tensors once."""
        if not self.engine.grid.model_groups:
            return super().reduce(tensor, reduction, scale)
        return data.reduce(tensor, self.engine.mesh, reduction)

    def prepare_scheduler(self, scheduler: torch.optim.lr_scheduler.LRScheduler) -> Any:
        """accelerate's wrapper: `num_processes` steps per update, or one with `scheduler_step="update"`."""
        wrapped = super().prepare_scheduler(scheduler)
        if self.settings.scheduler_step == "update":
            wrapped.split_batches = True  # accelerate's switch for one step per update
        return wrapped

    # -------------------------------------------------------------- the loop

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """`loss.backward()` divided by the accumulation steps, scaled under fp16; completes an accumulation window."""
        self.engine.before_backward(loss)
        loss = loss / self.gradient_accumulation_steps
        if self.scaler is not None:
            loss = self.scaler.scale(loss)
        loss.backward(**kwargs)
        self.engine.after_backward(
            synchronised=self.sync_gradients, num_steps=self.gradient_accumulation_steps
        )  # fmt: skip

    @contextlib.contextmanager
    def accumulate(self, *models: nn.Module) -> Iterator[None]:
        """accelerate's `accumulate`; the window's loss is the mean over its real micro-steps (or label tokens)."""
        self.engine.weights.begin_micro_step()
        try:
            with super().accumulate(*models):
                yield
        finally:
            self.engine.weights.leave_micro_step()

    @contextlib.contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Backward passes inside do not complete an accumulation window of `model`."""
        with self.engine.no_sync(_inner(model)):
            yield

    @contextlib.contextmanager
    def join_uneven_inputs(self, joinables: Any, even_batches: bool | None = None) -> Iterator[None]:
        """Nothing to do with one process. Raises ConfigError with several: a rank without a batch cannot sit out."""
        if self.num_processes > 1:
            raise ConfigError(
                say(
                    given="join_uneven_inputs() on several processes",
                    expected="as many batches on every rank: each of them holds a part of what the others compute with",
                    do="Leave even_batches on (the default), which fills the last batches; gather_for_metrics drops "
                    "what was filled in.",
                )
            )
        yield

    def clip_grad_norm_(
        self, parameters: Iterable[torch.Tensor] | torch.Tensor, max_norm: float, norm_type: float = 2
    ) -> torch.Tensor:
        """Clip by the global norm; returns the norm before clipping, a plain 0-dim tensor equal on all ranks.

        Inside an unfinished accumulation window there is nothing to clip yet: returns 0 and changes nothing.
        """
        if not self.sync_gradients:
            self._say_once(
                "clip_grad_norm_ inside an unfinished accumulation window does nothing: gradients are not complete. "
                "Guard it with `if accelerator.sync_gradients:`."
            )
            return torch.zeros((), device=self.device)
        self.unscale_gradients()
        return self.engine.clip(parameters, max_norm, norm_type)

    def _say_once(self, text: str) -> None:
        if self.is_main_process and text not in self._said:
            self._said.add(text)
            logger.warning(text)

    def clip_grad_value_(self, parameters: Iterable[torch.Tensor] | torch.Tensor, clip_value: float) -> None:
        """Clamp every gradient element to [-clip_value, clip_value]; nothing to do in an unfinished window."""
        if not self.sync_gradients:
            self._say_once("clip_grad_value_ inside an unfinished accumulation window does nothing.")
        else:
            self.unscale_gradients()
            for gradient in norm.gradients(self.engine.resolve(parameters)):
                norm.local_tensor(gradient).clamp_(-clip_value, clip_value)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Divide gradients by the loss scale (fp16), once per window."""
        if self.scaler is None:
            return
        chosen = self._optimizers if optimizer is None else optimizer
        for item in chosen if isinstance(chosen, (list, tuple)) else [chosen]:
            while isinstance(item, accelerate.optimizer.AcceleratedOptimizer):
                item = item.optimizer
            self.scaler.unscale_(item)

    @contextlib.contextmanager
    def autocast(self, autocast_handler: Any = None) -> Iterator[None]:
        """The autocast that prepared models run under (nothing in full precision)."""
        handler = autocast_handler or self.autocast_handler
        options = handler.to_kwargs() if handler is not None else {}
        with precision.autocast(self.settings.amp, self.device.type, **options):
            yield

    def run_step(self, fn: Callable[[Any], Any], batch: Any) -> Any:
        """`fn(batch)` (forward, backward, update), undone and repeated at a higher stage on all ranks when one runs
        out of memory and `ZeroPlugin(escalate_on_oom=True)`; else the error says which stage would fit."""
        return run_step(self, fn, batch)

    # ----------------------------------------------------------------- ranks

    @property
    def dp_size(self) -> int:
        """Ranks that read different batches: `num_processes` without tensor and pipeline parallelism."""
        return self.engine.mesh.size

    @property
    def dp_rank(self) -> int:
        """Which of them this process belongs to; ranks that hold different parts of one model share it."""
        return self.engine.mesh.rank

    def count_parameters(self, model: nn.Module) -> int:
        """Parameters of the whole model (a tie once), however it is split."""
        zero = self.engine.of(_inner(model))
        return zero.split.num_parameters if zero.split is not None else sum(p.numel() for p in model.parameters())

    # ----------------------------------------------------------------- stage

    @property
    def zero_stage(self) -> int:
        """The current ZeRO stage, 0 to 3."""
        return self._zero_stage

    def set_zero_stage(self, stage: int) -> None:
        """Change the ZeRO stage of everything prepared, between two steps: no restart, no disk, the same curve.

        Parameters of the model are new objects afterwards (between 0 and the rest); optimizers, schedulers and the
        scaler follow, other references to parameters do not. Raises ConfigError for a stage that is none, and
        DistributedError inside an accumulation window.
        """
        if type(stage) is not int or not 0 <= stage <= 3:
            raise ConfigError(
                say(given=f"set_zero_stage({stage!r})", expected="0, 1, 2 or 3", do="See ZeroPlugin.stage.")
            )
        if stage == self._zero_stage:
            return
        for zero in self.engine.models:  # all of them before the first one moves
            verify_between_steps(zero, stage)
        optimizers = self.engine.optimizers
        if stage > 0 and self.num_processes > 1:
            for optimizer in optimizers:
                optimizer.local.check()

        replaced = {id(new): old for old, new in self.engine.replaced.items()}

        def move(old: nn.Parameter, new: nn.Parameter, plan: Any) -> None:
            fsdp.carry_over(old, new)
            if id(old) in replaced:
                self.engine.replaced[replaced[id(old)]] = new
            for optimizer in optimizers:
                optimizer.local.move(old, new, plan)

        for zero in self.engine.models:
            switch_stage(zero, stage, move)
        self._zero_stage = stage

    # ------------------------------------------------------------ whole state

    @contextlib.contextmanager
    def gathered_parameters(self, model: nn.Module, modifier_rank: int | None = None) -> Iterator[nn.Module]:
        """Inside, `model` has whole plain parameters on every rank; what is written to them is kept.

        `modifier_rank`: only this rank's writes count and reach the others; None: all ranks write the same.
        """
        with whole.gathered_parameters(self.engine, _inner(model), modifier_rank):
            yield model

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """The whole state dict as plain tensors, on every rank; all ranks call it."""
        return whole.whole_state_dict(self.engine, _inner(model))

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """HF safetensors that plain `from_pretrained` (or `load_checkpoint_in_model`) reads; all ranks call it."""
        inner: Any = _inner(model)
        if hasattr(inner, "save_pretrained") and safe_serialization:
            inner.save_pretrained(
                save_directory, is_main_process=self.is_main_process, max_shard_size=max_shard_size
            )  # fmt: skip
            self.wait_for_everyone()
            return
        super().save_model(model, save_directory, max_shard_size, safe_serialization)

    def save_state(
        self, output_dir: str | None = None, safe_serialization: bool = True, **save_model_func_kwargs: Any
    ) -> str:
        """Model, optimizers, schedulers, scaler, random streams, samplers and registered objects; all ranks call it."""
        return checkpoint.save_state(self, output_dir)

    def load_state(
        self, input_dir: str | None = None, load_kwargs: dict[str, Any] | None = None, **load_model_func_kwargs: Any
    ) -> None:
        """What `save_state` wrote, into the same layout; all ranks call it."""
        checkpoint.load_state(self, input_dir)

    def free_memory(self, *objects: Any) -> Any:
        """accelerate's `free_memory`; also takes hfdist's wrappers off the models (they stay sharded).

        The Accelerator can prepare other objects afterwards.
        """
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()
        for model in self._models:
            model.__dict__.pop("_is_accelerate_prepared", None)
        self.engine.models.clear()
        self.engine.optimizers.clear()
        self.engine.weights.leave_micro_step()
        self.engine.weights.end_window()
        forget_meshes()
        return super().free_memory(*objects)

    # --------------------------------------------------------------- reports

    def end_training(self) -> None:
        """accelerate's `end_training`; also undoes what hfdist changed outside of this object."""
        for undo in reversed(self._undo_outside):
            undo()
        self._undo_outside.clear()
        super().end_training()

    def memory_report(self) -> Any:
        """Bytes on this rank by owner (`measure.memory.MemoryReport`)."""
        from hfdist.measure.memory import measure_memory

        return measure_memory([_inner(m) for m in self._models], self._optimizers)

    def explain(self) -> str:
        """Mesh, units, and bytes per rank and on the wire at every stage for what is prepared."""
        from hfdist.engine import describe

        now = describe.layout(
            self.engine,
            self._zero_stage,
            micro_steps=self.gradient_accumulation_steps,
            zero=self.settings.zero,
        )
        return describe.explain_engine(self.engine, now)

    def dtype_report(self) -> dict[str, str]:
        """dtypes of parameters (masters), gathered copies, gradients, optimizer state, reductions and buffers."""
        from hfdist.engine.dtypes import dtype_report

        return dtype_report(self.engine)


def _inner(model: nn.Module) -> nn.Module:
    """The module behind `torch.compile(model)`; any other model itself."""
    return getattr(model, "_orig_mod", model)
