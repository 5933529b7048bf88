"""DeepSpeed itself: the same yaml section that hfdist reads, run by DeepSpeed's engine through accelerate's plugin.

The idea. `deepspeed_config: {zero_stage: 3}` means ZeRO-3 whoever runs it. hfdist runs it on torch FSDP2 and never
imports deepspeed; with `engine="native"` (or HFDIST_ENGINE=native around any script) accelerate hands it to
DeepSpeed, on a CPU machine too. The loop is the same: DeepSpeed's engine steps inside `accelerator.backward`. Its
first start on a machine compiles a communication kernel (a minute, once). The yaml names `gradient_clipping`: left
out, DeepSpeed clips at 1.0.

Wires. ZeRO-3: 2k gathers + k reduces of (N-1)/N x 4P per optimizer step, P = 9,445,440, N = 2, k = 1: 56.7 MB is the
bound. DeepSpeed keeps small models whole between forward and backward (`stage3_max_live_parameters`), which saves a
gather.

Memory per rank (fp32, AdamW): 16P/N = 75.6 MB by the formula; DeepSpeed adds flat fp32 masters (4P/N) beside the shards
and gradient buffers of its own: a `reduce_bucket_size` of 5e8 elements is 2 GB at the peak, hardly touched.

    accelerate launch recipes/deepspeed_native.py
    accelerate launch --config_file accelerate_configs/deepspeed_native.yaml recipes/deepspeed_native.py --steps 50
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
