"""ZeRO-1: each rank keeps the optimizer state of its own 1/N of the parameters.

The idea. Under DDP all N ranks hold the same Adam moments and make the same update. Here a rank averages, updates
and owns only its shard; the updated shards are then gathered into every rank's whole working copy, which forward and
backward use.

Wires, in units of (N-1)/N x 4P bytes sent by each rank; an optimizer step of k micro-steps costs 1 gather + 1 reduce:
gradients stay whole until the last micro-step, so k does not matter. P = 9,445,440, N = 2: 2 x 18.9 = 37.8 MB, as DDP.

Memory per rank (fp32, AdamW); DDP's is 16P = 151 MB whatever N:
    kept      parameters 4P/N + gradients 4P/N + optimizer 8P/N = 16P/N      N = 2: 75.6 MB   N = 4: 37.8   N = 64: 2.4
    in a step also the whole working copy, 4P = 37.8 MB, and gradients that wait: a peak of 112 MB for N = 2, k = 1

Change `zero_stage: 1` in the yaml and this file is zero2 or zero3: the loop is accelerate_plain's, with another import.

    accelerate launch recipes/zero1.py
    accelerate launch --config_file accelerate_configs/zero1.yaml recipes/zero1.py --steps 50
"""

from hfdist.recipe import Run, begin, build_loader, build_optimizer, load_data, load_model, load_tokenizer, save_model
from hfdist.report import show_report


def main() -> None:
    args = begin(__file__)
    from hfdist import Accelerator

    accelerator = Accelerator(**args.accelerator_options())
    data = load_data(args, load_tokenizer(args))
    model = load_model(args)
    optimizer, scheduler = build_optimizer(model, args)
    loader = build_loader(
        data,
        args,
        num_processes=accelerator.num_processes,
        accumulation=accelerator.gradient_accumulation_steps,
    )
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    run = Run(args, data, model, optimizer, accelerator=accelerator)
    run.evaluate(model)
    for batch in run.batches(loader):
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            run.log(loss)
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            scheduler.step()
    run.evaluate(model)
    save_model(accelerator, model, data.tokenizer, args.save)
    show_report(run.finish(), plot=args.plot)


if __name__ == "__main__":
    main()
