"""Flower's records, read as Flower itself would, but quicker: with small models that takes much of a round."""

from collections.abc import Mapping
from typing import Any, TypeVar

from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from numpy.typing import NDArray

from fedcomp import npy

STYPE = "numpy.ndarray"

R = TypeVar("R", ArrayRecord, ConfigRecord, MetricRecord)


def to_numpy(array: Array) -> NDArray[Any]:
    """What `array.numpy()` returns. Raises what that raises."""
    values = npy.read(array.data) if array.stype == STYPE else None
    return array.numpy() if values is None else values


def to_array(values: NDArray[Any]) -> Array:
    """What `Array(values)` makes. Raises ValueError for arrays of Python objects."""
    return Array(dtype=str(values.dtype), shape=values.shape, stype=STYPE, data=npy.write(values))


def to_record(model: Mapping[str, NDArray[Any]]) -> ArrayRecord:
    """The arrays by name as one record; `ArrayRecord(...)` of a dictionary would make each Array twice."""
    record = ArrayRecord()
    for name, values in model.items():
        record[name] = to_array(values)
    return record


def of_kind(content: RecordDict, kind: type[R]) -> dict[str, R]:
    """The records of one class by name: what Flower's properties give, without a dictionary that writes back."""
    return {name: record for name, record in content.items() if isinstance(record, kind)}
