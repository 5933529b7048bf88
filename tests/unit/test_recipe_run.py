"""`Run` in one process: losses, the record it leaves, memory next to the formula, a loss that is not finite."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hfdist.errors import ConfigError, DistributedError
from hfdist.recipe import Run, build_loader, build_optimizer
from hfdist.recipe.arguments import RecipeArguments
from hfdist.recipe.record import RecordWriter, read_record
from hfdist.recipe.tokens import Blocks, Data

PARAMETERS = 2 * 16 * 16 + 2 * 16 * 8 + 3 * 16 * 24 + 2 * 16 + 16 + 32 * 16


def make_data(args: RecipeArguments) -> Data:
    tokens = np.random.default_rng(0).integers(0, 32, size=400)
    order = np.random.default_rng(1).permutation(40)[: args.steps * args.batch_size]
    return Data(
        train=Blocks(tokens, order, args.seq_len),
        held_out=Blocks(tokens, np.arange(40, 50), args.seq_len),
        tokenizer=None,  # type: ignore[arg-type]
        num_tokens=len(tokens),
    )


def make_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=True,
        )
    )


def train(args: RecipeArguments, accumulation: int) -> tuple[Run, list[float], Path | None]:
    data, model = make_data(args), make_model()
    optimizer, scheduler = build_optimizer(model, args)
    run = Run(args, data, model, optimizer, zero_stage=0, accumulation=accumulation)
    run.evaluate(model)
    losses = []
    loader = build_loader(data, args, num_processes=1, accumulation=accumulation)
    for number, batch in enumerate(run.batches(loader), start=1):
        loss = model(**batch).loss
        losses.append(float(loss.detach()))
        (loss / accumulation).backward()
        if number % accumulation == 0:
            optimizer.step()
        run.log(loss)
        if number % accumulation == 0:
            optimizer.zero_grad()
            scheduler.step()
    run.evaluate(model)
    return run, losses, run.finish()


@pytest.fixture
def args(tmp_path: Path) -> RecipeArguments:
    return RecipeArguments(
        recipe="unit", steps=4, batch_size=4, seq_len=8, held_out=10, lr=0.01, record=tmp_path / "run.jsonl"
    )


def test_the_record_says_what_happened(args: RecipeArguments) -> None:
    run, losses, path = train(args, accumulation=2)
    assert path == args.record
    lines = read_record(path)  # type: ignore[arg-type]
    header, summary = lines[0], lines[-1]
    steps = [line for line in lines if line["kind"] == "step"]
    assert [line["step"] for line in steps] == [1, 2, 3, 4]
    assert [line["loss"] for line in steps] == pytest.approx(
        [(a + b) / 2 for a, b in zip(losses[::2], losses[1::2], strict=True)]
    )
    assert [line["step"] for line in lines if line["kind"] == "held_out"] == [0, 4]
    assert header["num_parameters"] == PARAMETERS
    assert header["versions"]["torch"] == torch.__version__
    memory = summary["memory"][0]
    formula = summary["formula"]
    assert formula == {
        "parameters": 4 * PARAMETERS,
        "gradients": 4 * PARAMETERS,
        "optimizer": 8 * PARAMETERS,
        "peak_total": formula["peak_total"],
        "wire_bound": 0,
    }
    assert (memory["parameters"], memory["gradients"]) == (4 * PARAMETERS, 4 * PARAMETERS)
    # Adam keeps a step count of 4 bytes beside the two moments of each of the 11 parameters.
    assert memory["optimizer"] == 8 * PARAMETERS + 4 * 11
    assert memory["peak_total"] >= 16 * PARAMETERS
    assert summary["wire"] == {}
    assert summary["loss_from"] == steps[0]["loss"]
    assert run.held_out[0] == summary["held_out_from"]


def test_held_out_loss_is_the_mean_of_its_blocks(args: RecipeArguments) -> None:
    data, model = make_data(args), make_model()
    run = Run(args, data, model, build_optimizer(model, args)[0], zero_stage=0)
    with torch.no_grad():
        each = [float(model(**{k: v[None] for k, v in data.held_out[i].items()}).loss) for i in range(10)]
    assert run.evaluate(model) == pytest.approx(sum(each) / 10, abs=1e-6)
    assert model.training


def test_accumulation_does_not_change_the_curve(args: RecipeArguments, tmp_path: Path) -> None:
    whole = train(args, accumulation=1)[0].losses
    parts = train(replace(args, record=tmp_path / "parts.jsonl"), accumulation=4)[0].losses
    assert parts == pytest.approx(whole, abs=1e-5)
    assert whole[-1] < whole[0]


def test_a_loss_that_is_not_finite_ends_the_run(args: RecipeArguments) -> None:
    data, model = make_data(args), make_model()
    run = Run(args, data, model, build_optimizer(model, args)[0], zero_stage=0)
    next(run.batches(build_loader(data, args, num_processes=1, accumulation=1)))
    with pytest.raises(DistributedError, match="loss of nan in step 1 of unit"):
        run.log(torch.tensor(math.nan))


def test_a_timeline_needs_a_pipeline(args: RecipeArguments, tmp_path: Path) -> None:
    data, model = make_data(args), make_model()
    asked = replace(args, timeline=tmp_path / "x.png")
    with pytest.raises(ConfigError, match="--timeline for unit, which cuts no model into stages"):
        Run(asked, data, model, build_optimizer(model, args)[0], zero_stage=0)


def test_a_record_cut_short_is_still_read(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path / "x.jsonl")
    writer.write("header", a=1)
    writer.write("step", step=1)
    writer._file.write('{"kind": "st')
    writer.close()
    assert [line["kind"] for line in read_record(tmp_path / "x.jsonl")] == ["header", "step"]
