"""How many heads an attention module has, and what it reads that depends on their number.

Found by the attributes it was built with, so that a layer with other heads than its config says is taken as it is. The
names below are all that transformers 5.24 uses.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

_DIM = ("head_dim", "attention_head_size", "head_size", "qk_head_dim", "key_value_proj_dim", "attn_head_size")
_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "num_attn_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "kv_heads", "n_kv_heads")
_GROUPS = ("num_key_value_groups", "n_rep")
# Widths of all heads together, by which fused projections are taken apart and outputs put together.
_WIDTHS = ("split_size", "all_head_size", "embed_dim", "inner_dim", "attention_size")
_KV_WIDTHS = ("kv_dim",)

# Arguments with one row a head (dimension 0; a batch may be folded into it), built outside of the attention module.
HEAD_ARGUMENTS = ("alibi", "position_bias")
# An argument that has a row a head in dimension 1 for some models, and one for all heads for others.
MASK_ARGUMENT = "attention_mask"


@dataclass(frozen=True)
class Heads:
    """`num` query heads of `dim`, `num_kv` key and value heads."""

    num: int
    num_kv: int
    dim: int

    def dividing(self) -> list[int]:
        """Numbers of ranks over which these heads can be spread: whole query heads, key heads split or copied."""
        return [n for n in range(1, self.num + 1) if self.num % n == 0 and self.kv_copies(n)]

    def kv_copies(self, size: int) -> int:
        """How many ranks hold the same key and value head over `size` ranks; 0 when they cannot be spread."""
        if self.num_kv % size == 0:
            return 1
        return size // self.num_kv if size % self.num_kv == 0 else 0


def find_heads(attention: nn.Module, *, out_width: int | None) -> Heads | None:
    """The heads of a module that attends, or None when it does not look like one.

    `out_width`: what its output projection takes in, where that is known: the width of all query heads together.
    """
    dim, num = _first(attention, _DIM), _first(attention, _HEADS)
    if dim is None and num is not None:
        dim = (_first(attention, _WIDTHS) or 0) // num
    if not dim:
        return None
    num = num or (out_width or 0) // dim
    num = num or getattr(getattr(attention, "config", None), "num_attention_heads", 0)
    if not num:
        return None
    num_kv = _first(attention, _KV_HEADS)
    groups = _first(attention, _GROUPS)
    if num_kv is None:
        num_kv = num // groups if groups else num
    return Heads(num, num_kv, dim)


def local_attributes(attention: nn.Module, heads: Heads, size: int) -> dict[str, int]:
    """What the attributes of `attention` become when its heads are spread over `size` ranks."""
    num, num_kv = heads.num // size, max(heads.num_kv // size, 1)
    become = {
        **dict.fromkeys(_HEADS, (heads.num, num)),
        **dict.fromkeys(_KV_HEADS, (heads.num_kv, num_kv)),
        **dict.fromkeys(_GROUPS, (heads.num // heads.num_kv, num // num_kv)),
        **dict.fromkeys(_WIDTHS, (heads.num * heads.dim, num * heads.dim)),
        **dict.fromkeys(_KV_WIDTHS, (heads.num_kv * heads.dim, num_kv * heads.dim)),
    }
    values = vars(attention)
    return {name: local for name, (whole, local) in become.items() if values.get(name) == whole and local != whole}


def _first(module: nn.Module, names: tuple[str, ...]) -> int | None:
    values = vars(module)
    return next((values[name] for name in names if isinstance(values.get(name), int) and values[name] > 0), None)
