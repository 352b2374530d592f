"""Writes files so that nothing is lost: neither what was there before, nor what took minutes to make."""

import os
from pathlib import Path
from tempfile import mkdtemp


def save(text: str, path: Path) -> str:
    """Write a text, or else put it where temporary files go. Says what went wrong, "" if nothing did."""
    try:
        write_text(path, text)
    except OSError as error:
        rescued = Path(mkdtemp(prefix="fedcomp-")) / path.name
        rescued.write_text(text, "utf-8")
        return f"cannot write {path}: {error.strerror}; the results are in {rescued}"
    return ""


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
