"""Threshold sparsification: every value of at least tau times the bucket's root mean square.

    C(x) = x 1[|x| >= tau rms(x)]          (hard threshold: Sahu et al., NeurIPS 2021, arXiv 2108.00951)

How many values that are follows from the data: few where a handful of values carries the update, none where all are
alike and tau is above one. Top-k fixes the bytes, this fixes the error.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from fedcomp import _validate
from fedcomp.blocks import root_mean_square
from fedcomp.codec import Codec, Count, Parts, Positions, Schema, register
from fedcomp.codecs.identity import FLOAT32
from fedcomp.codecs.sparse import Sparse
from fedcomp.codecs.uniform import FOUR_BITS
from fedcomp.layout import Layout, Vector
from fedcomp.terms import Term

_MAX = float(np.finfo(np.float32).max)
_SMALLEST = np.finfo(np.float32).smallest_subnormal


@register
@dataclass(frozen=True)
class Threshold(Sparse):
    """Keep the values of at least tau times the root mean square; the rest are sent as zero. Biased: use it with
    error feedback.

    Args:
        tau: threshold in units of the bucket's root mean square. Larger: more error, fewer bytes; of normal values 2
            keeps 4.6 %, 3 keeps 0.27 %. The share never exceeds 1 / tau^2.
        values: codec of the kept values.

    >>> from fedcomp import Layout
    >>> x = np.array([0.5, -3.0, 0.1, 3.0], np.float32)
    >>> codec, layout = Threshold(1.0), Layout.vector(4)
    >>> codec.decode(codec.encode(x, layout, np.random.default_rng(0)), layout).tolist()
    [0.0, -3.0, 0.0, 3.0]
    """

    name: ClassVar[str] = "threshold"
    number: ClassVar[int] = 13

    tau: float
    values: Codec = FLOAT32

    def __post_init__(self) -> None:
        _validate.number(low=0, high=1e6, above=True, tau=self.tau)
        _validate.instance(kind=Codec, values=self.values)

    @property
    def gentle(self) -> Codec | None:
        """Where less than one normal value in sixteen is kept, small layers get four bits a value."""
        return FOUR_BITS if self.tau > 1.86 else None

    def _encode(self, x: Vector, layout: Layout, rng: np.random.Generator) -> Parts:
        positions = _above(x, self.tau)
        return {"count": np.array(positions.size), "positions": positions, **self._kept_parts(x[positions], rng)}

    def schema(self, layout: Layout) -> Schema:
        count = int((yield Count("count", layout.size)))
        yield Positions("positions", count, layout.size)
        yield from self._kept_schema(count)

    def terms(self, parts: Parts, layout: Layout) -> Iterator[Term]:
        yield from self._kept_terms(parts, parts["positions"])


def _above(x: Vector, tau: float) -> NDArray[np.int64]:
    """Ascending positions of the |x| of at least tau times the root mean square. Zeros never count."""
    threshold = tau * root_mean_square(x)
    if threshold > _MAX:
        return np.zeros(0, np.int64)
    return np.flatnonzero(np.abs(x) >= max(np.float32(threshold), _SMALLEST))
