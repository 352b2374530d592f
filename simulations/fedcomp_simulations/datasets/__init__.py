"""Data sets that come inside packages, so that nothing is downloaded from anywhere else.

`mnist` is there with fedcomp's own extras; the errors for the others name the package to install.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from fedcomp.errors import ConfigError

Inputs = NDArray[np.float32] | NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Dataset:
    """Training and test samples, one a row; a label for each, or for each position of each.

    Attributes:
        train_x, test_x: `(samples, ...)`: float32 features, or int64 symbols.
        train_y, test_y: `(samples,)`, or `(samples, positions)` where the model predicts at every position.
        train_owner: `(samples,)`: whose each training sample is, from 0 on; None where the data do not say.
    """

    name: str
    classes: int
    train_x: Inputs
    train_y: NDArray[np.int64]
    test_x: Inputs
    test_y: NDArray[np.int64]
    train_owner: NDArray[np.int64] | None = None


def available() -> tuple[str, ...]:
    """Names that `load` knows."""
    return tuple(sorted(_LOADERS))


def load(name: str, seed: int = 0) -> Dataset:
    """Load a data set by name; a process reads each only once. The seed matters to those in `SEEDED` alone.

    The arrays are shared by every caller and therefore read-only. Raises FedcompError, with the command that installs
    them, if the files are missing.
    """
    if name not in _LOADERS:
        raise ConfigError(f"unknown dataset {name!r}; available: {', '.join(available())}")
    return _load(name, seed if name in SEEDED else 0)


@lru_cache(maxsize=2)
def _load(name: str, seed: int) -> Dataset:
    dataset = _LOADERS[name](seed)
    for array in (dataset.train_x, dataset.train_y, dataset.test_x, dataset.test_y, dataset.train_owner):
        if array is not None:
            array.setflags(write=False)
    return dataset


def _fashion(seed: int) -> Dataset:
    del seed
    from fedcomp_simulations.datasets.fashion import load_fashion

    return load_fashion()


def _imu(seed: int) -> Dataset:
    from fedcomp_simulations.datasets.imu import load_imu

    return load_imu(seed)


def _mnist(seed: int) -> Dataset:
    del seed
    from fedcomp_simulations.datasets.mnist import load_mnist

    return load_mnist()


def _shakespeare(seed: int) -> Dataset:
    del seed
    from fedcomp_simulations.datasets.shakespeare import load_shakespeare

    return load_shakespeare()


_LOADERS: dict[str, Callable[[int], Dataset]] = {
    "fashion": _fashion,
    "imu": _imu,
    "mnist": _mnist,
    "shakespeare": _shakespeare,
}
SEEDED = ("imu",)  # which subjects are held out for the test
