"""Compressed: wraps any strategy of Flower's Message API so that clients upload frames instead of models.

``Compressed(FedAdam(...), uplink="topk(0.01)", feedback="ef")`` is all a server needs. It goes around everything else,
privacy wrappers included. Clients without fedcomp reply plainly and are averaged along.
"""

import logging
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from numpy.typing import NDArray

from fedcomp import Codec, ErrorFeedback, FedcompError, FrameError, LayoutError, Plan, decompress, generator
from fedcomp.layout import Layout, check_finite, check_same_tensors
from fedcomp.monitor import Monitor, Sink
from fedcomp.request import KEY, STYPE, Request
from fedcomp.schedule import Schedule

log = logging.getLogger("fedcomp")

BAD_REPLY = 900
"""Error code of a reply that arrived but was refused; the reason says why."""

_SERVER = 2**64
"""Stands for the server where randomness is seeded by node: beyond every node id."""

Model = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class RoundTraffic:
    """What one train round moved.

    Attributes:
        round: number of the round.
        messages: train messages sent.
        uploads: models or frames that arrived, refused ones included.
        failures: error replies and refused replies.
        bytes_up: payload that arrived: the length of every frame; of plain replies, of their serialized arrays.
        bytes_down: payload sent: serialized arrays and the request, for every message.
    """

    round: int
    messages: int = 0
    uploads: int = 0
    failures: int = 0
    bytes_up: int = 0
    bytes_down: int = 0


