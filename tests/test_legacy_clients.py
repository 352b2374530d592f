"""Wrapped clients of the legacy API, over Flower's own engines too, and secure aggregation, which is refused."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from flwr.app import Context
from flwr.client import Client
from flwr.client.mod import secaggplus_mod
from flwr.common import (
    Code,
    EvaluateIns,
    EvaluateRes,
    FitIns,
    FitRes,
    GetParametersIns,
    GetPropertiesIns,
    Parameters,
    Status,
)
from flwr.server import LegacyContext, ServerConfig, SimpleClientManager
from flwr.server.strategy import FedAvg, Strategy
from flwr.server.workflow import DefaultWorkflow, SecAggPlusWorkflow
from flwr.serverapp import Grid, ServerApp
from legacy_app import QUIET, Arrays, Direct, Trainer, client_app, one_round, run, start_arrays, start_parameters

from fedcomp import ConfigError, Plan, TopK
from fedcomp.downlink import Package
from fedcomp.request import KEY, MODEL_STYPE, STYPE, Request
from fedcomp_clients import CompressMod, FileStore, MemoryStore
from fedcomp_clients.legacy import wrap_client, wrap_numpy_client
from fedcomp_simulations.grid import run_in_process
from fedcomp_strategies.legacy import CompressedStrategy

REQUEST = Request(Plan(TopK(0.1)), 1).to_text()


def mod() -> CompressMod:
    return CompressMod(MemoryStore())


def packed() -> Parameters:
    package = Package.of({str(i): values for i, values in enumerate(start_arrays())})
    return Parameters([package.to_bytes()], MODEL_STYPE)


def fedavg(clients: int = 1) -> FedAvg:
    """Under Ray, rounds begin before all clients have joined unless the strategy waits for them."""
    options = {"min_available_clients": clients, "min_fit_clients": clients, **QUIET}
    return FedAvg(initial_parameters=start_parameters(), **options)


# --- wrapped clients -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parameters", [start_parameters(), packed()], ids=["plain", "packed"])
def test_a_wrapped_client_answers_a_request_with_a_frame(parameters: Parameters) -> None:
    trainer = Trainer(2)
    client = wrap_numpy_client(trainer, partition_id=2, mod=mod())
    result = client.fit(FitIns(parameters, {"server-round": 1, KEY: REQUEST}))
    assert (result.status.code, result.num_examples, result.metrics["loss"]) == (Code.OK, 12, 3.0)
    assert result.parameters.tensor_type == STYPE
    assert [len(data) < 400 for data in result.parameters.tensors] == [True]
    assert trainer.seen[0]["server-round"] == 1


def test_a_wrapped_client_is_as_ever_for_servers_without_fedcomp() -> None:
    bare, wrapped = Trainer(1).to_client(), wrap_client(Trainer(1).to_client(), mod=mod())
    ins = FitIns(start_parameters(), {"server-round": 1})
    assert wrapped.fit(ins) == bare.fit(ins)
    question = EvaluateIns(start_parameters(), {})
    assert wrapped.evaluate(question) == bare.evaluate(question)
    assert wrapped.get_parameters(GetParametersIns({})) == bare.get_parameters(GetParametersIns({}))
    assert wrapped.get_properties(GetPropertiesIns({})).properties == {"partition": 1}


def test_a_packed_model_is_unpacked_for_evaluation() -> None:
    client = wrap_client(Trainer(1).to_client(), mod=mod())
    result = client.evaluate(EvaluateIns(packed(), {}))
    assert (result.loss, result.num_examples) == (float(start_arrays()[0].sum()), 2)


class Failing(Client):
    """Has its reasons, which it gives as a status."""

    def fit(self, ins: FitIns) -> FitRes:
        return FitRes(Status(Code.FIT_NOT_IMPLEMENTED, "no battery"), Parameters([], ""), 0, {})


def test_failures_are_results_with_a_reason() -> None:
    ins = FitIns(start_parameters(), {"server-round": 1, KEY: REQUEST})
    assert wrap_client(Failing(), mod=mod()).fit(ins).status.message == "no battery"

    def broken(arrays: Arrays, partition: int, round_: int) -> Arrays:
        return [np.full_like(values, np.nan) for values in arrays]

    result = wrap_numpy_client(Trainer(0, broken), mod=mod()).fit(ins)
    assert result.status.code != Code.OK
    assert result.status.message.startswith("NonFiniteError: ")
    damaged = Parameters([packed().tensors[0][:-1]], MODEL_STYPE)
    answer = wrap_numpy_client(Trainer(0), mod=mod()).evaluate(EvaluateIns(damaged, {}))
    assert isinstance(answer, EvaluateRes)
    assert (answer.status.code, answer.num_examples) == (Code.EVALUATE_NOT_IMPLEMENTED, 0)
    assert answer.status.message.startswith("FrameError: ")
    manager, strategy = SimpleClientManager(), CompressedStrategy(fedavg(), "topk(0.1)")
    clients = [Direct(str(p), wrap_numpy_client(Trainer(p, broken if p else None), mod=mod())) for p in range(2)]
    for client in clients:
        manager.register(client)
    asked = {client.cid: (client, ins) for client, ins in strategy.configure_fit(1, start_parameters(), manager)}
    told = [(client, client.fit(ins, None, None)) for client, ins in asked.values()]
    good, bad = [r for r in told if r[1].status.code == Code.OK], [r for r in told if r[1].status.code != Code.OK]
    assert strategy.aggregate_fit(1, good, [*bad])[0] is not None
    assert dict(strategy.traffic[0].dropped) == {"non-finite": 1}


@pytest.mark.parametrize(("who", "kept"), [({"name": "fridge 7"}, True), ({"partition_id": 3}, True), ({}, False)])
def test_memory_survives_a_restart_of_clients_that_say_who_they_are(
    who: dict[str, Any], kept: bool, tmp_path: Path
) -> None:
    strategy, parameters = CompressedStrategy(fedavg(), "topk(0.02)", feedback="ef"), start_parameters()
    for round_ in (1, 2):
        manager = SimpleClientManager()
        client = wrap_numpy_client(Trainer(3), mod=CompressMod(FileStore(tmp_path)), **who)  # a new process
        manager.register(Direct(f"connection {round_}", client))
        parameters, _ = one_round(strategy, round_, parameters, manager)
    names = {path.name.split(".")[0] for path in tmp_path.rglob("*.memory")}
    assert len(names) == (1 if kept else 2)
    assert all(name.startswith("partition-" if kept else "node-") for name in names)
    rounds = sorted(path.name.split(".")[1] for path in tmp_path.rglob("*.memory"))
    assert rounds == ["1", "2"]  # the first is kept because the server has told that it used that upload
    assert strategy.traffic[1].resets == 0


def test_a_client_is_who_it_is_once() -> None:
    with pytest.raises(ConfigError, match="got both"):
        wrap_numpy_client(Trainer(0), name="a", partition_id=1)
    with pytest.raises(ConfigError, match="partition_id"):
        wrap_numpy_client(Trainer(0), partition_id=-1)
    with pytest.raises(ConfigError, match="name"):
        wrap_numpy_client(Trainer(0), name=7)  # type: ignore[arg-type]


def test_names_are_told_apart_on_one_machine(tmp_path: Path) -> None:
    strategy, manager = CompressedStrategy(fedavg(5), "topk(0.02)", feedback="ef"), SimpleClientManager()
    for name in "abcde":
        client = wrap_numpy_client(Trainer(0), name=name, mod=CompressMod(FileStore(tmp_path)))
        manager.register(Direct(name, client))
    one_round(strategy, 1, start_parameters(), manager)
    assert len(list(tmp_path.rglob("*.memory"))) == 5


# --- secure aggregation ----------------------------------------------------------------------------------------------


def securely(strategy: Strategy, mods: list[Any]) -> Arrays:
    """The model after a round of SecAgg+."""
    trained: Arrays = []

    class Keeping(DefaultWorkflow):
        def __call__(self, grid: Grid, context: Context) -> None:
            super().__call__(grid, context)
            trained.extend(
                array.numpy() for record in context.state.array_records.values() for array in record.values()
            )

    server = ServerApp()

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        workflow = SecAggPlusWorkflow(num_shares=3, reconstruction_threshold=2, clipping_range=16.0, timeout=10)
        Keeping(workflow)(grid, LegacyContext(context, ServerConfig(num_rounds=1), strategy))

    run_in_process(server, client_app(mods), 4)
    return trained


def test_secure_aggregation_is_refused_before_anything_is_sent() -> None:
    with pytest.raises(ConfigError, match="leave out either CompressedStrategy or SecAggPlusWorkflow"):
        securely(CompressedStrategy(fedavg(), "sign"), [secaggplus_mod])


def test_the_mod_does_not_disturb_secure_aggregation() -> None:
    config = {**QUIET, "on_fit_config_fn": lambda r: {"server-round": r}}
    strategy = FedAvg(initial_parameters=start_parameters(), **config)
    (plain, *_), (with_mod, *_) = (securely(strategy, mods) for mods in ([secaggplus_mod], [mod(), secaggplus_mod]))
    assert plain.dtype == with_mod.dtype == np.float64
    np.testing.assert_allclose(plain, with_mod, atol=1e-3)


# --- Flower's engines ------------------------------------------------------------------------------------------------

RAY = """
import sys
import numpy as np
import ray
from flwr.common import parameters_to_ndarrays
from flwr.server import Server, ServerAppComponents, ServerConfig, SimpleClientManager
from flwr.serverapp import ServerApp
from flwr.simulation import run_simulation
from fedcomp_clients import CompressMod, FileStore
from fedcomp_strategies.legacy import CompressedStrategy
from legacy_app import client_app
from test_legacy_clients import UPLINK, fedavg

