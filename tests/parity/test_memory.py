"""Bytes stored per rank, by owner: the plan's formula to the byte, with padding, at rest and at the peak of a step."""

from __future__ import annotations

import itertools

import pytest

from hfdist import ZeroPlugin
from hfdist.plan import Layout
from tests.models import build_lm
from tests.parity.measured import step_in_memory
from tests.pool import Pools
from tests.worker import make_accelerator

STAGES = (0, 1, 2, 3)
# 3 divides neither the widths nor the vocabularies of the tiny models: every shard is padded.
LAYOUTS = [
    *(
        Layout(stage=stage, world_size=world_size, micro_steps=k, precision=precision)
        for stage, (world_size, k, precision) in itertools.product(
            STAGES, ((2, 1, "fp32"), (2, 3, "bf16"), (3, 3, "fp32"), (3, 1, "bf16"))
        )
    ),
    *(Layout(stage=stage, world_size=1, precision="fp32") for stage in STAGES),
    *(Layout(stage=stage, world_size=2, precision="bf16", compute="autocast", micro_steps=2) for stage in STAGES),
    *(Layout(stage=stage, world_size=4, dp_replicate_size=2, micro_steps=2) for stage in (1, 2, 3)),
]


def _id(layout: Layout) -> str:
    tail = f"-replicas{layout.dp_replicate_size}" if layout.dp_replicate_size > 1 else f"-{layout.compute}"
    return f"stage{layout.stage}-W{layout.world_size}-k{layout.micro_steps}-{layout.precision}{tail}"


@pytest.mark.parametrize(("family", "tied"), [("llama", False), ("gpt2", True)])
@pytest.mark.parametrize("layout", LAYOUTS, ids=_id)
def test_stored_bytes_equal_the_formula(pool: Pools, layout: Layout, family: str, tied: bool) -> None:
    """Parameters, gathered copies and gradients to the byte; optimizer state too on the rank with the most rows."""
    for rank, step in enumerate(pool(layout.world_size).run(step_in_memory, layout, family, tied)):
        plan, seen = step.plan.memory, step.memory
        # Adam keeps a 4-byte step counter per tensor. Shards are padded where they are stored, states are not.
        counters = 4 * step.num_tensors
        assert seen.parameters == seen.peak_parameters == plan.at_rest.parameters, rank
        assert seen.gradients == plan.at_rest.gradients, rank
        assert seen.optimizer == seen.logical_parameters * 2 + counters, rank
        assert seen.optimizer <= plan.at_rest.optimizer + counters, rank
        if rank == 0:
            assert seen.optimizer == plan.at_rest.optimizer + counters
        assert seen.logical_gradients == seen.logical_parameters <= seen.parameters
        assert seen.gathered == 0
        # At its peak in the step.
        assert seen.peak_gathered == plan.peak.gathered, rank
        assert seen.peak_gradients == plan.peak.gradients, rank
        assert seen.peak_optimizer == seen.optimizer
        assert seen.peak_communication <= plan.peak.communication
        assert seen.total <= seen.peak_total <= plan.peak_total + counters + seen.buffers
        # After zero_grad nothing is left of the step.
        assert step.between.gradients == step.between.gathered == step.between.communication == 0
        assert step.between.parameters == plan.at_rest.parameters


def report_before_any_step() -> tuple[int, int]:
    """Bytes of the parameters right after `prepare`, and all bytes."""
    accelerator = make_accelerator(plugins=[ZeroPlugin(stage=3)])
    accelerator.prepare(build_lm("llama", tied=False))
    report = accelerator.memory_report()
    return report.parameters, report.total - report.buffers


def test_report_before_the_first_step(pool: Pools) -> None:
    parameters, everything = pool(2).run(report_before_any_step)[0]
    assert 0 < parameters == everything
