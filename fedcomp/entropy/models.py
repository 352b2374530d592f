"""Static models: frequencies that sum to a power of two, and a short way to write them.

A table is two compositions (ways to write a total as a sum of parts): the gaps between used symbols sum to the
unused ones, and the frequencies above one sum to 2**precision - used. A composition is written by binary
interpolative coding (Moffat and Stuiver, "Binary interpolative coding for effective index compression", 2000):
the sum of the left half, in truncated binary below the sum of both, then each half the same way. Runs of zeros cost
nothing, and every table that can be read sums exactly.

Costs are integers in units of 2**-16 bit: encoders on different machines must come to the same choices.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedcomp.entropy.bits import BitReader, BitWriter
from fedcomp.errors import FrameError

MAX_PRECISION = 16
COST_SHIFT = 16
_LOG_BITS = 12
_LOG_TABLE = np.array(
    [round(math.log2(1 + i / (1 << _LOG_BITS)) * (1 << COST_SHIFT)) for i in range(1 << _LOG_BITS)], np.int64
)


@dataclass(frozen=True)
class Table:
    """A static model: `frequencies[i] / 2**precision` is the probability of `symbols[i]`."""

    symbols: NDArray[np.int64]  # (used,), increasing, used >= 2
    frequencies: NDArray[np.int64]  # (used,), each >= 1, together 2**precision
    precision: int

    def cost(self, counts: NDArray[np.int64]) -> int:
        """Ideal size, in 2**-16 bit, of a stream in which symbols[i] occurs counts[i] times."""
        return int((counts * ((self.precision << COST_SHIFT) - log2_fixed(self.frequencies))).sum())

    def widened(self, precision: int) -> "Table":
        """The same probabilities out of 2**precision, which is not below the table's own."""
        return Table(self.symbols, self.frequencies << (precision - self.precision), precision)


def log2_fixed(values: NDArray[np.int64]) -> NDArray[np.int64]:
    """log2 of values in [1, 2**53) in units of 2**-16, at most 2**-11 too low; the same on every machine."""
    mantissa, exponent = np.frexp(values.astype(np.float64))  # exact
    index = ((mantissa * 2 - 1) * (1 << _LOG_BITS)).astype(np.int64)
    return ((exponent.astype(np.int64) - 1) << COST_SHIFT) + _LOG_TABLE[index]


def entropy_cost(counts: NDArray[np.int64]) -> int:
    """Size of a stream by the entropy of its own histogram (all counts >= 1), in 2**-16 bit."""
    total = counts.sum(keepdims=True)
    return max(int((total * log2_fixed(total)).sum() - (counts * log2_fixed(counts)).sum()), 0)


def normalise(counts: NDArray[np.int64], precision: int) -> NDArray[np.int64]:
    """Scale counts (used,), each >= 1 and below 2**46, to frequencies >= 1 that sum to 2**precision >= used."""
    total = int(counts.sum())
    frequencies, remainders = np.divmod(counts << precision, total)
    frequencies = np.maximum(frequencies, 1)
    excess = int(frequencies.sum()) - (1 << precision)
    if excess < 0:  # rounding down lost less than one each: return it where most was lost
        frequencies[np.argsort(-remainders, kind="stable")[:-excess]] += 1
    elif excess > 0:  # symbols lifted to 1 are paid for by the others, in proportion to what they can spare
        spare = frequencies - 1
        frequencies -= spare * excess // int(spare.sum())
        left = int(frequencies.sum()) - (1 << precision)
        frequencies[np.argsort(-frequencies, kind="stable")[:left]] -= 1
    return frequencies


def fit(counts: NDArray[np.int64], most: int = MAX_PRECISION) -> Table:
    """The table of at most 2**most for a histogram (size,), size <= 2**16, that makes stream and table shortest.

    Every bit of precision costs about one bit a symbol in the table and cuts the loss in the stream; both change
    smoothly, so the precision climbs from below until a step gains less than 1/2048 of the stream (a larger table
    is also slower to read).
    """
    symbols = np.flatnonzero(counts)
    counts = counts[symbols]
    least = (symbols.size - 1).bit_length()
    guess = (symbols.size * int(counts.sum())).bit_length() // 2 - 2  # a step or two below the usual best
    costs: list[int] = []
    tables: list[Table] = []
    for precision in range(min(max(guess, least), most), most + 1):
        tables.append(Table(symbols, normalise(counts, precision), precision))
        costs.append(tables[-1].cost(counts) + ((symbols.size * precision) << COST_SHIFT))
        if len(costs) > 1 and costs[-1] >= costs[-2] - (costs[-2] >> 11):
            return tables[-2]
    return tables[-1]


def table_bits(used: int, size: int, count: int) -> int:
    """Rough bits of a table, rather too few: about half log2 of the mean count for each used symbol, and half of what
    a random choice of used symbols would need (they cluster)."""
    which = entropy_cost(np.array([used, size - used], np.int64)) >> COST_SHIFT if used < size else 0
    return (which + used * ((count // used).bit_length() + 1)) // 2


def write_table(table: Table, size: int) -> bytes:
    """Write a table over the alphabet [0, size); its precision is not included."""
    writer = BitWriter()
    used = table.symbols.size
    writer.put_bounded(np.array([used - 2], np.int64), np.array([size - 2], np.int64))
    edges = np.concatenate([[-1], table.symbols, [size]])
    _put_composition(writer, np.diff(edges) - 1)
    _put_composition(writer, table.frequencies - 1)
    return writer.to_bytes()


def read_table(data: bytes | memoryview, size: int, precision: int, count: int) -> tuple[Table, int]:
    """Read a table of `precision` over [0, size), size >= 2, for `count` symbols: (table, bytes consumed).

    Raises FrameError when it is truncated, its padding is not zero, or it uses more symbols than there can be.
    """
    reader = BitReader(data)
    used = 2 + int(reader.take_bounded(np.array([size - 2], np.int64))[0])
    if used > min(count, 1 << precision):
        limit = min(count, 1 << precision)
        raise FrameError(f"frequency table: expected at most {limit} symbols, got {used}; damaged")
    gaps = _take_composition(reader, used + 1, size - used)
    frequencies = _take_composition(reader, used, (1 << precision) - used) + 1
    return Table(np.cumsum(gaps[:-1] + 1) - 1, frequencies, precision), reader.finish()


def _levels(length: int) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]]:
    """Halvings of [0, length], level by level: (left, middle, right) edges of the intervals split at that level."""
    stride = 1 << max(length - 1, 0).bit_length() >> 1
    while stride:
        middle = np.arange(stride, length, 2 * stride, dtype=np.int64)
        yield middle - stride, middle, np.minimum(middle + stride, length)
        stride >>= 1


def _put_composition(writer: BitWriter, parts: NDArray[np.int64]) -> None:
    sums = np.concatenate([np.zeros(1, np.int64), np.cumsum(parts)])
    for left, middle, right in _levels(parts.size):
        writer.put_bounded(sums[middle] - sums[left], sums[right] - sums[left])


def _take_composition(reader: BitReader, length: int, total: int) -> NDArray[np.int64]:
    sums = np.zeros(length + 1, np.int64)
    sums[length] = total
    for left, middle, right in _levels(length):
        sums[middle] = sums[left] + reader.take_bounded(sums[right] - sums[left])
    return np.diff(sums)
