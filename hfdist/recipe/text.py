"""Where training text comes from: `--dataset` to documents.

    embedded               the source text of the running Python's standard library (about 11 MB); needs no download
    moby-dick, gsm8k       once `hfdist data moby-dick` / `hfdist data gsm8k` have fetched them into the cache
    some/file.txt          one document                  also .md .rst .py
    some/file.jsonl        one document a row            also .json (a list of rows) and .parquet
    some/directory         all of these in it, sorted by name
    owner/name[:config]    a data set of the Hugging Face hub, its train split

A row gives its text by the columns it has: `text`, `content`, `question` + `answer`, `prompt` + `completion`,
`instruction` (+ `input`) + `output`, or `messages`. Every error is a `ConfigError`, raised before any work starts.
"""

from __future__ import annotations

import json
import os
import re
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

from hfdist.errors import ConfigError, say
from hfdist.recipe.cache import cache_dir

TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py")
ROW_SUFFIXES = (".jsonl", ".json", ".parquet")
# Fetched by `hfdist data NAME`; the path is below the cache directory.
FETCHED = {"moby-dick": "data/moby-dick.txt", "gsm8k": "data/gsm8k.jsonl"}
COLUMNS = (
    ("text",),
    ("content",),
    ("question", "answer"),
    ("prompt", "completion"),
    ("instruction", "input", "output"),
    ("instruction", "output"),
)
# Directories of the standard library that are tests, tools or somebody else's packages.
_NOT_STDLIB = {"test", "tests", "idlelib", "site-packages", "dist-packages", "lib2to3", "turtledemo", "__pycache__"}


def documents(dataset: str) -> Iterator[str]:
    """The non-empty documents of `dataset`, in an order that is the same on every rank and in every run."""
    if dataset == "embedded":
        return _non_empty(path.read_text("utf-8", errors="ignore") for path in stdlib_sources())
    if dataset in FETCHED:
        path = cache_dir() / FETCHED[dataset]
        if not path.exists():
            raise ConfigError(
                say(
                    given=f"--dataset {dataset}, which has not been fetched",
                    expected=f"the file {path}",
                    do=f"Run `hfdist data {dataset}` once, or name a file of your own.",
                )
            )
        return _non_empty(_read_file(path))
    path = Path(dataset).expanduser()
    if path.is_dir():
        return _non_empty(_read_directory(path))
    if path.is_file():
        return _non_empty(_read_file(path))
    if _looks_like_a_path(dataset):
        raise ConfigError(
            say(
                given=f"--dataset {dataset}, which does not exist",
                expected=f"a file ({' '.join(TEXT_SUFFIXES + ROW_SUFFIXES)}) or a directory of such files",
                do="Check the path.",
            )
        )
    return _non_empty(_read_hub(dataset))


def stdlib_sources() -> list[Path]:
    """The source files of the running Python's standard library, tests left out, sorted."""
    sources = []
    for folder, below, files in os.walk(sysconfig.get_paths()["stdlib"]):
        # In place: walk then leaves them out, and site-packages alone can be a hundred times the rest.
        below[:] = [name for name in below if name not in _NOT_STDLIB]
        sources += [Path(folder, name) for name in files if name.endswith(".py")]
    return sorted(sources)


def row_text(row: dict[str, object], *, where: str) -> str:
    """The text of one row; `where` names the row's origin in an error."""
    for columns in COLUMNS:
        if all(isinstance(row.get(column), str) for column in columns):
            return "\n".join(str(row[column]) for column in columns if row[column])
    messages = row.get("messages")
    if isinstance(messages, list) and all(isinstance(message, dict) for message in messages):
        return "\n".join(f"{message.get('role', '')}: {message.get('content', '')}" for message in messages)
    raise ConfigError(
        say(
            given=f"{where} with the columns {', '.join(map(repr, row)) or '(none)'}",
            expected=" or ".join(" + ".join(columns) for columns in COLUMNS) + " or messages",
            do="Rename a column, or write the text to a .txt file.",
        )
    )


def _non_empty(texts: Iterable[str]) -> Iterator[str]:
    return (text for text in texts if text.strip())


def _looks_like_a_path(dataset: str) -> bool:
    suffix = Path(dataset).suffix
    if suffix in TEXT_SUFFIXES + ROW_SUFFIXES or dataset.startswith((".", "/", "~")):
        return True
    return not re.fullmatch(r"[\w.-]+(/[\w.-]+)?(:[\w.-]+)?", dataset)


def _read_directory(path: Path) -> Iterator[str]:
    files = sorted(file for file in path.rglob("*") if file.suffix in TEXT_SUFFIXES + ROW_SUFFIXES)
    if not files:
        raise ConfigError(
            say(
                given=f"--dataset {path}, a directory with no file that can be read",
                expected=f"files ending in {' '.join(TEXT_SUFFIXES + ROW_SUFFIXES)}",
                do="Name the directory that holds them.",
            )
        )
    for file in files:
        yield from _read_file(file)


def _read_file(path: Path) -> Iterator[str]:
    if path.suffix == ".parquet":
        import pyarrow.parquet

        try:
            table = pyarrow.parquet.ParquetFile(path)
        except (OSError, ValueError) as error:
            raise ConfigError(
                say(given=f"{path} ({error})", expected="a parquet file", do="Check that the download is complete.")
            ) from error
        for batch in table.iter_batches():
            for row in batch.to_pylist():
                yield row_text(row, where=str(path))
    elif path.suffix in (".jsonl", ".json"):
        yield from _read_json(path)
    else:
        yield path.read_text("utf-8", errors="replace")


def _read_json(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8") as lines:
        if path.suffix == ".json":
            numbered: Iterable[tuple[int, str]] = [(1, lines.read())]
        else:
            numbered = enumerate(lines, start=1)
        for number, line in numbered:
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                value = json.loads(line)
            except json.JSONDecodeError as error:
                raise ConfigError(
                    say(given=f"{where} ({error})", expected="one JSON object a line", do="Repair or remove that line.")
                ) from error
            for row in value if isinstance(value, list) else [value]:
                yield row if isinstance(row, str) else row_text(dict(row), where=where)


def _read_hub(dataset: str) -> Iterator[str]:
    import datasets

    name, _, configuration = dataset.partition(":")
    try:
        rows = datasets.load_dataset(name, configuration or None, split="train")
    except Exception as error:  # Whatever the hub's client raises: unknown name, gated, no network, no such split.
        raise ConfigError(
            say(
                given=f"--dataset {dataset}, which could not be loaded from the hub ({_first_line(error)})",
                expected="`embedded`, a local file or directory, or the id of a data set that this machine can reach",
                do="Check the spelling and the network, or give a local .txt, .jsonl or .parquet file.",
            )
        ) from error
    for row in rows:
        yield row_text(dict(row), where=f"data set {dataset}")


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]
