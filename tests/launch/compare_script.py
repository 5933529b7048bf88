"""An ordinary Accelerate loop for `tests/launch/test_compare.py`: shuffled data, accumulation, a scheduler.

Nothing in it knows of hfdist, and nothing clips: the yaml asks for that, and every engine has to.
`compare_script.py --no-ddp` refuses to be wrapped in DDP, as some models do.
"""

import sys

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    accelerator = Accelerator(gradient_accumulation_steps=2)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    inputs = torch.randn(96, 8, generator=torch.Generator().manual_seed(1))
    loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=4, shuffle=True)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=40 * accelerator.num_processes)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    if "--no-ddp" in sys.argv and type(model).__name__ == "DistributedDataParallel":
        raise RuntimeError("this model does not like DDP")
    for _ in range(4):
        for batch, target in loader:
            with accelerator.accumulate(model):
                loss = (model(batch) - target).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    raise AssertionError("compare stops the script before its end")


if __name__ == "__main__":
    main()
