"""Seven shoulder exercises on a smartwatch (Burns et al. 2018, arXiv:1802.01489), from the package `seglearn`."""

import io
import pickletools

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from fedcomp_simulations.datasets import Dataset
from fedcomp_simulations.datasets.files import check, inside

INSTALL = "pip install --no-deps seglearn==1.2.5"
SHA256 = "eb122f23cdf06ef6bd6c6c5312958ec5cf9d038e2e6d457b8081662c75a42537"
CHANNELS = 6  # acceleration and angular velocity
WINDOW, STEP = 100, 50  # samples at 50 Hz: 2 s, and half of it shared with the next window
HELD_OUT = 2  # subjects
PARTS = 5  # clients a subject is cut into

Recording = NDArray[np.float64]  # (channels, samples)
Labels = NDArray[np.int64]


def load_imu(seed: int) -> Dataset:
    """Read the recordings; two of the ten subjects are held out for the test, other two for each of five seeds.

    Raises FedcompError if the package is missing or another version than expected.
    """
    path = inside("seglearn", "data", "watch_dataset.npy", install=INSTALL)
    return cut(*read_recordings(check(path.read_bytes(), SHA256, what=str(path), install=INSTALL)), seed)


def read_recordings(data: bytes) -> tuple[list[Recording], Labels, Labels]:
    """Return recordings, exercises and subjects from a pickled dict, without unpickling: this looks for texts alone.

    Pickle's protocol 2 writes the bytes of arrays as latin-1 texts, in the order of the dict: those of `X`, which are
    float64 in Fortran's order, stand between the keys "X" and "y_labels", those of `y` after "y".
    """
    file = io.BytesIO(data)
    np.lib.format.read_magic(file)
    np.lib.format.read_array_header_1_0(file)
    texts = [text for code, text, _ in pickletools.genops(file) if code.name == "BINUNICODE" and isinstance(text, str)]
    recordings = [
        np.frombuffer(text.encode("latin-1"), "<f8").reshape(CHANNELS, -1)
        for text in texts[texts.index("X") : texts.index("y_labels")]
        if len(text) >= 8 * CHANNELS * WINDOW
    ]
    labels, subjects = (_integers(texts, key, len(recordings)) for key in ("y", "subject"))
    return recordings, labels, subjects


def _integers(texts: list[str], key: str, count: int) -> Labels:
    found = next(text for text in texts[texts.index(key) :] if len(text) == 8 * count)
    return np.frombuffer(found.encode("latin-1"), "<i8").astype(np.int64)


def cut(recordings: list[Recording], labels: Labels, subjects: Labels, seed: int) -> Dataset:
    """Cut recordings into windows, `(windows, 6, 100)`, standardized by the training subjects' mean and deviation.

    Each recording of a training subject goes to its five clients in five consecutive parts of time.
    """
    everyone = np.unique(subjects)
    first = HELD_OUT * (seed - 1) % len(everyone)  # the last two subjects for seed 0, the first two for seed 1
    training = np.delete(everyone, slice(first, first + HELD_OUT))
    windows = [sliding_window_view(recording, WINDOW, axis=1)[:, ::STEP].swapaxes(0, 1) for recording in recordings]
    counts = [len(each) for each in windows]
    part = np.concatenate([np.arange(count) * PARTS // count for count in counts])  # of its recording's time
    subject, y = np.repeat(subjects, counts), np.repeat(labels, counts)
    x = np.concatenate(windows)
    train = np.isin(subject, training)
    mean, deviation = (f(x[train], axis=(0, 2), keepdims=True) for f in (np.mean, np.std))
    x = ((x - mean) / deviation).astype(np.float32)
    return Dataset(
        name="imu",
        classes=len(np.unique(labels)),
        train_x=x[train],
        train_y=y[train],
        test_x=x[~train],
        test_y=y[~train],
        train_owner=np.searchsorted(training, subject[train]) * PARTS + part[train],
    )
