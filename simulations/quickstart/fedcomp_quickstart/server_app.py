"""The server: an ordinary Flower ServerApp, and two lines for fedcomp."""

import json
from pathlib import Path

import torch
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from fedcomp_quickstart.task import Net
from fedcomp_strategies import Compressed  # 1

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train, and say what it took."""
    config = context.run_config
    nodes = int(config["nodes"])
    averaging = FedAvg(min_train_nodes=nodes, min_evaluate_nodes=nodes, min_available_nodes=nodes)
    strategy = Compressed(averaging, uplink=str(config["uplink"]), budget=str(config["budget"]) or None)  # 2

    torch.manual_seed(0)
    result = strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(Net().state_dict()),
        num_rounds=int(config["rounds"]),
        timeout=float(config["timeout"]),
    )

    accuracies = [metrics["accuracy"] for metrics in result.evaluate_metrics_clientapp.values()]
    uploads = [traffic.bytes_up / max(traffic.uploads, 1) for traffic in strategy.traffic]
    print(
        f"accuracy {accuracies[-1]:.1%} after {len(accuracies)} rounds, {sum(uploads) / len(uploads):,.0f} B an upload"
    )
    if config["results"]:
        told = {"accuracies": accuracies, "uploads": uploads}
        Path(str(config["results"])).write_text(json.dumps(told), "utf-8")
