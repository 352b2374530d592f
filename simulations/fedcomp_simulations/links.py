"""Links between devices and their server: how long an exchange takes on one, a round, a whole run, and what it costs.

The time of one client's exchange, if nothing else is on its link:

    t = requests * RTT + 8 wire_down / down + training + 8 wire_up / up

A synchronous round lasts as long as the slowest client that is waited for, at most to the deadline. docs/links.md says
what that leaves out.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Protocol

from fedcomp import _validate
from fedcomp.errors import ConfigError

UNHEARD = ("lost", "late", "absent")
"""Outcomes of exchanges whose replies a server waits for until its deadline."""


class Moved(Protocol):
    """What an exchange moved, as results.Exchange keeps it."""

    @property
    def client(self) -> int:
        """Number of the client, its partition id."""

    @property
    def wire_up(self) -> int:
        """Bytes on its uplink."""

    @property
    def wire_down(self) -> int:
        """Bytes on its downlink."""

    @property
    def requests(self) -> int:
        """Round trips."""

    @property
    def outcome(self) -> str:
        """One of results.OUTCOMES."""


@dataclass(frozen=True)
class Link:
    """A device's access to the network.

    Attributes:
        name: of the preset, or what the user calls it.
        up_bps, down_bps: bits per second that applications see, above 0.
        rtt_s: seconds of a round trip.
        up_j_per_byte, down_j_per_byte: energy that the device's radio takes for a byte; 0: not known.
        source: where the figures are from.
    """

    name: str
    up_bps: float
    down_bps: float
    rtt_s: float = 0.0
    up_j_per_byte: float = 0.0
    down_j_per_byte: float = 0.0
    source: str = ""

    def __post_init__(self) -> None:
        for key in ("up_bps", "down_bps"):
            object.__setattr__(self, key, _validate.number(low=0, high=1e15, above=True, **{key: getattr(self, key)}))
        for key in ("rtt_s", "up_j_per_byte", "down_j_per_byte"):
            object.__setattr__(self, key, _validate.number(low=0, high=1e6, **{key: getattr(self, key)}))

    @classmethod
    def parse(cls, given: "str | Mapping[str, Any] | Link", key: str = "link") -> "Link":
        """A link from the name of a preset, or from a table as in an experiment's TOML.

            {up = "20 kbit/s", down = "26 kbit/s", rtt = "1.6 s"}
            {preset = "nb-iot", rtt = "4 s", up_energy = "0.2 mJ"}

        Numbers are bits per second, seconds, and joules per byte. Raises ConfigError, which begins with `key`.
        """
        if isinstance(given, Link):
            return given
        if isinstance(given, str):
            if given not in PRESETS:
                raise ConfigError(f"{key}: unknown link {given!r}; there are {', '.join(PRESETS)}, or give a table")
            return PRESETS[given]
        if not isinstance(given, Mapping):
            raise ConfigError(f"{key}: expected the name of a link or a table with up, down and rtt, got {given!r}")
        return _from_table(given, key)

    def to_table(self) -> str | dict[str, Any]:
        """What `parse` makes this link from; the name of a preset where it is one."""
        if PRESETS.get(self.name) == self:
            return self.name
        table = {key: getattr(self, name) for key, name in _TABLE.items()}
        return {"name": self.name} | {key: value for key, value in table.items() if value or key in ("up", "down")}

    def seconds(self, exchange: Moved, compute_s: float = 0.0) -> float:
        """Time of an exchange, from the server's sending to the reply's last byte; 0 for a client that got nothing."""
        if exchange.outcome == "absent":
            return 0.0
        moved = 8 * exchange.wire_down / self.down_bps + 8 * exchange.wire_up / self.up_bps
        return exchange.requests * self.rtt_s + moved + compute_s

    def joules(self, exchange: Moved) -> float:
        """Energy that the exchange takes at the device's radio; 0 if the link does not know."""
        return self.up_j_per_byte * exchange.wire_up + self.down_j_per_byte * exchange.wire_down


