"""Training bundles: what a workstation with torch writes and a device trains from.

A bundle is a folder of four files. Nothing in it is pickled, and ``manifest.json`` has the SHA-256 of the other three:

    train.onnx   (tensors, x, y) -> gradients of the parameters, new values of the buffers, loss, correct
    eval.onnx    (tensors, x, y) -> output, loss, correct; the model in evaluation mode
    init.npz     initial values of all tensors

In the graphs a tensor is called ``t/<name>``, a gradient ``g/<name>`` and a new buffer ``b/<name>``. Dimension 0 of x
and y is the batch, everything else is fixed. A digest tells damage, not malice: take bundles from whom you trust.
"""

import hashlib
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from fedcomp.errors import BundleError
from fedcomp_clients.files import replacing
from fedcomp_clients.manifest import (
    EVAL,
    FILES,
    INITIAL,
    MANIFEST,
    REMEDY,
    SGD,
    TRAIN,
    Check,
    Data,
    File,
    Manifest,
    Tensor,
)  # fmt: skip

__all__ = [
    "EVAL", "FILES", "INITIAL", "MANIFEST", "SGD", "TRAIN", "Bundle", "Check", "Data", "File", "Manifest", "Tensor",
    "read_bundle", "write_manifest",
]  # fmt: skip

_MAX_MANIFEST = 16 << 20
_NPY_HEADER = 1 << 16


@dataclass(frozen=True)
class Bundle:
    """A bundle that was found sound.

    Attributes:
        initial: values of all tensors, in the manifest's order; read only.
    """

    folder: Path
    manifest: Manifest
    initial: Mapping[str, NDArray[Any]]

    def graph(self, name: str) -> bytes:
        """The bytes of train.onnx or eval.onnx. Raises BundleError if they have changed since the bundle was read."""
        with _open(self.folder / name) as file:
            data = file.read()
        expected = self.manifest.files[name]
        _check_file(name, File(hashlib.sha256(data).hexdigest(), len(data)), expected)
        return data


def read_bundle(folder: Path | str) -> Bundle:
    """Read and verify a bundle: version, digests and sizes of all files, initial values against the tensors.

    Raises BundleError that names the file, what was expected, what came, and what to do.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise BundleError(f"{folder}: expected the folder of a training bundle, found none; check the path")
    manifest = Manifest.from_json(_manifest_text(folder))
    for name in FILES:
        if name not in manifest.files:
            raise BundleError(f"{MANIFEST}: {name} is not among the files; {REMEDY}")
        with _open(folder / name) as file:
            _check_file(name, _measure(file), manifest.files[name])
            if name == INITIAL:
                initial = _read_initial(file, manifest)
    return Bundle(folder, manifest, initial)


def write_manifest(folder: Path | str, manifest: Manifest) -> Manifest:
    """Write manifest.json beside the three other files, which must be there. Returns it with their digests.

    Raises BundleError if a file is missing, OSError if it cannot write, an old manifest intact.
    """
    folder = Path(folder)
    measured = {}
    for name in FILES:
        with _open(folder / name) as file:
            measured[name] = _measure(file)
    complete = replace(manifest, files=measured)
    with replacing(folder / MANIFEST, 0o644) as file:
        file.write(complete.to_json().encode())
    return complete


def _open(path: Path) -> IO[bytes]:
    try:
        if not path.is_file():  # opening a pipe would wait
            raise BundleError(f"{path} is missing or no ordinary file; {REMEDY}")
        return path.open("rb")
    except OSError as error:
        raise BundleError(f"{path} cannot be read ({error.strerror}); check its permissions") from error


def _manifest_text(folder: Path) -> str:
    with _open(folder / MANIFEST) as file:
        data = file.read(_MAX_MANIFEST + 1)
    if len(data) > _MAX_MANIFEST:
        raise BundleError(f"{MANIFEST} is longer than {_MAX_MANIFEST} bytes; {REMEDY}")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise BundleError(f"{MANIFEST} is no UTF-8 text ({error.reason}); {REMEDY}") from None


def _measure(file: IO[bytes]) -> File:
    """Digest and size of an open file, without holding it in memory; the file is rewound."""
    digest = hashlib.file_digest(file, "sha256")  # type: ignore[arg-type]
    size = file.tell()
    file.seek(0)
    return File(digest.hexdigest(), size)


def _check_file(name: str, found: File, expected: File) -> None:
    if found.bytes != expected.bytes:
        raise BundleError(f"{name}: expected {expected.bytes} bytes, found {found.bytes}; {REMEDY}")
    if found.sha256 != expected.sha256:
        raise BundleError(f"{name}: expected SHA-256 {expected.sha256}, found {found.sha256}; {REMEDY}")


def _read_initial(file: IO[bytes], manifest: Manifest) -> dict[str, NDArray[Any]]:
    """Values of the tensors from init.npz, which may hold no others."""
    try:
        with zipfile.ZipFile(file) as archive:
            sizes = {info.filename: info.file_size for info in archive.infolist()}
            expected = {f"{tensor.name}.npy" for tensor in manifest.tensors}
            if sizes.keys() != expected:
                raise BundleError(
                    f"{INITIAL}: missing {sorted(expected - sizes.keys())}, "
                    f"unexpected {sorted(sizes.keys() - expected)}; {REMEDY}"
                )
            return {tensor.name: _read_tensor(archive, tensor, sizes) for tensor in manifest.tensors}
    except (zipfile.BadZipFile, NotImplementedError, EOFError, OSError, RuntimeError) as error:
        raise BundleError(f"{INITIAL} cannot be read ({error}); {REMEDY}") from error


def _read_tensor(archive: zipfile.ZipFile, tensor: Tensor, sizes: Mapping[str, int]) -> NDArray[Any]:
    entry = f"{tensor.name}.npy"
    if sizes[entry] > tensor.nbytes + _NPY_HEADER:  # before anything of that size is allocated
        raise BundleError(f"{INITIAL}: tensor {tensor.name!r} has {sizes[entry]} bytes, expected {tensor.nbytes}")
    try:
        with archive.open(entry) as file:
            values: NDArray[Any] = np.lib.format.read_array(file, allow_pickle=False)
    except ValueError as error:
        raise BundleError(f"{INITIAL}: tensor {tensor.name!r} cannot be read ({error}); {REMEDY}") from error
    if values.shape != tensor.shape or values.dtype != np.dtype(tensor.dtype):
        raise BundleError(
            f"{INITIAL}: tensor {tensor.name!r} has shape {values.shape} and dtype {values.dtype}, "
            f"expected {tensor.shape} and {tensor.dtype}; {REMEDY}"
        )
    values = np.ascontiguousarray(values).reshape(tensor.shape)  # the former makes 0-d arrays 1-d
    values.flags.writeable = False
    return values
