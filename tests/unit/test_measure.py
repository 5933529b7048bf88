"""Counters without processes: wire, memory by owner, resident memory."""

from __future__ import annotations

import builtins
import contextlib
import doctest
import pickle
import subprocess
import sys
import threading
from typing import Any

import pytest
import torch
from torch import nn

from hfdist.measure import resident, wire
from hfdist.measure.memory import OWNERS, measure_memory, sample_memory

MB = 1 << 20


def test_importing_counters_costs_nothing() -> None:
    """Neither torch nor the files of a system that may not have them."""
    code = (
        "import builtins, sys\n"
        "opened, real = [], builtins.open\n"
        "builtins.open = lambda name, *a, **k: (opened.append(str(name)), real(name, *a, **k))[1]\n"
        "import hfdist.measure.wire, hfdist.measure.memory, hfdist.measure.resident\n"
        "sys.exit('torch' in sys.modules or 'psutil' in sys.modules or any('/proc' in n for n in opened))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# ------------------------------------------------------------------------------------------------------ wire


def test_nothing_is_counted_when_nobody_records() -> None:
    assert not wire.is_recording()
    wire.record("all_gather", 10, group_size=2)
    with wire.record_wire() as seen:
        pass
    wire.record("all_gather", 10, group_size=2)
    assert (seen.total_bytes, seen.num_calls, seen.by_op) == (0, 0, {})


def test_blocks_nest_and_count_for_themselves() -> None:
    with wire.record_wire() as outer:
        wire.record("all_gather", 10, group_size=2, label="block 0")
        with wire.record_wire() as inner:
            wire.record("all_reduce", 5, group_size=2)
            wire.record("all_reduce", 7, group_size=2, label="block 0")
        wire.record("all_gather", 1, group_size=2)
    assert (inner.total_bytes, inner.num_calls, inner.by_op, inner.calls_by_op) == (
        12, 2, {"all_reduce": 12}, {"all_reduce": 2},
    )  # fmt: skip
    assert outer.by_op == {"all_gather": 11, "all_reduce": 12}
    assert outer.by_label == {"block 0": 17}
    assert pickle.loads(pickle.dumps(outer)) == outer


def test_recording_ends_with_its_block_also_on_an_error() -> None:
    with pytest.raises(KeyError), wire.record_wire():
        raise KeyError
    assert not wire.is_recording()


def test_the_same_listener_twice_is_removed_once() -> None:
    calls: list[int] = []

    def listener(op: str, nbytes: int, group_size: int, label: str) -> None:
        calls.append(nbytes)

    with wire.listen(listener):
        with wire.listen(listener):
            wire.record("send", 1, group_size=2)
        wire.record("send", 2, group_size=2)
    assert calls == [1, 1, 2]


def test_threads_lose_no_bytes() -> None:
    def send() -> None:
        for _ in range(2000):
            wire.record("send", 1, group_size=2)

    with wire.record_wire() as seen:
        threads = [threading.Thread(target=send) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert seen.total_bytes == seen.num_calls == 8000


def test_ring_bytes() -> None:
    assert doctest.testmod(wire).failed == 0
    assert wire.ring_bytes("gather", 4000, 4) == 1000
    assert wire.ring_bytes("all_reduce", 3, 2) == 3
    with pytest.raises(ValueError, match="'allgather'"):
        wire.ring_bytes("allgather", 1, 2)  # type: ignore[arg-type]


def test_interface_counts_what_is_sent_or_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert wire.interface_bytes("no such interface") is None
    _hide_proc(monkeypatch)
    assert wire.interface_bytes("lo") is None


# ---------------------------------------------------------------------------------------------------- memory


class Tied(nn.Module):
    """Two layers of one weight (16, 16), a frozen one, a buffer of 8 int64."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.frozen = nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False), nn.Linear(16, 16)
        self.b.weight = self.a.weight
        self.frozen.requires_grad_(False)
        self.register_buffer("counts", torch.zeros(8, dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.frozen(self.a(x)))


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 16)).sum().backward()
    optimizer.step()


def test_each_storage_counts_once() -> None:
    model = Tied()
    weight, frozen = 4 * 16 * 16, 4 * (16 * 16 + 16)
    optimizer = torch.optim.Adam([model.a.weight])
    assert measure_memory(model, optimizer).total == weight + frozen + 64
    _step(model, optimizer)
    report = measure_memory([model, model], [optimizer])
    seen = report.parameters, report.gradients, report.optimizer, report.buffers, report.gathered
    assert seen == (weight + frozen, weight, 2 * weight + 4, 64, 0)
    assert (report.logical_parameters, report.logical_gradients) == (weight + frozen, weight)
    assert report.peak_parameters is report.peak_total is None
    # Views of one storage: all of it, once.
    model.a.weight.grad = torch.zeros(40, 16)[:16]
    report = measure_memory(model)
    assert (report.gradients, report.logical_gradients) == (4 * 40 * 16, weight)


def test_masters_that_only_the_optimizer_holds_are_its_own() -> None:
    model = nn.Linear(4, 4, bias=False).bfloat16()
    masters = nn.Parameter(model.weight.detach().float())
    report = measure_memory(model, torch.optim.SGD([masters]))
    assert (report.parameters, report.optimizer) == (2 * 16, 4 * 16)


def test_wrapped_optimizers_and_models_on_meta() -> None:
    class Wrapper:
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer = optimizer

    model = Tied()
    optimizer = torch.optim.Adam([model.a.weight])
    _step(model, optimizer)
    assert measure_memory(model, Wrapper(Wrapper(optimizer))).optimizer == 2 * 1024 + 4  # type: ignore[arg-type]
    with torch.device("meta"):
        assert measure_memory(nn.Linear(1000, 1000)).total == 0


def test_sampling_sees_what_is_gone_afterwards() -> None:
    model = Tied()
    optimizer = torch.optim.SGD([model.a.weight], lr=0.1)
    with sample_memory(model, optimizer) as sampler:
        _step(model, optimizer)
        optimizer.zero_grad()
    report = sampler.report
    assert (report.gradients, report.peak_gradients) == (0, 1024)
    assert report.peak_total == report.total + 1024
    assert sum(sampler.at_peak_total.values()) == report.peak_total
    assert set(sampler.peaks) == set(OWNERS)


def test_sampling_leaves_no_hook_behind() -> None:
    model = Tied()
    optimizer = torch.optim.SGD([model.a.weight], lr=0.1)
    before = _hooks(model, optimizer)
    with contextlib.suppress(KeyError), sample_memory(model, optimizer) as sampler:
        _step(model, optimizer)
        assert _hooks(model, optimizer) != before
        raise KeyError
    assert _hooks(model, optimizer) == before
    assert not wire.is_recording()
    looks = sampler.num_samples
    _step(model, optimizer)
    assert sampler.num_samples == looks


def test_sampling_looks_at_every_collective() -> None:
    with sample_memory(nn.Linear(2, 2)) as sampler:
        looks = sampler.num_samples
        wire.record("all_gather", 1, group_size=2)
        assert sampler.num_samples == looks + 1


def test_a_watched_parameter_can_go() -> None:
    """A stage switch replaces parameters; the sampler must not keep the old ones (it is there to see them go)."""
    model = nn.Linear(16, 16, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sample_memory(model) as sampler:
        _step(model, optimizer)
        assert len(sampler._watched) == 1
        optimizer.param_groups.clear()
        optimizer.state.clear()
        model.weight = nn.Parameter(torch.zeros(16, 16))
        assert len(sampler._watched) == 0


def _hooks(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    parameters = [len(p._post_accumulate_grad_hooks or {}) for p in model.parameters()]
    modules = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    steps = len(optimizer._optimizer_step_pre_hooks), len(optimizer._optimizer_step_post_hooks)
    return [parameters, modules, steps]


# -------------------------------------------------------------------------------------------------- resident


@pytest.mark.skipif(resident.anonymous_bytes() is None, reason="this system does not say what memory is anonymous")
def test_the_sampler_sees_a_peak_that_is_over() -> None:
    with resident.sample_resident() as sampler:
        held = torch.ones(16 * MB)  # 64 MiB
        sampler.sample()
        del held
    assert 60 * MB <= sampler.growth <= 80 * MB
    assert sampler.num_samples >= 2


def test_resident_bytes_of_this_process() -> None:
    now, peak = resident.resident_bytes(), resident.peak_resident_bytes()
    assert now is not None
    assert peak is not None
    assert 10 * MB < now <= 1.1 * peak


def test_without_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    peak = resident.peak_resident_bytes()
    _hide_proc(monkeypatch)
    assert resident.anonymous_bytes() is None
    # getrusage knows it too, in other units on other systems.
    assert resident.peak_resident_bytes() == pytest.approx(peak, rel=0.2)
    with pytest.raises(RuntimeError, match="Linux"), resident.sample_resident():
        pass


def _hide_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.open

    def hidden(name: Any, *args: Any, **kwargs: Any) -> Any:
        if str(name).startswith("/proc"):
            raise FileNotFoundError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "open", hidden)
