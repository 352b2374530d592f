"""Files that a client keeps between rounds: where they are, and how they are replaced without ever being half written.

They lie at ``<directory>/<training>/<node><suffix>``. Trainings that nobody has touched for 30 days, and what a killed
process left half written, are removed on the way.
"""

import contextlib
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

_SUFFIXES = (".npz", ".model")
_KEEP_S = 30 * 24 * 3600.0
_KEEP_TMP_S = 3600.0


def state_directory(chosen: Path | None = None) -> Path:
    """The directory chosen, else ``$FEDCOMP_STATE_DIR``, else ``$FLWR_HOME/fedcomp``, else ``~/.flwr/fedcomp``."""
    if chosen is not None:
        return chosen
    if told := os.environ.get("FEDCOMP_STATE_DIR"):
        return Path(told)
    return Path(os.environ.get("FLWR_HOME") or Path.home() / ".flwr") / "fedcomp"


def replace_file(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Let `write` fill a new file that then takes the place of `path`. Raises OSError, the old file intact."""
    if not path.exists():  # once a training
        path.parent.mkdir(parents=True, exist_ok=True)
        _tidy(path.parent.parent)
    temporary = None
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".tmp", delete=False) as file:
            temporary = Path(file.name)
            write(file)
        temporary.replace(path)
    except OSError:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
        raise


def _tidy(directory: Path) -> None:
    """Remove what is too old to be anybody's; another process may be doing the same."""
    now = time.time()
    for path in directory.glob("*/*"):
        keep_s = _KEEP_TMP_S if path.suffix == ".tmp" else _KEEP_S
        with contextlib.suppress(OSError):
            if path.suffix in (".tmp", *_SUFFIXES) and now - path.stat().st_mtime > keep_s:
                path.unlink()
    for folder in directory.iterdir():
        with contextlib.suppress(OSError):  # not empty, which is most of them
            if now - folder.stat().st_mtime > _KEEP_TMP_S:
                folder.rmdir()
