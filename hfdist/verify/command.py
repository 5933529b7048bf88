"""`hfdist models`: the registered causal language models, what is known of them, and the loop that finds it out."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from hfdist.errors import ConfigError, nearest, say
from hfdist.models.tiny import causal_types
from hfdist.verify import record
from hfdist.verify.check import TECHNIQUES
from hfdist.verify.judge import Verdict, judge, judge_errors
from hfdist.verify.ranks import Group
from hfdist.verify.record import Result

SECONDS_A_TYPE = 60.0


def models(verify: list[str], out: Path, page: Path | None) -> None:
    """Verify the types of `verify` ("all": those without a current result), then print the table of what is known.

    Results are in `out`, written after every type. `page`: where to write them as Markdown.
    Raises ConfigError for a type that is not registered.
    """
    types = causal_types()
    results = record.load_results(out)
    key = record.current_key()
    for name in verify:
        if name != "all" and name not in types:
            raise ConfigError(
                say(
                    given=f"--verify {name}",
                    expected=f'a causal language model of the installed transformers, or "all"{nearest(name, types)}',
                    do="`hfdist models` lists them.",
                )
            )
    todo = [name for name in verify if name != "all"]
    if "all" in verify:
        todo += [name for name in types if name not in todo and name not in results]
        todo += [name for name in types if name not in todo and results[name].key != key]
    console = Console()
    if todo:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console, transient=True) as progress:
            task = progress.add_task("", total=len(todo))

            def done(name: str, result: Result) -> None:
                results[name] = result
                record.save_results(out, results)
                console.print(f"{name}: {' '.join(record.cells(result)).strip()}", markup=False, highlight=False)
                progress.advance(task)

            verify_types(todo, started=lambda name: progress.update(task, description=name), done=done)
    shown = todo if verify and "all" not in verify else types
    console.print(record.table(shown, results, key=key))
    for line in record.totals(shown, results):
        console.print(line, highlight=False)
    if page is not None:
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(record.page(types, results), encoding="utf-8")
        console.print(f"Page: {page}", highlight=False)


def verify_types(
    types: list[str],
    *,
    started: Callable[[str], None] = lambda name: None,
    done: Callable[[str, Result], None] = lambda name, result: None,
) -> dict[str, Result]:
    """Each of `types` by every technique, one after the other; `done` is called with each result."""
    results: dict[str, Result] = {}
    key = record.current_key()
    with contextlib.ExitStack() as stack:
        groups = {size: stack.enter_context(Group(size)) for _, _, size in TECHNIQUES.values()}
        for name in types:
            started(name)
            results[name] = _verify(name, groups, key)
            done(name, results[name])
    return results


def _verify(name: str, groups: dict[int, Group], key: str) -> Result:
    start = time.monotonic()
    verdicts: dict[str, Verdict] = {}
    for index, (technique, (_, _, size)) in enumerate(TECHNIQUES.items()):
        refused = [verdicts[axis] for axis in ("tp", "pp") if axis in verdicts and verdicts[axis].status == "refused"]
        if technique == "3d" and refused:
            verdicts[technique] = refused[0]
            continue
        # What is left of the type's time, shared by the techniques that are left.
        left = SECONDS_A_TYPE - (time.monotonic() - start)
        answers = groups[size].run(name, technique, max(5.0, left / (len(TECHNIQUES) - index) * 1.5))
        errors = [answer for answer in answers if isinstance(answer, tuple)]
        not_built = [text for kind, text in errors if kind == "NotBuilt"]
        if not_built:
            return record.new_result(key, seconds=time.monotonic() - start, not_built=not_built[0])
        verdicts[technique] = judge_errors(errors) if errors else judge(technique, answers)
    return record.new_result(key, seconds=time.monotonic() - start, verdicts=verdicts)