folder = sys.argv[1]
server = Server(client_manager=SimpleClientManager(), strategy=CompressedStrategy(fedavg(4), UPLINK, feedback="ef"))
components = ServerAppComponents(server=server, config=ServerConfig(num_rounds=2))
ray.init(num_cpus=1, include_dashboard=False, object_store_memory=100_000_000, log_to_driver=False, _temp_dir=folder)
try:
    clients = client_app([CompressMod(FileStore(precision="float32"))])
    resources = {"client_resources": {"num_cpus": 1}}
    run_simulation(ServerApp(server_fn=lambda context: components), clients, 4, backend_config=resources)
finally:
    ray.shutdown()
np.savez(f"{folder}/model", *parameters_to_ndarrays(server.parameters))
"""

GRPC = """
import json, socket, sys, threading, time
import numpy as np
from flwr.client import start_client
from flwr.common import parameters_to_ndarrays
from flwr.server import Server, ServerConfig, SimpleClientManager, start_server
from flwr.server.strategy import FedAvg
from fedcomp_clients.legacy import wrap_numpy_client
from fedcomp_strategies.legacy import CompressedStrategy
from legacy_app import Trainer
from test_legacy_clients import GRPC_UPLINK

folder, address = sys.argv[1], f"127.0.0.1:{sys.argv[2]}"
count = lambda metrics: {"all": len(metrics)}
fedavg = FedAvg(on_fit_config_fn=lambda r: {"server-round": r}, evaluate_metrics_aggregation_fn=count)
strategy = CompressedStrategy(fedavg, GRPC_UPLINK, feedback="ef")
server = Server(client_manager=SimpleClientManager(), strategy=strategy)

