"""The arithmetic of memory and wire, against numbers worked out by hand."""

from __future__ import annotations

import doctest
import importlib
import subprocess
import sys
from dataclasses import replace

import pytest

from hfdist.errors import ConfigError
from hfdist.plan import (
    Layout,
    ModelSize,
    Unit,
    explain,
    format_bytes,
    paper_bytes,
    plan_memory,
    plan_wire,
    stage_that_fits,
)

MILLION = 1_000_000
# 8 blocks of 100,000 and a root of 200,000 (tied embeddings).
MODEL = ModelSize.of(MILLION, num_blocks=8, num_root=200_000)


@pytest.mark.parametrize("name", ["sizes", "memory", "wire", "table"])
def test_worked_numbers_in_docstrings(name: str) -> None:
    result = doctest.testmod(importlib.import_module(f"hfdist.plan.{name}"))
    assert result.attempted > 0
    assert result.failed == 0


def test_plan_needs_no_torch() -> None:
    code = "import sys, hfdist.plan; sys.exit('torch' in sys.modules or 'accelerate' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("stage", "parameters", "gradients", "optimizer"),
    [(0, 4, 4, 8), (1, 1, 1, 2), (2, 1, 1, 2), (3, 1, 1, 2)],
)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_at_rest_on_four_ranks(stage: int, parameters: int, gradients: int, optimizer: int, precision: str) -> None:
    rest = plan_memory(MODEL, Layout(stage=stage, world_size=4, precision=precision)).at_rest
    expected = parameters * MILLION, gradients * MILLION, optimizer * MILLION
    assert (rest.parameters, rest.gradients, rest.optimizer) == expected
    assert rest.gathered == rest.communication == 0


@pytest.mark.parametrize(
    ("stage", "precision", "expected"),
    [
        (0, "fp32", 0),  # the stored parameters serve
        (0, "bf16", 2 * 300_000),
        (1, "fp32", 4 * MILLION),
        (2, "fp32", 4 * MILLION),
        (3, "fp32", 4 * 300_000),
        (3, "bf16", 2 * 300_000),
        (1, "fp16", 2 * MILLION),
    ],
)
def test_gathered_at_the_peak(stage: int, precision: str, expected: int) -> None:
    assert plan_memory(MODEL, Layout(stage=stage, world_size=2, precision=precision)).peak.gathered == expected


