"""Compressed: wraps any strategy of Flower's Message API so that clients upload frames instead of models.

``Compressed(FedAdam(...), uplink="topk(0.01)", feedback="ef")`` is all a server needs. It goes around everything else,
privacy wrappers included. Clients without fedcomp reply plainly and are averaged along.
"""

import logging
import math
import secrets
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAdagrad, FedAdam, FedAvg, FedYogi, Strategy
from numpy.typing import NDArray

from fedcomp import (
    EF21,
    Codec,
    ConfigError,
    FedcompError,
    Feedback,
    FetchSGD,
    LayoutError,
    NoFeedback,
    Plan,
    _validate,
    as_feedback,
    generator,
    wire,
)
from fedcomp.compressor import apply
from fedcomp.device import resolve
from fedcomp.layout import Layout, check_finite, check_same_tensors, is_float_dtype
from fedcomp.monitor import Monitor, Sink
from fedcomp.request import ACK, ACKS, KEY, MODEL_STYPE, Request
from fedcomp.schedule import Schedule, as_schedule
from fedcomp_strategies.acks import Acknowledgements
from fedcomp_strategies.aggregator import Aggregator
from fedcomp_strategies.averaging import averaged_metrics, averaged_reply, averages
from fedcomp_strategies.downlink import Downlink
from fedcomp_strategies.feedback import SERVER, ServerFeedback
from fedcomp_strategies.records import views
from fedcomp_strategies.replies import Reply, cause_of, check_weight, consistent, triage, weight_key, weight_of

log = logging.getLogger("fedcomp")

DROPPED = "fedcomp-dropped-"
"""Prefix of the metrics that count dropped replies by cause."""

Model = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class RoundTraffic:
    """What one train round moved.

    Attributes:
        round: number of the round.
        messages: train messages sent.
        uploads: models or frames that arrived, refused ones included.
        failures: messages without a usable reply: none came in time, an error, or one that was refused.
        bytes_up: payload that arrived: the length of every frame; of plain replies, of their serialized arrays.
        bytes_down: payload sent: the packed or serialized model, predictor and request of every message.
        dropped: replies that were not used, by cause (see replies.CAUSES).
        resets: uploads of clients whose memory was lost, damaged or too old and started again from zero.
        shortened: uploads of clients whose residual was longer than allowed.
    """

    round: int
    messages: int = 0
    uploads: int = 0
    failures: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    dropped: Mapping[str, int] = field(default_factory=dict)
    resets: int = 0
    shortened: int = 0


@dataclass
class _Round:
    """What the messages of a round have said, kept until the replies are in.

    Attributes:
        arrays: the global model.
        asked: messages by node.
        sent: the model that the inner strategy sent to each node that was asked for a frame.
        packed: nodes that got the model as a package.
    """

    arrays: ArrayRecord
    asked: Counter[int] = field(default_factory=Counter)
    sent: dict[int, ArrayRecord] = field(default_factory=dict)
    packed: set[int] = field(default_factory=set)
    _bases: dict[int, Model] = field(default_factory=dict)

    def base(self, node: int) -> Model:
        """The arrays that a node was sent, unpacked once however many nodes got them."""
        sent = self.sent[node]
        if id(sent) not in self._bases:
            self._bases[id(sent)] = views(sent)
        return self._bases[id(sent)]


