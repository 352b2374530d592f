"""FetchSGD: clients send count sketches, momentum and error memory live at the server, as sketches too.

    S_u = rho S_u + mean of S(x_i);   S_e = S_e + eta S_u;   step = top-k(U(S_e));   S_e = S_e - S(step)

(Rothchild et al., ICML 2020, arXiv 2007.07682; x_i are updates, so the step is added.) Sketches are linear, so their
mean is the sketch of the mean: clients keep nothing and secure aggregation is possible. The table must be larger than
the number of values that stand out, and only those are ever recovered.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from fedcomp import _validate
from fedcomp.codec import Codec, Parts
from fedcomp.codecs.sketch import CountSketch, sketch, unsketch
from fedcomp.codecs.topk import largest
from fedcomp.errors import ConfigError
from fedcomp.feedback.scheme import Feedback, Slots, register
from fedcomp.layout import Layout, Vector
from fedcomp.plan import Plan

Table = NDArray[np.float64]


@register
@dataclass(frozen=True)
class FetchSGD(Feedback):
    """Momentum and error feedback in the sketches' space at the server. The plan's codec must be sketch with a seed.

    Args:
        momentum: rho, from 0 to below 1.
        lr: eta. In the long run a step is lr / (1 - momentum) times the mean update.
        fraction: share of the values that each step recovers, above 0 to 1.
    """

    name: ClassVar[str] = "fetchsgd"

    momentum: float = 0.9
    lr: float = 0.3
    fraction: float = 0.01

    def __post_init__(self) -> None:
        _validate.number(low=0, high=0.999, momentum=self.momentum)
        _validate.number(low=0, high=1000, above=True, lr=self.lr)
        _validate.number(low=0, high=1, above=True, fraction=self.fraction)

    def check(self, plan: Plan) -> None:
        """See Feedback."""
        if not isinstance(plan.codec, CountSketch) or plan.codec.seed == 0:
            raise ConfigError(
                f"feedback 'fetchsgd' needs sketches that add up, got {plan.codec}; use for example "
                "sketch(rows=5, ratio=10), with a seed other than 0"
            )

    def encode(
        self, codec: Codec, x: Vector, layout: Layout, before: Slots, rng: np.random.Generator, *, age: int = 1
    ) -> tuple[Parts, Slots]:
        """See Feedback."""
        return codec.encode(x, layout, rng), {}


class FetchSGDServer:
    """The server's half, for the tensors that are sketched together. A step counts only once it is committed."""

    def __init__(self, feedback: FetchSGD, codec: CountSketch) -> None:
        self.feedback = feedback
        self.codec = codec
        self._momentum: Table | float = 0.0
        self._error: Table | float = 0.0
        self._pending: tuple[Table | float, Table | float] = 0.0, 0.0

    @property
    def error(self) -> Table | float:
        """S_e (rows, columns): the sketch of what has not been applied yet; 0 before the first step."""
        return self._error

    def step(self, mean: NDArray[Any], size: int) -> Vector:
        """The step (size,) for the mean sketch (rows, columns) of a round.

        It has the wanted number of values, or half as many, or a quarter and so on, whichever leaves the least error:
        in a table that is too small most estimates are noise, and applying them would lengthen the error until training
        diverges. In the worst case it is zero.
        """
        momentum: Table = self.feedback.momentum * self._momentum + mean.astype(np.float64)
        error: Table = self.feedback.lr * momentum + self._error
        found = unsketch(error.astype(np.float32), size, self.codec.seed, self.codec.estimate)
        kept = max(1, round(self.feedback.fraction * size))
        best, least = np.zeros(size, np.float32), error
        while kept:
            step = np.zeros(size, np.float32)
            places = largest(found, kept)
            step[places] = found[places]
            left = error - sketch(step, error.shape[0], error.shape[1], self.codec.seed)
            if _length(left) < _length(least):
                best, least = step, left
            elif best.any():
                break  # fewer values were only better while too many of them were noise
            kept //= 2
        self._pending = momentum, least
        return best

    def commit(self) -> None:
        """The last step was taken."""
        self._momentum, self._error = self._pending


def _length(table: Table) -> float:
    """Squared length of the vector behind a sketch (rows, columns): each row estimates it."""
    return float(np.median(np.einsum("ij,ij->i", table, table)))
