"""The server for digits on devices without torch: all that could be changed is in pyproject.toml."""

import numpy as np
from fedcomp_strategies import CompressedFedAvg
from flwr.app import Array, ArrayRecord, ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train, and print what was uploaded."""
    rng = np.random.default_rng(0)
    model = {
        "hidden.weight": rng.normal(0, (2 / 784) ** 0.5, (32, 784)).astype(np.float32),
        "hidden.bias": np.zeros(32, np.float32),
        "output.weight": rng.normal(0, (2 / 32) ** 0.5, (10, 32)).astype(np.float32),
        "output.bias": np.zeros(10, np.float32),
    }
    arrays = ArrayRecord({name: Array(values) for name, values in model.items()})
    config = ConfigRecord({"lr": context.run_config["learning-rate"]})
    strategy = CompressedFedAvg.from_config(context.run_config)
    result = strategy.start(grid, arrays, train_config=config)
    for traffic in strategy.traffic:
        accuracy = result.evaluate_metrics_clientapp[traffic.round]["accuracy"]
        mean = round(traffic.bytes_up / max(traffic.uploads, 1))
        print(f"round {traffic.round}: accuracy {accuracy:.3f}, {traffic.uploads} uploads of {mean} bytes on average")
