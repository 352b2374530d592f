"""Budgets: how long an upload may be, as users say it, and how a server keeps to it over clients and rounds.

A budget is for the whole frame, header included. `Budget.parse` reads bytes ("2 kB"), bits per parameter ("0.05 bits"),
a time at a link's rate ("30 s at 20 kbit/s"; the payload alone, without what the transport adds) or a share of float32
("1/1000", "0.1 %").

Uploads of one length each are the hard way to spend bytes. Better is one quantizer step for all clients, each coding
its update times its weight: then an error counts the same in the mean wherever it is made, and clients of large weight
send more. Only the mean length is kept to, from round to round, by `RateControl`.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from fedcomp import _validate
from fedcomp.errors import ConfigError

_PREFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "ki": 2.0**10, "mi": 2.0**20, "gi": 2.0**30}
_NUMBER = r"(\d+(?:\.\d*)?(?:e[+-]?\d+)?|\.\d+(?:e[+-]?\d+)?)"
_BYTES = re.compile(rf"{_NUMBER}\s*(?:(k|K|M|G|ki|Ki|Mi|Gi)?(?:B|[Bb]ytes?))?")  # b would be bits
_BITS = re.compile(rf"{_NUMBER}\s*(?:bits?|bpp)(?:\s*(?:per|/)\s*parameter)?", re.IGNORECASE)
_TIME = re.compile(rf"{_NUMBER}\s*(s|min)\s*(?:at|@)\s*{_NUMBER}\s*(k|m|g)?(?:bit/s|bps)", re.IGNORECASE)
_PERCENT = re.compile(rf"{_NUMBER}\s*%")
_SHARE = re.compile(rf"1\s*/\s*{_NUMBER}")
_GROWTH = re.compile(r"(.+?)\s+to\s+(.+?)\s+over\s+(\d+)(?:\s+rounds)?", re.IGNORECASE)
_GROWN = 1.25  # from one phase of a growing budget to the next
_MOST_FIXED = 0.9  # of the target
_FAR = 64.0  # times the steps that were used last: as far as the next one may be from them
_AIM = 0.98  # of the target, lest the mean ends above it
_SLOPE = 1 / 1.5  # octaves of the step for an octave of bytes
_LARGEST = 2**50
_EXAMPLES = '"2 kB", "0.05 bits", "30 s at 20 kbit/s", "1/1000" or "0.1 %"'


@dataclass(frozen=True)
class Budget:
    """The most bytes that an upload may take.

    Args:
        amount: how many of the unit, above 0.
        unit: "bytes", or "bits" per parameter, float32 having 32.

    >>> [Budget.parse(text).bytes(10_000) for text in ("2 kB", "0.05 bits", "1/1000", "30 s at 20 kbit/s")]
    [2000, 62, 40, 75000]
    """

    amount: float
    unit: str = "bytes"

    def __post_init__(self) -> None:
        object.__setattr__(self, "amount", _validate.number(low=0, high=_LARGEST, above=True, budget=self.amount))
        _validate.one_of(choices=("bytes", "bits"), unit=self.unit)

    @classmethod
    def parse(cls, given: "Budget | str | float") -> "Budget":
        """A budget from what users write; a number is one of bytes. Raises ConfigError, with examples."""
        if isinstance(given, Budget):
            return given
        if isinstance(given, int | float):
            return cls(given)
        text = given.strip() if isinstance(given, str) else ""
        if found := _BYTES.fullmatch(text):
            return cls(float(found[1]) * _PREFIXES[(found[2] or "").lower()])
        if found := _BITS.fullmatch(text):
            return cls(float(found[1]), "bits")
        if found := _TIME.fullmatch(text):
            seconds = float(found[1]) * (60 if found[2].lower() == "min" else 1)
            return cls(seconds * float(found[3]) * _PREFIXES[(found[4] or "").lower()] / 8)
        if found := _PERCENT.fullmatch(text):
            return cls(float(found[1]) * 32 / 100, "bits")
        if (found := _SHARE.fullmatch(text)) and float(found[1]):
            return cls(32 / float(found[1]), "bits")
        raise ConfigError(f"budget {str(given)[:80]!r}: cannot be read; write for example {_EXAMPLES}")

    def bytes(self, parameters: int) -> int:
        """Whole bytes for a model of so many parameters."""
        return int(self.amount * parameters / 8 if self.unit == "bits" else self.amount)


def as_budgets(given: Mapping[str, str] | str | None) -> dict[str, str]:
    """Budgets by node property: a mapping, or a text as configurations hold it. None or "": there are none.

    Raises ConfigError, with what is expected.

    >>> as_budgets("link=nbiot: 200 B, link=lte: 2 kB")
    {'link=nbiot': '200 B', 'link=lte': '2 kB'}
    """
    if not isinstance(given, Mapping | str | None):
        raise ConfigError(f"budgets: expected a mapping or a text, got {type(given).__name__}")
    if isinstance(given, str):
        pairs = [entry.partition(":") for entry in given.split(",") if entry.strip()]
        given = {condition.strip(): budget.strip() for condition, _, budget in pairs}
    for condition, budget in (given or {}).items():
        name, equals, value = str(condition).partition("=")
        if not equals or not name.strip() or not value.strip():
            raise ConfigError(
                'budgets: expected conditions on --node-config with a budget each, such as "link=nbiot: 200 B", '
                f"got {str(condition)[:80]!r}"
            )
        Budget.parse(budget)
    return dict(given or {})


def budget_of(budgets: Mapping[str, str], properties: Mapping[str, object]) -> str:
    """The first of the budgets whose condition a node's properties meet; "": none.

    >>> budget_of({"link=nbiot": "200 B", "link=lte": "2 kB"}, {"link": "lte", "partition-id": 3})
    '2 kB'
    >>> budget_of({"metered=true": "200 B"}, {"metered": True})
    '200 B'
    """
    for condition, budget in budgets.items():
        name, _, value = condition.partition("=")
        if name.strip() in properties and _means(value.strip(), properties[name.strip()]):
            return budget
    return ""


def _means(text: str, value: object) -> bool:
    """Whether a text stands for a value of a node's configuration, which is written in TOML."""
    if isinstance(value, bool):
        return text.lower() == str(value).lower()
    if isinstance(value, int | float):
        try:
            return float(text) == value
        except ValueError:
            return False
    return text == value


