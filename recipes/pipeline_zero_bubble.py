"""Zero-bubble: backward in two halves, of which the second can wait and so fills the gaps.

The idea (Qi et al. 2024). A backward computes the gradient of its input, which the rank before waits for, and that of
the weights, which nobody waits for until the update. Done apart (I and W), the second half goes where a rank would
idle:

    rank 0   F0 F1 .  I0 F2 I1 W0 F3 I2 W1 ...
    rank 1   .  F0 I0 F1 I1 W0 F2 I2 W1 ...

torch's interleaved zero-bubble order, 2 stages a rank; `hfdist schedule zero-bubble zbv --plot x.png` draws it and the
V-shaped one. Same gradient as one process.

Wires, per step: 2N - 1 cuts, each hidden x tokens x 4 bytes forward and as much backward, 320 x 12 x 128 x 4 = 1.97 MB
each way and cut; and the gradient of the tied embedding, which two ranks have: 8192 x 320 x 4 = 10.5 MB.

Memory per rank (fp32, AdamW): 16 bytes for each parameter it owns; the tied embedding is on both ends. P = 9,445,440,
N = 2: 16 (P + 8192 x 320) / 2 = 96.5 MB. What a W needs is held until it has run.

    accelerate launch recipes/pipeline_zero_bubble.py
    accelerate launch --config_file accelerate_configs/pipeline_zero_bubble.yaml recipes/pipeline_zero_bubble.py
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
