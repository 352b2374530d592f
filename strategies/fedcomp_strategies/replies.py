"""Replies of clients, looked at before anything is decoded: who sent them, what they weigh, what is in them."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord
from flwr.serverapp.strategy import Strategy

from fedcomp import FrameError, LayoutError, NonFiniteError, wire
from fedcomp.errors import RoundError
from fedcomp.request import DECLINED, OWN, STYPE
from fedcomp_strategies.aggregator import LARGEST_WEIGHT
from fedcomp_strategies.compact import expanded, is_compact
from fedcomp_strategies.records import nbytes, of_kind
from fedcomp_strategies.traffic import objects_in

_LONGEST = 300  # characters of a client's words in the log

BAD_REPLY = 900
"""Error code of a reply that arrived but was refused; the reason says why."""

CAUSES = ("error", "stale", "non-finite", "late", "repeated", "foreign", "damaged", "mismatch", "weight", "missing")
"""Why a reply is dropped: the client failed; it lost the model that it should have held; its update is not finite; the
frame is of another round; the node has replied already; the node was not asked; the frame is damaged or made otherwise
than asked; tensors or records are not those of the others; its weight is impossible; it never came."""

UNASKED = ("foreign", "repeated")
"""Causes of replies that the inner strategy hears nothing of."""


@dataclass(frozen=True)
class Reply:
    """A reply, or what was made of one that was dropped.

    Attributes:
        message: as it came; an error message once it was dropped.
        cause: why it was dropped, one of CAUSES; "": it was not.
        notes: what its frame says about feedback; None if it has no sound frame.
        version: of the frame; 0 without one.
        arrived: whether the client replied with content, whatever became of it.
        objects: that the transport split it into.
        payload: bytes of the frame, or of the serialized arrays, as they arrived.
        compact: whether all of it came in one record.
        evaluation: what else the client says of the model that it received, as a reply to an evaluation.
        own_budget: whether the frame keeps to a budget of this node's own.
        about: the node that the transport says is gone, in an answer of its own; None: the node has answered itself.
        declined: why the client replied plainly, as it says itself.
    """

    message: Message
    cause: str = ""
    notes: wire.Notes | None = None
    version: int = 0
    payload: int = 0
    compact: bool = False
    evaluation: Message | None = None
    own_budget: bool = False
    declined: str = ""
    about: int | None = None
    arrived: bool = False
    objects: int = 0

    @classmethod
    def of(cls, message: Message, addressees: Mapping[str, int] | None = None) -> "Reply":
        """A reply as it arrived, in its ordinary form; refused if that cannot be read.

        Args:
            message: the reply.
            addressees: nodes by id of the message to them: a SuperLink answers in its own name for nodes that are gone.
        """
        if message.has_error():
            node = (addressees or {}).get(message.metadata.reply_to_message_id)
            return cls(message, about=None if node == message.metadata.src_node_id else node)
        came = cls(message, arrived=True, objects=objects_in(message.content), compact=is_compact(message))
        if not came.compact:
            said = message.content.config_records
            reason = " ".join(str(said.get(DECLINED, ConfigRecord()).get("reason", "")).split())[:_LONGEST]
            return replace(came, payload=_nbytes(message), declined=reason, own_budget=OWN in said)
        try:
            reply, evaluation, own = expanded(message)
        except FrameError as error:
            return came.refused("damaged", error)
        return replace(came, message=reply, payload=_nbytes(reply), evaluation=evaluation, own_budget=own)

    @property
    def node(self) -> int:
        """Who sent it, or should have."""
        return self.message.metadata.src_node_id if self.about is None else self.about

    @property
    def array(self) -> Array | None:
        """The array that carries the frame; None in a plain reply."""
        if self.message.has_error():
            return None
        found = [a for r in of_kind(self.message.content, ArrayRecord).values() for a in r.values()]
        return next((array for array in found if array.stype.startswith("fedcomp.")), None)

    def frame(self) -> bytes:
        """The frame. Raises FrameError if the reply holds something else besides."""
        record = next(iter(of_kind(self.message.content, ArrayRecord).values()))
        if len(record) != 1 or (array := next(iter(record.values()))).stype != STYPE:
            raise FrameError(f"expected one array of type {STYPE}, got {[array.stype for array in record.values()]}")
        return array.data

    def refused(self, cause: str, reason: object) -> "Reply":
        """The reply as an error message that says why it was dropped."""
        error = Error(BAD_REPLY, f"reply refused: {reason}")
        message: Message = Message(error=error, metadata=self.message.metadata)  # type: ignore[call-overload]
        return replace(self, message=message, cause=cause)


def _nbytes(message: Message) -> int:
    return sum(nbytes(record) for record in of_kind(message.content, ArrayRecord).values())


def cause_of(error: Exception) -> str:
    """The cause that stands for an error met while decoding."""
    kinds = {NonFiniteError: "non-finite", RoundError: "late", FrameError: "damaged", LayoutError: "mismatch"}
    return next((cause for kind, cause in kinds.items() if isinstance(error, kind)), "damaged")


def triage(
    messages: Iterable[Message],
    asked: Counter[int],
    round: int,
    key: str | None,
    addressees: Mapping[str, int] | None = None,
) -> list[Reply]:
    """The replies by node, those refused that need no decoding to see it.

    Args:
        messages: in any order.
        asked: how many messages went to each node in this round; empty: somebody else sent them.
        round: the round that frames must be of.
        key: the metric by which replies are weighed; None: they are not.
        addressees: nodes by the id of the message that they got.
    """
    replies = sorted(
        (Reply.of(message, addressees) for message in messages), key=lambda reply: (reply.node, _content(reply))
    )
    replies = list(_known([_checked(reply, round, key) for reply in replies], asked))
    return _consistent(replies, 1, key)


def triage_evaluation(messages: Iterable[Message], key: str | None) -> list[Reply]:
    """Replies to evaluate messages, those refused that have no place in the inner strategy's evaluation."""
    return _consistent([_checked(Reply.of(message), 0, key) for message in messages], 0, key)


