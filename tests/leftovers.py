"""Finds processes that a test has started, whoever started them in between."""

from pathlib import Path


def processes_with(mark: str) -> list[str]:
    """Command lines of the processes in whose environment this text is."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (path / "environ").read_bytes():
                found.append((path / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:  # it has ended, or is not ours
            continue
    return found
