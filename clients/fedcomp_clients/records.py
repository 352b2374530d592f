"""Flower's arrays from and to numpy: the same bytes and values as Flower's own, without parsing a header each time."""

from typing import Any

from flwr.app import Array
from numpy.typing import NDArray

from fedcomp import npy

STYPE = "numpy.ndarray"


def to_numpy(array: Array) -> NDArray[Any]:
    """What `array.numpy()` returns. Raises what that raises."""
    values = npy.read(array.data) if array.stype == STYPE else None
    return array.numpy() if values is None else values


def to_array(values: NDArray[Any]) -> Array:
    """What `Array(values)` makes. Raises ValueError for arrays of Python objects."""
    return Array(dtype=str(values.dtype), shape=values.shape, stype=STYPE, data=npy.write(values))
