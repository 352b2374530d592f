"""The tensors of a model as they come from elsewhere: from a server or from a file."""

import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcomp.errors import FedcompError, LayoutError
from fedcomp.layout import check_finite
from fedcomp_clients.files import replacing
from fedcomp_clients.manifest import Manifest, Tensor

Array = NDArray[Any]


def as_tensors(manifest: Manifest, values: Mapping[str, Array] | Sequence[Array]) -> dict[str, Array]:
    """Copies of the values in the order, shapes and dtypes of the model, read only.

    Raises LayoutError or NonFiniteError, see `OnnxTrainer.set_parameters`.
    """
    names = [tensor.name for tensor in manifest.tensors]
    if not isinstance(values, Mapping):
        if len(values) != len(names):
            raise LayoutError(f"expected {len(names)} tensors in the order {', '.join(names)}, got {len(values)}")
        values = dict(zip(names, values, strict=True))
    if values.keys() != set(names):
        missing, extra = sorted(set(names) - values.keys()), sorted(values.keys() - set(names))
        raise LayoutError(f"the bundle is of another model: missing tensors {missing}, unexpected tensors {extra}")
    return {tensor.name: _as_tensor(tensor, values[tensor.name]) for tensor in manifest.tensors}


def _as_tensor(tensor: Tensor, given: Array) -> Array:
    values, dtype = np.asarray(given), np.dtype(tensor.dtype)
    if values.shape != tensor.shape:
        raise LayoutError(f"tensor {tensor.name!r} has shape {values.shape}, expected {tensor.shape}")
    if values.dtype.kind not in "fiub" or (dtype.kind == "f" and values.dtype.kind != "f"):
        raise LayoutError(f"tensor {tensor.name!r} is {values.dtype}, expected {tensor.dtype}")
    if values.dtype.kind == "f":
        check_finite(tensor.name, values)
        if dtype.kind != "f":
            values = np.rint(values)
    with np.errstate(over="ignore", invalid="ignore"):
        own = np.array(values, dtype=dtype, order="C")
    if dtype.kind == "f":
        check_finite(tensor.name, own)  # float64 may be out of float32's range
    own.flags.writeable = False
    return own


def save_tensors(path: Path, values: Mapping[str, Array]) -> None:
    """Write an .npz file, or replace it. Raises FedcompError if it cannot, an old file intact."""
    try:
        with replacing(path) as file:
            np.savez(file, **values)  # type: ignore[arg-type]
    except OSError as error:
        raise FedcompError(
            f"the model cannot be saved at {path} ({error.strerror or error}); what was there is untouched; "
            "free some space or choose another place"
        ) from error


def load_tensors(path: Path) -> dict[str, Array]:
    """All arrays of an .npz file. Raises FedcompError if it is no such file."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    except (OSError, ValueError, EOFError, TypeError, zipfile.BadZipFile) as error:  # TypeError: a single array
        raise FedcompError(f"{path} holds no saved model ({error}); expected an .npz file that `save` wrote") from error
