"""What rounds moved: the bytes of every message, and what became of the replies."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict

from fedcomp.request import is_ours
from fedcomp_strategies.records import nbytes, of_kind


@dataclass(frozen=True)
class RoundTraffic:
    """What one round moved.

    Attributes:
        round: number of the round.
        messages: train messages sent.
        uploads: models or frames that arrived, refused ones included.
        failures: messages without a usable reply: none came in time, an error, or one that was refused.
        bytes_up: payload that arrived: the length of every frame; of plain replies, of their serialized arrays.
        bytes_down: payload of the train messages: the packed or serialized model, predictor and request of each.
        bytes_down_evaluate: payload of the evaluate messages, which carry the model too.
        dropped: replies that were not used, by cause (see replies.CAUSES).
        resets: uploads of clients whose memory was lost, damaged or too old and started again from zero.
        shortened: uploads of clients whose residual was longer than allowed.
        wire_up: estimate of all bytes that the round took on the clients' uplinks: payload, metrics, and every request
            of Flower's transport, those for the downlink and for evaluation as well; see `transport`.
        capped: what the mean update was multiplied with because it was longer than `norm_cap` allows; 1: it was not.
    """

    round: int
    messages: int = 0
    uploads: int = 0
    failures: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    bytes_down_evaluate: int = 0
    dropped: Mapping[str, int] = field(default_factory=dict)
    resets: int = 0
    shortened: int = 0
    wire_up: int = 0
    capped: float = 1.0

    def line(self, metrics: Mapping[str, object] | None = None, of_round: int | None = None) -> str:
        """What the round came to, in one line.

        Args:
            metrics: of the evaluation; accuracies of it are shown, else the losses, else whatever there is.
            of_round: the round whose model they are of, if that is another one.
        """
        parts = [f"uplink {self.bytes_up:,} B in {self.uploads} of {self.messages} replies (wire ~{self.wire_up:,} B)"]
        parts.append(f"downlink {self.bytes_down + self.bytes_down_evaluate:,} B")
        if said := _said(metrics or {}):
            parts.insert(0, said + ("" if of_round in (None, self.round) else f" after round {of_round}"))
        if self.dropped:
            parts.append("dropped " + ", ".join(f"{count} {cause}" for cause, count in self.dropped.items()))
        return f"round {self.round}: " + " | ".join(parts)


def _said(metrics: Mapping[str, object]) -> str:
    """The most telling numbers among the metrics."""
    numbers = {key: value for key, value in metrics.items() if isinstance(value, int | float)}
    kinds = [{k: v for k, v in numbers.items() if word in k.lower()} for word in ("acc", "loss")]
    chosen = next((kind for kind in kinds if kind), numbers)
    return ", ".join(f"{key} {value:.4g}" for key, value in chosen.items() if not key.startswith("fedcomp-"))


# What Flower 1.42's requests take on a client's uplink beside content, in bytes: headers with the node's signature, the
# request's own fields, and of an object its class and children. Measured between a SuperNode and a SuperLink, without
# TLS and TCP; `fedcomp bench --wire` repeats it.
_POLL, _CONFIRM, _PULL, _ANNOUNCE, _PUSH, _NAME = 855, 941, 928, 945, 1_119, 68
_CHUNK = 5 * 2**20


def objects_in(content: RecordDict) -> int:
    """Objects that Flower splits a message into, each with a request of its own: itself, records, arrays, chunks."""
    arrays = [array for record in of_kind(content, ArrayRecord).values() for array in record.values()]
    return 2 + len(content) + sum(1 + max(math.ceil(len(array.data) / _CHUNK), 1) for array in arrays)


def transport(objects_down: int, objects_up: int, content_up: int) -> int:
    """Bytes on a client's uplink for a message and its reply, as Flower's transport makes them: an estimate.

    Args:
        objects_down: of the message, each of which the client asks for.
        objects_up: of the reply; 0: there is none.
        content_up: bytes of what is in the reply.
    """
    fetched = _POLL + _CONFIRM + _PULL * objects_down
    return fetched + (_ANNOUNCE + (_PUSH + _NAME) * objects_up + content_up if objects_up else 0)


# The same for responses on its downlink, measured alike: to a poll, a confirmation, a pull, an announcement, a push.
# Those to polls and announcements name the objects. For all settings of `bench --wire` the sum is within 0.1 %.
_POLLED, _CONFIRMED, _PULLED, _ANNOUNCED, _PUSHED = 280, 128, 300, 230, 130


def transport_down(objects_down: int, objects_up: int, content_down: int) -> int:
    """Bytes on a client's downlink for a message and its reply, responses to its requests included: an estimate.

    Args:
        objects_down: of the message.
        objects_up: of the reply; 0: there is none.
        content_down: bytes of what is in the message.
    """
    fetched = _POLLED + _CONFIRMED + (_PULLED + _NAME) * objects_down + content_down
    return fetched + (_ANNOUNCED + (_PUSHED + _NAME) * objects_up if objects_up else 0)


def requests(objects_down: int, objects_up: int) -> int:
    """Number of requests that a client makes for a message and its reply; arguments as of `transport`.

    It asks for messages and for each object, confirms, announces its reply and pushes each object of that.
    """
    return 2 + objects_down + (1 + objects_up if objects_up else 0)


def payload(messages: Iterable[Message]) -> int:
    """Bytes of the arrays in the messages, and of what we have put into their configuration."""
    total = 0
    for message in messages:
        total += sum(nbytes(record) for record in of_kind(message.content, ArrayRecord).values())
        for config in of_kind(message.content, ConfigRecord).values():
            total += sum(_length(value) for key, value in config.items() if is_ours(key))
    return total


def _length(value: object) -> int:
    """Bytes of a value in a configuration: numbers have eight."""
    if isinstance(value, list):
        return sum(map(_length, value))
    if isinstance(value, str):
        return len(value.encode())
    return len(value) if isinstance(value, bytes) else 8
