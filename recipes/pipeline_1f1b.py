"""1F1B: as GPipe, but each backward as soon as it can run, so that fewer activations wait.

The idea (PipeDream-flush, Narayanan et al. 2021). A rank runs as many forwards as there are ranks behind it, then one
backward for each further forward:

    rank 0   F0 F1 .  B0 F2 B1 F3 B2 .  B3      (N = 2, m = 4)
    rank 1   .  F0 B0 F1 B1 F2 B2 F3 B3 .       idle (N-1)/(m+N-1), as GPipe's

Same gradient, same idle time; but rank r holds the activations of at most N - r micro-batches instead of all m.

Wires, per step and cut: hidden x tokens x 4 bytes forward and as much backward, 320 x 12 x 128 x 4 = 1.97 MB each way;
and the gradient of the tied embedding, which the first and the last rank have: 8192 x 320 x 4 = 10.5 MB.

Memory per rank (fp32, AdamW): 16 bytes for each parameter it owns; the tied embedding is on both ends. P = 9,445,440,
N = 2: 16 (P + 8192 x 320) / 2 = 96.5 MB.

    accelerate launch recipes/pipeline_1f1b.py
    accelerate launch --config_file accelerate_configs/pipeline_1f1b.yaml recipes/pipeline_1f1b.py --steps 50
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
