"""One child process, its log file and its end: by process id, together with all that it has started itself."""

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from fedcomp_simulations.deployment.errors import DeploymentError

LOOPBACK = "127.0.0.1"

T = TypeVar("T")

_POLL_S = 0.1
_TERM_S = 10.0
_FAMILY_S = 3.0
_DYING_S = 1.0
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_PROC = Path("/proc")  # on Linux
_TAIL = 20


class Child:
    """A process in a process group of its own, so that what it starts can be stopped with it.

    Its standard output and errors go to `log`, in one file. Use it as a context manager, or call `stop`.

    Args:
        command: program and arguments; a program that is not on the path of `environment` is looked for beside Python.
        log: a file that is written anew.
        environment: the whole environment of the process.

    Raises DeploymentError if the program is not there.
    """

    def __init__(self, command: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        self.name = Path(command[0]).name
        self.log = log
        self._over = False
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                [find_program(command[0], environment.get("PATH", "")), *command[1:]],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=dict(environment),
                start_new_session=True,  # Ctrl-C in a terminal is for us, who then stop it in order
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """Its process id, which is that of its process group too."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """Its exit code, below zero for a signal; None while it runs."""
        return self._process.poll()

    def text(self) -> str:
        """All that it has logged so far."""
        return self.log.read_text("utf-8", errors="replace")

    def failure(self, what: str) -> DeploymentError:
        """Make an error that says what went wrong and ends with the last lines of the log."""
        lines = _COLOURS.sub("", self.text()).splitlines()[-_TAIL:] or ["(nothing)"]
        return DeploymentError("\n".join([f"{self.name}: {what}; the end of its log, {self.log}:", *lines]))

    def wait_for(self, ready: Callable[[], T | None], timeout_s: float, what: str) -> T:
        """Wait until `ready` returns something. Raises DeploymentError if the process ends before, or time is up."""
        deadline = time.monotonic() + timeout_s
        while (found := ready()) is None:
            if self.exit_code is not None:
                raise self.failure(f"ended early, with exit code {self.exit_code}, instead of: {what}")
            if time.monotonic() > deadline:
                raise self.failure(f"timeout of {timeout_s:g} s for: {what}")
            time.sleep(_POLL_S)
        return found

    def wait(self, timeout_s: float) -> int | None:
        """Wait for its end. Returns the exit code; None: it still runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(timeout_s)
        return None

    def kill(self) -> None:
        """End it and all that it has started at once, as a power cut would; harmless if it has ended."""
        if self._over:  # the number may be another's by now
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS: of groups of dead processes
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        self._wait_for_family(_DYING_S)
        self._over = True

    def terminate(self) -> None:
        """Ask it to end, without waiting."""
        if self.exit_code is None:
            self._process.terminate()

    def stop(self, timeout_s: float = _TERM_S) -> None:
        """End it in order, and by force whatever of its family is still there after the timeout."""
        try:
            if self.exit_code is None:
                self.terminate()
                self.wait(timeout_s)
            self._wait_for_family(_FAMILY_S)  # children notice that their parent is gone
        finally:  # after Ctrl-C too
            self.kill()

    def _wait_for_family(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not self._over and self._has_family() and time.monotonic() < deadline:
            time.sleep(_DYING_S / 100)

    def _has_family(self) -> bool:
        if _PROC.is_dir():
            return any(_lives_in(self.pid, stat) for stat in _PROC.glob("[0-9]*/stat"))
        try:
            os.killpg(self.pid, 0)
        except (ProcessLookupError, PermissionError):
            return False
        return True


def _lives_in(group: int, stat: Path) -> bool:
    """Whether a process is of this group, and not merely waiting for somebody to collect its exit code."""
    try:
        state, _, its_group = stat.read_text("utf-8", "replace").rpartition(")")[2].split()[:3]
    except (OSError, ValueError):  # it has ended meanwhile
        return False
    return int(its_group) == group and state not in "ZX"


def find_program(name: str, path: str = "") -> str:
    """The path of a program on `path`, beside Python or on our own path. Raises DeploymentError if there is none."""
    found = shutil.which(name, path=path) if path else None
    found = found or shutil.which(name, path=program_path(os.environ))
    if found is None:
        raise DeploymentError(f'{name}: not found beside {sys.executable}; run: pip install "fedcomp[simulation]"')
    return found


def program_path(environment: Mapping[str, str]) -> str:
    """PATH with the programs of this Python environment first: Flower's processes start each other by name."""
    return os.pathsep.join(filter(None, [str(Path(sys.executable).parent), environment.get("PATH", "")]))


def free_port() -> int:
    """A TCP port of the loopback interface that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def check_port(port: int, whose: str) -> None:
    """Raise DeploymentError if something listens on the port already."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # else a port just left counts as taken
        try:
            probe.bind((LOOPBACK, port))
        except (OSError, OverflowError) as error:
            raise DeploymentError(
                f"{whose}: port {port} of {LOOPBACK} cannot be used ({error}); stop what listens there, or leave the "
                "port out to have a free one chosen"
            ) from error
