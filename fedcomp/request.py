"""What a server asks of a client in one round, as one JSON string inside the configuration it sends anyway.

The server decides the codec; a client that does not understand the request replies plainly, which is always legal.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from io import BytesIO
from typing import Protocol

from numpy.lib import format as npy

from fedcomp import _validate
from fedcomp.errors import ConfigError
from fedcomp.feedback import Feedback, NoFeedback, as_feedback
from fedcomp.layout import is_float_dtype
from fedcomp.plan import Plan

KEY = "fedcomp"
"""Key of the request in the train configuration, and of the frame in the reply."""

STYPE = "fedcomp.v1"
"""Serialization type of the array that carries a frame: no server averages it by mistake."""

MODEL_STYPE = "fedcomp.model.v1"
"""Serialization type of the array that carries the packed global model to a client."""

ACK = "fedcomp-ack"
"""Key of the acknowledgement: the last round in which the server used an upload of this node, if any."""

ACKS = "fedcomp-acks"
"""For nodes without one: [number, round, ...] of clients that are gone and may be back as this node."""

PLACE = "fedcomp-place"
"""This client's place among all of the round, in [0, 1): for rounding up where others round down."""

COMPACT = "fedcomp-compact"
"""True where the server reads replies in an Envelope. Clients that do not know it reply in records as ever."""

MODEL = "fedcomp-model"
"""The packed global model inside the configuration, for clients that are known to look for it there."""

MODEL_AT = "fedcomp-model-at"
"""Name of the record that this model belongs into."""

DECLINED = "fedcomp-declined"
"""Name of a record in a plain reply; its entry `reason` says why the client could not do what was asked for."""

OWN = "fedcomp-own-budget"
"""Name of a record beside a frame that is an array: the frame keeps to a budget of this client's own."""

EVALUATE = "fedcomp-evaluate"
"""True where the received model is to be evaluated before it is trained. Keys `fedcomp-evaluate.<key>` are the
configuration of that evaluation."""

BUDGETS = "fedcomp-budgets"
"""Budgets by node property, as a flat list of conditions and budgets: see fedcomp.budget."""


def is_ours(key: str) -> bool:
    """Whether an entry of a message's configuration is fedcomp's, so that none of another round is left in it."""
    return key == KEY or key.startswith(f"{KEY}-")


_VERSION = 1
_KEYS = {"v", "plan", "feedback", "round", "seed", "session"}
_OPTIONAL = {"norm", "weight"}  # not written unless asked for, so that older clients can read the others


@dataclass(frozen=True)
class Request:
    """Reply to `round` with a frame made by `plan`.

    Attributes:
        feedback: what makes up for losses.
        seed: feeds all randomness.
        session: names this training; what feedback remembers from another one does not count.
        weight: metric of the reply that says what the update weighs, for codecs that share bytes out by it; "": all
            weigh alike. Clients of a fedcomp without this reply plainly too.
        norm: whether the frame is to note the length of the update. Clients of a fedcomp without this reply plainly.
    """

    plan: Plan
    round: int
    feedback: Feedback = NoFeedback()  # noqa: RUF009  (frozen)
    seed: int = 0
    session: str = "0"
    norm: bool = False
    weight: str = ""

    def __post_init__(self) -> None:
        _validate.instance(kind=Plan, plan=self.plan)
        _validate.integer(low=0, high=2**32 - 1, round=self.round)
        _validate.instance(kind=Feedback, feedback=self.feedback)
        _validate.integer(low=0, seed=self.seed)
        _validate.instance(kind=str, session=self.session)
        _validate.flag(norm=self.norm)
        _validate.instance(kind=str, weight=self.weight)
        if not self.session.isalnum() or len(self.session) > 32:  # it becomes a part of file names
            raise ConfigError(f"session: expected up to 32 letters and digits, got {self.session[:40]!r}")

    def to_text(self) -> str:
        """The request as compact JSON."""
        told = {"v": _VERSION, "plan": self.plan.to_config(), "feedback": str(self.feedback), "round": self.round}
        told |= {"seed": self.seed, "session": self.session} | ({"norm": True} if self.norm else {})
        told |= {"weight": self.weight} if self.weight else {}
        return json.dumps(told, separators=(",", ":"))

    @classmethod
    def from_text(cls, text: str) -> "Request":
        """Inverse of to_text. Raises ConfigError for another version, unknown codec or key, or anything malformed."""
        try:
            told = json.loads(text)
        except (ValueError, RecursionError):
            raise ConfigError(f"request: expected JSON, got {text[:80]!r}") from None
        if not isinstance(told, dict) or told.get("v") != _VERSION:
            raise ConfigError(
                f"request: expected version {_VERSION}, got {text[:80]!r}; the server runs another fedcomp"
            )
        if told.keys() - _OPTIONAL != _KEYS:
            raise ConfigError(f"request: expected the keys {sorted(_KEYS)}, got {sorted(told)}")
        plan, feedback = Plan.from_config(told["plan"]), as_feedback(told["feedback"])
        rest = {key: told[key] for key in _OPTIONAL & told.keys()}
        return cls(plan, told["round"], feedback, told["seed"], told["session"], **rest)


class Serialized(Protocol):
    """An array as Flower's messages hold it."""

    @property
    def dtype(self) -> str:
        """Name of numpy's dtype."""

    @property
    def stype(self) -> str:
        """How it is serialized."""

    @property
    def data(self) -> bytes:
        """The bytes of np.save, if it is serialized that way."""


def has_floats(record: Mapping[str, Serialized]) -> bool:
    """Whether there is anything in a message's record that a codec could compress."""
    return any(array.stype == "numpy.ndarray" and is_float_dtype(_dtype(array)) for array in record.values())


def _dtype(array: Serialized) -> str:
    """Name of the array's dtype; records made from Flower's legacy Parameters leave it to the bytes to tell."""
    if array.dtype:
        return array.dtype
    stream = BytesIO(array.data)
    try:
        npy.read_magic(stream)
        return str(npy.read_array_header_1_0(stream)[2])
    except ValueError:
        return ""
