"""Terms: what a codec contributes to a sum, in a closed vocabulary that any device can work on.

A codec takes its parts apart into terms; the decoded vector is zero wherever no term names a place, and none is named
twice. How a term is added is not the codec's affair: here it is done with numpy on one core, in pieces that stay in
its cache, and `fedcomp.device` does it elsewhere.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fedcomp.blocks import CHUNK, spans
from fedcomp.entropy import SparseSymbols
from fedcomp.layout import Layout, Vector

Index: TypeAlias = slice | NDArray[np.int64]
"""Where values go: a slice with both ends, or distinct positions."""

Sum: TypeAlias = NDArray[np.float32] | NDArray[np.float64]
Floats: TypeAlias = NDArray[np.floating[Any]]

MAX = float(np.finfo(np.float32).max)
_PIECE = 2 * CHUNK  # values that are added at a time: a few passes over few buffers
_SCAN = 8 * CHUNK
_SPARSE = 16  # symbols are picked one by one if at most one in so many differs from that of zero


@dataclass(frozen=True)
class Values:
    """x[where] = values, float32 (n,)."""

    where: Index
    values: Vector

    def peak(self) -> float:
        """The largest magnitude."""
        return peak(self.values)

    def pieces(self) -> Iterator[tuple[Index, Vector]]:
        """Where values go, and the values."""
        yield self.where, self.values


@dataclass(frozen=True)
class Levels:
    """x[where] = table[q]: symbols (n,) of uint8 or uint16 that name entries of a small float32 table.

    With `even` the table is an arithmetic progression up to rounding, which sums in float32 may make use of.
    """

    where: Index
    q: NDArray[np.uint8] | NDArray[np.uint16]
    table: Vector
    even: bool = False

    def peak(self) -> float:
        """The largest magnitude in the table, used or not."""
        return peak(self.table)

    def pieces(self) -> Iterator[tuple[Index, Vector]]:
        """Where values go, and the values, a chunk at a time."""
        for start in range(0, self.q.size, CHUNK):
            part = slice(start, min(start + CHUNK, self.q.size))
            yield within(self.where, part), self.table.take(self.q[part], mode="clip")


@dataclass(frozen=True)
class Product:
    """x[where] = left @ right, a matrix of (outputs, height) x (inputs, width) stored as (outputs, inputs, h, w).

    left is (outputs height, r), right (r, inputs width), both float32; for plain matrices height and width are 1.
    No sum of products in it may pass float32's limit, see `peak`.
    """

    where: slice
    left: NDArray[np.float32]
    right: NDArray[np.float32]
    split: tuple[int, int, int, int]

    def peak(self) -> float:
        """What no magnitude in it exceeds."""
        return peak(self.left) * peak(self.right) * len(self.right)

    def pieces(self) -> Iterator[tuple[Index, Vector]]:
        """Where values go, and the values."""
        yield self.where, as_stored(self.left @ self.right, self.split)


def as_stored(matrix: NDArray[Any], split: tuple[int, int, int, int]) -> NDArray[Any]:
    """The elements of a matrix of (outputs, height) x (inputs, width) in the order (outputs, inputs, height, width)."""
    return matrix.reshape(split).transpose(0, 2, 1, 3).reshape(-1)


Term: TypeAlias = Values | Levels | Product


def peak(values: Floats) -> float:
    """Largest magnitude of an array of any shape, 0 if it is empty."""
    return float(max(values.max(), -values.min())) if values.size else 0.0


def within(where: Index, part: slice) -> Index:
    """The places of a part of the values that go to `where`."""
    if isinstance(where, slice):
        return slice(where.start + part.start, where.start + part.stop)
    return where[part]


def scaled(
    q: NDArray[np.uint8] | NDArray[np.uint16],
    levels: Vector,
    scale: Vector,
    layout: Layout,
    block: int,
    *,
    even: bool = False,
) -> Iterator[Term]:
    """The terms of levels[q] times a scale for each block of the layout, clipped to float32's range."""
    for values, blocks in tensors(layout) if block == 0 else spans(layout, block):
        with np.errstate(over="ignore"):
            if block == 0:
                yield Levels(values, q[values], np.clip(levels * scale[blocks], -MAX, MAX), even)
            else:
                rows = levels[q[values].reshape(blocks.stop - blocks.start, -1)] * scale[blocks, None]
                yield Values(values, np.clip(rows, -MAX, MAX, out=rows).ravel())


def scatter(terms: Iterable[Term], positions: NDArray[np.int64]) -> Iterator[Term]:
    """The terms of a vector (positions.size,), moved to these distinct positions of a larger one."""
    for term in terms:
        if isinstance(term, Levels):
            yield replace(term, where=positions[term.where])
        else:
            for where, values in term.pieces():
                yield Values(positions[where], values)


def tensors(layout: Layout) -> Iterator[tuple[slice, slice]]:
    """The values of each tensor with elements, and its place among them: blocks of whole tensors in one piece."""
    full = (where for tensor, where in layout.slices() if tensor.size)
    return ((where, slice(index, index + 1)) for index, where in enumerate(full))


