"""Writes files so that nothing is lost: neither what was there before, nor what took minutes to make."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp


def save(text: str, path: Path) -> str:
    """Write a text, or else put it where temporary files go. Says what went wrong, "" if nothing did."""
    try:
        write_text(path, text)
    except OSError as error:
        return f"cannot write {path}: {error.strerror or error}; {_rescue(text, path.name)}"
    return ""


def _rescue(text: str, name: str) -> str:
    """Put a text where temporary files go, and say where that is, or why it is nowhere."""
    folder = None
    try:
        folder = Path(mkdtemp(prefix="fedcomp-"))
        write_text(folder / name, text)
    except OSError as error:
        if folder is not None:
            rmtree(folder, ignore_errors=True)
        return f"nor can the results be put where temporary files go: {error.strerror or error}"
    return f"the results are in {folder / name}"


def write_text(path: Path, text: str) -> None:
    """Write a file so that it is there whole or as it was before. Raises OSError."""
    if path.exists() and not path.is_file():  # such as /dev/stdout
        path.write_text(text, "utf-8")
        return
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text, "utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Let an OSError in the block say which file could not be written, as that of a full disk does not."""
    try:
        yield
    except OSError as error:
        raise OSError(f"cannot write {path}: {error.strerror or error}") from error
