"""How a client opens what the server sends down, and where it keeps the model that the next differences apply to.

Knows nothing of Flower: bytes in, arrays out.
"""

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from numpy.typing import NDArray

from fedcomp import FedcompError, FrameError
from fedcomp.downlink import Package, pack_model
from fedcomp_clients.files import state_directory, state_limit, write_file
from fedcomp_clients.recent import Recent

log = logging.getLogger("fedcomp")

Model = dict[str, NDArray[Any]]


class ModelCache(Protocol):
    """Keeps the last model by training (a run and a session of its server) and node; both are safe as names of files.

    Models are kept as packages, that is as bytes that nothing can change and that carry a checksum.
    """

    def load(self, training: str, node: str) -> Model | None:
        """The model of this node in this training, as arrays of the caller's own; None if there is none."""

    def save(self, training: str, node: str, package: bytes) -> None:
        """Replace the model by that of a package that holds it whole. Raises FedcompError, the old one intact."""


class MemoryModelCache:
    """Models in this process's memory, of the last 8 trainings: for simulations that run in one process."""

    def __init__(self) -> None:
        self._packages: Recent[bytes] = Recent()

    def load(self, training: str, node: str) -> Model | None:
        """See ModelCache."""
        package = self._packages.get(training, node)
        return None if package is None else Package.from_bytes(package).open()

    def save(self, training: str, node: str, package: bytes) -> None:
        """See ModelCache; never fails. A package that many nodes got is kept once."""
        self._packages.put(training, node, package)


class FileModelCache:
    """Models in files ``<directory>/<training>/<node>.model``, replaced atomically.

    Args:
        directory: None: see `state_directory`, looked up when used, so that the cache can be made at import time and
            pickled.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self._directory = directory

    def load(self, training: str, node: str) -> Model | None:
        """See ModelCache. A file that is damaged or cannot be read counts as none, with a warning."""
        path = self._path(training, node)
        try:
            return Package.from_bytes(path.read_bytes()).open()
        except FileNotFoundError:
            return None
        except (OSError, FrameError) as error:
            log.warning("model file %s cannot be used (%s): the server must send the whole model", path, error)
            return None

    def save(self, training: str, node: str, package: bytes) -> None:
        """See ModelCache."""
        path = self._path(training, node)
        try:
            write_file(path, package, state_limit())
        except OSError as error:
            raise FedcompError(
                f"model cannot be stored at {path} ({error}); free some space or set FEDCOMP_STATE_DIR to a writable "
                "directory"
            ) from error

    def _path(self, training: str, node: str) -> Path:
        return state_directory(self._directory) / training / f"{node}.model"


@dataclass(frozen=True)
class Received:
    """What a package brought.

    Attributes:
        arrays: the global model, in the server's order; the caller's own, to train in place if it likes.
        predictor: the frame beside it, or None.
        digest: names the model (8 bytes), for the answer.
        kept: whether the model is in the cache now: only then may the server send differences to it.
        unkept: whether it should be there and is not, which the server must hear.
    """

    arrays: Model
    predictor: bytes | None
    digest: bytes
    kept: bool
    unkept: bool


def receive(data: bytes, cache: ModelCache, training: str, node: str) -> Received:
    """Open a package; if it asks for that, keep its model in the cache. Without that request the cache is left alone.

    Args:
        data: bytes of a package.
        cache: where this client keeps models.
        training, node: what the model is kept under, see ModelCache.

    Raises StaleModelError if the package changes a model that is not in the cache, FrameError if it is damaged: in both
    cases the cache is untouched and the server must send the whole model. A cache that cannot be written only warns.
    """
    package = Package.from_bytes(data)
    arrays = package.open(cache.load(training, node) if package.model is None else None)
    kept = False
    if package.keep:
        try:
            _keep(package, data, arrays, cache, training, node)
            kept = True
        except FedcompError as error:
            log.warning("%s; this round goes on without", error)
    return Received(arrays, package.predictor, package.digest, kept, package.keep and not kept)


def _keep(package: Package, data: bytes, arrays: Model, cache: ModelCache, training: str, node: str) -> None:
    """Put the model into the cache, unless it came from there."""
    if package.model is None and not package.chain:
        return
    if package.model is None or package.predictor is not None:
        model = pack_model(arrays) if package.model is None else package.model
        data = replace(package, model=model, chain=(), predictor=None).to_bytes()
    cache.save(training, node, data)
