"""The compact form of a message: everything that it holds in one flat mapping, which is one object of the transport.

Flower sends each record of a message as an object with a request of its own, and an array as two more, which costs
about a kilobyte up each, whatever they hold. A frame of 200 bytes and two metrics therefore share one ConfigRecord,
once both sides know how to read it:

    reply     frame     the frame
              arrays    name of the record that it stands for
              own       True if the frame keeps to a budget of this client's own
              records   what else there is, in order: "m:metrics" (metrics), "c:config" (other values), and "em:...",
                        "ec:..." for records of an evaluation that came along
              0.loss    a value of the first of these records, and so on

Knows nothing of Flower: mappings in, mappings out.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from fedcomp.errors import ConfigError, FrameError

Scalar: TypeAlias = bool | int | float | str | bytes
Value: TypeAlias = Scalar | list[bool] | list[int] | list[float] | list[str] | list[bytes]

METRICS, CONFIG = "m", "c"
EVALUATION = "e"
"""Prefix of the kind of records that are of an evaluation."""

_FRAME, _ARRAYS, _RECORDS, _OWN = "frame", "arrays", "records", "own"
_KINDS = frozenset({METRICS, CONFIG, EVALUATION + METRICS, EVALUATION + CONFIG})
_NUMBERS = (int, float)


class Entry(NamedTuple):
    """A record beside the frame: what kind it is of, its name in the message, and what it holds."""

    kind: str
    name: str
    values: Mapping[str, Value]


@dataclass(frozen=True)
class Envelope:
    """A reply in one mapping.

    Attributes:
        frame: of the update.
        arrays: name of the record that holds the model in a plain reply.
        entries: the other records, in the reply's order.
        own_budget: whether the frame keeps to a budget of this client's own, which tells nothing of the others'.

    >>> reply = Envelope(b"frame", "arrays", (Entry(METRICS, "metrics", {"num-examples": 10}),))
    >>> reply.to_mapping()
    {'frame': b'frame', 'arrays': 'arrays', 'records': ['m:metrics'], '0.num-examples': 10}
    >>> Envelope.from_mapping(reply.to_mapping()) == reply
    True
    """

    frame: bytes
    arrays: str
    entries: tuple[Entry, ...] = ()
    own_budget: bool = False

    def __post_init__(self) -> None:
        for entry in self.entries:
            if entry.kind not in _KINDS:
                raise ConfigError(f"envelope: expected a kind among {sorted(_KINDS)}, got {entry.kind!r}")
            if not fits(entry.values):
                raise ConfigError(f"envelope: record {entry.name!r} has empty values; let it travel by itself")

    def to_mapping(self) -> dict[str, Value]:
        """The mapping, without empty values, which some of Flower's own mods cannot bear."""
        told: dict[str, Value] = {_FRAME: self.frame, _ARRAYS: self.arrays}
        if self.own_budget:
            told[_OWN] = True
        if self.entries:
            told[_RECORDS] = [f"{entry.kind}:{entry.name}" for entry in self.entries]
        for index, entry in enumerate(self.entries):
            told |= {f"{index}.{key}": value for key, value in entry.values.items()}
        return told

    @classmethod
    def from_mapping(cls, told: Mapping[str, Value]) -> "Envelope":
        """Inverse of to_mapping. Raises FrameError for anything else, such as a metric that is no number."""
        frame, arrays, listed = told.get(_FRAME), told.get(_ARRAYS), told.get(_RECORDS, [])
        if not isinstance(frame, bytes) or not isinstance(arrays, str):
            raise FrameError(f"compact reply: expected a frame and the name of its record, got {sorted(told)[:10]}")
        titles = [title for title in listed if isinstance(title, str)] if isinstance(listed, list) else []
        if titles != listed:
            raise FrameError("compact reply: expected a list of the records in it")
        held: dict[str, dict[str, Value]] = {str(index): {} for index in range(len(titles))}
        for key, value in told.items():
            if key in (_FRAME, _ARRAYS, _RECORDS, _OWN):
                continue
            number, dot, name = key.partition(".")
            if not dot or number not in held:
                raise FrameError(f"compact reply: value {key[:80]!r} belongs to none of its {len(held)} records")
            held[number][name] = value
        entries = tuple(_entry(title, values) for title, values in zip(titles, held.values(), strict=True))
        names = [(entry.kind[:-1], entry.name) for entry in entries]
        if len(set(names)) < len(names) or ("", arrays) in names:
            raise FrameError(f"compact reply: several records of the same name among {titles[:10]}")
        return cls(frame, arrays, entries, told.get(_OWN) is True)


def fits(values: Mapping[str, Value]) -> bool:
    """Whether a record can travel in an envelope: none of its values is an empty text, bytes or list."""
    return all(isinstance(value, int | float) or len(value) > 0 for value in values.values())


def _entry(title: str, values: dict[str, Value]) -> Entry:
    kind, _, name = title.partition(":")
    if kind not in _KINDS:
        raise FrameError(f"compact reply: record of unknown kind {title[:80]!r}; it may come from a newer fedcomp")
    if not fits(values):
        raise FrameError(f"compact reply: record {name[:80]!r} has empty values")
    if kind.endswith(METRICS):
        for key, value in values.items():
            several = value if isinstance(value, list) else [value]
            if not all(isinstance(item, _NUMBERS) and not isinstance(item, bool) for item in several):
                raise FrameError(f"compact reply: expected numbers in metric {key[:80]!r} of {name[:80]!r}")
    return Entry(kind, name, values)
