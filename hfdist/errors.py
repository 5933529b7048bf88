"""Errors that say what was given, what was expected and what to do.

Guarantee: every error hfdist raises on purpose is a `ConfigError` (known before work starts; a `ValueError`) or a
`DistributedError` (found while ranks work together; a `RuntimeError`), and its text has three parts in one order:
what was given, what was expected, what to do.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ConfigError(ValueError):
    """A setting that cannot be honoured. Raised on every rank before any work starts."""


class DistributedError(RuntimeError):
    """Ranks disagree, one of them failed, or a wait ended without its partner."""


def say(*, given: str, expected: str, do: str) -> str:
    """One sentence each: what was `given`, what was `expected`, what to `do`."""
    return f"Got {given}. Expected {expected}. {do}"


def nearest(name: str, known: Iterable[str]) -> str:
    """` (did you mean 'x'?)` for the closest of `known`, or an empty string when none is close."""
    match = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" (did you mean {match[0]!r}?)" if match else ""


def coordinates(**axes: int) -> str:
    """`pp=1 dp=0 tp=3` for `coordinates(pp=1, dp=0, tp=3)`; how every message names a rank."""
    return " ".join(f"{name}={index}" for name, index in axes.items())
