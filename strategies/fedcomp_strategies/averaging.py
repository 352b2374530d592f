"""Strategies that only average what clients send: they can be given the mean alone, summed straight from the frames."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import (
    Bulyan,
    FedAdagrad,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedMedian,
    FedProx,
    FedTrimmedAvg,
    FedYogi,
    MultiKrum,
    QFedAvg,
    Strategy,
)

from fedcomp_strategies.replies import weight_of

_AVERAGING = (FedAvg, FedAvgM, FedProx, FedAdagrad, FedAdam, FedYogi)
_WEIGHTLESS = (FedMedian, FedTrimmedAvg, Bulyan, QFedAvg)


def averages(strategy: Strategy) -> bool:
    """Whether the strategy's model hangs on the weighted mean of the replies' models alone.

    True for the averaging strategies of Flower and for subclasses that leave their aggregation as it is. Robust
    strategies, privacy wrappers and aggregations of the user's own are given every client's model.
    """
    kind: Any = type(strategy)
    return any(
        isinstance(strategy, known)
        and kind.aggregate_train is known.aggregate_train
        and kind._check_and_log_replies is known._check_and_log_replies
        for known in _AVERAGING
    )


def averaged_reply(replies: Sequence[Message], model: ArrayRecord, key: str) -> Message:
    """One reply in the place of all: the mean model, with the metrics of the first and the weight of all."""
    first = replies[0]
    ((records, _),) = first.content.array_records.items()
    ((name, metrics),) = first.content.metric_records.items()
    total = sum(weight_of(message, key) for message in replies)
    content = RecordDict({**first.content, records: model, name: MetricRecord({**metrics, key: total})})
    return Message(content=content, metadata=first.metadata)  # type: ignore[call-overload, no-any-return]


def ignores_weights(strategy: Strategy) -> bool:
    """Whether a reply moves the model whatever it weighs; also below privacy wrappers."""
    return isinstance(_innermost(strategy), _WEIGHTLESS)


def picks_replies(strategy: Strategy) -> bool:
    """Whether the strategy averages some replies that it picks, which must not all weigh nothing."""
    return isinstance(_innermost(strategy), MultiKrum)  # and Krum, which is one


def _innermost(strategy: Strategy) -> Any:
    inner: Any = strategy
    while not isinstance(inner, FedAvg) and hasattr(inner, "strategy"):
        inner = inner.strategy
    return inner


@contextmanager
def metrics_of(strategy: FedAvg, replies: Sequence[Message]) -> Iterator[None]:
    """Have the strategy make its metrics of those of all these replies, whatever it is given to average."""
    real = strategy.train_metrics_aggr_fn
    contents = [_without_arrays(message.content) for message in replies]
    strategy.train_metrics_aggr_fn = lambda _, key: real(contents, key)
    try:
        yield
    finally:
        strategy.train_metrics_aggr_fn = real


def _without_arrays(content: Mapping[str, Any]) -> RecordDict:
    return RecordDict({k: v for k, v in content.items() if isinstance(v, MetricRecord | ConfigRecord)})
