"""The pure parts of `hfdist compare`: names, launches of each engine, figures, errors, tables and pictures."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from io import StringIO
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from rich.console import Console

from hfdist import cli, launch
from hfdist.compare import figures, launches, session
from hfdist.compare.engines import (
    ENGINES,
    MEMORY_SAVING,
    Asked,
    equal_work,
    launch_recipe,
    merge,
    parse_against,
    read_asked,
)
from hfdist.compare.engines import (
    as_json as engines_as_json,
)
from hfdist.compare.plot import draw
from hfdist.compare.table import show
from hfdist.errors import ConfigError

ROOT = Path(__file__).parents[2]
ZERO3 = Asked(distributed_type="DEEPSPEED", num_processes=2, stage=3, clipping=1.0)

# --------------------------------------------------------------------------------------------------- engines


def test_hfdist_comes_first_and_native_brings_its_columns_under_deepspeed() -> None:
    both = ["native-memory", "native-cpuadam"]
    assert parse_against("ddp, native,ddp", distributed_type="DEEPSPEED") == ["hfdist", "ddp", "native", *both]
    assert parse_against("native", distributed_type="DEEPSPEED", extras=False) == ["hfdist", "native"]
    assert parse_against("native", distributed_type="FSDP") == ["hfdist", "native"]
    assert parse_against("native-memory", distributed_type="DEEPSPEED") == ["hfdist", "native-memory"]
    assert parse_against("hfdist,", distributed_type="DEEPSPEED") == ["hfdist"]


def test_a_name_that_is_no_engine() -> None:
    with pytest.raises(ConfigError, match="did you mean 'fsdp2'"):
        parse_against("native,fsdp", distributed_type="DEEPSPEED")


def test_the_yaml_is_read_by_those_who_will_read_it() -> None:
    content, asked = read_asked(str(ROOT / "accelerate_configs/zero2.yaml"), num_processes=3, environ={})
    assert content["deepspeed_config"]["zero_stage"] == 2
    assert asked == Asked(distributed_type="DEEPSPEED", num_processes=3, stage=2, clipping=1.0)
    _, bf16 = read_asked(str(ROOT / "accelerate_configs/amp_bf16.yaml"), num_processes=None, environ={})
    assert (bf16.precision, bf16.stage, bf16.clipping) == ("bf16", 0, None)


def test_native_gets_the_same_work() -> None:
    assert equal_work(ZERO3)["gradient_clipping"] == 1.0
    # Absent, DeepSpeed would clip at 1.0.
    assert equal_work(Asked(distributed_type="DEEPSPEED", num_processes=2))["gradient_clipping"] == 0.0
    halves = Asked(distributed_type="DEEPSPEED", num_processes=2, precision="bf16")
    assert equal_work(halves)["communication_data_type"] == "fp32"
    assert equal_work(halves)["data_types"] == {"grad_accum_dtype": "fp32"}
    same = Asked(distributed_type="DEEPSPEED", num_processes=2, precision="bf16", reduce_dtype="compute")
    assert "communication_data_type" not in equal_work(same)


def test_every_engine_is_launched_from_the_same_yaml() -> None:
    content = yaml.safe_load((ROOT / "accelerate_configs/zero3.yaml").read_text())
    recipes = {name: launch_recipe(name, content, ZERO3) for name in ENGINES}
    assert recipes["hfdist"].content == {**content, "num_processes": 2}
    assert "HFDIST_ENGINE" not in recipes["hfdist"].environ
    assert recipes["native"].content["deepspeed_config"] == content["deepspeed_config"]
    assert recipes["native-memory"].overrides == merge(recipes["native"].overrides, MEMORY_SAVING)
    for name in ("ddp", "fsdp2", "single"):
        assert recipes[name].content["deepspeed_config"] == {}
        assert recipes[name].content["mixed_precision"] == content["mixed_precision"]
    assert recipes["single"].content["num_processes"] == 1
    assert content["deepspeed_config"]["zero_stage"] == 3  # the given one is left alone


def test_accumulation_reaches_the_engines_whose_yaml_has_no_key_for_it() -> None:
    asked = Asked(distributed_type="DEEPSPEED", num_processes=2, stage=1, accumulation=4)
    assert launch_recipe("ddp", {}, asked).environ["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] == "4"
    assert "ACCELERATE_GRADIENT_ACCUMULATION_STEPS" not in launch_recipe("native", {}, asked).environ


def test_what_an_engine_cannot_run_is_its_own_error() -> None:
    with pytest.raises(ConfigError, match="DEEPSPEED"):
        launch_recipe("native-memory", {}, Asked(distributed_type="FSDP", num_processes=2))
    with pytest.raises(ConfigError, match="loss scaler"):
        launch_recipe("fsdp2", {}, Asked(distributed_type="MULTI_GPU", num_processes=2, precision="fp16"))


def test_without_deepspeed_hfdist_gets_the_yaml_all_the_same(monkeypatch) -> None:
    """accelerate's launcher wants the package for a DEEPSPEED yaml; hfdist's engine does not."""
    from hfdist.compare import engines

    found = importlib.util.find_spec
    monkeypatch.setattr(engines.importlib.util, "find_spec", lambda n, *a: None if n == "deepspeed" else found(n, *a))
    content, asked = read_asked(str(ROOT / "accelerate_configs/zero3.yaml"), num_processes=None, environ={})
    recipe = launch_recipe("hfdist", content, asked)
    assert recipe.content["distributed_type"] == "MULTI_GPU"
    assert recipe.environ["ACCELERATE_USE_DEEPSPEED"] == "true"
    assert recipe.environ["ACCELERATE_DEEPSPEED_ZERO_STAGE"] == "3"


def test_a_script_that_chooses_its_own_engine_is_said_so(monkeypatch, tmp_path: Path) -> None:
    from hfdist.compare.peers import build_class
    from hfdist.compare.probe import Probe

    probe = Probe(tmp_path, num_steps=3, count=False, own_counters=True, in_namespace=False)
    monkeypatch.setenv("HFDIST_ENGINE", "native")
    with pytest.raises(ConfigError, match="sets HFDIST_ENGINE=native itself"):
        build_class("hfdist", probe, engines_as_json(ZERO3), {})()


def test_merging_keeps_what_is_not_named() -> None:
    assert merge({"a": {"x": 1, "y": 2}, "b": 1}, {"a": {"y": 3}, "c": 4}) == {"a": {"x": 1, "y": 3}, "b": 1, "c": 4}


# --------------------------------------------------------------------------------------------------- figures


def rank_record(number: int, walls: list[float], losses: list[list[float]], **more: Any) -> dict[str, Any]:
    steps = [
        {"wall": wall, "cpu": wall / 2, "tokens": 100, "lr": 1e-3, "losses": loss, "labels": [10 + number] * len(loss)}
        for wall, loss in zip(walls, losses, strict=True)
    ]
    return {"rank": number, "steps": steps, "engine": {}, "resident_peak": 900, "resident_floor": 500,
            "peak_allocated": None, "num_parameters": 1000, **more}  # fmt: skip


def test_a_loss_is_the_mean_over_label_tokens() -> None:
    # (10 * 1 + 11 * 2 + 10 * 3 + 11 * 4) / 42
    ranks = [rank_record(0, [1.0], [[1.0, 3.0]]), rank_record(1, [1.0], [[2.0, 4.0]])]
    assert figures.step_losses(ranks) == pytest.approx([106 / 42])
    for rank in ranks:
        rank["steps"][0]["labels"] = [None, None]
    assert figures.step_losses(ranks) == [2.5]


def test_a_micro_step_without_labels_has_no_weight() -> None:
    rank = rank_record(0, [1.0], [[2.0, float("nan")]])
    rank["steps"][0]["labels"] = [5, 0]
    assert figures.step_losses([rank]) == [2.0]


def test_times_are_of_the_slowest_rank_and_all_cpus_without_the_first_steps() -> None:
    losses = [[1.0]] * 5
    ranks = [rank_record(0, [9, 9, 1, 2, 3], losses), rank_record(1, [9, 9, 2, 1, 9], losses)]
    assert figures.round_times({"ranks": ranks}) == (2, 1.5, 200)


def test_ratios_are_of_the_same_round() -> None:
    assert figures.pair_ratios({"1": 2.0, "2": 3.0, "3": 1.0}, {"2": 6.0, "1": 1.0}) == [2.0, 0.5]
    assert figures.Spread.of([]) is None
    assert figures.Spread.of([3.0, 1.0, 2.0]) == figures.Spread(2.0, 1.0, 3.0)


def test_the_first_step_over_the_limit() -> None:
    assert figures.first_over([0.0, 1e-6, 2e-5, 0.0]) == 3
    assert figures.first_over([0.0, 1e-6]) is None
    assert figures.first_over([0.0, float("nan")]) == 2


def test_rounding_is_what_two_plain_engines_differ_by() -> None:
    rows = [figures.Row("hfdist", ""), figures.Row("ddp", "", losses=[1.0, 2.0, 3.0])]
    assert figures.rounding(rows) is None
    rows.append(figures.Row("single", "", losses=[1.0, 2.0 + 2e-6, 3.0 - 5e-5]))
    assert figures.rounding(rows) == (pytest.approx(5e-5), 3)


def test_every_round_begins_with_another_engine() -> None:
    rounds = session.plan_rounds(3, 4)
    assert rounds[0] == rounds[1] == [0, 1, 2]
    assert [order[0] for order in rounds[1:]] == [0, 1, 2, 0]
    assert all(sorted(order) == [0, 1, 2] for order in rounds)


def launched(name: str, ranks: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    return {"round": name, "seconds": 9.0, "startup": 8.0, "exit_code": 0, "error": None, "ranks": ranks, **more}


def write_comparison(path: Path) -> Path:
    """hfdist, a native that drifts from step 2 and is half as fast, and a single that failed."""

    def engine(factor: float, drift: float) -> list[dict[str, Any]]:
        held = {"parameters": 4_000_000, "gradients": 4_000_000, "optimizer": 8_000_000, "communication": 0}
        counted = {"held": held, "wire": {"all_gather": 5e6}, "calls": {}, "kernel": 1.01e7}
        found = [launched("count", [rank_record(r, [1.0], [[1.0]], **counted) for r in (0, 1)])]
        for number, busy in enumerate((1.0, 3.0, 2.0), 1):
            walls = [5.0, 1.0, *[0.1 * factor * busy] * 3]
            losses = [[9.0 - 0.1 * step + (drift if step else 0)] for step in range(5)]
            found.append(launched(str(number), [rank_record(r, walls, losses) for r in (0, 1)]))
        return found

    def entry(name: str, **more: Any) -> dict[str, Any]:
        return {"what": ENGINES[name], "error": None, "overrides": {}, "environ": {}, "launches": [], **more}

    native = engine(2.0, 3e-4)
    native[0]["ranks"][0]["engine"]["deepspeed"] = {"stage": 3, "reduce_bucket_size": 500_000_000}
    failed = [launched("count", [], error="RuntimeError: no [room]")]
    content = {
        "kind": "comparison", "command": "hfdist compare x", "config": "zero3.yaml", "script": "train.py", "args": [],
        "steps": 5, "repeats": 3, "counted_by_the_kernel": True, "versions": {}, "hardware": {},
        "asked": {"distributed_type": "DEEPSPEED", "num_processes": 2, "stage": 3, "clipping": 1.0, "accumulation": 1,
                  "precision": "no", "reduce_dtype": "fp32"},
        "engines": {
            "hfdist": entry("hfdist", launches=engine(1.0, 0.0)),
            "native": entry("native", launches=native),
            "single": entry("single", launches=failed, error="RuntimeError: no [room]"),
        },
    }  # fmt: skip
    path.write_text(json.dumps(content))
    return path


def test_rows_of_a_stored_comparison(tmp_path: Path) -> None:
    base, native, single = figures.rows(figures.load(write_comparison(tmp_path / "compare.json")))
    assert (base.differs_from, base.loss_off_most, base.loss_repeat_off) == (None, 0.0, 0.0)
    assert native.differs_from == 2
    assert native.loss_off_most == pytest.approx(3e-4)
    # The rounds were 1, 3 and 2 times as slow for all, the pairs do not see it.
    assert base.wall == figures.Spread(pytest.approx(0.2), pytest.approx(0.1), pytest.approx(0.3))
    assert native.wall_ratio == figures.Spread(*[pytest.approx(0.5)] * 3)
    assert base.tokens_per_second == pytest.approx(1000)
    assert (base.peak, sum(base.held.values()), base.wire, base.kernel) == (400, 16_000_000, 5e6, 5.05e6)
    assert (single.error, single.wall, single.losses, single.held) == ("RuntimeError: no [room]", None, [], {})


def test_the_table_and_the_picture_of_a_stored_comparison(tmp_path: Path) -> None:
    path = write_comparison(tmp_path / "compare.json")
    console = Console(file=StringIO(), width=160)
    show(path, console=console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for words in ("200 (100-300)", "3.0e-04", "0.50", "8.00 MB", "5.05 MB", "5e+08", "no [room]"):
        assert words in text, words
    draw(path, tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_report_shows_a_comparison_again(monkeypatch, capsys, tmp_path: Path) -> None:
    path = write_comparison(tmp_path / "compare.json")
    monkeypatch.setattr("sys.argv", ["hfdist", "report", str(path)])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code in (0, None)
    assert "single failed:" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"a compare\.json"):
        figures.load(ROOT / "pyproject.toml")


# --------------------------------------------------------------------------------------------------- launches


def why(ranks: list[dict[str, Any]], code: int | None = 1, log: str = "", steps: int = 2) -> str | None:
    return launches.explain(ranks, exit_code=code, num_ranks=2, num_steps=steps, timeout=5, log=log)


def test_a_failed_launch_says_its_own_error() -> None:
    good = [rank_record(r, [1.0, 1.0], [[1.0]] * 2) for r in (0, 1)]
    assert why(good) is None
    lost, first = {**good[0], "error": "RuntimeError: Connection closed by peer"}, {**good[1], "error": "OSError: disk"}
    assert why([lost, first]) == "OSError: disk"
    assert why(good, 0, steps=9) == "the script ended after 2 of 9 optimizer steps"
    log = "Traceback\nValueError: no deepspeed here\nsubprocess.CalledProcessError: Command died\n"
    assert why([], 1, log) == "exit code 1; its last words: ValueError: no deepspeed here"
    assert "no end within 5 s" in (why([], None, "waiting") or "")


def test_a_launch_that_does_not_end_is_ended_with_all_it_started(tmp_path: Path) -> None:
    """The worker is in a session of its own, as torchrun's are."""
    inner = "import time; time.sleep(600)"
    start = f"worker = subprocess.Popen([sys.executable, '-c', {inner!r}], start_new_session=True)"
    code = f"import os, subprocess, sys; {start}; print(os.getpid(), worker.pid, flush=True); worker.wait()"
    outcome = launches.run_launch(
        [sys.executable, "-c", code], tmp_path, environ={}, num_ranks=1, num_steps=1, timeout=5.0
    )
    assert "no end within 5 s" in (outcome.error or "")
    pids = [int(word) for word in (tmp_path / "launch.log").read_text().split()]
    assert len(pids) == 2
    assert not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in pids)


