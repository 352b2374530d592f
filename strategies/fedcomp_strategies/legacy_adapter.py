"""A legacy strategy in the clothes of the Message API, so that Compressed can go around it."""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from hashlib import sha256
from typing import Any

import flwr.server.strategy as legacy
from flwr.app import ArrayRecord, ConfigRecord, Error, Message, Metadata, MetricRecord, RecordDict
from flwr.common import EvaluateIns, FitIns, FitRes, Parameters, Scalar
from flwr.server.client_manager import ClientManager
from flwr.server.client_proxy import ClientProxy
from flwr.serverapp import Grid

from fedcomp import FedcompError
from fedcomp.request import ACKS
from fedcomp_strategies.averaging import Adapter, Traits
from fedcomp_strategies.legacy_records import to_parameters, to_record
from fedcomp_strategies.replies import BAD_REPLY

log = logging.getLogger("fedcomp")

_WEIGHT = "num_examples"
_SERVER = 1  # node id of the server in messages, as in Flower's
_AVERAGING = (legacy.FedAvg, legacy.FedAvgM, legacy.FedOpt)  # and FedProx, FedAdagrad, FedAdam, FedYogi, which are one
_ADAPTIVE = (legacy.FedAdam, legacy.FedYogi, legacy.FedAdagrad)
_WEIGHTLESS = (legacy.FedMedian, legacy.FedTrimmedAvg, legacy.Bulyan, legacy.QFedAvg)


class LegacyAdapter(Adapter):
    """A legacy strategy as one of the Message API.

    What has no place in a Message is kept beside it: clients, results and metrics as they came. Messages and results
    are matched by their position.

    Attributes:
        manager: who the clients are.
        metrics: what the last aggregate_fit made of all.
        evaluation: what the last aggregate_evaluate made.
        said: numbers of the server's own evaluation of the round, to be logged; None: there was none.
    """

    weighted_by_key = _WEIGHT

    def __init__(self, strategy: legacy.Strategy) -> None:
        self.strategy = strategy
        self.traits = _traits(strategy)
        self.manager: ClientManager | None = None
        self.metrics: dict[str, Scalar] = {}
        self.evaluation: tuple[float | None, dict[str, Scalar]] = None, {}
        self.said: MetricRecord | None = None
        self._known: list[tuple[Parameters, ArrayRecord]] = []
        self._told: list[tuple[ClientProxy, FitIns | EvaluateIns]] = []
        self._results: Sequence[tuple[ClientProxy, Any]] = ()
        self._failures: Sequence[Any] = ()

    # --- between the two forms ---------------------------------------------------------------------------------------

    def given(self, parameters: Parameters, manager: ClientManager) -> ArrayRecord:
        """The global model as a record, for a round that begins with the clients of the manager."""
        self._known, self.manager = [], manager
        return self._record(parameters)

    def taken(self, record: ArrayRecord) -> Parameters:
        """Parameters of a record: those that it was made of, if any."""
        known = next((parameters for parameters, made in self._known if made is record), None)
        if known is None:
            known = to_parameters(record)
            self._known.append((known, record))
        return known

    def _record(self, parameters: Parameters) -> ArrayRecord:
        """The same for the same parameters: a strategy mostly tells all clients one model."""
        known = next((record for made, record in self._known if made is parameters), None)
        if known is None:
            known = to_record(parameters)
            self._known.append((parameters, known))
        return known

    def instructions(self, messages: Sequence[Message], kind: Callable[..., Any]) -> list[Any]:
        """(client, instructions) of the messages, with the configuration as the inner strategy made it, and ours."""
        instructions = []
        for (client, ins), message in zip(self._told, messages, strict=True):
            (record,) = message.content.array_records.values()
            told = {**ins.config, **_scalars(message.content.config_records.values())}
            instructions.append((client, kind(self.taken(record), told)))
        self._known = []
        return instructions

    def replies(self, results: Sequence[tuple[ClientProxy, Any]], failures: Sequence[Any]) -> list[Message]:
        """Results and failures as messages.

        Flower does not tell whose an exception is, only how many there are: those of several kinds are all taken for
        all, of the nodes that have not answered.
        """
        self._results, self._failures = list(results), list(failures)
        messages = [self._reply(index, client, result) for index, (client, result) in enumerate(results)]
        known = [failure for failure in failures if not isinstance(failure, BaseException)]
        messages += [_failed(node_id(client), result.status.message) for client, result in known]
        silent = [node_id(client) for client, _ in self._told]
        for message in messages:
            if message.metadata.src_node_id in silent:
                silent.remove(message.metadata.src_node_id)
        reasons = [f"{type(e).__name__}: {e}" for e in failures if isinstance(e, BaseException)]
        told = "; ".join(dict.fromkeys(reasons))
        self._told = []
        return messages + [_failed(node, told) for node, _ in zip(silent, reasons, strict=False)]

    def _reply(self, index: int, client: ClientProxy, result: Any) -> Message:
        records: dict[str, Any] = {"weight": MetricRecord({_WEIGHT: _weight(result.num_examples)})}
        if isinstance(result, FitRes):
            records["parameters"] = to_record(result.parameters)
        else:
            records["loss"] = ConfigRecord()
        records |= {"metrics": ConfigRecord(), "status": ConfigRecord()}  # as many as Flower sends, for the count
        return _message(RecordDict(records), _metadata(node_id(client), _SERVER, identifier=str(index)))

    # --- as Compressed calls it --------------------------------------------------------------------------------------

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The legacy strategy's instructions as messages."""
        assert self.manager is not None
        return self._ask(self.strategy.configure_fit(server_round, self.taken(arrays), self.manager), "train")

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The legacy strategy's instructions as messages."""
        assert self.manager is not None
        return self._ask(self.strategy.configure_evaluate(server_round, self.taken(arrays), self.manager), "evaluate")

    def _ask(self, told: Iterable[tuple[ClientProxy, FitIns | EvaluateIns]], kind: str) -> list[Message]:
        self._told = list(told)
        return [
            _message(
                RecordDict({"parameters": self._record(ins.parameters), "config": ConfigRecord()}),
                _metadata(_SERVER, node_id(client), kind),
            )
            for client, ins in self._told
        ]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Have the legacy strategy aggregate; its metrics, which no MetricRecord might hold, are in `metrics`."""
        results, failures = self._sorted(replies)
        fitted = []
        for message, (client, result) in results:
            (record,) = message.content.array_records.values()
            weight = next(iter(message.content.metric_records.values()))[_WEIGHT]
            fitted.append((client, replace(result, parameters=to_parameters(record), num_examples=weight)))
        parameters, self.metrics = self.strategy.aggregate_fit(server_round, fitted, failures)
        return (None if parameters is None else self._record(parameters)), MetricRecord()

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Have the legacy strategy aggregate; what it makes is in `evaluation`, numbers for the log are returned."""
        results, failures = self._sorted(replies)
        self.evaluation = self.strategy.aggregate_evaluate(server_round, [result for _, result in results], failures)
        return numbers_in(self.evaluation) if self.said is None else self.said

    def _sorted(self, replies: Iterable[Message]) -> tuple[list[tuple[Message, tuple[ClientProxy, Any]]], list[Any]]:
        """Replies with the results they were made of, and all failures: Flower's, and replies that were refused."""
        results, failures = [], list(self._failures)
        for message in replies:
            if not message.has_error():
                results.append((message, self._result(message)))
            elif message.error.code == BAD_REPLY:
                client, _ = self._result(message)
                failures.append(FedcompError(f"client {client.cid}: {message.error.reason}"))
        return results, failures

    def _result(self, message: Message) -> tuple[ClientProxy, Any]:
        return self._results[int(message.metadata.message_id)]

    @contextmanager
    def metrics_of(self, replies: Sequence[Message]) -> Iterator[None]:
        """See Adapter."""
        strategy: Any = self.strategy
        real = strategy.fit_metrics_aggregation_fn
        told = [(result.num_examples, result.metrics) for _, result in map(self._result, replies)]
        strategy.fit_metrics_aggregation_fn = real and (lambda _: real(told))
        try:
            yield
        finally:
            strategy.fit_metrics_aggregation_fn = real

    def summary(self) -> None:
        """Log what is wrapped."""
        log.info("legacy strategy %r", self.strategy)


