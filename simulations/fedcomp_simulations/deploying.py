"""What `fedcomp deploy` does: arrays from files, then `fedcomp_clients.deploy`."""

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcomp.errors import ConfigError
from fedcomp_clients.deploy import Report, deploy


def deploy_files(
    bundle: Path, parameters: Path, out: Path, calibration_x: Path | None, test_x: Path | None, test_y: Path | None
) -> Report:
    """Call `deploy` on the arrays in these files. Raises ConfigError if one holds none, or without onnx."""
    if (test_x is None) != (test_y is None):
        raise ConfigError("--test-x and --test-y: expected both or none")
    test = None if test_x is None or test_y is None else (_array(test_x, "--test-x"), _array(test_y, "--test-y"))
    calibration = None if calibration_x is None else _array(calibration_x, "--calibration-x")
    arrays = _arrays(parameters, "--parameters")
    try:
        return deploy(bundle, arrays, out, calibration=calibration, test=test)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in ("onnx", "onnxruntime"):
            raise
        raise ConfigError(f'{missing} is not installed; run: pip install "fedcomp[export,simulation]"') from error


def _array(path: Path, option: str) -> NDArray[Any]:
    found = _load(path, option)
    if not isinstance(found, np.ndarray):
        raise ConfigError(f"{option}: expected a .npy file with one array, got {path}")
    return found


def _arrays(path: Path, option: str) -> dict[str, NDArray[Any]]:
    found = _load(path, option)
    if isinstance(found, np.ndarray):
        raise ConfigError(f"{option}: expected a .npz file with arrays by tensor name, got {path}")
    return found


def _load(path: Path, option: str) -> NDArray[Any] | dict[str, NDArray[Any]]:
    try:
        found = np.load(path, allow_pickle=False)
        if isinstance(found, np.ndarray):
            return found
        with found:
            return dict(found)
    except OSError as error:
        raise ConfigError(f"{option}: cannot read {path}: {error.strerror or error}") from error
    except (ValueError, EOFError, zipfile.BadZipFile) as error:
        raise ConfigError(f"{option}: {path} holds no arrays of numpy ({error})") from error