def test_a_comparison_that_is_killed_takes_its_launch_along() -> None:
    """SIGKILL leaves no chance to clean up: the first process of a launch asks the kernel to end it."""
    if not sys.platform.startswith("linux"):
        pytest.skip("needs prctl; remove when other systems have a like of it")
    inner = [sys.executable, "-m", "hfdist.compare.start", sys.executable, "-c", "import time; time.sleep(600)"]
    code = f"import subprocess; p = subprocess.Popen({inner!r}); print(p.pid, flush=True); p.wait()"
    outer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert outer.stdout is not None
    child = psutil.Process(int(outer.stdout.readline()))
    deadline = time.monotonic() + 60
    while "hfdist.compare.start" in child.cmdline() and time.monotonic() < deadline:  # not become the words yet
        time.sleep(0.05)
    outer.kill()
    outer.wait()
    child.wait(timeout=30)


def test_the_environment_of_another_launch_is_left_out() -> None:
    before = {"RANK": "1", "ACCELERATE_USE_CPU": "true", "HFDIST_ENGINE": "native", "HFDIST_CACHE": "/c", "PATH": "/p"}
    after = launches.clean_environment(before, {"HFDIST_ENGINE": "hfdist"})
    assert "RANK" not in after
    assert "ACCELERATE_USE_CPU" not in after
    assert (after["HFDIST_CACHE"], after["HFDIST_ENGINE"], after["OMP_NUM_THREADS"]) == ("/c", "hfdist", "1")


