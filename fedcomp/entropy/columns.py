"""Columns of small integers, most of them zero and few of them: adaptive binary coding, without any table.

The columns of thin matrices, the factors of a low-rank update, are long and neighbours in them are alike: a table for
each context would cost more than it saves in a payload of a few hundred bytes. So every decision is coded with the
share of ones that its context has shown so far (R. Krichevsky, V. Trofimov, "The performance of universal encoding",
IEEE Transactions on Information Theory, 1981), which encoder and decoder count alike, in integers. The decisions are

    1. for each value, whether it is zero, in the context of the kind of its matrix, its column (first, second, later),
       how many of the two values before it in the column are not zero, whether the value to its left is not, and
       whether any farther left is not;
    2. for each value that is not zero, how many bits its magnitude has, a plane at a time, and then the bit below the
       first one, in the context of kind, column and plane.

Signs and the bits below are nearly random and are sent as they are. One state of rANS (see `rans`) codes the decisions
in a loop over Python's integers: factors are few beside the parameters that they stand for. The 16 bits that its start
state would waste hold the first of the raw bits. See FORMAT.md, section 6.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcomp.entropy.bits import BitReader, BitWriter, bit_length
from fedcomp.errors import ConfigError, FrameError

Shapes = Sequence[tuple[int, int]]
Ints = NDArray[np.int64]
Decisions = tuple[Ints, NDArray[np.bool_]]
"""Contexts (n,) and outcomes (n,) of decisions in coding order."""

KINDS = 4
TOP = 32767

_PLANES = TOP.bit_length()
_COLUMNS = 3  # classes of columns: first, second, later
_NEAR, _LEFT = 3, 4  # contexts of a flag within its column, within its row
_FLAGS = KINDS * _COLUMNS * _NEAR * _LEFT
_CONTEXTS = _FLAGS + KINDS * _COLUMNS * 2 * _PLANES

_PRIOR = np.full((_CONTEXTS, 2), 0.5)
_PRIOR[:_FLAGS] = 0.9, 0.1  # most values are zero

_PRECISION = 14
_FLOOR = 1 << 16  # states are in [2**16, 2**24); bytes move in and out
_STATE_BYTES = 3
_LENGTHS = bit_length(np.arange(TOP + 1))
_LOSS = 2e-4  # what whole numbers as states may cost, over the ideal length
_HEAD_BYTES = 2  # of raw bits, in the start state


@dataclass(frozen=True)
class Tally:
    """What columns cost: how often each context has seen 0 and 1 (contexts, 2), and how many raw bits there are."""

    counts: Ints
    raw: int

    @classmethod
    def none(cls) -> "Tally":
        """The tally of no columns."""
        return cls(np.zeros((_CONTEXTS, 2), np.int64), 0)

    @classmethod
    def of(cls, columns: Ints, kind: int) -> "Tally":
        """The tally of one matrix (columns, rows)."""
        contexts, outcomes = _flag_decisions(columns != 0, kind)
        counts = np.bincount(2 * contexts + outcomes, minlength=2 * _CONTEXTS).reshape(-1, 2)
        size, which, magnitudes = _sizes(columns, kind)
        planes = np.bincount(_PLANES * which + size - 1, minlength=KINDS * _COLUMNS * _PLANES)
        larger = planes.reshape(-1, _PLANES)[:, ::-1].cumsum(axis=1)[:, ::-1].ravel() - planes
        counts[_FLAGS::2, 0] = planes
        counts[_FLAGS::2, 1] = larger
        contexts, outcomes = _second_bits(size, which, magnitudes)
        counts += np.bincount(2 * contexts + outcomes, minlength=2 * _CONTEXTS).reshape(-1, 2)
        return cls(counts, int(_raw_widths(size).sum()))

    def __add__(self, other: "Tally") -> "Tally":
        return Tally(self.counts + other.counts, self.raw + other.raw)

    def prices(self) -> NDArray[np.float64]:
        """Bits of a 0 and of a 1 in each context (contexts, 2), for columns like these."""
        known = self.counts + _PRIOR
        prices: NDArray[np.float64] = np.log2(known.sum(axis=1, keepdims=True) / known)
        return prices

    def bits_at(self, prices: NDArray[np.float64]) -> float:
        """Size of the columns at given prices."""
        return float((self.counts * prices).sum()) + self.raw

    def bits(self) -> float:
        """About the size of the columns by themselves, with what it costs to learn each context."""
        counts = self.counts[self.counts.any(axis=1)]
        total = counts.sum(axis=1)
        ideal = (total * np.log2(total)).sum() - (counts * np.log2(np.maximum(counts, 1))).sum()
        return float(ideal + (np.log2(total) / 2 + 0.5).sum()) + self.raw


def encode_columns(values: NDArray[Any], shapes: Shapes, kinds: Sequence[int]) -> bytes:
    """Code integers (count,) in [-32767, 32767], the columns one after the other of matrices one after the other.

    Args:
        values: the integers.
        shapes: (rows, columns) of each matrix.
        kinds: the kind of each matrix, 0 to 3: those of one kind share their statistics.

    Nothing for nothing. Raises ConfigError for values out of range, or more or fewer than the shapes ask for.

    >>> values = np.array([0, 0, 0, 0, 5, -6, 5, 4, 0, 0, 0, 0] * 20)
    >>> len(encode_columns(values, [(240, 1)], [0]))
    54
    """
    values = values.astype(np.int64, copy=False)
    if values.size != _count(shapes) or np.abs(values).max(initial=0) > TOP:
        raise ConfigError(f"columns: expected {_count(shapes)} values of at most {TOP}, got {values.size} or larger")
    if not values.size:
        return b""
    contexts, outcomes, widths, magnitudes = _decisions(values, shapes, kinds)
    writer = BitWriter()
    writer.put((magnitudes & (1 << widths - 1) - 1) << 1 | (values[values != 0] < 0), widths)
    raw = writer.to_bytes()
    start = _FLOOR | int.from_bytes(raw[:_HEAD_BYTES], "little")
    return _encode(contexts, outcomes, start) + raw[_HEAD_BYTES:]


def columns_size(values: NDArray[Any], shapes: Shapes, kinds: Sequence[int]) -> int:
    """About the bytes that encode_columns makes of the same arguments, in a tenth of its time."""
    if not values.size:
        return 0
    contexts, outcomes, widths = _decisions(values.astype(np.int64, copy=False), shapes, kinds)[:3]
    shares = _shares(contexts, outcomes)
    frequencies = np.where(outcomes, shares, (1 << _PRECISION) - shares)
    bits = _PRECISION * contexts.size - float(np.log2(frequencies).sum())
    head = min(int(widths.sum()), 8 * _HEAD_BYTES)
    return _STATE_BYTES + math.ceil(bits / 8 * (1 + _LOSS)) + -(-(int(widths.sum()) - head) // 8)


def decode_columns(data: bytes | memoryview, shapes: Shapes, kinds: Sequence[int]) -> tuple[NDArray[np.int32], int]:
    """Undo `encode_columns`: (values (count,), bytes consumed). More data may follow.

    Raises FrameError when the data is truncated or damaged in a way that shows.
    """
    values = np.zeros(_count(shapes), np.int32)
    if not values.size:
        return values, 0
    coder = _Decoder(memoryview(data).cast("B"))
    flags = [_read_flags(coder, *shape, kind) for shape, kind in zip(shapes, kinds, strict=True)]
    which = np.concatenate([_which(busy, kind) for busy, kind in zip(flags, kinds, strict=True)])
    size, leading = _read_sizes(coder, which)
    widths = _raw_widths(size)
    raw, used = _read_raw(coder, widths)
    magnitudes = leading << widths - 1 | raw >> 1
    values[np.concatenate([busy.ravel() for busy in flags])] = np.where(raw & 1, -magnitudes, magnitudes)
    return values, used


# --- which decisions there are, in which contexts --------------------------------------------------------------------


def _decisions(values: Ints, shapes: Shapes, kinds: Sequence[int]) -> tuple[Ints, NDArray[np.bool_], Ints, Ints]:
    """Contexts and outcomes of all decisions; of each value that is not zero its raw bits and its magnitude."""
    edges = np.cumsum([0, *(rows * columns for rows, columns in shapes)]).tolist()
    matrices = [values[a:b].reshape(shape[::-1]) for (a, b), shape in zip(pairwise(edges), shapes, strict=True)]
    flags = [_flag_decisions(matrix != 0, kind) for matrix, kind in zip(matrices, kinds, strict=True)]
    sizes = [_sizes(matrix, kind) for matrix, kind in zip(matrices, kinds, strict=True)]
    size, which, magnitudes = (np.concatenate(arrays) for arrays in zip(*sizes, strict=True))
    contexts, outcomes = _join([*flags, *_size_decisions(size, which, magnitudes)])
    return contexts, outcomes, _raw_widths(size), magnitudes


def _count(shapes: Shapes) -> int:
    return sum(rows * columns for rows, columns in shapes)


def _join(decisions: list[Decisions]) -> Decisions:
    contexts, outcomes = zip(*decisions, strict=True)
    return np.concatenate(contexts), np.concatenate(outcomes)


def _left(busy: NDArray[np.bool_]) -> Ints:
    """Context within the row: 2 if the value to the left is not zero, plus 1 if any farther left is not."""
    left = np.zeros(busy.shape, np.int64)
    left[1:] = 2 * busy[:-1]
    left[2:] += np.logical_or.accumulate(busy[:-2], axis=0)
    return left


def _classes(columns: int, kind: int) -> Ints:
    """Kind and class of each column, as one number."""
    return _COLUMNS * kind + np.minimum(np.arange(columns), _COLUMNS - 1)


def _which(busy: NDArray[np.bool_], kind: int) -> Ints:
    """Kind and class of the column of each value that is not zero."""
    return np.repeat(_classes(busy.shape[0], kind), np.count_nonzero(busy, axis=1))


def _flag_decisions(busy: NDArray[np.bool_], kind: int) -> Decisions:
    """Whether the values (columns, rows) are not zero."""
    contexts = _left(busy) + _NEAR * _LEFT * _classes(busy.shape[0], kind)[:, None]
    contexts[:, 1:] += _LEFT * busy[:, :-1]
    contexts[:, 2:] += _LEFT * busy[:, :-2]
    return contexts.ravel(), busy.ravel()


def _sizes(columns: Ints, kind: int) -> tuple[Ints, Ints, Ints]:
    """Of each value that is not zero: the bits of its magnitude, kind and class of its column, its magnitude."""
    busy = columns != 0
    magnitudes = np.abs(columns[busy])
    return _LENGTHS[magnitudes], _which(busy, kind), magnitudes


def _plane(which: Ints, plane: Ints | int) -> Ints:
    """Context of whether values that have more than `plane` bits have another one."""
    contexts: Ints = _FLAGS + 2 * (_PLANES * which + plane)
    return contexts


def _size_decisions(size: Ints, which: Ints, magnitudes: Ints) -> Iterator[Decisions]:
    """Whether values have a second bit, those that do a third one, and so on; then the bits below the first ones."""
    of, left = which, size
    for plane in range(int(size.max(initial=0))):
        more = left > plane + 1
        yield _plane(of, plane), more
        of, left = of[more], left[more]
    yield _second_bits(size, which, magnitudes)


def _second_bits(size: Ints, which: Ints, magnitudes: Ints) -> Decisions:
    """The bits below the first ones, of values that have more than one."""
    long = size > 1
    size = size[long]
    return _plane(which[long], size - 1) + 1, (magnitudes[long] >> size - 2 & 1).astype(np.bool_)


def _raw_widths(size: Ints) -> Ints:
    """Raw bits of values with so many bits: the sign, and what lies below the upper two."""
    return 1 + np.maximum(size - 2, 0)


# --- the coder -------------------------------------------------------------------------------------------------------


def _shares(contexts: Ints, outcomes: NDArray[np.bool_]) -> Ints:
    """The share of ones, out of 2**14, that the context of each decision has shown before it."""
    order = np.argsort(contexts, kind="stable")
    sorted_contexts, ones = contexts[order], outcomes[order].astype(np.int64)
    starts = np.flatnonzero(np.diff(sorted_contexts, prepend=-1))
    lengths = np.diff(starts, append=contexts.size)
    before = np.cumsum(ones) - ones
    before -= np.repeat(before[starts], lengths)
    seen = np.arange(contexts.size) - np.repeat(starts, lengths)
    shares = np.empty(contexts.size, np.int64)
    shares[order] = np.maximum((2 * before + 1 << _PRECISION) // (2 * seen + 2), 1)
    return shares


def _encode(contexts: Ints, outcomes: NDArray[np.bool_], state: int) -> bytes:
    """Code the decisions, the last one first, from a start state in [2**16, 2**17)."""
    shares = _shares(contexts, outcomes)
    frequencies = np.where(outcomes, shares, (1 << _PRECISION) - shares)
    bases = np.where(outcomes, 0, shares)
    moved = bytearray()
    for frequency, base in zip(frequencies[::-1].tolist(), bases[::-1].tolist(), strict=True):
        limit = frequency << 8 * _STATE_BYTES - _PRECISION
        while state >= limit:
            moved.append(state & 255)
            state >>= 8
        state = (state // frequency << _PRECISION) + state % frequency + base
    return state.to_bytes(_STATE_BYTES, "little") + moved[::-1]


class _Decoder:
    """State and statistics of a stream that is being read."""

    def __init__(self, data: memoryview) -> None:
        self.data, self.used = data, _STATE_BYTES
        self.state = int.from_bytes(data[:_STATE_BYTES], "little")
        self.ones, self.seen = [1] * _CONTEXTS, [2] * _CONTEXTS
        if len(data) < _STATE_BYTES or self.state < _FLOOR:
            raise FrameError("columns: expected a state of 17 to 24 bits; truncated or damaged")

    def take(self, contexts: list[int], step: int = 0) -> list[int]:
        """The outcomes of decisions in these contexts; each of the last two adds `step` to the context of the next."""
        state, at, data, ones, seen = self.state, self.used, self.data, self.ones, self.seen
        mask, end = (1 << _PRECISION) - 1, len(data)
        outcomes, before, last = [], 0, 0
        for context in contexts:
            context += step * (before + last)
            share = (ones[context] << _PRECISION) // seen[context] or 1
            slot = state & mask
            before = last
            if slot < share:
                last = 1
                state = share * (state >> _PRECISION) + slot
                ones[context] += 2
            else:
                last = 0
                state = (mask + 1 - share) * (state >> _PRECISION) + slot - share
            seen[context] += 2
            while state < _FLOOR:
                if at == end:
                    raise FrameError("columns: expected more bytes, got the end of the data; truncated or damaged")
                state = state << 8 | data[at]
                at += 1
            outcomes.append(last)
        self.state, self.used = state, at
        return outcomes


def _read_flags(coder: _Decoder, rows: int, columns: int, kind: int) -> NDArray[np.bool_]:
    """Which values of a matrix (columns, rows) are not zero."""
    busy = np.zeros((columns, rows), np.bool_)
    left = np.zeros(rows, np.int64)
    for index, base in enumerate((_NEAR * _LEFT * _classes(columns, kind)).tolist()):
        busy[index] = coder.take((left + base).tolist(), _LEFT)
        left = (left > 0) | 2 * busy[index]
    return busy


def _read_sizes(coder: _Decoder, which: Ints) -> tuple[Ints, Ints]:
    """Of each value that is not zero: the bits of its magnitude, and its upper one or two bits."""
    size = np.ones(which.size, np.int64)
    left = np.arange(which.size)
    for plane in range(_PLANES):
        left = left[np.array(coder.take(_plane(which[left], plane).tolist()), np.bool_)]
        size[left] += 1
    if left.size:
        raise FrameError(f"columns: expected values of at most {_PLANES} bits, got larger ones; damaged")
    leading = np.ones(which.size, np.int64)
    long = np.flatnonzero(size > 1)
    leading[long] = 2 + np.array(coder.take((_plane(which[long], size[long] - 1) + 1).tolist()), np.int64)
    return size, leading


def _read_raw(coder: _Decoder, widths: Ints) -> tuple[Ints, int]:
    """The raw bits of each value, and the bytes consumed by the whole stream."""
    head, nbytes = coder.state - _FLOOR, -(-int(widths.sum()) // 8)
    start = head.to_bytes(_STATE_BYTES, "little")
    inside = min(nbytes, _HEAD_BYTES)
    if any(start[inside:]):
        raise FrameError("columns: expected the coder to end in its start state, got another; damaged")
    reader = BitReader(start[:inside] + bytes(coder.data[coder.used : coder.used + nbytes - inside]))
    raw = reader.take(widths)
    reader.finish()
    return raw, coder.used + nbytes - inside
