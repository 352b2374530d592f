"""Training data on the device: what fits a model, and how it is cut into batches.

Data may be memory-mapped (``np.load(path, mmap_mode="r")``): only batches are ever read.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcomp.errors import DataError
from fedcomp_clients.manifest import Data, Manifest

Array = NDArray[Any]

_CHUNK = 1 << 20


def check_data(manifest: Manifest, x: Array, y: Array) -> int:
    """Number of samples. Raises DataError unless shapes, dtypes and targets fit the model.

    Whether x is finite is seen when its batches are read, see `batch`.
    """
    _check_array("x", x, manifest.x)
    _check_array("y", y, manifest.y)
    if len(x) != len(y):
        raise DataError(f"expected as many targets as samples, got {len(x)} in x and {len(y)} in y")
    if len(x) == 0:
        raise DataError("expected at least one sample, got none")
    if manifest.task == "classification" and y.dtype.kind in "iu":
        _check_labels(y, manifest.classes)
    elif y.dtype.kind == "f":
        for start in range(0, len(y), _CHUNK):
            _check_finite("y", y[start : start + _CHUNK])
    return len(x)


def batch(
    x: Array, y: Array, rows: NDArray[np.int64] | slice, manifest: Manifest, *, check: bool
) -> tuple[Array, Array]:
    """These rows of x and y in memory, in the dtypes of the model. Raises DataError if x is not finite, if checked."""
    some = np.asarray(x[rows], dtype=manifest.x.dtype, order="C")
    if check and some.dtype.kind == "f":
        _check_finite("x", some)
    return some, np.asarray(y[rows], dtype=manifest.y.dtype, order="C")


def batches(order: NDArray[np.int64], size: int, *, single: str) -> list[NDArray[np.int64]]:
    """Cut an order of rows into batches.

    Args:
        size: rows in each batch; the last has what is left.
        single: what becomes of a single row that is left over: "merge" it into the batch before it, "skip" it or "keep"
            it. Of no effect if all batches are of one row anyway, or there is only one row: that is kept.
    """
    left_over = size > 1 and len(order) > 1 and len(order) % size == 1
    if left_over and single == "skip":
        order = order[:-1]
    starts = list(range(size, len(order), size))
    if left_over and single == "merge":
        starts.pop()
    return np.split(order, starts)


def pieces(rows: NDArray[np.int64], count: int, *, single: str) -> list[NDArray[np.int64]]:
    """Cut a batch into at most `count` pieces of nearly equal size; none of a single row unless such are kept."""
    most = min(count, len(rows) if single == "keep" else len(rows) // 2)
    return [rows] if most <= 1 else np.array_split(rows, most)


def _check_array(name: str, values: Array, expected: Data) -> None:
    if not isinstance(values, np.ndarray):
        raise DataError(f"{name}: expected a numpy array, got {type(values).__name__}")
    if values.ndim == 0 or values.shape[1:] != expected.shape:
        shape = ", ".join(map(str, ("samples", *expected.shape)))
        raise DataError(f"{name}: expected the shape ({shape}), got {values.shape}")
    kind = "iu" if expected.dtype.startswith(("int", "uint")) else np.dtype(expected.dtype).kind
    if values.dtype.kind not in kind or not np.can_cast(values.dtype, expected.dtype, "safe"):
        raise DataError(
            f"{name}: expected {expected.dtype}, got {values.dtype}; convert the data as for the model's training, "
            f"for instance {name}.astype('{expected.dtype}')"
        )


def _check_labels(y: Array, classes: int | None) -> None:
    end = np.iinfo(np.int64).max if classes is None else classes
    for start in range(0, len(y), _CHUNK):
        some = y[start : start + _CHUNK]
        if some.size and (some.min() < 0 or some.max() >= end):
            wrong = np.argwhere((some < 0) | (some >= end))[0]
            limits = "of at least 0" if classes is None else f"from 0 to {classes - 1}"
            raise DataError(f"y: expected labels {limits}, got {some[tuple(wrong)]} in row {start + wrong[0]}")


def _check_finite(name: str, values: Array) -> None:
    if values.size and not (np.isfinite(values.min()) and np.isfinite(values.max())):  # NaN is either
        bad = values.size - int(np.isfinite(values).sum())
        raise DataError(f"{name}: expected finite values, got {bad} NaN or infinite in {len(values)} samples")
