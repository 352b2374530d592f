"""Where a client keeps what feedback remembers between rounds: for each training and node, on this machine only.

A memory is kept under the round of the upload that it belongs to, and none is ever changed. The server's
acknowledgement names the round that counts; all others are discarded. So there is nothing to commit, and nothing that a
killed process could leave half committed: an upload that the server never used is as if it had never been made.

Not in Flower's ``Context.state``: a SuperNode ships all of that into and out of a fresh process for every message, and
loses it without a word when that takes more than five seconds. Only a pointer to the file is there.
"""

import contextlib
import logging
import re
from pathlib import Path
from typing import Protocol

from fedcomp import FedcompError, Layout, Memory, _validate
from fedcomp.feedback.stored import PRECISIONS, pack_memory, unpack_memory
from fedcomp_clients.files import state_directory, state_limit, write_file
from fedcomp_clients.recent import Recent

log = logging.getLogger("fedcomp")

_SUFFIX = ".memory"


class StateStore(Protocol):
    """Keeps memories by training (a run and a session of its server), node and round; names are safe as file names."""

    def load(self, training: str, node: str, round: int, layout: Layout) -> Memory | None:
        """The memory made with the upload of this round, for a model of this layout; None: missing or damaged."""

    def save(self, training: str, node: str, memory: Memory, layout: Layout, *, exact: bool = False) -> str:
        """Keep a memory beside the others. Returns where it is. Raises FedcompError if it cannot, the others intact.

        Args:
            layout: of the tensors in it, see fedcomp.feedback.stored.memory_layout.
            exact: store it without rounding.
        """

    def discard(self, training: str, node: str, *, but: int) -> None:
        """Forget the node's memories of this training, except that of round `but`."""


class MemoryStore:
    """Memories in this process: for simulations that run in one process, and for small models on long-lived clients.

    Those of the last 8 trainings are kept.
    """

    def __init__(self) -> None:
        self._kept: Recent[dict[int, Memory]] = Recent()

    def load(self, training: str, node: str, round: int, layout: Layout) -> Memory | None:
        """See StateStore."""
        return (self._kept.get(training, node) or {}).get(round)

    def save(self, training: str, node: str, memory: Memory, layout: Layout, *, exact: bool = False) -> str:
        """See StateStore; never fails, and never rounds."""
        self._kept.put(training, node, {**(self._kept.get(training, node) or {}), memory.round: memory})
        return "memory"

    def discard(self, training: str, node: str, *, but: int) -> None:
        """See StateStore."""
        if kept := self._kept.get(training, node):
            self._kept.put(training, node, {round_: memory for round_, memory in kept.items() if round_ == but})


class FileStore:
    """Memories in files ``<directory>/<training>/<node>.<round>.memory``, replaced atomically, never unpickled.

    Args:
        directory: None: ``$FEDCOMP_STATE_DIR``, else ``$FLWR_HOME/fedcomp``, else ``~/.flwr/fedcomp``, looked up when
            used, so that the store can be made at import time and pickled.
        precision: of the stored values: "float16", "int8" (a quarter of float32's size, for large models) or "float32".
        max_bytes: most bytes of our files in the directory; None: ``$FEDCOMP_STATE_BYTES``, else 4 GiB. Files of other
            trainings make room, the oldest first; a memory that still finds none is an error. Only trainings and nodes
            named as the mod names them count and are ever removed, see `fedcomp_clients.files`.
    """

    def __init__(
        self, directory: Path | None = None, *, precision: str = "float16", max_bytes: int | None = None
    ) -> None:
        _validate.one_of(choices=tuple(PRECISIONS), precision=precision)
        if max_bytes is not None:
            _validate.integer(low=1, max_bytes=max_bytes)
        self._directory = directory
        self._max_bytes = max_bytes
        self.precision = precision

    @property
    def directory(self) -> Path:
        """Where the files are."""
        return state_directory(self._directory)

    def load(self, training: str, node: str, round: int, layout: Layout) -> Memory | None:
        """See StateStore. A file that is damaged or of another model counts as none, with a warning."""
        path = self._path(training, node, round)
        try:
            memory = unpack_memory(path.read_bytes(), layout)
        except FileNotFoundError:
            log.warning("memory file %s is missing: starting again from zero", path)
            return None
        except (OSError, FedcompError) as error:
            log.warning("memory file %s cannot be used (%s): starting again from zero", path, error)
            return None
        return memory if memory.round == round else None

    def save(self, training: str, node: str, memory: Memory, layout: Layout, *, exact: bool = False) -> str:
        """See StateStore."""
        path = self._path(training, node, memory.round)
        data = pack_memory(memory, layout, "float32" if exact else self.precision)
        try:
            write_file(path, data, state_limit(self._max_bytes))
        except OSError as error:
            raise FedcompError(
                f"residual cannot be stored at {path} ({error}); the old one is kept and nothing is sent; "
                "free some space or set FEDCOMP_STATE_DIR to a writable directory"
            ) from error
        return str(path)

    def discard(self, training: str, node: str, *, but: int) -> None:
        """See StateStore."""
        pattern = re.compile(rf"{re.escape(node)}\.\d+{re.escape(_SUFFIX)}")
        for path in (self.directory / training).glob(f"{node}.*"):
            if pattern.fullmatch(path.name) and path != self._path(training, node, but):
                with contextlib.suppress(OSError):
                    path.unlink()

    def _path(self, training: str, node: str, round: int) -> Path:
        return self.directory / training / f"{node}.{round}{_SUFFIX}"
