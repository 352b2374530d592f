"""Count sketch: a small table into which every value is added, with a random sign, once a row.

    S(x)[r, h_r(i)] += s_r(i) x_i              U(T)_i = median_r or mean_r of s_r(i) T[r, h_r(i)]

(Charikar, Chen & Farach-Colton, ICALP 2002.) S is linear: with the same seed the sketches of clients add up to the
sketch of their sum, which is what FetchSGD (Rothchild et al., ICML 2020, arXiv 2007.07682) and secure aggregation need,
and what `sketch` and `unsketch` are for. As a codec of single updates it is a poor one, there for comparison: each
row's estimate has the variance ||x||^2 / columns. The median is robust against collisions with large values; only
values that stand out of that noise are recovered, hence `keep`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from fedcomp import _validate, seeded
from fedcomp.blocks import CHUNK
from fedcomp.codec import Codec, Count, Floats, Parts, Schema, register
from fedcomp.codecs.topk import largest
from fedcomp.errors import ConfigError
from fedcomp.layout import Layout, Vector
from fedcomp.terms import Term, Values

_LIMITS = {"float32": float(np.finfo(np.float32).max), "float16": float(np.finfo(np.float16).max)}
_LARGEST = 16
"""Most places in a table per value, whatever is asked for: nobody needs more, and forged frames get no more memory."""


@register
@dataclass(frozen=True)
class CountSketch(Codec):
    """A count sketch of the bucket as a codec. Biased unless the seed is fresh, the estimate the mean and all is kept.

    Args:
        rows: independent rows of the table, 1 to 15. More: safer estimates, more bytes and time.
        columns: places in a row. Larger: less error, more bytes.
        ratio: values in the bucket per place in the table, instead of `columns`. Larger: more error, fewer bytes.
        estimate: "median" or "mean" of the rows.
        keep: share of the values to recover, those with the largest estimates; the rest are decoded as zero.
        dtype: of the table, "float32" or "float16" (clipped beyond +-65504).
        seed: of hashes and signs. The same for all whose sketches are to be added; 0: a fresh one for each frame.

    >>> from fedcomp import Layout
    >>> x = np.zeros(1000, np.float32)
    >>> x[[3, 500]] = 2, -1
    >>> codec, layout = CountSketch(columns=50), Layout.vector(1000)
    >>> decoded = codec.decode(codec.encode(x, layout, np.random.default_rng(0)), layout)
    >>> decoded[[3, 500]].tolist(), int(np.count_nonzero(decoded))
    ([2.0, -1.0], 2)
    """

    name: ClassVar[str] = "sketch"
    number: ClassVar[int] = 21

    rows: int = 5
    columns: int = 0
    ratio: float = 0.0
    estimate: str = "median"
    keep: float = 1.0
    dtype: str = "float32"
    seed: int = 1

    def __post_init__(self) -> None:
        _validate.integer(low=1, high=15, rows=self.rows)
        if bool(self.columns) == bool(self.ratio):
            raise ConfigError(f"sketch: give either columns or ratio, got {self.columns!r} and {self.ratio!r}")
        if self.ratio:
            _validate.number(low=0.1, high=1e6, ratio=self.ratio)
        else:
            _validate.integer(low=1, high=1 << 31, columns=self.columns)
        _validate.one_of(choices=("median", "mean"), estimate=self.estimate)
        _validate.number(low=0, high=1, above=True, keep=self.keep)
        _validate.one_of(choices=tuple(_LIMITS), dtype=self.dtype)
        _validate.integer(low=0, high=seeded.SEED_LIMIT, seed=self.seed)

    @property
    def unbiased(self) -> bool:
        return self.seed == 0 and self.estimate == "mean" and self.keep == 1 and self.dtype == "float32"

    @property
    def contractive(self) -> bool:
        return False

    def width(self, size: int) -> int:
        """Columns of the table for a bucket of `size` values, which bounds it whatever is asked for."""
        columns = self.columns or round(size / (self.ratio * self.rows))
        return max(1, min(columns, _LARGEST * size // self.rows))

    def _encode(self, x: Vector, layout: Layout, rng: np.random.Generator) -> Parts:
        fresh: Parts = {} if self.seed else {"seed": seeded.draw_seed(rng)}
        table = sketch(x, self.rows, self.width(x.size), self.seed or int(fresh["seed"]))
        limit = _LIMITS[self.dtype]
        return {**fresh, "table": np.clip(table, -limit, limit).astype(self.dtype).astype(np.float32).ravel()}

    def schema(self, layout: Layout) -> Schema:
        if self.seed == 0:
            yield Count("seed", seeded.SEED_LIMIT)
        yield Floats("table", self.rows * self.width(layout.size), self.dtype)

    def terms(self, parts: Parts, layout: Layout) -> Iterator[Term]:
        seed = self.seed or int(parts["seed"])
        table = parts["table"].reshape(self.rows, -1)
        found = unsketch(table, layout.size, seed, self.estimate)
        if self.keep == 1:
            yield Values(slice(0, layout.size), found)
        elif layout.size:
            kept = largest(found, max(1, round(self.keep * layout.size)))
            yield Values(kept, found[kept])


def sketch(x: Vector, rows: int, columns: int, seed: int) -> NDArray[np.float64]:
    """Count sketch (rows, columns) of x (size,), summed in float64: integers up to 2^53 come out exact."""
    table = np.zeros((rows, columns))
    for values, place, sign in _hashes(x.size, rows, columns, seed):
        for row in range(rows):
            signed = seeded.flip(x[values], sign[row])
            table[row] += np.bincount(place[row], signed, columns)
    return table


def unsketch(table: NDArray[np.float32], size: int, seed: int, estimate: str = "median") -> Vector:
    """Estimates (size,) of the values in a sketch (rows, columns) made with the same seed."""
    rows, columns = table.shape
    out = np.empty(size, np.float32)
    for values, place, sign in _hashes(size, rows, columns, seed):
        found = np.stack([seeded.flip(table[row][place[row]], sign[row]) for row in range(rows)])  # (rows, chunk)
        out[values] = _median(found) if estimate == "median" else found.mean(axis=0, dtype=np.float64)
    return out


def _hashes(
    size: int, rows: int, columns: int, seed: int
) -> Iterator[tuple[slice, list[NDArray[np.int64]], list[NDArray[np.uint32]]]]:
    """Chunks of values, each with the places and sign bits of every row.

    Half a Philox word for each value and row: the lowest bit is the sign, the other 31 choose the place, to which a
    place is up to columns / 2^31 more likely than another.
    """
    source = seeded.philox(seed)
    for start in range(0, size, CHUNK):
        count = min(CHUNK, size - start)
        halves = seeded.words(source, count * -(-rows // 2)).astype("<u8").view("<u4").reshape(-1, count)
        place = [
            ((half >> 1).astype(np.uint64) * np.uint64(columns) >> np.uint64(31)).astype(np.int64)
            for half in halves[:rows]
        ]
        yield slice(start, start + count), place, [half.astype(np.uint32) << np.uint32(31) for half in halves[:rows]]


def _median(found: NDArray[np.float32]) -> Vector:
    """Median of each column, by odd-even transposition: far faster than a sort along so short an axis."""
    rows = list(found)
    for step in range(len(rows)):
        for i in range(step % 2, len(rows) - 1, 2):
            rows[i], rows[i + 1] = np.minimum(rows[i], rows[i + 1]), np.maximum(rows[i], rows[i + 1])
    if len(rows) % 2:
        return np.asarray(rows[len(rows) // 2])
    half = np.float32(0.5)
    middle: Vector = rows[len(rows) // 2 - 1] * half + rows[len(rows) // 2] * half
    return middle
