"""The same apps under Flower's own simulation engine give the same model as the in-process grid."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
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
import numpy as np
import ray
from flwr.simulation import run_simulation
from fedcomp_clients import compress_mod
from fedcomp_simulations.apps import client_app, server_app
from test_simulation_ray import METHODS, SEED, SMALL

ray.init(num_cpus=1, include_dashboard=False, object_store_memory=100_000_000, log_to_driver=False)
outcomes = []
try:
    run_simulation(
        server_app(SMALL, METHODS[int(sys.argv[1])], SEED, outcomes.append),
        client_app(SMALL, SEED, compress_mod),
        num_supernodes=SMALL.clients,
        backend_config={"client_resources": {"num_cpus": 1}},
    )
finally:
    ray.shutdown()
np.savez(sys.argv[2], **{key: array.numpy() for key, array in outcomes[-1].arrays.items()})
"""


@pytest.mark.parametrize("index", range(len(METHODS)))
def test_ray_and_the_in_process_grid_train_the_same_model(index: int, tmp_path: Path) -> None:
    outcomes: list[RoundOutcome] = []
    run_in_process(
        server_app(SMALL, METHODS[index], SEED, outcomes.append),
        client_app(SMALL, SEED, CompressMod(store=MemoryStore())),
        SMALL.clients,
    )
    with np.load(run_with_ray(index, tmp_path)) as model:
        assert set(model) == set(outcomes[-1].arrays)
        for key, array in outcomes[-1].arrays.items():
            np.testing.assert_allclose(model[key], array.numpy(), rtol=0, atol=1e-6)


def run_with_ray(index: int, folder: Path) -> Path:
    """Run in a process of its own: Ray leaves threads, warnings and environment variables behind."""
    path = folder / "model.npz"
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([*sys.path, str(Path(__file__).parent)]),
        "FLWR_HOME": str(folder / "flwr"),
        "FEDCOMP_STATE_DIR": str(folder / "state"),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-c", SCRIPT, str(index), str(path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-4000:]
    return path
