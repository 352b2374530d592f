"""CompressedStrategy: what Compressed is, for the strategies of `flwr.server.strategy`, which Flower calls legacy.

``CompressedStrategy(FedAvg(...), uplink="topk(0.01)", feedback="ef")`` goes to ``ServerApp(server_fn=...)`` or
``start_server(strategy=...)``. Inside is a `Compressed` around an adapter that makes the legacy strategy look like one
of the Message API, so that requests, decoding, guards, feedback, budgets and counts are the same.
"""

from typing import Any, cast

import flwr.server.strategy as legacy
from flwr.app import ConfigRecord
from flwr.common import EvaluateIns, EvaluateRes, FitIns, FitRes, Parameters, Scalar
from flwr.server.client_manager import ClientManager
from flwr.server.client_proxy import ClientProxy
from flwr.serverapp import Grid

from fedcomp import Codec, ConfigError, Plan
from fedcomp._callers import callers
from fedcomp.schedule import Schedule
from fedcomp_strategies.compressed import Compressed
from fedcomp_strategies.legacy_adapter import LegacyAdapter, node_id, numbers_in
from fedcomp_strategies.legacy_records import to_parameters
from fedcomp_strategies.traffic import RoundTraffic

Failure = tuple[ClientProxy, FitRes] | BaseException
EvaluateFailure = tuple[ClientProxy, EvaluateRes] | BaseException


