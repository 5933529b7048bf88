"""Options that trade accuracy or memory for wire: int8 gathers, bf16 reductions, backward gathers in small groups.

int8 has an oracle of its own: one process that computes with weights rounded as ZeRO++ describes and steps exact ones.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hfdist.plan import Layout
from tests.models import VOCAB, Family, Recipe, Window, build_lm, concatenate, make_windows
from tests.oracle import Step, assert_same, assert_steps, train, update
from tests.parity.cells import assert_ranks_agree
from tests.parity.loops import CLIP, RankRun, run_windows, whole_gradients, whole_parameters
from tests.parity.measured import build_llama_of_12_mb, step_in_memory, step_on_the_wire
from tests.pool import Pools
from tests.worker import make_accelerator

TOLERANCE = 1e-10
ADAMW = Recipe("adamw")


# ------------------------------------------------------------------------------------------------------- the oracle


def rounded(whole: Tensor, world_size: int) -> Tensor:
    """`whole` (n, ...) as ranks see it when each one's rows travel as int8: blocks of 256, scale = largest / 127."""
    chunk = -(-whole.shape[0] // world_size)
    parts = []
    for start in range(0, chunk * world_size, chunk):
        rows = whole[start : start + chunk]
        flat = torch.zeros(chunk * whole[0].numel(), dtype=torch.float32)
        flat[: rows.numel()] = rows.reshape(-1)
        for block in flat.split(256):
            scale = block.abs().max() / 127
            if scale > 0:
                block.copy_((block / scale).round() * scale)
        parts.append(flat[: rows.numel()].view(rows.shape))
    return torch.cat(parts).to(whole.dtype)


def train_rounded(family: Family, windows: list[Window], world_sizes: list[int]) -> list[Step]:
    """Forward and backward with rounded matrices, the update on exact ones; `world_sizes[i]` 1: window i is exact."""
    model = build_lm(family, tied=True, dtype=torch.float64)
    optimizers = ADAMW.build(model)
    steps = []
    for window, world_size in zip(windows, world_sizes, strict=True):
        model.zero_grad()
        exact = {name: p.detach().clone() for name, p in model.named_parameters()}
        for parameter in model.parameters():
            if parameter.ndim >= 2 and world_size > 1:
                parameter.data.copy_(rounded(parameter.data, world_size))
        loss = model(**concatenate([batch for micro in window for batch in micro])).loss
        loss.backward()
        for name, parameter in model.named_parameters():
            parameter.data.copy_(exact[name])
        steps.append(update(model, optimizers, loss=loss.item(), clip=CLIP))
    return steps


def _train(
    family: Family, windows: list[Window], route: list[int], device_path: bool, options: dict[str, Any]
) -> tuple[RankRun, int]:
    """One window at each stage of `route`; also the bytes gathered once the last one is over."""
    from hfdist.parallel import direct, fsdp
    from hfdist.plugins import ZeroPlugin

    gathers = direct.gathers
    if device_path:  # FSDP2's own gather with our collective in it, as on a device
        direct.gathers = lambda group: fsdp.shard_group(group).size() == 1
    try:
        accelerator = make_accelerator(
            plugins=[ZeroPlugin(stage=route[0], **options)], gradient_accumulation_steps=len(windows[0])
        )
        model = build_lm(family, tied=True, dtype=torch.float64)
        model, *optimizers = accelerator.prepare(model, *ADAMW.build(model))
        run = run_windows(
            accelerator,
            model,
            optimizers,
            windows,
            clip=CLIP,
            between=lambda index: accelerator.set_zero_stage(route[index]),
        )
        return run, accelerator.memory_report().gathered
    finally:
        direct.gathers = gathers


# -------------------------------------------------------------------------------------------------------------- int8


@pytest.mark.parametrize("device_path", [False, True], ids=["direct", "fsdp2"])
@pytest.mark.parametrize(("family", "world_size"), [("llama", 3), ("gpt2", 2)])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_int8_gathers_compute_with_rounded_weights_and_step_exact_ones(
    pool: Pools, stage: int, family: Family, world_size: int, device_path: bool
) -> None:
    windows = make_windows(vocab=VOCAB[family], steps=3, gas=2, world_size=world_size)
    options = {"gather_dtype": "int8"}
    results = pool(world_size).run(_train, family, windows, [stage] * 3, device_path, options)
    runs = [run for run, _ in results]
    assert_steps(runs[0].steps, train_rounded(family, windows, [world_size] * 3), tolerance=TOLERANCE)
    assert_ranks_agree(runs)


def test_the_rounding_is_there_and_small() -> None:
    """What the oracle of int8 does to a matrix: most values move, none by more than half a step of its block."""
    whole = torch.randn(35, 53, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    moved = (rounded(whole, 3) - whole).abs()
    assert (moved > 0).double().mean() > 0.9
    assert moved.max() <= whole.abs().max() / 127 / 2 * 1.001


def test_int8_through_live_switches(pool: Pools) -> None:
    """Stage 0 computes with the exact weights, the others with rounded ones; state and masters carry over."""
    route = [3, 0, 1, 2, 0, 3]
    windows = make_windows(vocab=VOCAB["llama"], steps=len(route), gas=1, world_size=2)
    runs = [run for run, _ in pool(2).run(_train, "llama", windows, route, False, {"gather_dtype": "int8"})]
    want = train_rounded("llama", windows, [2 if stage else 1 for stage in route])
    assert_steps(runs[0].steps, want, tolerance=TOLERANCE)
    assert_ranks_agree(runs)


def _choose(use: list[list[str]], int8: bool) -> tuple[dict[str, Tensor], Tensor]:
    """Each rank runs the layers of its own `use`; gradients and the output."""
    from hfdist.plugins import ZeroPlugin
    from tests.models import ChoiceToy

    torch.manual_seed(5)
    plugin = ZeroPlugin(
        stage=3, conditional_modules=True, block_classes=("Linear",), gather_dtype="int8" if int8 else "compute"
    )
    accelerator = make_accelerator(plugins=[plugin])
    model = accelerator.prepare(ChoiceToy(width=7))
    x = torch.ones(2, 7) * (accelerator.process_index + 1)
    output = model(x, use[accelerator.process_index])
    accelerator.backward(output.square().mean())
    return whole_gradients(model), output.detach()


def test_int8_where_ranks_run_different_modules(pool: Pools) -> None:
    """A rank that serves another's gather packs as well; close to exact weights, and not equal to them."""
    use = [["left", "right"], ["right"]]
    packed, exact = pool(2).run(_choose, use, True), pool(2).run(_choose, use, False)
    for (ours, output), (theirs, wanted) in zip(packed, exact, strict=True):
        assert ours.keys() == theirs.keys()
        assert 0 < (output - wanted).abs().max() < 0.02
        for name, gradient in ours.items():
            assert (gradient - theirs[name]).norm() <= 0.03 * theirs[name].norm(), name


def _flat_and_direct() -> tuple[Tensor, Tensor]:
    """The same two parameters and a vector through the buffer of FSDP2 and through the exchange of CPU ranks."""
    from hfdist.parallel import quantize

    group = dist.group.WORLD
    assert group is not None
    rank, size = group.rank(), group.size()
    generator = torch.Generator().manual_seed(rank)
    numels, matrices = (7 * 53, 35, 1031), (True, False, True)
    for dtypes in ((torch.bfloat16,) * 3, (torch.float32, torch.bfloat16, torch.float64)):
        shards = [torch.randn(n, generator=generator).to(d) for n, d in zip(numels, dtypes, strict=True)]
        parts = [quantize.Part(s.numel(), s.dtype, m) for s, m in zip(shards, matrices, strict=True)]
        one_dtype = len(set(dtypes)) == 1
        flat = torch.cat([s if one_dtype else s.view(torch.uint8) for s in shards])
        output = flat.new_empty(size * flat.numel())
        quantize.gather_flat(output, flat, parts, group, "test")
        outputs = [s.new_zeros(size, s.numel()) for s in shards]
        for whole, shard in zip(outputs, shards, strict=True):
            whole[rank] = shard
        quantize.PackedGather(outputs, matrices, group, "test").run()
        listed = [torch.cat([w[r].view(torch.uint8) for w in outputs]) for r in range(size)]
        if not torch.equal(output.view(torch.uint8), torch.cat(listed)):
            break
    return output.view(torch.uint8), torch.cat(listed)


def test_the_device_path_moves_the_same_values(pool: Pools) -> None:
    for flat, exchanged in pool(2).run(_flat_and_direct):
        assert torch.equal(flat, exchanged)


# --------------------------------------------------------------------------------------------------- secondary groups


@pytest.mark.parametrize("device_path", [False, True], ids=["direct", "fsdp2"])
@pytest.mark.parametrize(("family", "gas"), [("llama", 2), ("gpt2", 1)])
def test_secondary_groups_change_nothing(pool: Pools, family: Family, gas: int, device_path: bool) -> None:
    windows = make_windows(vocab=VOCAB[family], steps=3, gas=gas, world_size=4)
    options = {"secondary_shard_size": 2}
    results = pool(4).run(_train, family, windows, [3] * 3, device_path, options)
    model = build_lm(family, tied=True, dtype=torch.float64)
    want = train(model, windows, optimizers=ADAMW.build, clip=CLIP)
    assert_steps(results[0][0].steps, want, tolerance=TOLERANCE)
    assert_ranks_agree([run for run, _ in results])
    assert all(gathered == 0 for _, gathered in results)


def test_secondary_groups_through_live_switches(pool: Pools) -> None:
    route = [0, 3, 1, 3, 2]
    windows = make_windows(vocab=VOCAB["llama"], steps=len(route), gas=1, world_size=4)
    results = pool(4).run(_train, "llama", windows, route, False, {"secondary_shard_size": 2})
    model = build_lm("llama", tied=True, dtype=torch.float64)
    assert_steps(results[0][0].steps, train(model, windows, optimizers=ADAMW.build, clip=CLIP), tolerance=TOLERANCE)


def test_secondary_groups_pass_on_what_travelled_as_int8(pool: Pools) -> None:
    """Backward computes with the very values of forward."""
    windows = make_windows(vocab=VOCAB["llama"], steps=3, gas=2, world_size=4)
    options = {"secondary_shard_size": 2, "gather_dtype": "int8"}
    for device_path in (False, True):
        results = pool(4).run(_train, "llama", windows, [3] * 3, device_path, options)
        assert_steps(results[0][0].steps, train_rounded("llama", windows, [4] * 3), tolerance=TOLERANCE)


def _forward_without_backward(windows: list[Window]) -> tuple[list[dict[str, Tensor]], int, int]:
    from hfdist.plugins import ZeroPlugin

    accelerator = make_accelerator(plugins=[ZeroPlugin(stage=3, secondary_shard_size=2)])
    model = build_lm("llama", tied=True, dtype=torch.float64)
    model, *optimizers = accelerator.prepare(model, *ADAMW.build(model))
    records = []
    for window in windows:
        batch = window[0][accelerator.process_index]
        accelerator.backward(model(**batch).loss)
        model(input_ids=batch["input_ids"])
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            model(**batch)
        records.append(whole_parameters(accelerator, model))
    model(input_ids=batch["input_ids"])
    held = accelerator.memory_report().gathered
    with torch.no_grad():
        model(**batch)
    return records, held, accelerator.memory_report().gathered


def test_what_a_secondary_group_kept_never_outlives_an_update(pool: Pools) -> None:
    """A forward whose backward never comes leaves blocks sharded over the small group: the next one must see new
    weights, and a forward without gradients leaves nothing."""
    windows = make_windows(vocab=VOCAB["llama"], steps=3, gas=1, world_size=4)
    want = train(build_lm("llama", tied=True, dtype=torch.float64), windows, optimizers=ADAMW.build)
    for records, held, gathered in pool(4).run(_forward_without_backward, windows):
        for step, (ours, theirs) in enumerate(zip(records, want, strict=True)):
            assert_same(f"step {step}", ours, theirs.parameters, TOLERANCE)
        assert held > 0
        assert gathered == 0


def _bytes_across() -> tuple[int, int]:
    """Bytes of gathers that this rank sends (inside its group of two, to the other group) in one update."""
    from hfdist.parallel import exchange
    from hfdist.plugins import ZeroPlugin

    accelerator = make_accelerator(plugins=[ZeroPlugin(stage=3, secondary_shard_size=2)])
    model = build_llama_of_12_mb()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    sent = [0, 0]
    original = exchange.swap

    def swap(group: Any, outgoing: Any, incoming: Any, *, op: str, label: str) -> None:
        for peer, messages in enumerate(outgoing):
            other = dist.get_global_rank(group, peer)
            if op == "all_gather" and other != accelerator.process_index:
                sent[other // 2 != accelerator.process_index // 2] += sum(m.nbytes for m in messages)
        original(group, outgoing, incoming, op=op, label=label)

    exchange.swap = swap
    try:
        ids = torch.arange(16).reshape(1, 16)
        accelerator.backward(model(input_ids=ids, labels=ids).loss)
        optimizer.step()
    finally:
        exchange.swap = original
    return sent[0], sent[1]


def test_backward_sends_no_weights_across_groups(pool: Pools) -> None:
    """4 ranks in groups of 2: forward sends every shard to the 2 ranks of the other group, backward to none of them."""
    model = build_llama_of_12_mb()
    total = sum(p.numel() * 4 for p in model.parameters())
    blocks = sum(p.numel() * 4 for p in model.model.layers.parameters())
    for inside, across in pool(4).run(_bytes_across):
        assert across == pytest.approx(total / 4 * 2, rel=1e-3)
        # Forward: a quarter to one peer. Backward: half of every block to one peer.
        assert inside == pytest.approx(total / 4 + blocks / 2, rel=1e-3)


# ---------------------------------------------------------------------------------------------------- bf16 reductions


def _reduced(stage: int, window: Window) -> dict[str, Tensor]:
    from hfdist.plugins import ZeroPlugin

    plugin = ZeroPlugin(stage=stage, reduce_dtype="bf16")
    accelerator = make_accelerator(plugins=[plugin], gradient_accumulation_steps=len(window))
    model = accelerator.prepare(build_lm("llama", tied=False, dtype=torch.float64))
    for micro in window:
        with accelerator.accumulate(model):
            accelerator.backward(model(**micro[accelerator.process_index]).loss)
    return whole_gradients(model)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bf16_reductions_round_each_ranks_gradient_once(pool: Pools, stage: int) -> None:
    """An fp64 model: what a rank sends is its gradient in bf16; at stages 0 and 1 that is the sum of its micro-steps,
    added up exactly. The mean is exact to fp32; at stage 0 it travels too, and so is rounded once more."""
    window = make_windows(vocab=VOCAB["llama"], steps=1, gas=2, world_size=2, ragged=False)[0]
    want: dict[str, Tensor] = {}
    for rank in range(2):
        model = build_lm("llama", tied=False, dtype=torch.float64)
        sent: dict[str, Tensor] = {}
        for micro in window:
            model.zero_grad() if stage >= 2 else None
            (model(**micro[rank]).loss / len(window)).backward()
            if stage >= 2:
                for name, p in model.named_parameters():
                    sent[name] = sent.get(name, 0) + p.grad.bfloat16().double()
        if stage <= 1:
            sent = {name: p.grad.bfloat16().double() for name, p in model.named_parameters()}
        for name, gradient in sent.items():
            want[name] = want.get(name, 0) + gradient / 2
    if stage == 0:
        want = {name: mean.bfloat16().double() for name, mean in want.items()}
    for gradients in pool(2).run(_reduced, stage, window):
        assert gradients.keys() == want.keys()
        for name, gradient in gradients.items():
            assert (gradient - want[name]).abs().max() <= 1e-6 * want[name].abs().max(), name


# ------------------------------------------------------------------------------------------------------ bytes, memory

OPTIONS = [
    Layout(stage=1, world_size=2, optimizer_values=0, gather_dtype="int8"),
    Layout(stage=3, world_size=2, optimizer_values=0, gather_dtype="int8", micro_steps=2),
    Layout(stage=3, world_size=2, optimizer_values=0, gather_dtype="int8", precision="bf16"),
    Layout(stage=0, world_size=2, optimizer_values=0, reduce_dtype="bf16"),
    Layout(stage=3, world_size=2, optimizer_values=0, reduce_dtype="bf16"),
    Layout(stage=3, world_size=4, optimizer_values=0, secondary_shard_size=2),
    Layout(stage=3, world_size=4, optimizer_values=0, secondary_shard_size=2, gather_dtype="int8", precision="bf16"),
]


def _id(layout: Layout) -> str:
    options = f"{layout.reduce_dtype}-{layout.gather_dtype}-{layout.secondary_shard_size}"
    return f"stage{layout.stage}-W{layout.world_size}-k{layout.micro_steps}-{layout.precision}-{options}"


@pytest.mark.parametrize("layout", OPTIONS, ids=_id)
def test_bytes_sent_are_those_of_the_plan(pool: Pools, layout: Layout) -> None:
    for step in pool(layout.world_size).run(step_on_the_wire, layout):
        plan, seen = step.plan.wire, step.wire.by_op
        assert seen.get("all_gather", 0) == pytest.approx(plan.gather, abs=1000)
        assert seen.get("reduce_scatter", 0) == pytest.approx(plan.reduce_scatter, rel=5e-3, abs=1000)
        assert seen.get("all_reduce", 0) == pytest.approx(plan.all_reduce, rel=5e-3, abs=1000)
        assert step.wire.total_bytes <= 1.03 * plan.bound


def test_how_much_the_options_save(pool: Pools) -> None:
    """Of the bytes of the same layout without the option, measured: int8 a quarter of fp32's gathers and half of
    bf16's (plus scales), bf16 half of the reductions."""

    def sent(op: str, **options: Any) -> int:
        return pool(2).run(step_on_the_wire, Layout(world_size=2, optimizer_values=0, **options))[0].wire.by_op[op]

    packed = sent("all_gather", stage=3, gather_dtype="int8")
    assert packed / sent("all_gather", stage=3) == pytest.approx(260 / 256 / 4, rel=5e-3)
    packed = sent("all_gather", stage=3, gather_dtype="int8", precision="bf16")
    assert packed / sent("all_gather", stage=3, precision="bf16") == pytest.approx(260 / 256 / 2, rel=5e-3)
    for op, stage in (("all_reduce", 0), ("reduce_scatter", 2)):
        assert sent(op, stage=stage, reduce_dtype="bf16") / sent(op, stage=stage) == pytest.approx(0.5, rel=1e-3)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(stage=3, world_size=4, secondary_shard_size=2),
        Layout(stage=3, world_size=4, secondary_shard_size=2, precision="bf16", micro_steps=2),
        Layout(stage=2, world_size=4, secondary_shard_size=2),
        Layout(stage=3, world_size=3, gather_dtype="int8", micro_steps=3),
        *(Layout(stage=stage, world_size=2, reduce_dtype="bf16", micro_steps=2) for stage in (0, 1, 2, 3)),
    ],
    ids=_id,
)
def test_memory_is_that_of_the_formula(pool: Pools, layout: Layout) -> None:
    for rank, step in enumerate(pool(layout.world_size).run(step_in_memory, layout, "llama", False)):
        plan, seen = step.plan.memory, step.memory
        assert seen.parameters == plan.at_rest.parameters, rank
        assert seen.peak_gathered == plan.peak.gathered, rank
        assert seen.peak_gradients == plan.peak.gradients, rank
        assert seen.peak_communication <= plan.peak.communication
        assert seen.gathered == step.between.gathered == step.between.gradients == 0
