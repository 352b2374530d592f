"""Top-k sparsification: the k values of largest magnitude and their positions.

    C(x) = x 1[|x| >= tau_k],   contraction delta = k/d    (with memory: Stich et al., NeurIPS 2018, arXiv 1809.07599)

Exactly k values are kept; of equal magnitudes the lowest index wins. The kept values go through a codec of their own.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from fedcomp import _validate
from fedcomp.codec import Codec, Parts, Positions, Schema, register
from fedcomp.codecs.identity import FLOAT32
from fedcomp.codecs.sparse import Sparse, check_fraction_or_k, count_kept
from fedcomp.codecs.uniform import FOUR_BITS
from fedcomp.layout import Layout, Vector
from fedcomp.terms import Term

_SAMPLE = 4096


@register
@dataclass(frozen=True)
class TopK(Sparse):
    """Keep the values of largest magnitude; the rest are sent as zero. Biased: use it with error feedback.

    Args:
        fraction: share of the values to keep, in (0, 1]; at least one value is kept. Larger: less error, more bytes.
        k: number of values to keep, instead of `fraction` (all of them when there are fewer).
        values: codec of the kept values.
        scope: "global" picks over the whole bucket (least error for the bytes); "tensor" picks fraction or k in each
            tensor, which starves none.

    >>> from fedcomp import Layout
    >>> x = np.array([0.5, -3.0, 0.1, 3.0], np.float32)
    >>> codec, layout = TopK(k=2), Layout.vector(4)
    >>> codec.decode(codec.encode(x, layout, np.random.default_rng(0)), layout).tolist()
    [0.0, -3.0, 0.0, 3.0]
    """

    name: ClassVar[str] = "topk"
    number: ClassVar[int] = 4

    fraction: float = 0.0
    k: int = 0
    values: Codec = FLOAT32
    scope: str = "global"

    def __post_init__(self) -> None:
        check_fraction_or_k(self.name, self.fraction, self.k)
        _validate.instance(kind=Codec, values=self.values)
        _validate.one_of(choices=("global", "tensor"), scope=self.scope)

    @property
    def gentle(self) -> Codec | None:
        """Below one value in sixteen, small layers get four bits a value."""
        return FOUR_BITS if 0 < self.fraction < 1 / 16 and self.scope == "global" else None

    def kept(self, size: int) -> int:
        """How many of `size` values are kept."""
        return count_kept(size, self.fraction, self.k)

    def _groups(self, layout: Layout) -> list[slice]:
        return [slice(0, layout.size)] if self.scope == "global" else [where for _, where in layout.slices()]

    def _total(self, layout: Layout) -> int:
        return sum(self.kept(where.stop - where.start) for where in self._groups(layout))

    def _encode(self, x: Vector, layout: Layout, rng: np.random.Generator) -> Parts:
        picked = [
            where.start + largest(x[where], self.kept(where.stop - where.start)) for where in self._groups(layout)
        ]
        positions = np.concatenate(picked) if picked else np.zeros(0, np.int64)
        return {"positions": positions, **self._kept_parts(x[positions], rng)}

    def schema(self, layout: Layout) -> Schema:
        total = self._total(layout)
        yield Positions("positions", total, layout.size)
        yield from self._kept_schema(total)

    def terms(self, parts: Parts, layout: Layout) -> Iterator[Term]:
        yield from self._kept_terms(parts, parts["positions"])


def largest(x: Vector, k: int) -> NDArray[np.int64]:
    """Ascending positions (k,) of the k largest |x|, ties to the lowest index. Linear time: a partition, no sort."""
    if k >= x.size:
        return np.arange(x.size, dtype=np.int64)
    size = np.abs(x)
    found = _candidates(size, k)
    if found is not None:
        size = size[found]
    threshold = np.partition(size, size.size - k)[size.size - k]
    above = np.flatnonzero(size > threshold)
    equal = np.flatnonzero(size == threshold)[: k - above.size]
    picked = np.sort(np.concatenate([above, equal])).astype(np.int64)
    return picked if found is None else found[picked]


def _candidates(size: Vector, k: int) -> NDArray[np.int64] | None:
    """Ascending positions of some values, the k largest with all their ties among them, judged by a sample.

    Partitioning these few is several times faster than partitioning all. None if the sample led astray.
    """
    sample = size[:: max(1, size.size // _SAMPLE)]
    rank = sample.size - 1 - (2 * k * sample.size // size.size + 16)
    if sample.size == size.size or rank <= 0:
        return None
    found = np.flatnonzero(size >= np.partition(sample, rank)[rank]).astype(np.int64)
    return found if k <= found.size <= size.size // 2 else None
