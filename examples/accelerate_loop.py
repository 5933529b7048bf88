"""A drop-in: an ordinary Accelerate script, in which only the import of Accelerator changed.

    accelerate launch --config_file accelerate_configs/zero3.yaml examples/accelerate_loop.py
    accelerate launch --config_file accelerate_configs/zero1.yaml examples/accelerate_loop.py     # another technique
    HFDIST_ENGINE=native accelerate launch --config_file accelerate_configs/fsdp.yaml examples/accelerate_loop.py

The loop is the one of accelerate's own examples, scheduler included: prepared, it steps `num_processes` times per
update, and so its length is multiplied by `num_processes`. The printed losses are the same whatever the config."""

import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, get_linear_schedule_with_warmup

from hfdist import Accelerator  # was: from accelerate import Accelerator

STEPS, BATCH_SIZE = 30, 12


def make_data() -> list[dict[str, torch.Tensor]]:
    """Counting sequences modulo 97: something a small model learns in seconds."""
    generator = torch.Generator().manual_seed(0)
    starts = torch.randint(0, 97, (STEPS * BATCH_SIZE,), generator=generator)
    strides = torch.randint(1, 7, (STEPS * BATCH_SIZE,), generator=generator)
    rows = (starts[:, None] + strides[:, None] * torch.arange(32)) % 97
    return [{"input_ids": row, "labels": row} for row in rows]


def main() -> None:
    accelerator = Accelerator()
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=97,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(make_data(), batch_size=BATCH_SIZE // accelerator.num_processes)
    scheduler = get_linear_schedule_with_warmup(optimizer, 0, STEPS * accelerator.num_processes)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    model.train()
    for step, batch in enumerate(loader):
        loss = model(**batch).loss
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        mean = accelerator.reduce(loss.detach(), reduction="mean").item()
        if step % 5 == 0 or step == STEPS - 1:
            accelerator.print(
                f"step {step}  loss {mean:.6f}  norm {float(norm):.4f}  lr {scheduler.get_last_lr()[0]:.2e}"
            )
    accelerator.end_training()


if __name__ == "__main__":
    main()
