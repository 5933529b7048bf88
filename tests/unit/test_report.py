"""Tables and pictures from a record."""

import json
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from hfdist.errors import ConfigError
from hfdist.report import plot_runs, show_report
from hfdist.report.runs import load_run, row_bytes
from hfdist.report.table import print_run


def write_run(path: Path, *, recipe: str = "zero3", ranks: int = 2, switches: bool = False) -> Path:
    formula = {"parameters": 2_000_000, "gradients": 2_000_000, "optimizer": 4_000_000}
    header = {
        "kind": "header",
        "recipe": recipe,
        "world_size": ranks,
        "zero_stage": 3,
        "precision": "fp32",
        "num_parameters": 1_000_000,
        "settings": {"batch_size": 12, "seq_len": 128},
    }
    lines = [header, {"kind": "held_out", "step": 0, "loss": 9.0}]
    lines += [{"kind": "step", "step": step, "loss": 9.0 - 0.1 * step, "lr": 1e-3} for step in range(1, 21)]
    if switches:
        lines.append({"kind": "switch", "step": 10, "stage": 1, "memory": formula, "formula": 6_000_000})
    lines.append({"kind": "held_out", "step": 20, "loss": 7.1})
    memory = {**formula, "gathered": 500_000, "peak_total": 9_100_000, "resident_peak": 700_000_000}
    lines.append(
        {
            "kind": "summary",
            "steps": 20,
            "loss_from": 8.9,
            "loss_to": 7.0,
            "held_out_from": 9.0,
            "held_out_to": 7.1,
            "tokens_per_second": 1234.5,
            "memory": [memory] * ranks,
            "memory_stage": 3,
            "formula": {**formula, "peak_total": 9_000_000, "wire_bound": 6_000_000},
            "wire": {"all_gather": 4_000_000.0, "meet": 120.0},
            "skipped_steps": 2,
            "loss_scale": 1024.0,
        }
    )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def printed(path: Path) -> str:
    console = Console(file=StringIO(), width=120)
    print_run(path, console=console)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_the_table_holds_measured_and_formula(tmp_path: Path) -> None:
    output = printed(write_run(tmp_path / "x.jsonl", switches=True))
    lines = {line.split("│")[1].strip(): line.split("│")[2:-1] for line in output.splitlines() if line.startswith("│")}
    assert [cell.strip() for cell in lines["parameters"]] == ["2.50 MB", "2.50 MB", "2.00 MB"]
    assert [cell.strip() for cell in lines["all three"]] == ["8.50 MB", "8.50 MB", "8.00 MB"]
    assert [cell.strip() for cell in lines["peak in a step"]] == ["9.10 MB", "9.10 MB", "9.00 MB"]
    assert [cell.strip() for cell in lines["loss"]] == ["8.9000", "7.0000"]
    assert [cell.strip() for cell in lines["together"]] == ["4.00 MB"]
    assert [cell.strip() for cell in lines["bound"]] == ["6.00 MB"]
    assert [cell.strip() for cell in lines["skipped steps"]] == ["", "2"]
    assert [cell.strip() for cell in lines["step 10: stage 1"]][-1] == "6.00 MB"
    assert str(tmp_path / "x.jsonl") in output


def test_many_ranks_are_least_and_most(tmp_path: Path) -> None:
    output = printed(write_run(tmp_path / "x.jsonl", ranks=64))
    assert "least" in output
    assert "rank 63" not in output


def test_ranks_other_than_the_main_one_print_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    show_report(None, plot=None)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("count", [1, 3])
def test_the_plot_is_a_picture(tmp_path: Path, count: int) -> None:
    import matplotlib.image

    records = [write_run(tmp_path / f"{n}.jsonl", recipe=f"zero{n}", switches=n == 0) for n in range(count)]
    plot_runs(records, tmp_path / "new" / "plot.png")
    pixels = matplotlib.image.imread(tmp_path / "new" / "plot.png")
    assert pixels.shape[:2] == (690, 1650)
    # Both halves are drawn on.
    assert all((half[..., :3] < 0.9).any() for half in (pixels[:, :825], pixels[:, 825:]))


def test_gathered_copies_count_as_parameters(tmp_path: Path) -> None:
    assert row_bytes(load_run(write_run(tmp_path / "x.jsonl")).ranks[0], "parameters") == 2_500_000


@pytest.mark.parametrize("content", ["", "not json\n", '{"kind": "step"}\n'])
def test_not_a_record(tmp_path: Path, content: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"x\.jsonl"):
        load_run(path)
    with pytest.raises(ConfigError, match="nowhere"):
        load_run(tmp_path / "nowhere")
