"""The app of the deployment tests: that of `flower_app`, on real SuperNodes, with accidents by environment variable."""

import json
import os
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from flower_app import arrays, client_app, record, start_model
from flwr.app import ArrayRecord, ConfigRecord, Context, Message
from flwr.clientapp.typing import ClientAppCallable
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from fedcomp_clients import compress_mod
from fedcomp_strategies import Compressed

PLAIN = "DEPLOYED_APP_PLAIN"
"""Environment variable of a node without fedcomp's mod."""
STALL = "DEPLOYED_APP_STALL"
"""Environment variable of a node that makes this file in round ACCIDENT, after training, and never replies."""

ACCIDENT = 2
RETURNED = "round-{}"
"""File in the run's folder that is made when this round begins, before its nodes are chosen."""

CONFIG: dict[str, int | str] = {
    "folder": "",
    "rounds": 2,
    "nodes": 2,
    "uplink": "topk(0.1)",
    "feedback": "ef",
    "timeout": 60,
    "wait-new": 0,
}

server = ServerApp()


class Watched(FedAvg):
    """Asks every node; tells when a round begins, and waits in one of them for a node that was not there before."""

    def __init__(self, nodes: int, folder: Path, wait_new: int) -> None:
        super().__init__(fraction_evaluate=0, min_train_nodes=nodes, min_available_nodes=nodes)
        self.folder, self.wait_new = folder, wait_new
        self.seen: set[int] = set()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        (self.folder / RETURNED.format(server_round)).touch()
        deadline = time.monotonic() + 60
        while server_round == self.wait_new and not set(grid.get_node_ids()) - self.seen:
            if time.monotonic() > deadline:
                raise RuntimeError("no new node")
            time.sleep(0.5)
        messages = list(super().configure_train(server_round, arrays, config, grid))
        self.seen |= {message.metadata.dst_node_id for message in messages}
        return messages


@server.main()
def serve(grid: Grid, context: Context) -> None:
    config: dict[str, Any] = context.run_config
    folder = Path(config["folder"])
    inner = Watched(config["nodes"], folder, config["wait-new"])
    strategy = Compressed(inner, config["uplink"], feedback=config["feedback"])
    result = strategy.start(grid, record(start_model()), num_rounds=config["rounds"], timeout=config["timeout"])
    assert result.arrays is not None
    model: dict[str, Any] = arrays(result.arrays)
    np.savez(folder / "model.npz", **model)
    (folder / "traffic.json").write_text(json.dumps([asdict(traffic) for traffic in strategy.traffic]))


def around(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """The mod, unless this node is one without, and what befalls this node."""
    reply = call_next(message, context) if os.environ.get(PLAIN) else compress_mod(message, context, call_next)
    config = next(iter(message.content.config_records.values()))
    if config["server-round"] == ACCIDENT and (file := os.environ.get(STALL)):
        Path(file).touch()
        time.sleep(600)
    return reply


client = client_app([around])
