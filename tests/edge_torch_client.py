"""The client of `edge_client` as one with torch: for comparison, on the same data."""

from pathlib import Path

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch.nn import functional

from fedcomp_clients import CompressMod, MemoryStore
from fedcomp_simulations.models import Cnn, Network

MOMENTUM = 0.9

app = ClientApp(mods=[CompressMod(MemoryStore())])


@app.train()
def train(message: Message, context: Context) -> Message:
    """One pass over the node's data, in the order in which `make_client_app` takes them."""
    node = int(context.node_config["partition-id"])
    folder = Path(str(context.run_config["folder"])) / f"device-{node}"
    model = Cnn(Network.shipped("cnn"))
    model.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
    config, size = message.content.config_records["config"], int(context.run_config["batch-size"])
    optimizer = torch.optim.SGD(model.parameters(), lr=float(context.run_config["lr"]), momentum=MOMENTUM)
    x, y = torch.from_numpy(np.load(folder / "x.npy")), torch.from_numpy(np.load(folder / "y.npy"))
    seed = np.random.SeedSequence((0, int(config["server-round"]), node)).generate_state(1)  # type: ignore[arg-type]
    order = np.random.default_rng(int(seed[0])).permutation(len(y))
    for rows in (torch.from_numpy(order[start : start + size]) for start in range(0, len(order), size)):
        optimizer.zero_grad()
        functional.cross_entropy(model(x[rows]), y[rows]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    metrics = MetricRecord({"num-examples": len(y), "loss": 0.0, "accuracy": 0.0})
    return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=message)
