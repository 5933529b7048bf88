"""Naive model parallel: layers over ranks, one batch at a time. The baseline that pipelines improve on.

The idea. Each rank has consecutive layers, and hands its output to the next. A model that does not fit on one rank
fits on several; but while one computes all others wait, so N ranks take as long as one:

    rank 0   F . . B          idle (N-1)/N of the time: 50 % for N = 2, 75 % for N = 4
    rank 1   . F B .

It is GPipe with one micro-batch, and that is what the config says. The loop is any loop: `model(**batch)` returns the
same loss on every rank.

Wires, per step: what passes between two ranks, hidden x tokens x 4 bytes forward and as much backward: 320 x 12 x 128
x 4 = 1.97 MB each way; and the gradient of the tied embedding, which the first and the last rank have: 8192 x 320 x 4
= 10.5 MB. No other weight or gradient moves: each has one owner.

Memory per rank (fp32, AdamW): 16 bytes for each parameter it owns; the tied embedding is on both ends. P = 9,445,440,
N = 2: 16 (P + 8192 x 320) / 2 = 96.5 MB.

    accelerate launch recipes/model_parallel.py
    accelerate launch --config_file accelerate_configs/model_parallel.yaml recipes/model_parallel.py --steps 50
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
        num_processes=accelerator.dp_size,
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