def _content(reply: Reply) -> bytes:
    """What tells apart two replies of one node, so that no order of arrival decides between them."""
    return reply.array.data if reply.array is not None else b""


def _checked(reply: Reply, round: int, key: str | None) -> Reply:
    if reply.cause:
        return reply
    if reply.message.has_error():
        reason = reply.message.error.reason
        said = {"StaleModelError": "stale", "FrameError": "stale", "NonFiniteError": "non-finite"}
        return replace(reply, cause=next((cause for name, cause in said.items() if name in str(reason)), "error"))
    array = reply.array
    seen = wire.peek(array.data) if array is not None and array.stype == STYPE else None
    if seen is not None and seen[0] != round:
        return reply.refused("late", f"frame is for round {seen[0]}, expected round {round}")
    version = wire.version_of(array.data) if seen is not None and array is not None else 0
    return _check_weight(replace(reply, notes=seen and seen[1], version=version), key)


def _known(replies: list[Reply], asked: Counter[int]) -> Iterator[Reply]:
    """Replies of nodes that were not asked, or asked less often; a good reply is preferred to a bad one."""
    left = asked.copy()
    order = sorted(range(len(replies)), key=lambda i: (replies[i].node, bool(replies[i].cause)))
    for reply in (replies[i] for i in order):
        if asked and not asked[reply.node]:
            yield reply.refused("foreign", "this node was not asked")
        elif asked and not left[reply.node]:
            yield reply if reply.cause == "late" else reply.refused("repeated", "this node has replied already")
        else:
            left[reply.node] -= 1
            yield reply


def _check_weight(reply: Reply, key: str | None) -> Reply:
    """The reply, refused if its weight is missing, negative or no finite number."""
    if reply.cause or key is None:
        return reply
    weight = weight_of(reply.message, key)
    if isinstance(weight, int | float) and 0 <= weight <= LARGEST_WEIGHT:
        return reply
    return reply.refused("weight", f"expected the metric {key!r} from 0 to {LARGEST_WEIGHT:g}, got {weight}")


def _consistent(replies: list[Reply], models: int, key: str | None) -> list[Reply]:
    """Refuse replies that would make Flower end the whole run.

    Those are replies with more or fewer records than Flower takes, and those whose records differ from most others'.

    Args:
        replies: those that were refused already are left alone.
        models: how many array records a reply must have.
        key: the metric by which replies are weighed; None: they are not, and may do without metrics.
    """
    replies = [reply if reply.cause else _countable(reply, models, key) for reply in replies]
    kinds = ["" if reply.cause else _kind(reply.message) for reply in replies]
    usual = Counter(kind for kind in kinds if kind).most_common(1)
    return [
        reply
        if not kind or kind == usual[0][0]
        else reply.refused("mismatch", f"expected the records {usual[0][0]}, as most clients send, got {kind}")
        for reply, kind in zip(replies, kinds, strict=True)
    ]


def _countable(reply: Reply, models: int, key: str | None) -> Reply:
    content = reply.message.content
    found = len(of_kind(content, ArrayRecord)), len(of_kind(content, MetricRecord))
    if (found[0] != models and models) or (found[1] != 1 and key is not None):
        wanted = f"{models} ArrayRecord and 1 MetricRecord" if models else "1 MetricRecord"
        return reply.refused("mismatch", f"expected {wanted}, got {found[0]} ArrayRecords and {found[1]} MetricRecords")
    return reply


def weight_key(strategy: Strategy) -> str | None:
    """The metric that a strategy weighs replies by, also below privacy wrappers."""
    key: str | None = None
    inner: Any = strategy
    while key is None and inner is not None:
        key, inner = getattr(inner, "weighted_by_key", None), getattr(inner, "strategy", None)
    return key


def weight_of(message: Message, key: str | None) -> Any:
    """What a strategy will take as a reply's weight; None if the reply has nothing of the kind."""
    records = of_kind(message.content, MetricRecord).values()
    return next((record[key] for record in records if key is not None and key in record), None)


def _kind(message: Message) -> str:
    """The names of the records of a reply, and what is in its metric records, with the lengths of lists."""
    told = sorted(of_kind(message.content, ArrayRecord))
    for name, record in sorted(of_kind(message.content, MetricRecord).items()):
        keys = sorted(f"{k}[{len(v)}]" if isinstance(v, list) else k for k, v in record.items())
        told.append(f"{name} {{{', '.join(keys)}}}")
    return ", ".join(told) or "nothing"
