"""The app that `fedcomp bench --wire` measures: a model of 60 small matrices and a scalar, random steps, numpy only."""

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from numpy.typing import NDArray

from fedcomp_clients import compress_mod
from fedcomp_strategies import Compressed

MATRICES, SIDE = 60, 32

CONFIG: dict[str, int | str] = {"rounds": 3, "uplink": "", "options": "{}", "results": ""}
"""Keys of the run's configuration: no uplink is plain Flower; options are JSON, for `Compressed`."""

server, client = ServerApp(), ClientApp(mods=[compress_mod])


def start_model() -> dict[str, NDArray[np.float32]]:
    """60 float32 tensors 32 x 32, no two alike, and a scalar."""
    random = np.random.default_rng(0)
    model = {f"layer{i}.weight": random.standard_normal((SIDE, SIDE), np.float32) for i in range(MATRICES)}
    return model | {"scale": np.array(1, np.float32)}


class _Measured(FedAvg):
    """FedAvg for one node, which writes down when a round begins and what its replies' arrays take."""

    def __init__(self) -> None:
        super().__init__(min_train_nodes=1, min_evaluate_nodes=1, min_available_nodes=1)
        self.begun: list[float] = []
        self.payloads: list[int] = []

    def configure_train(self, *args: Any, **named: Any) -> Any:
        self.begun.append(time.monotonic())
        return super().configure_train(*args, **named)

    def aggregate_train(self, server_round: int, replies: Any) -> Any:
        replies = list(replies)
        arrived = [record for m in replies if not m.has_error() for record in m.content.array_records.values()]
        self.payloads.append(sum(len(array.data) for record in arrived for array in record.values()))
        return super().aggregate_train(server_round, replies)


@server.main()
def _serve(grid: Grid, context: Context) -> None:
    config = context.run_config
    plain = _Measured()
    strategy: FedAvg | Compressed = plain
    if config["uplink"]:
        strategy = Compressed(plain, uplink=str(config["uplink"]), **json.loads(str(config["options"])))
    arrays = ArrayRecord({name: Array(values) for name, values in start_model().items()})
    result = strategy.start(grid, arrays, num_rounds=int(config["rounds"]), timeout=120)
    told = {
        "begun": plain.begun,
        "payloads": plain.payloads,
        "estimates": [0] * len(plain.begun),
        "evaluated": [dict(metrics) for metrics in result.evaluate_metrics_clientapp.values()],
    }
    if isinstance(strategy, Compressed):
        told |= {
            "payloads": [t.bytes_up for t in strategy.traffic],
            "estimates": [t.wire_up for t in strategy.traffic],
        }
    Path(str(config["results"])).write_text(json.dumps(told), "utf-8")


@client.train()
def _train(message: Message, context: Context) -> Message:
    record = message.content.array_records["arrays"]
    random = np.random.default_rng(int(message.content.config_records["config"]["server-round"]))  # type: ignore[arg-type]
    steps = {
        name: Array(np.asarray(array.numpy() + random.standard_normal(array.shape) * 0.01, np.float32))
        for name, array in record.items()
    }
    metrics = MetricRecord({"num-examples": 10, "train-loss": 0.5})
    return Message(RecordDict({"arrays": ArrayRecord(steps), "metrics": metrics}), reply_to=message)


@client.evaluate()
@compress_mod.evaluates
def _evaluate(message: Message, context: Context) -> Message:
    metrics = MetricRecord({"num-examples": 10, "eval-loss": 0.5, "eval-accuracy": 0.5})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)