class Compressed(Strategy):
    """Any strategy, with compressed uploads and a packed downlink.

    Strategies that average (FedAvg and its optimisers) are given one reply with the mean, which is summed straight from
    the frames; all others see ordinary replies with whole models.

    Args:
        strategy: the strategy to wrap.
        uplink: what clients do with their updates: a codec, its text such as ``"topk(0.01, values=uniform(8))"``, or
            a Plan, or a Schedule of them over the rounds.
        feedback: what makes up for losses: "none", "ef", "cafe", "dgc", "fetchsgd", "ef21", with arguments as in
            ``"cafe(beta=0.8)"``.
        downlink: "pack": the model travels as one array without loss, to clients known to understand it; a codec, its
            text or a Plan: as compressed differences, with error feedback at the server; "plain": as the inner strategy
            sends it.
        mixed_fleet: whether some clients may not have fedcomp. If so, each gets plain models until it has answered with
            a frame; if not, all get packed models from the start.
        device: where updates are summed: "cpu", "cuda", "auto" for CUDA where there is some.
        integers: what becomes of integer tensors such as batch counters under strategies that average: "mean" (what
            Flower does, in float64) or "max" (the largest, in their own dtype).
        seed: feeds all randomness of the codecs, together with round and partition.
        monitor: called with statistics of each tensor of each decoded update; every update is decoded for it.

    Attributes:
        traffic: one RoundTraffic a train round.

    Raises ConfigError for an unknown codec or feedback, or for one that diverges around the codec.
    """

    def __init__(
        self,
        strategy: Strategy,
        uplink: Schedule | Plan | Codec | str,
        *,
        feedback: Feedback | str = "none",
        downlink: Plan | Codec | str = "pack",
        mixed_fleet: bool = True,
        device: str = "auto",
        integers: str = "mean",
        seed: int = 0,
        monitor: Sink | None = None,
    ) -> None:
        _validate.one_of(choices=("mean", "max"), integers=integers)
        _validate.flag(mixed_fleet=mixed_fleet)
        self.strategy = strategy
        self.traffic: list[RoundTraffic] = []
        self.monitor = monitor
        self.integers = integers
        self.device = str(resolve(device))
        self._mixed = mixed_fleet
        self._monitors: dict[int, Monitor] = {}
        self._schedule = as_schedule(uplink)
        self._learnt: dict[Plan, Plan] = {}
        self._feedback = ServerFeedback(as_feedback(feedback), seed)
        self._downlink = None if downlink == "plain" else Downlink(None if downlink == "pack" else downlink, seed)
        self._request = Request(self._schedule.plan(1), 0, self._feedback.feedback, seed, _new_session())
        self._acks = Acknowledgements()
        self._aware: set[int] = set()
        self._round: _Round | None = None
        self._check(strategy)

    def _check(self, strategy: Strategy) -> None:
        """Refuse what cannot work before the run, and say what will not work well."""
        feedback = self._feedback.feedback
        for plan in self._schedule.plans():
            feedback.check(plan)
        if self._feedback.needs_mean and not averages(strategy):
            raise ConfigError(
                f"feedback {feedback.name!r} computes with the mean of all updates, which "
                f"{type(strategy).__name__} does not take; use one that averages, such as FedAvg, or feedback='ef'"
            )
        if isinstance(strategy, FedAdam | FedYogi | FedAdagrad) and not isinstance(feedback, NoFeedback):
            log.warning(
                "feedback %s under %s: adaptive server steps lose accuracy with biased codecs and feedback; "
                "an unbiased codec such as eden(0.1) without feedback holds up better",
                feedback, type(strategy).__name__,
            )  # fmt: skip
        if type(strategy).start is not Strategy.start:
            log.warning("%s has a start() of its own, which the wrapped strategy does not use", type(strategy).__name__)

    def __getattr__(self, name: str) -> Any:
        """Attributes of the wrapped strategy, for code that reads them."""
        if name == "strategy":  # not there yet while unpickling
            raise AttributeError(name)
        return getattr(self.strategy, name)

    def summary(self) -> None:
        """Log what is wrapped and what clients are asked for."""
        log.info("uplink %s, feedback %s", self._request.plan.to_config(), self._request.feedback)
        self.strategy.summary()

    # --- down --------------------------------------------------------------------------------------------------------

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The inner strategy's train messages, each with the request for this round."""
        if server_round <= self._request.round:  # another training with the same strategy
            self._restart()
        planned = self._schedule.plan(server_round)
        plan = self._feedback.feedback.plan(self._learnt.get(planned, planned), server_round)
        self._request = replace(self._request, round=server_round, plan=plan, feedback=self._feedback.feedback)
        messages = list(self.strategy.configure_train(server_round, arrays, config, grid))
        asked = Counter(message.metadata.dst_node_id for message in messages)
        self._round = _Round(arrays, asked)
        told = self._tell_acks(grid, set(asked))
        for message in messages:
            records = message.content.array_records
            node = message.metadata.dst_node_id
            if len(records) == 1 and asked[node] == 1:  # others could not be told apart: these nodes reply plainly
                self._round.sent[node] = next(iter(records.values()))
                message.content = _with_config(message.content, {KEY: self._request.to_text(), **told.get(node, {})})
        self._pack(messages, server_round, self._feedback.predictor_frame)
        self._measure_down(server_round, messages)
        return messages

    def _restart(self) -> None:
        self._request = replace(self._request, session=_new_session())
        self._acks, self._aware = Acknowledgements(), set()
        self._feedback.restart()
        if self._downlink is not None:
            self._downlink.restart()

    def _tell_acks(self, grid: Grid, nodes: set[int]) -> dict[int, dict[str, Any]]:
        """What to tell each node about its former uploads."""
        if not self._request.feedback.slots:
            return {}
        told = {node: self._acks.told(node) for node in nodes}
        orphans = self._acks.orphans(set(grid.get_node_ids())) if None in told.values() else []
        return {
            node: {ACK: round_} if round_ is not None else {ACKS: orphans} if orphans else {}
            for node, round_ in told.items()
        }

    def _pack(self, messages: list[Message], server_round: int, predictor: bytes | None = None) -> None:
        """Replace the global model in the messages by packages, for nodes that can read them."""
        if self._downlink is None or self._round is None:
            return
        records: dict[bytes, ArrayRecord] = {}  # messages share theirs, and should go on doing so
        published = None
        for message in messages:
            node = message.metadata.dst_node_id
            sent = message.content.array_records
            if (self._mixed and node not in self._aware) or len(sent) != 1:
                continue
            ((key, record),) = sent.items()
            if record is not published:
                if published is not None or not _has_floats(record):  # strategies with several models at once
                    continue
                self._downlink.publish(views(record), server_round)
                published = record
            data = self._downlink.package(node, predictor)
            packed = Array(dtype="uint8", shape=(len(data),), stype=MODEL_STYPE, data=data)
            record = records.setdefault(data, ArrayRecord({KEY: packed}))
            message.content = RecordDict({**message.content, key: record})
            self._round.packed.add(node)

    def _measure_down(self, server_round: int, messages: list[Message]) -> None:
        nbytes = sum(_nbytes(record) for m in messages for record in m.content.array_records.values())
        for config in (c for m in messages for c in m.content.config_records.values()):
            nbytes += len(str(config.get(KEY, "")).encode())
            nbytes += 8 * (1 if ACK in config else len(config.get(ACKS, ())))  # type: ignore[arg-type]
        self.traffic.append(RoundTraffic(server_round, messages=len(messages), bytes_down=nbytes))

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The inner strategy's evaluate messages, with the model packed as for training."""
        messages = list(self.strategy.configure_evaluate(server_round, arrays, config, grid))
        self._round = _Round(arrays)
        self._pack(messages, server_round)
        return messages

    # --- up ----------------------------------------------------------------------------------------------------------

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Decode the replies and hand them to the inner strategy.

        A reply that is damaged, inconsistent, late, repeated, foreign or not finite is dropped, alone, and counted by
        cause: in `traffic`, in the log and in the metrics of the result. If nothing usable is left, or all weights are
        zero, the old model stays.
        """
        sent, self._round = self._round or _Round(ArrayRecord()), None
        replies = list(replies)
        key = weight_key(self.strategy)
        opened = triage(replies, sent.asked, server_round, key)
        handle = self._average if self._takes_mean(sent, opened) else self._hand_over
        opened, arrays, metrics = handle(server_round, opened, sent, key)
        used = {r.node: r.notes for r in opened if not r.cause and r.notes is not None and _counts(r.message, key)}
        self._confirm(opened, sent)
        self._account(replies, opened, sent, list(used.values()))
        if arrays is not None and not _is_finite(arrays):
            log.error("round %d: the aggregated model is not finite, the old model stays", server_round)
            arrays = None
        if arrays is None:
            self._feedback.learn(None, {}, server_round)
        else:
            for node, notes in used.items():
                self._acks.accept(node, server_round, notes.number)
            self._learn(sent.arrays, arrays)
        return arrays, self._count_dropped(metrics)

    def _takes_mean(self, sent: _Round, replies: list[Reply]) -> bool:
        """Whether the inner strategy can be given the mean.

        So it is if it averages, all replies are about one model of floats, and no monitor wants to see each of them.
        """
        good = [reply.node for reply in replies if not reply.cause]
        models = [sent.sent.get(node) for node in good]
        if not models or models[0] is None or any(model is not models[0] for model in models):
            return False
        return self.monitor is None and averages(self.strategy) and _has_floats(models[0])

    def _average(
        self, server_round: int, replies: list[Reply], sent: _Round, key: str | None
    ) -> tuple[list[Reply], ArrayRecord | None, MetricRecord | None]:
        """Hand the inner strategy one reply with the mean. Returns also the replies as they came out."""
        assert isinstance(self.strategy, FedAvg) and key is not None  # noqa: PT018  (for type checkers)
        base = next(sent.base(reply.node) for reply in replies if not reply.cause)
        tables = isinstance(self._request.feedback, FetchSGD)
        aggregator = Aggregator(base, self._request.plan, round=server_round, device=self.device, tables=tables)
        opened = [self._collect(reply, aggregator, sent, key) for reply in replies]
        mean = aggregator.mean()
        failed = mean.failed
        opened = [r.refused(cause_of(failed[r.node]), failed[r.node]) if r.node in failed else r for r in opened]
        if not self._any_weight(server_round, opened, key):
            return opened, None, None
        good = [reply.message for reply in opened if not reply.cause]
        buckets = self._request.plan.buckets(Layout.of(base))
        mean = self._feedback.step(mean, buckets, {m.metadata.src_node_id: weight_of(m, key) for m in good})
        model = ArrayRecord({name: Array(values) for name, values in mean.tensors(base, self.integers)})
        del mean, aggregator  # a model each, which the strategy may need the room of
        arrays, _ = self.strategy.aggregate_train(server_round, [averaged_reply(good, model, key), *_errors(opened)])
        return opened, arrays, averaged_metrics(self.strategy, good)

    def _collect(self, reply: Reply, aggregator: Aggregator, sent: _Round, key: str) -> Reply:
        """Give a reply to the aggregator, which tells later whether it was any good."""
        if reply.cause:
            return reply
        weight = weight_of(reply.message, key)
        try:
            if reply.array is not None:
                self._feedback.check(reply.notes)
                aggregator.add(reply.frame(), weight, node=reply.node)
            elif isinstance(self._request.feedback, EF21):
                raise LayoutError("feedback 'ef21' needs clients with fedcomp, this one replied uncompressed")
            else:
                aggregator.add_plain(self._plain(reply, sent), weight, node=reply.node)
        except FedcompError as error:
            return reply.refused(cause_of(error), error)
        return reply

    def _hand_over(
        self, server_round: int, replies: list[Reply], sent: _Round, key: str | None
    ) -> tuple[list[Reply], ArrayRecord | None, MetricRecord | None]:
        """Hand the inner strategy every client's model. Returns as _average does."""
        opened = [self._open(reply, sent) for reply in replies]
        if not self._any_weight(server_round, opened, key):
            self.strategy.aggregate_train(server_round, _errors(opened))
            return opened, None, None
        messages = [reply.message for reply in opened if reply.cause not in _UNASKED]
        arrays, metrics = self.strategy.aggregate_train(server_round, messages)
        return opened, arrays, metrics

    def _open(self, reply: Reply, sent: _Round) -> Reply:
        """The reply with a whole model in it, or an error reply that says why it was refused."""
        if reply.cause or reply.node not in sent.sent:
            return reply
        try:
            if reply.array is None and not _has_floats(sent.sent[reply.node]):
                return reply  # nothing that we asked for, such as the trees of FedXgbBagging
            model = self._plain(reply, sent) if reply.array is None else self._decode(reply, sent)
        except FedcompError as error:
            return reply.refused(cause_of(error), error)
        ((key, _),) = reply.message.content.array_records.items()
        content = RecordDict({**reply.message.content, key: _record(model)})
        message: Message = Message(content=content, metadata=reply.message.metadata)  # type: ignore[call-overload]
        return replace(reply, message=message)

    def _decode(self, reply: Reply, sent: _Round) -> Model:
        base = sent.base(reply.node)
        contents = wire.unpack(reply.frame(), Layout.of(base), plan=self._request.plan, round=self._request.round)
        self._feedback.check(contents.notes)
        model = apply(contents, self._feedback.shifted(base) if contents.notes.predicted else base)
        if self.monitor is not None:
            node = self._monitors.setdefault(reply.node, Monitor(self.monitor))
            node.observe(self._request.round, base, model)
        return model

    def _plain(self, reply: Reply, sent: _Round) -> Model:
        """The model of an uncompressed reply in the order of the base, which some strategies match it by.

        Raises FedcompError unless it fits the model that was sent and is finite.
        """
        base = sent.base(reply.node)
        try:
            model = _numpy(next(iter(reply.message.content.array_records.values())))
        except Exception as error:  # whatever numpy says of a stranger's bytes, they must not end the run
            raise LayoutError(f"uncompressed reply cannot be read: {error}") from error
        check_same_tensors(base, model, "uncompressed reply")
        Layout.of(model)  # refuses dtypes that no model has
        for name, values in model.items():
            if values.dtype.kind == "f":
                check_finite(name, values)
        told = self._downlink.told if self._downlink is not None and reply.node in sent.packed else base
        return {name: _moved(model[name], told[name], base[name]) for name in base}

    def _any_weight(self, server_round: int, replies: list[Reply], key: str | None) -> bool:
        """Whether any reply counts; if not, say so. A strategy that weighs nothing counts all."""
        good = [reply.message for reply in replies if not reply.cause]
        if not good:
            log.error("round %d: none of %d replies can be used, the old model stays", server_round, len(replies))
        elif not any(_counts(message, key) for message in good):
            log.error("round %d: all replies have weight zero, the old model stays", server_round)
        else:
            return True
        return False

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """The inner strategy's evaluation, without replies that are inconsistent or have an impossible weight."""
        sent, self._round = self._round or _Round(ArrayRecord()), None
        key = weight_key(self.strategy)
        checked = consistent([check_weight(Reply(m, "error" if m.has_error() else ""), key) for m in replies])
        self._confirm(checked, sent)
        return self.strategy.aggregate_evaluate(server_round, [reply.message for reply in checked])

    # --- what a round leaves behind ----------------------------------------------------------------------------------

    def _confirm(self, replies: list[Reply], sent: _Round) -> None:
        """Remember which nodes understand packages, and which of them hold the model of this round."""
        for reply in replies:
            if reply.array is not None:
                self._aware.add(reply.node)
            if self._downlink is None or reply.node not in sent.packed:
                continue
            if reply.cause in ("error", "stale"):  # perhaps it could not read the package
                self._downlink.forget(reply.node)
                self._aware.discard(reply.node)
            else:
                self._downlink.confirm(reply.node)

    def _account(self, replies: list[Message], opened: list[Reply], sent: _Round, used: list[wire.Notes]) -> None:
        """Complete the round's traffic, and log what was dropped and reset."""
        round_ = self._request.round
        arrived = [m for m in replies if not m.has_error()]
        causes = Counter(reply.cause for reply in opened if reply.cause)
        answered = Counter(reply.node for reply in opened if reply.cause not in _UNASKED)
        causes["missing"] = sum((sent.asked - answered).values())
        good = sum(not reply.cause for reply in opened)
        traffic = self.traffic[-1] if self.traffic else RoundTraffic(0)
        if traffic.round != round_ or not sent.asked:  # somebody else made the messages
            traffic = RoundTraffic(round_, messages=len(opened))
            self.traffic.append(traffic)
        self.traffic[-1] = replace(
            traffic,
            uploads=len(arrived),
            failures=max(traffic.messages - good, 0),
            bytes_up=sum(_nbytes(record) for m in arrived for record in m.content.array_records.values()),
            dropped={cause: count for cause, count in sorted(causes.items()) if count},
            resets=sum(notes.reset for notes in used),
            shortened=sum(notes.shortened for notes in used),
        )
        for reply in opened:
            if reply.cause:
                log.warning("round %d: node %d: %s", round_, reply.node, reply.message.error.reason)
        if self.traffic[-1].dropped:
            log.warning("round %d: replies dropped by cause: %s", round_, self.traffic[-1].dropped)
        if arrived:
            parameters = sum(math.prod(array.shape) for array in sent.arrays.values())
            self._feedback.warn_of_starvation(8 * self.traffic[-1].bytes_up / len(arrived) / max(parameters, 1))
        if self.traffic[-1].resets:
            log.warning("round %d: %d clients had lost what feedback remembers", round_, self.traffic[-1].resets)

    def _count_dropped(self, metrics: MetricRecord | None) -> MetricRecord | None:
        """The metrics with the counts of this round's dropped replies by cause, for the strategy's result."""
        dropped = {f"{DROPPED}{cause}": count for cause, count in self.traffic[-1].dropped.items()}
        return MetricRecord({**(metrics or {}), **dropped}) if dropped else metrics

    def _learn(self, before: ArrayRecord, arrays: ArrayRecord) -> None:
        """Let feedback, and codecs with shared side information, look at the update of the global model."""
        plan, round_ = self._request.plan, self._request.round
        adapts = any(type(codec).adapt is not Codec.adapt for codec in plan.codecs())
        if not adapts and not self._feedback.learns:
            return
        old, new = views(before), views(arrays)
        with np.errstate(over="ignore", invalid="ignore"):
            update = {n: (new[n] - old[n]).astype(np.float32) for n in old if new[n].dtype.kind == "f"}
        finite = all(np.isfinite(u).all() for u in update.values())
        coded = [tensor.name for bucket in plan.buckets(Layout.of(old)) for tensor in bucket.layout.tensors]
        self._feedback.learn({name: update[name] for name in coded} if finite else None, new, round_)
        if adapts and finite:
            rng = generator(self._request.seed, round_, SERVER)
            layout = Layout.of({n: new[n] for n in update})
            self._learnt[self._schedule.plan(round_)] = plan.adapt(update, layout, rng)


