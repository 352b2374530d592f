"""The wheel in an empty environment, and three devices without torch that train through a real SuperLink."""

import json
import os
import shutil
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import edge_server
import edge_torch_client
import numpy as np
import pytest
import torch
from edge_client import WITNESS

from fedcomp_clients.export import SGD, export_training_bundle
from fedcomp_simulations.datasets import load
from fedcomp_simulations.deployment import Deployment
from fedcomp_simulations.deployment.app import write_app
from fedcomp_simulations.grid import run_in_process
from fedcomp_simulations.models import build, initial_arrays

ROOT = Path(__file__).parent.parent
NODES, ROUNDS, LAST = 3, 12, 5
CONFIG: dict[str, Any] = {
    "nodes": NODES,
    "rounds": ROUNDS,
    "budget": "2 kB",
    "timeout": 120,
    "lr": 0.02,
    "batch-size": 32,
    "local-epochs": 1,
}
SERVER = {"PYTHONPATH": os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]))}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bundle") / "cnn"
    model, example = build("cnn", initial_arrays("cnn", 0)), (torch.rand(8, 784), torch.arange(8))
    export_training_bundle(model, "cross_entropy", example, folder, optimizer=SGD(momentum=edge_torch_client.MOMENTUM))
    return folder


@pytest.fixture(scope="module")
def checked(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """What the check of the client leaves: its folder, and what it printed."""
    folder = tmp_path_factory.mktemp("checked")
    done = subprocess.run(
        ["bash", ROOT / "scripts" / "check_client.sh", bundle, folder], capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder, done.stdout


@pytest.mark.slow
def test_the_client_extra_brings_flwr_and_onnxruntime_and_nothing_more(checked: tuple[Path, str]) -> None:
    folder, said = checked
    print(said)
    (wheel,) = (folder / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        lines = archive.read(name).decode().splitlines()
    needs = [line.partition(": ")[2] for line in lines if line.startswith("Requires-Dist: ")]
    wanted = [need.partition(";")[0] for need in needs if "extra" not in need or "extra == 'client'" in need]
    assert sorted(wanted) == ["flwr>=1.42", "numpy>=1.26", "onnxruntime>=1.23"]
    for part in ("installed: ", "step: loss ", "upload: ", "no torch, no onnx"):
        assert part in said


def lay_out(folder: Path, bundle: Path) -> None:
    """A device is a folder with a bundle and a third of the digits."""
    digits = load("mnist")
    shutil.copytree(bundle, folder / "bundle")
    for node in range(NODES):
        device = folder / f"device-{node}"
        shutil.copytree(bundle, device / "bundle")
        np.save(device / "x.npy", digits.train_x[node::NODES])
        np.save(device / "y.npy", digits.train_y[node::NODES])


def accuracy(folder: Path) -> float:
    told = json.loads((folder / edge_server.RESULTS).read_text())
    assert told["uploads"] == [NODES] * ROUNDS
    assert max(told["bytes_up"]) < 1.2 * NODES * 2000  # a budget is kept to on average
    print(folder.name, told)
    return float(np.mean(told["accuracies"][-LAST:]))


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_devices_without_torch_learn_as_much_as_clients_with_it(
    bundle: Path, checked: tuple[Path, str], tmp_path: Path
) -> None:
    environment = checked[0] / "client"
    without, with_torch = tmp_path / "onnxruntime", tmp_path / "torch"
    for folder in (without, with_torch):
        lay_out(folder, bundle)
    app = write_app(tmp_path, "edge", "edge_server:app", "edge_client:app", CONFIG | {"folder": str(without)})
    path = os.pathsep.join([str(environment / "bin"), "/usr/local/bin", "/usr/bin", "/bin"])
    device = {"PATH": path, "PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1"}
    with Deployment(tmp_path / "flower", SERVER) as deployment:
        for node in range(NODES):
            config: dict[str, Any] = {
                "partition-id": node,
                "num-partitions": NODES,
                "folder": str(without / f"device-{node}"),
            }
            deployment.add_node(config, device)
        deployment.run(app, timeout_s=900)
    run_in_process(edge_server.app, edge_torch_client.app, NODES, CONFIG | {"folder": str(with_torch)})

    for node in range(NODES):
        told = json.loads((without / f"device-{node}" / WITNESS).read_text())
        assert told == {"loaded": ["onnxruntime"], "prefix": str(environment), "torch": False}
    assert accuracy(with_torch) > 0.9
    assert accuracy(without) >= accuracy(with_torch) - 0.01
