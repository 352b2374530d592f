"""Schedules: another plan in other rounds, such as a warm-up in full precision, or 8, then 4 bits, then a mix.

The server asks for a plan round by round, so clients need to know nothing of schedules.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from fedcomp import _validate
from fedcomp.budget import phases as budgets
from fedcomp.codec import Codec, parse_codec
from fedcomp.codecs.auto import Auto
from fedcomp.codecs.identity import Identity
from fedcomp.errors import ConfigError
from fedcomp.plan import Plan, as_plan


@dataclass(frozen=True)
class Schedule:
    """Which plan holds in which round.

    Args:
        phases: (first round, plan) in rising order, the first from round 1 on; a plan holds until the next begins.
        full_every: every so many rounds a round in full precision (float32), which washes out what compression got
            wrong; 0: never. More often: more accurate, more bytes.

    Raises ConfigError for phases that do not start at round 1 or do not rise.

    >>> from fedcomp import Sign
    >>> schedule = Schedule.of([(1, "float32"), (6, "uniform(8)"), (21, Sign())], full_every=10)
    >>> [str(schedule.plan(r).codec) for r in (1, 5, 6, 10, 21, 30)]
    ['identity()', 'identity()', 'uniform()', 'identity()', 'sign()', 'identity()']
    """

    phases: tuple[tuple[int, Plan], ...]
    full_every: int = 0

    def __post_init__(self) -> None:
        _validate.integer(low=0, full_every=self.full_every)
        firsts = [first for first, _ in self.phases]
        for first, plan in self.phases:
            _validate.integer(low=1, first_round=first)
            _validate.instance(kind=Plan, plan=plan)
        if not firsts or firsts[0] != 1 or any(b <= a for a, b in pairwise(firsts)):
            raise ConfigError(f"schedule: phases must begin at round 1 and rise, got rounds {firsts}")

    @classmethod
    def of(cls, phases: Iterable[tuple[int, Plan | Codec | str]], full_every: int = 0) -> "Schedule":
        """A schedule from plans, codecs or their texts. Raises ConfigError."""
        return cls(tuple((first, as_plan(plan)) for first, plan in phases), full_every)

    @classmethod
    def parse(cls, text: str) -> "Schedule":
        """A schedule written in one line: codecs from given rounds on, separated by bars. Raises ConfigError.

        >>> str(Schedule.parse("float32 | 6: uniform(8) | every 10: float32").plan(7).codec)
        'uniform()'
        """
        phases: list[tuple[int, str]] = []
        full_every = 0
        for index, part in enumerate(text.split("|")):
            when, colon, codec = part.rpartition(":")
            match when.split():
                case ["every", count] if count.isdigit() and parse_codec(codec) == Identity():
                    full_every = int(count)
                case [first] if first.isdigit():
                    phases.append((int(first), codec))
                case [] if not colon and index == 0:
                    phases.append((1, codec))
                case _:
                    raise ConfigError(
                        f"schedule {text[:80]!r}: cannot read {part.strip()[:40]!r}; write for example "
                        "float32 | 6: uniform(8) | 21: uniform(4) | every 10: float32"
                    )
        return cls.of(phases, full_every)

    def with_settings(self, *, gentle_share: float, min_size: int) -> "Schedule":
        """The same with these settings in every plan, see Plan. Raises ConfigError for impossible ones."""
        settings: dict[str, Any] = {"gentle_share": gentle_share, "min_size": min_size}
        return replace(self, phases=tuple((first, replace(plan, **settings)) for first, plan in self.phases))

    def with_budget(self, budget: str | float) -> "Schedule":
        """The same with this budget wherever `auto` has none; see budget.phases for budgets over the rounds.

        Raises ConfigError for a budget that cannot be read, or that nothing in the schedule can use.
        """
        if not any(isinstance(plan.codec, Auto) and not plan.codec.budget for _, plan in self.phases):
            raise ConfigError(f"budget {budget!r}: expected an uplink of auto without a budget of its own")
        given = budgets(budget)
        phases = []
        for first in sorted({first for first, _ in [*self.phases, *given]}):
            plan = next(plan for begin, plan in reversed(self.phases) if begin <= first)
            text = next(text for begin, text in reversed(given) if begin <= first)
            if isinstance(plan.codec, Auto) and not plan.codec.budget:
                plan = replace(plan, codec=replace(plan.codec, budget=text))
            phases.append((first, plan))
        return replace(self, phases=tuple(phases))

    def plan(self, round: int) -> Plan:
        """The plan of a round, 1 being the first."""
        if self.full_every and round % self.full_every == 0:
            return Plan(Identity())
        return next(plan for first, plan in reversed(self.phases) if first <= round)

    def plans(self) -> list[Plan]:
        """Every plan that may come."""
        return [*(plan for _, plan in self.phases), *([Plan(Identity())] if self.full_every else [])]


def as_schedule(uplink: "Schedule | Plan | Codec | str") -> Schedule:
    """A schedule from what users write: a schedule, a plan or codec for all rounds, or a text. Raises ConfigError."""
    if isinstance(uplink, Schedule):
        return uplink
    return Schedule.parse(uplink) if isinstance(uplink, str) else Schedule.of([(1, uplink)])
