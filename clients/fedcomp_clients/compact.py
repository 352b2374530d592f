"""Messages between their ordinary form, which apps know, and the compact one, which takes fewer requests."""

import logging
from collections.abc import Callable, Iterator
from copy import copy

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict

from fedcomp.envelope import CONFIG, EVALUATION, METRICS, Entry, Envelope, fits
from fedcomp.request import KEY, MODEL, MODEL_AT, MODEL_STYPE, OWN, STYPE
from fedcomp_clients.records import of_kind

log = logging.getLogger("fedcomp")


def package_in(content: RecordDict) -> tuple[str, bytes] | None:
    """The packed model in a message, and the name of the record that it belongs into; None if there is none."""
    for config in of_kind(content, ConfigRecord).values():
        data, at = config.get(MODEL), config.get(MODEL_AT)
        if isinstance(data, bytes) and isinstance(at, str):
            return at, data
    for key, record in of_kind(content, ArrayRecord).items():
        for array in record.values():
            if array.stype == MODEL_STYPE:
                return key, array.data
    return None


def unpacked(content: RecordDict, key: str, model: ArrayRecord) -> RecordDict:
    """The message's content in its ordinary form: the model in the record of that name, in no configuration."""
    rest = {name: record for name, record in content.items() if name != key}
    for name, config in of_kind(content, ConfigRecord).items():
        if MODEL in config:
            rest[name] = ConfigRecord({k: value for k, value in config.items() if k not in (MODEL, MODEL_AT)})
    return RecordDict({key: model, **rest})


def with_frame(content: RecordDict, key: str, frame: bytes, own: bool) -> RecordDict:
    """The reply's content with a frame in the place of the model, which is in the record of that name.

    Args:
        content: of the reply, as the app made it.
        key: name of the record with the model.
        frame: of its update.
        own: whether the frame keeps to a budget of this node's own.
    """
    packed = Array(dtype="uint8", shape=(len(frame),), stype=STYPE, data=frame)
    said = {OWN: ConfigRecord({"own": True})} if own else {}
    return RecordDict({**content, key: ArrayRecord({KEY: packed}), **said})


def compacted(content: RecordDict, key: str, frame: bytes, evaluation: RecordDict | None, own: bool) -> RecordDict:
    """The same in one record, except that records with empty values travel by themselves.

    Args:
        content, key, frame, own: see `with_frame`.
        evaluation: content of the reply to an evaluation; None: there was none.
    """
    entries = {entry.name: entry for entry in _entries(content) if fits(entry.values)}
    told = [entry._replace(kind=EVALUATION + entry.kind) for entry in _entries(evaluation or RecordDict())]
    envelope = Envelope(frame, key, (*entries.values(), *(entry for entry in told if fits(entry.values))), own)
    rest = {name: record for name, record in content.items() if name not in entries and name != key}
    return RecordDict({KEY: ConfigRecord(envelope.to_mapping()), **rest})


def _entries(content: RecordDict) -> Iterator[Entry]:
    for name, record in content.items():
        if isinstance(record, MetricRecord):
            yield Entry(METRICS, name, dict(record))
        elif isinstance(record, ConfigRecord):
            yield Entry(CONFIG, name, dict(record))


def evaluate(
    message: Message, config: ConfigRecord, context: Context, call: Callable[[Message, Context], Message]
) -> RecordDict | None:
    """What an app says of the model in a train message when asked to evaluate it.

    Args:
        message: with one model.
        config: of the evaluation.
        call: the app, or its function for evaluation.

    Returns the content of its reply; None if it cannot say anything, which is only logged: training goes on.
    """
    ((key, record),) = message.content.array_records.items()
    name = next(iter(message.content.config_records), "config")
    content = RecordDict({key: ArrayRecord(dict(record)), name: config})
    metadata = copy(message.metadata)
    metadata.message_type = "evaluate"
    try:
        reply = call(Message(content=content, metadata=metadata), context)  # type: ignore[call-overload]
    except Exception as error:  # whatever user code raises, there is still the training
        log.warning("evaluation beside training failed: %s: %s", type(error).__name__, error)
        return None
    if reply.has_error():
        log.warning("evaluation beside training failed: %s", reply.error.reason)
        return None
    return reply.content
