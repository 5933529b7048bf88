"""bf16: compute in half the bytes, keep the weights in fp32.

The idea. bf16 has fp32's range and 8 bits of precision: enough for products, too few to add a small update to a
weight. So forward and backward run on a bf16 copy under autocast (norms, softmax and the loss stay fp32), and the
optimizer steps fp32 masters. No loss scale is needed. The loss follows accelerate_plain's within bf16's precision
(about 1e-2), not 1e-4. `mixed_precision: bf16` in the yaml is all that asks for it; it composes with every ZeRO
stage.

Wires. Gradients are reduced in fp32 as without it: 2 (N-1)/N x 4P bytes, P = 9,445,440, N = 2: 37.8 MB. At stages 1
to 3 the gathers move bf16, half the bytes.

Memory per rank (stage 0, AdamW): fp32 masters 4P + gradients 4P + optimizer 8P = 16P = 151 MB; while computing one
block at a time is there in bf16 too. Activations, which this small model has few of, halve.

    accelerate launch recipes/amp_bf16.py
    accelerate launch --config_file accelerate_configs/amp_bf16.yaml recipes/amp_bf16.py --steps 50
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
