"""What clients are asked to do with their updates in each round: schedule, budgets, what codecs have learnt."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fedcomp import Auto, Codec, ConfigError, Plan, generator
from fedcomp.budget import as_budgets
from fedcomp.layout import Layout, Vector
from fedcomp.request import BUDGETS
from fedcomp.schedule import Schedule, as_schedule
from fedcomp_strategies.feedback import SERVER
from fedcomp_strategies.rates import Rates


class Uplink:
    """The plans of a training.

    Args:
        uplink: codec, its text, a plan or a schedule of them.
        budget: for every `auto` in it that has none; None: they all have one.
        budgets: of nodes, by conditions on their configuration.
        shared: whether budgets are what uploads have on average.

    Attributes:
        left_open: whether a text says just "auto", so that coding, feedback and guards are to be chosen.
        shared: see above.

    Raises ConfigError for an unknown codec, for `auto` without a budget and for budgets that cannot be read or kept to.
    """

    def __init__(
        self,
        uplink: Schedule | Plan | Codec | str,
        budget: str | float | None,
        budgets: Mapping[str, str] | str | None,
        shared: bool,
    ) -> None:
        given = as_schedule(uplink)
        self.left_open = isinstance(uplink, str) and any(plan.codec == Auto() for plan in given.plans())
        self.shared = shared
        self._schedule = given if budget is None else given.with_budget(budget)
        self._budgets = as_budgets(budgets)
        self._rates = Rates(shared)
        self._learnt: dict[Plan, Plan] = {}
        if any(isinstance(c, Auto) and not c.budget for plan in self.plans() for c in plan.codecs()):
            raise ConfigError('uplink "auto" needs the budget of an upload, such as budget="2 kB"')
        if self._budgets and not any(isinstance(plan.codec, Auto) for plan in self.plans()):
            raise ConfigError('budgets of nodes need a codec that keeps to budgets: give uplink="auto"')

    def plans(self) -> list[Plan]:
        """All plans of the schedule."""
        return self._schedule.plans()

    @property
    def has_node_budgets(self) -> bool:
        """Whether nodes may have budgets of their own."""
        return bool(self._budgets)

    def restart(self) -> None:
        """Another training begins: forget what was learnt."""
        self._learnt = {}
        self._rates.restart()

    def plan(self, server_round: int) -> Plan:
        """The plan of a round, with what codecs have learnt so far."""
        planned = self._schedule.plan(server_round)
        return self._learnt.get(planned, planned)

    # --- budgets -----------------------------------------------------------------------------------------------------

    def bits(self, layout: Layout) -> float:
        """The smallest budget of `auto` in bits per parameter."""
        budgets = [plan.codec.limit(layout.size) or 0 for plan in self.plans() if isinstance(plan.codec, Auto)]
        return 8 * min(budgets) / max(layout.size, 1)

    def choose(self, unbiased: bool) -> None:
        """Settle how `auto` codes."""
        phases = tuple(
            (start, replace(plan, codec=_coded(plan.codec, unbiased))) for start, plan in self._schedule.phases
        )
        self._schedule = replace(self._schedule, phases=phases)

    def check_budgets(self, layout: Layout, notes: int) -> None:
        """Raise BudgetError for any budget that no frame for this layout fits.

        Args:
            layout: of the model as clients train it.
            notes: bytes of a frame that hang on what is asked for besides.
        """
        for plan in self.plans():
            self._rates.check(plan, layout, notes)
            for budget in self._budgets.values():
                if isinstance(plan.codec, Auto):
                    self._rates.check(replace(plan, codec=replace(plan.codec, budget=budget)), layout, notes)

    def announced(self, plan: Plan, layout: Layout, notes: int) -> Plan:
        """A round's plan with the step that clients code at. Raises BudgetError if the budget is too small."""
        return self._rates.plan(plan, layout, notes)

    def shares(self, plan: Plan) -> bool:
        """Whether clients share the bytes of a round by their weights."""
        return self.shared and isinstance(plan.codec, Auto)

    def told(self, plan: Plan) -> dict[str, Any]:
        """Entries of the configuration that tell nodes of budgets of their own."""
        if not self._budgets or not isinstance(plan.codec, Auto):
            return {}
        return {BUDGETS: json.dumps(self._budgets, separators=(",", ":"))}

    def observe(
        self, plan: Plan, sizes: Sequence[int], levels: Mapping[int, float], weights: Mapping[int, float]
    ) -> None:
        """Take in the lengths of a round's frames, see Rates."""
        self._rates.observe(plan, sizes, levels, weights)

    # --- what codecs learn -------------------------------------------------------------------------------------------

    def learns(self, server_round: int) -> bool:
        """Whether a codec of this round wants to see the global model's move."""
        return any(type(codec).adapt is not Codec.adapt for codec in self.plan(server_round).codecs())

    def learn(self, server_round: int, moved: Mapping[str, Vector], seed: int) -> None:
        """Let codecs with shared side information look at how the global model has moved, which must be finite."""
        rng = generator(seed, server_round, SERVER)
        adapted = self.plan(server_round).adapt(dict(moved), Layout.of(moved), rng)
        self._learnt[self._schedule.plan(server_round)] = adapted


def _coded(codec: Codec, unbiased: bool) -> Codec:
    return replace(codec, unbiased=unbiased) if isinstance(codec, Auto) else codec
