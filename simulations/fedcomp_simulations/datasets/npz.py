"""The user's own data in one `.npz` file with `x` and `y`, and if they like `client`, `x_test` and `y_test`."""

import zipfile
import zlib
from pathlib import Path
from tokenize import TokenError
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcomp.errors import ConfigError
from fedcomp_simulations.datasets import Dataset
from fedcomp_simulations.datasets.arrays import from_arrays


def load_npz(path: Path) -> Dataset:
    """Read a file as `np.savez` writes it; never unpickles. Raises ConfigError, which says what is wrong in it."""
    if not path.is_file():
        raise ConfigError(f"dataset {str(path)!r}: no such file (from {Path.cwd()})")
    try:
        return from_arrays(str(path), _read(path))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def _read(path: Path) -> dict[str, NDArray[Any]]:
    try:
        with path.open("rb") as stream:  # opened here, as numpy leaves what it cannot read open
            file = np.load(stream, allow_pickle=False)
            if not isinstance(file, np.lib.npyio.NpzFile):
                raise ConfigError("this is one array; save with np.savez(path, x=..., y=...)")
            with file:
                return {key: _member(file, key) for key in file.files}
    except (OSError, EOFError, zipfile.BadZipFile, zlib.error, NotImplementedError) as error:
        raise ConfigError(f"cannot be read: {error}") from error
    except ValueError as error:  # numpy's for a file of another format
        if isinstance(error, ConfigError):
            raise
        raise ConfigError("not a file of arrays; save with np.savez(path, x=..., y=...)") from error


def _member(file: Any, key: str) -> NDArray[Any]:
    try:
        array = file[key]
    except (ValueError, SyntaxError, TypeError, MemoryError, RuntimeError, TokenError) as error:
        if "allow_pickle" not in str(error):
            raise ConfigError(f"{key}: damaged, or encrypted: {error}; save it again") from error
        raise ConfigError(
            f"{key}: holds objects, which only pickle could read; make it one array of numbers "
            "(or of texts, np.array(names, str)) and save again"
        ) from error
    if not isinstance(array, np.ndarray):
        raise ConfigError(f"{key}: not an array; save with np.savez(path, x=..., y=...)")
    return array
