"""Strategies that only average what clients send: they can be given the mean alone, summed straight from the frames."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Traits:
    """What matters about how a strategy aggregates.

    Attributes:
        name: of its class.
        averages: whether its model hangs on the weighted mean of the replies' models alone.
        ignores_weights: whether a reply moves the model whatever it weighs; also below privacy wrappers.
        picks_replies: whether it averages some replies that it picks, which must not all weigh nothing; also below
            privacy wrappers.
        adaptive: whether its steps are scaled by how long they were before.
        momentum: whether it goes on in the direction of former steps.
        private: whether it adds noise, or asks for it.
    """

    name: str
    averages: bool = False
    ignores_weights: bool = False
    picks_replies: bool = False
    adaptive: bool = False
    momentum: bool = False
    private: bool = False


class Adapter(Strategy):
    """A strategy of another API that looks like one of the Message API.

    Attributes:
        traits: of the strategy behind it, which no class of the Message API tells.
    """

    traits: Traits

    def metrics_of(self, replies: Sequence[Message]) -> AbstractContextManager[None]:
        """Have the strategy behind it make its metrics of those of all these replies, whatever it is given."""
        raise NotImplementedError


def traits_of(strategy: Strategy) -> Traits:
    """What matters about a strategy.

    The averaging strategies of Flower average, and so do subclasses that leave their aggregation as it is. Robust
    strategies, privacy wrappers and aggregations of the user's own do not: they are given every client's model.
    """
    if isinstance(strategy, Adapter):
        return strategy.traits
    kind: Any = type(strategy)
    innermost = _innermost(strategy)
    return Traits(
        name=kind.__name__,
        averages=any(
            isinstance(strategy, known)
            and kind.aggregate_train is known.aggregate_train
            and kind._check_and_log_replies is known._check_and_log_replies
            for known in _AVERAGING
        ),
        ignores_weights=isinstance(innermost, _WEIGHTLESS),
        picks_replies=isinstance(innermost, MultiKrum),  # and Krum, which is one
        adaptive=isinstance(strategy, FedAdam | FedYogi | FedAdagrad),
        momentum=isinstance(strategy, FedAvgM) and bool(strategy.server_momentum),
        private=kind.__name__.startswith("DifferentialPrivacy"),
    )


def averages(strategy: Strategy) -> bool:
    """Whether the strategy's model hangs on the weighted mean of the replies' models alone, see `traits_of`."""
    return traits_of(strategy).averages


def averaged_reply(replies: Sequence[Message], model: ArrayRecord, key: str) -> Message:
    """One reply in the place of all: the mean model, with the metrics of the first and the weight of all."""
    first = replies[0]
    ((records, _),) = first.content.array_records.items()
    ((name, metrics),) = first.content.metric_records.items()
    total = sum(weight_of(message, key) for message in replies)
    content = RecordDict({**first.content, records: model, name: MetricRecord({**metrics, key: total})})
    return Message(content=content, metadata=first.metadata)  # type: ignore[call-overload, no-any-return]


def _innermost(strategy: Strategy) -> Any:
    inner: Any = strategy
    while not isinstance(inner, FedAvg) and hasattr(inner, "strategy"):
        inner = inner.strategy
    return inner


@contextmanager
def metrics_of(strategy: Strategy, replies: Sequence[Message]) -> Iterator[None]:
    """Have the strategy make its metrics of those of all these replies, whatever it is given to average."""
    if isinstance(strategy, Adapter):
        with strategy.metrics_of(replies):
            yield
        return
    assert isinstance(strategy, FedAvg)
    real = strategy.train_metrics_aggr_fn
    contents = [_without_arrays(message.content) for message in replies]
    strategy.train_metrics_aggr_fn = lambda _, key: real(contents, key)
    try:
        yield
    finally:
        strategy.train_metrics_aggr_fn = real


def _without_arrays(content: Mapping[str, Any]) -> RecordDict:
    return RecordDict({k: v for k, v in content.items() if isinstance(v, MetricRecord | ConfigRecord)})
