"""One optimizer step on ranks, measured: memory by owner, bytes counted where issued, bytes the kernel sent."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from hfdist import AmpPlugin, ZeroPlugin
from hfdist.measure.memory import MemoryReport, sample_memory
from hfdist.measure.wire import WireRecorder, interface_bytes, record_wire
from hfdist.models.size import model_size
from hfdist.plan import Layout, StepPlan, plan_step
from tests.models import VOCAB, build_lm, make_windows
from tests.worker import make_accelerator


@dataclass(frozen=True)
class MeasuredStep:
    """What one rank saw and what was planned for it."""

    plan: StepPlan
    wire: WireRecorder
    interface: int | None = None  # bytes sent by all ranks together
    memory: MemoryReport = field(default_factory=MemoryReport)
    between: MemoryReport = field(default_factory=MemoryReport)  # after gradients were dropped
    num_tensors: int = 0  # parameter tensors (Adam keeps a 4-byte step counter for each)


def build_llama_of_12_mb() -> nn.Module:
    """3 M parameters, fp32; a prime vocabulary, so that rows are padded."""
    torch.manual_seed(11)
    config = LlamaConfig(
        vocab_size=2053,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
        use_cache=False,
    )
    return LlamaForCausalLM(config).train()


def step_on_the_wire(layout: Layout, *, steps: int = 1) -> MeasuredStep:
    """`steps` updates of a model of 12 MB after one to warm up; all numbers are per update."""
    accelerator = _accelerator(layout)
    model = build_llama_of_12_mb()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    ids = torch.arange(16).reshape(1, 16) + accelerator.process_index

    def update() -> None:
        for _ in range(layout.micro_steps):
            with accelerator.accumulate(model):
                accelerator.backward(model(input_ids=ids, labels=ids).loss)
                optimizer.step()
                optimizer.zero_grad()

    update()
    dist.barrier()
    before = interface_bytes()
    dist.barrier()
    with record_wire() as wire:
        for _ in range(steps):
            update()
    dist.barrier()
    after = interface_bytes()
    # No rank leaves (and closes its sockets) before all have read the counter.
    dist.barrier()
    per_update = WireRecorder(
        total_bytes=wire.total_bytes // steps, by_op={op: nbytes // steps for op, nbytes in wire.by_op.items()}
    )
    sent = None if before is None or after is None else (after - before) // steps
    return MeasuredStep(plan=plan_step(model_size(model), layout), wire=per_update, interface=sent)


def step_in_memory(layout: Layout, family: str, tied: bool) -> MeasuredStep:
    """The third update of a tiny model, its memory sampled."""
    accelerator = _accelerator(layout)
    model = build_lm(family, tied=tied)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    windows = make_windows(
        vocab=VOCAB[family], steps=3, gas=layout.micro_steps, world_size=layout.world_size, ragged=False
    )

    def update(window: list) -> None:
        for batches in window:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batches[accelerator.process_index]).loss)
                optimizer.step()

    for window in windows[:2]:
        update(window)
        optimizer.zero_grad()
    with record_wire() as wire, sample_memory(model, optimizer) as sampler:
        update(windows[2])
    optimizer.zero_grad()
    return MeasuredStep(
        plan=plan_step(model_size(model), layout),
        wire=wire,
        memory=sampler.report,
        between=accelerator.memory_report(),
        num_tensors=len(list(model.parameters())),
    )


def _accelerator(layout: Layout) -> object:
    zero = ZeroPlugin(
        stage=layout.stage,
        dp_replicate_size=layout.dp_replicate_size,
        reduce_dtype=layout.reduce_dtype,
        gather_dtype=layout.gather_dtype,
        secondary_shard_size=layout.secondary_shard_size,
    )
    plugins: list[object] = [zero]
    if layout.precision != "fp32":
        plugins.append(AmpPlugin(dtype=layout.precision, compute=layout.compute))
    return make_accelerator(plugins=plugins, gradient_accumulation_steps=layout.micro_steps)
