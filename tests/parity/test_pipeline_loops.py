"""What a loop may do around `model(**batch)` of a pipeline, and what a stage may contain; each against one process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.models import IGNORE
from tests.parity.pipelines import Spec, build_optimizer, make_batch, pipeline_of, train_one_process, train_pipeline
from tests.parity.test_pipeline import TOLERANCE, assert_parity, windows_of
from tests.pool import Pools, RankErrors


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in model.named_parameters(remove_duplicate=False) if p.grad is not None}


def assert_gradients(ranks: list[dict[str, Tensor]], want: dict[str, Tensor], tolerance: float = TOLERANCE) -> None:
    assert set().union(*ranks) == want.keys()
    for rank, got in enumerate(ranks):
        for name, gradient in got.items():
            worst = float((gradient - want[name]).abs().max())
            assert worst <= tolerance, f"{name} on rank {rank}: {worst}"


# --- loops ----------------------------------------------------------------------------------------------------------

LOOPS = {}


def loop(function: Any) -> Any:
    LOOPS[function.__name__] = function
    return function


@loop
def zero_between(model: nn.Module, batches: list[Any]) -> None:
    loss = model(**batches[0]).loss
    model.zero_grad()
    loss.backward()


@loop
def zero_before(model: nn.Module, batches: list[Any]) -> None:
    model(**batches[1]).loss.backward()
    model.zero_grad()
    model(**batches[0]).loss.backward()


@loop
def half(model: nn.Module, batches: list[Any]) -> None:
    (model(**batches[0]).loss / 2).backward()


@loop
def both_losses_in_one_backward(model: nn.Module, batches: list[Any]) -> None:
    (model(**batches[0]).loss + 3 * model(**batches[1]).loss).backward()


@loop
def backward_of_a_dropped_loss_never_comes(model: nn.Module, batches: list[Any]) -> None:
    for number, batch in enumerate(batches):
        loss = model(**batch).loss
        if number == 1:
            continue
        loss.backward()


@loop
def later_backward(model: nn.Module, batches: list[Any]) -> None:
    losses = [model(**batch).loss for batch in batches]
    for loss in reversed(losses):
        loss.backward()


@loop
def twice(model: nn.Module, batches: list[Any]) -> None:
    loss = model(**batches[0]).loss
    loss.backward(retain_graph=True)
    loss.backward()


@loop
def evaluation_between(model: nn.Module, batches: list[Any]) -> None:
    loss = model(**batches[0]).loss
    model.eval()
    with torch.no_grad():
        model(**batches[1])
    model.train()
    loss.backward()


@loop
def with_a_penalty(model: nn.Module, batches: list[Any]) -> None:
    norm = next(p for n, p in model.named_parameters() if n.endswith("layers.0.input_layernorm.weight")).sum()
    (model(**batches[0]).loss + 0.1 * norm).backward()


def _run_loop(name: str, schedule: str) -> dict[str, Tensor]:
    model = Spec().build()
    pipeline_of(model, schedule=schedule, num_micro_batches=3)
    batches = [make_batch(6, 7, "right", seed=seed) for seed in range(3)]
    if name == "with_a_penalty" and dist.get_rank() != 0:
        model(**batches[0]).loss.backward()
    else:
        LOOPS[name](model, batches)
    return _gradients(model)


@pytest.mark.parametrize("name", LOOPS)
def test_loops(pool: Pools, name: str) -> None:
    model = Spec().build()
    LOOPS[name](model, [make_batch(6, 7, "right", seed=seed) for seed in range(3)])
    assert_gradients(pool(2).run(_run_loop, name, "1f1b"), _gradients(model))


# --- what a stage may contain ---------------------------------------------------------------------------------------


def _losses(spec: Spec, options: dict[str, Any], checkpointing: bool) -> list[float]:
    torch.manual_seed(5)
    model = spec.build(torch.float32)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    pipeline_of(model, **options)
    optimizer = build_optimizer(model.parameters())
    losses = []
    for seed in range(3):
        loss = model(**make_batch(4, 9, seed=seed)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_dropout_depends_on_no_schedule(pool: Pools) -> None:
    """Blocks of GPT-2 with dropout: the same losses for every order and cut, other ones without dropout."""
    spec = Spec("gpt2", layers=5, dropout=0.2)
    runs = {
        (schedule, checkpointing): pool(2).run(
            _losses, spec, {"schedule": schedule, "num_micro_batches": 4}, checkpointing
        )
        for schedule, checkpointing in [("gpipe", False), ("1f1b", True), ("interleaved", False), ("zbv", False)]
    }
    first = runs["gpipe", False][0]
    for losses in runs.values():
        for rank in losses:
            assert rank == pytest.approx(first, rel=1e-6)
    plain = pool(2).run(_losses, Spec("gpt2", layers=5), {"schedule": "gpipe", "num_micro_batches": 4}, False)[0]
    assert abs(plain[0] - first[0]) > 1e-4


def _frozen(model: nn.Module, which: str) -> None:
    for name, parameter in model.named_parameters():
        index = name.split(".layers.")[-1].split(".")[0] if ".layers." in name else ""
        frozen = {
            "first stage": index in ("0", "1", "2") or "embed" in name,
            "middle": index in ("2", "3"),
            "all but norms": "norm" not in name,
        }[which]
        parameter.requires_grad_(not frozen)


def _run_frozen(which: str, schedule: str, checkpointing: bool) -> dict[str, Tensor]:
    model = Spec().build()
    _frozen(model, which)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    pipeline_of(model, schedule=schedule, num_micro_batches=3)
    model(**make_batch(6, 7, "left")).loss.backward()
    return _gradients(model)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zero-bubble", "zbv"])
@pytest.mark.parametrize(
    ("which", "checkpointing"), [("first stage", False), ("middle", True), ("all but norms", False)]
)
def test_frozen_and_checkpointed(pool: Pools, which: str, schedule: str, checkpointing: bool) -> None:
    model = Spec().build()
    _frozen(model, which)
    model(**make_batch(6, 7, "left")).loss.backward()
    assert_gradients(pool(2).run(_run_frozen, which, schedule, checkpointing), _gradients(model))


def smoothed(outputs: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """Label smoothing, mean over label tokens."""
    labels = batch["labels"][:, 1:].reshape(-1)
    logits = outputs.logits[:, :-1].reshape(labels.numel(), -1)
    return nn.functional.cross_entropy(logits, labels, ignore_index=IGNORE, label_smoothing=0.1)


def _run_own_loss(items: bool) -> tuple[float, dict[str, Tensor]]:
    model = Spec("qwen3").build()
    batch = make_batch(5, 7, "left")
    if items:
        model.loss_function = per_item
        batch["num_items_in_batch"] = torch.tensor(50)
    pipeline_of(model, schedule="1f1b", num_micro_batches=3, loss_fn=None if items else smoothed)
    loss = model(**batch).loss
    loss.backward()
    return loss.item(), _gradients(model)


def per_item(logits: Tensor, labels: Tensor, vocab_size: int, num_items_in_batch: Any = None, **_: Any) -> Tensor:
    """transformers' loss with num_items_in_batch, in the dtype of the logits."""
    flat = labels[:, 1:].reshape(-1)
    total = nn.functional.cross_entropy(
        logits[:, :-1].reshape(-1, vocab_size), flat, ignore_index=IGNORE, reduction="sum"
    )
    return total / num_items_in_batch