class Compressed(Strategy):
    """Any strategy, with compressed uploads.

    Args:
        strategy: the strategy to wrap. It sees ordinary replies with whole models.
        uplink: what clients do with their updates: a codec, its text such as ``"topk(0.01, values=uniform(8))"``, or
            a Plan, or a Schedule of them over the rounds.
        feedback: "none", or "ef" for error feedback at the clients (codecs must be contractive).
        seed: feeds all randomness of the codecs, together with round and partition.
        monitor: called with statistics of each tensor of each decoded update.

    Attributes:
        traffic: one RoundTraffic a train round.

    Raises ConfigError for an unknown codec, or for error feedback around a codec with which it diverges.
    """

    def __init__(
        self,
        strategy: Strategy,
        uplink: Schedule | Plan | Codec | str,
        *,
        feedback: str = "none",
        seed: int = 0,
        monitor: Sink | None = None,
    ) -> None:
        self.strategy = strategy
        self.traffic: list[RoundTraffic] = []
        self.monitor = monitor
        self._monitors: dict[int, Monitor] = {}
        self._schedule = uplink if isinstance(uplink, Schedule) else Schedule.of([(1, uplink)])
        self._learnt: dict[Plan, Plan] = {}
        self._request = Request(self._schedule.plan(1), 0, feedback, seed)
        self._sent: dict[int, ArrayRecord] = {}
        self._bases: dict[int, Model] = {}
        self._global: ArrayRecord | None = None
        if feedback == "ef":
            for codec in {codec for plan in self._schedule.plans() for codec in plan.codecs()}:
                ErrorFeedback(codec)

    def __getattr__(self, name: str) -> Any:
        """Attributes of the wrapped strategy, for code that reads them."""
        if name == "strategy":  # not there yet while unpickling
            raise AttributeError(name)
        return getattr(self.strategy, name)

    def summary(self) -> None:
        """Log what is wrapped and what clients are asked for."""
        log.info("uplink %s, feedback %s", self._request.plan.to_config(), self._request.feedback)
        self.strategy.summary()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The inner strategy's train messages, each with the request for this round."""
        asked = self._schedule.plan(server_round)
        self._request = replace(self._request, round=server_round, plan=self._learnt.get(asked, asked))
        self._global = arrays
        text = self._request.to_text()
        asking = ConfigRecord({**config, KEY: text})
        messages = list(self.strategy.configure_train(server_round, arrays, asking, grid))
        self._sent, self._bases = {}, {}
        nbytes = 0
        for message in messages:
            _ensure_request(message, text)
            records = message.content.array_records
            nbytes += len(text) + sum(_nbytes(record) for record in records.values())
            if len(records) == 1:
                self._sent[message.metadata.dst_node_id] = next(iter(records.values()))
        self.traffic.append(RoundTraffic(server_round, messages=len(messages), bytes_down=nbytes))
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Decode the replies and hand them to the inner strategy.

        A reply that is damaged, inconsistent or not finite counts as a failure of its client alone. If nothing usable
        is left, or all weights are zero, the old model stays.
        """
        replies = sorted(replies, key=lambda m: m.metadata.src_node_id)  # sums must not hang on the order of arrival
        arrived = [m for m in replies if not m.has_error()]
        opened = _drop_inconsistent([self._open(message) for message in replies])
        failures = sum(m.has_error() for m in opened)
        self.traffic[-1] = replace(
            self.traffic[-1],
            uploads=len(arrived),
            failures=failures,
            bytes_up=sum(_nbytes(r) for m in arrived for r in m.content.array_records.values()),
        )
        for message in opened:
            if message.has_error():
                log.warning("round %d: node %d: %s", server_round, message.metadata.src_node_id, message.error.reason)
        if opened and failures == len(opened):
            log.error("round %d: none of %d replies can be used, the old model stays", server_round, len(opened))
        elif opened and not any(self._weight(m) != 0 for m in opened if not m.has_error()):
            log.error("round %d: all replies have weight zero, the old model stays", server_round)
            return None, None
        arrays, metrics = self.strategy.aggregate_train(server_round, opened)
        self._sent, self._bases = {}, {}
        if arrays is not None:
            self._learn(arrays)
        return arrays, metrics

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The inner strategy's evaluate messages, unchanged."""
        return self.strategy.configure_evaluate(server_round, arrays, config, grid)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """The inner strategy's evaluation."""
        return self.strategy.aggregate_evaluate(server_round, replies)

    # --- one reply ---------------------------------------------------------------------------------------------------

    def _open(self, message: Message) -> Message:
        """The reply with a whole model in it, or an error reply that says why it was refused."""
        sent = self._sent.get(message.metadata.src_node_id)
        if message.has_error() or sent is None or not _has_floats(sent):
            return message  # nothing that we asked for, such as the trees of FedXgbBagging
        try:
            self._check_weight(message)
            return self._decode(message, sent)
        except FedcompError as error:
            return _refuse(message, str(error))

    def _decode(self, message: Message, sent: ArrayRecord) -> Message:
        records = message.content.array_records
        if len(records) != 1:
            raise LayoutError(f"expected one ArrayRecord in the reply, got {len(records)}")
        ((key, record),) = records.items()
        base = self._base(sent)
        framed = [array for array in record.values() if array.stype.startswith("fedcomp.")]
        if not framed:
            _check_plain(base, record)
            return message
        if len(record) != 1 or framed[0].stype != STYPE:
            raise FrameError(f"expected one array of type {STYPE}, got {[array.stype for array in record.values()]}")
        model = decompress(framed[0].data, base, plan=self._request.plan, round=self._request.round)
        if self.monitor is not None:
            node = self._monitors.setdefault(message.metadata.src_node_id, Monitor(self.monitor))
            node.observe(self._request.round, base, model)
        content = RecordDict({**message.content, key: ArrayRecord({name: Array(a) for name, a in model.items()})})
        return Message(content=content, metadata=message.metadata)  # type: ignore[call-overload, no-any-return]

    def _base(self, sent: ArrayRecord) -> Model:
        """The arrays of a record that was sent, unpacked once however many nodes got it."""
        if id(sent) not in self._bases:
            self._bases[id(sent)] = _numpy(sent)
        return self._bases[id(sent)]

    # --- weights -----------------------------------------------------------------------------------------------------

    def _weight(self, message: Message) -> Any:
        """What the inner strategy will take as a reply's weight; None if the reply has nothing of the kind."""
        key: str | None = None
        inner: Any = self.strategy
        while key is None and inner is not None:  # through privacy wrappers
            key, inner = getattr(inner, "weighted_by_key", None), getattr(inner, "strategy", None)
        records = message.content.metric_records.values()
        return next((record[key] for record in records if key is not None and key in record), None)

    def _check_weight(self, message: Message) -> None:
        weight = self._weight(message)
        if weight is not None and not (isinstance(weight, int | float) and math.isfinite(weight) and weight >= 0):
            raise LayoutError(f"expected a weight that is a finite number and not negative, got {weight}")

    # --- learning between rounds -------------------------------------------------------------------------------------

    def _learn(self, arrays: ArrayRecord) -> None:
        """Let codecs with shared side information look at the update of the global model."""
        plan = self._request.plan
        if self._global is None or all(type(codec).adapt is Codec.adapt for codec in plan.codecs()):
            return
        old, new = _numpy(self._global), _numpy(arrays)
        with np.errstate(over="ignore", invalid="ignore"):
            update = {n: (new[n] - old[n]).astype(np.float32) for n in old if new[n].dtype.kind == "f"}
        if not all(np.isfinite(u).all() for u in update.values()):
            return
        rng = generator(self._request.seed, self._request.round, _SERVER)
        layout = Layout.of({n: new[n] for n in update})
        self._learnt[self._schedule.plan(self._request.round)] = plan.adapt(update, layout, rng)


