"""Random sparsification: k values at positions that both sides derive from a seed, so that no position is sent.

    C(x) = (d/k) x m,   m: k of d positions drawn uniformly      (Stich et al., NeurIPS 2018, arXiv 1809.07599)

Scaled it is unbiased with E||C(x) - x||^2 = (d/k - 1) ||x||^2: far too much for error feedback. Unscaled, x m, it is
contractive with delta = k/d in expectation.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedcomp import _validate, seeded
from fedcomp.codec import Codec, Count, Parts, Schema, register, take_below
from fedcomp.codecs.identity import FLOAT32
from fedcomp.codecs.sparse import Sparse, check_fraction_or_k, count_kept
from fedcomp.layout import Layout, Vector
from fedcomp.terms import Term, Values

_MAX = np.finfo(np.float32).max


@register
@dataclass(frozen=True)
class RandomK(Sparse):
    """Keep k random values of the bucket; the rest are sent as zero. Costs four bytes besides the values.

    Args:
        fraction: share of the values to keep, in (0, 1]; at least one value is kept. Larger: less error, more bytes.
        k: number of values to keep, instead of `fraction` (all of them when there are fewer).
        values: codec of the kept values.
        scaled: multiply by d/k: unbiased (if `values` is). False: contractive (if `values` is), for error feedback.

    >>> from fedcomp import Layout
    >>> x = np.ones(1000, np.float32)
    >>> codec, layout = RandomK(0.25), Layout.vector(1000)
    >>> decoded = codec.decode(codec.encode(x, layout, np.random.default_rng(0)), layout)
    >>> np.unique(decoded, return_counts=True)
    (array([0., 4.], dtype=float32), array([750, 250]))
    """

    name: ClassVar[str] = "randk"
    number: ClassVar[int] = 11

    fraction: float = 0.0
    k: int = 0
    values: Codec = FLOAT32
    scaled: bool = True

    def __post_init__(self) -> None:
        check_fraction_or_k(self.name, self.fraction, self.k)
        _validate.instance(kind=Codec, values=self.values)
        _validate.flag(scaled=self.scaled)

    @property
    def unbiased(self) -> bool:
        return self.scaled and self.values.unbiased

    @property
    def contractive(self) -> bool:
        return not self.scaled and self.values.contractive

    def kept(self, size: int) -> int:
        """How many of `size` values are kept."""
        return count_kept(size, self.fraction, self.k)

    def _encode(self, x: Vector, layout: Layout, rng: np.random.Generator) -> Parts:
        seed = seeded.draw_seed(rng)
        kept = x[seeded.subset(seeded.philox(int(seed)), self.kept(x.size), x.size)]
        return {"seed": seed, **self._kept_parts(kept, rng)}

    def schema(self, layout: Layout) -> Schema:
        yield Count("seed", seeded.SEED_LIMIT)
        yield from self._kept_schema(self.kept(layout.size))

    def terms(self, parts: Parts, layout: Layout) -> Iterator[Term]:
        k = self.kept(layout.size)
        positions = np.flatnonzero(seeded.subset(seeded.philox(int(parts["seed"])), k, layout.size))
        gain = np.float32(layout.size / k if self.scaled and k else 1)
        for where, values in self.values.pieces(take_below("values", parts), Layout.vector(k)):
            with np.errstate(over="ignore"):  # of values near float32's limit, clipped at once
                values = values * gain
            yield Values(positions[where], np.clip(values, -_MAX, _MAX))