@pytest.mark.parametrize("items", [False, True])
def test_own_loss_and_number_of_items(pool: Pools, items: bool) -> None:
    """5 rows in 3 micro-batches: the padded row counts nothing, whoever divides the loss."""
    model = Spec("qwen3").build()
    batch = make_batch(5, 7, "left")
    if items:
        model.loss_function = per_item
        loss = model(**batch, num_items_in_batch=torch.tensor(50)).loss
    else:
        loss = smoothed(model(**batch), batch)
    loss.backward()
    got = pool(2).run(_run_own_loss, items)
    assert [value for value, _ in got] == pytest.approx([loss.item()] * 2, rel=TOLERANCE)
    assert_gradients([gradients for _, gradients in got], _gradients(model))


# --- what is refused ------------------------------------------------------------------------------------------------


def _refused(what: str) -> str:
    from hfdist.errors import ConfigError, DistributedError

    model = Spec().build()
    pipeline_of(model, schedule="1f1b", num_micro_batches=2)
    batch = make_batch(4, 7)
    calls = {
        "logits": lambda: model(**batch).logits,
        "no labels": lambda: model(input_ids=batch["input_ids"]),
        "other length on rank 1": lambda: model(**make_batch(4, 7 + dist.get_rank())),
        "bad batch on rank 1": lambda: model(**(batch if dist.get_rank() == 0 else {"input_ids": batch["input_ids"]})),
    }
    with pytest.raises((ConfigError, DistributedError)) as error:
        calls[what]()
    # A refused batch leaves nothing behind: the next one runs.
    model(**batch).loss.backward()
    return str(error.value)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("logits", ["loss_fn="] * 2),
        ("no labels", ["loss_fn="] * 2),
        ("other length on rank 1", ["another batch on pp=1"] * 2),
        ("bad batch on rank 1", ["an error on pp=1", "without labels"]),
    ],
)
def test_refused_on_all_ranks(pool: Pools, what: str, words: list[str]) -> None:
    for text, word in zip(pool(2).run(_refused, what), words, strict=True):
        assert word in text


def _mixtral(dtype: torch.dtype) -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    from tests.models import causal_lm_loss
    from tests.parity.pipelines import _use_exact_norms

    state = torch.get_rng_state()
    torch.manual_seed(11)
    config = MixtralConfig(
        vocab_size=61, hidden_size=15, intermediate_size=23, num_hidden_layers=5, num_attention_heads=3,
        num_key_value_heads=1, head_dim=6, num_local_experts=5, num_experts_per_tok=2, initializer_range=0.1,
        bos_token_id=None, eos_token_id=None, experts_implementation="eager",
    )  # fmt: skip
    model = MixtralForCausalLM(config).to(dtype).train()
    torch.set_rng_state(state)
    model.loss_function = causal_lm_loss
    _use_exact_norms(model)
    return model


