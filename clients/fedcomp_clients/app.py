"""A ready ClientApp that trains from a bundle and compresses what it uploads."""

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import Mod
from numpy.typing import NDArray

from fedcomp.errors import ConfigError, FedcompError, LayoutError
from fedcomp_clients.bundle import MANIFEST, Bundle, read_bundle
from fedcomp_clients.mod import CompressMod
from fedcomp_clients.node import node_of
from fedcomp_clients.onnx_trainer import Evaluation, FitResult, OnnxTrainer

Samples = tuple[NDArray[Any], NDArray[Any]]
LoadData = Callable[[Context], Samples | tuple[Samples, Samples]]
"""Gives (x, y), or ((x, y), (x, y)) for training and evaluation, of the node with this context."""

BundlePath = Path | str
_TYPES: dict[str, tuple[type, ...]] = {"whole number": (int,), "number": (int, float), "text": (str,)}
_DEVICE = ("threads", "accumulate", "evaluate-batch-size")

_local = threading.local()


def make_client_app(
    bundle: BundlePath | Callable[[Context], BundlePath],
    load_data: LoadData,
    *,
    mods: Sequence[Mod] = (),
    outer_mods: Sequence[Mod] = (),
    compress: CompressMod | None = None,
) -> ClientApp:
    """Make a ClientApp that trains and evaluates a bundle's model on a node's data.

    Its settings are looked for in the configuration of the message, then of the run: "lr" (0.1), "local-epochs" (1),
    "batch-size" (32), "seed" (0), "proximal-mu" (0, as Flower's FedProx sends it), "clip-norm" (0: no clipping) and
    "single" ("merge"). What has to suit the device, "threads" (1), "accumulate" (1) and "evaluate-batch-size" (64), is
    looked for in its own configuration first. See `OnnxTrainer.fit`. The order of samples changes with round and node.
    Replies have the metrics "num-examples", "loss" and, for classification, "accuracy".

    Args:
        bundle: folder of the bundle, or what tells it for a node.
        load_data: the node's data, as arrays that may be memory-mapped. Without data for evaluation, models are
            evaluated on the training data.
        mods: of the train function, that see the update before it is compressed: clipping, local privacy.
        outer_mods: that see the compressed reply: sizes.
        compress: the mod that compresses; None: one with state in files, as `compress_mod`.

    Errors that concern the node (bundle, data, training) become error replies, its state as it was.
    """
    compress = CompressMod() if compress is None else compress
    app = ClientApp(mods=[*outer_mods, compress])

    def trainer(message: Message, context: Context) -> OnnxTrainer:
        folder = bundle(context) if callable(bundle) else bundle
        found = _trainer(Path(folder), _Settings(message, context).whole("threads", 1))
        found.set_parameters(_received(message))
        return found

    @app.train(mods=list(mods))
    def train(message: Message, context: Context) -> Message:
        told, model = _Settings(message, context), trainer(message, context)
        x, y = _split(load_data(context))[0]
        result = model.fit(
            x,
            y,
            epochs=told.whole("local-epochs", 1),
            batch_size=told.whole("batch-size", 32),
            lr=told.number("lr", 0.1),
            seed=_seed(told, context),
            accumulate=told.whole("accumulate", 1),
            proximal=told.number("proximal-mu", 0.0),
            clip_norm=told.number("clip-norm", 0.0) or None,
            single=told.text("single", "merge"),
        )
        trained = ArrayRecord({name: Array(values) for name, values in model.get_parameters().items()})
        return Message(RecordDict({"arrays": trained, "metrics": _metrics(result)}), reply_to=message)

    @app.evaluate()
    @compress.evaluates
    def evaluate(message: Message, context: Context) -> Message:
        x, y = _split(load_data(context))[1]
        size = _Settings(message, context).whole("evaluate-batch-size", 64)
        metrics = _metrics(trainer(message, context).evaluate(x, y, batch_size=size))
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return app


def initial_arrays(bundle: Bundle | BundlePath) -> ArrayRecord:
    """A bundle's initial model, for ``strategy.start(initial_arrays=...)``. Raises BundleError if it is not sound."""
    found = bundle if isinstance(bundle, Bundle) else read_bundle(bundle)
    return ArrayRecord({name: Array(values) for name, values in found.initial.items()})


class _Settings:
    """What the server or the app say about training; about the device its owner is asked first."""

    def __init__(self, message: Message, context: Context) -> None:
        self._own: Mapping[str, object] = context.node_config
        self._told: list[Mapping[str, object]] = [*message.content.config_records.values(), context.run_config]

    def whole(self, key: str, default: int) -> int:
        return int(self._find(key, "whole number", default))

    def number(self, key: str, default: float) -> float:
        return float(self._find(key, "number", default))

    def text(self, key: str, default: str) -> str:
        return str(self._find(key, "text", default))

    def _find(self, key: str, kind: str, default: Any) -> Any:
        asked = [self._own, *self._told] if key in _DEVICE else self._told
        value = next((config[key] for config in asked if key in config), default)
        if isinstance(value, bool) or not isinstance(value, _TYPES[kind]):
            raise ConfigError(f"{key}: expected a {kind} in the configuration, got {value!r}")
        return value


def _seed(told: _Settings, context: Context) -> int:
    """Another one for each round and node, the same whenever these are."""
    parts = (abs(told.whole("seed", 0)), abs(told.whole("server-round", 0)), abs(node_of(context)[1]))
    return int(np.random.SeedSequence(parts).generate_state(1)[0])


def _received(message: Message) -> dict[str, NDArray[Any]]:
    """The model in the message. Raises LayoutError if it has another number of models than one."""
    records = list(message.content.array_records.values())
    if len(records) != 1:
        raise LayoutError(f"expected one ArrayRecord with the model in the message, got {len(records)}")
    return {name: array.numpy() for name, array in records[0].items()}


def _metrics(result: FitResult | Evaluation) -> MetricRecord:
    metrics: dict[str, int | float] = {"num-examples": result.samples, "loss": result.loss}
    if result.accuracy is not None:
        metrics["accuracy"] = result.accuracy
    return MetricRecord(metrics)  # type: ignore[arg-type]


def _split(data: object) -> tuple[Samples, Samples]:
    """Data for training and for evaluation."""
    if not isinstance(data, tuple | list) or len(data) != 2:
        raise FedcompError("load_data: expected (x, y) or ((x, y), (x, y)), got something else")
    first, second = data
    if not isinstance(first, tuple | list):
        return (first, second), (first, second)
    if len(first) != 2 or not isinstance(second, tuple | list) or len(second) != 2:
        raise FedcompError("load_data: expected (x, y) or ((x, y), (x, y)), got something else")
    return (first[0], first[1]), (second[0], second[1])


def _trainer(folder: Path, threads: int) -> OnnxTrainer:
    """The trainer of a bundle; the last one of each thread is kept, for simulations and other long-lived processes.

    Each message brings its model, so that nothing is left of another node's.
    """
    try:
        status = (folder / MANIFEST).stat()
        key: object = (folder.resolve(), status.st_mtime_ns, status.st_size, status.st_ino, threads)
    except OSError:
        key = None  # reading it tells why
    if key is None or getattr(_local, "key", None) != key:
        _local.trainer, _local.key = OnnxTrainer(folder, threads=threads), key
    return _local.trainer  # type: ignore[no-any-return]
