"""Try a plan on a small copy of the model before it is used: output, loss and every gradient against the whole copy's.

The copy has random weights in fp64 (fresh biases and norms are 0 and 1, which would hide mix-ups) and is thrown away. A
parameter that is whole but of which each rank gets a part of the gradient (a norm on local heads) is found here, too.
"""

from __future__ import annotations

import copy
import inspect
import logging
import re
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from hfdist import comm
from hfdist.errors import ConfigError, say
from hfdist.models.tensor_plans import Plan, expand
from hfdist.parallel.tensor.apply import TensorParallel, apply_plan
from hfdist.parallel.tensor.collectives import Ranks
from hfdist.parallel.tensor.layout import Replicated, UnfitPlan
from hfdist.parallel.tensor.vocab import splits_loss

logger = logging.getLogger(__name__)

# transformers computes norms, softmax and angles in fp32 in any model; a wrong plan is off by the size of values.
TOLERANCE = 1e-4
LABEL = "tp verify"
_SMALL = 30_000_000  # parameters up to which the model itself is copied


def verified_plan(model: nn.Module, candidates: list[Plan], ranks: Ranks, *, sequence_parallel: bool = False) -> Plan:
    """The first of `candidates` that is right, with rules added for partial gradients; ConfigError when none is.

    All ranks call it with the same model and get the same answer.
    """
    probe = _probe(model)
    inputs = _inputs(probe, ranks.size)
    want, fault = _measure_safely(probe, inputs)
    if want is None:  # some of transformers' code wants fp32
        probe.float()
        want, fault = _measure_safely(probe, inputs)
    if want is None:
        raise ConfigError(
            say(
                given=f"{type(model).__name__}, whose forward failed in a trial before it was split: {fault}",
                expected="a forward and backward with input_ids",
                do="Call with verify=False and a plan of your own.",
            )
        )
    names = {name for name, _ in probe.named_modules()} | {
        name for name, _ in probe.named_parameters(remove_duplicate=False)
    }
    faults: list[str] = []
    refused: UnfitPlan | None = None
    for plan in candidates:
        try:
            present = {name: style for name, style in plan.items() if name in names}
            handle = apply_plan(probe, present, ranks, sequence_parallel=sequence_parallel)
        except UnfitPlan as error:  # the same on all ranks, before anything moved
            refused = error
            continue
        try:
            got, fault = _measure_safely(probe, inputs)
            different = _different(got, want, handle) if got is not None else []
            partial = {name for name, summed in different if summed}
            wrong = [name for name, summed in different if not summed]
        finally:
            handle.undo()
        if not fault and not wrong:
            if ranks.rank == 0 and _gathers(plan) > _gathers(candidates[0]):
                logger.warning(
                    "%s: its heads cannot be spread over ranks (%s), so attention is computed whole on each from "
                    "weights that are split: one all-gather more for each projection.",
                    type(model).__name__,
                    faults[0] if faults else refused,
                )
            rules = {re.sub(r"(?<=\.)\d+(?=\.)", "*", name): "replicated_with_grad_allreduce" for name in partial}
            return {**plan, **expand(model, rules, strict=False)}
        fault = fault or f"different {', '.join(wrong[:4])}{' and more' if len(wrong) > 4 else ''}"
        faults += [fault] if fault not in faults else []
    if refused is not None and not faults:
        raise refused
    raise ConfigError(
        say(
            given=f"{type(model).__name__}, over {ranks.size} ranks by {len(candidates)} plan(s): {'; '.join(faults)}",
            expected="the output and the gradients of the whole model, in a trial on a copy with random weights",
            do="Pass plan={'layers.*.module': 'style', ...} that fits this model, or tp_size=1.",
        )
    )


def _gathers(plan: Plan) -> int:
    return sum(style == "colwise_gather_output" for style in plan.values())


@dataclass
class _Measured:
    output: Tensor
    gradients: dict[str, Tensor | None]


def _probe(model: nn.Module) -> nn.Module:
    """A copy with random fp64 weights: of the model when it is small, else of one block of its configuration."""
    num_parameters = sum(p.numel() for p in model.parameters())
    meta = any(p.is_meta for p in model.parameters())
    if isinstance(model, PreTrainedModel) and (num_parameters > _SMALL or meta):
        config = copy.deepcopy(model.config)
        text = config.get_text_config()
        text.num_hidden_layers = min(2, text.num_hidden_layers)
        if getattr(text, "layer_types", None):
            text.layer_types = text.layer_types[: text.num_hidden_layers]
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            probe: nn.Module = type(model)(config)
    else:
        try:
            probe = copy.deepcopy(model).cpu()
        except RuntimeError as error:  # a tensor with a gradient history in an attribute
            raise ConfigError(
                say(
                    given=f"{type(model).__name__}, which keeps results of a forward and cannot be copied for a trial",
                    expected="a model that has not run yet",
                    do="Call accelerator.prepare before the first forward.",
                )
            ) from error
    probe = probe.to(torch.float64).eval()
    for module in probe.modules():
        if isinstance(module, PreTrainedModel) and hasattr(module.config, "_experts_implementation"):
            module.config._experts_implementation = "eager"  # grouped matrix products have no fp64
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in probe.parameters():
            parameter.requires_grad_(True)
            values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            if parameter.ndim == 1:
                parameter.add_(values * 0.1)
            else:
                parameter.copy_(values / max(parameter.shape[-2:]) ** 0.5)
    return probe


