"""fp16 with dynamic loss scaling: compute in half the bytes where bf16 does not exist.

The idea. fp16 has 11 bits of precision but loses gradients below 6e-8. The loss is multiplied by a scale (first 65,536)
before backward and the gradients divided by it before the step. A non-finite gradient anywhere means that the scale was
too high: all ranks agree to skip that step, halve the scale and hold the scheduler; after 2,000 good steps it doubles.
The optimizer steps fp32 masters. `mixed_precision: fp16` in the yaml is all that asks for it, on a CPU too (slow there:
10x fp32, so the defaults of this recipe are small).

Wires. Gradients are reduced in fp32: 2 (N-1)/N x 4P bytes, P = 615,232 (`--model tiny`), N = 2: 2.5 MB; and one number
a step in which the ranks agree whether it overflowed.

Memory per rank (stage 0, AdamW): fp32 masters 4P + gradients 4P + optimizer 8P = 16P = 9.8 MB; while computing one
block at a time is there in fp16 too.

    accelerate launch recipes/amp_fp16.py
    accelerate launch --config_file accelerate_configs/amp_fp16.yaml recipes/amp_fp16.py --steps 50
"""

from hfdist.recipe import Run, begin, build_loader, build_optimizer, load_data, load_model, load_tokenizer, save_model
from hfdist.report import show_report


def main() -> None:
    args = begin(__file__, defaults={"model": "tiny", "steps": 30})
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
        if accelerator.sync_gradients and not accelerator.optimizer_step_was_skipped:
            scheduler.step()
    run.evaluate(model)
    save_model(accelerator, model, data.tokenizer, args.save)
    show_report(run.finish(), plot=args.plot)


if __name__ == "__main__":
    main()
