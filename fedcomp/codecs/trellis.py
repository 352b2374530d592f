"""Trellis-coded (dependent) quantization: two scalar quantizers take turns, and the encoder plans ahead.

    Q0(k) = 2 k delta     Q1(k) = (2 k - sgn k) delta     state <- T[state][|k| mod 2], Q1 in odd states, from state 0

Eight states as in the coding standard for neural networks (ISO/IEC 15938-17); the idea is trellis-coded quantization
(Marcellin and Fischer, IEEE Trans. Commun. 38, 1990). Together the quantizers have twice the levels of one, but an
index costs what it costs with one. Viterbi's algorithm finds the indices with the least

    sum of (x/delta - level)^2 + lambda * bits,    lambda = 0.7 (near the best at all rates)

where the bits come from each quantizer's statistics, learnt on a sample. As in ECSQ, there is one step for all tensors,
and each level is finally put at the mean of the values it stands for.

The vector is cut into `length` rows; a column is a path of its own through the trellis, from state 0. A decoder that
knows the state of a column knows the quantizer of this value and of the next, since the parity of this one decides
only what comes after. Hence the frame has two streams of indices for every two rows, one for each quantizer, and their
statistics are not mixed; mixing them would cost all that the trellis gains below 1.5 bits. Long columns gain most,
many streams cost bytes: `length` is chosen for the expected size of the frame.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from fedcomp.blocks import root_mean_square
from fedcomp.codec import ContractiveCodec, Count, Floats, Parts, Schema, Symbols, register, symbol_dtype
from fedcomp.codecs.ecsq import (
    MAX,
    TOP,
    Cells,
    check_step_or_bits,
    read_offsets,
    table_bits,
    write_offsets,
)
from fedcomp.layout import Layout, Vector
from fedcomp.terms import Term, Values

NEXT = np.array([[0, 2], [7, 5], [1, 3], [6, 4], [2, 0], [5, 7], [3, 1], [4, 6]], np.uint8)
"""The state after a state and the parity of its index. Both have the same quantizer."""

_ORDER = [0, 2, 3, 1, 4, 6, 7, 5]
_ENDS = [0, 1, 6, 7, 2, 3, 4, 5]
"""How the search orders states before and after a step. States i and i + 4 of _ORDER have the same quantizer, Q0 for
i < 2, and lead to the same two states: even parity of the first and odd parity of the second to _ENDS[i], odd parity of
the first and even parity of the second to _ENDS[i + 4]."""

_PLACE = np.array([_ENDS.index(state) for state in _ORDER])
# By the row of _ENDS (8) and whether it was reached from the second of its two states (2):
_CAME_FROM = np.array([_PLACE[row % 4 + 4 * second] for row in range(8) for second in range(2)])
_BRANCH = np.array([2 * (row % 4 > 1) + ((row > 3) ^ second) for row in range(8) for second in range(2)], np.uint8)

_TINY = float(np.finfo(np.float32).tiny)
_LAMBDA = 0.7
_KINDS = 3  # |k| = 1, 2 and all above have an offset for each quantizer
_PER_DELTA, _MOST_CELLS = 16, 1 << 16  # cells of magnitudes by which the search looks up its candidates
_LANES = 1024  # columns that the search takes at a time: their costs stay in the first-level cache
_SAMPLE = 1 << 16  # values that the statistics are learnt from
_ROUNDS = 6
_TRIES = 12
_MOST_ROWS = 64
_STREAM_BITS = 160  # what a stream costs beside its symbols


@register
@dataclass(frozen=True)
class Trellis(ContractiveCodec):
    """Entropy-coded quantization with an eight-state trellis: slow, but fewer bytes than ECSQ on unstructured data.

    From some ten thousand values on. Where rows and columns differ much, as in the large layers of small models, the
    contexts that ECSQ's symbols are coded in save more than the trellis, which cannot use them.

    Args:
        step: spacing of the levels of either quantizer in units of the bucket's root mean square, above 0 to 1000.
            Larger: fewer bytes, more error.
        bits: instead of the step, the bits per value to aim at, above 0 to 12 (estimated on a sample).

    >>> from fedcomp import Layout
    >>> x = np.array([0.0, -4.0, 0.0, 4.0, 8.0, 0.0], np.float32)
    >>> codec, layout = Trellis(step=0.1), Layout.vector(6)
    >>> codec.decode(codec.encode(x, layout, np.random.default_rng(0)), layout).round().tolist()
    [0.0, -4.0, 0.0, 4.0, 8.0, 0.0]
    """

    name: ClassVar[str] = "trellis"
    number: ClassVar[int] = 23

    step: float = 0.0
    bits: float = 0.0

    def __post_init__(self) -> None:
        check_step_or_bits(self.name, self.step, self.bits)

    def _encode(self, x: Vector, layout: Layout, rng: np.random.Generator) -> Parts:
        size = np.abs(x)
        peak = float(size.max(initial=0))
        if peak == 0:
            return _nothing()
        delta, grid, model = self._choose(x, size, peak)
        size /= delta
        branch, k = _search_all(grid.fold(size), model)
        branch, k = branch.reshape(-1)[: x.size], k.reshape(-1)[: x.size]
        offsets = _offsets(size, branch >> 1, k)
        top = int(k.max())
        if top == 0 or not _helps(size, branch >> 1, k, offsets):
            return _nothing()
        np.negative(k, out=k, where=x < 0)
        k += top
        parts: Parts = {
            "delta": np.array([delta]),
            "top": np.array(top),
            "length": np.array(grid.length),
            "offsets": offsets[: 2 * min(top, _KINDS)],
        }
        symbols = k.astype(symbol_dtype(2 * top + 1))
        for index, where in grid.pairs():
            for quantizer in range(2):
                parts[f"{index}.{quantizer}"] = symbols[where][branch[where] >> 1 == quantizer]
        return parts

    def _choose(self, x: Vector, size: Vector, peak: float) -> tuple[np.float32, "_Grid", "_Model"]:
        """delta, half a quantizer's spacing, and for this delta the rows and what the search needs to know."""
        least = max(peak / (2 * TOP - 8), _TINY)  # indices fit, and no product is rounded as a subnormal
        if self.step:
            delta = _between(self.step / 2 * root_mean_square(size), least)
            model = _learn(_sample(_Grid(size.size, _MOST_ROWS), size) / delta, peak / float(delta))
            grid = _Grid.for_bits(size.size, model.rate)
            return delta, grid, _learn(_sample(grid, size) / delta, peak / float(delta))
        grid = _Grid.for_bits(size.size, self.bits)
        sample = _sample(grid, size)
        plain = np.log2(Cells.of(x).step_for(self.bits, 0.4, False) / 2)
        # The trellis needs about the same delta for many bits and half of it for a tenth of a bit.
        low, high, most, fewest = plain - 2.5, plain + 0.5, self.bits + 2.5, max(self.bits - 0.5, 0.0)
        for attempt in range(_TRIES):
            guess = (most - self.bits) / (most - fewest) if attempt % 2 == 0 and most > fewest else 0.5
            middle = low + min(max(guess, 0.1), 0.9) * (high - low)
            delta = _between(float(2.0**middle), least)
            model = _learn(sample / delta, peak / float(delta))
            if abs(model.rate - self.bits) < 0.01 * self.bits:
                break
            if model.rate > self.bits:
                low, most = middle, model.rate
            else:
                high, fewest = middle, model.rate
        return delta, grid, model

    def schema(self, layout: Layout) -> Schema:
        yield Floats("delta", 1, low=0.0)
        top = int((yield Count("top", TOP)))
        if top == 0:
            return
        length = int((yield Count("length", _MOST_ROWS)))
        yield Symbols("offsets", 2 * min(top, _KINDS), 256)
        grid = _Grid(layout.size, max(length, 1))
        state = np.zeros(grid.columns, np.uint8)
        for index, where in grid.pairs():
            quantizer = grid.quantizers(state, where)
            odd = np.empty(quantizer.size, np.uint8)
            for number in range(2):
                here = np.flatnonzero(quantizer == number)
                symbols = yield Symbols(f"{index}.{number}", here.size, 2 * top + 1)
                odd[here] = (symbols + top) & 1
            state = grid.advance(state, odd)

    def terms(self, parts: Parts, layout: Layout) -> Iterator[Term]:
        top = int(parts["top"])
        if top == 0:
            return
        levels = _decoded(top, parts["offsets"], float(parts["delta"][0]))
        grid = _Grid(layout.size, max(int(parts["length"]), 1))
        state = np.zeros(grid.columns, np.uint8)
        for index, where in grid.pairs():
            quantizer = grid.quantizers(state, where)
            odd = np.empty(quantizer.size, np.uint8)
            values = np.empty(quantizer.size, np.float32)
            for number in range(2):
                here = np.flatnonzero(quantizer == number)
                symbols = parts[f"{index}.{number}"]
                odd[here] = (symbols + top) & 1
                values[here] = levels[number][symbols]
            state = grid.advance(state, odd)
            yield Values(where, values)


