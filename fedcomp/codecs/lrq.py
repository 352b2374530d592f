"""LRQ: low rank with entropy-coded factors, and one uniform step for the factors of all matrices and all other values.

    M ~ sum_k s_k u_k v_k^T       singular value decomposition, u_k along the longer side of M
    a_k = round(s_k u_k / step)   integers; with g_k = |a_k|, a_k / g_k is nearly u_k and of length 1
    b_k = round(g_k w_k / step)   W = (A^T A)^-1 A^T M, the least-squares partner of these integers
    M' = sum_k (a_k / g_k) (b_k step)^T

Since its partner has length 1, an error in s_k u_k or in g_k w_k is as large an error in M': one step for both, and for
all matrices, is what reverse water-filling asks for (see `ecsq`). The rank falls out: weak directions do not pay.
Client updates are nearly of low rank, so that this takes several times fewer bytes than to quantize value by value at
equal error. The decomposition is that of `lowrank`.

Each tensor goes the way of the least D + lambda R: as factors, value by value with the same step (vectors always), or
not at all. lambda is below the slope at which the step trades error for bits, and at most 0.1 step^2. Integers with
quiet neighbours in their column are rounded down a little more, and those between busy ones a little less, since there
they cost more or fewer bits.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from fedcomp import _validate
from fedcomp.blocks import root_mean_square
from fedcomp.codec import Columns, ContractiveCodec, Count, Parts, Schema, Symbols, matrix_shapes, register
from fedcomp.codecs.ecsq import CLASSES, Cells, check_step_or_bits, levels, round_down
from fedcomp.codecs.factored import MAX_RANK
from fedcomp.codecs.lowrank import from_matrix, product, sides, to_matrix, truncated_svd
from fedcomp.entropy.bits import LARGEST_HALF, read_half, write_half
from fedcomp.entropy.columns import TOP, Tally
from fedcomp.layout import Layout, Tensor, Vector
from fedcomp.terms import MAX, Levels, Term, Values, peak

Ints = NDArray[np.int64]
Matrix = NDArray[np.float32]

_LONG, _SHORT, _VECTOR, _MATRIX = range(4)  # kinds of columns
_ZERO, _POINTWISE = range(2)  # modes; 1 + r stands for factors of rank r
_FEW = 4096  # so many values are coded like factors; above, with tables, by rows and columns
_SLOPES = (0.01, 0.1)  # lambda in squared steps a bit, at least and at most
_SHARE = 0.75  # lambda over the slope of `Cells`: at the slope itself, few values that matter would look not worth it
_LEAST_GAIN = 0.5  # squared steps, of a direction for each of its values that is not zero: those take about 5 bits
_RHO = 0.39
_SHIFT = 0.06  # rho is so much less between quiet neighbours, and so much more between busy ones
_ROUNDING = 1e-6  # of the energy, what float32 may be off by: never worse than sending zeros
_RIDGE = 1e-7  # of the mean square length of the factors: parallel ones must not end in a division by zero
_TRIES = 12  # most steps that are tried
_NEAR_ENOUGH = 0.02  # octaves that the bits may stay below those to aim at
_CLOSE = 1 / 24  # octaves between two steps that end the search: bits jump where a tensor changes its way
_SETTLED = 4  # so many tries choose rho, then it stays, lest the bits jump with it
_GUESS = 4.0  # octaves of bits that the ends of the search are thought to be off, until they have been tried


@register
@dataclass(frozen=True)
class LRQ(ContractiveCodec):
    """Matrices and convolutions as quantized thin factors: least bytes for the error on updates of such layers.

    Args:
        step: the step in units of the bucket's root mean square, above 0 to 1000. Larger: fewer bytes, more error.
        bits: instead of the step, the bits per value to aim at, above 0 to 12. The frame has about 12 bytes more, and
            5 bits for each tensor.
        rank: most columns of a factor, 1 to 64. Larger: less error at high rates, slower.
        rho: rounding offset, up to 0.5 (nearest). Smaller: more zeros. 0: 0.39, and chosen from the data for large
            tensors that are sent value by value.

    Near-ties depend on the machine's matrix product, so encoding (not decoding) may differ between platforms.

    >>> from fedcomp import Layout, Tensor
    >>> x = np.outer(np.sin(np.arange(200) / 9), np.cos(np.arange(100) / 9)).astype(np.float32).ravel()
    >>> codec, layout = LRQ(step=1.0), Layout((Tensor("w", (200, 100)),))
    >>> parts = codec.encode(x, layout, np.random.default_rng(0))
    >>> parts["columns"].size, bool(np.square(codec.decode(parts, layout) - x).mean() < 0.002)
    (300, True)
    """

    name: ClassVar[str] = "lrq"
    number: ClassVar[int] = 24

    step: float = 0.0
    bits: float = 0.0
    rank: int = 16
    rho: float = 0.0

    def __post_init__(self) -> None:
        check_step_or_bits(self.name, self.step, self.bits)
        _validate.integer(low=1, high=MAX_RANK, rank=self.rank)
        _validate.number(low=0, high=0.5, rho=self.rho)

    def _encode(self, x: Vector, layout: Layout, rng: np.random.Generator) -> Parts:
        if not x.any():
            return {"step": np.array(0)}
        exponent = int(np.frexp(peak(x))[1])
        x = np.ldexp(x, -exponent)  # to [-1, 1]; steps are scaled alike
        sources = [_Source.of(x[place.where], place, rng) for place in _places(layout, self.rank)]
        encoder = _Encoder(sources, Cells.of(x), exponent, self.rho)
        if self.step:
            chosen = encoder.at(max(self.step * root_mean_square(x), peak(x) / TOP))
        else:
            chosen = encoder.near(self.bits * x.size, peak(x) / TOP)
        return encoder.parts(chosen)

    def schema(self, layout: Layout) -> Schema:
        if not int((yield Count("step", LARGEST_HALF))):
            return
        places = _places(layout, self.rank)
        modes = (yield Symbols("modes", len(places), self.rank + 2)).tolist()
        large = [place for place, mode in zip(places, modes, strict=True) if place.is_large and mode == _POINTWISE]
        if large:
            top = int((yield Count("top", TOP)))
            yield Symbols("offsets", min(top, CLASSES), 256)
            inner = Layout(tuple(place.tensor for place in large))
            yield Symbols("q", inner.size, 2 * top + 1, matrix_shapes(inner))
        matrices = [matrix for place, mode in zip(places, modes, strict=True) for matrix in place.columns(mode)]
        yield Columns("columns", tuple(shape for shape, _ in matrices), tuple(kind for _, kind in matrices))

    def terms(self, parts: Parts, layout: Layout) -> Iterator[Term]:
        step = read_half(int(parts["step"]))
        if not step:
            return
        table = levels(step, parts) if "q" in parts else np.zeros(0, np.float32)
        start = first = 0
        for place, mode in zip(_places(layout, self.rank), parts["modes"].tolist(), strict=True):
            if mode == _POINTWISE and place.is_large:
                yield Levels(place.where, parts["q"][first : first + place.tensor.size], table)
                first += place.tensor.size
                continue
            columns = []
            for (rows, count), _ in place.columns(mode):
                columns.append(parts["columns"][start : start + rows * count].reshape(count, rows))
                start += rows * count
            if columns:
                yield place.term(columns, step)


# --- how tensors are sent --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Place:
    """A tensor with elements, and how it may be sent: as a matrix with its longer side upright, (long, short).

    Attributes:
        tensor, where: the tensor and its values.
        rank: the largest rank of factors that are at most half as large as the tensor, and allowed; 0: none.
        turned: whether its columns are the longer side.
    """

    tensor: Tensor
    where: slice
    rank: int
    turned: bool

    @property
    def is_large(self) -> bool:
        """Whether a coder with tables is worth its tables, and a loop over all values is not worth its time."""
        return self.tensor.size > _FEW

    def columns(self, mode: int) -> Iterator[tuple[tuple[int, int], int]]:
        """Shapes (rows, columns) and kinds of the matrices of integers that are coded as columns."""
        if mode > _POINTWISE and self.rank:
            rank, (short, long) = min(mode - 1, self.rank), sorted(sides(self.tensor))
            yield (long, rank), _LONG
            yield (short, rank), _SHORT
        elif mode == _POINTWISE and not self.is_large:
            yield self._shape(), _MATRIX if self.rank else _VECTOR

    def _shape(self) -> tuple[int, int]:
        if not self.rank:
            return self.tensor.size, 1
        short, long = sorted(sides(self.tensor))
        return long, short

    def upright(self, x: Vector) -> Matrix:
        """The values as a matrix (long, short); one column if there are no factors."""
        if not self.rank:
            return x[:, None]
        matrix = to_matrix(x, self.tensor)
        return np.ascontiguousarray(matrix.T) if self.turned else matrix

    def term(self, columns: list[NDArray[np.int32]], step: float) -> Term:
        """What the integers (columns, rows) of one matrix or of two factors stand for."""
        if len(columns) == 2:
            long, short = columns
            unit = (long / _lengths(long)[:, None]).astype(np.float32)
            scaled = _clipped(short * step)
            left, right = (scaled, unit) if self.turned else (unit, scaled)
            return product(left.T, right, self.tensor, self.where)
        values = _clipped(columns[0] * step)
        if not self.rank:
            return Values(self.where, values.ravel())
        return Values(self.where, from_matrix(values if self.turned else values.T, self.tensor))


@lru_cache(maxsize=64)
def _places(layout: Layout, rank: int) -> tuple[_Place, ...]:
    places = []
    for tensor, where in layout.slices():
        m, n = sides(tensor) if len(tensor.shape) > 1 and tensor.size else (0, 0)
        if tensor.size:
            places.append(_Place(tensor, where, min(rank, m * n // (2 * (m + n))) if m else 0, m < n))
    return tuple(places)


def _clipped(values: NDArray[Any]) -> Matrix:
    clipped: Matrix = np.clip(values, -MAX, MAX).astype(np.float32)
    return clipped


def _lengths(columns: NDArray[Any]) -> NDArray[np.float64]:
    """Length of each column (columns, rows); 1 for one of zeros, which only a forged frame has."""
    squares = np.square(columns, dtype=np.float64).sum(axis=1)  # exact, so the same on every machine
    lengths: NDArray[np.float64] = np.sqrt(np.maximum(squares, 1))
    return lengths


# --- the encoder's choices -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Source:
    """A tensor to send, its values scaled to [-1, 1].

    Attributes:
        place: how it may be sent.
        values: its values as they are stored.
        matrix: and as a matrix (long, short).
        energy: their sum of squares.
        strong: its strongest directions s_k u_k (rank, long); none if it may not be sent as factors.
        cells: histogram of its values, if it is large.
    """

    place: _Place
    values: Vector
    matrix: Matrix
    energy: float
    strong: Matrix
    cells: Cells | None

    @classmethod
    def of(cls, x: Vector, place: _Place, rng: np.random.Generator) -> "_Source":
        matrix = place.upright(x)
        strong = np.zeros((0, len(matrix)), np.float32)
        if place.rank and x.any():
            left, right = truncated_svd(matrix, place.rank, rng)
            strong = left.T * np.linalg.norm(right, axis=1)[:, None]
        energy = float(np.square(x, dtype=np.float64).sum())
        return cls(place, x, matrix, energy, strong, Cells.of(x) if place.is_large else None)

    def ways(self, step: float, rho: float) -> "Iterator[_Way]":
        """The ways to send it at a step."""
        yield _Way(_ZERO, self.energy)
        if self.cells:
            yield _with_tables(self.cells, step, rho)
        else:
            q = _round(self.matrix.T / np.float32(step), rho)
            if q.any():
                error = float(np.square(self.matrix.T - q * step).sum())
                yield _Way(_POINTWISE, error, 0.0, (q,), (_MATRIX if self.place.rank else _VECTOR,))
        if len(self.strong):
            yield from self._factors(step, rho)

    def has_tables(self, way: "_Way") -> bool:
        """Whether it is large, and sent value by value."""
        return self.place.is_large and way.mode == _POINTWISE

    def _factors(self, step: float, rho: float) -> "Iterator[_Way]":
        long = _round(self.strong / np.float32(step), rho)
        long = long[long.any(axis=1)]
        if not len(long):
            return
        lengths = _lengths(long)
        unit = long / lengths[:, None]  # (r, long)
        seen = unit.astype(np.float32) @ self.matrix  # (r, short)
        gram = unit @ unit.T
        fitted = np.linalg.solve(gram + _RIDGE * np.eye(len(gram)), seen)
        short = _round(fitted / step, rho)
        sent = np.count_nonzero(long, axis=1) + np.count_nonzero(short, axis=1)
        kept = np.square(short).sum(axis=1) > _LEAST_GAIN * sent  # what a direction gains, for what it costs
        long, short = long[kept], short[kept]
        if len(long):
            gain = 2 * step * float((seen[kept] * short).sum())
            spent = step**2 * float((gram[np.ix_(kept, kept)] * (short @ short.T)).sum())
            error = (1 + _ROUNDING) * self.energy - gain + spent
            yield _Way(1 + len(long), error, 0.0, (long, short), (_LONG, _SHORT))


def _round(t: NDArray[np.floating[Any]], rho: float) -> Ints:
    """sgn(t) floor(|t| + rho), at most 32767; rho is less or more by how many neighbours in the row are busy."""
    size = np.abs(t)
    busy = size > 1 - rho
    near = np.full(t.shape, rho - _SHIFT, np.float32)
    near[:, 1:] += np.float32(_SHIFT) * busy[:, :-1]
    near[:, :-1] += np.float32(_SHIFT) * busy[:, 1:]
    near += size
    np.minimum(near, TOP, out=near)
    rounded: Ints = np.copysign(np.floor(near, out=near), t).astype(np.int64)
    return rounded


@dataclass(frozen=True)
class _Way:
    """A way to send a tensor.

    Attributes:
        mode: that of the schema.
        error: its squared error.
        bits: what a coder with tables needs for it.
        columns, kinds: integers (columns, rows) that are coded as columns, and the kind of each matrix of them.
    """

    mode: int
    error: float
    bits: float = 0.0
    columns: tuple[Ints, ...] = ()
    kinds: tuple[int, ...] = ()

    @cached_property
    def tally(self) -> Tally:
        """What the columns cost."""
        return sum(map(Tally.of, self.columns, self.kinds), Tally.none())

    def cost(self, price: float, like: NDArray[np.float64]) -> float:
        """D + lambda R, columns at the prices of others that they are like."""
        bits = self.tally.bits_at(like) if self.columns else self.bits
        return self.error + price * bits


def _with_tables(cells: Cells, step: float, rho: float) -> _Way:
    """How a large tensor is sent value by value, as estimated from its histogram."""
    bits, error = cells.estimate(step, rho, False)
    return _Way(_POINTWISE, error * step**2 * cells.size, bits * cells.size)


@dataclass(frozen=True)
class _Attempt:
    """All tensors at one step, as the frame tells it: the way each is sent, and about what that costs.

    rho is that of the large tensors that are sent value by value; chosen for them, it is not that of the factors.
    """

    written: int
    rho: float
    ways: list[_Way]
    tally: Tally
    bits: float
    error: float


@dataclass(frozen=True)
class _Encoder:
    """The search for the step, and for the way of each tensor; steps are scaled by 2^-exponent, as the sources are."""

    sources: list[_Source]
    cells: Cells
    exponent: int
    rho: float

    def at(self, step: float) -> _Attempt:
        """At a given step, twice: the second time knowing what columns cost."""
        written = self._written(step)
        return self._attempt(written, self._attempt(written, Tally.none(), self.rho).tally, self.rho)

    def near(self, bits: float, least: float) -> _Attempt:
        """At the step that needs about so many bits, by false position: of all within, the least error."""
        low, high = np.log2(least), np.log2(max(peak(source.strong) for source in self.sources) + 1) + 1
        best = last = self._attempt(self._written(2.0**high), Tally.none(), self.rho)
        excess, lack = _GUESS, -_GUESS  # octaves of bits too many at the low end, too few at the high end
        for index in range(_TRIES):
            middle = low + np.clip(excess / (excess - lack), 0.1, 0.9) * (high - low)
            rho = last.rho if index >= _SETTLED else self.rho
            last = self._attempt(self._written(2.0**middle), last.tally, rho)
            off = np.log2(max(last.bits, 1e-3) / bits)
            if off > 0:
                low, excess = middle, off
            else:
                high, lack, best = middle, max(off, -_GUESS), min(best, last, key=lambda attempt: attempt.error)
            if -_NEAR_ENOUGH < off <= 0 or high - low < _CLOSE:
                break
        return best

    def _attempt(self, written: int, like: Tally, rho: float) -> _Attempt:
        """Columns may be like those of another attempt. With rho = 0 that of large tensors is chosen."""
        step = self._scaled(written)
        if not step:
            return _Attempt(0, 0.0, [], Tally.none(), 0.0, np.inf)
        prices, price = like.prices(), float(np.clip(_SHARE * self.cells.slope(step), *_SLOPES)) * step**2
        usual = self.rho or _RHO
        ways = [min(source.ways(step, usual), key=lambda way: way.cost(price, prices)) for source in self.sources]
        if any(source.has_tables(way) for source, way in zip(self.sources, ways, strict=True)):
            rho = rho or self.cells.best_rho(step)
            for index, source in enumerate(self.sources):
                if source.cells and source.has_tables(ways[index]):
                    ways[index] = _with_tables(source.cells, step, rho)
        tally = sum((way.tally for way in ways), Tally.none())
        bits = tally.bits() + sum(way.bits for way in ways)
        return _Attempt(written, rho, ways, tally, bits, sum(way.error for way in ways))

    def _written(self, step: float) -> int:
        return write_half(float(np.ldexp(step, self.exponent)))

    def _scaled(self, written: int) -> float:
        return float(np.ldexp(read_half(written), -self.exponent))

    def parts(self, chosen: _Attempt) -> Parts:
        """What is sent."""
        if not any(way.mode for way in chosen.ways):
            return {"step": np.array(0)}
        parts: Parts = {
            "step": np.array(chosen.written),
            "modes": np.array([way.mode for way in chosen.ways], np.uint8),
        }
        ways = zip(self.sources, chosen.ways, strict=True)
        large = [source.values for source, way in ways if source.has_tables(way)]
        if large:
            x, step = np.concatenate(large), np.float32(self._scaled(chosen.written))
            top = int(min(peak(x) / float(step) + chosen.rho, TOP))
            q, offsets = round_down(x, step, chosen.rho, top)
            parts |= {"top": np.array(top), "offsets": offsets, "q": q}
        columns = [columns.ravel() for way in chosen.ways for columns in way.columns]
        return {**parts, "columns": np.concatenate([np.zeros(0, np.int32), *columns]).astype(np.int32)}
