"""Files of other packages, found without importing these and read only if they are the expected ones."""

import hashlib
from importlib.util import find_spec
from pathlib import Path

from fedcomp.errors import FedcompError


def inside(package: str, *parts: str, install: str) -> Path:
    """Return the path of a file or folder inside an installed package.

    Raises FedcompError, which says to run `install`, if the package or the path is missing.
    """
    spec = find_spec(package)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder, *parts)
        if path.exists():
            return path
    raise FedcompError(
        f"this dataset reads {'/'.join(parts)} of the package {package}, which is missing; run: {install}"
    )


def check(data: bytes, sha256: str, *, what: str, install: str) -> bytes:
    """Return the data; raise FedcompError if they are not those with this SHA-256."""
    found = hashlib.sha256(data).hexdigest()
    if found != sha256:
        raise FedcompError(f"{what}: expected SHA-256 {sha256[:12]}..., got {found[:12]}...; run: {install}")
    return data
