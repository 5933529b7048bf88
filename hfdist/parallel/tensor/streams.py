"""Random numbers between a column- and a row-parallel layer.

What is whole on every rank (residuals, hidden states) is dropped alike on all ranks: their global generators run in
step. What is split (heads, the inside of an MLP) needs masks of its own on each rank, or head h and head h + n would be
dropped in the same places. There a rank draws from a fork of the global generator:

    global     ... residual | draw a seed s          | residual ...      the same on all ranks
    rank 0                  | generator(s, rank 0)   |
    rank 1                  | generator(s, rank 1)   |

The fork keeps no state of its own, so gradient checkpointing, which sets the global state back, repeats it exactly.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Streams:
    """Whether this rank is on the common or on its own stream. One a handle."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._common: Tensor | None = None  # the common generator's state while on the own one
        self._device = torch.device("cpu")

    def enter(self, device: torch.device) -> None:
        """Go over to this rank's own stream; nothing when it is there already."""
        if self._common is not None:
            return
        self._device = device
        seed = int(torch.randint(2**48, (), device=device))
        self._common = self._get()
        self._set_seed(seed * 4096 + self.rank)

    def leave(self) -> None:
        """Go back to the common stream, where it was left."""
        if self._common is not None:
            common, self._common = self._common, None
            if self._device.type == "cpu":
                torch.set_rng_state(common)
            else:
                torch.get_device_module(self._device).set_rng_state(common, self._device)

    def _get(self) -> Tensor:
        if self._device.type == "cpu":
            return torch.get_rng_state()
        return torch.get_device_module(self._device).get_rng_state(self._device)

    def _set_seed(self, seed: int) -> None:
        if self._device.type == "cpu":
            torch.default_generator.manual_seed(seed)
        else:
            torch.get_device_module(self._device).manual_seed(seed)


def has_dropout(module: nn.Module) -> bool:
    """Whether `module` itself drops something in training: a `*drop*` number above 0, or an `nn.Dropout` child."""
    numbers = (value for name, value in vars(module).items() if "drop" in name and isinstance(value, float))
    children = (child.p for child in module.children() if isinstance(child, nn.modules.dropout._DropoutNd))
    return any(value > 0 for value in (*numbers, *children))