_TABLE = {
    "up": "up_bps",
    "down": "down_bps",
    "rtt": "rtt_s",
    "up_energy": "up_j_per_byte",
    "down_energy": "down_j_per_byte",
}
_UNITS: dict[str, dict[str, float]] = {
    "rate": {"bit/s": 1, "kbit/s": 1e3, "mbit/s": 1e6, "gbit/s": 1e9, "bps": 1, "kbps": 1e3, "mbps": 1e6, "gbps": 1e9},
    "time": {"s": 1, "ms": 1e-3, "min": 60},
    "energy": {"j": 1, "mj": 1e-3, "uj": 1e-6, "µj": 1e-6, "nj": 1e-9},
}
_KINDS = {"up": "rate", "down": "rate", "rtt": "time", "up_energy": "energy", "down_energy": "energy"}
_OTHER = re.compile(r"[kKmMgG]?B([pP][sS]|/[sS])|M[jJsS]")
_LARGEST = 1e300
_EXAMPLES = {"rate": '"20 kbit/s"', "time": '"1.6 s"', "energy": 'energy of a byte such as "0.2 mJ"'}
_QUANTITY = re.compile(r"(\d+(?:\.\d*)?(?:e[+-]?\d+)?|\.\d+)\s*([a-zµ]+(?:/s)?)(?:\s*/\s*byte)?", re.IGNORECASE)


def _from_table(table: Mapping[str, Any], key: str) -> Link:
    known = ("name", "preset", *_TABLE)
    for entry in table:
        if entry not in known:
            raise ConfigError(f"{key}: unknown key {entry!r}; available: {', '.join(known)}")
    values: dict[str, Any] = {_TABLE[k]: _quantity(table[k], _KINDS[k], f"{key}.{k}") for k in _TABLE if k in table}
    preset = Link.parse(table["preset"], f"{key}.preset") if "preset" in table else None
    if preset is None and (missing := [k for k in ("up", "down") if k not in table]):
        raise ConfigError(f"{key}.{missing[0]}: is missing; expected a rate such as {_EXAMPLES['rate']}")
    name = table.get("name", f"{preset.name}, changed" if preset else "custom")
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{key}.name: expected a text, got {name!r}")
    try:
        return replace(preset, name=name, source="", **values) if preset else Link(name=name, **values)
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from error


def _quantity(value: Any, kind: str, key: str) -> float:
    """A number in the base unit from a number, or from a text with its unit."""
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _LARGEST:
        return float(value)
    found = _QUANTITY.fullmatch(value.strip()) if isinstance(value, str) else None
    factor = _UNITS[kind].get(_unit(found[2])) if found else None
    if found is None or factor is None:
        hint = "; rates are of bits, a large B means bytes" if kind == "rate" and found and "B" in found[2] else ""
        raise ConfigError(f"{key}: expected {_EXAMPLES[kind]} or a number, got {value!r}{hint}")
    return float(found[1]) * factor


def _unit(unit: str) -> str:
    """The unit in small letters, unless a large one makes it another: B are bytes, and MJ and Ms a billion times mJ."""
    return unit if _OTHER.fullmatch(unit) else unit.lower()


PRESETS: dict[str, Link] = {
    link.name: link
    for link in (
        Link(
            *("nb-iot", 20e3, 26e3, 1.6),
            up_j_per_byte=8 * 0.5 / 20e3,
            source="up nominal (peak 62 kbit/s); down peak and least latency of Cat NB1: Cellular Communication "
            "Protocols, mbedded.ninja 2024; 500 mW while sending: 3GPP TR 45.820, after Sauter, From GSM to "
            "LTE-Advanced Pro and 5G, 2017",
        ),
        Link(
            *("lte-m", 1e6, 800e3, 0.1),
            source="Cat M1, full duplex, scheduling delays counted: LTE-M Device Categories, RF Wireless World; "
            "latency at the edge of normal coverage: Evaluation of LTE-M towards 5G IoT Requirements, white paper 2018",
        ),
        Link(*("lte-m-half", 375e3, 300e3, 0.1), source="Cat M1, half duplex; else as lte-m"),
        Link(
            *("dsl", 10e6, 64e6, 0.03),
            source="up nominal; down the mean of UK homes in November 2019 (64.0, up 14.0 Mbit/s): Home Broadband "
            "Performance, Ofcom 2020; least of terrestrial round trips: Huston, Notes from IETF 115, CircleID 2022",
        ),
        Link(*("gprs", 20e3, 50e3, 0.5), source="the throttling preset GPRS of Chrome's developer tools"),
        Link(
            *("satellite-geo", 10e6, 100e6, 0.6),
            source="subscription of 100/10 Mbit/s: Fact Checking Starlink's Performance Figures, APNIC 2022; round "
            "trip: Testing LEO and GEO Satellite Services in Australia, APNIC 2022",
        ),
        Link(
            *("satellite-leo", 7.2e6, 62.5e6, 0.048),
            source="Starlink in the US, means of the second quarter of 2022: Ookla Speedtest",
        ),
    )
}
"""Links by name."""


