"""ZeRO-2: each rank keeps the optimizer state and the gradients of its own 1/N of the parameters.

The idea. As ZeRO-1, but gradients are reduced to their owner as soon as a block's backward is done, in every
micro-step: no rank ever holds more than one block's whole gradients.

Wires, in units of (N-1)/N x 4P bytes sent by each rank; an optimizer step of k micro-steps costs 1 gather + k reduce.
P = 9,445,440, N = 2, k = 1: 37.8 MB, as DDP; with k = 4: 94.5 MB, the price of never holding whole gradients.

Memory per rank (fp32, AdamW); DDP's is 16P = 151 MB whatever N:
    kept      parameters 4P/N + gradients 4P/N + optimizer 8P/N = 16P/N      N = 2: 75.6 MB   N = 4: 37.8   N = 64: 2.4
    in a step also the whole working copy, 4P = 37.8 MB, and one block's gradients: a peak of 112 MB for N = 2, k = 1

    accelerate launch recipes/zero2.py
    accelerate launch --config_file accelerate_configs/zero2.yaml recipes/zero2.py --steps 50
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
