"""The command line of a recipe: defaults, what is refused before anything heavy is imported."""

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hfdist.errors import ConfigError
from hfdist.recipe.arguments import DEFAULT_BATCH_SIZE, begin, parse, verify_room, verify_writable


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)


def test_defaults_and_a_recipes_own() -> None:
    args = parse("zero3", [])
    assert (args.model, args.dataset, args.batch_size) == ("embedded", "embedded", DEFAULT_BATCH_SIZE)
    assert args.accelerator_options() == {}
    own = parse("amp_fp16", ["--steps", "7"], defaults={"model": "tiny", "steps": 30})
    assert (own.model, own.steps) == ("tiny", 7)
    assert parse("x", ["--gradient-accumulation-steps", "3"]).accelerator_options() == {
        "gradient_accumulation_steps": 3
    }


@pytest.mark.parametrize(("ranks", "accumulation", "expected"), [(1, 1, 12), (2, 3, 2), (3, 4, 1), (4, 1, 3)])
def test_micro_batches_divide_the_batch(ranks: int, accumulation: int, expected: int) -> None:
    assert parse("x", []).micro_batch_size(num_processes=ranks, accumulation=accumulation) == expected


def test_a_default_batch_fits_any_number_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse("x", ["--num-processes", "5"]).batch_size == 15
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert parse("x", []).batch_size == 16
    assert parse("x", ["--batch-size", "12"]).batch_size == 12


def test_a_batch_smaller_than_the_ranks() -> None:
    with pytest.raises(ConfigError, match="at least one sequence for each rank"):
        parse("x", ["--batch-size", "1"]).micro_batch_size(num_processes=2, accumulation=1)


def test_a_batch_that_does_not_divide() -> None:
    with pytest.raises(ConfigError, match=r"Use --batch-size 18\.$"):
        parse("x", ["--batch-size", "13"]).micro_batch_size(num_processes=3, accumulation=2)


@pytest.mark.parametrize(
    "argv",
    [
        ["--steps", "0"],
        ["--batch-size", "-1"],
        ["--seq-len", "1"],
        ["--lr", "0"],
        ["--num-processes", "0"],
        ["--gradient-accumulation-steps", "0"],
    ],
)
def test_numbers_out_of_range(argv: list[str]) -> None:
    with pytest.raises(ConfigError, match=argv[0]):
        parse("x", argv)


def test_directories_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--save"):
        verify_writable(tmp_path / "file" / "below", option="--save")
    verify_writable(tmp_path / "new" / "one", option="--save")
    assert list((tmp_path / "new" / "one").iterdir()) == []


def test_no_room(tmp_path: Path) -> None:
    verify_room(tmp_path, 1, option="--save")
    with pytest.raises(ConfigError, match="room for 1,000,000,000,000,000,000 bytes"):
        verify_room(tmp_path, 10**18, option="--save")


def test_importing_recipes_loads_no_torch() -> None:
    code = "import sys, hfdist.recipe, hfdist.report; assert not {'torch', 'transformers', 'rich'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ}, timeout=60)


@pytest.mark.parametrize("how", [{"engine": "none"}, {"engine": "native"}, {"processes": "one"}])
def test_a_timeline_of_what_can_be_no_pipeline_is_refused_at_once(
    how: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(sys, "argv", ["ddp.py", "--timeline", str(tmp_path / "below" / "x.png")])
    with pytest.raises(ConfigError, match=r"--timeline for ddp, .* recipes/pipeline_1f1b\.py"):
        begin("recipes/ddp.py", **how)
    assert not (tmp_path / "below").exists()


def test_the_schedule_counts_updates() -> None:
    import torch

    from hfdist.recipe import build_optimizer

    args = parse("x", ["--steps", "40", "--lr", "1", "--warmup", "3"])
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.LayerNorm(3))
    optimizer, scheduler = build_optimizer(model, args)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert [len(group["params"]) for group in optimizer.param_groups] == [1, 3]
    rates = []
    for _ in range(40):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert rates[39] == pytest.approx(0.1 + 0.45 * (1 + math.cos(math.pi * 36 / 37)))
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1)
