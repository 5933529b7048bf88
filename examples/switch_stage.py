"""Change the ZeRO stage while training: replicated while memory allows, sharded when a second phase needs more.

    accelerate launch --config_file accelerate_configs/zero_switch.yaml examples/switch_stage.py

Prints the bytes that the main rank holds at each stage, and losses that go on as if nothing had happened.
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hfdist import Accelerator


def main() -> None:
    accelerator = Accelerator()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    tokens = torch.randint(0, 512, (8, 64), generator=torch.Generator().manual_seed(accelerator.process_index))
    tokens = tokens.to(accelerator.device)

    for stage in (0, 3, 1, 2, 0):
        accelerator.set_zero_stage(stage)
        for _ in range(5):
            loss = model(input_ids=tokens, labels=tokens).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        held = accelerator.memory_report()
        megabytes = (held.parameters + held.gathered + held.optimizer) / 1e6
        mean = accelerator.reduce(loss.detach(), reduction="mean").item()
        accelerator.print(f"stage {stage}: loss {mean:.6f}, parameters and optimizer {megabytes:.2f} MB a rank")
    accelerator.end_training()


if __name__ == "__main__":
    main()
