"""FSDP: accelerate's own Fully Sharded Data Parallel (version 2), for comparison with zero3.

The idea is ZeRO-3's: shards of everything, whole parameters for one block at a time. Here the yaml's FSDP section
runs on accelerate's engine, which hands the blocks that its wrap policy names to torch's `fully_shard`. Without
`engine="native"` the same yaml runs on hfdist's engine, which is what zero3 shows; the losses are the same.

Wires. 2k gathers + k reduces of (N-1)/N x 4P per optimizer step of k micro-steps, P = 9,445,440, N = 2: 56.7 MB. On
a CPU gloo runs a reduce-scatter as a whole all-reduce, so that this engine sends 75.6 MB there (hfdist's zero3 does
not).

Memory per rank (fp32, AdamW): 16P/N = 75.6 MB for N = 2, plus the one or two blocks that are whole at the time.

    accelerate launch recipes/fsdp.py
    accelerate launch --config_file accelerate_configs/fsdp.yaml recipes/fsdp.py --steps 50
"""

from hfdist.recipe import Run, begin, build_loader, build_optimizer, load_data, load_model, load_tokenizer, save_model
from hfdist.report import show_report


def main() -> None:
    args = begin(__file__, engine="native")
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

    run = Run(args, data, model, optimizer, accelerator=accelerator, zero_stage=3)
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
