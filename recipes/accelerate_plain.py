"""Plain Accelerate: the loop that every other recipe keeps.

The idea. `accelerate.Accelerator` wraps the model in torch's DistributedDataParallel, deals the batches to the ranks
and moves tensors to devices. hfdist trains nothing here, it only supplies arguments, data and the report; this is
the script that the other recipes start from, and the curve they are held against.

Wires. Each rank computes the gradients of its own micro-batch; all-reduces average them bucket by bucket while backward
still runs: 2 (N-1)/N x 4P bytes sent by each rank per optimizer step. P = 9,445,440 parameters on N = 2 ranks: 37.8 MB.

Memory per rank (fp32, AdamW). Nothing is sharded, so N does not help:
    parameters 4P + gradients 4P + optimizer 8P = 16P = 151 MB       (gradients live in DDP's buckets, as views)

    accelerate launch recipes/accelerate_plain.py
    accelerate launch --config_file accelerate_configs/accelerate_plain.yaml recipes/accelerate_plain.py --steps 50
"""

from hfdist.recipe import Run, begin, build_loader, build_optimizer, load_data, load_model, load_tokenizer, save_model
from hfdist.report import show_report


def main() -> None:
    args = begin(__file__, engine="none")
    from accelerate import Accelerator

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

    run = Run(args, data, model, optimizer, accelerator=accelerator, zero_stage=0)
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
