"""Live switching: one run through the ZeRO stages 0, 3, 1, 2, and the loss never notices.

The idea. The stage is a decision about where things lie, not about what is computed. `accelerator.set_zero_stage(n)`
between two steps lays parameters, gradients and optimizer state out anew: no restart, nothing written to disk,
momentum, schedule and scaler as they were. Start replicated and fast; shard when memory gets short (longer
sequences, a second model), and go back when it is there again. The run's curve equals zero3's and
accelerate_plain's.

Wires of a switch. From 0 to a sharded stage a rank drops what others keep: nothing is sent. Between 1, 2 and 3 only the
policy changes. Back to 0 parameters and optimizer state are gathered, (N-1)/N x 12P. In steps each stage costs what it
costs alone: see zero1, zero2, zero3.

Memory per rank after each switch (fp32, AdamW, P = 9,445,440, N = 2; gradients are dropped then): the recipe prints
it.
    stage 0: parameters 4P + optimizer 8P = 113 MB      stages 3, 1, 2: 12P/N = 56.7 MB      never both layouts at once

    accelerate launch recipes/zero_switch.py
    accelerate launch --config_file accelerate_configs/zero_switch.yaml recipes/zero_switch.py --steps 50
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
    # In four equal parts: the stage that begins after this many steps.
    switches = {-(-args.steps * part // 4): stage for part, stage in ((1, 3), (2, 1), (3, 2))}
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
            if run.step in switches:
                accelerator.set_zero_stage(switches[run.step])
                run.switched(accelerator.zero_stage)
    run.evaluate(model)
    save_model(accelerator, model, data.tokenizer, args.save)
    show_report(run.finish(), plot=args.plot)


if __name__ == "__main__":
    main()
