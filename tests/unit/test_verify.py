"""Verdicts, results and the table of `hfdist models`: no processes."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from hfdist import cli
from hfdist.errors import ConfigError
from hfdist.verify import command, record
from hfdist.verify.check import Seen, _compare, plugins_of
from hfdist.verify.judge import TOLERANCE, Verdict, first_sentence, judge, judge_errors
from hfdist.verify.record import Result

BLOCKS = {f"layers.{i}": 700 for i in range(3)}


def good(technique: str) -> list[Seen]:
    """What ranks see of a model of three blocks that is split as it should."""
    half = dict.fromkeys(BLOCKS, 350)
    seen = Seen(4.1, 4.1, 1e-7, "w", 0, half, BLOCKS, 2)
    if technique in ("zero3", "tp"):
        return [seen, seen]
    size = 700 if technique == "pp" else 350
    # 4 blocks: 2 and 2.
    whole = {f"layers.{i}": 700 for i in range(4)}
    stages = [
        replace(seen, pp_rank=stage, blocks={f"layers.{i}": size for i in (2 * stage, 2 * stage + 1)})
        for stage in (0, 1)
    ]
    stages = [replace(s, blocks_of_one=whole) for s in stages]
    return stages if technique == "pp" else [s for s in stages for _ in range(2)]


@pytest.mark.parametrize("technique", ["zero3", "tp", "pp", "3d"])
def test_right_and_split_is_verified(technique: str) -> None:
    assert judge(technique, good(technique)).status == "verified"
    assert plugins_of(technique)


@pytest.mark.parametrize(
    ("technique", "change", "status", "words"),
    [
        ("zero3", {"loss": 4.1 * (1 + 3 * TOLERANCE)}, "wrong", "loss"),
        ("zero3", {"loss": float("nan")}, "wrong", "loss"),
        ("tp", {"gradient_difference": 2 * TOLERANCE, "worst": "q"}, "wrong", "gradient of q"),
        ("tp", {"all_reduces": 0}, "unsplit", "all-reduce"),
        ("tp", {"blocks": BLOCKS}, "unsplit", "100%"),
        ("zero3", {"blocks": BLOCKS}, "unsplit", "100%"),
        ("pp", {"blocks": {"layers.2": 700}}, "unsplit", "layers.3 is on 0 stages"),
        ("pp", {"blocks": {"layers.1": 700, "layers.2": 700, "layers.3": 700}}, "unsplit", "2 stages"),
        ("3d", {"all_reduces": 0}, "unsplit", "all-reduce"),
        ("3d", {"blocks": {"layers.2": 700, "layers.3": 700}}, "unsplit", "50%"),
    ],
)
def test_one_rank_off_is_seen(technique: str, change: dict[str, object], status: str, words: str) -> None:
    seen = good(technique)
    verdict = judge(technique, [*seen[:-1], replace(seen[-1], **change)])
    assert verdict.status == status
    assert words in verdict.reason


def test_a_gradient_that_is_nan_missing_or_too_much_is_a_difference() -> None:
    want = {"a": torch.tensor([4.0, 1.0]), "b": torch.tensor([1e-9])}
    assert _compare({"a": want["a"].clone(), "b": torch.tensor([2e-9])}, want)[0] < TOLERANCE  # rounding next to 4
    assert _compare({"a": want["a"]}, {"a": want["a"], "c": torch.ones(1)}) == (1.0, "c")
    assert _compare({"a": want["a"], "c": torch.ones(1)}, {"a": want["a"]})[1] == "c"
    assert _compare({"a": torch.tensor([float("nan"), 1.0])}, {"a": want["a"]}) == (float("inf"), "a")


def test_the_cause_is_told_not_what_it_did_to_the_others() -> None:
    closed = ("RuntimeError", "Connection closed by peer [127.0.0.1]")
    assert judge_errors([closed, ("ConfigError", "Got x. Expected y. Do z.")]) == Verdict(
        "refused", "Got x. Expected y. Do z."
    )
    assert judge_errors([("Timeout", "no answer"), ("ValueError", "why")]) == Verdict("failed", "ValueError: why")
    assert judge_errors([closed, ("Died", "a rank ended (killed by SIGSEGV)")]).status == "died"
    assert first_sentence("Got a.b in c. Expected d.") == "Got a.b in c"


def a_result(key: str = "k") -> Result:
    cells = {t: Verdict("verified", "", 1e-7, 0.5) for t in ("zero3", "tp")}
    cells |= {t: Verdict("refused", "Got [x] | y. Expected z.") for t in ("pp", "3d")}
    return Result(key, {"torch": "2", "transformers": "5"}, "2026-01-02", 1.0, "", cells)


def test_results_come_back_from_the_file(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "models.json"
    assert record.load_results(path) == {}
    results = {"llama": a_result(), "git": Result("k", {}, "2026-01-02", 0.1, "too large")}
    record.save_results(path, results)
    assert record.load_results(path) == results
    assert [file.name for file in path.parent.iterdir()] == ["models.json"]


def test_the_table_and_the_page_say_what_is_known() -> None:
    types = ["git", "gpt2", "llama"]
    results = {"llama": a_result("old key"), "git": Result("k", {"torch": "2"}, "2026-01-03", 0.1, "too large")}
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(record.table(types, results, key="k"))
    rows = {line.split()[1]: line for line in console.export_text().splitlines() if line.startswith("│")}
    assert "not built tiny: too large" in rows["git"]
    assert "not run" in rows["gpt2"]
    assert "llama (old)" in rows["llama"]
    assert "PP 2, 3D 2x2: Got [x] | y" in rows["llama"]
    assert record.totals(types, results)[0] == "3 types, 2 run, 1 of them built tiny"
    assert record.totals(types, results)[1] == "ZeRO-3: 1 verified"
    assert record.totals(types, results)[3] == "PP 2: 0 verified, 1 refused"
    page = record.page(types, results)
    assert "2026-01-02 to 2026-01-03; torch 2" in page
    assert "| llama | verified | verified | refused | refused | PP 2, 3D 2x2: Got [x] \\| y |" in page


def test_the_key_is_of_the_sources_that_matter(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = tmp_path / "hfdist"
    for name in ("__init__.py", "cli.py", "parallel/zero.py", "recipe/run.py"):
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text("1")
    monkeypatch.setattr(record, "_PACKAGE", package)
    key = record.current_key()
    (package / "cli.py").write_text("2")
    (package / "recipe" / "run.py").write_text("2")
    assert record.current_key() == key
    (package / "parallel" / "zero.py").write_text("2")
    assert record.current_key() != key


def test_all_goes_on_where_it_stopped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[list[str]] = []

    def verify_types(types: list[str], *, started: object, done: object) -> None:
        asked.append(types)
        for name in types[:2]:
            done(name, a_result(record.current_key()))  # type: ignore[operator]

    monkeypatch.setattr(command, "causal_types", lambda: ["a", "b", "c"])
    monkeypatch.setattr(command, "verify_types", verify_types)
    out, page = tmp_path / "models.json", tmp_path / "docs" / "models.md"
    command.models(["all"], out, None)
    command.models(["all"], out, page)
    command.models(["b"], out, None)  # what is named runs again
    assert asked == [["a", "b", "c"], ["c"], ["b"]]
    assert "3 types, 3 run" in page.read_text()


def test_a_wrong_type_is_refused_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'llama'"):
        command.models(["lama"], tmp_path / "models.json", None)


def test_the_command_takes_several_types(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[object] = []
    monkeypatch.setattr(command, "models", lambda *args: calls.append(args))
    for words in (["--verify", "llama", "gpt2", "--out", str(tmp_path)], ["--out", str(tmp_path)]):
        monkeypatch.setattr("sys.argv", ["hfdist", "models", *words])
        with pytest.raises(SystemExit):
            cli.main()
    assert calls == [(["llama", "gpt2"], tmp_path, None), ([], tmp_path, None)]