class Clock:
    """The time of a run on given links, round after round: a server that waits for those that it has asked.

    A client that is still busy with an earlier round, which the server gave up on, begins the next one later.

    Args:
        link_of: the link of a client; None: its bytes take no time.
        compute_of: seconds that a client trains in a round.
        deadline_s: how long the server waits in a round.

    Attributes:
        now: seconds since the beginning of the run.
    """

    def __init__(
        self,
        link_of: Callable[[int], Link | None],
        compute_of: Callable[[int], float] = lambda client: 0.0,
        deadline_s: float = math.inf,
    ) -> None:
        self._link_of = link_of
        self._compute_of = compute_of
        self._deadline_s = deadline_s
        self._free: dict[int, float] = {}  # when each client has done with what it was asked
        self.now = 0.0

    def seconds(self, exchange: Moved) -> float:
        """Seconds from the beginning of this round until the reply of the exchange is there, or would be."""
        link, compute = self._link_of(exchange.client), self._compute_of(exchange.client)
        own = compute if link is None else link.seconds(exchange, compute)
        return max(self._free.get(exchange.client, 0.0) - self.now, 0.0) + own

    def is_late(self, exchange: Moved) -> bool:
        """Whether the reply comes after the deadline of this round."""
        return self.seconds(exchange) > self._deadline_s

    def end_round(self, exchanges: Iterable[Moved]) -> float:
        """Let a round with these exchanges pass and return its seconds.

        The server waits for the last reply that comes in time; where one does not come at all, until its deadline. With
        no deadline it is taken to know whose reply will not come.
        """
        waited, free = [0.0], dict(self._free)
        for exchange in exchanges:
            seconds = self.seconds(exchange)
            if exchange.outcome != "absent":
                free[exchange.client] = self.now + seconds
            if exchange.outcome not in UNHEARD:
                waited.append(min(seconds, self._deadline_s))
            elif self._deadline_s < math.inf:
                waited.append(self._deadline_s)
        self._free = free
        self.now += max(waited)
        return max(waited)


def round_seconds(exchanges: Iterable[Moved], link_of: Callable[[int], Link | None], deadline_s: float) -> float:
    """Seconds of one round whose clients were all free when it began; see Clock."""
    return Clock(link_of, deadline_s=deadline_s).end_round(exchanges)


def link_seconds(rounds: Iterable[Iterable[Moved]], on: Link | Clock) -> list[float]:
    """Seconds from the beginning of a run to the end of each of its rounds.

    Args:
        rounds: the exchanges of each round.
        on: what to time them on: a clock, as `Fleet.clock` makes it; or a link that all clients have, for transmission
            alone: a round lasts until the last byte of its slowest client, whose reply may be lost or late, as these
            bytes are sent all the same.
    """
    if isinstance(on, Link):
        return list(accumulate(max(map(on.seconds, exchanges), default=0.0) for exchanges in rounds))
    times = []
    for exchanges in rounds:
        on.end_round(exchanges)
        times.append(on.now)
    return times


def joules(rounds: Iterable[Iterable[Moved]], on: Link | Callable[[int], Link | None]) -> float:
    """Energy that a run's exchanges take at the radios of all clients together.

    Args:
        rounds: the exchanges of each round.
        on: a link that all clients have, or the link of each client; those without one count as nothing.
    """
    link_of = (lambda client: on) if isinstance(on, Link) else on
    moved = ((link_of(exchange.client), exchange) for exchanges in rounds for exchange in exchanges)
    return math.fsum(link.joules(exchange) for link, exchange in moved if link is not None)
