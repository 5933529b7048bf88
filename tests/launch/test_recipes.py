"""Every recipe by a real `accelerate launch`, held against the one-process run; and what recipes must refuse.

All runs train the same 3 steps of the same 12 sequences, so that their losses are one curve. The reference is
data_parallel, which on a machine without devices is one process and no communication.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SIZES = ["--model", "tiny", "--steps", "3", "--seq-len", "32", "--batch-size", "12", "--held-out", "5"]
# Starting ranks costs 10 s on two idle cores, and these machines are not always idle.
TIMEOUT = 240
P = 615_232


def launch(*words: str, timeout: int = TIMEOUT, **environment: str) -> subprocess.CompletedProcess[str]:
    accelerate = shutil.which("accelerate", path=str(Path(sys.executable).parent))
    assert accelerate is not None
    env = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **os.environ, **environment}
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "HFDIST_ENGINE"):
        env.pop(name, None)
    return subprocess.run(
        [accelerate, "launch", *words],
        cwd=ROOT,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        check=False,
    )


# What is launched for the tests below, two at a time, since starting ranks is mostly waiting: name -> words. Each one's
# {folder} is its own.
BY_CONFIG = {name: ["--config_file", f"accelerate_configs/{name}.yaml", f"recipes/{name}.py"] for name in (
    "ddp", "spawn", "accelerate_plain", "zero1", "zero2", "zero3", "zero_switch", "fsdp"
)}  # fmt: skip
TRAINED = {
    "reference": ["recipes/data_parallel.py"],
    **BY_CONFIG,
    "deepspeed_native": ["recipes/deepspeed_native.py"],
    **{f"{name}_{n}": [f"recipes/{name}.py", "--num-processes", str(n)] for name, n in (
        ("zero1", 3), ("zero2", 4), ("zero3", 4), ("zero_switch", 3), ("zero3", 1)
    )},
    "amp_bf16": ["recipes/amp_bf16.py"],
    "amp_fp16": ["recipes/amp_fp16.py"],
}  # fmt: skip
# Deep enough for four stages.
DEEP = ["--model", "embedded", *SIZES[2:]]
SPLIT = {
    "deep reference": ["recipes/data_parallel.py"],
    **{name: ["--config_file", f"accelerate_configs/{name}.yaml", f"recipes/{name}.py"] for name in (
        "model_parallel", "pipeline_gpipe", "pipeline_1f1b", "pipeline_interleaved", "pipeline_zero_bubble",
        "pipeline_pipedream", "tensor_parallel",
    )},
    "pipeline_1f1b_4": ["recipes/pipeline_1f1b.py", "--num-processes", "4"],
    "tensor_parallel_4": ["recipes/tensor_parallel.py", "--num-processes", "4"],
    "parallel_3d": ["recipes/parallel_3d.py"],
}  # fmt: skip
TINY = [*BY_CONFIG["zero3"], "--model", "tiny"]
REFUSED = {
    "unknown model": [*BY_CONFIG["zero3"], "--model", "no-such-owner/no-such-model"],
    "empty dataset": [*TINY, "--dataset", "{folder}/empty.txt"],
    "small batch": [*TINY, "--batch-size", "1"],
    "missing file": ["recipes/zero3.py", "--dataset", "{folder}/nowhere.jsonl"],
    "unwritable output": ["recipes/zero3.py", "--save", "{folder}/file/below"],
    "not finite": [*BY_CONFIG["zero2"], *SIZES[:2], "--steps", "6", "--seq-len", "32", "--lr", "1e25"],
}
pytestmark = pytest.mark.timeout(1800)


class Launches:
    """The launches above, begun together by the first test that asks for one."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._executor = ThreadPoolExecutor(max_workers=2)
        self._begun: dict[str, Future[subprocess.CompletedProcess[str]]] = {}

    def folder(self, name: str) -> Path:
        return self._root / name.replace(" ", "_")

    def done(self, name: str) -> subprocess.CompletedProcess[str]:
        if not self._begun:
            self._begin_all()
        return self._begun[name].result()

    def _begin_all(self) -> None:
        for name, words in (TRAINED | SPLIT | REFUSED).items():
            folder = self.folder(name)
            folder.mkdir()
            (folder / "empty.txt").write_text("\n")
            (folder / "file").write_text("")
            words = [word.format(folder=folder) for word in words]
            if name in TRAINED or name in SPLIT:
                words += [*(SIZES if name in TRAINED else DEEP), "--record", str(folder / "run.jsonl")]
            # DeepSpeed's first start on a machine compiles a kernel.
            limit = 840 if name == "deepspeed_native" else TIMEOUT
            self._begun[name] = self._executor.submit(launch, *words, timeout=limit)

    def trained(self, name: str) -> list[dict[str, Any]]:
        """The lines of the record of a run that must have succeeded."""
        done, record = self.done(name), self.folder(name) / "run.jsonl"
        assert done.returncode == 0, done.stdout[-6000:]
        assert f"Run record: {record}" in done.stdout
        return [json.loads(line) for line in record.read_text().splitlines()]

    def close(self) -> None:
        self._executor.shutdown(cancel_futures=True)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launches]:
    launches = Launches(tmp_path_factory.mktemp("recipes"))
    yield launches
    launches.close()


