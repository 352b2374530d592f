"""Comparing a bundle with torch: two steps of torch.optim.SGD and an evaluation, at two batch sizes.

A loss that looks right proves nothing about gradients, so gradients, parameters and buffers are all compared, and the
second step starts from what the first one left, momentum included. The bundle is run by what runs it on a device.
"""

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedcomp.errors import BundleError, DataError, ExportError, NonFiniteError
from fedcomp_clients.bundle import Bundle
from fedcomp_clients.export.model import Step
from fedcomp_clients.export.still import WithoutDropout
from fedcomp_clients.manifest import EVAL, SGD, TRAIN, Check
from fedcomp_clients.onnx_session import Graph
from fedcomp_clients.onnx_trainer import OnnxTrainer

Arrays = Mapping[str, NDArray[Any]]

BATCHES = (4, 7)
TOLERANCE = 1e-6
"""Largest difference of a value after a step, as a share of the largest value of its tensor if that is above 1."""
GRADIENT_TOLERANCE = 1e-4
"""Largest difference of a gradient, as a share of the largest in its tensor..."""
NOISE = 1e-5
"""...and, beyond that, of the largest of all: what ought to cancel leaves rounding errors of that size."""
_RATE = 0.05


def check(step: Step, bundle: Bundle, x: Tensor, y: Tensor) -> Check:
    """Compare a bundle with torch, without dropout. Raises ExportError above the tolerances."""
    worst = 0.0
    try:
        device, reference = _Device(bundle), Reference(step, bundle.manifest.optimizer)
        for size, rows in zip(BATCHES, _rows(len(x)), strict=True):
            found, expected = device.train(x[rows], y[rows]), reference.train(x[rows], y[rows])
            _compare_gradients(found, expected, size)
            _compare(found, {"loss": expected["loss"]}, size)
            state = reference.state()
            worst = max(worst, _compare(device.state(), state, size))
            outputs = reference.evaluate(x[rows], y[rows])
            _compare(device.evaluate(state, x[rows], y[rows]), outputs, size)
    except (BundleError, DataError, NonFiniteError) as error:
        raise ExportError(
            f"the graph does not run ({error}); nothing was written. Take the batch size from x.shape[0], not from "
            "len(x), and the example from real data"
        ) from error
    return Check(BATCHES, worst)


def _rows(size: int) -> list[Tensor]:
    """Rows of the example for each batch, from the beginning again where it is short."""
    first, second = BATCHES
    return [torch.arange(first) % size, torch.arange(first, first + second) % size]


class _Device:
    """What a device makes of the bundle."""

    def __init__(self, bundle: Bundle) -> None:
        self._trainer = OnnxTrainer(bundle)
        self._train, self._eval = (Graph(bundle, name, threads=1) for name in (TRAIN, EVAL))

    def train(self, x: Tensor, y: Tensor) -> Arrays:
        """One step. Returns the outputs of the graph."""
        names = self._train.outputs
        found = self._train.run(names, self._trainer.get_parameters(), x.numpy(), y.numpy())
        self._trainer.fit(x.numpy(), y.numpy(), batch_size=len(x), lr=_RATE, shuffle=False)
        return dict(zip(names, found, strict=True))

    def evaluate(self, state: Arrays, x: Tensor, y: Tensor) -> Arrays:
        """Output and loss of a model in this state."""
        names = ("output", "loss")
        return dict(zip(names, self._eval.run(names, state, x.numpy(), y.numpy()), strict=True))

    def state(self) -> Arrays:
        """All tensors by name."""
        return self._trainer.get_parameters()


class Reference:
    """What torch makes of a copy of the model."""

    def __init__(self, step: Step, optimizer: SGD) -> None:
        self.model, self._loss, self._buffers = copy.deepcopy(step.model), step.loss, list(step.buffers)
        self._optimizer = torch.optim.SGD(
            [value for value in self.model.parameters() if value.requires_grad],
            lr=_RATE,
            momentum=optimizer.momentum,
            weight_decay=optimizer.weight_decay,
            nesterov=optimizer.nesterov,
        )

    def train(self, x: Tensor, y: Tensor) -> Arrays:
        """One step. Returns gradients, by their names in the graph, and the loss."""
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
