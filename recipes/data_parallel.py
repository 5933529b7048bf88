"""DataParallel: one process, all of the machine's devices, one line.

The idea. `torch.nn.DataParallel` splits each batch over the devices, copies the model to every one of them, runs a
thread a device, and brings outputs and gradients back to the first. It is the oldest and easiest of them all and
what to use last: the copy happens in every forward, one device does more than the others, and Python's lock is
shared. On a machine without devices it falls to the module itself, and this recipe then is the run in one process
that others are held against.

Wires, inside the machine, D devices: per forward the first device sends 4P (D-1) bytes of parameters, per backward it
receives as much of gradients. P = 9,445,440, D = 2: 37.8 MB each way; without devices 0.

Memory of the first device (fp32, AdamW): 16P = 151 MB; of each other one 8P = 75.6 MB while a step runs.

    accelerate launch recipes/data_parallel.py
    accelerate launch --config_file accelerate_configs/data_parallel.yaml recipes/data_parallel.py --steps 50
"""

from hfdist.recipe import Run, begin, build_loader, build_optimizer, load_data, load_model, load_tokenizer, save_model
from hfdist.report import show_report


def main() -> None:
    args = begin(__file__, engine="none", processes="one")
    import torch

    num_devices = torch.cuda.device_count()
    device = torch.device("cuda" if num_devices else "cpu")
    if num_devices < 2:
        print(f"DataParallel over {num_devices or 'no'} device(s): it runs the module itself, in one process.")
    accumulation = args.gradient_accumulation_steps or 1
    data = load_data(args, load_tokenizer(args))
    model = load_model(args).to(device)
    optimizer, scheduler = build_optimizer(model, args)
    loader = build_loader(data, args, num_processes=1, accumulation=accumulation)
    parallel = torch.nn.DataParallel(model)

    run = Run(args, data, parallel, optimizer, zero_stage=0, accumulation=accumulation)
    run.evaluate(model)
    for number, batch in enumerate(run.batches(loader), start=1):
        loss = parallel(**batch).loss.mean()  # one loss a device
        (loss / accumulation).backward()
        is_last = number % accumulation == 0
        if is_last:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        run.log(loss)
        if is_last:
            optimizer.zero_grad()
            scheduler.step()
    run.evaluate(model)
    save_model(None, model, data.tokenizer, args.save)
    show_report(run.finish(), plot=args.plot)


if __name__ == "__main__":
    main()
