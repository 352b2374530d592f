"""What keeps the noise of coarse codecs out of the model: a cap on the mean update's length.

    cap:      step' = step min(1, C n / ||step||),   n = sum w_i ||x_i|| / sum w_i        of updates x_i, weights w_i

||sum w_i x_i|| <= sum w_i ||x_i||: with C >= 1 the cap acts only on what codecs have added. What an unbiased codec far
below one bit makes of an update is many times as long as the update; where few clients take part the mean is too, and
recurrent networks leave the region where they are stable.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from fedcomp.layout import Vector
from fedcomp.metrics import length

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
