"""Bundles of real torch models on the device side: the same steps, the same averages, the same accuracy as torch."""

import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from numpy.typing import NDArray
from torch import nn

from fedcomp_clients import FitResult, OnnxTrainer, initial_arrays, make_client_app
from fedcomp_clients.export import SGD, export_training_bundle
from fedcomp_simulations.datasets import load
from fedcomp_simulations.grid import InProcessGrid
from fedcomp_simulations.models import Mlp, Network

LR = 0.05

Values = NDArray[Any]
Samples = tuple[Values, Values]

pytestmark = pytest.mark.usefixtures("one_thread")


class Normalised(nn.Module):
    """A convolution and a hidden layer, each with batch norm; the latter cannot be trained on one sample."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.SiLU(), nn.MaxPool2d(2), nn.Flatten(),
            nn.Linear(36, 12), nn.BatchNorm1d(12), nn.SiLU(), nn.Linear(12, 3),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores `(batch, 3)` of images `(batch, 8, 8)`."""
        scores: torch.Tensor = self.layers(x.unsqueeze(1))
        return scores


def export(model: nn.Module, example: tuple[torch.Tensor, torch.Tensor], folder: Path, optimizer: SGD) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own
        export_training_bundle(model, "cross_entropy", example, folder, optimizer=optimizer)


@pytest.fixture(scope="module")
def normalised(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Path]:
    torch.manual_seed(0)
    model, folder = Normalised(), tmp_path_factory.mktemp("normalised") / "bundle"
    x, y = (torch.from_numpy(values) for values in images(8))
    export(model, (x, y), folder, SGD(0.9, 0.01))
    return model, folder


@pytest.fixture(scope="module")
def mlp(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Path]:
    torch.manual_seed(0)
    model, folder = Mlp(Network.shipped("mlp")), tmp_path_factory.mktemp("mlp") / "bundle"
    export(model, (torch.randn(8, 784), torch.arange(8)), folder, SGD(0.9))
    return model, folder


def images(count: int, seed: int = 0) -> Samples:
    random = np.random.default_rng(seed)
    return random.standard_normal((count, 8, 8)).astype(np.float32), random.integers(0, 3, count)


def state(model: nn.Module) -> dict[str, Values]:
    return {name: values.detach().numpy().copy() for name, values in model.state_dict().items()}


def torch_steps(
    model: nn.Module,
    start: dict[str, Values],
    pieces: Iterable[list[Samples]],
    lr: float,
    decay: float = 0.0,
) -> dict[str, Values]:
    """What torch makes of the start in steps whose gradients are accumulated over pieces."""
    model.load_state_dict({name: torch.tensor(values) for name, values in start.items()})
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=decay)
    for step in pieces:
        optimizer.zero_grad()
        total = sum(len(x) for x, _ in step)
        for x, y in step:
            loss = nn.functional.cross_entropy(model(torch.from_numpy(x)), torch.from_numpy(y))
            (loss * len(x) / total).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return state(model)


def close(got: dict[str, Values], expected: dict[str, Values], atol: float) -> None:
    assert got.keys() == expected.keys()
    for name in expected:
        np.testing.assert_allclose(got[name], expected[name], rtol=0, atol=atol, err_msg=name)


def parts(x: Values, y: Values, size: int) -> list[Samples]:
    return [(x[i : i + size], y[i : i + size]) for i in range(0, len(x), size)]


def test_steps_with_a_partial_batch(normalised: tuple[nn.Module, Path]) -> None:
    model, folder = normalised
    trainer, (x, y) = OnnxTrainer(folder), images(23)
    start = trainer.get_parameters()
    trainer.fit(x, y, batch_size=8, lr=0.1, shuffle=False)
    expected = torch_steps(model, start, [[part] for part in parts(x, y, 8)], 0.1, 0.01)
    close(trainer.get_parameters(), expected, 2e-6)
    assert trainer.get_parameters()["layers.1.num_batches_tracked"] == 3


def test_accumulation_is_that_of_torch(normalised: tuple[nn.Module, Path]) -> None:
    """Batch norm sees the pieces, in torch too."""
    model, folder = normalised
    trainer, (x, y) = OnnxTrainer(folder), images(24)
    start = trainer.get_parameters()
    trainer.fit(x, y, batch_size=12, lr=0.1, shuffle=False, accumulate=3)
    expected = torch_steps(model, start, [parts(x[:12], y[:12], 4), parts(x[12:], y[12:], 4)], 0.1, 0.01)
    close(trainer.get_parameters(), expected, 2e-6)


