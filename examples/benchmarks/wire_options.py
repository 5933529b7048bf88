"""Claim: the options that trade accuracy for wire save what they say, at a loss that is shown.

    torchrun --standalone --nproc-per-node 4 examples/benchmarks/wire_options.py --out raw.json

Trains the embedded Llama (9.4 M parameters) at one ZeRO stage on the embedded text from the same weights on the same
batches, once without options and once with each. Printed per option: loss of the last 10 steps and on held-out text,
each also as a difference to the run without, and the bytes a rank sends per step, also as a ratio.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import engines
import torch
import torch.distributed as dist

OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "bf16 reductions": {"reduce_dtype": "bf16"},
    "int8 gathers": {"gather_dtype": "int8"},
    "groups of 2": {"secondary_shard_size": 2},
    "int8, groups of 2": {"gather_dtype": "int8", "secondary_shard_size": 2},
    "int8, bf16": {"gather_dtype": "int8", "reduce_dtype": "bf16"},
    "chunked loss": {"chunk_size": 64},
}


def train(options: dict[str, Any], args: argparse.Namespace, recipe: Any, data: Any) -> dict[str, Any]:
    """One run with `options`: losses by step (mean over ranks), held-out loss, bytes this rank sends in a step."""
    from hfdist import Accelerator, AmpPlugin, LossPlugin, ZeroPlugin
    from hfdist.measure.wire import record_wire
    from hfdist.recipe import build_loader, build_optimizer, load_model

    zero = {name: value for name, value in options.items() if name != "chunk_size"}
    plugins: list[Any] = [ZeroPlugin(stage=args.stage, **zero)]
    if "chunk_size" in options:
        plugins.append(LossPlugin(options["chunk_size"]))
    if args.precision == "bf16":
        plugins.append(AmpPlugin("bf16"))
    accelerator = Accelerator(plugins=plugins)
    model = load_model(recipe)
    optimizer, scheduler = build_optimizer(model, recipe)
    loader = build_loader(data, recipe, num_processes=accelerator.num_processes, accumulation=1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    clock = engines.Clock()
    for batch in loader:
        with record_wire() as wire, clock:
            loss = model(**batch).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    model.eval()
    with torch.no_grad():
        held_out = [model(**_batch(data.held_out, index)).loss.item() for index in range(len(data.held_out))]
    accelerator.free_memory()
    return {
        "losses": losses,
        "last_10": sum(losses[-10:]) / len(losses[-10:]),
        "held_out": sum(held_out) / len(held_out),
        "sent": wire.total_bytes,
        "sent_by_op": wire.by_op,
        "cpu_seconds": clock.cpu,
    }


def _batch(blocks: Any, index: int) -> dict[str, torch.Tensor]:
    return {name: value[None] for name, value in blocks[index].items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", type=int, default=3, choices=[1, 2, 3])
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--model", choices=["embedded", "tiny"], default="embedded")
    parser.add_argument("--options", nargs="*", choices=list(OPTIONS), default=list(OPTIONS))
    parser.add_argument("--out", type=Path, help="write everything measured to this json file")
    args = parser.parse_args()
    rank, size = engines.start_ranks()
    from hfdist.recipe import load_data, load_tokenizer
    from hfdist.recipe.arguments import RecipeArguments

    recipe = RecipeArguments(
        recipe="wire_options", model=args.model, steps=args.steps, batch_size=size, seq_len=args.seq_len
    )
    if rank == 0:
        load_data(recipe, load_tokenizer(recipe))  # the cache, once
    dist.barrier()
    data = load_data(recipe, load_tokenizer(recipe))
    results: dict[str, dict[str, Any]] = {}
    for name in args.options:
        row = results[name] = train(OPTIONS[name], args, recipe, data)
        base = results[args.options[0]]
        if rank == 0:
            print(
                f"{name:18} loss {row['last_10']:.4f} ({row['last_10'] - base['last_10']:+.4f}), held out "
                f"{row['held_out']:.4f} ({row['held_out'] - base['held_out']:+.4f}), "
                f"{row['sent'] / 1e6:7.2f} MB a step ({row['sent'] / base['sent']:.3f})",
                flush=True,
            )
            engines.write_raw(args.out, args, results)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
