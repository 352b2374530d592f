"""Where a client keeps its error feedback residual between rounds: one per (run, node), on this machine only.

Not in Flower's ``Context.state``: a SuperNode ships all of that into and out of a fresh process for every message, and
loses it without a word when that takes more than five seconds.
"""

import logging
import os
import tempfile
import zipfile
from pathlib import Path
from typing import Protocol

import numpy as np

from fedcomp import FedcompError
from fedcomp.feedback import Residual

log = logging.getLogger("fedcomp")


class ResidualStore(Protocol):
    """Keeps residuals by run and node."""

    def load(self, run_id: int, node: str) -> Residual:
        """The residual of this node in this run; empty if there is none."""

    def save(self, run_id: int, node: str, residual: Residual) -> None:
        """Replace the residual of this node in this run. Raises FedcompError, the old one intact, if it cannot."""


class MemoryStore:
    """Residuals in this process's memory: for simulations that run in one process."""

    def __init__(self) -> None:
        self._residuals: dict[tuple[int, str], Residual] = {}

    def load(self, run_id: int, node: str) -> Residual:
        return self._residuals.get((run_id, node), {})

    def save(self, run_id: int, node: str, residual: Residual) -> None:
        self._residuals[run_id, node] = residual


class FileStore:
    """Residuals in files ``<directory>/<run_id>/<node>.npz``, replaced atomically, never unpickled.

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

    def _path(self, run_id: int, node: str) -> Path:
        return self.directory / str(run_id) / f"{node}.npz"

    def load(self, run_id: int, node: str) -> Residual:
        """The stored residual. A damaged file counts as none, with a warning."""
        path = self._path(run_id, node)
        try:
            with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
                names = [str(name) for name in stored["names"]]
                return {name: stored[f"r{index}"] for index, name in enumerate(names)}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            log.warning("residual file %s cannot be read (%s): starting again from zero", path, error)
            return {}

    def save(self, run_id: int, node: str, residual: Residual) -> None:
        path = self._path(run_id, node)
        temporary = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
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