_UNASKED = ("foreign", "repeated")
"""Causes of replies that the inner strategy hears nothing of."""


def _numpy(record: Mapping[str, Array]) -> Model:
    return {name: array.numpy() for name, array in record.items()}


def _record(model: Model) -> ArrayRecord:
    return ArrayRecord({name: Array(values) for name, values in model.items()})


def _nbytes(record: ArrayRecord) -> int:
    return sum(len(array.data) for array in record.values())


def _new_session() -> str:
    return secrets.token_hex(4)


def _has_floats(record: ArrayRecord) -> bool:
    return any(array.stype == "numpy.ndarray" and is_float_dtype(array.dtype) for array in record.values())


def _is_finite(record: ArrayRecord) -> bool:
    return all(np.isfinite(values).all() for values in views(record).values() if values.dtype.kind == "f")


def _errors(replies: list[Reply]) -> list[Message]:
    return [reply.message for reply in replies if reply.cause and reply.cause not in _UNASKED]


def _counts(message: Message, key: str | None) -> bool:
    return key is None or weight_of(message, key) != 0


def _moved(values: NDArray[Any], start: NDArray[Any], to: NDArray[Any]) -> NDArray[Any]:
    """A tensor of a model trained from `start`, as if it had been trained from `to`."""
    if start is to or values.dtype.kind != "f" or np.array_equal(start, to):
        return values
    return np.asarray(values + (to - start), values.dtype)


def _with_config(content: RecordDict, told: dict[str, Any]) -> RecordDict:
    """The content with these entries in its configuration, whatever older ones may be in there."""
    key, config = next(iter(content.config_records.items()), ("config", ConfigRecord()))
    kept = {name: value for name, value in config.items() if name not in (KEY, ACK, ACKS)}
    return RecordDict({**content, key: ConfigRecord({**kept, **told})})