def test_ops_that_cannot_be_built_leave_the_reason(monkeypatch, tmp_path: Path) -> None:
    from hfdist import native
    from hfdist.compare import ops

    monkeypatch.setattr(launch, "end_with_parent", lambda: None)
    monkeypatch.setattr(native.shutil, "which", lambda *_args, **_kwargs: None)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr("sys.argv", ["ops", str(tmp_path / "rank0.json"), "--cpu-adam"])
    with pytest.raises(SystemExit) as end:
        ops.main()
    assert end.value.code
    record = launches.read_ranks(tmp_path)[0]
    assert "compiler" in (why([record], steps=0) or "")


def test_a_lock_that_a_killed_build_left_is_explained(monkeypatch, tmp_path: Path) -> None:
    from hfdist import native
    from hfdist.compare import ops

    (tmp_path / "op").mkdir()
    (tmp_path / "op" / "lock").touch()
    monkeypatch.setattr(launch, "end_with_parent", lambda: None)
    monkeypatch.setattr(native, "_LOCK_WAIT", 0.0)
    monkeypatch.setattr(native, "build_ops", lambda **_: pytest.fail("built under a lock"))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setenv("LOCAL_RANK", "1")  # only the first rank may remove it
    monkeypatch.setenv("CXX", sys.executable)
    monkeypatch.setattr("sys.argv", ["ops", str(tmp_path / "rank0.json")])
    with pytest.raises(SystemExit):
        ops.main()
    assert "a DeepSpeed build that no process works on" in launches.read_ranks(tmp_path)[0]["error"]


