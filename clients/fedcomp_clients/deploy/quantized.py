"""int8 versions of a model, by onnxruntime's own quantisation."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from fedcomp_clients.deploy.graph import X

if TYPE_CHECKING:
    from onnx import ModelProto

_BATCH = 64
_DENSE = ["Gemm", "MatMul"]  # integer convolutions with scales found at run time are several times slower than float32
_STATIC = [*_DENSE, "Conv", "ConvTranspose", "Gather", "MaxPool"]  # normalisations and activations gain nothing


def quantize_dynamic(model: "ModelProto", path: Path, *, per_channel: bool) -> None:
    """Write the model with int8 weights of its dense layers; scales of activations are found anew for each input."""
    from onnxruntime import quantization

    with _quietly():
        quantization.quantize_dynamic(
            model, path, op_types_to_quantize=_DENSE, per_channel=per_channel, weight_type=quantization.QuantType.QInt8
        )


def quantize_static(model: "ModelProto", path: Path, calibration: NDArray[Any], *, per_channel: bool) -> None:
    """Write the model with int8 weights, and int8 activations in the ranges that `calibration` shows.

    Args:
        calibration: `(samples, ...)`: inputs like those that the model will meet.
    """
    from onnxruntime import quantization

    with _quietly():
        quantization.quantize_static(
            model,
            path,
            _Batches(calibration),
            quant_format=quantization.QuantFormat.QDQ,
            op_types_to_quantize=_STATIC,
            per_channel=per_channel,
        )


class _Batches:
    """What onnxruntime calls a CalibrationDataReader."""

    def __init__(self, x: NDArray[Any]) -> None:
        self._rest = iter(x[start : start + _BATCH] for start in range(0, len(x), _BATCH))

    def get_next(self) -> dict[str, NDArray[Any]] | None:
        """The next inputs; None at the end."""
        batch = next(self._rest, None)
        return None if batch is None else {X: batch}

    def __iter__(self) -> Iterator[dict[str, NDArray[Any]]]:
        return iter(self.get_next, None)


@contextmanager
def _quietly() -> Iterator[None]:
    """Without the advice to simplify the model first, which has been done, in the root logger."""
    root = logging.getLogger()

    def unless_advice(record: logging.LogRecord) -> bool:
        return "pre-processing" not in record.getMessage()

    root.addFilter(unless_advice)
    try:
        yield
    finally:
        root.removeFilter(unless_advice)
