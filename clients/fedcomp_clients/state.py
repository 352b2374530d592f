"""Where a client keeps its error feedback residual between rounds: one per training and node, on this machine only.

Not in Flower's ``Context.state``: a SuperNode ships all of that into and out of a fresh process for every message, and
loses it without a word when that takes more than five seconds.
"""

import contextlib
import logging
import os
import tempfile
import time
from pathlib import Path
from typing import Protocol

import numpy as np

from fedcomp import FedcompError
from fedcomp.feedback import Residual
from fedcomp.layout import Vector

log = logging.getLogger("fedcomp")

_KEEP_S = 30 * 24 * 3600.0
_KEEP_TMP_S = 3600.0


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

    Trainings that nobody has touched for 30 days, and what a killed process left half written, are removed on the way.

    Args:
        directory: None: ``$FEDCOMP_STATE_DIR``, else ``$FLWR_HOME/fedcomp``, else ``~/.flwr/fedcomp``, looked up when
            used, so that the store can be made at import time and pickled.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self._directory = directory

    @property
    def directory(self) -> Path:
        """Where the files are."""
        if self._directory is not None:
            return self._directory
        if chosen := os.environ.get("FEDCOMP_STATE_DIR"):
            return Path(chosen)
        return Path(os.environ.get("FLWR_HOME") or Path.home() / ".flwr") / "fedcomp"

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
        temporary = None
        try:
            if not path.exists():  # once a training
                path.parent.mkdir(parents=True, exist_ok=True)
                self._tidy()
            with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".tmp", delete=False) as file:
                temporary = Path(file.name)
                arrays = {f"r{index}": values for index, values in enumerate(residual.values())}
                np.savez(file, names=np.array(list(residual), dtype=np.str_), **arrays)  # type: ignore[arg-type]
            temporary.replace(path)
        except OSError as error:
            if temporary is not None:
                temporary.unlink(missing_ok=True)
            raise FedcompError(
                f"residual cannot be stored at {path} ({error}); the old one is kept and nothing is sent; "
                "free some space or set FEDCOMP_STATE_DIR to a writable directory"
            ) from error

    def _tidy(self) -> None:
        """Remove what is too old to be anybody's; another process may be doing the same."""
        now = time.time()
        for path in self.directory.glob("*/*"):
            keep_s = _KEEP_TMP_S if path.suffix == ".tmp" else _KEEP_S
            with contextlib.suppress(OSError):
                if path.suffix in (".tmp", ".npz") and now - path.stat().st_mtime > keep_s:
                    path.unlink()
        for folder in self.directory.iterdir():
            with contextlib.suppress(OSError):  # not empty, which is most of them
                if now - folder.stat().st_mtime > _KEEP_TMP_S:
                    folder.rmdir()


def _read(path: Path) -> dict[str, Vector]:
    with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
        names = [str(name) for name in stored["names"]]
        residual = {name: stored[f"r{index}"] for index, name in enumerate(names)}
    if any(values.dtype != np.float32 for values in residual.values()):
        raise ValueError("expected float32 arrays")
    return residual