def _run_mixtral(schedule: str) -> tuple[float, dict[str, Tensor], str]:
    from hfdist.errors import ConfigError

    model = _mixtral(torch.float64)
    pipeline_of(model, schedule=schedule, num_micro_batches=3)
    loss = model(**make_batch(6, 7, "right")).loss
    loss.backward()
    with pytest.raises(ConfigError) as refused:
        model(**make_batch(6, 7, "right"), output_router_logits=True)
    return loss.item(), _gradients(model), str(refused.value)


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_experts(pool: Pools, schedule: str) -> None:
    """Mixtral with eager experts, without the auxiliary loss, which a stage cannot know and refuses by name."""
    model = _mixtral(torch.float64)
    loss = model(**make_batch(6, 7, "right")).loss
    loss.backward()
    ranks = pool(2).run(_run_mixtral, schedule)
    assert [value for value, *_ in ranks] == pytest.approx([loss.item()] * 2, rel=TOLERANCE)
    assert_gradients([gradients for _, gradients, _ in ranks], _gradients(model))
    assert all("output_router_logits" in text for *_, text in ranks)


def _fails_inside(_: Any = None) -> None:
    model = Spec().build()
    pipeline_of(model, schedule="1f1b", num_micro_batches=2)
    if dist.get_rank() == 1:
        model.model.layers[4].mlp.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(KeyError("mine")))
    model(**make_batch(4, 7)).loss.backward()


def test_a_models_own_error_comes_out_as_it_is(pool: Pools) -> None:
    """The other rank waits no longer than the pool's grace (its group's timeout in real life)."""
    with pytest.raises(RankErrors) as caught:
        pool(2).run(_fails_inside)
    by_rank = {outcome.rank: outcome for outcome in caught.value.outcomes}
    assert by_rank[1].error == "KeyError"
    assert by_rank[0].error is not None


# --- what is on the wire, and who has what --------------------------------------------------------------------------


def _measured(schedule: str, virtual: int | None) -> dict[str, Any]:
    from hfdist.measure.wire import record_wire

    model = Spec(layers=8).build(torch.float32)
    blocks = sum(p.nbytes for p in model.model.layers.parameters())
    options: dict[str, Any] = {"schedule": schedule, "num_micro_batches": 4, "num_virtual_stages": virtual}
    pipeline = pipeline_of(model, **options)
    with record_wire() as recorded:
        model(**make_batch(8, 7)).loss.backward()
    return {
        "sent": recorded.by_label.get("pipeline", 0),
        "blocks": sum(p.nbytes for p in model.model.layers.parameters()) / blocks,
        "names": pipeline.applied.names,
        "stages": pipeline.applied.cut.num_stages,
    }


@pytest.mark.parametrize(("schedule", "crossings"), [("1f1b", 1), ("interleaved", 3), ("zbv", 2)])
def test_wire_and_ownership(pool: Pools, schedule: str, crossings: int) -> None:
    """2 x hidden x tokens x bytes for every cut between ranks; each block on one rank, 0.6 of them at most."""
    ranks = pool(2).run(_measured, schedule, None)
    assert sum(rank["sent"] for rank in ranks) == crossings * 2 * 15 * (8 * 7) * 4
    assert all(rank["blocks"] <= 0.6 for rank in ranks)
    first, second = (set(rank["names"]) for rank in ranks)
    assert not first & second
    assert first | second == {name for name, _ in Spec(layers=8).build().named_parameters()}


def test_lengths_change_while_windows_accumulate(pool: Pools) -> None:
    spec = Spec("gpt2", layers=7, tied=True)
    windows = windows_of(5, 2, "right")
    got = pool(2).run(
        train_pipeline, spec, windows, {"schedule": "interleaved", "num_micro_batches": 2, "num_virtual_stages": 3}
    )
    assert_parity(got, train_one_process(spec, windows))


def _lora() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    state = torch.get_rng_state()
    torch.manual_seed(3)
    settings = LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    model = get_peft_model(Spec().build(), settings).to(torch.float64)
    torch.set_rng_state(state)
    return model


def _run_lora(schedule: str) -> tuple[float, dict[str, Tensor]]:
    model = _lora()
    pipeline_of(model, schedule=schedule, num_micro_batches=3)
    loss = model(**make_batch(6, 7, "left")).loss
    loss.backward()
    return loss.item(), _gradients(model)


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_adapters_in_blocks(pool: Pools, schedule: str) -> None:
    model = _lora()
    loss = model(**make_batch(6, 7, "left")).loss
    loss.backward()
    ranks = pool(2).run(_run_lora, schedule)
    assert [value for value, _ in ranks] == pytest.approx([loss.item()] * 2, rel=TOLERANCE)
    assert_gradients([gradients for _, gradients in ranks], _gradients(model))
