"""Who said what: every source of settings puts its claims here, and two that disagree are an error with both origins.

Worked example. The launcher exports `ACCELERATE_GRADIENT_ACCUMULATION_STEPS=8` and the script says
`Accelerator(gradient_accumulation_steps=8)`: one claim, 8. The script says 4: `ConfigError` naming both. A plugin
handed to `Accelerator(plugins=[...])` is stronger than either; a default that a launcher exports unasked is weaker.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NoReturn

from hfdist.config.table import LATER, SETTINGS
from hfdist.config.values import is_unsaid
from hfdist.errors import ConfigError, nearest, say


class Strength(IntEnum):
    """How much a claim weighs. A stronger one replaces a weaker one; equals must agree (defaults: the first stays)."""

    DEFAULT = 0  # exported or filled in by a tool although nobody chose it
    SAID = 1  # written by the user in a yaml, a json, a variable or an argument
    PLUGIN = 2  # Accelerator(plugins=[...])


@dataclass(frozen=True)
class Claim:
    """`value` of one setting, from `origin` (words for messages)."""

    value: object
    origin: str
    strength: Strength


class Ledger:
    """Collects claims, notices and hints while sources are read; `Settings` is made from it at the end."""

    def __init__(self) -> None:
        self.claims: dict[str, Claim] = {}
        self.notices: list[str] = []
        self.loss_fn: Callable[[Any, dict[str, Any]], Any] | None = None  # of a plugin: no other source can say it
        self._excluded: list[tuple[str, object, str]] = []
        self._hints: dict[str, list[str]] = {}

    def claim(self, name: str, value: object, *, origin: str, strength: Strength = Strength.SAID) -> None:
        """Record that `origin` asks for `name` = `value`. None and "auto" ask for nothing.

        Raises ConfigError when the value cannot be right or another source of equal strength asked for another one.
        """
        if is_unsaid(value):
            return
        setting = SETTINGS[name]
        try:
            value = setting.read(value)
        except ValueError as error:
            raise ConfigError(
                say(given=f"{name} = {value!r} from {origin}", expected=str(error), do=setting.help)
            ) from None
        old = self.claims.get(name)
        new = Claim(value, origin, strength)
        if old is None or new.strength > old.strength:
            self.claims[name] = new
        elif new.strength == old.strength > Strength.DEFAULT and new.value != old.value:
            raise ConfigError(
                say(
                    given=f"{name} = {old.value!r} from {old.origin} and {value!r} from {origin}",
                    expected="sources that agree",
                    do="Keep one of the two, or make them equal.",
                )
            )

    def claim_own(self, name: str, value: object, *, origin: str) -> None:
        """A setting by its hfdist name, from `HFDIST_*`, the json's "hfdist" section or `-m hfdist.run --flag`."""
        if name in LATER:
            self.later(name, value, origin=origin)
        elif name in SETTINGS:
            self.claim(name, value, origin=origin)
        else:
            raise ConfigError(
                say(
                    given=f"{name!r} ({origin})",
                    expected=f"one of {', '.join(sorted(SETTINGS))}",
                    do=f"Correct the name{nearest(name, [*SETTINGS, *LATER])} or remove it.",
                )
            )

    def later(self, name: str, value: object, *, origin: str) -> None:
        """A feature of LATER: quiet when `value` asks for none of it, else an error that says so by name."""
        feature = LATER[name]
        if is_unsaid(value) or str(value).strip().lower() in feature.harmless:
            return
        raise ConfigError(
            say(
                given=f"{name} = {value!r} from {origin}",
                expected=f"a configuration without {feature.what}, which is not in this release of hfdist",
                do=feature.do,
            )
        )

    def exclude(self, name: str, value: object, *, origin: str) -> None:
        """`origin` switches `value` of `name` off ("fp16": {"enabled": false}); checked by `verify_exclusions`."""
        self._excluded.append((name, value, origin))

    def verify_exclusions(self) -> None:
        """Raises ConfigError when a value that one source switched off was asked for by another of equal strength."""
        for name, value, origin in self._excluded:
            claim = self.claims.get(name)
            if claim is not None and claim.value == value and claim.strength == Strength.SAID:
                raise ConfigError(
                    say(
                        given=f"{name} = {value!r} from {claim.origin} and the same switched off by {origin}",
                        expected="sources that agree",
                        do='Write "enabled": "auto" there, or drop one of the two.',
                    )
                )

    def refuse(self, given: str, *, origin: str, why: str, do: str) -> NoReturn:
        """An error for what would change the result or the memory and is not done here."""
        raise ConfigError(say(given=f"{given} from {origin}", expected=why, do=do))

    def notice(self, text: str) -> None:
        """One line for the log of the main rank; the same line is kept once."""
        if text not in self.notices:
            self.notices.append(text)

    def hint(self, key: str, *, origin: str) -> None:
        """A key that only tunes how another engine works: all of one origin become one notice naming them."""
        keys = self._hints.setdefault(origin, [])
        if key not in keys:
            keys.append(key)

    def value(self, name: str, default: object = None) -> object:
        """The claimed value of `name`, or `default`."""
        claim = self.claims.get(name)
        return default if claim is None else claim.value

    def origins(self) -> Mapping[str, str]:
        """Setting -> the source that decided it."""
        return {name: claim.origin for name, claim in self.claims.items()}

    def all_notices(self) -> tuple[str, ...]:
        """Notices, then one line for each origin of hints."""
        hints = [f"{origin}: no meaning in hfdist, ignored: {', '.join(keys)}" for origin, keys in self._hints.items()]
        return (*self.notices, *hints)
