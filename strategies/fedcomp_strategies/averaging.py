"""Strategies that only average what clients send: they can be given the mean alone, summed straight from the frames."""

from collections.abc import Mapping, Sequence
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAdagrad, FedAdam, FedAvg, FedAvgM, FedProx, FedYogi, Strategy

from fedcomp_strategies.replies import weight_of

_AVERAGING = (FedAvg, FedAvgM, FedProx, FedAdagrad, FedAdam, FedYogi)


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


def averaged_metrics(strategy: FedAvg, replies: Sequence[Message]) -> MetricRecord | None:
    """What the strategy's own function makes of the metrics of all replies."""
    contents = [_without_arrays(message.content) for message in replies]
    return strategy.train_metrics_aggr_fn(contents, strategy.weighted_by_key)


def _without_arrays(content: Mapping[str, Any]) -> RecordDict:
    return RecordDict({k: v for k, v in content.items() if isinstance(v, MetricRecord | ConfigRecord)})
