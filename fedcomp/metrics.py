"""How far a decoded vector is from the original, and what it cost."""

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

_LEAST = 1e-25
"""Where float32 sums squares to more than this, those that it takes for zero would change nothing."""

_PIECE = 1 << 13
"""Values whose squares are summed in the dtype: of tens of millions at once, float32 would lose three digits."""


def nmse(x: ArrayLike, decoded: ArrayLike) -> float:
    """Normalised mean squared error ||decoded - x||^2 / ||x||^2; 0 if both are zero, infinity if only x is.

    Never rank codecs of different bias by it: an unbiased codec with NMSE 50 may train better than a biased one
    with 0.6.
    """
    a, b = np.asarray(x, np.float64), np.asarray(decoded, np.float64)
    error, energy = float(np.square(b - a).sum()), float(np.square(a).sum())
    if energy == 0:
        return 0.0 if error == 0 else float("inf")
    return error / energy


def cosine(x: ArrayLike, decoded: ArrayLike) -> float:
    """Cosine of the angle between two vectors; 0 if one of them is zero."""
    a, b = np.asarray(x, np.float64).ravel(), np.asarray(decoded, np.float64).ravel()
    lengths = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(a @ b) / lengths if lengths else 0.0


def length(arrays: Iterable[NDArray[Any]]) -> float:
    """Euclidean length of floating-point arrays of any shapes taken as one vector, 0 without any.

    Right also where squares leave the range of the dtype; NaN or infinity if there is one.
    """
    return math.hypot(*(_length(values.ravel()) for values in arrays))


def _length(x: NDArray[Any]) -> float:
    square = _square(x)
    if _LEAST < square < math.inf or x.size == 0:
        return math.sqrt(square)
    peak = max(float(x.max()), -float(x.min()))
    if peak == 0 or not math.isfinite(peak):
        return peak
    scaled = x / x.dtype.type(peak)
    return peak * math.sqrt(_square(scaled))


def _square(x: NDArray[Any]) -> float:
    pieces = (x[start : start + _PIECE] for start in range(0, x.size, _PIECE))
    return sum(float(np.vdot(piece, piece)) for piece in pieces)


def bits_per_parameter(nbytes: int, parameters: int) -> float:
    """Payload of `nbytes` bytes spread over the parameters of the model."""
    return 8 * nbytes / parameters
