"""A plain Accelerate loop, as a user has it, that writes what it saw: `probe.py OUTPUT_DIRECTORY [engine]`.

It imports accelerate only; `-m hfdist.run` puts hfdist under it. With a second argument "hfdist" it imports hfdist.
"""

import json
import os
import sys

import torch

if sys.argv[2:] == ["hfdist"]:
    from hfdist import Accelerator
else:
    from accelerate import Accelerator


def main() -> None:
    accelerator = Accelerator()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.DataLoader(torch.arange(32.0).view(8, 4) / 32, batch_size=2)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    for batch in data:
        with accelerator.accumulate(model):
            loss = model(batch).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    ranks = accelerator.gather(torch.tensor([accelerator.process_index], device=accelerator.device)).tolist()
    weights = accelerator.get_state_dict(model)
    settings = getattr(accelerator, "settings", None)
    seen = {
        "argv": sys.argv[1:],
        "engine": type(accelerator).__module__,
        "type": str(accelerator.distributed_type),
        "num_processes": accelerator.num_processes,
        "ranks": ranks,  # all ranks of one group, if they are one
        "backend": torch.distributed.get_backend() if torch.distributed.is_initialized() else None,
        "stage": settings.zero.stage if settings else None,
        "dp_replicate_size": settings.zero.dp_replicate_size if settings else None,
        "clipping": settings.gradient_clipping if settings else None,
        "accumulation": accelerator.gradient_accumulation_steps,
        "precision": accelerator.mixed_precision,
        "scheduler_step": settings.scheduler_step if settings else None,
        "notices": list(settings.notices) if settings else [],
        "deepspeed_imported": "deepspeed" in sys.modules,
        "weight_sum": sum(float(value.double().sum()) for value in weights.values()) if weights else None,
        "left_over": sorted(name for name in os.environ if name.startswith("ACCELERATE_USE_")),
    }
    with open(os.path.join(sys.argv[1], f"rank{accelerator.process_index}.json"), "w") as file:
        json.dump(seen, file)
    accelerator.wait_for_everyone()
    accelerator.end_training()


main()
