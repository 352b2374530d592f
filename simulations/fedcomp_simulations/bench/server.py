"""Speed of the server: from the frames of many clients to their mean, against Flower's mean of uncompressed models.

Both take the same clients in the same process, in turns. Flower's side is its own function on records of float32 arrays
as they arrive; ours ends with whole arrays in the model's dtype.
"""

import time
import tracemalloc
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from statistics import median
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, MetricRecord, RecordDict
from flwr.serverapp.strategy.strategy_utils import aggregate_arrayrecords
from numpy.typing import NDArray

from fedcomp import Codec, Plan, compress, generator
from fedcomp.device import resolve
from fedcomp_strategies.aggregator import Aggregator

DEFAULT_CLIENTS = 200
REPEATS = 3
DISTINCT = 8
"""Clients with an update of their own; the others repeat these, so that memory holds few uncompressed models."""

TYPICAL = (
    "topk(0.01)",
    "topk(0.01, values=uniform(8, fast=True))",
    "topk(0.01, values=uniform(8))",
    "sign",
    "uniform(8, fast=True)",
    "int8",
    "ecsq(bits=0.1)",
    "lowrank(4)",
    "eden(1.0)",
    "vq(8, 288)",
)
"""Codecs that are measured unless others are asked for."""

Model = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class ServerRow:
    """One codec at the server.

    Attributes:
        codec: how the codec is written.
        clients: replies that are averaged.
        parameters: of the model.
        device: where the sum is.
        ms_per_reply: from frames to the mean model, over the number of clients; median of three.
        flower_ms_per_reply: of Flower's mean of as many uncompressed models, measured in between.
        speedup_vs_flower: the quotient of both.
        peak_bytes: most memory that aggregation took at once besides the frames and the base: traced by Python on the
            CPU, the device's own on a GPU.
    """

    codec: str
    clients: int
    parameters: int
    device: str
    ms_per_reply: float
    flower_ms_per_reply: float
    speedup_vs_flower: float
    peak_bytes: int

    def to_json(self) -> dict[str, Any]:
        """Plain values; the keys are a contract with whoever reads the file."""
        return asdict(self)


def measure_server(codec: Codec, clients: int, parameters: int, device: str) -> ServerRow:
    """Measure a codec at the server. Raises ConfigError for a device that is not there."""
    device = resolve(device)
    base = _model(parameters)
    plan = Plan(codec, min_size=0, gentle_share=0)
    models = [_trained(base, client) for client in range(min(clients, DISTINCT))]
    frames = [
        compress(base, new, plan, round=1, rng=generator(0, 1, client)).frame for client, new in enumerate(models)
    ]
    records = [_record(new) for new in models]
    everyone = list(islice(cycle(records), clients))

    def ours() -> Model:
        aggregator = Aggregator(base, plan, round=1, device=device)
        for node, frame in enumerate(islice(cycle(frames), clients)):
            aggregator.add(frame, 1, node=node)
        return aggregator.mean().model(base)

    ours()  # lazy imports, caches and the device's start
    times = [
        (_seconds(lambda: aggregate_arrayrecords(everyone, "num-examples")), _seconds(ours)) for _ in range(REPEATS)
    ]
    flower, mine = (1e3 * median(column) / clients for column in zip(*times, strict=True))
    return ServerRow(str(codec), clients, parameters, device, mine, flower, flower / mine, _peak(ours, device))


def _model(parameters: int) -> Model:
    """Two matrices, of 784 x 1000 and 216 x 1000 at a million parameters, and a vector for what is left."""
    columns = max(1, min(1000, round(parameters**0.5)))
    rows = parameters // columns
    first = -(-rows * 784 // 1000)
    shapes = {
        "fc1.weight": (first, columns),
        "fc2.weight": (rows - first, columns),
        "fc2.bias": (parameters % columns,),
    }
    return {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}


def _trained(base: Model, client: int) -> Model:
    random = np.random.default_rng(client)
    return {name: np.float32(0.01) * random.standard_normal(v.shape, np.float32) for name, v in base.items()}


def _record(model: Model) -> RecordDict:
    arrays = ArrayRecord({name: Array(values) for name, values in model.items()})
    return RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": 1})})


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _peak(work: Callable[[], object], device: str) -> int:
    """Most bytes at once during the work, in a pass of its own: tracing takes time."""
    if device.startswith("cuda"):
        import torch

        torch.cuda.reset_peak_memory_stats(device)
        work()
        return int(torch.cuda.max_memory_allocated(device))
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
