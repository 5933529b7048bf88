"""Training on a grid pp x dp x tp through `hfdist.Accelerator`, recorded like one process: what grid tests share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.models import Batch, Recipe, Window, count_label_tokens, make_windows
from tests.oracle import Step, assert_near, assert_same, train
from tests.parity.test_tensor import VOCAB, Exact, build
from tests.pool import Pool
from tests.worker import make_accelerator

TOLERANCE = 1e-10
CLIP = 0.25
STEPS = 5


@dataclass(frozen=True)
class GridCell:
    """One layout and what is trained in it."""

    pp: int = 1
    dp: int = 1
    tp: int = 1
    stage: int = 0
    family: str = "llama"
    layers: int = 3
    tied: bool = False
    gas: int = 1
    clip: bool = True
    optimizer: str = "adamw"
    schedule: str = "1f1b"
    micro_batches: int = 2
    replicas: int = 1
    sequence_parallel: bool = False

    @property
    def world_size(self) -> int:
        return self.pp * self.dp * self.tp

    @property
    def name(self) -> str:
        """Short, unique: the test's id."""
        how = "-sequence" * self.sequence_parallel
        how += f"-{self.schedule}-m{self.micro_batches}" if self.pp > 1 else ""
        return (
            f"pp{self.pp}-dp{self.dp}{f'r{self.replicas}' * (self.replicas > 1)}-tp{self.tp}-stage{self.stage}"
            f"-{self.family}-{'tied' if self.tied else 'untied'}-gas{self.gas}-{self.optimizer}{how}"
        )

    def build(self) -> nn.Module:
        """The model, whole, fp64."""
        return build(self.family, tied=self.tied, **{_DEPTH.get(self.family, "num_hidden_layers"): self.layers})

    def windows(self) -> list[Window]:
        """One batch per dp rank and micro-step, of different sizes; lengths divide where sequences are split."""
        windows = make_windows(vocab=VOCAB, steps=STEPS, gas=self.gas, world_size=self.dp)
        if not self.sequence_parallel:
            return windows

        def even(batch: Batch) -> Batch:
            length = batch["input_ids"].shape[1] // self.tp * self.tp
            return {name: value[:, :length] for name, value in batch.items()}

        return [[[even(batch) for batch in micro] for micro in window] for window in windows]


_DEPTH = {"gpt2": "n_layer", "bloom": "n_layer", "mpt": "n_layers"}


def plugins_of(cell: GridCell) -> list[Any]:
    """What `Accelerator(plugins=)` is given for `cell`."""
    from hfdist.plugins import PipelineParallelPlugin, TensorParallelPlugin, ZeroPlugin

    plugins: list[Any] = [ZeroPlugin(stage=cell.stage, dp_replicate_size=cell.replicas)]
    if cell.tp > 1:
        plugins.append(TensorParallelPlugin(tp_size=cell.tp, sequence_parallel=cell.sequence_parallel))
    if cell.pp > 1:
        virtual = 2 if cell.schedule in ("interleaved", "zero-bubble", "zbv") else None
        plugins.append(
            PipelineParallelPlugin(
                pp_size=cell.pp,
                schedule=cell.schedule,
                num_micro_batches=cell.micro_batches,
                num_virtual_stages=virtual,
            )
        )
    return plugins


def whole_gradients(accelerator: Any, model: nn.Module) -> dict[str, Tensor]:
    """Every gradient of the whole model, on every rank, put together by the layouts."""
    zero = accelerator.engine.of(model)
    local = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        gradient = parameter.grad
        if gradient is not None:
            local[name] = (gradient.full_tensor() if isinstance(gradient, DTensor) else gradient).clone()
    return zero.split.whole_state(local, keep=True) if zero.split is not None else local


@dataclass(frozen=True)
class GridRun:
    """What a rank saw: its own loss by step (weighted over its micro-batches), and everything whole."""

    steps: list[Step]
    block_bytes: int  # of its blocks' parameters, between steps
    num_parameters: int


def train_grid(cell: GridCell, switch: list[int] | None = None) -> GridRun:
    """The loop of accelerate's documentation in one rank. `switch`: the ZeRO stage of each step after the first."""
    from hfdist.models.blocks import find_blocks

    accelerator = make_accelerator(plugins=plugins_of(cell), gradient_accumulation_steps=cell.gas)
    model = cell.build()
    optimizers = Recipe(cell.optimizer).build(model)  # type: ignore[arg-type]
    model, *optimizers = accelerator.prepare(model, *optimizers)
    local = [_local(p).nbytes for _, block in find_blocks(model) for p in block.parameters()]
    rank = accelerator.engine.mesh.rank
    steps = []
    with Exact():
        for index, window in enumerate(cell.windows()):
            if switch is not None and index:
                accelerator.set_zero_stage(switch[index - 1])
            total = torch.zeros(2, dtype=torch.float64)
            for micro in window:
                with accelerator.accumulate(model):
                    loss = model(**micro[rank]).loss
                    count = count_label_tokens(micro[rank])
                    total += torch.tensor([loss.item() * count, count], dtype=torch.float64)
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        gradients = whole_gradients(accelerator, model)
                        norm = accelerator.clip_grad_norm_(model.parameters(), CLIP if cell.clip else 1e9).item()
                        clipped = whole_gradients(accelerator, model)
                    for optimizer in optimizers:
                        optimizer.step()
                    for optimizer in optimizers:
                        optimizer.zero_grad()
            total = accelerator.reduce(total)
            parameters = {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}
            steps.append(Step(float(total[0] / total[1]), norm, gradients, clipped, parameters, []))
    return GridRun(steps, sum(local), sum(p.numel() for p in model.parameters()))


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def check_grid(pool: Pool, cell: GridCell, switch: list[int] | None = None) -> None:
    """Every rank's run of `cell` against one process."""
    from hfdist.models.blocks import find_blocks

    model = cell.build()
    block_bytes = sum(p.nbytes for _, block in find_blocks(model) for p in block.parameters())
    with Exact():
        want = train(
            model, cell.windows(), optimizers=Recipe(cell.optimizer).build, clip=CLIP if cell.clip else None  # type: ignore[arg-type]
        )  # fmt: skip
    largest = 0
    for rank, run in enumerate(pool.run(train_grid, cell, switch)):
        largest = max(largest, run.block_bytes)
        for number, (ours, theirs) in enumerate(zip(run.steps, want, strict=True)):
            where = f"rank {rank}, step {number}"
            assert_near(f"{where}: loss", ours.loss, theirs.loss, TOLERANCE)
            assert_near(f"{where}: norm", ours.norm, theirs.norm, TOLERANCE)
            _assert_all(f"{where}: gradients", ours.gradients, theirs.gradients)
            if cell.clip:
                _assert_all(f"{where}: clipped", ours.clipped, theirs.clipped)
            _assert_all(f"{where}: parameters", ours.parameters, theirs.parameters)
    shards = cell.dp // cell.replicas if cell.stage == 3 else 1
    # Each rank holds its share: a layer more where the stages cannot be equal, and norms whole.
    layers = -(-cell.layers // cell.pp)
    assert largest <= block_bytes * layers / cell.layers / cell.tp / shards * 1.3


def _assert_all(where: str, ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    """`ours` may name a tied tensor several times."""
    assert theirs.keys() <= ours.keys(), f"{where}: no {sorted(theirs.keys() - ours.keys())}"
    assert_same(where, {name: ours[name] for name in theirs}, theirs, TOLERANCE)
