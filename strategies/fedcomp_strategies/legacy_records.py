"""Flower's legacy Parameters as records of the Message API, and back."""

from flwr.app import Array, ArrayRecord
from flwr.common import Parameters

from fedcomp_strategies.records import views

_OPAQUE = "opaque:"  # before the type of tensors that are no arrays in the bytes of np.save
_EMPTY = "_empty"


def to_record(parameters: Parameters) -> ArrayRecord:
    """Parameters as a record with the tensors' positions as names, without copying them.

    Tensors of which any is not in the bytes of np.save, such as trees and formats of the user's own, pass through: they
    are of a type that nothing here reads, with Flower's in its name.
    """
    kind, tensors = parameters.tensor_type, parameters.tensors
    if kind.startswith("fedcomp."):
        return _bytes(tensors, kind)
    if kind != "numpy.ndarray" or not tensors:
        return _bytes(tensors, _OPAQUE + kind)
    try:
        return ArrayRecord({str(index): _array(data) for index, data in enumerate(tensors)})
    except Exception:  # whatever numpy says of a stranger's bytes
        return _bytes(tensors, _OPAQUE + kind)


def to_parameters(record: ArrayRecord) -> Parameters:
    """Inverse of to_record; also of records whose arrays were replaced."""
    stype = next((array.stype for array in record.values()), "numpy.ndarray")
    return Parameters([record[key].data for key in record if key != _EMPTY], stype.removeprefix(_OPAQUE))


def _bytes(tensors: list[bytes], stype: str) -> ArrayRecord:
    named = {str(index): data for index, data in enumerate(tensors)} or {_EMPTY: b""}
    return ArrayRecord(
        {name: Array(dtype="uint8", shape=(len(data),), stype=stype, data=data) for name, data in named.items()}
    )


def _array(data: bytes) -> Array:
    """The array in the bytes of np.save, whose dtype and shape the legacy API does not tell apart from them."""
    (values,) = views({"": Array(dtype="", shape=(), stype="numpy.ndarray", data=data)}).values()
    return Array(dtype=str(values.dtype), shape=values.shape, stype="numpy.ndarray", data=data)
