"""DDP by hand: torch's DistributedDataParallel without an Accelerator around it.

The idea. All ranks hold the same model and work on different micro-batches. DistributedDataParallel hooks each
parameter's gradient: as soon as a bucket of them is ready in backward, an all-reduce averages it over the ranks,
while backward goes on below. Equal weights + equal gradients = equal weights after the step; nothing else is ever
exchanged. Of k micro-steps only the last one reduces: `no_sync()` keeps the others local. Compare with spawn, which
reduces by hand, and with accelerate_plain, where all this is inside `prepare`, `backward` and `accumulate`.

Wires. 2 (N-1)/N x 4P bytes sent by each rank per optimizer step, whatever k. P = 9,445,440, N = 2: 37.8 MB.

Memory per rank (fp32, AdamW). Nothing is sharded, so N does not help:
    parameters 4P + gradients 4P + optimizer 8P = 16P = 151 MB     (`gradient_as_bucket_view`: else 4P more for buckets)

    accelerate launch recipes/ddp.py
    accelerate launch --config_file accelerate_configs/ddp.yaml recipes/ddp.py --steps 50
"""

import os
from contextlib import nullcontext
from itertools import islice

from hfdist.recipe import Run, begin, build_loader, build_optimizer, load_data, load_model, load_tokenizer, save_model
from hfdist.report import show_report


def main() -> None:
    args = begin(__file__, engine="none")
    import torch
    from accelerate import PartialState
    from torch.nn.parallel import DistributedDataParallel

    from hfdist.launch import has_accelerator_each

    # Reads the launcher's environment, joins the process group, picks this rank's device.
    ranks = PartialState(cpu=not has_accelerator_each(os.environ))
    accumulation = args.gradient_accumulation_steps or 1
    data = load_data(args, load_tokenizer(args))
    model = load_model(args).to(ranks.device)
    optimizer, scheduler = build_optimizer(model, args)
    loader = build_loader(data, args, num_processes=ranks.num_processes, accumulation=accumulation)
    if ranks.num_processes > 1:
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)

    run = Run(args, data, model, optimizer, zero_stage=0, accumulation=accumulation)
    run.evaluate(model)
    # Micro-batches are dealt like cards: rank r takes r, r + N, r + 2N, ...
    mine = islice(loader, ranks.process_index, None, ranks.num_processes)
    for number, batch in enumerate(run.batches(mine), start=1):
        is_last = number % accumulation == 0
        with nullcontext() if is_last or ranks.num_processes == 1 else model.no_sync():
            loss = model(**batch).loss
            (loss / accumulation).backward()
        if is_last:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        run.log(loss)
        if is_last:
            optimizer.zero_grad()
            scheduler.step()
    run.evaluate(model)
    if ranks.is_main_process:
        save_model(None, getattr(model, "module", model), data.tokenizer, args.save)
    show_report(run.finish(), plot=args.plot)
    ranks.destroy_process_group()


if __name__ == "__main__":
    main()
