"""Arrays in the bytes of numpy.save: the same bytes, the same arrays, and None for what only numpy should judge."""

from io import BytesIO
from typing import Any

import numpy as np
import pytest
from flwr.app import Array
from numpy.typing import NDArray

from fedcomp import npy
from fedcomp_clients.records import to_array, to_numpy

ARRAYS: list[NDArray[Any]] = [
    np.array(3, np.float32),
    np.zeros((0, 3)),
    np.arange(12.0).reshape(3, 4),
    np.arange(12.0).reshape(3, 4).T,
    np.arange(24, dtype=">i2")[::2],
    np.ones((2, 3, 4), bool),
]


def saved(values: NDArray[Any]) -> bytes:
    stream = BytesIO()
    np.save(stream, values, allow_pickle=False)
    return stream.getvalue()


@pytest.mark.parametrize("values", ARRAYS, ids=range(6))
def test_bytes_and_arrays_are_numpys(values: NDArray[Any]) -> None:
    data = saved(values)
    found, loaded = npy.read(data), np.load(BytesIO(data))
    assert npy.write(values) == data
    assert to_array(values) == Array(values)
    assert found is not None
    assert (found.dtype, found.shape, found.flags.fnc) == (loaded.dtype, loaded.shape, loaded.flags.fnc)
    np.testing.assert_array_equal(found, values)
    assert found.flags.writeable
    found[...] = 1
    np.testing.assert_array_equal(npy.view(data), values)  # a copy was written to


def test_what_is_damaged_or_unusual_is_left_to_numpy() -> None:
    data = saved(np.arange(5.0))
    objects = BytesIO()
    np.save(objects, np.array([None]), allow_pickle=True)
    long = BytesIO()
    np.save(long, np.zeros(1, [(f"field{i}", "f4") for i in range(100)]))
    for other in (data[:-1], data[:8], b"", data.replace(b"(5,)", b"(-5)"), objects.getvalue(), long.getvalue()):
        assert npy.read(other) is None
    with pytest.raises(ValueError, match="reading array data"):
        to_numpy(Array("float64", (5,), "numpy.ndarray", data[:-8]))
    with pytest.raises(TypeError, match="serialization type"):
        to_numpy(Array("uint8", (5,), "fedcomp.v1", data))
    with pytest.raises(ValueError, match="Object arrays cannot be"):
        npy.write(np.array([None]))
