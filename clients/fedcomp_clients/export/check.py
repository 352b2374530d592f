"""Comparing the graphs with torch: two steps of torch.optim.SGD and an evaluation, at two batch sizes.

A loss that looks right proves nothing about gradients, so gradients, parameters and buffers are all compared, and the
second step starts from what the first one left, momentum included.
"""

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedcomp.errors import ExportError
from fedcomp_clients.export.model import Step
from fedcomp_clients.export.still import WithoutDropout
from fedcomp_clients.manifest import SGD, Check

Arrays = dict[str, NDArray[Any]]

BATCHES = (4, 7)
TOLERANCE = 1e-6
"""Largest difference of a value after a step, as a share of the largest value of its tensor if that is above 1."""
GRADIENT_TOLERANCE = 1e-4
"""Largest difference of a gradient, as a share of the largest in its tensor..."""
NOISE = 1e-5
"""...and, beyond that, of the largest of all: what ought to cancel leaves rounding errors of that size."""
_RATE = 0.05


def check(step: Step, train: ir.Model, evaluate: ir.Model, optimizer: SGD, x: Tensor, y: Tensor) -> Check:
    """Compare the graphs with torch, without dropout. Raises ExportError above the tolerances."""
    device, reference = Device(train, step, optimizer), Reference(step, optimizer)
    judge = Session(evaluate)
    worst = 0.0
    for batch, rows in zip(BATCHES, _rows(len(x)), strict=True):
        found, expected = device.train(x[rows], y[rows], _RATE), reference.train(x[rows], y[rows], _RATE)
        _compare_gradients(found, expected, batch)
        state = reference.state()
        worst = max(worst, _compare(device.state, state, batch))
        losses = {"the loss in training": found["loss"]}
        _compare(losses, {"the loss in training": expected["loss"]}, batch)
        answers = judge.run({f"t/{name}": value for name, value in state.items()}, x[rows], y[rows])
        outputs = reference.evaluate(x[rows], y[rows])
        _compare({key: answers[key] for key in outputs}, outputs, batch)
    return Check(BATCHES, worst)


def _rows(size: int) -> list[Tensor]:
    """Rows of the example for each batch, from the beginning again where it is short."""
    first, second = BATCHES
    return [torch.arange(first) % size, torch.arange(first, first + second) % size]


class Session:
    """A graph on onnxruntime."""

    def __init__(self, model: ir.Model) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 3
        data = ir.to_proto(model).SerializeToString()
        try:
            self._session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # onnxruntime has no common base of its errors
            raise ExportError(f"onnxruntime cannot load the graph: {error}") from error
        self._inputs = {value.name for value in self._session.get_inputs()}
        self._outputs = [value.name for value in self._session.get_outputs()]

    def run(self, tensors: Mapping[str, NDArray[Any]], x: Tensor, y: Tensor) -> Arrays:
        """Map tensors, by the names in the graph, x and y to all outputs."""
        feed = {**tensors, "x": x.numpy(), "y": y.numpy()}
        try:
            found = self._session.run(
                self._outputs, {name: np.ascontiguousarray(feed[name]) for name in feed if name in self._inputs}
            )
        except Exception as error:
            raise ExportError(
                f"the graph fails at batch size {len(x)}: {error}; take the batch size from x.shape[0]"
            ) from error
        return dict(zip(self._outputs, found, strict=True))


