"""PipeDream-2BW against one process that delays gradients: w[t+1] = w[t] - step(g(w[t-1], batch t-1))."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor, nn

from tests.parity.pipelines import Spec, build_optimizer, make_batch, pipeline_of
from tests.parity.test_pipeline import TOLERANCE
from tests.pool import Pools

STEPS = 6


def _batch(step: int, rows: int) -> Any:
    return make_batch(rows, 7 + 2 * (step % 2), "right", seed=step)


def _delayed(spec: Spec, rows: int) -> tuple[list[float], dict[str, Tensor]]:
    """The simulation: gradients are kept for one step before they are used."""
    model = spec.build()
    optimizer = build_optimizer(model.parameters())
    losses: list[float] = []
    kept: list[Tensor | None] = []
    for step in range(STEPS):
        loss = model(**_batch(step, rows)).loss
        loss.backward()
        losses.append(loss.item())
        new = [p.grad for p in model.parameters()]
        for p, gradient in zip(model.parameters(), kept or [None] * len(new), strict=True):
            p.grad = gradient
        kept = new
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: p.detach().clone() for name, p in model.named_parameters(remove_duplicate=False)}


def _train(spec: Spec, rows: int, number: int, evaluate_after: int | None) -> tuple[list[float], list[Any], Any]:
    model: nn.Module = spec.build()
    pipeline = pipeline_of(model, schedule="pipedream", num_micro_batches=number)
    optimizer = build_optimizer(model.parameters())
    losses, numbers = [], []
    for step in range(STEPS):
        output = model(**_batch(step, rows))
        output.loss.backward()
        losses.append(output.loss.item())
        numbers.append(output.loss_batch)
        optimizer.step()
        optimizer.zero_grad()
        if step == evaluate_after:
            model.eval()
            model(**_batch(99, rows))
            model.train()
    pipeline.drain()
    return losses, numbers, {n: p.detach().clone() for n, p in model.named_parameters(remove_duplicate=False)}


@pytest.mark.parametrize(
    ("pp", "number", "rows", "tied", "family", "evaluate_after"),
    [
        (2, 2, 4, False, "llama", None),
        (2, 5, 5, True, "gpt2", 2),
        (2, 3, 8, True, "qwen3", None),
        (4, 4, 4, True, "llama", 0),
        (4, 8, 8, False, "gemma", 3),
    ],
)
def test_delayed_by_one(
    pool: Pools, pp: int, number: int, rows: int, tied: bool, family: str, evaluate_after: int | None
) -> None:
    spec = Spec(family, layers=5, tied=tied)
    losses, want = _delayed(spec, rows)
    ranks = pool(pp).run(_train, spec, rows, number, evaluate_after)
    assert {name for *_, parameters in ranks for name in parameters} == want.keys()
    for got, numbers, parameters in ranks:
        assert numbers == [0, *range(STEPS - 1)]
        assert got == pytest.approx([losses[number] for number in numbers], rel=TOLERANCE)
        for name, tensor in parameters.items():
            assert float((tensor - want[name]).abs().max()) <= TOLERANCE, name


def _order(number: int) -> tuple[list[tuple[str, int]], int]:
    model = Spec(layers=5).build()
    pipeline = pipeline_of(model, schedule="pipedream", num_micro_batches=number)
    events: list[tuple[str, int]] = []
    held = most = 0

    def watch(_: int, kind: str, micro_batch: int, begins: bool) -> None:
        nonlocal held, most
        if begins:
            events.append((kind, micro_batch))
            held += 1 if kind == "F" else -1
            most = max(most, held)

    pipeline.watch = watch
    for step in range(3):
        model(**_batch(step, 4)).loss.backward()
    pipeline.drain()
    return events, most


def test_the_order_is_the_planned_one_and_is_never_flushed(pool: Pools) -> None:
    """`hfdist schedule pipedream` shows what runs: three batches of 4 as one stream of 12; p - rank held at most."""
    from hfdist.plan.schedule import plan_schedule

    planned = plan_schedule("pipedream", num_ranks=2, num_micro_batches=4)
    for rank, (events, most) in enumerate(pool(2).run(_order, 4)):
        assert events == [(action.kind, action.micro_batch) for action in planned.orders[rank]]
        assert most == 2 - rank


def _refused() -> str:
    from hfdist.errors import ConfigError

    with pytest.raises(ConfigError) as error:
        pipeline_of(Spec(layers=5).build(), schedule="pipedream", num_micro_batches=1)
    return str(error.value)


def test_fewer_micro_batches_than_ranks(pool: Pools) -> None:
    assert all("two versions of the weights" in text for text in pool(2).run(_refused))
