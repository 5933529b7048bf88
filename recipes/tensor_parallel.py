"""Tensor parallelism: every layer split over the ranks, which compute each token together.

The idea (Megatron-LM, Shoeybi et al. 2019). Attention by heads, the MLP by its inner width: the first matrix of a pair
is cut by columns, the second by rows, so that a pair needs one sum over the ranks and no rank ever sees the inside of
another's half. The vocabulary is split too: the embedding looks up what it has, the head computes its part of the
logits, and the loss is taken from the parts, so that no rank holds the logits of all words.

    x -> [Wq Wk Wv | by heads] -> attention of own heads -> [Wo by rows] -> sum over ranks -> ...

The plan is transformers' own where the model has one, else found from its structure and tried on a small copy first.

Wires, per block: 2 all-reduces of hidden x tokens x 4 bytes forward and 2 backward, each 2 (N-1)/N of it. 320 x 12 x
128 x 4 = 1.97 MB; 6 blocks, N = 2: 24 x 1.97 = 47.2 MB a step, and a few for the embedding and the loss. So it wants
the fastest wires there are: it is the innermost axis.

Memory per rank (fp32, AdamW): 16P/N but for the norms, 75.6 MB for P = 9,445,440 and N = 2; activations between pairs
are whole on every rank.

    accelerate launch recipes/tensor_parallel.py
    accelerate launch --config_file accelerate_configs/tensor_parallel.yaml recipes/tensor_parallel.py --steps 50
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