class CompressedStrategy(legacy.Strategy):
    """Any legacy strategy, with compressed uploads and a packed downlink.

    Strategies that average (FedAvg, FedAvgM, FedProx, FedOpt, FedAdam, FedYogi, FedAdagrad, and subclasses that leave
    `aggregate_fit` as it is) are given one result with the mean, and their `fit_metrics_aggregation_fn` the metrics of
    all; others see ordinary results with whole models. Results that were refused are among the failures.

    Tensors have no names in the legacy API: rules of plans see "0", "1", ..., in the order of the parameters. So "auto"
    cannot tell that a network is recurrent: give `feedback="none"` and `norm_cap=1` for those.

    Args:
        strategy: the strategy to wrap.
        uplink, options: see Compressed. `budgets`, `compact` and `evaluation` are not among them.

    Attributes:
        strategy: the one that is wrapped, whose attributes can be read from this one too.
        compressed: the Compressed inside.

    Raises ConfigError as Compressed does, and for FedXgbNnAvg, whose parameters no frame can carry.
    """

    def __init__(self, strategy: legacy.Strategy, uplink: Schedule | Plan | Codec | str, **options: Any) -> None:
        if not isinstance(strategy, legacy.Strategy):
            raise ConfigError(
                f"expected a strategy of flwr.server.strategy, got {type(strategy).__name__}; those of "
                "flwr.serverapp.strategy go into fedcomp_strategies.Compressed"
            )
        if isinstance(strategy, legacy.FedXgbNnAvg):
            raise ConfigError(
                "FedXgbNnAvg sends pairs of a network and trees, which Flower itself cannot carry as Parameters any "
                "more; use FedXgbBagging, or a strategy for networks"
            )
        if unknown := {"budgets", "compact", "evaluation"} & options.keys():  # clients have no way to tell the server
            raise ConfigError(f"{sorted(unknown)[0]}: the legacy API has no such choice; leave it out")
        self.strategy = strategy
        self._adapter = LegacyAdapter(strategy)
        self.compressed = Compressed(self._adapter, uplink, **options, compact=False)  # no records to save here

    def __getattr__(self, name: str) -> Any:
        """Attributes of the wrapped strategy, for code that reads them."""
        if name == "strategy":  # not there yet while unpickling
            raise AttributeError(name)
        return getattr(self.strategy, name)

    def __repr__(self) -> str:
        return f"CompressedStrategy({self.strategy!r})"

    @property
    def traffic(self) -> list[RoundTraffic]:
        """One RoundTraffic a round of fitting; `wire_up` is that of Flower's SuperLink, not of start_server."""
        return self.compressed.traffic

    def summary(self) -> None:
        """Log what is wrapped and what clients are asked for."""
        self.compressed.summary()

    def initialize_parameters(self, client_manager: ClientManager) -> Parameters | None:
        """The inner strategy's."""
        return self.strategy.initialize_parameters(client_manager=client_manager)

    def configure_fit(
        self, server_round: int, parameters: Parameters, client_manager: ClientManager
    ) -> list[tuple[ClientProxy, FitIns]]:
        """The inner strategy's instructions, each with the request for this round and the model packed.

        Raises ConfigError under secure aggregation, BudgetError for a budget that no frame for the model fits in.
        """
        _refuse_secure_aggregation()
        arrays, grid = self._adapter.given(parameters, client_manager), _grid(client_manager)
        messages = list(self.compressed.configure_train(server_round, arrays, ConfigRecord(), grid))
        return self._adapter.instructions(messages, FitIns)

    def aggregate_fit(
        self, server_round: int, results: list[tuple[ClientProxy, FitRes]], failures: list[Failure]
    ) -> tuple[Parameters | None, dict[str, Scalar]]:
        """Decode the results and hand them to the inner strategy; see Compressed.aggregate_train."""
        self._adapter.metrics = {}
        arrays, counts = self.compressed.aggregate_train(server_round, self._adapter.replies(results, failures))
        metrics: dict[str, Any] = {**self._adapter.metrics, **(counts or {})}
        return None if arrays is None else self._adapter.taken(arrays), metrics

    def configure_evaluate(
        self, server_round: int, parameters: Parameters, client_manager: ClientManager
    ) -> list[tuple[ClientProxy, EvaluateIns]]:
        """The inner strategy's instructions, with the model packed as for fitting, or its moving average."""
        arrays, grid = self._adapter.given(parameters, client_manager), _grid(client_manager)
        messages = list(self.compressed.configure_evaluate(server_round, arrays, ConfigRecord(), grid))
        if not messages:
            self.compressed.report(server_round, self._adapter.said)
        return self._adapter.instructions(messages, EvaluateIns)

    def aggregate_evaluate(
        self, server_round: int, results: list[tuple[ClientProxy, EvaluateRes]], failures: list[EvaluateFailure]
    ) -> tuple[float | None, dict[str, Scalar]]:
        """The inner strategy's evaluation, without results of an impossible weight."""
        self._adapter.evaluation = None, {}
        self.compressed.aggregate_evaluate(server_round, self._adapter.replies(results, failures))
        return self._adapter.evaluation

    def evaluate(self, server_round: int, parameters: Parameters) -> tuple[float, dict[str, Scalar]] | None:
        """The inner strategy's; with `average`, of the moving average."""
        averaged = self.compressed.averaged if server_round else None
        evaluation = self.strategy.evaluate(server_round, parameters if averaged is None else to_parameters(averaged))
        self._adapter.said = None if evaluation is None else numbers_in(evaluation)
        return evaluation


class _Clients:
    """The clients of a ClientManager, as far as `Compressed` asks a Grid for them: nothing is sent here."""

    def __init__(self, manager: ClientManager) -> None:
        self._manager = manager

    def get_node_ids(self) -> list[int]:
        """Ids of all clients that are connected."""
        return [node_id(client) for client in self._manager.all().values()]


def _grid(manager: ClientManager) -> Grid:
    return cast(Grid, _Clients(manager))


def _refuse_secure_aggregation() -> None:
    """Raise ConfigError if Flower's SecAgg+ is what asks. It does not tell the strategy, so this looks who calls."""
    if any(module.startswith("flwr.server.workflow.secure_aggregation") for module, _ in callers()):
        raise ConfigError(
            "secure aggregation adds up masked models, of which nothing can be decoded: leave out either "
            "CompressedStrategy or SecAggPlusWorkflow"
        )
