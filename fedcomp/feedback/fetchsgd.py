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
    """The server's half, for the tensors that are sketched together."""

    def __init__(self, feedback: FetchSGD, codec: CountSketch) -> None:
        self.feedback = feedback
        self.codec = codec
        self._momentum: NDArray[np.float64] | None = None
        self._error: NDArray[np.float64] | None = None

    @property
    def error(self) -> NDArray[np.float64] | None:
        """S_e (rows, columns): the sketch of what has not been applied yet."""
        return self._error

    def step(self, mean: NDArray[Any], size: int) -> Vector:
        """The step (size,) for the mean sketch (rows, columns) of a round.

        It has the wanted number of values, or half as many, or a quarter and so on, whichever leaves the least error:
        in a table that is too small most estimates are noise, and applying them would lengthen the error until training
        diverges. In the worst case it is zero.
        """
        mean = mean.astype(np.float64)
        self._momentum = mean if self._momentum is None else self.feedback.momentum * self._momentum + mean
        error = self.feedback.lr * self._momentum + (0 if self._error is None else self._error)
        found = unsketch(error.astype(np.float32), size, self.codec.seed, self.codec.estimate)
        kept = max(1, round(self.feedback.fraction * size))
        best = np.zeros(size, np.float32)
        self._error = error
        while kept:
            step = np.zeros(size, np.float32)
            places = largest(found, kept)
            step[places] = found[places]
            left = error - sketch(step, error.shape[0], error.shape[1], self.codec.seed)
            if _length(left) >= _length(self._error):
                if best.any():
                    break  # fewer values were only better while too many were noise
            else:
                best, self._error = step, left
            kept //= 2
        return best


def _length(table: NDArray[np.float64]) -> float:
    """Length of the vector behind a sketch (rows, columns): each row estimates its square."""
    return float(np.median(np.einsum("ij,ij->i", table, table)))