def add(terms: Iterable[Term], out: Sum, weight: float) -> float:
    """Add weight times the vector that the terms stand for to `out`; returns what none of its magnitudes exceeds."""
    bound = 0.0
    for term in terms:
        if isinstance(term, Levels):
            bound = max(bound, height := term.peak())
            if height:
                _add_levels(term, out, weight)
        else:
            for where, values in term.pieces():
                bound = max(bound, _add_values(where, values, out, weight))
    return bound


def _add_values(where: Index, values: Vector, out: NDArray[Any], weight: float) -> float:
    bound, scale = 0.0, out.dtype.type(weight)
    for start in range(0, values.size, _PIECE):
        part = slice(start, min(start + _PIECE, values.size))
        bound = max(bound, peak(values[part]))
        out[within(where, part)] += values[part].astype(out.dtype, copy=False) * scale
    return bound


def _add_levels(term: Levels, out: NDArray[Any], weight: float) -> None:
    table = term.table.astype(out.dtype) * out.dtype.type(weight)
    add_dense = _dense_way(term, table, out)
    zero = np.flatnonzero(term.table == 0)
    sparse = isinstance(term.where, slice) and zero.size > 0
    if sparse and isinstance(term.q, SparseSymbols) and term.q.places is not None and not table[term.q.common]:
        out[term.where][term.q.places] += table[term.q[term.q.places]]
        return
    for start in range(0, term.q.size, _SCAN):
        part = slice(start, min(start + _SCAN, term.q.size))
        q, where = term.q[part], within(term.where, part)
        places = _others(q, int(zero[0])) if sparse else None
        if places is None:
            add_dense(q, where)
        else:
            out[where][places] += table[q[places]]


def _others(q: NDArray[Any], zero: int) -> NDArray[np.intp] | None:
    """Places of the symbols other than that of zero, if they are few; every 64th tells whether it is worth to look.

    Eight flags are looked at as one word first: numpy's search for single flags takes as long as adding everything.
    """
    sample = q[::64]
    if np.count_nonzero(sample != zero) * _SPARSE > 2 * sample.size:
        return None
    found = q != zero
    if np.count_nonzero(found) * _SPARSE > found.size:
        return None
    whole = found.size // 8
    words = np.flatnonzero(found[: 8 * whole].view(np.uint64))
    inside = np.flatnonzero(found[: 8 * whole].reshape(-1, 8)[words])
    tail = np.flatnonzero(found[8 * whole :]) + 8 * whole
    return np.concatenate([8 * words[inside >> 3] + (inside & 7), tail])


def _dense_way(term: Levels, table: NDArray[Any], out: NDArray[Any]) -> Callable[[NDArray[Any], Index], None]:
    """The quickest way to add table[q] to out[where] for chunks of a term's symbols."""
    if out.dtype == np.float32 and isinstance(term.where, slice):
        if table.size == 2:
            return partial(_add_pairs, table[_bits()], out)
        if term.even and table.size > 2:
            return partial(_add_even, table, out)
    return partial(_add_looked_up, table, out)


def _add_looked_up(table: NDArray[Any], out: NDArray[Any], q: NDArray[Any], where: Index) -> None:
    for start in range(0, q.size, _PIECE):
        chunk = slice(start, min(start + _PIECE, q.size))
        out[within(where, chunk)] += table.take(q[chunk], mode="clip")


def _add_even(table: NDArray[Any], out: NDArray[Any], q: NDArray[Any], where: slice) -> None:
    """Levels at equal distances are counted from the middle, so that symmetric ones keep their zero."""
    steps = table.size - 1
    step, offset = table[-1] / steps - table[0] / steps, table[-1] / 2 + table[0] / 2
    target = out[where]
    for start in range(0, q.size, _PIECE):
        sum_ = target[start : start + _PIECE]
        if table.size % 2 and table.size < 256:
            values = (q[start : start + _PIECE] - np.uint8(steps // 2)).view(np.int8).astype(np.float32)
        else:
            values = q[start : start + _PIECE].astype(np.float32)
            values -= np.float32(steps / 2)
        values *= step
        if offset:
            values += offset
        sum_ += values


@lru_cache(maxsize=1)
def _bits() -> NDArray[np.uint8]:
    """The eight bits of every byte (256, 8), least first."""
    return np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")


def _add_pairs(rows: NDArray[Any], out: NDArray[Any], q: NDArray[Any], where: slice) -> None:
    """Of two levels: eight symbols make a byte, which names eight values in a row of `rows` (256, 8)."""
    target, packed = out[where], np.packbits(q, bitorder="little")
    for start in range(0, packed.size, _PIECE // 8):
        sum_ = target[8 * start : 8 * start + _PIECE]
        sum_ += rows.take(packed[start : start + _PIECE // 8], axis=0, mode="clip").reshape(-1)[: sum_.size]
