"""PipeDream-2BW: a pipeline that is never flushed; gradients come one step late, and nobody waits.

The idea (Narayanan et al. 2020). A flush at every update is what leaves ranks idle. Without it, forwards of the next
batch follow those of this one, and each batch runs forward and backward with the weights that were current when it
began: two versions are kept.

    rank 0   F0 F1 F2 B0 F3 B1 F4 B2 ...      once it runs no rank is idle
    rank 1   .  F0 B0 F1 B1 F2 B2 F3 ...

Update t uses the gradients of batch t-1 at the weights of update t-1: w[t+1] = w[t] - lr x g(w[t-1]). So the curve is
not one process's: it is that of gradients delayed by one step. The loss that a step returns, and the norm that clips,
are of the last finished batch. An evaluation or the end drains what is in flight.

Wires, per step and cut: hidden x tokens x 4 bytes forward and as much backward, 320 x 12 x 128 x 4 = 1.97 MB each way;
and the gradient of the tied embedding, which the first and the last rank have: 8192 x 320 x 4 = 10.5 MB.

Memory per rank (fp32, AdamW): as pipeline_1f1b, and a second version of the weights, 4 of 20 bytes: 121 MB for P =
9,445,440 and N = 2.

    accelerate launch recipes/pipeline_pipedream.py
    accelerate launch --config_file accelerate_configs/pipeline_pipedream.yaml recipes/pipeline_pipedream.py --steps 50
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
