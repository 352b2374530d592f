"""The ClientApp and ServerApp of an experiment, for any Flower engine: in-process grid, Ray, real devices.

Whatever is random hangs on the seed, the round and the partition id, never on node ids or on the order in
which clients run. So every engine trains the same model, and every method of a seed sees the same batches.
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import Mod
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAdagrad, FedAdam, FedAvg, FedAvgM, FedMedian, FedYogi, Strategy
from torch import Tensor
from torch.nn import functional

from fedcomp.errors import ConfigError
from fedcomp_clients.records import to_record as to_record
from fedcomp_simulations import datasets, models
from fedcomp_simulations.experiment import Experiment, Method
from fedcomp_simulations.fleet_grid import FleetGrid, answer_query, expected_missing
from fedcomp_simulations.partition import partition
from fedcomp_simulations.results import Exchange
from fedcomp_strategies import Compressed, RoundTraffic
from fedcomp_strategies.records import views

EVALUATED_AT_ONCE = 250  # samples: larger batches leave the cache

STRATEGIES: dict[str, Callable[..., Strategy]] = {
    "fedadagrad": FedAdagrad,
    "fedadam": FedAdam,
    "fedavg": FedAvg,
    "fedavgm": FedAvgM,
    "fedmedian": FedMedian,
    "fedyogi": FedYogi,
}


@dataclass(frozen=True)
class RoundOutcome:
    """What the server knows after a round.

    Attributes:
        accuracy: of the model on the test samples; None if this round is not evaluated.
        arrays: the model.
        traffic: of all rounds so far.
        exchanges: what was asked of which client, of all rounds so far.
    """

    round: int
    accuracy: float | None
    arrays: ArrayRecord
    traffic: tuple[RoundTraffic, ...]
    exchanges: tuple[tuple[Exchange, ...], ...] = ()


OnRound = Callable[[RoundOutcome], None]


def client_app(experiment: Experiment, seed: int, mod: Mod) -> ClientApp:
    """Make the ClientApp of an experiment: SGD on the samples of its partition, below the given mod."""
    app = ClientApp(mods=[mod])
    app.train()(_Training(experiment, seed))
    app.query()(answer_query)
    return app


def server_app(experiment: Experiment, method: Method, seed: int, on_round: OnRound) -> ServerApp:
    """Make the ServerApp of an experiment; it evaluates the model after every round and calls `on_round`."""
    app = ServerApp()

    def main(grid: Grid, context: Context) -> None:
        del context
        client_samples(experiment, seed)  # data that cannot be had must end the run here, not fail every client
        strategy = Compressed(
            make_strategy(experiment, method),
            uplink=method.codec if method.budget else method.uplink,  # as text, what suits "auto" is chosen
            budget=method.budget or None,
            shared=method.shared,
            feedback=method.feedback,
            norm_cap="auto" if method.norm_cap == 0 else None if method.norm_cap < 0 else method.norm_cap,
            average=method.average,
            downlink=method.downlink,
            mixed_fleet=False,
            device="cpu",
            seed=seed,
        )
        clients = FleetGrid(grid, experiment.fleet, experiment.clients, seed)
        evaluate = _Evaluation(experiment, seed, strategy, clients, on_round)
        with expected_missing(experiment.fleet):
            run_strategy(strategy, experiment, seed, clients, evaluate)

    app.main()(main)
    return app


def make_strategy(experiment: Experiment, method: Method | None = None) -> Strategy:
    """Make the method's strategy, or else the experiment's, without compression and evaluation on the clients."""
    name, options = experiment.strategy, experiment.strategy_options
    if method is not None and method.strategy:
        name, options = method.strategy, method.strategy_options
    return STRATEGIES[name](
        fraction_train=experiment.clients_per_round / experiment.clients,
        min_train_nodes=experiment.clients_per_round,  # the fraction alone may round down to one client less
        fraction_evaluate=0.0,
        min_available_nodes=experiment.clients,
        **options,
    )


def run_strategy(
    strategy: Strategy,
    experiment: Experiment,
    seed: int,
    grid: Grid,
    evaluate: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
) -> ArrayRecord:
    """Train from the seed's start, with the seed's clients in every round, and return the final model."""
    start = to_record(models.initial_arrays(experiment.network(), seed))
    before = random.getstate()
    random.seed(55 + seed)  # Flower draws the clients of a round from this global generator
    try:
        result = strategy.start(grid=grid, initial_arrays=start, num_rounds=experiment.rounds, evaluate_fn=evaluate)
    finally:
        random.setstate(before)
    return result.arrays or start


@dataclass(frozen=True)
class _Training:
    """The train function of a client. It holds no data, as Ray pickles it with every message."""

    experiment: Experiment
    seed: int

    def __call__(self, message: Message, context: Context) -> Message:
        client = _partition_id(context, self.experiment.clients)
        server_round = int(message.content.config_records["config"]["server-round"])  # type: ignore[arg-type]
        x, y = client_samples(self.experiment, self.seed)[client]
        model = _model(self.experiment, message.content.array_records["arrays"])
        loss = _train(model, x, y, self.experiment, np.random.default_rng((self.seed, server_round, client)))
        arrays = {key: value.numpy() for key, value in model.state_dict().items()}
        metrics = MetricRecord({"num-examples": len(y), "train-loss": loss})
        return Message(RecordDict({"arrays": to_record(arrays), "metrics": metrics}), reply_to=message)


@dataclass(frozen=True)
class _Evaluation:
    """The server's own evaluation of the global model on the test samples; called after every round."""

    experiment: Experiment
    seed: int
    strategy: Compressed
    grid: FleetGrid
    on_round: OnRound

    def __call__(self, server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        if server_round == 0:  # the untrained model
            return None
        evaluated = self.experiment.evaluates(server_round)
        accuracy = accuracy_of(self.experiment, self.seed, arrays) if evaluated else None
        exchanges = tuple(self.grid.exchanges.get(number, ()) for number in range(1, server_round + 1))
        self.on_round(RoundOutcome(server_round, accuracy, arrays, tuple(self.strategy.traffic), exchanges))
        return None if accuracy is None else MetricRecord({"accuracy": accuracy})


def accuracy_of(experiment: Experiment, seed: int, arrays: ArrayRecord) -> float:
    """Return the share of test samples, or of all their positions, that the model classifies correctly."""
    x, y = _test_samples(experiment.dataset, datasets.stamp(experiment.dataset), seed)
    model = _model(experiment, arrays).eval()
    correct = 0
    with torch.inference_mode():
        for start in range(0, len(y), EVALUATED_AT_ONCE):
            batch = slice(start, start + EVALUATED_AT_ONCE)
            correct += int((model(x[batch]).argmax(dim=-1) == y[batch]).sum())
    return correct / y.numel()


def _train(model: torch.nn.Module, x: Tensor, y: Tensor, experiment: Experiment, rng: np.random.Generator) -> float:
    """Run SGD in place and return the mean loss of the last epoch; momentum is PyTorch's, v = momentum v + gradient."""
    weights = list(model.parameters())
    velocities = [torch.zeros_like(weight) for weight in weights] if experiment.momentum else []
    loss_sum = 0.0
    for _ in range(experiment.local_epochs):
        loss_sum = 0.0
        order = rng.permutation(len(y))
        for start in range(0, len(y), experiment.batch):
            batch = torch.from_numpy(order[start : start + experiment.batch])
            scores = model(x[batch])  # (batch, classes) or (batch, positions, classes)
            loss = functional.cross_entropy(scores.flatten(0, -2), y[batch].flatten())
            steps = torch.autograd.grad(loss, weights)
            _clip(steps, experiment.clip_norm)
            with torch.no_grad():
                for velocity, step in zip(velocities, steps, strict=False):
                    velocity.mul_(experiment.momentum).add_(step)
                for weight, step in zip(weights, velocities or steps, strict=True):
                    weight.sub_(step, alpha=experiment.lr)
            loss_sum += loss.item() * len(batch)
    return loss_sum / len(y)


def _clip(gradients: Sequence[Tensor], limit: float) -> None:
    """Scale the gradients in place so that their common norm is at most `limit`."""
    if limit == math.inf:
        return
    norm = float(torch.nn.utils.get_total_norm(gradients))
    if norm > limit:
        for gradient in gradients:
            gradient.mul_(limit / norm)


def _partition_id(context: Context, clients: int) -> int:
    nodes = context.node_config.get("num-partitions", clients)
    if nodes != clients:
        raise ConfigError(f"the experiment has {clients} clients, but {nodes} nodes run it")
    return int(context.node_config["partition-id"])


def _model(experiment: Experiment, record: ArrayRecord) -> torch.nn.Module:
    return models.build(experiment.network(), views(record))  # which copies


def client_samples(experiment: Experiment, seed: int) -> list[tuple[Tensor, Tensor]]:
    """The training samples of each client. Raises FedcompError if the data are missing or cannot be split like this."""
    return _split(
        experiment.dataset,
        datasets.stamp(experiment.dataset),
        experiment.partition,
        experiment.clients,
        experiment.alpha,
        experiment.min_samples,
        experiment.shards_per_client,
        tuple((key, _frozen(value)) for key, value in sorted(experiment.partition_options.items())),
        seed,
    )


def _frozen(value: object) -> object:
    """A list as a tuple, so that it can be a key."""
    return tuple(value) if isinstance(value, list) else value


@lru_cache(maxsize=2)  # a process runs one seed at a time
def _split(
    dataset: str,
    files: object,
    kind: str,
    clients: int,
    alpha: float,
    min_samples: int,
    shards_per_client: int,
    options: tuple[tuple[str, object], ...],
    seed: int,
) -> list[tuple[Tensor, Tensor]]:
    """Cut the training samples into one pair of tensors for each client; other files are another key."""
    del files
    data = datasets.load(dataset, seed)
    parts = partition(
        kind,
        data.train_y,
        clients,
        alpha=alpha,
        min_samples=min_samples,
        seed=seed,
        owners=data.train_owner,
        shards_per_client=shards_per_client,
        options=dict(options),
    )
    return [(torch.from_numpy(data.train_x[own]), torch.from_numpy(data.train_y[own])) for own in parts]


@lru_cache(maxsize=1)
def _test_samples(dataset: str, files: object, seed: int) -> tuple[Tensor, Tensor]:
    del files  # they are a part of the key
    data = datasets.load(dataset, seed)
    return torch.from_numpy(data.test_x.copy()), torch.from_numpy(data.test_y.copy())  # copies are writable