def phases(given: str | float) -> tuple[tuple[int, str], ...]:
    """Budgets over rounds as users write them: (first round, budget), from round 1 on. Raises ConfigError.

    A budget alone holds in all rounds. Bars begin others at given rounds. "A to B over N rounds" grows or shrinks by
    steps of a quarter.

    >>> phases("500 B | 10: 2 kB")
    ((1, '500 B'), (10, '2 kB'))
    >>> [(first, int(float(budget.split()[0]))) for first, budget in phases("100 B to 200 B over 40 rounds")]
    [(1, 100), (11, 125), (21, 158), (31, 200)]
    """
    if not isinstance(given, str):
        given = f"{given} B"
    if found := _GROWTH.fullmatch(given.strip()):
        return _growing(Budget.parse(found[1]), Budget.parse(found[2]), int(found[3]))
    found_phases = []
    for index, part in enumerate(given.split("|")):
        first, colon, budget = part.rpartition(":")
        if (colon and not first.strip().isdigit()) or bool(colon) != bool(index):
            raise ConfigError(f'budget {given[:80]!r}: expected phases such as "500 B | 10: 2 kB"')
        Budget.parse(budget)
        found_phases.append((int(first) if colon else 1, budget.strip()))
    if any(b[0] <= a[0] for a, b in pairwise(found_phases)):
        raise ConfigError(f"budget {given[:80]!r}: expected rounds that rise from one phase to the next")
    return tuple(found_phases)


def _growing(first: Budget, last: Budget, rounds: int) -> tuple[tuple[int, str], ...]:
    if first.unit != last.unit or rounds < 2:
        raise ConfigError("budget that grows: expected two of the same kind over 2 rounds or more")
    ratio = last.amount / first.amount
    count = min(max(round(abs(math.log(ratio)) / math.log(_GROWN)), 1) + 1, rounds)
    unit = "bits" if first.unit == "bits" else "B"
    return tuple(
        (1 + index * rounds // count, f"{first.amount * ratio ** (index / (count - 1))!r} {unit}")
        for index in range(count)
    )


class RateControl:
    """Chooses each round's step, so that uploads have a given length on average, whatever the updates do.

    Args:
        target: bytes of an upload, on average.
        fixed: of these the bytes that do not hang on the step.

    Attributes:
        step: for the next round, of an update of weight 1; 0: not known yet, clients choose their own.

    Lengths are taken to be about inversely proportional to the step to the power of 1.5. What was spent too much or too
    little is made up for over the next rounds.
    """

    GAIN = 0.6
    """Octaves of the step for an octave of bytes, a little less than would hit the target if it stood still."""

    HORIZON = 8
    """Rounds over which the bytes spent too much or too little are paid back."""

    _MOST = 2.0
    """Largest factor by which a round's target, or the step, differs from what it was."""

    def __init__(self, target: float, fixed: float = 0.0) -> None:
        self.target, self.fixed = target, min(fixed, _MOST_FIXED * target)
        self.step = 0.0
        self._saved = 0.0
        self._shortest = math.inf
        self._used = 0.0

    def aim(self, target: float, fixed: float) -> None:
        """Change what to keep to, such as in the next phase of a schedule."""
        if (target, min(fixed, _MOST_FIXED * target)) == (self.target, self.fixed):
            return
        before = self.target - self.fixed
        self.target, self.fixed = target, min(fixed, _MOST_FIXED * target)
        self.step *= (before / (self.target - self.fixed)) ** _SLOPE

    def observe(self, sizes: Sequence[int], steps: Sequence[float]) -> None:
        """Take in the lengths in bytes of a round's uploads, and the steps of weight 1 that they stand for.

        In the first round, when each client has chosen its own, the geometric mean of these is where to begin.
        """
        known = [step for step in steps if 0 < step < math.inf]
        if not sizes or (not self.step and not known):
            return
        spent = sum(sizes) / len(sizes)
        used = math.exp(math.fsum(map(math.log, known)) / len(known)) if known else 0.0
        if not self.step:
            self.step = self._used = used
            return
        most = self.HORIZON * self.target
        self._saved = min(max(self._saved + _AIM * self.target - spent, -most), most)
        self._shortest = min(self._shortest, *sizes)
        fixed = min(self.fixed, self._shortest)  # it is what they take at most
        wanted = _AIM * self.target + self._saved / self.HORIZON
        wanted = min(max(wanted - fixed, (self.target - fixed) / self._MOST), self._MOST * self.target)
        ratio = max(spent - fixed, 1.0) / wanted
        self.step *= min(max(ratio**self.GAIN, 1 / self._MOST), self._MOST)
        self._used = used or self._used
        # Updates of zeros, or of less than any step, must not make it run away.
        self.step = min(max(self.step, self._used / _FAR), _FAR * self._used)
