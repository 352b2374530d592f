"""The same apps under Flower's own simulation engine give the same model as the in-process grid."""

import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from numpy.typing import NDArray

from fedcomp_clients import CompressMod, MemoryStore
from fedcomp_simulations.apps import RoundOutcome, client_app, server_app
from fedcomp_simulations.experiment import Experiment, Method
from fedcomp_simulations.grid import run_in_process

METHODS = (Method("float32", "float32"), Method("sign + EF", "sign", "ef"))
SMALL = Experiment(
    name="small", dataset="mnist", model="mlp", methods=METHODS, clients=4, clients_per_round=4, rounds=2
)
SEED = 1

SCRIPT = """
import sys
from pathlib import Path
import numpy as np
import ray
from flwr.serverapp import ServerApp
from flwr.simulation import run_simulation
from fedcomp_clients import CompressMod, FileStore
from fedcomp_simulations.apps import client_app, server_app
from test_simulation_ray import METHODS, SEED, SMALL

folder, app = sys.argv[1], ServerApp()

@app.main()
def main(grid, context):
    for method in METHODS:
        outcomes = []
        server_app(SMALL, method, SEED, outcomes.append)(grid, context)
        arrays = {key: array.numpy() for key, array in outcomes[-1].arrays.items()}
        np.savez(Path(folder, method.codec), **arrays)

ray.init(num_cpus=1, include_dashboard=False, object_store_memory=100_000_000, log_to_driver=False, _temp_dir=folder)
try:
    clients = client_app(SMALL, SEED, CompressMod(FileStore(precision="float32")))
    run_simulation(app, clients, SMALL.clients, backend_config={"client_resources": {"num_cpus": 1}})
finally:
    ray.shutdown()
"""


pytestmark = pytest.mark.usefixtures("one_thread")


def test_ray_and_the_in_process_grid_train_the_same_model() -> None:
    with TemporaryDirectory() as folder:  # its path is short, as the names of Ray's sockets demand
        run_with_ray(Path(folder))
        for method in METHODS:
            with np.load(Path(folder, f"{method.codec}.npz")) as model:
                compare(dict(model), method)


def compare(model: dict[str, NDArray[np.float32]], method: Method) -> None:
    outcomes: list[RoundOutcome] = []
    run_in_process(
        server_app(SMALL, method, SEED, outcomes.append),
        client_app(SMALL, SEED, CompressMod(store=MemoryStore())),
        SMALL.clients,
    )
    assert set(model) == set(outcomes[-1].arrays)
    for key, array in outcomes[-1].arrays.items():
        np.testing.assert_allclose(model[key], array.numpy(), rtol=0, atol=1e-6)


def run_with_ray(folder: Path) -> None:
    """Run in a process of its own: Ray leaves threads, warnings and environment variables behind."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([*sys.path, str(Path(__file__).parent)]),
        "FLWR_HOME": str(folder / "flwr"),
        "FEDCOMP_STATE_DIR": str(folder / "state"),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-c", SCRIPT, str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-4000:]
