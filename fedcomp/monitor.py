"""Monitoring: what compression does to each tensor, round by round.

A client can compare its true update with what its frame says; a server sees only what arrived. Both keep an eye on
outliers (kurtosis) and on how the scale drifts, which is when fixed steps and shared codebooks stop fitting.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcomp.layout import Arrays
from fedcomp.metrics import cosine, nmse

log = logging.getLogger("fedcomp")


@dataclass(frozen=True)
class TensorStats:
    """One tensor of one update.

    Attributes:
        round: server round.
        tensor: name.
        rms: root mean square of the update.
        kurtosis: fourth moment over squared variance: 3 for a Gaussian, 6 for a Laplacian, more with outliers.
        drift: log2 of rms over that of the update seen before; 0 for the first.
        error_norm, nmse, cosine: of the decoded update against the true one; None where the true one is unknown.
    """

    round: int
    tensor: str
    rms: float
    kurtosis: float
    drift: float
    error_norm: float | None = None
    nmse: float | None = None
    cosine: float | None = None


Sink = Callable[[TensorStats], None]


class Monitor:
    """Observes updates and hands statistics to a sink; keeps only the last scale of each tensor.

    Args:
        sink: called once a floating-point tensor and update; None: a line in the log "fedcomp" at DEBUG.

    >>> seen, base = [], {"w": np.zeros(4)}
    >>> Monitor(seen.append).observe(1, base, {"w": np.array([3.0, 4, 0, 0])}, {"w": np.array([3.0, 0, 0, 0])})
    >>> seen[0].rms, seen[0].error_norm, round(seen[0].cosine, 2)
    (2.5, 4.0, 0.6)
    """

    def __init__(self, sink: Sink | None = None) -> None:
        self._sink = sink or _log
        self._rms: dict[str, float] = {}

    def observe(self, round: int, base: Arrays, new: Arrays, decoded: Arrays | None = None) -> None:
        """Look at the update new - base, and at how decoded - base differs from it if `decoded` is given."""
        for name, update in _updates(base, new).items():
            told = None if decoded is None else _updates(base, {name: decoded[name]})[name]
            rms = _rms(update)
            before = self._rms.get(name, rms)
            drift = float(np.log2(rms / before)) if rms and before else 0.0
            self._rms[name] = rms
            self._sink(
                TensorStats(
                    round,
                    name,
                    rms,
                    _kurtosis(update),
                    drift,
                    error_norm=None if told is None else float(np.linalg.norm(told - update)),
                    nmse=None if told is None else nmse(update, told),
                    cosine=None if told is None else cosine(update, told),
                )
            )


def _updates(base: Arrays, new: Arrays) -> Mapping[str, NDArray[np.float64]]:
    """Updates of the floating-point tensors with elements, flat, in float64."""
    wanted = {n: a for n, a in new.items() if a.dtype.kind == "f" and a.size}
    return {n: (a.astype(np.float64) - base[n].astype(np.float64)).ravel() for n, a in wanted.items()}


def _rms(x: NDArray[np.float64]) -> float:
    largest = float(np.abs(x).max())
    return largest * float(np.sqrt(np.square(x / largest).mean())) if largest else 0.0


def _kurtosis(x: NDArray[np.float64]) -> float:
    """Fourth moment about the mean over the squared variance; 0 for a constant."""
    centred: NDArray[Any] = x - x.mean()
    largest = float(np.abs(centred).max())
    if largest == 0:
        return 0.0
    square = np.square(centred / largest)
    return float(np.square(square).mean() / square.mean() ** 2)


def _log(stats: TensorStats) -> None:
    log.debug("%s", stats)
