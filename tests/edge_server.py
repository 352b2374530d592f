"""The server of `edge_client` and `edge_torch_client`: tests the model after each round, and writes down all it saw."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from fedcomp_clients import initial_arrays
from fedcomp_simulations.datasets import load
from fedcomp_simulations.models import Cnn, Network
from fedcomp_strategies import Compressed

RESULTS, MODEL = "results.json", "model.npz"

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train the bundle's model."""
    config: dict[str, Any] = context.run_config
    nodes, folder = config["nodes"], Path(config["folder"])
    torch.set_num_threads(1)
    inner = FedAvg(fraction_evaluate=0, min_train_nodes=nodes, min_available_nodes=nodes)
    strategy = Compressed(inner, uplink="auto", budget=config["budget"])
    result = strategy.start(
        grid,
        initial_arrays(folder / "bundle"),
        num_rounds=config["rounds"],
        timeout=config["timeout"],
        evaluate_fn=evaluate,
    )
    assert result.arrays is not None
    np.savez(folder / MODEL, **{name: array.numpy() for name, array in result.arrays.items()})  # type: ignore[arg-type]
    told = {
        "accuracies": [metrics["accuracy"] for metrics in result.evaluate_metrics_serverapp.values()],
        "uploads": [traffic.uploads for traffic in strategy.traffic],
        "bytes_up": [traffic.bytes_up for traffic in strategy.traffic],
    }
    (folder / RESULTS).write_text(json.dumps(told))


def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
    """Accuracy on 1,000 digits that no node has."""
    model, digits = Cnn(Network.shipped("cnn")), load("mnist")
    model.load_state_dict(arrays.to_torch_state_dict())
    with torch.no_grad():
        guessed = model(torch.from_numpy(digits.test_x.copy())).argmax(1).numpy()
    return MetricRecord({"accuracy": float((guessed == digits.test_y).mean())})
