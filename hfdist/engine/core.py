"""The engine of one Accelerator: what is prepared, and the order of things around an update.

forward        loss weighted by label tokens (`loss.py`)
backward       gradients reduced by FSDP2 as the stage says (`parallel/zero.py`)
finish         the window's remaining factor multiplied in
update         agree (nobody failed, loss finite) -> unscale -> clip -> step on local shards -> copies freed
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from hfdist import comm
from hfdist.engine import norm
from hfdist.engine.loss import LossWeights, Number, weigh_loss
from hfdist.engine.optimizer import ZeroOptimizer
from hfdist.engine.scaler import LossScaler
from hfdist.errors import ConfigError, DistributedError, say
from hfdist.mesh import DataMesh, Grid
from hfdist.models.labels import count_labels, is_mean_over_labels, is_transformers_model
from hfdist.parallel import amp as precision
from hfdist.parallel import conditional, fsdp, replicated
from hfdist.parallel.zero import ZeroModel
from hfdist.plugins import AmpPlugin

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Engine:
    """Everything that lives between `prepare` and the end of training."""

    grid: Grid
    meeting: comm.Meeting
    weights: LossWeights
    amp: AmpPlugin | None
    device: torch.device
    gradient_clipping: float | None = None
    raise_nonfinite: bool = True
    autocast_options: dict[str, Any] = field(default_factory=dict)
    models: list[ZeroModel] = field(default_factory=list)
    optimizers: list[ZeroOptimizer] = field(default_factory=list)
    scaler: LossScaler | None = None
    last_norm: torch.Tensor | None = None  # of the engine's own clipping
    replaced: WeakIdKeyDictionary = field(default_factory=WeakIdKeyDictionary)  # parameter before sharding -> after
    elsewhere: WeakIdKeyDictionary = field(default_factory=WeakIdKeyDictionary)  # parameters that other stages have
    _said: WeakIdKeyDictionary = field(default_factory=WeakIdKeyDictionary)  # models of which something was said once
    num_updates: int = 0
    updating: bool = False  # inside optimizer.step: what fails now has already changed something
    _clipped: set[ZeroModel] = field(default_factory=set)  # since the last backward
    _bad_loss: torch.Tensor | None = None

    @property
    def mesh(self) -> DataMesh:
        """The data axis of the grid: the ranks that hold the same part of the model."""
        return self.grid.data

    def any_rank(self, flag: bool) -> bool:
        """Whether `flag` is set on any rank of the whole grid; all ranks call this together."""
        flag = any(self.meeting.numbers(comm.SCALARS, int(flag)))
        for group in self.grid.model_groups:
            number = torch.tensor(float(flag), device=self.device)
            flag = bool(comm.all_reduce(number, group, torch.distributed.ReduceOp.MAX, label="agreement"))
        return flag

    # ---------------------------------------------------------------- forward

    def wrap_forward(self, zero: ZeroModel) -> Callable[[], None]:
        """Run `model.forward` under the precision asked for and weight its loss; returns the undo."""
        model: Any = zero.model  # patched below
        original = model.forward

        @functools.wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Any:
            with precision.autocast(self.amp, self.device.type, **self.autocast_options):
                output = original(*args, **kwargs)
            if self.amp is not None:
                output = precision.to_fp32(output)
            self.meeting.drain()
            labels = kwargs.get("labels")
            # `num_items_in_batch` says that the caller weights the loss itself (transformers' Trainer).
            if not (self.weights.tokens and torch.is_grad_enabled() and isinstance(labels, torch.Tensor)):
                return output
            if kwargs.get("num_items_in_batch") is not None or not is_mean_over_labels(model):
                return output

            def weight() -> Number:
                self._say_weighted(model)
                return self.weights.weight(count_labels(model, labels))

            return weigh_loss(output, weight, self.weights.saw_weighted)

        model._original_forward = original  # accelerate's unwrap_model(keep_fp32_wrapper=False) looks for it
        model.forward = forward

        def undo() -> None:
            if model.__dict__.get("forward") is forward:
                del model.forward
            model.__dict__.pop("_original_forward", None)

        return undo

    def _say_weighted(self, model: nn.Module) -> None:
        """Once, for a model whose loss hfdist cannot know."""
        if self.mesh.rank or self.mesh.size == 1 or model in self._said or is_transformers_model(model):
            return
        self._said[model] = True
        logger.warning(
            "The loss that %s returns is taken for a mean over its labels and weighted by their number over all ranks. "
            "If it is something else (a sum, a mean over the batch), set HFDIST_LOSS_WEIGHTING=mean.",
            type(model).__name__.removeprefix("FSDP"),
        )

    def let_zero_grad_drop(self, zero: ZeroModel) -> Callable[[], None]:
        """Make `model.zero_grad()` drop gradients that wait in gathered copies too; returns the undo."""
        model: Any = zero.model
        original = model.zero_grad

        @functools.wraps(original)
        def zero_grad(set_to_none: bool = True) -> None:
            self._drop_pending(zero, {id(p) for p in zero.parameters()})
            for parameter in zero.parameters():
                if parameter.grad is not None and set_to_none:
                    parameter.grad = None
                elif parameter.grad is not None:
                    parameter.grad.detach_().zero_()
            original(set_to_none)

        model.zero_grad = zero_grad

        def undo() -> None:
            if model.__dict__.get("zero_grad") is zero_grad:
                del model.zero_grad

        return undo

    # --------------------------------------------------------------- backward

    def before_backward(self, loss: torch.Tensor) -> None:
        """Remember a loss that is not finite; take back a factor that was multiplied in too early."""
        if self.raise_nonfinite and self.scaler is None:
            bad = ~torch.isfinite(loss.detach()).all()
            self._bad_loss = bad if self._bad_loss is None else self._bad_loss | bad
        self._clipped.clear()
        self.weights.saw_backward()
        factor = self.weights.take_back()
        if not isinstance(factor, float) or factor != 1.0:
            norm.scale_gradients(self.parameters(), factor)

    def after_backward(self, *, synchronised: bool, num_steps: int) -> None:
        """Let ranks that ran fewer modules serve the others; complete the window after its last backward."""
        for zero in self.models:
            if zero.conditional:
                self.meeting.drain()
                if synchronised:
                    for param in conditional.used_by_nobody(zero):
                        param.sharded_param.grad = None
            if synchronised:
                replicated.average_gradients(zero)
        if synchronised:
            factor = self.weights.remaining_factor(num_steps)
            if not isinstance(factor, float) or factor != 1.0:
                norm.scale_gradients(self.parameters(), factor)

    def _serve(self, op: int, unit: int) -> None:
        for zero in self.models:
            if conditional.serve(zero, op, unit):
                return

    def serve_conditional(self) -> None:
        """From now on ranks take part in what others need (`ZeroPlugin(conditional_modules=True)`)."""
        self.meeting.serve = self._serve

    # ----------------------------------------------------------------- update

    def update(self, optimizer: ZeroOptimizer) -> bool:
        """One agreed update by `optimizer`; False when it was skipped because gradients overflowed."""
        self._agree()
        self._say_strangers(optimizer)
        self._refuse_hooks(optimizer)
        for zero in self.models:
            zero.reshard()
            replicated.average_gradients(zero)  # of a backward that was not `accelerator.backward`
        stepped = True
        if self.scaler is not None:
            self.scaler.unscale_(optimizer.optimizer)
            stepped = not self.scaler.found_overflow(optimizer.optimizer)
            if not stepped:
                self.scaler.note_overflow(optimizer.optimizer)
        if stepped:
            self._clip_once(optimizer)
            self.updating = True
            optimizer.local.step()
            self.updating = False
            self.num_updates += 1
        if self.scaler is not None:
            self.scaler.update()
        for zero in self._models_of(optimizer):
            zero.window_open = False
        self.weights.end_window()
        self.meeting.num_steps += 1
        return stepped

    def _clip_once(self, optimizer: ZeroOptimizer) -> None:
        """The clipping that the configuration asks for: by one norm over all gradients of the models that `optimizer`
        steps, whatever optimizers they have; a model that waits for another turn (GANs) does not count."""
        models = self._models_of(optimizer)
        if not self.gradient_clipping or (models and self._clipped.issuperset(models)):
            return
        together = [o for o in self.optimizers if o is optimizer or not models.isdisjoint(self._models_of(o))]
        if self.scaler is not None:
            for other in together:
                self.scaler.unscale_(other.optimizer)
        # Those of an optimizer that skips this step are not finite, and are not updated.
        kept = [o for o in together if self.scaler is None or not self.scaler.found_overflow(o.optimizer)]
        parameters = {id(p): p for each in kept for p in each.parameters()}
        self.last_norm = self.clip(parameters.values(), self.gradient_clipping)
        self._clipped |= models

    def _say_strangers(self, optimizer: ZeroOptimizer) -> None:
        if optimizer.looked_at or self.mesh.size == 1:
            return
        optimizer.looked_at = True
        known = {id(p) for p in self.parameters()}
        shapes = [str(tuple(p.shape)) for p in optimizer.parameters() if id(p) not in known]
        if shapes and self.mesh.rank == 0:
            logger.warning(
                "%d parameters of %s belong to no prepared model (shapes %s): every rank updates its own by its own "
                "gradient. Put them into a module and prepare it.",
                len(shapes), type(optimizer.optimizer).__name__, ", ".join(shapes[:5]),
            )  # fmt: skip

    def _refuse_hooks(self, optimizer: ZeroOptimizer) -> None:
        for parameter in optimizer.parameters():
            if parameter._backward_hooks and parameter.ndim:
                raise ConfigError(
                    say(
                        given=f"a hook on {self.name_of(parameter)} (Tensor.register_hook) that no backward calls",
                        expected="hooks of register_post_accumulate_grad_hook, which see the reduced gradient",
                        do="Register it so, or read and change p.grad after accelerator.backward().",
                    )
                )

    def _models_of(self, optimizer: ZeroOptimizer) -> set[ZeroModel]:
        mine = {id(p) for p in optimizer.parameters()}
        return {zero for zero in self.models if any(id(p) in mine for p in zero.parameters())}

    def _agree(self) -> None:
        bad = self._bad_loss
        self._bad_loss = None
        flags = self.meeting.numbers(comm.STEP, int(bool(bad)) if bad is not None else 0)
        if any(flags):
            where = ", ".join(self.meeting.coordinates(rank) for rank, flag in enumerate(flags) if flag)
            raise DistributedError(
                say(
                    given=f"a loss that is not finite on {where} in step {self.meeting.num_steps}",
                    expected="a finite loss; no parameter was updated",
                    do="Look at the batch and the learning rate. To skip such batches yourself, test the loss before "
                    "accelerator.backward(); to train on regardless, set HFDIST_NONFINITE_LOSS=allow.",
                )
            )

    def drop_pending(self, optimizer: ZeroOptimizer) -> None:
        """Gradients that wait unreduced in gathered copies go with those that `optimizer.zero_grad()` drops."""
        mine = {id(p) for p in optimizer.parameters()}
        for zero in self.models:
            self._drop_pending(zero, mine)
        self.weights.end_window()

    def _drop_pending(self, zero: ZeroModel, mine: set[int]) -> None:
        """The same for the parameters of `zero` whose id is in `mine`."""
        self._bad_loss = None
        for module in zero.modules:
            group = fsdp.param_group(module)
            if group is not None and any(id(p.sharded_param) in mine for p in group.fsdp_params):
                group._partial_reduce_output = None
        dropped = False
        for param in fsdp.iterate_params(zero.modules):
            if id(param.sharded_param) in mine:
                dropped = True
                param.unsharded_accumulated_grad = None
                if hasattr(param, "_unsharded_param"):
                    param._unsharded_param.grad = None
        if dropped:
            zero.used.clear()
            zero.window_open = False

    # ------------------------------------------------------------------- norm

    def clip(
        self,
        parameters: Iterable[torch.Tensor],
        max_norm: float,
        norm_type: float = 2.0,
        *,
        error_if_nonfinite: bool = False,
    ) -> torch.Tensor:
        """Clip by the norm over the whole mesh; returns the norm before clipping, a plain 0-dim tensor."""
        listed = self.resolve(parameters)
        parts = self.parts() if self.grid.model_groups else {}
        total = norm.total_norm(
            listed,
            norm_type,
            self.meeting,
            part_of=lambda parameter: parts.get(id(parameter), norm.WHOLE),
            stages=self.grid.pp_group,
        )
        if error_if_nonfinite and not torch.isfinite(total):
            raise RuntimeError(
                f"The total norm of order {norm_type} for gradients is non-finite, so it cannot be clipped; pass "
                "error_if_nonfinite=False to clip anyway."
            )
        norm.clip_gradients(listed, max_norm, total)
        return total

    def resolve(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """`parameters` with gathered copies replaced by the sharded parameters that hold the gradients."""
        listed = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        listed = [self.replaced.get(p, p) for p in listed if p not in self.elsewhere]
        copies: dict[int, nn.Parameter] = {}
        for zero in self.models:
            copies |= zero.sharded_of()
        return [copies.get(id(p), p) for p in listed]

    def parts(self) -> dict[int, norm.Part]:
        """id of a parameter -> how it lies over tensor and pipeline ranks, where it is not whole and counted here."""
        found = {}
        for zero in self.models:
            if zero.split is None:
                continue
            for parameter, groups, share in zero.split.parts():
                if groups or share != 1.0:
                    found[id(parameter)] = norm.Part(groups, share)
        return found

    def refuse_whole_updates(self, optimizer: ZeroOptimizer) -> None:
        """Raises ConfigError for an optimizer that updates whole parameters only and is given parts of some."""
        parts = self.parts()
        for parameter in optimizer.local.stepped_whole():
            if id(parameter) in parts and parts[id(parameter)].groups:
                raise ConfigError(
                    say(
                        given=f"{type(optimizer.optimizer).__name__} for {self.name_of(parameter)}, which tensor "
                        "parallelism has split",
                        expected="an optimizer that treats each element by itself (Adam, SGD, ...)",
                        do="Use one, or train with ZeRO alone.",
                    )
                )

    def owns(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Whether any of `parameters` belongs to a prepared model."""
        known = {id(p) for p in self.parameters()}
        for zero in self.models:
            known |= set(zero.sharded_of())
        return any(id(p) in known or p in self.replaced for p in parameters)

    def parameters(self) -> list[torch.Tensor]:
        """Every parameter of every prepared model, in its sharded form."""
        return [parameter for zero in self.models for parameter in zero.parameters()]

    def names(self) -> dict[torch.Tensor, str]:
        """Every parameter of every prepared model -> its name there."""
        return {p: name for zero in self.models for name, p in zero.model.named_parameters()}

    def name_of(self, parameter: torch.Tensor) -> str:
        """The parameter's name in its model, for messages."""
        return self.names().get(parameter, "a parameter")

    def of(self, model: nn.Module) -> ZeroModel:
        """The handle of a prepared model. Raises ValueError for any other."""
        for zero in self.models:
            if zero.model is model:
                return zero
        raise ValueError(
            say(
                given=f"a {type(model).__name__} that this Accelerator has not prepared",
                expected="a model returned by accelerator.prepare()",
                do="Prepare it first.",
            )
        )

    @contextlib.contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """A micro-step of `model` that is not the last of its window."""
        with self.of(model).no_sync():
            yield
