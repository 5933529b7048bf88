"""Readers of single values: text of an environment variable, json or Python value -> the one type hfdist uses.

Every reader takes what any source may carry (`"8"` and `8` are the same number of steps) and raises `ValueError`, whose
text is what was expected, when the value can never be right. `"auto"`, `"none"` and None mean "nobody said" and never
get here (`is_unsaid`).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TypeVar

Reader = Callable[[object], object]
_T = TypeVar("_T")

_TRUE = ("1", "true", "yes", "y", "on", "t")
_FALSE = ("0", "false", "no", "n", "off", "f")


def is_unsaid(value: object) -> bool:
    """True for what sources write when they leave a choice to others: None, "auto", "none", "null" and ""."""
    return value is None or (isinstance(value, str) and value.strip().lower() in ("", "auto", "none", "null"))


def read_bool(value: object) -> bool:
    """True or False from a bool, 0/1 or the words accelerate accepts."""
    if isinstance(value, bool):
        return value
    word = str(value).strip().lower()
    if word in _TRUE:
        return True
    if word in _FALSE:
        return False
    raise ValueError("true or false")


def read_int(value: object) -> int:
    """A whole number; `"8"`, `8` and `8.0` are equal, `8.5` and `True` are refused."""
    if isinstance(value, bool):
        raise ValueError("a whole number")
    try:
        number = float(str(value))
    except ValueError:
        raise ValueError("a whole number") from None
    if number != int(number):
        raise ValueError("a whole number")
    return int(number)


def read_float(value: object) -> float:
    """A finite number; bools are refused."""
    if isinstance(value, bool):
        raise ValueError("a number")
    try:
        number = float(str(value))
    except ValueError:
        raise ValueError("a number") from None
    if number != number or number in (float("inf"), float("-inf")):
        raise ValueError("a finite number")
    return number


def read_count(value: object) -> int:
    """A whole number, 1 or more."""
    number = read_int(value)
    if number < 1:
        raise ValueError("a whole number, 1 or more")
    return number


def read_size(value: object) -> int | str:
    """A whole number of ranks, 1 or more, or "all": as many as the other axes leave."""
    if str(value).strip().lower() == "all":
        return "all"
    try:
        return read_count(value)
    except ValueError:
        raise ValueError('a whole number, 1 or more, or "all"') from None


def read_group_size(value: object) -> int:
    """A whole number of ranks, 2 or more."""
    number = read_int(value)
    if number < 2:
        raise ValueError("a whole number, 2 or more")
    return number


def read_nonnegative(value: object) -> float:
    """A finite number, 0 or more."""
    number = read_float(value)
    if number < 0:
        raise ValueError("a number, 0 or more")
    return number


def read_positive(value: object) -> float:
    """A finite number above 0."""
    number = read_float(value)
    if number <= 0:
        raise ValueError("a number above 0")
    return number


def read_stage(value: object) -> int:
    """A ZeRO stage: 0, 1, 2 or 3."""
    number = read_int(value)
    if number not in (0, 1, 2, 3):
        raise ValueError("stage 0, 1, 2 or 3")
    return number


def read_names(value: object) -> tuple[str, ...]:
    """Class names, from a comma-separated text or a list; order and duplicates do not matter, so they are dropped."""
    parts = value.split(",") if isinstance(value, str) else list(value)  # type: ignore[call-overload]
    names = tuple(sorted({str(part).strip() for part in parts} - {""}))
    if not names:
        raise ValueError("one class name or more")
    return names


def read_counts(value: object) -> tuple[int, ...]:
    """Whole numbers, 1 or more each, from a comma-separated text or a list; their order counts."""
    parts = value.split(",") if isinstance(value, str) else list(value)  # type: ignore[call-overload]
    try:
        return tuple(read_count(part) for part in parts)
    except ValueError:
        raise ValueError("whole numbers, 1 or more each, such as 3,2") from None


def read_plan(value: object) -> dict[str, str]:
    """Module name -> style, from a mapping or its json text."""
    try:
        plan = json.loads(value) if isinstance(value, str) else dict(value)  # type: ignore[call-overload]
    except (ValueError, TypeError):
        plan = None
    if not isinstance(plan, dict) or not plan or not all(isinstance(t, str) for rule in plan.items() for t in rule):
        raise ValueError('a mapping such as {"model.layers.*.mlp.up_proj": "colwise"}')
    return plan


def read_choice(*choices: str) -> Callable[[object], str]:
    """A reader for one of `choices`, upper or lower case."""

    def read(value: object) -> str:
        word = str(value).strip().lower()
        if word not in choices:
            raise ValueError(" or ".join(f'"{choice}"' for choice in choices))
        return word

    return read


_PRECISIONS = {
    **dict.fromkeys(("no", "fp32", "float32", "torch.float32"), "no"),
    **dict.fromkeys(("fp16", "float16", "half", "torch.float16"), "fp16"),
    **dict.fromkeys(("bf16", "bfloat16", "torch.bfloat16"), "bf16"),
}


def read_precision(value: object) -> str:
    """ "no", "fp16" or "bf16", from any of the names accelerate, DeepSpeed and torch use for them."""
    word = _PRECISIONS.get(str(value).strip().lower())
    if word is None:
        raise ValueError('"no", "fp16" or "bf16"')
    return word
