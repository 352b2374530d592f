"""What rounds moved: the bytes of every message, and what became of the replies."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from flwr.app import Message

from fedcomp.request import ACK, ACKS, KEY
from fedcomp_strategies.records import nbytes


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
    capped: float = 1.0


def payload(messages: Iterable[Message]) -> int:
    """Bytes of the arrays in the messages, and of what we have put into their configuration."""
    total = 0
    for message in messages:
        total += sum(nbytes(record) for record in message.content.array_records.values())
        for config in message.content.config_records.values():
            listed = config.get(ACKS, [])
            total += len(str(config.get(KEY, "")).encode())
            total += 8 * ((ACK in config) + (len(listed) if isinstance(listed, list) else 0))
    return total
