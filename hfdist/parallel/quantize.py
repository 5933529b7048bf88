"""Weights that travel as int8 (ZeRO++, Wang et al. 2023, arXiv:2306.10209, section 3.1): a quarter of fp32's gathers.

Each block of 256 values of a shard becomes 256 signed bytes and one fp32 scale, its largest magnitude / 127; every
rank, the owner too, computes with the rounded values, so that ranks agree bit for bit. The stored shards stay exact.

    1.0156 bytes a value on the wire instead of 4 (fp32) or 2 (bf16); error at most scale / 2 a value

Vectors (norms, biases) travel as they are: they are few, and every value of a matrix row depends on them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from hfdist import comm
from hfdist.parallel import exchange
from hfdist.plan.sizes import INT8_BLOCK as BLOCK
from hfdist.plan.sizes import packed_bytes

_SCALE_BYTES = 4


@torch.no_grad()
def pack(values: torch.Tensor) -> torch.Tensor:
    """`values` (n,) of any floating dtype -> (packed_bytes(n),) uint8: scales, then rounded values padded to blocks.

    Values that are not finite stay so: their block's scale is not finite either.
    """
    numel = values.numel()
    blocks = -(-numel // BLOCK)
    padded = torch.zeros(blocks * BLOCK, dtype=torch.float32, device=values.device)
    padded[:numel] = values
    rows = padded.view(blocks, BLOCK)
    scales = rows.abs().amax(dim=1, keepdim=True).div_(127.0)
    rounded = rows.div_(scales.clamp(min=torch.finfo(torch.float32).tiny)).round_().nan_to_num_(0.0, 127.0, -127.0)
    packed = torch.empty(packed_bytes(numel), dtype=torch.uint8, device=values.device)
    packed[: blocks * _SCALE_BYTES] = scales.view(-1).view(torch.uint8)
    packed[blocks * _SCALE_BYTES :] = rounded.to(torch.int8).view(-1).view(torch.uint8)
    return packed


@torch.no_grad()
def unpack(packed: torch.Tensor, out: torch.Tensor) -> None:
    """Fill `out` (n,) with the values of `packed` (packed_bytes(n),)."""
    blocks = -(-out.numel() // BLOCK)
    scales = packed[: blocks * _SCALE_BYTES].clone().view(torch.float32)
    rows = packed[blocks * _SCALE_BYTES :].view(torch.int8).view(blocks, BLOCK)
    values = rows.to(torch.float32).mul_(scales.unsqueeze(1))
    out.copy_(values.view(-1)[: out.numel()])


class PackedGather:
    """`exchange.gather` of CPU ranks with matrices packed. Buffers are allocated here, the exchange is `run()`.

    `outputs[i]` is (N, n) with this rank's row filled; after `run()` all rows are the values that travelled, this
    rank's own among them. `matrices[i]` says whether it is packed.
    """

    def __init__(
        self, outputs: list[torch.Tensor], matrices: Sequence[bool], group: dist.ProcessGroup, label: str
    ) -> None:
        self.outputs, self.group, self.label = outputs, group, label
        self.travelling = []
        for output, matrix in zip(outputs, matrices, strict=True):
            if not matrix:
                self.travelling.append(output)
                continue
            size = packed_bytes(output.size(1))
            packed = torch.empty(group.size(), size, dtype=torch.uint8, device=output.device)
            packed[group.rank()] = pack(output[group.rank()])
            self.travelling.append(packed)

    def run(self) -> None:
        exchange.gather(self.travelling, self.group, label=self.label)
        for output, packed in zip(self.outputs, self.travelling, strict=True):
            if packed is not output:
                for row, filled in zip(packed, output, strict=True):
                    unpack(row, filled)


@dataclass(frozen=True)
class Part:
    """One parameter's place in FSDP2's flat gather buffers: `numel` values of `dtype`."""

    numel: int
    dtype: torch.dtype
    matrix: bool

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def travelling_bytes(self) -> int:
        return packed_bytes(self.numel) if self.matrix else self.nbytes


def gather_flat(
    output: torch.Tensor, shard: torch.Tensor, parts: Sequence[Part], group: dist.ProcessGroup, label: str
) -> None:
    """FSDP2's all-gather with matrices packed: `output` (N * n,) becomes the values that travelled of all shards (n,).

    `parts` lie in a shard one after another. Parameters of several dtypes come as bytes (FSDP2's uint8 view).
    """
    own = shard.view(torch.uint8)
    pieces, start = [], 0
    for part in parts:
        piece = own[start : start + part.nbytes]
        # A piece of bytes may lie where its dtype may not.
        pieces.append(pack(piece.clone().view(part.dtype)) if part.matrix else piece)
        start += part.nbytes
    packed = torch.cat(pieces)
    gathered = torch.empty(group.size() * packed.numel(), dtype=torch.uint8, device=packed.device)
    comm.all_gather(gathered, packed, group, label)
    for received, filled in zip(
        gathered.view(group.size(), -1), output.view(torch.uint8).view(group.size(), -1), strict=True
    ):
        source = target = 0
        for part in parts:
            piece, place = received[source : source + part.travelling_bytes], filled[target : target + part.nbytes]
            if part.matrix:
                values = torch.empty(part.numel, dtype=part.dtype, device=piece.device)
                unpack(piece, values)
                piece = values.view(torch.uint8)
            place.copy_(piece)
            source, target = source + part.travelling_bytes, target + part.nbytes
