"""Claim: on one GPU hfdist trains as fast as native DeepSpeed and takes no more memory.

    python examples/benchmarks/gpu.py --out raw.json       # one GPU, about 1 B parameters, under 4 minutes
    python examples/benchmarks/gpu.py --tiny               # the same on a CPU with a tiny model: tests this script only

World size 1, bf16 with fp32 masters, fused torch AdamW, no clipping, stages 0, 2 and 3 of both, one engine after the
other in one process (two would not fit), the order turned round by round so that both see the same clock speeds.
Printed: tokens per second, model FLOPs utilisation, peak allocated memory, and hfdist over DeepSpeed for each.

MFU counts 6 FLOPs a parameter and token (embedding table left out) and 12 x layers x width x sequence for attention,
over the card's dense bf16 peak (`--peak-tflops`, known for a few cards).
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import engines
import torch
import torch.distributed as dist
from torch import nn

STAGES = (0, 2, 3)
# Dense bf16 TFLOP/s by a part of the card's name, from the makers' data sheets.
PEAK_TFLOPS = {"H200": 989.0, "H100": 989.0, "A100": 312.0, "L40S": 362.0}


def build_llama(args: argparse.Namespace, device: torch.device) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=args.vocab,
        hidden_size=args.width,
        intermediate_size=args.width * 11 // 4,
        num_hidden_layers=args.layers,
        num_attention_heads=args.width // 128 or 1,
        num_key_value_heads=args.width // 128 or 1,
        max_position_embeddings=args.seq_len,
        use_cache=False,
    )
    with device:
        return LlamaForCausalLM(config).train()


def hfdist_step(model: nn.Module, stage: int) -> Callable[[torch.Tensor], torch.Tensor]:
    from hfdist import Accelerator, AmpPlugin, ZeroPlugin

    # "cast" is what DeepSpeed does: parameters and activations in bf16, no autocast.
    accelerator = Accelerator(plugins=[ZeroPlugin(stage=stage), AmpPlugin(dtype="bf16", compute="cast")])
    prepared, optimizer = accelerator.prepare(model, engines.build_optimizer(model))

    def step(ids: torch.Tensor) -> torch.Tensor:
        loss = prepared(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def deepspeed_step(model: nn.Module, stage: int, batch_size: int) -> Callable[[torch.Tensor], torch.Tensor]:
    if not torch.cuda.is_available():
        from hfdist.native import prepare_op_build

        prepare_op_build(os.environ)
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": batch_size,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage},
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": True},
        "communication_data_type": "fp32",
        "steps_per_print": 10**9,
    }
    if stage > 0:  # its stage 0 refuses to keep fp32 gradients beside bf16 parameters
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    engine, *_ = deepspeed.initialize(model=model, optimizer=engines.build_optimizer(model), config=config)

    def step(ids: torch.Tensor) -> torch.Tensor:
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


def run_one(name: str, args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Build, warm up, time; the memory of the engine before it must be gone."""
    kind, stage = name.split()
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    model = build_llama(args, device)
    numel = sum(p.numel() for p in model.parameters())
    step = hfdist_step(model, int(stage)) if kind == "hfdist" else deepspeed_step(model, int(stage), args.batch_size)
    del model
    ids = torch.randint(0, args.vocab, (args.batch_size, args.seq_len), device=device)
    losses = [float(step(ids)) for _ in range(args.warmup)]
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()  # of the steps, not of the building
    seconds = []
    for _ in range(args.steps):
        started = time.perf_counter()
        loss = step(ids)
        if on_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
        losses.append(float(loss))
    return {
        "seconds": seconds,
        "losses": losses,
        "parameters": numel,
        "peak_allocated": torch.cuda.max_memory_allocated() if on_gpu else None,
    }


def flops_per_token(args: argparse.Namespace, parameters: int) -> float:
    return 6.0 * (parameters - args.vocab * args.width) + 12.0 * args.layers * args.width * args.seq_len


def peak_tflops(args: argparse.Namespace) -> float | None:
    if args.peak_tflops is not None or not torch.cuda.is_available():
        return args.peak_tflops
    card = torch.cuda.get_device_name()
    return next((peak for part, peak in PEAK_TFLOPS.items() if part in card), None)


def show(args: argparse.Namespace, results: dict[str, Any]) -> None:
    peak = peak_tflops(args)
    speed: dict[str, float] = {}
    for name, runs in results.items():
        if isinstance(runs, str):
            print(f"{name:12} {runs}")
            continue
        seconds = statistics.median(second for run in runs for second in run["seconds"])
        speed[name] = args.batch_size * args.seq_len / seconds
        line = f"{name:12} {speed[name]:10.0f} tokens/s, loss {runs[0]['losses'][0]:.4f} -> {runs[0]['losses'][-1]:.4f}"
        if peak is not None:
            line += f", MFU {speed[name] * flops_per_token(args, runs[0]['parameters']) / peak / 1e12:6.1%}"
        if runs[0]["peak_allocated"] is not None:
            line += f", peak {max(run['peak_allocated'] for run in runs) / 1e9:.2f} GB"
        print(line)
    for stage in STAGES:
        ours, theirs = f"hfdist {stage}", f"deepspeed {stage}"
        if ours in speed and theirs in speed:
            print(f"{ours} / {theirs}: {speed[ours] / speed[theirs]:.3f} x the tokens per second")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=18)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=200, help="begin no further engine after so long")
    parser.add_argument("--peak-tflops", type=float)
    parser.add_argument("--tiny", action="store_true", help="on a CPU: tests this script, measures nothing")
    parser.add_argument("--out", type=engines.Path, help="write everything measured to this json file")
    args = parser.parse_args()
    if not args.tiny and not torch.cuda.is_available():
        parser.error("Got no GPU. Expected one that runs CUDA. Use --tiny to test this script on a CPU.")
    device = torch.device("cpu" if args.tiny else "cuda")
    if args.tiny:
        args.layers, args.width, args.vocab, args.batch_size, args.seq_len, args.steps = 2, 64, 128, 2, 16, 2
    else:
        os.environ.pop("ACCELERATE_USE_CPU", None)  # set by `engines` for its gloo ranks
        torch.cuda.set_device(0)
    dist.init_process_group("gloo" if args.tiny else "cpu:gloo,cuda:nccl", rank=0, world_size=1, store=dist.HashStore())
    os.environ.setdefault("LOCAL_RANK", "0")
    names = [f"{kind} {stage}" for stage in STAGES for kind in ("hfdist", "deepspeed")]
    results: dict[str, Any] = {}
    began = time.monotonic()
    for number in range(args.rounds):
        for name in names if number % 2 == 0 else reversed(names):
            if time.monotonic() - began > args.seconds or isinstance(results.get(name), str):
                continue
            try:
                results.setdefault(name, []).append(run_one(name, args, device))
            except Exception as error:  # the others go on; the row says why
                results[name] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            gc.collect()
            if not args.tiny:
                torch.cuda.empty_cache()
    print(
        f"{torch.cuda.get_device_name() if not args.tiny else 'CPU, tiny: no measurement'}, commit {engines.commit()}"
    )
    show(args, results)
    engines.write_raw(args.out, args, results)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
