"""The console script, in this process."""

from pathlib import Path

import pytest
import yaml

from hfdist import cli
from tests.unit.test_report import write_run


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    monkeypatch.setattr("sys.argv", ["hfdist", *words])
    with pytest.raises(SystemExit) as end:
        cli.main()
    out, err = capsys.readouterr()
    code = end.value.code
    return (code if isinstance(code, int) else 0), out, err


def test_config_prints_a_yaml(monkeypatch, capsys) -> None:
    code, out, _ = run(monkeypatch, capsys, "config", "zero3")
    assert code == 0
    assert yaml.safe_load(out)["deepspeed_config"]["zero_stage"] == 3


def test_a_wrong_name_is_one_line(monkeypatch, capsys) -> None:
    code, _, err = run(monkeypatch, capsys, "config", "zero33")
    assert code == 1
    assert "did you mean 'zero3'" in err
    assert "Traceback" not in err


def test_explain_is_the_plan(monkeypatch, capsys) -> None:
    code, out, _ = run(
        monkeypatch, capsys, "explain", "--model-params", "1e9", "--num-processes", "8", "--memory", "10"
    )
    assert code == 0
    rest = next(line for line in out.splitlines() if line.startswith("at rest")).split("  ")
    assert [cell.strip() for cell in rest if cell.strip()][1:] == ["16.0 GB", "2.00 GB", "2.00 GB", "2.00 GB"]
    assert "stage 1 is the first that fits" in out


def test_explain_refuses(monkeypatch, capsys) -> None:
    code, _, err = run(monkeypatch, capsys, "explain", "--model-params", "1e9", "--precision", "fp8")
    assert (code, "fp32, bf16 or fp16" in err) == (1, True)


def test_report_prints_and_draws(monkeypatch, capsys, tmp_path: Path) -> None:
    record = write_run(tmp_path / "x.jsonl")
    code, out, _ = run(monkeypatch, capsys, "report", str(record), "--plot", str(tmp_path / "x.png"))
    assert code == 0
    assert "Memory per rank" in out
    assert (tmp_path / "x.png").stat().st_size > 10_000


def test_env_names_versions(monkeypatch, capsys) -> None:
    import torch

    code, out, _ = run(monkeypatch, capsys, "env")
    assert code == 0
    assert torch.__version__ in out