def _numpy(record: Mapping[str, Array]) -> Model:
    return {name: array.numpy() for name, array in record.items()}


def _nbytes(record: ArrayRecord) -> int:
    return sum(len(array.data) for array in record.values())


def _has_floats(record: ArrayRecord) -> bool:
    return any("float" in array.dtype for array in record.values())


def _ensure_request(message: Message, text: str) -> None:
    """Put the request into the message if the inner strategy built its configuration anew."""
    configs = message.content.config_records
    if any(KEY in config for config in configs.values()):
        return
    key, config = next(iter(configs.items()), ("config", ConfigRecord()))
    message.content = RecordDict({**message.content, key: ConfigRecord({**config, KEY: text})})


def _refuse(message: Message, reason: str) -> Message:
    error = Error(BAD_REPLY, f"reply refused: {reason}")
    return Message(error=error, metadata=message.metadata)  # type: ignore[call-overload, no-any-return]


def _check_plain(base: Model, record: ArrayRecord) -> None:
    """Raise FedcompError unless an uncompressed reply fits the model that was sent and is finite."""
    try:
        model = _numpy(record)
    except Exception as error:  # whatever numpy says of a stranger's bytes, they must not end the run
        raise LayoutError(f"uncompressed reply cannot be read: {error}") from error
    check_same_tensors(base, model, "uncompressed reply")
    for name, values in model.items():
        if values.dtype.kind == "f":
            check_finite(name, values)


def _drop_inconsistent(messages: list[Message]) -> list[Message]:
    """Refuse replies whose metrics differ in kind from most others', which would make Flower end the whole run."""
    kinds = [None if message.has_error() else _metric_kind(message) for message in messages]
    usual = Counter(kind for kind in kinds if kind is not None).most_common(1)
    return [
        message
        if kind is None or kind == usual[0][0]
        else _refuse(message, f"expected metrics {usual[0][0]}, got {kind}, which no other client sends")
        for message, kind in zip(messages, kinds, strict=True)
    ]


def _metric_kind(message: Message) -> str:
    """The names in each metric record, with the lengths of lists."""
    records = message.content.metric_records.values()
    return " and ".join(
        "{" + ", ".join(sorted(f"{k}[{len(v)}]" if isinstance(v, list) else k for k, v in record.items())) + "}"
        for record in records
    )
