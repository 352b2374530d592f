"""Where a client keeps its error feedback residual between rounds: one per training and node, on this machine only.

Not in Flower's ``Context.state``: a SuperNode ships all of that into and out of a fresh process for every message, and
loses it without a word when that takes more than five seconds.
"""

import logging
from pathlib import Path
from typing import Protocol

import numpy as np

from fedcomp import FedcompError
from fedcomp.feedback import Residual
from fedcomp.layout import Vector
from fedcomp_clients.files import replace_file, state_directory

log = logging.getLogger("fedcomp")


class ResidualStore(Protocol):
    """Keeps residuals by training (a run and a session of its server) and node; both are safe as names of files."""

    def load(self, training: str, node: str) -> Residual:
        """The residual of this node in this training; empty if there is none."""

    def save(self, training: str, node: str, residual: Residual) -> None:
        """Replace the residual of this node in this training. Raises FedcompError, the old one intact, if it cannot."""


class MemoryStore:
    """Residuals in this process's memory: for simulations that run in one process."""

    def __init__(self) -> None:
        self._residuals: dict[tuple[str, str], Residual] = {}

    def load(self, training: str, node: str) -> Residual:
        """See ResidualStore."""
        return self._residuals.get((training, node), {})

    def save(self, training: str, node: str, residual: Residual) -> None:
        """See ResidualStore; never fails."""
        self._residuals[training, node] = residual


class FileStore:
    """Residuals in files ``<directory>/<training>/<node>.npz``, replaced atomically, never unpickled.

    Args:
        directory: None: see `state_directory`, looked up when used, so that the store can be made at import time and
            pickled.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self._directory = directory

    @property
    def directory(self) -> Path:
        """Where the files are."""
        return state_directory(self._directory)

    def load(self, training: str, node: str) -> Residual:
        """See ResidualStore. A damaged file counts as none, with a warning."""
        path = self.directory / training / f"{node}.npz"
        try:
            return _read(path)
        except FileNotFoundError:
            return {}
        except Exception as error:  # a damaged zip file raises half a dozen kinds, and none must stop this client
            log.warning("residual file %s cannot be read (%s): starting again from zero", path, error)
            return {}

    def save(self, training: str, node: str, residual: Residual) -> None:
        """See ResidualStore."""
        path = self.directory / training / f"{node}.npz"
        arrays = {f"r{index}": values for index, values in enumerate(residual.values())}
        names = np.array(list(residual), dtype=np.str_)
        try:
            replace_file(path, lambda file: np.savez(file, names=names, **arrays))  # type: ignore[arg-type]
        except OSError as error:
            raise FedcompError(
                f"residual cannot be stored at {path} ({error}); the old one is kept and nothing is sent; "
                "free some space or set FEDCOMP_STATE_DIR to a writable directory"
            ) from error


def _read(path: Path) -> dict[str, Vector]:
    with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
        names = [str(name) for name in stored["names"]]
        residual = {name: stored[f"r{index}"] for index, name in enumerate(names)}
    if any(values.dtype != np.float32 for values in residual.values()):
        raise ValueError("expected float32 arrays")
    return residual
