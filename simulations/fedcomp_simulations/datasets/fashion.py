"""Fashion-MNIST (Xiao et al. 2017, arXiv:1708.07747) as Debian packages it: 15,000 images to train, 5,000 to test."""

import gzip
import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedcomp.errors import FedcompError
from fedcomp_simulations.datasets import Dataset
from fedcomp_simulations.datasets.files import check
from fedcomp_simulations.datasets.idx import parse_idx

FOLDER = "/usr/share/datasets/fashion-mnist"
INSTALL = "apt-get install dataset-fashion-mnist"
TRAIN_SAMPLES, TEST_SAMPLES = 15_000, 5_000
MEAN, DEVIATION = 0.286, 0.353  # of the 60,000 training images, in [0, 1]
SHA256 = {
    "t10k-images-idx3-ubyte.gz": "cc1d090a38ace84dfa1aa66e3ada7c336ef481a96936906477e6dd344da56eaa",
    "t10k-labels-idx1-ubyte.gz": "8d3605d196f4be44669e46906da9733c8131fef761fdbfec72c424d5222f1a05",
    "train-images-idx3-ubyte.gz": "b0564c3eedabfbf835052cff8503ea422014ce006caf5b757f851416ee8300c7",
    "train-labels-idx1-ubyte.gz": "0ae29f65d86684f32d1b9c85147786c547b9c6aebcaf235f0400a0cce308b056",
}


def load_fashion() -> Dataset:
    """Read the images, those of both parts drawn with fixed seeds.

    Raises FedcompError if a file is missing or another than expected.
    """
    train_x, train_y = _read("train", np.random.default_rng(0), TRAIN_SAMPLES)
    test_x, test_y = _read("t10k", np.random.default_rng(1), TEST_SAMPLES)
    return Dataset(name="fashion", classes=10, train_x=train_x, train_y=train_y, test_x=test_x, test_y=test_y)


def folder() -> Path:
    """Return where the files are: in the folder that the environment variable FEDCOMP_DATA names, or in Debian's."""
    return Path(os.environ.get("FEDCOMP_DATA") or FOLDER)


def _read(part: str, rng: np.random.Generator, samples: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Draw from one part: standardized rows of pixels, `(samples, 784)`, and labels."""
    images = parse_idx(_file(f"{part}-images-idx3-ubyte.gz"))
    labels = parse_idx(_file(f"{part}-labels-idx1-ubyte.gz"))
    drawn = rng.permutation(len(images))[:samples]
    pixels = images[drawn].reshape(len(drawn), -1).astype(np.float32)
    return (pixels / np.float32(255) - np.float32(MEAN)) / np.float32(DEVIATION), labels[drawn].astype(np.int64)


def _file(name: str) -> bytes:
    path = folder() / name
    if not path.is_file():
        raise FedcompError(
            f"dataset 'fashion' reads {path}, which is missing; run: {INSTALL} "
            "(or set FEDCOMP_DATA to a folder with its four files)"
        )
    install = f'{INSTALL} (other images are dataset = "idx:{folder()}")'
    return gzip.decompress(check(path.read_bytes(), SHA256[name], what=str(path), install=install))