@pytest.mark.parametrize(
    ("stage", "micro_steps", "precision", "expected"),
    [
        (0, 1, "fp32", 4 * MILLION),
        (1, 4, "fp32", 4 * MILLION),
        # Shards of all but the last unit, and that one whole: 7 blocks / 2 + a block; or 8 blocks / 2 + the root.
        (2, 1, "fp32", 4 * (800_000 // 2 + 200_000)),
        (3, 1, "fp32", 4 * (800_000 // 2 + 200_000)),
        # Shards of everything wait from the first micro-step.
        (3, 2, "fp32", 4 * (MILLION // 2 + 200_000)),
        (2, 2, "bf16", 4 * MILLION // 2 + 2 * 200_000),
        # All whole fp32 sums wait while new bf16 gradients arrive: a block's in the last micro-step (the blocks are
        # reduced when the tied root's come), the root's in one before it.
        (1, 2, "bf16", 4 * MILLION + 2 * 100_000),
        (1, 3, "bf16", 4 * MILLION + 2 * 200_000),
    ],
)
def test_gradients_at_the_peak(stage: int, micro_steps: int, precision: str, expected: int) -> None:
    layout = Layout(stage=stage, world_size=2, micro_steps=micro_steps, precision=precision)
    assert plan_memory(MODEL, layout).peak.gradients == expected


def test_frozen_parameters_have_neither_gradient_nor_state() -> None:
    model = ModelSize(blocks=(Unit(trainable=((8, 64),), frozen=((64, 64),)),), root_early=Unit(frozen=((100, 64),)))
    plan = plan_memory(model, Layout(stage=3, world_size=2))
    assert plan.at_rest.parameters == 4 * (8 * 64 + 64 * 64 + 100 * 64) // 2
    assert plan.at_rest.gradients == 4 * 8 * 64 // 2
    assert plan.at_rest.optimizer == 8 * 8 * 64 // 2
    # Frozen weights are gathered, never reduced.
    wire = plan_wire(model, Layout(stage=3, world_size=2))
    assert wire.reduce_scatter == 4 * 8 * 64 // 2
    assert wire.gather == 4 * (100 * 64 + 2 * (8 * 64 + 64 * 64)) // 2


def test_rows_are_padded() -> None:
    """5 rows on 2 ranks are 3 rows each; 1 row on 4 ranks is a row each."""
    model = ModelSize(root_early=Unit(((5, 7), (1,))))
    assert plan_memory(model, Layout(stage=3, world_size=2)).at_rest.parameters == 4 * (3 * 7 + 1)
    assert plan_memory(model, Layout(stage=3, world_size=4)).at_rest.parameters == 4 * (2 * 7 + 1)
    assert plan_wire(model, Layout(stage=2, world_size=4)).gather == 4 * 3 * (2 * 7 + 1)


def test_a_stage_never_needs_more_than_the_one_before() -> None:
    for precision in ("fp32", "bf16"):
        for micro_steps in (1, 4):
            layout = Layout(stage=0, world_size=4, precision=precision, micro_steps=micro_steps)
            peaks = [plan_memory(MODEL, replace(layout, stage=stage)).peak_total for stage in (0, 1, 2, 3)]
            assert peaks == sorted(peaks, reverse=True), (precision, micro_steps)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("k", [1, 4])
def test_bound_is_the_design_table(world_size: int, k: int) -> None:
    """2 reduce; 1 gather + 1 reduce; 1 + k; 2k + k, each (N-1)/N x 4P."""
    unit = (world_size - 1) * 4 * MILLION // world_size
    for stage, collectives in enumerate((2, 2, 1 + k, 3 * k)):
        wire = plan_wire(MODEL, Layout(stage=stage, world_size=world_size, micro_steps=k))
        assert wire.bound == collectives * unit
        # The root (a fifth of this model) is gathered once a micro-step at stage 3.
        kept = k * unit // 5 if stage == 3 else 0
        assert wire.expected == wire.bound - kept


def test_gathers_in_half_precision_reductions_in_fp32() -> None:
    layout = Layout(stage=2, world_size=2, precision="bf16")
    assert (plan_wire(MODEL, layout).gather, plan_wire(MODEL, layout).reduce_scatter) == (MILLION, 2 * MILLION)
    assert plan_wire(MODEL, replace(layout, reduce_dtype="compute")).reduce_scatter == MILLION
    assert plan_wire(MODEL, replace(layout, compute="autocast")).gather == 2 * MILLION


def test_matrices_travel_as_int8_and_vectors_do_not() -> None:
    """A shard of 3 x 300 values is 4 blocks of 260 bytes, one of 1 value 4 bytes; reductions stay as they were."""
    model = ModelSize(root_early=Unit(((5, 300), (2,))))
    layout = Layout(stage=2, world_size=2, gather_dtype="int8")
    assert plan_wire(model, layout).gather == 4 * 260 + 4
    assert plan_wire(model, replace(layout, precision="bf16")).gather == 4 * 260 + 2
    exact = plan_wire(model, replace(layout, gather_dtype="compute"))
    assert plan_wire(model, layout).reduce_scatter == exact.reduce_scatter
    assert plan_wire(model, replace(layout, stage=0)).gather == 0


def test_backward_gathers_inside_a_secondary_group() -> None:
    """8 ranks in groups of 2, stage 3: forward moves 7/8 of everything, backward half of the blocks."""
    layout = Layout(stage=3, world_size=8, secondary_shard_size=2, micro_steps=3)
    wire = plan_wire(MODEL, layout)
    blocks = MODEL.num_parameters - MODEL.root.numel
    assert wire.gather == 3 * (4 * MILLION * 7 // 8 + 4 * blocks // 2)
    assert wire.gather < plan_wire(MODEL, replace(layout, secondary_shard_size=None)).gather
    assert plan_wire(MODEL, replace(layout, secondary_shard_size=8)) == plan_wire(
        MODEL, replace(layout, secondary_shard_size=None)
    )
    for stage in (0, 1, 2):
        there = replace(layout, stage=stage)
        assert plan_wire(MODEL, there) == plan_wire(MODEL, replace(there, secondary_shard_size=None))
    with pytest.raises(ConfigError, match="secondary_shard_size=3"):
        replace(layout, secondary_shard_size=3)


def test_a_secondary_group_keeps_its_part_of_the_blocks_for_backward() -> None:
    """At the start of backward: the root, the last block whole, and 1/2 of all blocks, in the compute dtype."""
    for precision, nbytes in (("fp32", 4), ("bf16", 2)):
        layout = Layout(stage=3, world_size=8, secondary_shard_size=2, precision=precision)
        plan, without = plan_memory(MODEL, layout), plan_memory(MODEL, replace(layout, secondary_shard_size=None))
        blocks = MODEL.num_parameters - MODEL.root.numel
        assert plan.peak.gathered - without.peak.gathered == nbytes * blocks // 2
        assert plan.at_rest == without.at_rest


def test_bf16_reductions_halve_the_wire_and_add_up_in_the_compute_dtype() -> None:
    layout = Layout(stage=1, world_size=2, reduce_dtype="bf16", micro_steps=4)
    exact = replace(layout, reduce_dtype="fp32")
    assert plan_wire(MODEL, layout).reduce_scatter * 2 == plan_wire(MODEL, exact).reduce_scatter
    assert plan_memory(MODEL, layout).peak.gradients == plan_memory(MODEL, exact).peak.gradients
    assert plan_memory(MODEL, layout).at_rest == plan_memory(MODEL, exact).at_rest


def test_replicas_share_by_all_reduce_over_a_shard() -> None:
    """4 ranks in 2 replicas: shards of a half; across replicas 2 x 1/2 of that half, once per update."""
    layout = Layout(stage=2, world_size=4, dp_replicate_size=2, micro_steps=3)
    wire = plan_wire(MODEL, layout)
    assert (wire.gather, wire.reduce_scatter, wire.all_reduce) == (2 * MILLION, 3 * 2 * MILLION, 2 * MILLION)
    assert plan_memory(MODEL, layout).at_rest.parameters == 2 * MILLION


def test_one_rank_sends_nothing() -> None:
    for stage in (0, 1, 2, 3):
        wire = plan_wire(MODEL, Layout(stage=stage, world_size=1, micro_steps=4))
        assert wire.expected == wire.bound == 0


def test_paper() -> None:
    """The example of the paper's figure 1: 7.5 B parameters on 64 ranks take 120, 31.4, 16.6 and 1.9 GB."""
    seen = [paper_bytes(7_500_000_000, stage=stage, num_shards=64) / 1e9 for stage in (0, 1, 2, 3)]
    assert seen == pytest.approx([120, 31.4, 16.6, 1.88], abs=0.05)


def test_stage_that_fits_is_the_lowest_whose_peak_fits() -> None:
    layout = Layout(stage=0, world_size=4)
    peaks = [plan_memory(MODEL, replace(layout, stage=stage)).peak_total for stage in (0, 1, 2, 3)]
    assert stage_that_fits(peaks[0], MODEL, layout) == 0
    assert stage_that_fits(peaks[0] - 1, MODEL, layout) == 1
    assert stage_that_fits(peaks[0], MODEL, layout, stages=(2, 3)) == 2
    assert stage_that_fits(peaks[3], MODEL, layout) in (2, 3)
    assert stage_that_fits(peaks[3] - 1, MODEL, layout) is None
    assert stage_that_fits(peaks[0], MODEL, layout, other_bytes=1) == 1


def test_explain_names_what_it_counts() -> None:
    text = explain(MODEL, Layout(stage=2, world_size=4, precision="bf16", micro_steps=4))
    lines = {line.split("  ")[0]: line for line in text.splitlines()}
    assert "1,000,000 parameters" in text
    assert "stage 2 *" in text
    assert lines["optimizer"].split() == ["optimizer", "8.00", "MB", "2.00", "MB", "2.00", "MB", "2.00", "MB"]
    assert lines["wire bound"].split()[2:] == ["6.00", "MB", "4.50", "MB", "13.5", "MB", "24.0", "MB"]


def test_bytes_are_written_in_decimal_units() -> None:
    assert [format_bytes(n) for n in (0, 999, 1000, 999_500, 12_345_678, 7.5e12)] == [
        "0 B", "999 B", "1.00 KB", "1.00 MB", "12.3 MB", "7.50 TB",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"stage": 4, "world_size": 2}, "stage 0 to 3"),
        ({"stage": 1, "world_size": 0}, "at least one rank"),
        ({"stage": 1, "world_size": 4, "dp_replicate_size": 3}, "divides the number of ranks"),
    ],
)
def test_impossible_layouts_are_refused(values: dict[str, int], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Layout(**values)
