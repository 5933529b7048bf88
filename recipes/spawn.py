"""Spawn: data parallel with nothing but torch.multiprocessing and one all-reduce.

The idea. One process starts N others with `torch.multiprocessing.spawn`; they find each other through a file, so
that no port is needed. Each computes gradients on its own micro-batches; then all gradients are laid end to end,
summed over the ranks by one all-reduce and divided by N. That is all of data parallelism, in the six lines of
`average_gradients`; DDP adds buckets, so that the wire is busy while backward still runs.

Wires. 2 (N-1)/N x 4P bytes sent by each rank per optimizer step. P = 9,445,440, N = 2: 37.8 MB, as DDP, in one message.

Memory per rank (fp32, AdamW). 16P = 151 MB as DDP, and another 4P = 37.8 MB for the flat message while it is under way.

`accelerate launch` starts one process here; this recipe starts its own (one per device, or 2; or --num-processes).

    accelerate launch recipes/spawn.py --num-processes 2
    accelerate launch --config_file accelerate_configs/spawn.yaml recipes/spawn.py --steps 50
"""

import tempfile
from itertools import islice

import torch
import torch.distributed as dist

from hfdist.recipe import Run, begin, build_loader, build_optimizer, load_data, load_model, load_tokenizer, save_model
from hfdist.report import show_report


def average_gradients(model: torch.nn.Module) -> None:
    """Replace each gradient by its mean over the ranks."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    flat = torch.cat([g.flatten() for g in gradients])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for gradient, mean in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(mean.view_as(gradient))


def train(rank: int, args, num_processes: int, directory: str) -> None:
    has_devices = torch.cuda.device_count() >= num_processes
    device = torch.device("cuda", rank) if has_devices else torch.device("cpu")
    dist.init_process_group(
        "nccl" if has_devices else "gloo",
        init_method=f"file://{directory}/store",
        rank=rank,
        world_size=num_processes,
        device_id=device if has_devices else None,
    )
    accumulation = args.gradient_accumulation_steps or 1
    data = load_data(args, load_tokenizer(args))
    model = load_model(args).to(device)
    optimizer, scheduler = build_optimizer(model, args)
    loader = build_loader(data, args, num_processes=num_processes, accumulation=accumulation)

    run = Run(args, data, model, optimizer, zero_stage=0, accumulation=accumulation)
    run.evaluate(model)
    for number, batch in enumerate(run.batches(islice(loader, rank, None, num_processes)), start=1):
        loss = model(**batch).loss
        (loss / accumulation).backward()
        is_last = number % accumulation == 0
        if is_last:
            average_gradients(model)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        run.log(loss)
        if is_last:
            optimizer.zero_grad()
            scheduler.step()
    run.evaluate(model)
    if rank == 0:
        save_model(None, model, data.tokenizer, args.save)
    show_report(run.finish(), plot=args.plot)
    dist.destroy_process_group()


def main() -> None:
    args = begin(__file__, engine="none", processes="one")
    num_processes = args.num_processes or torch.cuda.device_count() or 2
    args.micro_batch_size(num_processes=num_processes, accumulation=args.gradient_accumulation_steps or 1)
    with tempfile.TemporaryDirectory() as directory:
        torch.multiprocessing.spawn(train, args=(args, num_processes, directory), nprocs=num_processes)


if __name__ == "__main__":
    main()
