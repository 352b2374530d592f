"""Files that a client keeps between rounds: where they are, how many there may be, and how they are replaced.

They lie at ``<directory>/<training>/<name>`` and are there whole or not at all. Trainings that nobody has touched for
30 days, and what a killed process left half written, are removed on the way. The directory may be somebody's home, so
only what bears our names is ever counted or removed: in folders named ``<run id>`` or ``<run id>-<session>`` the files
``<node>.<round>.memory``, ``<node>.model`` and ``.fedcomp-*.tmp``, where the node is ``node-<id>`` or
``partition-<id>``.
"""

import contextlib
import os
import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple

_TRAINING = re.compile(r"[0-9]+(-[^\W_]{1,32})?")
_FILE = re.compile(r"(node|partition)-[0-9]+(\.[0-9]+\.memory|\.model)|\.fedcomp-\w+\.tmp")
_KEEP_S = 30 * 24 * 3600.0
_KEEP_TMP_S = 3600.0
_MAX_BYTES = 4 << 30
_SHARE = 64

_unchecked: dict[tuple[Path, int], int] = {}
"""By directory and limit: bytes that this process may write before it counts the files again."""


def state_directory(chosen: Path | None = None) -> Path:
    """The directory chosen, else ``$FEDCOMP_STATE_DIR``, else ``$FLWR_HOME/fedcomp``, else ``~/.flwr/fedcomp``."""
    if chosen is not None:
        return chosen
    if told := os.environ.get("FEDCOMP_STATE_DIR"):
        return Path(told)
    return Path(os.environ.get("FLWR_HOME") or Path.home() / ".flwr") / "fedcomp"


def state_limit(chosen: int | None = None) -> int:
    """Most bytes of our files in the directory: the number chosen, else ``$FEDCOMP_STATE_BYTES``, else 4 GiB."""
    if chosen is not None:
        return chosen
    told = os.environ.get("FEDCOMP_STATE_BYTES", "")
    return int(told) if told.isdigit() else _MAX_BYTES


def write_file(path: Path, data: bytes, limit: int) -> None:
    """Replace a file of a training, or make it.

    Args:
        path: ``<directory>/<training>/<name>``.
        limit: most bytes of our files in the directory. Files of other trainings are removed to make room, the oldest
            first. Processes that write at once may pass it by 1/64 of it each.

    Raises OSError if it cannot, an old file at the path intact.
    """
    if not path.parent.exists():  # once a training
        path.parent.mkdir(parents=True, exist_ok=True)
        _tidy(path.parent.parent)
    _make_room(path, len(data), limit)
    with replacing(path) as file:
        file.write(data)


@contextlib.contextmanager
def replacing(path: Path, mode: int | None = None) -> Iterator[IO[bytes]]:
    """A file to write to, which takes the place of the one at the path once the block has ended well.

    Args:
        path: its folder must be there.
        mode: permissions; None: for this user only.

    Raises OSError if it cannot be written, the old file intact.
    """
    temporary = None
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".fedcomp-", suffix=".tmp", delete=False) as file:
            temporary = Path(file.name)
            yield file
            file.flush()
            os.fsync(file.fileno())  # or a power cut could leave the new name with nothing in it
        if mode is not None:
            temporary.chmod(mode)
        temporary.replace(path)
    except BaseException:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
        raise


class _File(NamedTuple):
    """One of our files. Plain strings, as there may be ten thousand of them."""

    changed: float
    folder: str
    name: str
    size: int

    @property
    def path(self) -> Path:
        return Path(self.folder, self.name)

    def is_leftover(self, now: float) -> bool:
        """Whether a process was killed while it wrote this."""
        return self.name.endswith(".tmp") and now - self.changed > _KEEP_TMP_S


def _make_room(path: Path, size: int, limit: int) -> None:
    """Remove files until `size` bytes at the path, instead of what is there, do not exceed the limit.

    Files are not counted for each write, but once what was written since would fill 1/64 of the room that was left.
    """
    directory = path.parent.parent
    with contextlib.suppress(OSError):
        size -= path.stat().st_size
    unchecked = _unchecked.get((directory, limit), 0)
    if size <= unchecked:
        _unchecked[directory, limit] = unchecked - size
        return
    files = list(_files(directory))
    total = sum(file.size for file in files) + size
    if total > limit:
        now = time.time()
        for file in sorted(file for file in files if Path(file.folder) != path.parent or file.is_leftover(now)):
            if total <= limit:
                break
            if _remove(file.path):
                total -= file.size
    if total > limit:
        raise OSError(f"{size} bytes more would exceed the {limit} that FEDCOMP_STATE_BYTES allows")
    _unchecked[directory, limit] = (limit - total) // _SHARE


def _remove(path: Path) -> bool:
    """Remove a file. Returns whether it is gone, by whomever."""
    try:
        path.unlink(missing_ok=True)
    except OSError:
        return False
    return True


def _trainings(directory: Path) -> Iterator[Path]:
    """Our folders in the directory; links to folders elsewhere are not ours."""
    for entry in _listed(directory):
        if _TRAINING.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
            yield Path(entry.path)


def _files(directory: Path) -> Iterator[_File]:
    """Our files in the directory; another process may be removing some."""
    for folder in _trainings(directory):
        for entry in _listed(folder):
            if _FILE.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                with contextlib.suppress(OSError):
                    status = entry.stat(follow_symlinks=False)
                    yield _File(status.st_mtime, str(folder), entry.name, status.st_size)


def _listed(folder: Path) -> list[os.DirEntry[str]]:
    """What is in a folder; nothing if it has gone."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        return list(entries)
    return []


def _tidy(directory: Path) -> None:
    """Remove those of our files that are too old to be anybody's; another process may be doing the same."""
    now = time.time()
    for file in _files(directory):
        if now - file.changed > _KEEP_S or file.is_leftover(now):
            _remove(file.path)
    for folder in _trainings(directory):
        with contextlib.suppress(OSError):  # not empty, which is most of them
            if now - folder.stat().st_mtime > _KEEP_TMP_S:
                folder.rmdir()
