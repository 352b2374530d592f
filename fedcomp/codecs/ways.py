"""Ways to send tensors with one uniform step: as low-rank factors, value by value, or not at all; see `lrq`.

What is here chooses: at which step, and which way for each tensor. It prices ways by estimates that take well under a
tenth of the time of coding them, and codes only what it has chosen.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcomp.codec import Parts
from fedcomp.codecs.ecsq import Cells, round_down
from fedcomp.codecs.lowrank import from_matrix, product, sides, to_matrix, truncated_svd
from fedcomp.entropy.bits import read_half, write_half
from fedcomp.entropy.columns import TOP, Tally
from fedcomp.layout import Layout, Tensor, Vector
from fedcomp.terms import MAX, Term, Values, peak

Ints = NDArray[np.int64]
Matrix = NDArray[np.float32]

_LONG, _SHORT, _VECTOR, _MATRIX = range(4)  # kinds of columns
_ZERO, POINTWISE = range(2)  # modes; 1 + r stands for factors of rank r
_FEW = 4096  # so many values are coded like factors; above, with tables, by rows and columns
_SLOPES = (0.01, 0.1)  # lambda in squared steps a bit, at least and at most
_SHARE = 0.75  # lambda over the slope of `Cells`: at the slope itself, few values that matter would look not worth it
_CHEAP = 0.3  # price of a bit where there is room
_FACTOR_VALUES = 1 << 16  # of a tensor, at most: they are coded in a loop over all of them
_GAINS = (0.5, 0.15)  # squared steps that a direction must gain for each value that is not zero: they take 5 bits
_RHO = 0.39
_SHIFT = 0.06  # rho is so much less between quiet neighbours, and so much more between busy ones
_ROUNDING = 1e-6  # of the energy, what float32 may be off by: never worse than sending zeros
_RIDGE = 1e-7  # of the mean square length of the factors: parallel ones must not end in a division by zero
_REST = 0.01  # of the squared step, a value's error from which on what factors leave may be worth to be sent
_TRIES = 12  # most steps that are tried
_NEAR_ENOUGH = 0.02  # octaves that the bits may stay below those to aim at
_CLOSE = 1 / 24  # octaves between two steps that end the search: bits jump where a tensor changes its way
_SETTLED = 4  # so many tries choose rho, then it stays, lest the bits jump with it
_GRID = 32  # steps an octave
_CODINGS = 3  # times that the search starts anew with what coding has taught
_FIXED, _MODE = 40.0, 2.0  # about the bits of step and so on, and of a tensor's mode
_SLACK_SHARE, _SLACK = 0.02, 8  # of the room, and bytes, that may be left over
_WASTE_SHARE, _WASTE = 0.027, 15  # likewise, that are worth another search
_RICH = 1.5  # bits a value from which on what factors leave counts
_SMALL = 1 << 18  # values of a model that is worth the time of a second search
_FILLS = 4
_LEARNT = 64.0  # bits of large tensors that are worth learning from
_RHOS = (0.05, _RHO)  # rounding offsets to fill the room with, from the one that spends least
_FINER = (1, 4, 12)  # at steps so much smaller, one after the other while much is left
_GUESS = 4.0  # octaves of bits that the ends of the search are thought to be off, until they have been tried


# --- how tensors are sent --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
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

    def has_factors(self, mode: int) -> bool:
        """Whether the mode sends factors."""
        return mode > POINTWISE and self.rank > 0

    def has_table(self, mode: int, rest: bool) -> bool:
        """Whether values go through a coder with tables: those of the tensor, or of what factors leave of it."""
        return self.is_large and (mode == POINTWISE or (self.has_factors(mode) and rest))

    def columns(self, mode: int, rest: bool) -> Iterator[tuple[tuple[int, int], int]]:
        """Shapes (rows, columns) and kinds of the matrices of integers that are coded as columns."""
        if self.has_factors(mode):
            rank, (short, long) = min(mode - 1, self.rank), sorted(sides(self.tensor))
            yield (long, rank), _LONG
            yield (short, rank), _SHORT
        if not self.is_large and (mode == POINTWISE or (self.has_factors(mode) and rest)):
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

    def stored(self, matrix: Matrix) -> Vector:
        """Inverse of upright, the matrix given as (columns, rows)."""
        return from_matrix(matrix if self.turned else matrix.T, self.tensor) if self.rank else matrix.ravel()

    def term(self, columns: list[NDArray[np.int32]], step: float, rest: Vector | None = None) -> Term:
        """What the integers (columns, rows) of one matrix, of two factors or of both stand for.

        `rest`: what is added to factors, in the order in which values are stored.
        """
        if len(columns) == 1:
            return Values(self.where, self.stored(_clipped(columns[0] * step)))
        long, short, *more = columns
        unit = _unit(long)
        scaled = _clipped(short * step)
        left, right = (scaled, unit) if self.turned else (unit, scaled)
        term = product(left.T, right, self.tensor, self.where)
        if more:
            rest = self.stored(_clipped(more[0] * step))
        if rest is None:
            return term
        ((_, values),) = term.pieces()
        with np.errstate(over="ignore"):
            return Values(self.where, np.clip(values + rest, -MAX, MAX))


@lru_cache(maxsize=64)
def places(layout: Layout, rank: int) -> tuple[Place, ...]:
    found = []
    for tensor, where in layout.slices():
        m, n = sides(tensor) if len(tensor.shape) > 1 and tensor.size else (0, 0)
        if tensor.size:
            most = min(rank, m * n // (2 * (m + n)), max(1, _FACTOR_VALUES // (m + n))) if m else 0
            found.append(Place(tensor, where, most, m < n))
    return tuple(found)


def _clipped(values: NDArray[Any]) -> Matrix:
    clipped: Matrix = np.clip(values, -MAX, MAX).astype(np.float32)
    return clipped


def _lengths(columns: NDArray[Any]) -> NDArray[np.float64]:
    """Length of each column (columns, rows); 1 for one of zeros, which only a forged frame has."""
    squares = np.square(columns, dtype=np.float64).sum(axis=1)  # exact, so the same on every machine
    lengths: NDArray[np.float64] = np.sqrt(np.maximum(squares, 1))
    return lengths


def _unit(columns: NDArray[Any]) -> Matrix:
    """The columns (columns, rows), each divided by its length."""
    divided: Matrix = (columns / _lengths(columns)[:, None]).astype(np.float32)
    return divided


# --- the encoder's choices -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Source:
    """A tensor to send, its values scaled to [-1, 1].

    Attributes:
        place: how it may be sent.
        values: its values as they are stored.
        matrix: and as a matrix (long, short).
        energy: their sum of squares.
        strong: its strongest directions s_k u_k (rank, long); none if it may not be sent as factors.
        peaks: the largest magnitude in each of these.
        cells: histogram of its values, if it is large.
    """

    place: Place
    values: Vector
    matrix: Matrix
    energy: float
    strong: Matrix
    peaks: Vector
    cells: Cells | None

    @classmethod
    def of(cls, x: Vector, place: Place, rng: np.random.Generator) -> "Source":
        matrix = place.upright(x)
        strong = np.zeros((0, len(matrix)), np.float32)
        if place.rank and x.any():
            left, right = truncated_svd(matrix, place.rank, rng)
            strong = left.T * np.linalg.norm(right, axis=1)[:, None]
        energy = float(np.square(x, dtype=np.float64).sum())
        peaks = np.abs(strong).max(axis=1, initial=0)
        return cls(place, x, matrix, energy, strong, peaks, Cells.of(x) if place.is_large else None)

    def ways(self, step: float, rho: float, gain: float, rests: bool) -> "Iterator[Way]":
        """The ways to send it at a step, what factors leave only if it may be."""
        yield Way(_ZERO, self.energy)
        if self.cells:
            yield _with_tables(self.cells, step, rho)
        else:
            yield from self._by_value(Way(POINTWISE, 0.0), self.matrix.T, step, rho)
        if len(self.strong):
            for way in self._factors(step, rho, gain):
                yield way
                if rests and way.error > _REST * step**2 * self.values.size:
                    yield from self._with_rest(way, step, rho)

    def has_tables(self, way: "Way") -> bool:
        """Whether values go through a coder with tables."""
        return self.place.has_table(way.mode, way.rest)

    def rest(self, way: "Way", step: float) -> Matrix:
        """What the factors of a way leave of the matrix, as (columns, rows)."""
        long, short = way.columns[:2]
        return self.matrix.T - (short * step).astype(np.float32).T @ _unit(long)

    def _with_rest(self, way: "Way", step: float, rho: float) -> "Iterator[Way]":
        rest = self.rest(way, step)
        if self.cells:
            flat = _with_tables(Cells.of(np.ascontiguousarray(rest).reshape(-1)), step, rho)
            yield replace(way, rest=True, error=flat.error, bits=flat.bits)
            return
        yield from self._by_value(replace(way, rest=True), rest, step, rho)

    def _by_value(self, way: "Way", values: Matrix, step: float, rho: float) -> "Iterator[Way]":
        """The way with these values (columns, rows) as columns besides, if any is not rounded to zero."""
        q = _round(values / np.float32(step), rho)
        if q.any():
            error, kind = float(np.square(values - q * step).sum()), _MATRIX if self.place.rank else _VECTOR
            yield replace(way, error=error, columns=(*way.columns, q), kinds=(*way.kinds, kind))

    def tabled(self, way: "Way", step: float) -> Vector:
        """The values that go through a coder with tables."""
        return self.place.stored(self.rest(way, step)).astype(np.float32, copy=False) if way.rest else self.values

    def _factors(self, step: float, rho: float, gain: float) -> "Iterator[Way]":
        long = _round(self.strong[self.peaks >= (1 - rho - _SHIFT) * step] / np.float32(step), rho)
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
        kept = np.square(short).sum(axis=1) > gain * sent  # what a direction gains, for what it costs
        long, short = long[kept], short[kept]
        if len(long):
            gain = 2 * step * float((seen[kept] * short).sum())
            spent = step**2 * float((gram[np.ix_(kept, kept)] * (short @ short.T)).sum())
            error = (1 + _ROUNDING) * self.energy - gain + spent
            yield Way(1 + len(long), error, 0.0, (long, short), (_LONG, _SHORT))


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
class Way:
    """A way to send a tensor.

    Attributes:
        mode: that of the schema.
        error: its squared error.
        bits: what a coder with tables needs for it.
        columns, kinds: integers (columns, rows) that are coded as columns, and the kind of each matrix of them.
        rest: whether what factors leave is sent too, value by value.
    """

    mode: int
    error: float
    bits: float = 0.0
    columns: tuple[Ints, ...] = ()
    kinds: tuple[int, ...] = ()
    rest: bool = False

    @cached_property
    def tally(self) -> Tally:
        """What the columns cost."""
        return sum(map(Tally.of, self.columns, self.kinds), Tally.none())

    def cost(self, price: float, like: NDArray[np.float64]) -> float:
        """D + lambda R, columns at the prices of others that they are like."""
        bits = self.tally.bits_at(like) if self.columns else 0.0
        return self.error + price * (bits + self.bits)


def _with_tables(cells: Cells, step: float, rho: float) -> Way:
    """How a large tensor is sent value by value, as estimated from its histogram."""
    bits, error = cells.estimate(step, rho, False)
    return Way(POINTWISE, error * step**2 * cells.size, bits * cells.size)


@dataclass(frozen=True)
class Attempt:
    """All tensors at one step, as the frame tells it: the way each is sent, and about what that costs.

    rho is that of the large tensors that are sent value by value; chosen for them, it is not that of the factors.
    """

    written: int
    rho: float
    ways: list[Way]
    tally: Tally
    bits: float
    table_bits: float  # of them those of large tensors that are sent value by value
    error: float


@dataclass(frozen=True)
class Encoder:
    """The search for the step, and for the way of each tensor.

    Attributes:
        sources: the tensors, scaled by 2^-exponent so that the largest value is below 1; steps are scaled alike.
        cells: histogram of all values.
        peak: the largest magnitude.
        rho: rounding offset; 0: chosen.
        gain: what a direction must gain to be sent.
        price: what a bit is taken to cost, over what it should.
        rests: whether what factors leave may be sent too, value by value.
    """

    sources: list[Source]
    cells: Cells
    exponent: int
    peak: float
    rho: float
    gain: float = _GAINS[0]
    price: float = 1.0
    rests: bool = False

    @classmethod
    def of(cls, x: Vector, layout: Layout, rank: int, rho: float, rng: np.random.Generator) -> "Encoder":
        """For a vector (layout.size,) with a value other than 0."""
        exponent = int(np.frexp(peak(x))[1])
        x = np.ldexp(x, -exponent)
        sources = [Source.of(x[place.where], place, rng) for place in places(layout, rank)]
        return cls(sources, Cells.of(x), exponent, peak(x), rho)

    @property
    def least(self) -> float:
        """The smallest step at which all integers fit."""
        return self.peak / TOP

    @cached_property
    def largest(self) -> float:
        """A step at which nothing is sent."""
        return 2 * (max([self.peak, *(peak(source.peaks) for source in self.sources)]) + 1)

    def at(self, step: float) -> Attempt:
        """At a given step of the unscaled vector, twice: the second time knowing what columns cost."""
        step = min(max(float(np.ldexp(step, -self.exponent)), self.least), self.largest)
        return self.attempt(step, self.attempt(step, Tally.none(), self.rho).tally, self.rho)

    def near(self, bits: float) -> Attempt:
        """At the step that needs about so many bits, by false position: of all within, the least error."""
        low, high = np.log2(self.least), np.log2(self.largest)
        best = last = self.attempt(2.0**high, Tally.none(), self.rho)
        excess, lack = _GUESS, -_GUESS  # octaves of bits too many at the low end, too few at the high end
        for index in range(_TRIES):
            middle = low + np.clip(excess / (excess - lack), 0.1, 0.9) * (high - low)
            rho = last.rho if index >= _SETTLED else self.rho
            last = self.attempt(2.0**middle, last.tally, rho)
            off = np.log2(max(last.bits, 1e-3) / bits)
            if off > 0:
                low, excess = middle, off
            else:
                high, lack, best = middle, max(off, -_GUESS), min(best, last, key=lambda attempt: attempt.error)
            if -_NEAR_ENOUGH < off <= 0 or high - low < _CLOSE:
                break
        return best

    def within(self, room: int, measure: Callable[[Parts], int]) -> Parts:
        """Parts that take at most `room` bytes, which must be enough for none; of all that were tried the least error.

        Args:
            measure: tells how many bytes parts take, by coding them.

        Steps are halved from one at which nothing is sent until the estimate exceeds the room, and the last octave is
        bisected: which steps are tried does not hang on the room before the paths part, so more room never means a
        larger step. What the estimate gets wrong for large tensors is measured and corrected. The room that is left
        then is filled at the next smaller step, by rounding fewer values up there. Where much is left even so, since
        the length jumps there, ways that pay less may be taken, and what factors leave be sent; the latter also at high
        rates.
        """
        best = _Fit(self, room, measure).run()
        if best.wasteful:
            eager = replace(self, gain=_GAINS[1], price=_CHEAP)
            best = min(best, _Fit(eager, room, measure).run(), key=lambda fit: fit.error)
        size = sum(source.values.size for source in self.sources)
        if best.wasteful or (8 * room > _RICH * size and size <= _SMALL):
            best = min(best, _Fit(replace(self, rests=True), room, measure).run(), key=lambda fit: fit.error)
        return best.parts

    def attempt(self, step: float, like: Tally, rho: float) -> Attempt:
        """At about this step. Columns may be like those of another attempt. rho = 0: large tensors choose theirs."""
        written = write_half(float(np.ldexp(step, self.exponent)))
        step = self.scaled(written)
        if not step:
            return Attempt(0, 0.0, [], Tally.none(), 0.0, 0.0, np.inf)
        prices, slope = like.prices(), float(np.clip(_SHARE * self.cells.slope(step), *_SLOPES))
        price, usual = self.price * slope * step**2, self.rho or _RHO
        ways = [
            min(source.ways(step, usual, self.gain, self.rests), key=lambda way: way.cost(price, prices))
            for source in self.sources
        ]
        if any(source.has_tables(way) for source, way in zip(self.sources, ways, strict=True)):
            rho = rho or self.cells.best_rho(step)
            for index, source in enumerate(self.sources):
                if source.cells and source.has_tables(ways[index]) and not ways[index].rest:
                    ways[index] = _with_tables(source.cells, step, rho)
        tally = sum((way.tally for way in ways), Tally.none())
        table_bits = sum(way.bits for way in ways)
        return Attempt(written, rho, ways, tally, tally.bits() + table_bits, table_bits, sum(w.error for w in ways))

    def scaled(self, written: int) -> float:
        """The step as it is scaled here."""
        return float(np.ldexp(read_half(written), -self.exponent))

    def parts(self, chosen: Attempt) -> Parts:
        """What is sent."""
        if not any(way.mode for way in chosen.ways):
            return {"step": np.array(0)}
        parts: Parts = {
            "step": np.array(chosen.written),
            "modes": np.array([way.mode for way in chosen.ways], np.uint8),
        }
        if any(way.rest for way in chosen.ways):
            parts["rest"] = np.array([way.rest for way in chosen.ways if way.mode > POINTWISE], np.uint8)
        ways, scale = zip(self.sources, chosen.ways, strict=True), self.scaled(chosen.written)
        large = [source.tabled(way, scale) for source, way in ways if source.has_tables(way)]
        if large:
            x, step = np.concatenate(large), np.float32(scale)
            top = int(min(peak(x) / float(step) + chosen.rho, TOP))
            q, offsets = round_down(x, step, chosen.rho, top)
            parts |= {"top": np.array(top), "offsets": offsets, "q": q}
        columns = [columns.ravel() for way in chosen.ways for columns in way.columns]
        return {**parts, "columns": np.concatenate([np.zeros(0, np.int32), *columns]).astype(np.int32)}


class _Fit:
    """The search of `Encoder.within`. Steps are numbered, a larger number being a smaller step.

    Attributes:
        parts, attempt, error: the best that was found; at first, to send nothing.
        slack: bytes that it leaves of the room; below 0: nothing that was coded fits.
    """

    def __init__(self, encoder: Encoder, room: int, measure: Callable[[Parts], int]) -> None:
        self._encoder, self._room, self._measure = encoder, room, measure
        self._most = math.floor(_GRID * math.log2(encoder.largest / encoder.least))
        self._attempts: dict[int, Attempt] = {}
        self._fixed = _FIXED + _MODE * len(encoder.sources)
        self._tables = 1.0  # bits of large tensors over their estimate
        self.parts: Parts = {"step": np.array(0)}
        self.attempt = Attempt(0, 0.0, [], Tally.none(), 0.0, 0.0, 0.0)
        self.error = sum(source.energy for source in encoder.sources)
        self.slack = -1

    @property
    def tolerated(self) -> float:
        """Bytes that may be left over."""
        return max(_SLACK_SHARE * self._room, _SLACK)

    @property
    def wasteful(self) -> bool:
        """Whether too much is left over, or nothing fits."""
        return not 0 <= self.slack <= max(_WASTE_SHARE * self._room, _WASTE)

    def run(self) -> "_Fit":
        """Search, and return itself."""
        number = None
        for _ in range(_CODINGS):
            number, before = self._largest_within(), number
            if number == before:
                break
            self._code(self._at(number))
            if 0 <= self.slack <= self.tolerated:
                return self
        assert number is not None
        for finer in _FINER:
            if number + finer <= self._most and (finer == 1 or self.wasteful):
                self._fill(number + finer)
        step = 1
        while self.slack < 0 and number > 0:  # estimates that are off: nothing fits yet
            number, step = max(number - step, 0), 2 * step
            self._code(self._at(number))
        return self

    def _at(self, number: int) -> Attempt:
        if number not in self._attempts:
            coarser = [n for n in self._attempts if n < number]
            like = self._attempts[max(coarser)].tally if coarser else Tally.none()
            self._attempts[number] = self._encoder.attempt(
                self._encoder.largest * 2.0 ** (-number / _GRID), like, self._encoder.rho
            )
        return self._attempts[number]

    def _fits(self, attempt: Attempt) -> bool:
        bits = self._fixed + attempt.bits + (self._tables - 1) * attempt.table_bits
        return bits <= 8 * self._room

    def _largest_within(self) -> int:
        """The largest number, to the grid, that is estimated to fit: by octaves, then by bisection."""
        low, high = 0, min(_GRID, self._most)
        while self._fits(self._at(high)):
            if high == self._most:
                return high
            low, high = high, min(high + _GRID, self._most)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._fits(self._at(middle)) else (low, middle)
        return low

    def _code(self, attempt: Attempt) -> None:
        """Measure what the attempt takes, learn from it, and keep it if it fits and is better."""
        parts = self._encoder.parts(attempt)
        size = self._measure(parts)
        if attempt.table_bits > _LEARNT:
            rest = self._fixed + attempt.bits - attempt.table_bits
            self._tables = min(max((8 * size - rest) / attempt.table_bits, 0.25), 2.0)
        else:
            self._fixed = 8 * size - attempt.bits
        if size <= self._room and (attempt.error < self.error or self.slack < 0):
            self.parts, self.attempt, self.error, self.slack = parts, attempt, attempt.error, self._room - size

    def _fill(self, number: int) -> None:
        """At a step that is estimated not to fit, bisect the rounding offset until it does."""
        usual, fitting = self._at(number), None
        (low, high), step = _RHOS, self._encoder.scaled(self._at(number).written)
        for _ in range(_FILLS):
            middle = (low + high) / 2
            attempt = replace(self._encoder, rho=middle).attempt(step, usual.tally, middle)
            if self._fits(attempt):
                low = middle
                fitting = attempt if fitting is None or attempt.error < fitting.error else fitting
            else:
                high = middle
        if fitting is not None:
            self._code(fitting)