def join(partition):
    for _ in range(300):  # start_client does not try again
        with socket.socket() as probe:
            if not probe.connect_ex(("127.0.0.1", int(sys.argv[2]))):
                break
        time.sleep(0.1)
    client = wrap_numpy_client(Trainer(partition), partition_id=partition) if partition < 2 else Trainer(2).to_client()
    start_client(server_address=address, client=client, max_wait_time=30)

threads = [threading.Thread(target=join, args=(partition,), daemon=True) for partition in range(3)]
for thread in threads:
    thread.start()
fedavg.min_fit_clients = fedavg.min_evaluate_clients = fedavg.min_available_clients = 3
history = start_server(server_address=address, server=server, config=ServerConfig(num_rounds=3, round_timeout=30))
for thread in threads:
    thread.join(20)
traffic = [(t.uploads, t.failures, t.bytes_up, t.bytes_down) for t in strategy.traffic]
alive = sum(thread.is_alive() for thread in threads)
told = {"traffic": traffic, "metrics": history.metrics_distributed, "alive": alive}
open(f"{folder}/told.json", "w").write(json.dumps(told))
np.savez(f"{folder}/model", *parameters_to_ndarrays(server.parameters))
"""

UPLINK, GRPC_UPLINK = "topk(0.05)", "topk(0.5)"


def test_a_legacy_app_under_ray_trains_the_same_model() -> None:
    with TemporaryDirectory() as folder:  # its path is short, as the names of Ray's sockets demand
        in_a_process_of_its_own(RAY, folder)
        with np.load(Path(folder, "model.npz")) as model:
            simulated = list(model.values())
    assert len(simulated) == 4
    expected = run(CompressedStrategy(fedavg(4), UPLINK, feedback="ef"), [mod()], rounds=2, clients=4)
    for a, b in zip(simulated, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def in_a_process_of_its_own(script: str, folder: str, *arguments: str) -> None:
    """Engines leave threads, signal handlers, warnings and environment variables behind."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([*sys.path, str(Path(__file__).parent)]),
        "PYTHONWARNINGS": "ignore",
        "FLWR_HOME": str(Path(folder, "flwr")),
        "FEDCOMP_STATE_DIR": str(Path(folder, "state")),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-c", script, folder, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-4000:]


def test_start_server_and_start_client_over_loopback() -> None:
    """Two wrapped clients and one that is not, three rounds; the first model comes from a client."""
    with TemporaryDirectory() as folder:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        in_a_process_of_its_own(GRPC, folder, str(port))
        told = json.loads(Path(folder, "told.json").read_text())
        with np.load(Path(folder, "model.npz")) as model:
            trained = list(model.values())
        memories = [path.name for path in Path(folder, "state").rglob("*.memory")]
    assert [traffic[:2] for traffic in told["traffic"]] == [[3, 0]] * 3
    assert told["metrics"] == {"all": [[1, 3], [2, 3], [3, 3]]}
    assert told["alive"] == 0
    first, *later = told["traffic"]
    plain = sum(len(data) for data in start_parameters().tensors)
    assert all(plain + 2 * 500 < up < 2 * plain for _, _, up, _ in told["traffic"])  # one reply is plain
    assert all(down < first[3] for _, _, _, down in later)  # two of three models are packed
    assert len(memories) == 4  # of rounds 2 and 3: nobody has acknowledged the last
    exact = flat(run(fedavg(), [], rounds=3, clients=3)) - flat(start_arrays())
    moved = flat(trained) - flat(start_arrays())
    assert 0 < np.linalg.norm(moved - exact) < 0.5 * np.linalg.norm(exact)


def flat(arrays: Arrays) -> Any:
    return np.concatenate([values.ravel() for values in arrays])
