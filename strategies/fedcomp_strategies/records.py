"""Flower's records as numpy arrays, without a copy where possible: servers cannot afford many of a large model."""

from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from numpy.typing import NDArray

from fedcomp import npy

Model = dict[str, NDArray[Any]]
R = TypeVar("R", ArrayRecord, ConfigRecord, MetricRecord)


def of_kind(content: RecordDict, kind: type[R]) -> dict[str, R]:
    """The records of one class by name: what Flower's properties give, without a dictionary that writes back."""
    return {name: record for name, record in content.items() if isinstance(record, kind)}


def views(record: Mapping[str, Array]) -> Model:
    """The arrays of a record by name, read-only; those of other serialization types than Flower's own are left out."""
    return {name: _view(array) for name, array in record.items() if array.stype == "numpy.ndarray"}


def copies(record: Mapping[str, Array]) -> Model:
    """The arrays of a record as Flower itself reads them, with all its checks. Raises whatever numpy does."""
    return {name: array.numpy() for name, array in record.items()}


def to_record(model: Mapping[str, NDArray[Any]]) -> ArrayRecord:
    """A record of the arrays."""
    return ArrayRecord({name: Array(values) for name, values in model.items()})


def nbytes(record: Mapping[str, Array]) -> int:
    """Serialized bytes of a record."""
    return sum(len(array.data) for array in record.values())


def identity(record: Mapping[str, Array]) -> tuple[tuple[str, int], ...]:
    """The same for records that hold the same objects, as those of one round usually do."""
    return tuple((name, id(array.data)) for name, array in record.items())


def integers_in(record: Mapping[str, Array]) -> set[str]:
    """Names of the tensors that are integers or booleans, or were so before Flower averaged them.

    Those are float64 with whole values only, in a model that has floating-point numbers of another type.
    """
    model = views(record)
    others = any(values.dtype.kind == "f" and values.dtype != np.float64 for values in model.values())
    whole = {n for n, v in model.items() if others and v.dtype == np.float64 and np.array_equal(v, np.rint(v))}
    return whole | {name for name, values in model.items() if values.dtype.kind != "f"}


def is_finite(record: Mapping[str, Array]) -> bool:
    """Whether no tensor holds NaN or infinity."""
    return all(np.isfinite(values).all() for values in views(record).values() if values.dtype.kind == "f")


def _view(array: Array) -> NDArray[Any]:
    """The array in the bytes of np.save; a copy where these are of a kind that cannot be looked into."""
    values = npy.view(array.data)
    return array.numpy() if values is None else values