def _inputs(probe: nn.Module, size: int) -> dict[str, Tensor]:
    """Two sequences, as long as sequence parallelism over `size` ranks wants them."""
    config = getattr(probe, "config", None)
    if config is None:
        raise ConfigError(
            say(
                given=f"{type(probe).__name__}, which is not a transformers model",
                expected="one that can be tried with input_ids",
                do="Call with verify=False and a plan of your own.",
            )
        )
    generator = torch.Generator().manual_seed(6)
    vocabulary = min(config.get_text_config().vocab_size, 1000)
    ids = torch.randint(0, vocabulary, (2, (7 // size + 1) * size), generator=generator)
    inputs = {"input_ids": ids}
    if getattr(config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = ids.flip(1)
    if splits_loss(probe) and "labels" in inspect.signature(type(probe).forward).parameters:
        inputs["labels"] = ids
    return inputs


def _measure(probe: nn.Module, inputs: dict[str, Tensor]) -> _Measured:
    """Forward and backward; the first floating output stands for all."""
    probe.zero_grad()
    outputs = probe(**inputs)
    first = getattr(outputs, "logits", None)
    if first is None:
        first = outputs[0]
    generator = torch.Generator().manual_seed(8)
    weights = torch.randn(first.shape, generator=generator, dtype=torch.float64).to(first.dtype)
    loss = (first * weights).mean()
    if "labels" in inputs:
        loss = loss + outputs.loss
    loss.backward()
    return _Measured(first.detach(), {name: p.grad for name, p in probe.named_parameters()})


def _measure_safely(probe: nn.Module, inputs: dict[str, Tensor]) -> tuple[_Measured | None, str]:
    """As `_measure`, or what it raised: shapes that do not fit are the same on all ranks."""
    try:
        return _measure(probe, inputs), ""
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError) as error:
        return None, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def _different(got: _Measured, want: _Measured, handle: TensorParallel) -> list[tuple[str, bool]]:
    """Names of what differs on any rank, each with whether it is right once summed over ranks."""
    handle.reduce_partial_gradients()
    names = sorted(want.gradients)
    gaps = [_gap(got.output, want.output)]
    # What is 0 in real arithmetic (a key bias) is noise here.
    floor = 1e-3 * max(float(g.abs().max()) for g in want.gradients.values() if g is not None)
    local = {}
    for name in names:
        layout = handle.layouts[name]
        whole = want.gradients[name]
        expected = layout.take(whole, handle.ranks.rank, handle.ranks.size) if whole is not None else None
        gradient = got.gradients[name]
        if expected is None and gradient is None:
            gaps.append(0.0)
            continue
        expected = torch.zeros_like(gradient) if expected is None else expected  # type: ignore[arg-type]
        local[name] = torch.zeros_like(expected) if gradient is None else gradient
        scale = floor if whole is None else max(floor, float(whole.abs().max()))
        gaps.append(_gap(local[name], expected, scale))
    worst = comm.all_reduce(torch.tensor(gaps), handle.ranks.group, dist.ReduceOp.MAX, label=LABEL).tolist()
    different: list[tuple[str, bool]] = [] if worst[0] <= TOLERANCE else [("output", False)]
    for name, gap in zip(names, worst[1:], strict=True):
        if gap <= TOLERANCE:
            continue
        summed = False
        if isinstance(handle.layouts[name], Replicated):
            whole = want.gradients[name]
            total = comm.all_reduce(local[name].clone(), handle.ranks.group, label=LABEL)
            summed = whole is not None and _gap(total, whole, max(floor, float(whole.abs().max()))) <= TOLERANCE
        different.append((name, summed))
    return different


def _gap(got: Tensor, want: Tensor, scale: float | None = None) -> float:
    """Largest difference relative to the largest value wanted; infinite for other shapes and NaN."""
    if got.shape != want.shape:
        return float("inf")
    if not got.numel():
        return 0.0
    scale = float(want.abs().max()) if scale is None else scale
    gap = float((got - want).abs().max()) / max(scale, 1e-30)
    return float("inf") if gap != gap else gap
