"""What a deployed model is worth: its bytes, how often it is right, and how long it takes."""

import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcomp.errors import DataError
from fedcomp_clients.deploy.graph import OUTPUT, X

BATCHES = (1, 64)
_REPEATS = 30
_LEAST_S = 0.1
_SILENT = 4  # what goes wrong is raised
_NAME = 23  # letters of the longest


@dataclass(frozen=True)
class Row:
    """One file.

    Attributes:
        score: share of labels that are right, or mean squared error; None without test data.
        latency_ms: median time of one call, by batch size.
    """

    file: str
    bytes: int
    score: float | None
    latency_ms: dict[int, float]


@dataclass(frozen=True)
class Report:
    """What `deploy` has written, float32 first.

    Attributes:
        measure: what `score` is: "accuracy" or "squared error".
        notes: what was left out, and why.
    """

    folder: Path
    measure: str
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()

    def __getitem__(self, file: str) -> Row:
        """The row of a file."""
        return next(row for row in self.rows if row.file == file)

    def __str__(self) -> str:
        """A table for people, with sizes as parts of float32's."""
        lines = [f"{'file':{_NAME}} {'bytes':>10} {'size':>6} {self.measure:>13}" + _heads()]
        for row in self.rows:
            score = "" if row.score is None else f"{row.score:.4f}"
            times = "".join(f" {row.latency_ms[n]:>14.3f}" for n in BATCHES)
            part = row.bytes / self.rows[0].bytes
            lines.append(f"{row.file:{_NAME}} {row.bytes:>10,} {part:>5.2f}x {score:>13}{times}")
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def to_json(self) -> dict[str, Any]:
        """The report as plain values."""
        return asdict(self) | {"folder": str(self.folder), "rows": [asdict(row) for row in self.rows]}


def _heads() -> str:
    return "".join(f" {f'ms at batch {n}':>14}" for n in BATCHES)


def open_model(path: Path, threads: int) -> Any:
    """An onnxruntime session on the CPU."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = _SILENT
    options.intra_op_num_threads = threads
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def outputs(session: Any, x: NDArray[Any]) -> NDArray[Any]:
    """What the model says, `(samples, ...)`."""
    batch = BATCHES[-1]
    parts = [session.run([OUTPUT], {X: x[start : start + batch]})[0] for start in range(0, len(x), batch)]
    return np.concatenate(parts)


def score(output: NDArray[Any], y: NDArray[Any], task: str) -> float:
    """Share of right labels, or mean squared error. Raises DataError if output and targets do not belong together."""
    if task == "regression":
        if output.shape != y.shape:
            raise DataError(f"test y: expected the shape of the model's output, {output.shape}, got {y.shape}")
        return float(np.mean(np.square(output.astype(np.float64) - y)))
    for axis in (-1, 1):  # torch has classes behind the batch, but most models of sequences have them last
        if output.ndim > 1 and np.delete(output.shape, axis).tolist() == list(y.shape):
            return float(np.mean(output.argmax(axis) == y))
    raise DataError(f"test y: expected labels for an output of shape {output.shape}, got shape {y.shape}")


def latency_ms(session: Any, x: NDArray[Any]) -> dict[int, float]:
    """Median milliseconds of a call on one, and on 64 samples, which are repeated where there are fewer."""
    return {n: _time(session, np.resize(x, (n, *x.shape[1:]))) for n in BATCHES}


def _time(session: Any, batch: NDArray[Any]) -> float:
    for _ in range(3):  # warm up
        session.run([OUTPUT], {X: batch})
    times: list[float] = []
    while len(times) < _REPEATS or sum(times) < _LEAST_S:
        start = time.perf_counter()
        session.run([OUTPUT], {X: batch})
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)