# --------------------------------------------------------------------------------------------------- the command


def test_the_scripts_own_words(monkeypatch) -> None:
    """Options of compare are compare's wherever they stand before `--`; all else is the script's."""
    from hfdist.compare import command

    seen: dict[str, Any] = {}
    monkeypatch.setattr(command, "compare", lambda *args, **kwargs: seen.update(kwargs, words=args))
    words = "compare a.yaml s.py --seq-len 64 tiny --against ddp --steps 7 --no-extras -- --steps 100 -x"
    monkeypatch.setattr("sys.argv", ["hfdist", *words.split()])
    with pytest.raises(SystemExit):
        cli.main()
    assert seen["words"] == (Path("a.yaml"), "s.py", ("--seq-len", "64", "tiny", "--steps", "100", "-x"))
    assert (seen["against"], seen["steps"], seen["repeats"], seen["extras"]) == ("ddp", 7, 5, False)


def test_what_cannot_work_is_said_before_anything_is_launched(tmp_path: Path) -> None:
    def comparison(**more: Any) -> session.Comparison:
        fields: dict[str, Any] = {"config": Path("x.yaml"), "script": __file__, "args": (), "chosen": ("hfdist",),
                                  "asked": ZERO3, "content": {}, "steps": 5, "repeats": 1, "out": tmp_path}  # fmt: skip
        return session.Comparison(**{**fields, **more})

    session.verify(comparison())
    with pytest.raises(ConfigError, match="3 steps or more"):
        session.verify(comparison(steps=2))
    with pytest.raises(ConfigError, match=r"nowhere\.py"):
        session.verify(comparison(script="nowhere.py"))
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="--out"):
        session.verify(comparison(out=tmp_path / "file" / "below"))