def _nothing() -> Parts:
    return {"delta": np.zeros(1, np.float32), "top": np.array(0)}


def _between(delta: float, least: float) -> np.float32:
    return np.float32(min(max(delta, least), MAX))


# --- the format: which value has which quantizer, and which index means what -----------------------------------------


@dataclass(frozen=True)
class _Grid:
    """A vector of `size` values as `length` rows, the last of which may end early; each column is a path."""

    size: int
    length: int

    @classmethod
    def for_bits(cls, size: int, rate: float) -> "_Grid":
        """Rows for a frame of `rate` bits per value: a column's start costs about `rate` bits, a row a stream."""
        best = int((size * rate / _STREAM_BITS) ** 0.5)
        return cls(size, min(best, _MOST_ROWS) if best >= 4 else 1)

    @property
    def columns(self) -> int:
        return max(-(-self.size // self.length), 1)

    def fold(self, values: Vector) -> NDArray[np.float32]:
        """The values as rows, filled up with zeros."""
        columns = self.columns
        padded = np.zeros(-(-self.size // columns) * columns, np.float32)
        padded[: self.size] = values
        return padded.reshape(-1, columns)

    def pairs(self) -> Iterator[tuple[int, slice]]:
        """Two rows at a time: number and place of the values."""
        step = 2 * self.columns
        for index, start in enumerate(range(0, self.size, step)):
            yield index, slice(start, min(start + step, self.size))

    def quantizers(self, state: NDArray[np.uint8], where: slice) -> NDArray[np.uint8]:
        """Quantizer of each value of two rows, given the states (columns,) at the first of them."""
        both = np.concatenate([state & 1, NEXT[:, 0][state] & 1])
        return both[: where.stop - where.start]

    def advance(self, state: NDArray[np.uint8], odd: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """States after two rows, given the parities of their indices."""
        for start in range(0, odd.size, state.size):
            row = odd[start : start + state.size]
            state = NEXT[state[: row.size], row]
        return state


def _decoded(top: int, offsets: NDArray[Any], delta: float) -> list[Vector]:
    """Decoded values of the symbols (2 top + 1,) of each quantizer."""
    told = 2 * read_offsets(offsets)
    out = []
    for quantizer in range(2):
        size = np.minimum(_levels(top, quantizer, told)[1:] * delta, MAX)
        out.append(np.concatenate([-size[::-1], [0], size]).astype(np.float32))
    return out


def _levels(top: int, quantizer: int, offsets: NDArray[np.float64]) -> NDArray[np.float64]:
    """Levels (top + 1,) in units of delta of the indices from 0 on."""
    k = np.arange(1, top + 1)
    kind = np.minimum(k, _KINDS) - 1
    return np.append(0.0, 2 * k - quantizer + offsets[2 * kind + quantizer])


def _offsets(size: Vector, quantizer: NDArray[Any], k: NDArray[np.int32]) -> NDArray[np.uint8]:
    """Mean distance of the values from their levels by |k| = 1, 2, >= 3 and quantizer, as bytes, in units 2 delta."""
    kind = 2 * np.minimum(k, _KINDS) + quantizer
    count = np.bincount(kind, minlength=2 * _KINDS + 2)
    excess = np.bincount(kind, size - (2 * k - quantizer), 2 * _KINDS + 2)
    return write_offsets((excess / np.maximum(count, 1))[2:] / 2)


def _helps(size: Vector, quantizer: NDArray[Any], k: NDArray[np.int32], offsets: NDArray[np.uint8]) -> bool:
    """Whether the indices are nearer to the values than zeros are."""
    told, better = 2 * read_offsets(offsets), 0.0
    for number in range(2):
        here = np.flatnonzero((quantizer == number) & (k > 0))
        if here.size:
            level = _levels(int(k.max()), number, told)[k[here]]
            better += float((level * (2 * size[here] - level)).sum())
    return better >= 0


# --- the search ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Model:
    """By branch (quantizer and parity, 4) and cell of the magnitudes: the best index, its level and its price.

    `per_delta` is the number of cells in a delta, `rate` the estimated number of bits per value.
    """

    k: NDArray[np.int32]
    level: NDArray[np.float32]
    price: NDArray[np.float32]
    per_delta: float
    rate: float


def _sample(grid: _Grid, size: Vector) -> NDArray[np.float32]:
    """Some columns (rows, columns) of the vector."""
    wanted = max(_SAMPLE // grid.length, 1)
    return np.ascontiguousarray(grid.fold(size)[:, :: -(-grid.columns // wanted)])


def _learn(sample: NDArray[np.float32], peak: float) -> _Model:
    """What the search needs to know, for magnitudes up to `peak` and a sample of them, in units of delta."""
    k = (sample / 2 + 0.25).astype(np.int32)  # a start: either quantizer by itself, with a wide cell of zero
    counts = [np.bincount(k.ravel()), np.bincount((sample / 2 + 0.65).astype(np.int32).ravel())]
    for _ in range(_ROUNDS):
        model = _model(counts, peak, sample.size)
        branch, k = _search(sample, model)
        counts = [np.bincount(k[branch >> 1 == quantizer]) for quantizer in range(2)]
    return _model(counts, peak, sample.size)


def _model(counts: list[NDArray[np.int64]], peak: float, size: int) -> _Model:
    top = int(peak / 2) + 4
    per_delta = float(min(_PER_DELTA, _MOST_CELLS / peak))
    middle = np.arange(0.5, int(peak * per_delta) + 2, dtype=np.float64) / per_delta
    found, total = [], 0.0
    for quantizer in range(2):
        count = np.zeros(top + 1)
        count[: counts[quantizer].size] = counts[quantizer]
        likely = count + 0.5 / np.square(1.0 + np.arange(top + 1))
        bits = np.log2(likely.sum() / likely)
        bits[1:] += 1  # the sign
        total += float(count @ bits) + table_bits(int((count > 0).sum()), counts[quantizer].size, size)
        level = _levels(top, quantizer, np.zeros(2 * _KINDS))
        for parity in range(2):
            found.append(_candidates(level[parity::2], _LAMBDA * bits[parity::2], parity, middle))
    k, levels, prices = (np.stack(part) for part in zip(*found, strict=True))
    price = prices.astype(np.float32)
    return _Model(k.astype(np.int32), levels.astype(np.float32), price, per_delta, total / size)


def _candidates(
    level: NDArray[np.float64], price: NDArray[np.float64], parity: int, middle: NDArray[np.float64]
) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.float64]]:
    """The cheapest index of a parity for each cell, its level and its price."""
    border = (level[1:] + level[:-1]) / 2 + np.diff(price) / (2 * np.diff(level))
    best = np.searchsorted(np.maximum.accumulate(border), middle, side="right")
    return 2 * best + parity, level[best], price[best]


def _search_all(rows: NDArray[np.float32], model: _Model) -> tuple[NDArray[np.uint8], NDArray[np.int32]]:
    """Branch and |k| of each value (rows, columns), for magnitudes in units of delta."""
    branch, k = np.empty(rows.shape, np.uint8), np.empty(rows.shape, np.int32)
    for first in range(0, rows.shape[1], _LANES):
        lanes = slice(first, first + _LANES)
        branch[:, lanes], k[:, lanes] = _search(np.ascontiguousarray(rows[:, lanes]), model)
    return branch, k


def _search(rows: NDArray[np.float32], model: _Model) -> tuple[NDArray[np.uint8], NDArray[np.int32]]:
    """The cheapest path of each column by Viterbi's algorithm: branches and |k|, both (rows, columns)."""
    length, lanes = rows.shape
    cell = (rows * np.float32(model.per_delta)).astype(np.intp)
    seconds = np.empty((length, 8, lanes), np.bool_)
    cost = np.full((8, lanes), 1e30, np.float32)  # in _ORDER
    cost[0] = 0
    end, other = np.empty_like(cost), np.empty_like(cost)  # in _ENDS, coming from the first and from the second
    by_first, by_second = end.reshape(2, 2, 2, lanes), other.reshape(2, 2, 2, lanes)
    for row in range(length):
        branch = model.level[:, cell[row]]  # (4, lanes)
        branch -= rows[row]
        branch *= branch
        branch += model.price[:, cell[row]]
        even, odd = branch[0::2, None], branch[1::2, None]  # (2 quantizers, 1, lanes)
        first, second = cost[:4].reshape(2, 2, lanes), cost[4:].reshape(2, 2, lanes)
        np.add(first, even, out=by_first[0])
        np.add(first, odd, out=by_first[1])
        np.add(second, odd, out=by_second[0])
        np.add(second, even, out=by_second[1])
        np.less(other, end, out=seconds[row])
        np.minimum(end, other, out=end)
        np.take(end, _PLACE, axis=0, out=cost, mode="clip")
    branches = _trace_back(seconds, end.argmin(axis=0))
    return branches, model.k.reshape(-1)[branches * np.intp(model.k.shape[1]) + cell]


def _trace_back(seconds: NDArray[np.bool_], last: NDArray[np.intp]) -> NDArray[np.uint8]:
    """Branches (rows, columns) of the paths that end in the given rows of _ENDS (columns,)."""
    length, _, lanes = seconds.shape
    branches = np.empty((length, lanes), np.uint8)
    lane = np.arange(lanes)
    for row in reversed(range(length)):
        came = 2 * last + seconds[row].reshape(-1)[last * lanes + lane]
        branches[row] = _BRANCH[came]
        last = _CAME_FROM[came]
    return branches
