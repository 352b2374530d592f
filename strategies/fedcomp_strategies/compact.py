"""Messages between their ordinary form, which strategies know, and the compact one, which takes fewer requests."""

from collections.abc import Mapping
from typing import NamedTuple

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from fedcomp import FrameError
from fedcomp.envelope import EVALUATION, METRICS, Entry, Envelope
from fedcomp.request import KEY, MODEL, MODEL_AT, STYPE
from fedcomp_strategies.records import of_kind

MOST_IN_RECORD = 2**20
"""Bytes of the longest package that travels in a configuration. There each node's message holds a copy of its own, an
array is held once for all; and the 3 kB of requests that it saves are nothing beside acknowledging a larger model."""

MOST_IN_MESSAGES = 2**26
"""Bytes of all such copies in one round's messages."""


def is_compact(message: Message) -> bool:
    """Whether everything in a reply is in one record."""
    return not message.has_error() and "frame" in message.content.config_records.get(KEY, {})


class Expanded(NamedTuple):
    """What a compact reply stands for.

    Attributes:
        reply: in its ordinary form.
        evaluation: what it says of the model that the client received, as another reply; None: nothing.
        own_budget: whether the frame keeps to a budget of the node's own.
    """

    reply: Message
    evaluation: Message | None
    own_budget: bool


def expanded(message: Message) -> Expanded:
    """A compact reply opened.

    Raises FrameError if it is none.
    """
    envelope = Envelope.from_mapping(message.content.config_records.get(KEY, {}))
    packed = Array(dtype="uint8", shape=(len(envelope.frame),), stype=STYPE, data=envelope.frame)
    trained = [entry for entry in envelope.entries if not entry.kind.startswith(EVALUATION)]
    evaluated = [entry for entry in envelope.entries if entry.kind.startswith(EVALUATION)]
    rest = {name: record for name, record in message.content.items() if name != KEY}
    records = _records(trained)
    if clash := rest.keys() & {*records, envelope.arrays}:
        raise FrameError(f"compact reply: several records of the same name: {sorted(clash)[:10]}")
    reply = _like(message, RecordDict({envelope.arrays: ArrayRecord({KEY: packed}), **records, **rest}))
    evaluation = _like(message, RecordDict({**_records(evaluated)})) if evaluated else None
    return Expanded(reply, evaluation, envelope.own_budget)


def with_package(content: RecordDict, key: str, package: bytes) -> RecordDict:
    """The content of a message with a package in its configuration instead of the record of that name."""
    rest = {name: record for name, record in content.items() if name != key}
    config_key, config = next(iter(of_kind(content, ConfigRecord).items()), ("config", ConfigRecord()))
    return RecordDict({**rest, config_key: ConfigRecord({**config, MODEL: package, MODEL_AT: key})})


def _records(entries: list[Entry]) -> Mapping[str, MetricRecord | ConfigRecord]:
    try:
        return {
            entry.name: (MetricRecord if entry.kind.endswith(METRICS) else ConfigRecord)(dict(entry.values))  # type: ignore[arg-type]
            for entry in entries
        }
    except (TypeError, ValueError) as error:
        raise FrameError(f"compact reply: {error}") from error


def _like(message: Message, content: RecordDict) -> Message:
    return Message(content=content, metadata=message.metadata)  # type: ignore[call-overload, no-any-return]
