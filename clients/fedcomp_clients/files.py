"""Files that a client keeps between rounds: where they are, how many there may be, and how they are replaced.

They lie at ``<directory>/<training>/<name>`` and are there whole or not at all. Trainings that nobody has touched for
30 days, and what a killed process left half written, are removed on the way.
"""

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

_KEEP_S = 30 * 24 * 3600.0
_KEEP_TMP_S = 3600.0
_MAX_BYTES = 4 << 30


def state_directory(chosen: Path | None = None) -> Path:
    """The directory chosen, else ``$FEDCOMP_STATE_DIR``, else ``$FLWR_HOME/fedcomp``, else ``~/.flwr/fedcomp``."""
    if chosen is not None:
        return chosen
    if told := os.environ.get("FEDCOMP_STATE_DIR"):
        return Path(told)
    return Path(os.environ.get("FLWR_HOME") or Path.home() / ".flwr") / "fedcomp"


def state_limit(chosen: int | None = None) -> int:
    """Most bytes in the directory: the number chosen, else ``$FEDCOMP_STATE_BYTES``, else 4 GiB."""
    if chosen is not None:
        return chosen
    told = os.environ.get("FEDCOMP_STATE_BYTES", "")
    return int(told) if told.isdigit() else _MAX_BYTES


def write_file(path: Path, data: bytes, limit: int) -> None:
    """Replace a file of a training, or make it.

    Args:
        path: ``<directory>/<training>/<name>``.
        limit: most bytes in the directory. Files of other trainings are removed to make room, the oldest first.

    Raises OSError if it cannot, an old file at the path intact.
    """
    if not path.parent.exists():  # once a training
        path.parent.mkdir(parents=True, exist_ok=True)
        _tidy(path.parent.parent)
    _make_room(path, len(data), limit)
    temporary = None
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".tmp", delete=False) as file:
            temporary = Path(file.name)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())  # or a power cut could leave the new name with nothing in it
        temporary.replace(path)
    except OSError:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
        raise


def _make_room(path: Path, needed: int, limit: int) -> None:
    files = sorted(_files(path.parent.parent))
    total = sum(size for _, _, size in files) + needed
    for _, old, size in files:
        if total <= limit:
            return
        if old.parent != path.parent:
            with contextlib.suppress(OSError):
                old.unlink()
                total -= size
    if total > limit:
        raise OSError(f"{needed} bytes more would exceed the {limit} that FEDCOMP_STATE_BYTES allows")


def _files(directory: Path) -> Iterator[tuple[float, Path, int]]:
    """Time of last change, path and size of every file; another process may be removing some."""
    for path in directory.glob("*/*"):
        with contextlib.suppress(OSError):
            status = path.stat()
            yield status.st_mtime, path, status.st_size


def _tidy(directory: Path) -> None:
    """Remove what is too old to be anybody's; another process may be doing the same."""
    now = time.time()
    for changed, path, _ in _files(directory):
        if now - changed > (_KEEP_TMP_S if path.suffix == ".tmp" else _KEEP_S):
            with contextlib.suppress(OSError):
                path.unlink()
    for folder in directory.iterdir():
        with contextlib.suppress(OSError):  # not empty, which is most of them
            if now - folder.stat().st_mtime > _KEEP_TMP_S:
                folder.rmdir()