def losses(lines: list[dict[str, Any]]) -> list[float]:
    return [line["loss"] for line in lines if line["kind"] in ("step", "held_out")]


@pytest.fixture(scope="module")
def reference(runs: Launches) -> list[float]:
    return losses(runs.trained("reference"))


def check(lines: list[dict[str, Any]], reference: list[float], *, ranks: int, tolerance: float = 1e-4) -> None:
    header, summary = lines[0], lines[-1]
    assert header["world_size"] == ranks
    assert summary["steps"] == 3
    assert len(losses(lines)) == 5
    assert losses(lines) == pytest.approx(reference, abs=tolerance)
    assert summary["loss_to"] < summary["loss_from"]
    assert len(summary["memory"]) == ranks


@pytest.mark.parametrize("recipe", ["ddp", "spawn", "accelerate_plain"])
def test_replicated(recipe: str, reference: list[float], runs: Launches) -> None:
    lines = runs.trained(recipe)
    check(lines, reference, ranks=2)
    for memory in lines[-1]["memory"]:
        assert (memory["parameters"], memory["gradients"]) == (4 * P, 4 * P)
        assert memory["optimizer"] == pytest.approx(8 * P, rel=1e-3)
    assert lines[-1]["wire"]["all_reduce"] == pytest.approx(lines[-1]["formula"]["wire_bound"], rel=0.01)


@pytest.mark.parametrize(
    ("recipe", "ranks"), [("zero1", 2), ("zero2", 2), ("zero3", 2), ("zero1", 3), ("zero2", 4), ("zero3", 4)]
)
def test_zero(recipe: str, ranks: int, reference: list[float], runs: Launches) -> None:
    lines = runs.trained(recipe if ranks == 2 else f"{recipe}_{ranks}")
    check(lines, reference, ranks=ranks)
    formula = lines[-1]["formula"]
    for memory in lines[-1]["memory"]:
        for owner in ("parameters", "gradients", "optimizer"):
            assert memory[owner] == pytest.approx(formula[owner], rel=0.01), owner
        assert memory["parameters"] == pytest.approx(4 * P / ranks, rel=0.05)
        assert memory["peak_total"] <= formula["peak_total"] * 1.02
    assert 0 < sum(lines[-1]["wire"].values()) <= formula["wire_bound"] * 1.03


@pytest.mark.parametrize("ranks", [2, 3])
def test_switching_leaves_the_curve_alone(ranks: int, reference: list[float], runs: Launches) -> None:
    lines = runs.trained("zero_switch" if ranks == 2 else f"zero_switch_{ranks}")
    check(lines, reference, ranks=ranks)
    switches = [line for line in lines if line["kind"] == "switch"]
    assert [(line["step"], line["stage"]) for line in switches] == [(1, 3), (2, 1), (3, 2)]
    for line in switches:
        held = line["memory"]["parameters"] + line["memory"]["optimizer"]
        assert held == pytest.approx(line["formula"], rel=0.01)
        assert held == pytest.approx(12 * P / ranks, rel=0.05)


@pytest.mark.parametrize(("recipe", "precision"), [("amp_bf16", "bf16"), ("amp_fp16", "fp16")])
def test_amp(recipe: str, precision: str, reference: list[float], runs: Launches) -> None:
    # Half precision has 8 and 11 bits: near the fp32 curve and not on it.
    lines = runs.trained(recipe)
    check(lines, reference, ranks=2, tolerance=2e-2)
    assert losses(lines) != pytest.approx(reference, abs=1e-6)
    assert lines[0]["precision"] == precision
    assert (lines[-1]["loss_scale"] is None) == (precision == "bf16")
    assert all(memory["parameters"] == 4 * P for memory in lines[-1]["memory"])


@pytest.fixture(scope="module")
def deep_reference(runs: Launches) -> list[float]:
    return losses(runs.trained("deep reference"))


# The tied embedding is on the first and the last stage.
DEEP_P, EMBEDDING = 9_445_440, 8192 * 320


