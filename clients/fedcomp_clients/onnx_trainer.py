"""Training on a device with onnxruntime and numpy: no torch, no onnx."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcomp import _validate
from fedcomp.errors import NonFiniteError
from fedcomp_clients.batches import batch, batches, check_data, pieces
from fedcomp_clients.bundle import EVAL, TRAIN, Bundle, Manifest, read_bundle
from fedcomp_clients.onnx_session import Graph
from fedcomp_clients.parameters import as_tensors, load_tensors, save_tensors
from fedcomp_clients.sgd import Optimizer, accumulate

Array = NDArray[Any]
Schedule = Callable[[int], float]

SINGLE = ("merge", "skip", "keep")


@dataclass(frozen=True)
class FitResult:
    """What training did.

    Attributes:
        loss: mean over the samples of the last epoch, as they were met; without any step, that of the model as it is.
        accuracy: likewise, from 0 to 1; None for regression.
        samples: that an epoch trained on; 0 if there was one only and the model cannot be trained on it.
        steps: of the optimiser.
    """

    loss: float
    accuracy: float | None
    samples: int
    steps: int


@dataclass(frozen=True)
class Evaluation:
    """What a model is worth on data: mean loss, accuracy from 0 to 1 (None for regression), number of samples."""

    loss: float
    accuracy: float | None
    samples: int


class OnnxTrainer:
    """A model that is trained from a bundle.

    Args:
        bundle: a bundle or its folder.
        threads: that an operator may use.

    Raises BundleError if the bundle is not sound. Whatever fails later leaves parameters and optimiser as they were.

        trainer = OnnxTrainer("bundle", threads=2)
        trainer.set_parameters(received)
        print(trainer.fit(np.load("x.npy", mmap_mode="r"), np.load("y.npy"), epochs=1, batch_size=32, lr=0.1))
        trained = trainer.get_parameters()
    """

    def __init__(self, bundle: Bundle | Path | str, *, threads: int = 1) -> None:
        _validate.integer(low=1, high=1024, threads=threads)
        self.bundle = bundle if isinstance(bundle, Bundle) else read_bundle(bundle)
        self._threads = threads
        self._values: dict[str, Array] = dict(self.bundle.initial)  # arrays in it are never written to
        self._velocity: Mapping[str, Array] | None = None
        self._train: Graph | None = None
        self._eval: Graph | None = None

    @property
    def manifest(self) -> Manifest:
        """What the bundle says of the model."""
        return self.bundle.manifest

    def get_parameters(self) -> dict[str, Array]:
        """All tensors by name, in the manifest's order: parameters, frozen ones, buffers. Read only; copy to change."""
        return dict(self._values)

    def set_parameters(self, values: Mapping[str, Array] | Sequence[Array]) -> None:
        """Take a model and forget the optimiser's velocities.

        Args:
            values: all tensors by name, or in the manifest's order. Their dtypes may be wider than the model's, since
                servers that average return float64, also for integers, which are rounded.

        Raises LayoutError if names, shapes or kinds of dtype differ, NonFiniteError for NaN and infinity.
        """
        self._values = as_tensors(self.manifest, values)
        self._velocity = None

    def save(self, path: Path | str) -> None:
        """Write all tensors to an .npz file. Raises FedcompError if it cannot, an old file intact."""
        save_tensors(Path(path), self._values)

    def load(self, path: Path | str) -> None:
        """Take the tensors of an .npz file, as `set_parameters` does. Raises FedcompError if it is no such file."""
        self.set_parameters(load_tensors(Path(path)))

    def fit(
        self,
        x: Array,
        y: Array,
        *,
        epochs: int = 1,
        batch_size: int = 32,
        lr: float | Schedule = 0.1,
        seed: int | None = 0,
        accumulate: int = 1,
        proximal: float = 0.0,
        clip_norm: float | None = None,
        single: str = "merge",
        shuffle: bool = True,
    ) -> FitResult:
        """Train on samples x (samples, ...) and targets y (samples, ...), which may be memory-mapped.

        Args:
            epochs: passes over the data.
            batch_size: samples of each step; the last batch has what is left.
            lr: learning rate, or a function of the step, which counts from 0.
            seed: of the order of samples and of dropout: the same seed, the same model. None: another each time.
            accumulate: number of pieces that a batch is computed in, one after the other, for small memories. The step
                is that of the whole batch (to rounding, for losses that are means over samples, without batch norm).
            proximal: FedProx's mu, which pulls back to the parameters that the call starts from.
            clip_norm: the norm that all gradients together are shortened to.
            single: what becomes of one sample that is left over at the end. Batch norm cannot normalise it, so it joins
                the batch before ("merge"). "skip" leaves it out of that epoch, "keep" makes it a batch. Nor are batches
                cut into pieces of one sample, unless "keep".
            shuffle: False: in the order of the data.

        Raises DataError if data do not fit the model, ConfigError for arguments out of range, NonFiniteError if the
        training diverges. Parameters and optimiser are then what they were before.
        """
        _validate.integer(low=1, epochs=epochs)
        if seed is not None:
            _validate.integer(low=0, seed=seed)
        plan = _Plan(batch_size, lr, accumulate, proximal, clip_norm, single)
        count = check_data(self.manifest, x, y)
        random = np.random.default_rng(seed)
        graph = self._train_graph(seed)
        run = _Run(self.manifest, graph, self._values, self._velocity)
        with np.errstate(over="ignore", invalid="ignore"):  # found by what becomes of the loss
            for epoch in range(epochs):
                order = random.permutation(count) if shuffle else np.arange(count)
                run.epoch(x, y, order, plan, first=epoch == 0)
        if not run.steps:
            told = self.evaluate(x, y)
            return FitResult(told.loss, told.accuracy, 0, 0)
        run.check_finite()
        self._values, self._velocity = run.values(), run.optimizer.velocity
        return run.result()

    def evaluate(self, x: Array, y: Array, *, batch_size: int = 256) -> Evaluation:
        """Loss and accuracy of the model on data, in evaluation mode. Raises DataError if they do not fit the model."""
        _validate.integer(low=1, batch_size=batch_size)
        count = check_data(self.manifest, x, y)
        if self._eval is None:
            self._eval = Graph(self.bundle, EVAL, threads=self._threads)
        meter = _Meter()
        for start in range(0, count, batch_size):
            some, targets = batch(x, y, slice(start, start + batch_size), self.manifest, check=True)
            loss, correct = self._eval.run(("loss", "correct"), self._values, some, targets)
            meter.add(float(loss), int(correct), len(some), targets.size)
        return Evaluation(meter.loss, meter.accuracy(self.manifest), count)

    def _train_graph(self, seed: int | None) -> Graph:
        """The training graph; one that draws random numbers is made anew, since only then it takes a seed."""
        if self._train is None or self.manifest.random:
            state = np.random.SeedSequence(seed).generate_state(1)  # any number, within what onnxruntime takes
            self._train = Graph(
                self.bundle, TRAIN, threads=self._threads, seed=int(state[0]) if self.manifest.random else None
            )
        return self._train