def node_id(client: ClientProxy) -> int:
    """A client's id as a number, always the same: Flower's node id where that is its name, else made of its name."""
    if client.cid.isdecimal() and len(client.cid) <= 20:
        return int(client.cid)
    return int.from_bytes(sha256(client.cid.encode()).digest()[:8], "big") >> 1


def _metadata(source: int, target: int, kind: str = "train", identifier: str = "") -> Metadata:
    """Made here: messages that make their own ask Flower's engine who they are from, and start_server has none."""
    return Metadata(0, identifier, source, target, "", "", time.time(), 3600.0, kind)


def _message(content: RecordDict, metadata: Metadata) -> Message:
    message: Message = Message(content=content, metadata=metadata)  # type: ignore[call-overload]
    return message


def _failed(node: int, reason: str) -> Message:
    message: Message = Message(error=Error(0, reason), metadata=_metadata(node, _SERVER))  # type: ignore[call-overload]
    return message


def numbers_in(evaluation: tuple[float | None, dict[str, Scalar]]) -> MetricRecord:
    """The loss and those metrics that are numbers."""
    told: dict[str, Any] = {"loss": evaluation[0], **evaluation[1]}
    return MetricRecord({k: v for k, v in told.items() if isinstance(v, int | float) and not isinstance(v, bool)})


def _weight(told: object) -> int | float:
    """A number that a MetricRecord takes; NaN, which will be refused, for what is none."""
    try:
        number = float(told)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return float("nan")
    return int(number) if number.is_integer() else number


def _scalars(configs: Iterable[ConfigRecord]) -> dict[str, Scalar]:
    """Configuration for a legacy client: lists, which it cannot be sent, as the text of their numbers."""
    told: dict[str, Any] = {key: value for config in configs for key, value in config.items()}
    if isinstance(listed := told.get(ACKS), list):
        told[ACKS] = " ".join(map(str, listed))
    return told


def _traits(strategy: legacy.Strategy) -> Traits:
    kind: Any = type(strategy)
    innermost: Any = strategy
    while not isinstance(innermost, legacy.FedAvg) and hasattr(innermost, "strategy"):
        innermost = innermost.strategy
    aggregations = {known.aggregate_fit for known in (*_AVERAGING, *_ADAPTIVE)}
    return Traits(
        name=kind.__name__,
        averages=isinstance(strategy, _AVERAGING) and kind.aggregate_fit in aggregations,
        ignores_weights=isinstance(innermost, _WEIGHTLESS) or isinstance(strategy, legacy.DPFedAvgFixed),
        picks_replies=isinstance(innermost, legacy.Krum),
        adaptive=isinstance(strategy, _ADAPTIVE),
        momentum=isinstance(strategy, legacy.FedAvgM) and bool(strategy.server_momentum),
        private=kind.__name__.startswith("DifferentialPrivacy") or isinstance(strategy, legacy.DPFedAvgFixed),
    )
