"""A small Flower app without torch for the end-to-end tests: linear regression whose clients misbehave on demand."""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import Mod
from flwr.serverapp.strategy import Strategy
from numpy.typing import NDArray

from fedcomp.request import KEY, MODEL, MODEL_STYPE, STYPE
from fedcomp_simulations.grid import InProcessGrid

Model = dict[str, NDArray[Any]]
Fault = Callable[[Message, Context, int], None]
"""Changes a reply, or raises, for (reply, context, server round)."""

CLIENTS = 6


def start_model() -> Model:
    """Matrix, bias, normalisation statistics, a counter and a scalar: what real models are made of."""
    random = np.random.default_rng(0)
    return {
        "fc.weight": random.standard_normal((20, 30)).astype(np.float32),
        "fc.bias": np.zeros(30, np.float32),
        "bn.running_var": np.ones(30, np.float32),
        "bn.num_batches_tracked": np.array(0, np.int64),
        "temperature": np.array(1.0, np.float32),
    }


def record(model: Model) -> ArrayRecord:
    return ArrayRecord({name: Array(values) for name, values in model.items()})


def arrays(record: ArrayRecord) -> Model:
    return {name: array.numpy() for name, array in record.items()}


def frame_of(reply: Message) -> bytes | None:
    """The frame in a reply, whatever form that has; None in a plain one."""
    told = reply.content.config_records.get(KEY)
    if told is not None and isinstance(frame := told.get("frame"), bytes):
        return frame
    found = [array for rec in reply.content.array_records.values() for array in rec.values()]
    return next((array.data for array in found if array.stype == STYPE), None)


def put_frame(reply: Message, frame: bytes) -> None:
    """Replace the frame in a reply, in the form that it has."""
    told = reply.content.config_records.get(KEY)
    if told is not None:
        reply.content[KEY] = ConfigRecord({**told, "frame": frame})
        return
    packed = Array(dtype="uint8", shape=(len(frame),), stype=STYPE, data=frame)
    reply.content["arrays"] = ArrayRecord({KEY: packed})


def package_of(message: Message) -> bytes | None:
    """The packed model in a message, whatever form that has; None in one with a plain model."""
    for config in message.content.config_records.values():
        if isinstance(package := config.get(MODEL), bytes):
            return package
    found = [array for rec in message.content.array_records.values() for array in rec.values()]
    return next((array.data for array in found if array.stype == MODEL_STYPE), None)


def trained(model: Model, partition: int, round_: int) -> Model:
    """A step that hangs on the partition and the round only; float32 as clients reply, whatever the server sent."""
    random = np.random.default_rng((partition, round_))
    new: Model = {}
    for name, values in model.items():
        if name == "bn.num_batches_tracked":
            new[name] = np.array(int(values) + 1 + partition, np.int64)
        elif values.dtype.kind != "f":
            new[name] = values.copy()
        else:
            step = random.standard_normal(values.shape) * 0.05 + 0.02
            new[name] = np.asarray(values.astype(np.float32) + step.astype(np.float32))
    return new


class OrderedGrid(InProcessGrid):
    """Replies come in the order of the nodes, so that sums of wrapped and unwrapped strategies round alike."""

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        return sorted(super().send_and_receive(messages, timeout=timeout), key=lambda m: m.metadata.src_node_id)


def client_app(mods: list[Mod], fault: Fault | None = None, evaluate: bool = False) -> ClientApp:
    app = ClientApp(mods=mods)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        partition = int(context.node_config["partition-id"])
        config = next(iter(message.content.config_records.values()))
        round_ = int(config["server-round"])  # type: ignore[arg-type]
        model = trained(arrays(message.content.array_records["arrays"]), partition, round_)
        metrics = MetricRecord({"num-examples": 10 + partition, "loss": 1.0 / round_})
        reply = Message(RecordDict({"arrays": record(model), "metrics": metrics}), reply_to=message)
        if fault is not None:
            fault(reply, context, round_)
        return reply

    if evaluate:

        @app.evaluate()
        def evaluate_(message: Message, context: Context) -> Message:
            return Message(
                RecordDict({"metrics": MetricRecord({"num-examples": 1, "accuracy": 0.5})}), reply_to=message
            )

    return app


def run(
    strategy: Strategy,
    mods: list[Mod],
    *,
    rounds: int = 3,
    fault: Fault | None = None,
    clients: int = CLIENTS,
    evaluate: bool = False,
    config: ConfigRecord | None = None,
    model: Model | None = None,
) -> Model:
    """The global model after some rounds in the in-process grid."""
    with OrderedGrid(client_app(mods, fault, evaluate), clients) as grid:
        result = strategy.start(grid, record(model or start_model()), num_rounds=rounds, train_config=config)
    return arrays(result.arrays) if result.arrays else model or start_model()
