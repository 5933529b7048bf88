"""Pipeline schedules as data: every computation once and in order, bubbles as the papers' formulas say."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from hfdist.errors import ConfigError
from hfdist.plan.schedule import NUM_UNFLUSHED, SCHEDULES, Action, Schedule, plan_schedule
from hfdist.plan.timeline import plan_timeline, steady_bubble
from hfdist.report import gantt

SIZES = [(2, 4), (4, 8), (4, 12)]


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("p", "m"), SIZES)
def test_every_computation_is_done_once_by_the_rank_that_has_the_stage(name: str, p: int, m: int) -> None:
    schedule = plan_schedule(name, num_ranks=p, num_micro_batches=m)
    count = m * (NUM_UNFLUSHED if name == "pipedream" else 1)
    done = [action for order in schedule.orders for action in order]
    assert len(done) == len(set(done))
    for stage in range(schedule.num_stages):
        ranks = {rank for rank, order in enumerate(schedule.orders) for action in order if action.stage == stage}
        assert len(ranks) == 1
        for number in range(count):
            kinds = {action.kind for action in done if (action.stage, action.micro_batch) == (stage, number)}
            assert kinds in ({"F", "B"}, {"F", "I", "W"})


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("p", "m"), SIZES)
def test_a_timeline_respects_what_each_computation_needs(name: str, p: int, m: int) -> None:
    schedule = plan_schedule(name, num_ranks=p, num_micro_batches=m)
    timeline = plan_timeline(schedule)
    at = {span.action: span for span in timeline.spans}
    assert len(at) == sum(map(len, schedule.orders))
    for action, span in at.items():
        before = at.get(Action(action.stage - 1, "F", action.micro_batch))
        if action.kind == "F" and before is not None:
            assert span.start >= before.end
        if action.kind in ("B", "I"):
            assert span.start >= at[Action(action.stage, "F", action.micro_batch)].end
    for rank in range(p):
        mine = sorted((s.start, s.end) for s in timeline.spans if s.rank == rank)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(mine))


@pytest.mark.parametrize(("p", "m"), [(2, 1), (2, 5), (4, 1), (4, 3), (4, 4), (4, 11), (7, 13)])
def test_bubble_of_gpipe_and_1f1b_is_the_formula(p: int, m: int) -> None:
    for name in ("gpipe", "1f1b"):
        schedule = plan_schedule(name, num_ranks=p, num_micro_batches=m)
        assert plan_timeline(schedule).bubble() == pytest.approx((p - 1) / (m + p - 1))


@pytest.mark.parametrize(("p", "m", "v"), [(2, 4, 2), (4, 8, 2), (4, 8, 3), (3, 9, 2)])
def test_bubble_of_interleaved_is_the_formula(p: int, m: int, v: int) -> None:
    schedule = plan_schedule("interleaved", num_ranks=p, num_micro_batches=m, num_virtual_stages=v)
    assert plan_timeline(schedule).bubble() == pytest.approx((p - 1) / (v * m + p - 1))


@pytest.mark.parametrize("name", ["zero-bubble", "zbv"])
@pytest.mark.parametrize(("p", "m"), [(4, 8), (4, 12), (2, 4)])
def test_zero_bubble_waits_less_than_half_of_1f1b(name: str, p: int, m: int) -> None:
    split = plan_timeline(plan_schedule(name, num_ranks=p, num_micro_batches=m)).bubble()
    assert split < 0.5 * plan_timeline(plan_schedule("1f1b", num_ranks=p, num_micro_batches=m)).bubble()


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_pipedream_does_not_wait_once_it_runs(p: int, m: int) -> None:
    schedule = plan_schedule("pipedream", num_ranks=p, num_micro_batches=m)
    timeline = plan_timeline(schedule)
    assert steady_bubble(schedule, timeline) == pytest.approx(0.0)
    assert timeline.bubble() == pytest.approx((p - 1) / (NUM_UNFLUSHED * m + p - 1))


def test_1f1b_holds_at_most_p_micro_batches_where_gpipe_holds_all() -> None:
    held = {}
    for name in ("gpipe", "1f1b"):
        timeline = plan_timeline(plan_schedule(name, num_ranks=4, num_micro_batches=9))
        held[name] = [timeline.activations_held(rank, 1) for rank in range(4)]
    assert held == {"gpipe": [9, 9, 9, 9], "1f1b": [4, 3, 2, 1]}


@pytest.mark.parametrize(
    ("name", "p", "m", "v", "words"),
    [
        ("1f1bb", 4, 8, None, "1f1b"),
        ("gpipe", 1, 8, None, "at least 2 ranks"),
        ("gpipe", 4, 0, None, "1 micro-batch"),
        ("1f1b", 4, 8, 2, "virtual stages"),
        ("zbv", 4, 8, 3, "2 stages a rank"),
    ],
)
def test_what_does_not_go_together_is_said(name: str, p: int, m: int, v: int | None, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        plan_schedule(name, num_ranks=p, num_micro_batches=m, num_virtual_stages=v)


def _chart(schedule: Schedule) -> list[str]:
    return [row.plain.rstrip() for row in gantt.rows(schedule, plan_timeline(schedule), 60)]


def test_the_terminal_chart() -> None:
    # Two characters a forward, four a backward; rank 0 waits for rank 1's backwards.
    assert _chart(plan_schedule("1f1b", num_ranks=2, num_micro_batches=2)) == [
        "rank 0  0 1     0     1",
        "rank 1    0 0   1 1",
    ]


def test_the_picture(tmp_path: Path) -> None:
    schedule = plan_schedule("zero-bubble", num_ranks=2, num_micro_batches=4)
    gantt.draw_timelines([("zb", schedule, plan_timeline(schedule))], tmp_path / "a" / "zb.png")
    assert (tmp_path / "a" / "zb.png").read_bytes().startswith(b"\x89PNG")
