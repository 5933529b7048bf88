"""3D: pipeline x data x tensor parallelism in one run, with the optimizer state sharded (ZeRO-1) over the data axis.

The idea. Each axis has a cost of its own: tensor parallelism sends most and so has neighbouring ranks, pipelines send
least and have the furthest, data parallelism in between. Eight ranks as 2 x 2 x 2:

    stage 0 (first layers)   data 0: ranks 0 1 split each layer    data 1: ranks 2 3
    stage 1 (last layers)    data 0: ranks 4 5                     data 1: ranks 6 7

Ranks 0, 1, 4, 5 have one model between them and read the same batches. With `--num-processes 4` there is one of these.
Any ZeRO stage goes with it, and `accelerator.set_zero_stage(n)` works here as well.

Wires per rank and step: tensor 2 all-reduces a block and pass; pipeline hidden x tokens x 4 bytes a cut and way, 320 x
6 x 128 x 4 = 0.98 MB for the batch of one data rank, and the tied embedding's gradient; data 2 (N-1)/N x 4 bytes for
each parameter the rank has.

Memory per rank (fp32, AdamW): of P / (2 x 2) parameters 8 bytes for values and gradients and 8/2 for the optimizer's
state: 12 x 9,445,440 / 4 = 28.3 MB, plus the second copy of the tied embedding.

    accelerate launch recipes/parallel_3d.py
    accelerate launch --config_file accelerate_configs/parallel_3d.yaml recipes/parallel_3d.py --steps 50
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
