"""A data set made of arrays that the user has: checked, brought to the dtypes of training, and split if need be.

`x` of floats are features, of uint8 pixels, which are divided by 255, of other whole numbers symbols, one row each.
`y` are labels from 0 on; `client` says whose each sample is. Without `x_test` and `y_test` a fifth of the samples of
each client is held out.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcomp.errors import ConfigError
from fedcomp_simulations.datasets import Dataset, Inputs

KEYS = ("x", "y", "client", "x_test", "y_test")
HELD_OUT = 0.2  # of the samples of each client
MOST = 65_536  # symbols, and classes: with more of them, they are no such things

Labels = NDArray[np.int64]


def from_arrays(name: str, arrays: Mapping[str, NDArray[Any]]) -> Dataset:
    """Make a data set of arrays by the names in KEYS; the split is the same for every seed of an experiment.

    Raises ConfigError, which names the array, if they are not as described above.
    """
    _check_keys(arrays)
    x, y = _inputs("x", arrays["x"]), _labels("y", arrays["y"])
    _check_pair(x, y, "x", "y")
    owners = _owners(arrays["client"], len(x)) if "client" in arrays else None
    if "x_test" in arrays:
        _check_kind(arrays["x"].dtype, arrays["x_test"].dtype)
        test_x, test_y = _inputs("x_test", arrays["x_test"]), _labels("y_test", arrays["y_test"])
        _check_pair(test_x, test_y, "x_test", "y_test")
        _check_alike(x, test_x, "x_test")
        _check_alike(y, test_y, "y_test")
    else:
        held_out = _held_out(owners, len(x))
        x, y, test_x, test_y = x[~held_out], y[~held_out], x[held_out], y[held_out]
        owners = None if owners is None else owners[~held_out]
    symbols = int(max(x.max(), test_x.max())) + 1 if x.dtype == np.int64 else 0
    classes = int(max(y.max(), test_y.max())) + 1
    if y.ndim > 1 and not symbols:
        raise ConfigError(f"y: expected one label for each sample, as x are features, got shape {y.shape}")
    return Dataset(name, classes, x, y, test_x, test_y, owners, symbols)


def _check_keys(arrays: Mapping[str, object]) -> None:
    for key in arrays:
        if key not in KEYS:
            raise ConfigError(f"unknown array {key!r}; expected {', '.join(KEYS)}")
    for key in ("x", "y"):
        if key not in arrays:
            raise ConfigError(f"array {key!r} is missing; got {', '.join(arrays) or 'none'}")
    if ("x_test" in arrays) != ("y_test" in arrays):
        raise ConfigError("x_test and y_test: expected both or neither")


def _check_kind(train: np.dtype[Any], test: np.dtype[Any]) -> None:
    """Both parts must mean the same: of pixels in bytes and of floats, only the former would be scaled."""
    if (train.kind, train == np.uint8) != (test.kind, test == np.uint8):
        raise ConfigError(
            f"x_test: expected what x is, {train}, got {test}; bytes are scaled to [0, 1], floats are not"
        )


def _inputs(key: str, x: NDArray[Any]) -> Inputs:
    """The samples as float32 features or int64 symbols."""
    if x.ndim < 2 or not x.size:
        raise ConfigError(f"{key}: expected samples of one axis or more, got shape {x.shape}")
    if x.dtype == np.uint8:
        return np.asarray(x / np.float32(255), np.float32)
    if x.dtype.kind in "iu":
        if x.ndim > 2 or x.min() < 0 or x.max() >= MOST:
            raise ConfigError(
                f"{key}: whole numbers are symbols from 0 to {MOST - 1} in rows, got shape {x.shape} with {x.min()} to "
                f"{x.max()}; save features as float32, pixels as uint8"
            )
        return x.astype(np.int64)
    if x.dtype.kind not in "fb":
        raise ConfigError(f"{key}: expected numbers, got dtype {x.dtype}")
    with np.errstate(over="ignore"):  # what is too large is told below
        features = x.astype(np.float32)
    if wrong := int(features.size - np.isfinite(features).sum()):
        raise ConfigError(f"{key}: expected finite float32 values, got {wrong} that are not; leave those samples out")
    return features


def _labels(key: str, y: NDArray[Any]) -> Labels:
    if y.dtype.kind not in "iub":
        raise ConfigError(
            f"{key}: expected whole numbers from 0 on, got dtype {y.dtype}; "
            "np.unique(labels, return_inverse=True)[1] numbers whatever they are"
        )
    if not y.size or y.min() < 0 or y.max() >= MOST:
        found = f"{y.min()} to {y.max()}" if y.size else "none"
        raise ConfigError(f"{key}: expected labels from 0 to below {MOST}, got {found}")
    return y.astype(np.int64)


def _owners(client: NDArray[Any], samples: int) -> Labels:
    """Number whoever there is from 0 on, in the order of their names."""
    if client.shape != (samples,) or client.dtype.kind not in "iuU":
        raise ConfigError(
            f"client: expected a whole number or a text for each of {samples} samples, got dtype {client.dtype} "
            f"of shape {client.shape}"
        )
    return np.unique(client, return_inverse=True)[1].astype(np.int64)


def _check_pair(x: Inputs, y: Labels, of_x: str, of_y: str) -> None:
    if y.shape not in ((len(x),), x.shape[:2]):
        raise ConfigError(f"{of_y}: expected a label for each of {len(x)} samples of {of_x}, got shape {y.shape}")


def _check_alike(train: NDArray[Any], test: NDArray[Any], key: str) -> None:
    if train.shape[1:] != test.shape[1:] or train.dtype != test.dtype:
        raise ConfigError(
            f"{key}: expected what the training part has, {train.dtype} of shape {train.shape[1:]} for each sample, "
            f"got {test.dtype} of {test.shape[1:]}"
        )


def _held_out(owners: Labels | None, samples: int) -> NDArray[np.bool_]:
    """Mark a fifth of the samples of each owner, rounded down, drawn with a fixed seed."""
    order = np.random.default_rng(0).permutation(samples)
    grouped = order if owners is None else order[np.argsort(owners[order], kind="stable")]
    sizes = np.bincount(owners) if owners is not None else np.array([samples])
    starts = np.cumsum(sizes) - sizes
    held_out = np.zeros(samples, bool)
    for start, size in zip(starts, sizes, strict=True):
        held_out[grouped[start : start + int(size * HELD_OUT)]] = True
    if not held_out.any():
        raise ConfigError(
            "x: expected 5 samples of some client or more, to hold a fifth out for the test; add x_test and y_test"
        )
    return held_out
