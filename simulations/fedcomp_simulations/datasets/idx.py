"""Folders of images in IDX, the format that MNIST and its kin are published in, gzipped or not."""

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedcomp.errors import ConfigError, FedcompError
from fedcomp_simulations.datasets import Dataset

PARTS = {"train": "train", "test": "t10k"}
MAX_AXES = 8


def load_idx(folder: Path) -> Dataset:
    """Read four files, such as train-images-idx3-ubyte.gz, whole: images `(samples, 1, height, width)` and labels.

    Pixels are standardized by the mean and deviation of the training part. Raises ConfigError if a file is missing or
    another thing than expected.
    """
    if not folder.is_dir():
        raise ConfigError(f"dataset 'idx:{folder}': no such folder (from {Path.cwd()})")
    (train_x, train_y), (test_x, test_y) = (_part(folder, part) for part in PARTS.values())
    if train_x.shape[1:] != test_x.shape[1:]:
        raise ConfigError(f"{folder}: training images are {train_x.shape[1:]}, test images {test_x.shape[1:]}")
    mean, deviation = train_x.mean(dtype=np.float64), train_x.std(dtype=np.float64) or 1.0
    train_x, test_x = (((x - np.float32(mean)) / np.float32(deviation)) for x in (train_x, test_x))
    classes = int(max(train_y.max(), test_y.max())) + 1
    return Dataset(f"idx:{folder}", classes, train_x, train_y, test_x, test_y)


def _part(folder: Path, part: str) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Images in [0, 1] and labels of one part."""
    images, labels = (_array(folder, part, kind, axes) for kind, axes in (("images", 3), ("labels", 1)))
    if len(images) != len(labels) or not len(labels) or not images.size:
        raise ConfigError(f"{folder}: expected a label for every image of {part}, got {len(labels)} for {len(images)}")
    return images[:, None].astype(np.float32) / np.float32(255), labels.astype(np.int64)


def _array(folder: Path, part: str, kind: str, axes: int) -> NDArray[np.uint8]:
    names = [f"{part}-{kind}{mark}idx{axes}-ubyte{end}" for mark in "-." for end in ("", ".gz")]
    path = next((folder / name for name in names if (folder / name).is_file()), None)
    if path is None:
        raise ConfigError(f"{folder}: expected a file {names[0]} or {names[1]}, found none")
    try:
        data = path.read_bytes()
        array = parse_idx(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    except FedcompError as error:
        raise ConfigError(f"{path}: {error}") from error
    if array.ndim != axes:
        raise ConfigError(f"{path}: expected {axes} axes, got shape {array.shape}")
    return array


def parse_idx(data: bytes) -> NDArray[np.uint8]:
    """Read an array in IDX: two zeros, the type (8: bytes), the number of axes, their lengths, the values.

    Raises FedcompError if the data are something else.
    """
    try:
        zeros, kind, axes = struct.unpack_from(">HBB", data)
        shape = struct.unpack_from(f">{axes}I", data, 4)
    except struct.error as error:
        raise FedcompError("not an IDX file: it ends within its head") from error
    if zeros or kind != 8 or axes > MAX_AXES or len(data) != 4 + 4 * axes + math.prod(shape):
        raise FedcompError(f"not an IDX file of bytes with shape {shape}")
    return np.frombuffer(data, np.uint8, offset=4 + 4 * axes).reshape(shape)