class _Plan:
    """Checked arguments of `OnnxTrainer.fit`."""

    def __init__(
        self,
        batch_size: int,
        lr: float | Schedule,
        accumulate: int,
        proximal: float,
        clip_norm: float | None,
        single: str,
    ) -> None:
        _validate.integer(low=1, batch_size=batch_size)
        _validate.integer(low=1, accumulate=accumulate)
        _validate.one_of(choices=SINGLE, single=single)
        self.batch_size, self.accumulate, self.single = batch_size, accumulate, single
        self.proximal = _validate.number(low=0, high=1e9, proximal=proximal)
        self.clip_norm = (
            None if clip_norm is None else _validate.number(low=0, high=1e9, above=True, clip_norm=clip_norm)
        )
        self._lr = lr
        if not callable(lr):
            self.rate(0)

    def rate(self, step: int) -> float:
        """Learning rate of a step. Raises ConfigError if it is none."""
        return _validate.number(low=0, high=1e9, lr=self._lr(step) if callable(self._lr) else self._lr)


@dataclass
class _Meter:
    """Sums of losses and hits."""

    loss_sum: float = 0.0
    correct: int = 0
    samples: int = 0
    targets: int = 0

    def add(self, loss: float, correct: int, samples: int, targets: int) -> None:
        self.loss_sum += loss * samples
        self.correct += correct
        self.samples += samples
        self.targets += targets

    @property
    def loss(self) -> float:
        return self.loss_sum / max(self.samples, 1)

    def accuracy(self, manifest: Manifest) -> float | None:
        return self.correct / max(self.targets, 1) if manifest.task == "classification" else None


