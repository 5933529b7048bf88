"""A partner that dies or does not come, on every axis: each other rank ends with an error that has its coordinates."""

from __future__ import annotations

import datetime
import os
import signal
import time
from typing import Any

import pytest
import torch
from accelerate.utils import InitProcessGroupKwargs

from tests.parity.grids import GridCell
from tests.pool import Pool
from tests.worker import make_accelerator

TIMEOUT = 3.0  # seconds
# Sizes of the axes, and which rank fails.
LAYOUTS: dict[str, tuple[dict[str, Any], int]] = {
    "1f1b": ({"pp": 2}, 0),
    "gpipe": ({"pp": 2}, 1),
    "interleaved": ({"pp": 2}, 1),
    "zero-bubble": ({"pp": 2}, 0),
    "pipedream": ({"pp": 2}, 1),
    "tensor": ({"tp": 2}, 1),
    "grid": ({"pp": 2, "tp": 2}, 2),
}


def _plugins(name: str) -> list[Any]:
    from hfdist import PipelineParallelPlugin, TensorParallelPlugin, ZeroPlugin

    sizes, _ = LAYOUTS[name]
    plugins: list[Any] = [ZeroPlugin(stage=0)]
    if "tp" in sizes:
        plugins.append(TensorParallelPlugin(tp_size=sizes["tp"]))
    if "pp" in sizes:
        schedule = name if name != "grid" else "1f1b"
        plugins.append(PipelineParallelPlugin(pp_size=sizes["pp"], schedule=schedule, num_micro_batches=4))
    return plugins


def _coordinates(name: str, rank: int) -> str:
    sizes, _ = LAYOUTS[name]
    tp = sizes.get("tp", 1)
    parts = [f"pp={rank // tp}"] if "pp" in sizes else []
    return " ".join([*parts, "dp=0", *([f"tp={rank % tp}"] if tp > 1 else [])])


def _fail_in_a_step(name: str, how: str, training: bool) -> str:
    """Seconds, kind and text of the error of this rank; the one that fails is killed, or stays away."""
    victim = LAYOUTS[name][1]
    handler = InitProcessGroupKwargs(timeout=datetime.timedelta(seconds=TIMEOUT))
    handlers = [handler] if how == "stays away" else []
    accelerator = make_accelerator(plugins=_plugins(name), kwargs_handlers=handlers)
    model = GridCell(family="llama-kv2", layers=9).build()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    ids = torch.randint(0, 13, (4, 5), generator=torch.Generator().manual_seed(3))
    model.train(training)
    for number in range(3):
        if number == 1 and accelerator.process_index == victim:
            if how == "stays away":
                time.sleep(2.5 * TIMEOUT)
                return "stayed away"
            ours = next(layer for layer in model.model.layers if list(layer.parameters()))
            ours.mlp.register_forward_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        started = time.monotonic()
        try:
            with torch.set_grad_enabled(training):
                loss = model(input_ids=ids, labels=ids).loss
            if training:
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        except Exception as error:
            return f"{time.monotonic() - started:.0f} s {type(error).__name__}: {error}"
    return "finished"


def _check(name: str, how: str, training: bool, words: str) -> None:
    sizes, victim = LAYOUTS[name]
    with Pool(sizes.get("pp", 1) * sizes.get("tp", 1)) as ranks:
        outcomes = ranks.outcomes(_fail_in_a_step, name, how, training, timeout=60)
    for outcome in outcomes:
        if outcome.rank == victim:
            assert outcome.error == "Died" if how == "dies" else outcome.value == "stayed away"
            continue
        assert outcome.error is None, outcome.report()
        seconds, text = outcome.value.split(" s ", 1)
        assert int(seconds) < 30
        assert text.startswith(f"LostPartner: {_coordinates(name, outcome.rank)} {words}"), text


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_killed_rank_ends_the_others_with_their_coordinates(name: str, training: bool) -> None:
    _check(name, "dies", training, "lost a partner")


@pytest.mark.parametrize("name", ["1f1b", "pipedream", "tensor", "grid"])
def test_a_rank_that_stays_away_ends_the_wait_of_the_others(name: str) -> None:
    _check(name, "stays away", True, "waited")
