"""Flower's records as numpy arrays without a copy: a server that holds large models cannot afford many of them."""

from collections.abc import Mapping
from io import BytesIO
from typing import Any

import numpy as np
from flwr.app import Array
from numpy.lib import format as npy
from numpy.typing import NDArray

_HEADERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}


def views(record: Mapping[str, Array]) -> dict[str, NDArray[Any]]:
    """The arrays of a record by name, read-only; those of other serialization types than Flower's own are left out."""
    return {name: _view(array) for name, array in record.items() if array.stype == "numpy.ndarray"}


def _view(array: Array) -> NDArray[Any]:
    """The array in the bytes of np.save; a copy where these are of a kind that cannot be looked into."""
    stream = BytesIO(array.data)  # shares the bytes
    header = _HEADERS.get(npy.read_magic(stream))
    if header is None:
        return array.numpy()
    shape, by_columns, dtype = header(stream)
    if dtype.hasobject:
        return array.numpy()
    values = np.frombuffer(array.data, dtype, int(np.prod(shape)), stream.tell())
    return values.reshape(shape, order="F" if by_columns else "C")