class _Run:
    """One call of `fit`, on copies of the parameters: what fails leaves no trace."""

    def __init__(
        self, manifest: Manifest, graph: Graph, values: Mapping[str, Array], velocity: Mapping[str, Array] | None
    ) -> None:
        self._manifest, self._graph = manifest, graph
        names = [tensor.name for tensor in manifest.named("parameter")]
        self._values = dict(values)
        self._parameters = {name: values[name].copy() for name in names}
        self._values.update(self._parameters)
        own = None if velocity is None else {name: array.copy() for name, array in velocity.items()}
        self.optimizer = Optimizer(manifest.optimizer, {name: values[name] for name in names}, own)
        self._names = names
        self._buffers = [t.name for t in manifest.named("buffer") if f"b/{t.name}" in graph.outputs]
        self._outputs = ["loss", "correct", *(f"g/{n}" for n in names), *(f"b/{n}" for n in self._buffers)]
        self._meter = _Meter()
        self.steps = 0

    def epoch(self, x: Array, y: Array, order: NDArray[np.int64], plan: _Plan, *, first: bool) -> None:
        """One pass over the data in this order; the first one checks them."""
        self._meter = _Meter()
        for rows in batches(order, plan.batch_size, single=plan.single):
            gradients = self._gradients(x, y, rows, plan, check=first)
            if gradients is not None:
                rate = plan.rate(self.steps)
                try:
                    self.optimizer.step(
                        self._parameters, gradients, rate, proximal=plan.proximal, clip_norm=plan.clip_norm
                    )
                except NonFiniteError:
                    raise self._diverged("gradients are not finite") from None
                self.steps += 1

    def _gradients(
        self, x: Array, y: Array, rows: NDArray[np.int64], plan: _Plan, *, check: bool
    ) -> Mapping[str, Array] | None:
        """Mean gradients of a batch; None if it is a single sample that the model cannot be trained on."""
        total: Mapping[str, Array] | None = None
        for piece in pieces(rows, plan.accumulate, single=plan.single):
            some, targets = batch(x, y, piece, self._manifest, check=check)
            loss, correct, *rest = self._graph.run(self._outputs, self._values, some, targets)
            gradients = dict(zip(self._names, rest, strict=False))
            buffers = dict(zip(self._buffers, rest[len(self._names) :], strict=True))
            if not math.isfinite(float(loss)):
                raise self._diverged(f"the loss is {float(loss)}")
            if len(rows) == 1 and not all(np.isfinite(values).all() for values in buffers.values()):
                return None  # the variance over one sample
            self._values.update(buffers)
            self._meter.add(float(loss), int(correct), len(piece), targets.size)
            if len(piece) == len(rows):
                return gradients
            total = accumulate(total, gradients, len(piece) / len(rows))
        return total

    def _diverged(self, what: str) -> NonFiniteError:
        return NonFiniteError(
            f"training diverged: {what} in step {self.steps}; the model is left as it was before; "
            "use a lower learning rate or clip_norm, and look at the scale of x"
        )

    def check_finite(self) -> None:
        """Raise NonFiniteError if a tensor is not finite."""
        for name in (*self._names, *self._buffers):
            values = self._values[name]
            if values.size and not (np.isfinite(values.min()) and np.isfinite(values.max())):
                raise self._diverged(f"tensor {name!r} is not finite")

    def values(self) -> dict[str, Array]:
        """All tensors, to be written no more."""
        for values in self._values.values():
            values.flags.writeable = False
        return self._values

    def result(self) -> FitResult:
        """What the last epoch did, and the number of steps of all."""
        return FitResult(self._meter.loss, self._meter.accuracy(self._manifest), self._meter.samples, self.steps)