@pytest.mark.parametrize(
    ("name", "ranks", "held"),
    [
        ("model_parallel", 2, (DEEP_P + EMBEDDING) / 2),
        ("pipeline_gpipe", 2, (DEEP_P + EMBEDDING) / 2),
        ("pipeline_1f1b", 2, (DEEP_P + EMBEDDING) / 2),
        ("pipeline_1f1b_4", 4, None),  # 6 layers on 4 ranks: not equal
        ("pipeline_interleaved", 2, (DEEP_P + EMBEDDING) / 2),
        ("pipeline_zero_bubble", 2, (DEEP_P + EMBEDDING) / 2),
        ("tensor_parallel", 2, DEEP_P / 2),
        ("tensor_parallel_4", 4, DEEP_P / 4),
        ("parallel_3d", 8, (DEEP_P + EMBEDDING) / 8),  # ZeRO-1 over two data ranks keeps parameters sharded at rest
    ],
)
def test_models_over_several_ranks(
    name: str, ranks: int, held: float | None, deep_reference: list[float], runs: Launches
) -> None:
    lines = runs.trained(name)
    check(lines, deep_reference, ranks=ranks)
    assert lines[0]["num_parameters"] == DEEP_P
    parameters = [memory["parameters"] for memory in lines[-1]["memory"]]
    if held is not None:
        assert parameters == [pytest.approx(4 * held, rel=0.03)] * ranks
    assert max(parameters) < 4 * DEEP_P * 0.7


def test_pipedream_trains_on_delayed_gradients(deep_reference: list[float], runs: Launches) -> None:
    """Its curve is its own, but for the evaluation before the first update; `test_pipeline` has the parity."""
    lines = runs.trained("pipeline_pipedream")
    assert losses(lines)[0] == pytest.approx(deep_reference[0], abs=1e-4)
    assert losses(lines)[-1] < losses(lines)[0] - 0.01


def test_accelerates_own_fsdp(reference: list[float], runs: Launches) -> None:
    lines = runs.trained("fsdp")
    check(lines, reference, ranks=2)
    assert all(memory["parameters"] == pytest.approx(2 * P, rel=0.01) for memory in lines[-1]["memory"])


def test_native_deepspeed(reference: list[float], runs: Launches) -> None:
    check(runs.trained("deepspeed_native"), reference, ranks=2)


def test_a_run_of_one_process_is_the_reference(reference: list[float], runs: Launches) -> None:
    check(runs.trained("zero3_1"), reference, ranks=1)


def test_save_plot_and_train_on_from_there(tmp_path: Path) -> None:
    """A jsonl of one's own, accumulation, the saved directory as the next run's --model, and the picture."""
    text = tmp_path / "rows.jsonl"
    text.write_text("".join(json.dumps({"text": f"row {n}: " + "spam and eggs " * 20}) + "\n" for n in range(40)))
    words = [*BY_CONFIG["zero3"], "--dataset", str(text), "--steps", "3", "--seq-len", "32", "--held-out", "5"]
    # zero3.yaml says 1 micro-step; the command line is more specific.
    first = launch(
        *words,
        *["--model", "tiny", "--gradient-accumulation-steps", "2"],
        *["--save", str(tmp_path / "model"), "--plot", str(tmp_path / "x.png"), "--record", str(tmp_path / "1.jsonl")],
    )
    assert first.returncode == 0, first.stdout[-6000:]
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    second = launch(*words, "--model", str(tmp_path / "model"), "--record", str(tmp_path / "2.jsonl"))
    assert second.returncode == 0, second.stdout[-6000:]
    ends = [losses([json.loads(line) for line in (tmp_path / f"{n}.jsonl").read_text().splitlines()]) for n in (1, 2)]
    # The held-out loss a run ends with is the one that the next begins with: what was saved is what was trained.
    assert ends[1][0] == pytest.approx(ends[0][-1], abs=1e-5)


# --- what recipes refuse. A refusal comes before work starts, in a sentence, with a non-zero exit code.


def refusal(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode != 0
    assert "ConfigError: Got" in done.stdout, done.stdout[-3000:]
    return done.stdout


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("unknown model", "--model no-such-owner/no-such-model"),
        ("empty dataset", "with 0 tokens"),
        ("small batch", "at least one sequence for each rank"),
        ("missing file", "does not exist"),
        ("unwritable output", "--save"),
    ],
)
def test_what_recipes_refuse(what: str, words: str, runs: Launches) -> None:
    assert words in refusal(runs.done(what))


@pytest.mark.skipif(
    not sys.platform.startswith("linux") or os.geteuid() != 0, reason="mounting a small file system needs root on Linux"
)
def test_no_room_for_the_output(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(small)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"no mount here: {mounted.stderr.decode().strip()}")
    try:
        output = refusal(launch(*BY_CONFIG["zero3"], *SIZES, "--save", str(small / "model")))
        assert "room for" in output
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_a_loss_that_is_not_finite(runs: Launches) -> None:
    done = runs.done("not finite")
    assert done.returncode != 0
    assert "Error: Got" in done.stdout
    assert "finite" in done.stdout