def test_accumulation_is_the_step_of_the_whole_batch(mlp: tuple[nn.Module, Path]) -> None:
    _, folder = mlp
    x, y = load_digits(100)
    whole, cut = OnnxTrainer(folder), OnnxTrainer(folder)
    whole.fit(x, y, batch_size=100, epochs=3)
    cut.fit(x, y, batch_size=100, epochs=3, accumulate=7)
    close(cut.get_parameters(), whole.get_parameters(), 1e-6)


@pytest.mark.parametrize("count", [1, 32, 33, 65])
def test_a_sample_left_over_under_batch_norm(count: int, normalised: tuple[nn.Module, Path]) -> None:
    """C15: torch refuses to train on one sample."""
    model, folder = normalised
    trainer, (x, y) = OnnxTrainer(folder), images(count)
    before = trainer.get_parameters()
    result = trainer.fit(x, y, batch_size=32)
    assert result.samples == (0 if count == 1 else count)
    assert all(np.isfinite(values).all() for values in trainer.get_parameters().values())
    if count == 1:
        told = trainer.evaluate(x, y)
        assert result == FitResult(told.loss, told.accuracy, 0, 0)
        close(trainer.get_parameters(), before, 0)
        with pytest.raises(ValueError, match="more than 1 value per channel"):
            torch_steps(model, before, [[(x, y)]], 0.1)


def load_digits(count: int, skip: int = 0) -> Samples:
    digits = load("mnist")
    some = slice(skip, skip + count)
    return digits.train_x[some].copy(), digits.train_y[some].copy()  # torch warns of read-only arrays


def federated(app: ClientApp, initial: ArrayRecord, rounds: int) -> dict[str, Values]:
    with InProcessGrid(app, 4) as grid:
        strategy = FedAvg(fraction_evaluate=0.0)
        result = strategy.start(grid, initial, num_rounds=rounds, train_config=ConfigRecord({"lr": LR}))
    return {name: array.numpy() for name, array in result.arrays.items()}


@pytest.mark.parametrize("kind", ["mlp", "normalised"])
def test_clients_with_and_without_torch_average_to_the_same(kind: str, request: pytest.FixtureRequest) -> None:
    model, folder = request.getfixturevalue(kind)

    def data(context: Context) -> Samples:
        node = int(context.node_config["partition-id"])
        count = 20 + 3 * node
        return images(count, node) if kind == "normalised" else load_digits(count, 40 * node)

    onnx_app = make_client_app(folder, data)
    decay = 0.01 if kind == "normalised" else 0.0

    def torch_reply(message: Message, context: Context) -> Message:
        x, y = data(context)
        start = {name: array.numpy() for name, array in message.content.array_records["arrays"].items()}
        trained = torch_steps(model, start, [[(x, y)]], LR, decay)
        arrays = ArrayRecord({name: Array(values) for name, values in trained.items()})
        metrics = MetricRecord({"num-examples": len(x), "loss": 0.0, "accuracy": 0.0})
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

    replies: list[bool] = []

    def app(onnx_nodes: set[int]) -> ClientApp:
        mixed = ClientApp()

        @mixed.train()
        def train(message: Message, context: Context) -> Message:
            own = int(context.node_config["partition-id"]) in onnx_nodes
            message.content.config_records["config"]["batch-size"] = 64  # one batch, so that its order does not matter
            reply = onnx_app(message, context) if own else torch_reply(message, context)
            replies.append(own)
            return reply

        return mixed

    initial = initial_arrays(folder)
    with_torch, without, mixed = (federated(app(nodes), initial, 3) for nodes in (set(), {0, 1, 2, 3}, {1, 3}))
    assert (replies.count(True), replies.count(False)) == (18, 18)
    close(without, with_torch, 2e-6)
    close(mixed, with_torch, 2e-6)
    assert max(float(np.abs(with_torch[name] - initial[name].numpy()).max()) for name in with_torch) > 5e-3


def test_digits_are_learnt_as_well_as_with_torch(mlp: tuple[nn.Module, Path]) -> None:
    model, folder = mlp
    digits = load("mnist")
    trainer = OnnxTrainer(folder)
    start = trainer.get_parameters()
    trainer.fit(digits.train_x, digits.train_y, epochs=3, batch_size=32, lr=LR)
    got = trainer.evaluate(digits.test_x, digits.test_y).accuracy
    steps = []
    random = np.random.default_rng(0)  # the order of `fit`
    for _ in range(3):
        order = random.permutation(len(digits.train_x))
        steps += [[(digits.train_x[rows], digits.train_y[rows])] for rows in np.split(order, range(32, len(order), 32))]
    torch_steps(model, start, steps, LR)
    model.eval()
    with torch.no_grad():
        guessed = model(torch.tensor(digits.test_x)).argmax(1).numpy()
    expected = float((guessed == digits.test_y).mean())
    print(f"accuracy {got} with onnxruntime, {expected} with torch")
    assert got is not None
    assert got > 0.9
    assert abs(got - expected) <= 0.005
