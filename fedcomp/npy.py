"""Arrays in the bytes of `numpy.save`, several times as fast as numpy does it for many small ones.

The header says dtype and shape as Python text, whose parsing takes longer than copying a small layer. Models have few
different headers, so each is parsed, and written, once.
"""

import math
from functools import lru_cache
from io import BytesIO
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

_MAGIC = b"\x93NUMPY\x01\x00"  # version 1.0, in which numpy writes all but headers of unusual length
_FIXED = len(_MAGIC) + 2  # and the length of the text
_LONGEST = 512  # bytes of a header: those of models take 128, and what strangers send must not fill the caches


def view(data: bytes) -> NDArray[Any] | None:
    """The array, read-only and without a copy; None if the bytes are not plainly one: numpy knows what to say then."""
    if data[: len(_MAGIC)] != _MAGIC:
        return None
    start = _FIXED + int.from_bytes(data[_FIXED - 2 : _FIXED], "little")
    parsed = _parse(data[:start]) if start <= _LONGEST else None
    if parsed is None:
        return None
    dtype, shape, order, nbytes = parsed
    if len(data) != start + nbytes:
        return None
    return np.frombuffer(data, dtype, math.prod(shape), start).reshape(shape, order=order)


def read(data: bytes) -> NDArray[Any] | None:
    """The array as the caller's own, writable; None: see `view`."""
    found = view(data)
    return None if found is None else found.copy(order="K")


def write(values: NDArray[Any]) -> bytes:
    """What `numpy.save` writes. Raises ValueError for arrays of Python objects."""
    if not values.flags.c_contiguous or values.dtype.hasobject:
        stream = BytesIO()
        np.save(stream, values, allow_pickle=False)
        return stream.getvalue()
    return _header(values.dtype, values.shape) + values.tobytes()


@lru_cache(maxsize=4096)
def _parse(header: bytes) -> tuple[np.dtype[Any], tuple[int, ...], Any, int] | None:
    stream = BytesIO(header)
    stream.seek(len(_MAGIC))
    try:
        shape, by_columns, dtype = npy.read_array_header_1_0(stream)
    except ValueError:
        return None
    if dtype.hasobject or min(shape, default=0) < 0:
        return None
    return dtype, shape, "F" if by_columns else "C", math.prod(shape) * dtype.itemsize


@lru_cache(maxsize=4096)
def _header(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    stream = BytesIO()
    like = np.lib.stride_tricks.as_strided(np.empty((), dtype), shape, (0,) * len(shape))  # no memory of that size
    npy.write_array_header_1_0(stream, {**npy.header_data_from_array_1_0(like), "fortran_order": False})
    return stream.getvalue()
