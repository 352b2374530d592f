"""Fleet: what clients are like, beyond their data: their links, how fast they are, how often nothing comes of them.

Who fails when is drawn from (seed, round, client) alone, so all methods of a seed meet the same fate, as far as it does
not hang on their bytes: only what is late does. `FleetGrid` lets an experiment meet it, on every engine.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np

from fedcomp.errors import ConfigError
from fedcomp_simulations.links import Clock, Link

_LINKS, _SLOW, _FATE = 0x11AB, 0x510, 0xFA7E  # apart from each other, and from whatever else hangs on the seed
_SLACK = 1e-6
_LARGEST = 1e9


@dataclass(frozen=True)
class Fleet:
    """The `[fleet]` table of an experiment; without it all clients are there, fast and heard.

        [fleet]
        links = {"nb-iot" = 0.5, "lte-m" = 0.5}
        dropout = 0.05
        deadline_s = 600

    Attributes:
        link: of all clients: the name of a preset or a table, see Link.parse; "": bytes take no time.
        links: instead, names of presets and the share of the clients that have each; a link of one's own is a table
            with its share: `links.cellar = {share = 0.1, preset = "nb-iot", rtt = "5 s"}`. A client has the same one in
            all runs of a seed.
        dropout: probability that a client that is asked never gets the message.
        loss: probability that a reply gets lost on the way, after the client has trained.
        stragglers: share of the clients that train slowly, the same clients in all runs of a seed.
        slowdown: how many times as long as others they take to train.
        compute_s: seconds that other clients take to train in a round.
        deadline_s: seconds after which the server goes on with the replies that it has; later ones are not used, as
            Flower does it with `timeout`, although their bytes are spent.

    Raises ConfigError, which names the key.
    """

    link: Any = ""
    links: Mapping[str, Any] = field(default_factory=dict, hash=False)
    dropout: float = 0.0
    loss: float = 0.0
    stragglers: float = 0.0
    slowdown: float = 5.0
    compute_s: float = 0.0
    deadline_s: float = math.inf
    mix: tuple[tuple[Link, float], ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        for key in ("dropout", "loss", "stragglers"):
            _number(key, getattr(self, key), "a number from 0 to 1", 0, 1)
        _number("slowdown", self.slowdown, "a finite number from 1 on", 1, _LARGEST)
        _number("compute_s", self.compute_s, "a finite number of seconds from 0 on", 0, _LARGEST)
        _number("deadline_s", self.deadline_s, "a number of seconds above 0", math.ulp(0), math.inf)
        if self.link != "" and self.links:
            raise ConfigError("fleet.links: give either link or links")
        single = ((Link.parse(self.link, "fleet.link"), 1.0),) if self.link != "" else ()
        object.__setattr__(self, "mix", single or _mix(self.links))
        if self.stragglers and not self.compute_s:
            raise ConfigError("fleet.stragglers: needs fleet.compute_s, which they take longer for")
        if self.deadline_s < math.inf and not (self.mix or self.compute_s):
            raise ConfigError("fleet.deadline_s: nothing takes time; give fleet.link, fleet.links or fleet.compute_s")

    @property
    def loses(self) -> bool:
        """Whether some replies may not reach the server in time."""
        return self.dropout > 0 or self.loss > 0 or self.deadline_s < math.inf

    @property
    def transmits_only(self) -> bool:
        """Whether only bytes and round trips take time: clients train in none, and no deadline ends a round."""
        return not self.compute_s and self.deadline_s == math.inf

    def link_of(self, client: int, clients: int, seed: int) -> Link | None:
        """The link of one of so many clients; None if the fleet has none. As many clients have each as it shall be."""
        if not self.mix:
            return None
        upto = np.cumsum([share for _, share in self.mix])
        found = np.searchsorted(upto, _place(_LINKS, client, clients, seed), side="right")
        return self.mix[min(int(found), len(self.mix) - 1)][0]

    def compute_of(self, client: int, clients: int, seed: int) -> float:
        """Seconds that one of so many clients trains in a round."""
        slow = bool(self.stragglers) and _place(_SLOW, client, clients, seed) < self.stragglers
        return self.compute_s * (self.slowdown if slow else 1.0)

    def fate(self, client: int, server_round: int, seed: int) -> str:
        """What happens to a client in a round, whatever it sends: "absent", "lost" or "ok"."""
        absent, lost = np.random.default_rng((_FATE, seed, server_round, client)).random(2)
        return "absent" if absent < self.dropout else "lost" if lost < self.loss else "ok"

    def clock(self, clients: int, seed: int) -> Clock:
        """A clock at the beginning of a run of so many clients."""
        return Clock(
            cache(lambda client: self.link_of(client, clients, seed)),  # each time it puts all clients in order
            cache(lambda client: self.compute_of(client, clients, seed)),
            self.deadline_s,
        )


def _mix(table: Any) -> tuple[tuple[Link, float], ...]:
    """Links and their shares."""
    if not isinstance(table, Mapping):
        raise ConfigError(f"fleet.links: expected a table of links and their shares, got {table!r}")
    mix = []
    for name, value in table.items():
        own = isinstance(value, Mapping)
        share = value.get("share") if own else value
        _number(f"links.{name}", share, "a share above 0, at most 1", math.ulp(0), 1)
        rest = {"name": name} | {key: given for key, given in value.items() if key != "share"} if own else name
        mix.append((Link.parse(rest, f"fleet.links.{name}" if own else "fleet.links"), float(share)))
    if mix and abs((total := math.fsum(share for _, share in mix)) - 1) > _SLACK:
        raise ConfigError(f"fleet.links: expected shares that sum to 1, got {total:.6g}")
    return tuple(mix)


def _place(what: int, client: int, clients: int, seed: int) -> float:
    """The client's place among all in the order of the seed, in (0, 1)."""
    order = np.random.default_rng((what, seed)).permutation(clients)
    return (int(order[client]) + 0.5) / clients


def _number(key: str, value: Any, expected: str, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise ConfigError(f"fleet.{key}: expected {expected}, got {value!r}")
