"""What the server says in the configuration of a train message. Read before user code, which may empty it."""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from flwr.app import ConfigRecord, Context, Message

from fedcomp import Auto, Budget, ConfigError, Plan
from fedcomp.budget import budget_of
from fedcomp.request import ACK, ACKS, BUDGETS, COMPACT, EVALUATE, KEY, PLACE, Request
from fedcomp_clients.order import CLIPPING_NORM

log = logging.getLogger("fedcomp")

OWN_BUDGET = "fedcomp-budget"
"""Key of a node's own configuration (``flower-supernode --node-config``): the most bytes that its uploads may take
where the server asks for a codec that keeps to budgets, that is `auto`."""


@dataclass(frozen=True)
class Told:
    """What a server asks of this client.

    Attributes:
        request: what it asks for; None: for what this fedcomp cannot do.
        declined: why not; "" if it can.
        compact: whether it reads replies in an Envelope.
        ack: the last round in which it used an upload of this node; 0: none; None: it does not know this node.
        acks: the same by number, for clients that are gone and may be back as this node.
        place: of this client among those of the round, in [0, 1); None: not told.
        evaluate: the configuration for evaluating the received model before training; None: not wanted.
        budgets: of uploads by node property.
        clipping: how long Flower's wrappers for client-side clipping say an update may be; None: they are not there.
    """

    request: Request | None
    declined: str = ""
    compact: bool = False
    ack: int | None = None
    acks: Mapping[int, int] = field(default_factory=dict)
    place: float | None = None
    evaluate: ConfigRecord | None = None
    budgets: Mapping[str, str] = field(default_factory=dict)
    clipping: object = None

    @classmethod
    def of(cls, message: Message) -> "Told | None":
        """None if this is no train message, or its server asks for nothing."""
        if message.metadata.message_type.partition(".")[0] != "train":
            return None
        configs = message.content.config_records.values()
        config = next((config for config in configs if isinstance(config.get(KEY), str)), None)
        if config is None:
            return None
        request, declined = _parse(str(config[KEY]))
        ack, listed, place = config.get(ACK), config.get(ACKS), config.get(PLACE)
        numbers = _numbers(listed)
        return cls(
            request,
            declined,
            config.get(COMPACT) is True,
            ack if isinstance(ack, int) else None,
            dict(zip(numbers[::2], numbers[1::2], strict=False)),
            place if isinstance(place, float) and 0 <= place < 1 else None,
            _below(config, f"{EVALUATE}.") if config.get(EVALUATE) is True else None,
            _budgets(config.get(BUDGETS)),
            config.get(CLIPPING_NORM),
        )

    def used(self, number: int) -> int:
        """The round of the last upload that the server used of the client with this number; 0: none."""
        return self.acks.get(number, 0) if self.ack is None else self.ack

    def plan(self, context: Context, parameters: int) -> Plan:
        """The plan for this node: the server's, with the budget that holds for it where that is not the common one.

        The first of the server's budgets whose condition the node's configuration meets is kept to by each upload. The
        node's own `fedcomp-budget` is the most that any upload of it may take, whatever budget the server gives.

        Args:
            parameters: how many the model has, for budgets in bits per parameter.

        Raises ConfigError if the node's own makes no sense.
        """
        assert self.request is not None
        plan = self.request.plan
        if not isinstance(plan.codec, Auto):
            return plan
        codec = plan.codec
        if given := budget_of(self.budgets, context.node_config):
            codec = replace(codec, budget=given, step=0.0)
        own = context.node_config.get(OWN_BUDGET)
        if own is not None and _bytes(own, parameters) < codec.limit(parameters):
            codec = replace(codec, budget=str(own), cap=1.0)
        return replace(plan, codec=codec)

    def exceeded(self, context: Context, parameters: int, size: int) -> tuple[int, int] | None:
        """The bytes of an upload and of the node's own budget, if the upload takes more; None: it does not."""
        own = context.node_config.get(OWN_BUDGET)
        most = None if own is None else _bytes(own, parameters)
        return None if most is None or size <= most else (size, most)


def first_time(context: Context, what: str) -> bool:
    """Whether something is to be said for the first time in a run; nodes remember it in their context."""
    key = f"{KEY}-said"
    said = context.state.config_records.get(key, ConfigRecord())
    context.state[key] = ConfigRecord({**said, what: True})
    return what not in said


def _bytes(own: Any, parameters: int) -> int:
    try:
        return Budget.parse(own).bytes(parameters)
    except ConfigError as error:
        raise ConfigError(f"{OWN_BUDGET} in this node's --node-config: {error}") from None


def _numbers(listed: object) -> list[int]:
    """The integers in a list, or in the text that carries it where configurations hold no lists; else none."""
    found = listed.split() if isinstance(listed, str) else listed if isinstance(listed, list) else []
    try:
        return [int(number) for number in found]
    except ValueError:
        return []


def _below(config: Mapping[str, Any], prefix: str) -> ConfigRecord:
    return ConfigRecord({key.removeprefix(prefix): value for key, value in config.items() if key.startswith(prefix)})


def _budgets(text: object) -> dict[str, str]:
    try:
        told = json.loads(text) if isinstance(text, str) else {}
    except ValueError:
        return {}
    return {str(condition): str(budget) for condition, budget in told.items()} if isinstance(told, dict) else {}


@lru_cache(maxsize=4)  # in a simulation all clients of a round get the same text
def _parse(text: str) -> tuple[Request | None, str]:
    try:
        return Request.from_text(text), ""
    except ConfigError as error:
        return None, str(error)
