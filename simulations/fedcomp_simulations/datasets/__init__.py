"""Data sets: those that come inside packages, so that nothing is downloaded from anywhere else, and the user's own.

`mnist` is there with fedcomp's own extras; the errors for the others name the package to install. A name that starts
with `idx:` is a folder of IDX files, one that ends in `.npz` is a file of arrays, one that starts with `hub:` is a set
of the Hugging Face hub.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcomp.errors import ConfigError
from fedcomp_simulations.datasets.form import Form

Inputs = NDArray[np.float32] | NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Dataset:
    """Training and test samples, one a row; a label for each, or for each position of each.

    Attributes:
        train_x, test_x: `(samples, ...)`: float32 features, or int64 symbols.
        train_y, test_y: `(samples,)`, or `(samples, positions)` where the model predicts at every position.
        train_owner: `(samples,)`: whose each training sample is, from 0 on; None where the data do not say.
        symbols: samples are rows of whole numbers 0..symbols-1; 0: they are features.
    """

    name: str
    classes: int
    train_x: Inputs
    train_y: NDArray[np.int64]
    test_x: Inputs
    test_y: NDArray[np.int64]
    train_owner: NDArray[np.int64] | None = None
    symbols: int = 0

    @property
    def form(self) -> Form:
        """What a network needs to know."""
        return Form(self.train_x.shape[1:], self.classes, self.symbols, everywhere=self.train_y.ndim > 1)


def available() -> tuple[str, ...]:
    """Names of the data sets that come inside packages."""
    return tuple(sorted(_LOADERS))


def check_name(name: str) -> None:
    """Raise ConfigError unless `load` might know the name; nothing is read."""
    if name not in _LOADERS and not any(fits(name) for fits, _ in _OWN):
        raise ConfigError(
            f"unknown dataset {name!r}; available: {', '.join(available())}, a file that ends in .npz, "
            "idx:FOLDER, hub:NAME"
        )


def form(name: str) -> Form:
    """What the samples of a data set look like; those inside packages need not be there for this."""
    return _FORMS[name] if name in _FORMS else load(name).form


def known_form(name: str) -> Form | None:
    """The same, or None where the data would have to be read."""
    return _FORMS.get(name)


def load(name: str, seed: int = 0) -> Dataset:
    """Load a data set by name; a process reads each only once. The seed matters to those in `SEEDED` alone.

    The arrays are shared by every caller and therefore read-only. Raises FedcompError, with the command that installs
    them, if the files are missing, and ConfigError if a file of the user's own is not as expected.
    """
    check_name(name)
    if name in _LOADERS:
        return _load(name, seed if name in SEEDED else 0)
    return _load_own(name, Path.cwd(), stamp(name))


def fingerprint(name: str) -> str:
    """A digest of data of the user's own, which may become others by the same name; "" for those inside packages."""
    return "" if name in _LOADERS else _digest(name, Path.cwd(), stamp(name))


def stamp(name: str) -> tuple[tuple[str, int, int], ...]:
    """Sizes and times of the files of the user's own data, which change with them; empty for all other sets."""
    if not name.endswith(".npz") and not name.startswith("idx:"):
        return ()
    path = _path(name, name.removeprefix("idx:"))
    found = sorted(path.iterdir()) if path.is_dir() else [path] if path.is_file() else []
    return tuple((each.name, each.stat().st_size, each.stat().st_mtime_ns) for each in found)


@lru_cache(maxsize=2)
def _load(name: str, seed: int) -> Dataset:
    return _read_only(_LOADERS[name](seed))


@lru_cache(maxsize=2)
def _load_own(name: str, folder: Path, files: object) -> Dataset:
    """Read what the user has; a relative path starts at the given current folder, and files may have changed since."""
    del folder, files
    return _read_only(next(read for fits, read in _OWN if fits(name))(name))


@lru_cache(maxsize=8)
def _digest(name: str, folder: Path, files: object) -> str:
    data, digest = _load_own(name, folder, files), sha256()
    for array in _arrays(data):
        digest.update(f"{array.dtype}{array.shape}".encode() + array.tobytes())
    return digest.hexdigest()[:16]


def _read_only(dataset: Dataset) -> Dataset:
    for array in _arrays(dataset):
        array.setflags(write=False)
    return dataset


def _arrays(dataset: Dataset) -> list[NDArray[Any]]:
    arrays = (dataset.train_x, dataset.train_y, dataset.test_x, dataset.test_y, dataset.train_owner)
    return [array for array in arrays if array is not None]


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


def _spoken(seed: int) -> Dataset:
    del seed
    from fedcomp_simulations.datasets.spoken import load_spoken

    return load_spoken()


def _idx(name: str) -> Dataset:
    from fedcomp_simulations.datasets.idx import load_idx

    return load_idx(_path(name, name.removeprefix("idx:")))


def _npz(name: str) -> Dataset:
    from fedcomp_simulations.datasets.npz import load_npz

    return load_npz(_path(name, name))


def _path(name: str, path: str) -> Path:
    try:
        return Path(path).expanduser()
    except RuntimeError as error:  # Python's for ~user without such a user, or ~ without a home
        raise ConfigError(f"dataset {name!r}: there is no home directory {Path(path).parts[0]!r}") from error


def _hub(name: str) -> Dataset:
    from fedcomp_simulations.datasets.hub import load_hub

    return load_hub(name)


_LOADERS: dict[str, Callable[[int], Dataset]] = {
    "fashion": _fashion,
    "imu": _imu,
    "mnist": _mnist,
    "shakespeare": _shakespeare,
    "spoken": _spoken,
}
_FORMS = {  # known without reading anything; a test compares them with the real data
    "fashion": Form((784,), 10),
    "imu": Form((6, 100), 7),
    "mnist": Form((784,), 10),
    "shakespeare": Form((50,), 77, symbols=77, everywhere=True),
    "spoken": Form((13, 32), 10),
}
_OWN: tuple[tuple[Callable[[str], bool], Callable[[str], Dataset]], ...] = (
    (lambda name: name.startswith("idx:"), _idx),
    (lambda name: name.startswith("hub:"), _hub),
    (lambda name: name.endswith(".npz"), _npz),
)
SEEDED = ("imu",)  # which subjects are held out for the test
