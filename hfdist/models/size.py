"""The size of a model as `plan` wants it: shapes of its blocks and of its root."""

from __future__ import annotations

from torch import nn

from hfdist.models.blocks import find_blocks
from hfdist.plan.sizes import ModelSize, Unit


def model_size(model: nn.Module, blocks: list[tuple[str, nn.Module]] | None = None) -> ModelSize:
    """Shapes by unit, the same before and after sharding. 0-dim parameters, which stay whole, are left out.

    `blocks`: (name, module) as found when the model was sharded; None: found now.

    What the root defines before the first block (input embeddings) gets its gradient last.
    """
    blocks = find_blocks(model) if blocks is None else blocks
    names = [name + "." for name, _ in blocks]
    early: dict[int, nn.Parameter] = {}
    late: dict[int, nn.Parameter] = {}
    before_blocks = bool(blocks)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name.startswith(tuple(names)):
            before_blocks = False
        elif parameter.ndim:
            (late if before_blocks else early)[id(parameter)] = parameter
    tied = early.keys() & late.keys()
    return ModelSize(
        blocks=tuple(_unit(list(module.parameters())) for _, module in blocks),
        root_early=_unit([parameter for key, parameter in early.items() if key not in tied]),
        root_late=_unit([parameter for key, parameter in late.items() if key not in tied]),
        root_tied=_unit([late[key] for key in late if key in tied]),
    )


def _unit(parameters: list[nn.Parameter]) -> Unit:
    # DeepSpeed's ZeRO-3 leaves parameters empty and keeps their shape beside them.
    shaped = [(tuple(getattr(p, "ds_shape", p.shape)), p.requires_grad) for p in parameters if p.ndim]
    return Unit(
        trainable=tuple(shape for shape, trains in shaped if trains),
        frozen=tuple(shape for shape, trains in shaped if not trains),
    )
