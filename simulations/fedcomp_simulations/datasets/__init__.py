"""Data sets that come inside installed packages, so that a first run needs no download."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from fedcomp.errors import ConfigError


@dataclass(frozen=True, eq=False)
class Dataset:
    """Images as flat float32 rows in [0, 1] with integer labels, split into training and test samples."""

    name: str
    classes: int
    train_x: NDArray[np.float32]  # (samples, features)
    train_y: NDArray[np.int64]  # (samples,)
    test_x: NDArray[np.float32]
    test_y: NDArray[np.int64]


def available() -> tuple[str, ...]:
    """Names that `load` knows."""
    return tuple(sorted(_LOADERS))


@lru_cache(maxsize=2)
def load(name: str) -> Dataset:
    """Load a data set by name; a process reads each only once.

    The arrays are shared by every caller and therefore read-only.
    """
    if name not in _LOADERS:
        raise ConfigError(f"unknown dataset {name!r}; available: {', '.join(available())}")
    dataset = _LOADERS[name]()
    for array in (dataset.train_x, dataset.train_y, dataset.test_x, dataset.test_y):
        array.setflags(write=False)
    return dataset


def _mnist() -> Dataset:
    from fedcomp_simulations.datasets.mnist import load_mnist

    return load_mnist()


_LOADERS: dict[str, Callable[[], Dataset]] = {"mnist": _mnist}
