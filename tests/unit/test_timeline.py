"""Measured timelines: from events to idle shares, to a record and back, to a picture next to the ideal."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from hfdist.measure.timeline import as_record, build_timeline, from_record, num_recorded, record_timeline
from hfdist.plan.schedule import Action, plan_schedule
from hfdist.plan.timeline import Timeline, plan_timeline
from hfdist.report import draw_timeline, gantt


def events(rank: int, *spans: tuple[str, int, float, float]) -> list[tuple[Action, float, float]]:
    return [(Action(rank, kind, number), start, end) for kind, number, start, end in spans]  # type: ignore[arg-type]


# gpipe, p = 2, m = 2, on a clock that reads 100 s: rank 1 is late by a tenth after the first forward.
GPIPE = [
    events(0, ("F", 0, 100.0, 101.0), ("F", 1, 101.0, 102.0), ("B", 0, 105.1, 107.1), ("B", 1, 107.1, 109.1)),
    events(1, ("F", 0, 101.1, 102.1), ("F", 1, 102.1, 103.1), ("B", 0, 103.1, 105.1), ("B", 1, 105.1, 107.1)),
]


def test_idle_is_counted_from_the_first_action_to_the_last() -> None:
    timeline = build_timeline(GPIPE)
    assert min(span.start for span in timeline.spans) == 0.0
    assert timeline.end == pytest.approx(9.1)
    assert timeline.bubble() == pytest.approx(1 - 12 / (2 * 9.1))
    assert timeline.bubble() > plan_timeline(plan_schedule("gpipe", num_ranks=2, num_micro_batches=2)).bubble()


def test_micro_batches_are_counted_from_the_first_recorded() -> None:
    late = [[(Action(a.stage, a.kind, a.micro_batch + 12), start, end) for a, start, end in rank] for rank in GPIPE]
    assert build_timeline(late) == build_timeline(GPIPE)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zero-bubble", "zbv", "pipedream"])
def test_a_record_gives_back_what_was_written(name: str) -> None:
    schedule = plan_schedule(name, num_ranks=2, num_micro_batches=4)
    written = json.dumps(as_record(schedule, plan_timeline(schedule)))
    assert from_record(json.loads(written)) == (schedule, plan_timeline(schedule))


@dataclass
class Noted:
    """A pipeline as far as a recorder knows it, that writes down when it is drained."""

    runs: str = "pipedream"
    num_micro_batches: int = 2
    watch: Any = None
    applied: Any = None
    group: Any = None
    said: list[str] = field(default_factory=list)

    def drain(self) -> None:
        self.said.append("drained, watched" if self.watch else "drained")
        if self.watch:
            self.watch(0, "B", 0, True)
            self.watch(0, "B", 0, False)


def test_what_a_drain_finishes_is_recorded_and_what_came_before_is_not() -> None:
    pipeline = Noted()
    with record_timeline(pipeline) as seen:
        pipeline.watch(0, "F", 0, True)
        pipeline.watch(0, "F", 0, False)
    assert [(action.kind, start <= end) for action, start, end in seen] == [("F", True), ("B", True)]
    assert pipeline.said == ["drained", "drained, watched"]
    assert pipeline.watch is None


def test_an_error_ends_the_watching() -> None:
    pipeline = Noted()
    with pytest.raises(RuntimeError, match="in the step"), record_timeline(pipeline):
        raise RuntimeError("in the step")
    assert pipeline.watch is None
    assert pipeline.said == ["drained"], "peers may be elsewhere: nothing that waits for them"


def test_batches_that_show_a_schedule() -> None:
    assert (num_recorded("1f1b"), num_recorded("pipedream")) == (1, 3)


def test_measured_and_ideal_are_on_one_scale() -> None:
    timeline = build_timeline(GPIPE)
    tenfold = gantt.scaled(timeline, 10.0)
    assert (tenfold.end, gantt.busy(tenfold)) == (pytest.approx(91.0), pytest.approx(120.0))
    assert tenfold.bubble() == pytest.approx(timeline.bubble())


def test_the_picture_of_a_run_with_its_caption(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[tuple[str, Timeline]] = []
    real = gantt.draw_timelines

    def spy(pictures: Any, output: Path) -> None:
        drawn.extend((caption, timeline) for caption, _, timeline in pictures)
        real(pictures, output)

    monkeypatch.setattr(gantt, "draw_timelines", spy)
    schedule, output = plan_schedule("gpipe", num_ranks=2, num_micro_batches=2), tmp_path / "a" / "x.png"
    record = tmp_path / "run.jsonl"
    lines = [
        {"kind": "header", "settings": {"timeline": str(output)}},
        {"kind": "timeline", **as_record(schedule, build_timeline(GPIPE))},
    ]
    record.write_text("".join(json.dumps(line) + "\n" for line in lines))
    draw_timeline(record)
    assert output.read_bytes().startswith(b"\x89PNG")
    (measured, above), (ideal, below) = drawn
    assert "gpipe, 2 ranks, 2 micro-batches, 9,100 ms: idle 34.1 %, formula (p-1)/(m+p-1) = 33.3 %" in measured
    assert "9,000 ms: idle 33.3 %, formula (p-1)/(m+p-1) = 33.3 %" in ideal
    assert gantt.busy(above) == pytest.approx(gantt.busy(below)), "the same work"
    assert above.end / below.end == pytest.approx(9.1 / 9.0)


def test_a_run_without_a_timeline_draws_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.jsonl").write_text(json.dumps({"kind": "header", "settings": {"timeline": None}}) + "\n")
    draw_timeline(tmp_path / "run.jsonl")
    assert capsys.readouterr().out == ""
    assert len(list(tmp_path.iterdir())) == 1
