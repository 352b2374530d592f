"""A small app of Flower's legacy API without torch, for the end-to-end tests: clients misbehave on demand."""

from collections.abc import Callable
from typing import Any

import numpy as np
from flower_app import CLIENTS, trained
from flwr.app import Context
from flwr.client import Client, NumPyClient
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import Mod
from flwr.common import (
    Code,
    DisconnectRes,
    EvaluateIns,
    EvaluateRes,
    FitIns,
    FitRes,
    GetParametersIns,
    GetParametersRes,
    GetPropertiesIns,
    GetPropertiesRes,
    Parameters,
    ReconnectIns,
    Scalar,
    Status,
    ndarrays_to_parameters,
    parameters_to_ndarrays,
)
from flwr.server import Server, ServerAppComponents, ServerConfig, SimpleClientManager
from flwr.server.client_proxy import ClientProxy
from flwr.server.strategy import Strategy
from flwr.serverapp import ServerApp
from numpy.typing import NDArray

from fedcomp_simulations.grid import run_in_process

Arrays = list[NDArray[Any]]
Fault = Callable[[Arrays, int, int], Arrays]
"""Changes what a client has trained, or raises, for (arrays, partition, server round)."""

QUIET: dict[str, Any] = {
    "fraction_evaluate": 0.0,
    "min_evaluate_clients": 0,
    "on_fit_config_fn": lambda server_round: {"server-round": server_round},
}


def start_arrays() -> Arrays:
    """Matrix, bias, normalisation statistics and a scalar."""
    random = np.random.default_rng(0)
    shapes: list[tuple[int, ...]] = [(20, 30), (30,), (30,), ()]
    return [np.asarray(random.standard_normal(shape), np.float32) for shape in shapes]


def start_parameters() -> Parameters:
    return ndarrays_to_parameters(start_arrays())


class Trainer(NumPyClient):
    """Trains by a step that hangs on partition and round only, and says so in its metrics."""

    def __init__(self, partition: int, fault: Fault | None = None) -> None:
        self.partition, self.fault = partition, fault
        self.seen: list[dict[str, Scalar]] = []

    def get_parameters(self, config: dict[str, Scalar]) -> Arrays:
        return start_arrays()

    def get_properties(self, config: dict[str, Scalar]) -> dict[str, Scalar]:
        return {"partition": self.partition}

    def fit(self, parameters: Arrays, config: dict[str, Scalar]) -> tuple[Arrays, int, dict[str, Scalar]]:
        self.seen.append(config)
        round_ = int(config["server-round"])
        model = trained({str(i): values for i, values in enumerate(parameters)}, self.partition, round_)
        new = list(model.values())
        if self.fault is not None:
            new = self.fault(new, self.partition, round_)
        bits: dict[str, Scalar] = {"dpfedavg_norm_bit": True, "norm_bit": 1}
        return new, 10 + self.partition, {"loss": 1.0 + self.partition, "who": f"client {self.partition}", **bits}

    def evaluate(self, parameters: Arrays, config: dict[str, Scalar]) -> tuple[float, int, dict[str, Scalar]]:
        return float(parameters[0].sum()), 1 + self.partition, {"partition": self.partition}


def client_app(mods: list[Mod], fault: Fault | None = None, client: Callable[[int], Client] | None = None) -> ClientApp:
    def client_fn(context: Context) -> Client:
        partition = int(context.node_config["partition-id"])
        return Trainer(partition, fault).to_client() if client is None else client(partition)

    return ClientApp(client_fn=client_fn, mods=mods)


def serve(strategy: Strategy, app: ClientApp, rounds: int, clients: int = CLIENTS) -> Server:
    """Run a ServerApp of the legacy API in this process. Its server holds the model afterwards."""
    server = Server(client_manager=SimpleClientManager(), strategy=strategy)
    components = ServerAppComponents(server=server, config=ServerConfig(num_rounds=rounds))
    run_in_process(ServerApp(server_fn=lambda context: components), app, clients)
    return server


def run(
    strategy: Strategy, mods: list[Mod], *, rounds: int = 3, fault: Fault | None = None, clients: int = CLIENTS
) -> Arrays:
    """The global model after some rounds in the in-process grid."""
    return parameters_to_ndarrays(serve(strategy, client_app(mods, fault), rounds, clients).parameters)


OK = Status(Code.OK, "")


class Direct(ClientProxy):
    """A client in this process, without any engine: as start_server's, which has a name of its own a connection."""

    def __init__(self, cid: str, client: Client | None = None) -> None:
        super().__init__(cid)
        self.client = client or Trainer(0).to_client()

    def get_properties(self, ins: GetPropertiesIns, timeout: float | None, group_id: int | None) -> GetPropertiesRes:
        return self.client.get_properties(ins)

    def get_parameters(self, ins: GetParametersIns, timeout: float | None, group_id: int | None) -> GetParametersRes:
        return self.client.get_parameters(ins)

    def fit(self, ins: FitIns, timeout: float | None, group_id: int | None) -> FitRes:
        return self.client.fit(ins)

    def evaluate(self, ins: EvaluateIns, timeout: float | None, group_id: int | None) -> EvaluateRes:
        return self.client.evaluate(ins)

    def reconnect(self, ins: ReconnectIns, timeout: float | None, group_id: int | None) -> DisconnectRes:
        return DisconnectRes("")


def one_round(
    strategy: Strategy, server_round: int, parameters: Parameters, manager: SimpleClientManager
) -> tuple[Parameters, list[dict[str, Scalar]]]:
    """The model after a round with all clients of the manager, and what each was told."""
    asked = strategy.configure_fit(server_round, parameters, manager)
    results = [(client, client.fit(ins, None, server_round)) for client, ins in asked]
    new, _ = strategy.aggregate_fit(server_round, results, [])
    assert new is not None
    return new, [ins.config for _, ins in asked]