class Device:
    """Training as a device does it: gradients from the graph, the optimizer in numpy."""

    def __init__(self, train: ir.Model, step: Step, optimizer: SGD) -> None:
        self._session, self._optimizer = Session(train), optimizer
        self._trained = list(step.parameters)
        self.state: Arrays = {name: value.numpy().copy() for name, value in step.tensors.items()}
        self.momenta: Arrays = {}

    def train(self, x: Tensor, y: Tensor, rate: float) -> Arrays:
        """One step. Returns the outputs of the graph."""
        found = self._session.run({f"t/{name}": value for name, value in self.state.items()}, x, y)
        for name in self._trained:
            direction = self._direction(name, found[f"g/{name}"])
            self.state[name] = self.state[name] - np.float32(rate) * direction
        self.state |= {key[2:]: value for key, value in found.items() if key.startswith("b/")}
        return found

    def _direction(self, name: str, gradient: NDArray[Any]) -> NDArray[Any]:
        momentum, decay = np.float32(self._optimizer.momentum), np.float32(self._optimizer.weight_decay)
        if decay:
            gradient = gradient + decay * self.state[name]
        if not momentum:
            return gradient
        before = self.momenta.get(name)
        self.momenta[name] = gradient if before is None else momentum * before + gradient
        return gradient + momentum * self.momenta[name] if self._optimizer.nesterov else self.momenta[name]


class Reference:
    """The same in torch, on a copy of the model."""

    def __init__(self, step: Step, optimizer: SGD) -> None:
        self.model, self._loss, self._buffers = copy.deepcopy(step.model), step.loss, list(step.buffers)
        self._optimizer = torch.optim.SGD(
            [value for value in self.model.parameters() if value.requires_grad],
            lr=_RATE,
            momentum=optimizer.momentum,
            weight_decay=optimizer.weight_decay,
            nesterov=optimizer.nesterov,
        )

    def train(self, x: Tensor, y: Tensor, rate: float) -> Arrays:
        """One step. Returns gradients, by their names in the graph, and the loss."""
        self._optimizer.param_groups[0]["lr"] = rate
        self._optimizer.zero_grad()
        with WithoutDropout():
            loss = self._loss(self.model(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        gradients = {
            f"g/{name}": (torch.zeros_like(value) if value.grad is None else value.grad).numpy().copy()
            for name, value in self.model.named_parameters()
            if value.requires_grad
        }
        self._optimizer.step()
        return {**gradients, "loss": loss.detach().numpy()}

    def evaluate(self, x: Tensor, y: Tensor) -> Arrays:
        """Output and loss in evaluation mode."""
        flags = {module: module.training for module in self.model.modules()}
        self.model.eval()
        with torch.no_grad():
            output = self.model(x)
            loss = self._loss(output, y)
        for module, flag in flags.items():
            module.training = flag
        return {"output": output.numpy(), "loss": loss.numpy()}

    def state(self) -> Arrays:
        """Parameters and buffers by name, copied."""
        named = dict(self.model.named_parameters()) | dict(self.model.named_buffers())
        names = [name for name, _ in self.model.named_parameters()] + self._buffers
        return {name: named[name].detach().numpy().copy() for name in names}


def _compare_gradients(found: Arrays, expected: Arrays, batch: int) -> None:
    gradients = [name for name in expected if name.startswith("g/")]
    noise = NOISE * max((_largest(expected[name]) for name in gradients), default=0.0)
    for name in gradients:
        difference = _largest(found[name] - expected[name])
        if not difference <= GRADIENT_TOLERANCE * _largest(expected[name]) + noise:
            raise _wrong(f"the gradient of {name[2:]!r}", batch, difference, _largest(expected[name]))


def _compare(found: Arrays, expected: Arrays, batch: int) -> float:
    """Return the largest difference, in units of the largest value or 1. Raises ExportError above the tolerance."""
    worst = 0.0
    for name, value in expected.items():
        difference = _largest(found[name].astype(np.float64) - value) / max(1.0, _largest(value))
        if not difference <= TOLERANCE:  # NaN too
            raise _wrong(name, batch, difference, _largest(value))
        worst = max(worst, difference)
    return worst


def _largest(values: NDArray[Any]) -> float:
    return float(np.abs(values).max()) if values.size else 0.0


def _wrong(what: str, batch: int, difference: float, largest: float) -> ExportError:
    return ExportError(
        f"the graph does not do what torch does: at batch size {batch}, {what} differs by {difference:.1e} "
        f"(largest value {largest:.1e}); nothing was written. If an example of random values does not help, the model "
        "has a layer that cannot be exported: leave out layers until it works"
    )


