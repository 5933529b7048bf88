"""ZeRO-3: each rank keeps 1/N of everything; what does not fit on one rank trains on N.

The idea. As ZeRO-2, and the parameters too are only there as shards. A block's whole parameters are gathered just
before it runs, forward and again backward, and dropped after. The model never exists on one rank: with a checkpoint
to load (`--model`), `from_pretrained` reads straight into the shards, since an Accelerator is alive.

Wires, in units of (N-1)/N x 4P bytes sent by each rank; an optimizer step of k micro-steps costs 2k gathers + k
reduces. P = 9,445,440, N = 2, k = 1: 3 x 18.9 = 56.7 MB, one and a half times DDP's: what the memory is paid with.
(51.4 are sent: the embedding stays whole from forward to backward.)

Memory per rank (fp32, AdamW); DDP's is 16P = 151 MB whatever N:
    kept      parameters 4P/N + gradients 4P/N + optimizer 8P/N = 16P/N      N = 2: 75.6 MB   N = 4: 37.8   N = 64: 2.4
    in a step also what is whole at the time: a block, and the embedding, which is most of this small model's root: a
              peak of 105 MB for N = 2. With more blocks it tends to 16P/N.

    accelerate launch recipes/zero3.py
    accelerate launch --config_file accelerate_configs/zero3.yaml recipes/zero3.py --steps 50
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
