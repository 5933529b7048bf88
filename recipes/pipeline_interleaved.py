"""Interleaved 1F1B: several short stages a rank, so that the pipeline fills and empties faster.

The idea (Narayanan et al. 2021, section 2.2). Of 2N stages rank r has the r-th and the (N+r)-th. A micro-batch passes
every rank twice, and each pass is half as long: what a rank waits for at the beginning and the end is half as long
too.

    idle (N-1)/(vm+N-1): 11 % for N = 2, m = 4 and v = 2 stages a rank; 20 % without

Paid with v times the messages. m must be a multiple of N.

Wires, per step: 2N - 1 cuts, each hidden x tokens x 4 bytes forward and as much backward, 320 x 12 x 128 x 4 = 1.97 MB
each way and cut; and the gradient of the tied embedding, which two ranks have: 8192 x 320 x 4 = 10.5 MB.

Memory per rank (fp32, AdamW): 16 bytes for each parameter it owns; the tied embedding is on both ends. P = 9,445,440,
N = 2: 16 (P + 8192 x 320) / 2 = 96.5 MB.

    accelerate launch recipes/pipeline_interleaved.py
    accelerate launch --config_file accelerate_configs/pipeline_interleaved.yaml recipes/pipeline_interleaved.py
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
