"""The client: an ordinary Flower ClientApp, and two lines for fedcomp."""

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedcomp_clients import compress_mod  # 1
from fedcomp_quickstart import task

app = ClientApp(mods=[compress_mod])  # 2


def _start(message: Message, context: Context) -> tuple[task.Net, task.Samples, task.Samples]:
    net = task.Net()
    net.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
    return net, *task.load(int(context.node_config["partition-id"]), int(context.node_config["num-partitions"]))


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train on this node's digits."""
    net, samples, _ = _start(message, context)
    config = context.run_config
    loss = task.train(
        net, samples, epochs=int(config["epochs"]), lr=float(config["lr"]), batch_size=int(config["batch-size"])
    )
    metrics = MetricRecord({"num-examples": len(samples[0]), "train-loss": loss})
    return Message(RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics}), reply_to=message)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Test the global model on this node's share of the test digits."""
    net, _, samples = _start(message, context)
    loss, accuracy = task.evaluate(net, samples)
    metrics = MetricRecord({"num-examples": len(samples[0]), "loss": loss, "accuracy": accuracy})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)
