"""What keeps the noise of coarse codecs out of the model: a cap on the mean update's length, a mean of the last models.

    cap:      step' = step min(1, C n / ||step||),   n = sum w_i ||x_i|| / sum w_i        of updates x_i, weights w_i
    average:  m_T = sum_t a^(T-t) w_t / sum_t a^(T-t)                                     of models w_t, t = 1 to T

||sum w_i x_i|| <= sum w_i ||x_i||: with C >= 1 the cap acts only on what codecs have added. What an unbiased codec far
below one bit makes of an update is many times as long as the update; where few clients take part the mean is too, and
recurrent networks leave the region where they are stable. The average is corrected for having begun with nothing: it is
the model itself after one round, about a plain mean at first, and forgets the first models as fast as all others.
"""

import math
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import numpy as np
from flwr.app import Array, ArrayRecord
from numpy.typing import NDArray

from fedcomp.layout import Vector
from fedcomp.metrics import length
from fedcomp_strategies.records import views

_ROUNDING = 1e-5
"""What the mean of exact, parallel updates may be too long by, relative to the cap, because it is summed in float32."""


class Capped(NamedTuple):
    """An update that is no longer than it may be.

    Attributes:
        update: by tensor name.
        length: that it had before.
        most: the length that it may have; infinite if that is not known.
        factor: what it was multiplied with; 1: nothing.
    """

    update: dict[str, Vector]
    length: float
    most: float
    factor: float


def capped(update: dict[str, Vector], norms: Mapping[int, float], weights: Mapping[int, float], limit: float) -> Capped:
    """The mean update, no longer than `limit` times the weighted mean of the lengths of what it was made of.

    Args:
        update: by tensor name, float32; never written to.
        norms: these lengths by node. Nodes of which it is not known are missing; if it is of none, there is no cap.
        weights: by node, of all these and perhaps others.
        limit: C.
    """
    total = math.fsum(weights[node] for node in norms)
    most = limit * (math.fsum(weights[node] * norm for node, norm in norms.items()) / total) if total else math.inf
    before = length(update.values())
    if before <= most * (1 + _ROUNDING):
        return Capped(update, before, most, 1.0)
    factor = np.float32(most / before)
    return Capped({name: np.asarray(x * factor) for name, x in update.items()}, before, most, float(factor))


class MovingAverage:
    """The average of a training's models with weights that decay by the round.

    Only tensors of floating-point numbers are averaged; of all others it has the newest values.

    Args:
        decay: a, above 0 to below 1. Larger: less noise, further behind.

    >>> average = MovingAverage(0.5)
    >>> for value in (0, 3):
    ...     average.add(ArrayRecord({"w": Array(np.full(2, value, np.float32)), "n": Array(np.array(value))}))
    >>> {name: array.numpy().tolist() for name, array in average.record.items()}
    {'w': [2.0, 2.0], 'n': 3}
    """

    def __init__(self, decay: float) -> None:
        self.decay = decay
        self.restart()

    def restart(self) -> None:
        """Another training begins: forget all models."""
        self._rounds = 0
        self._means: dict[str, NDArray[Any]] = {}  # of at least float32, whatever the model's dtype
        self._record: ArrayRecord | None = None

    @property
    def record(self) -> ArrayRecord | None:
        """The average in the newest model's dtypes and order, the same object until the next `add`; None before it."""
        return self._record

    def add(self, model: ArrayRecord, exact: Collection[str] = ()) -> None:
        """Take in the model of another round, which must be finite. With other tensors than before all begins anew.

        Args:
            model: all tensors.
            exact: names of tensors that are integers, whatever their dtype, and are not averaged.
        """
        newest = {n: values for n, values in views(model).items() if values.dtype.kind == "f" and n not in exact}
        if {n: v.shape for n, v in newest.items()} != {n: mean.shape for n, mean in self._means.items()}:
            self.restart()
        self._rounds += 1
        share = (1 - self.decay) / (1 - self.decay**self._rounds)  # of the newest model; 1 in the first round
        for name, values in newest.items():
            self._means[name] = _between(self._means.get(name, values), values, share)
        means = {name: Array(np.asarray(self._means[name], values.dtype)) for name, values in newest.items()}
        self._record = ArrayRecord({**model, **means})


def _between(a: NDArray[Any], b: NDArray[Any], share: float) -> NDArray[Any]:
    """(1 - share) a + share b in float64, kept in b's dtype but at least in float32."""
    wide = np.result_type(b.dtype, np.float64)
    mean = a.astype(wide) * (1 - share)
    mean += share * b.astype(wide, copy=False)
    return np.asarray(mean, np.result_type(b.dtype, np.float32))
