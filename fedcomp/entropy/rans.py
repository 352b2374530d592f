"""Interleaved rANS in numpy: many lanes advance together, 32-bit states, 16-bit words.

J. Duda, "Asymmetric numeral systems", arXiv 1311.2540; F. Giesen, "Interleaved entropy coders", arXiv 1402.3392.
A lane in state x codes a symbol of frequency f and start c, all out of M = 2**precision, by

    encode  x -> (x // f) * M + c + x % f          decode  x -> f * (x // M) + x % M - c

and stays in [2**16, 2**32) by moving its low 16 bits to or from one stack of words that all lanes share. The encoder
runs from the last symbol to the first, so that the decoder runs forwards.

A new lane would waste the 16 bits of its start state 2**16. Instead the encoder starts with one lane and doubles
their number after `warm` steps each, and a new lane swallows a word that was already written: its start state is
2**16 + word. The decoder, retiring the lane, checks the upper half and puts the word back. What a lane still costs is
about 5 bits, for storing a state that does not use all its 32 bits.

The symbols of a stream may come in runs that each have a table of their own. All tables must then have one precision;
`Table.widened` makes it so.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcomp.entropy import narrow
from fedcomp.entropy.models import Table
from fedcomp.errors import FrameError

_FLOOR = 1 << 16  # the least state of a lane, and the first lane's start
_MAX_LANES_LOG = 12
_MAX_WARM_LOG = 6
_SINGLE = 128  # streams up to this many symbols use one lane and do not say so
_LANE_BYTES = 128  # one lane for so many bytes keeps their cost near 0.5 % of the stream
_SHORT_LANES = 64  # up to so many, half the bytes will do: short streams would else be slow for a saving of few bytes
_PIECE = 1 << 15  # symbols looked up at a time: the tables of a piece stay in the cache
_WORD = np.uint32(16)
_LOW = np.uint32(0xFFFF)


def lane_bits(count: int, bits: int) -> int:
    """Estimated bits that a stream of `count` symbols and `bits` ideal bits needs on top."""
    if count <= _SINGLE:
        return 24
    lanes, warm = _choose_lanes(count, bits)
    starved = max(16 * lanes - bits * warm * lanes // count, 0)  # new lanes that find no word to swallow
    return 8 + 24 + 5 * lanes + starved


def encode(symbols: NDArray[np.uint8] | NDArray[np.uint16], table: Table, bits: int) -> bytes:
    """Code (count,) symbols, count >= 1, all of them in the table; `bits` is the estimated size, for the lanes."""
    return encode_runs(symbols, [table], [symbols.size], bits)


def encode_runs(
    symbols: NDArray[np.uint8] | NDArray[np.uint16], tables: Sequence[Table], runs: Sequence[int], bits: int
) -> bytes:
    """As `encode`, for symbols of which runs[i] in a row use tables[i]; the tables are of one precision."""
    count = symbols.size
    lanes, warm = _choose_lanes(count, bits)
    precision = tables[0].precision
    shares = _RunShares(symbols, tables, runs)
    states = np.full(1, _FLOOR, np.uint32)
    words = _Words(np.zeros(count, np.uint16), count)
    for width, start, stop in reversed(_phases(count, lanes, warm)):
        states = np.concatenate([states, words.pop(width - states.size) | np.uint32(_FLOOR)])
        piece = _piece(width)
        code = narrow.encode_piece if width <= narrow.WIDEST else _encode_piece
        for first in reversed(range(start, stop, piece)):
            code(states, shares.of(first, min(first + piece, stop)), precision, words)
    header = b"" if count <= _SINGLE else bytes([lanes.bit_length() - 1 | (warm.bit_length() - 1) << 4])
    return header + _write_states(states) + words.buffer[words.top :].astype("<u2").tobytes()


def decode(
    data: bytes | memoryview, count: int, table: Table, dtype: type[np.uint8] | type[np.uint16]
) -> tuple[NDArray[np.uint8 | np.uint16], int]:
    """Decode `count` >= 1 symbols: ((count,) of `dtype`, bytes consumed). Raises FrameError for damaged data."""
    return decode_runs(data, [table], [count], dtype)


def decode_runs(
    data: bytes | memoryview, tables: Sequence[Table], runs: Sequence[int], dtype: type[np.uint8] | type[np.uint16]
) -> tuple[NDArray[np.uint8 | np.uint16], int]:
    """As `decode`, for sum(runs) >= 1 symbols of which runs[i] in a row use tables[i]; tables of one precision."""
    view, count = memoryview(data), sum(runs)
    lanes, warm, used = _read_lanes(view, count)
    states, used_states = _read_states(view[used:], lanes)
    used += used_states
    words = _Words.read(view[used:], count, lanes)
    precision = tables[0].precision
    lookup = np.concatenate([_lookup(table) for table in tables])
    names: NDArray[np.uint8 | np.uint16] = np.concatenate(
        [np.repeat(table.symbols.astype(dtype), table.frequencies) for table in tables]
    )
    bases = _Runs(np.arange(len(tables), dtype=np.uint32) << np.uint32(precision), runs) if len(tables) > 1 else None
    symbols: NDArray[np.uint8 | np.uint16] = np.empty(count, dtype)
    slots = np.empty(min(_PIECE, count), np.uint32)
    for width, start, stop in _phases(count, lanes, warm):
        words.push(_retire(states[width:]))
        states = states[:width]
        piece = _piece(width)
        code = narrow.decode_piece if width <= narrow.WIDEST else _decode_piece
        for first in range(start, stop, piece):
            last = min(first + piece, stop)
            base = bases.of(first, last) if bases else None
            code(states, slots[: last - first], lookup, base, precision, words)
            np.take(names, slots[: last - first], out=symbols[first:last], mode="clip")
    if int(states[0]) != _FLOOR or words.buffer[words.top : words.end].any():
        raise FrameError("rANS stream: expected the coder to end in its start state, got another; damaged")
    return symbols, used + 2 * (words.end - lanes)


class _Runs:
    """A value for each run of symbols, spread over any part of the stream."""

    def __init__(self, values: NDArray[np.uint32], runs: Sequence[int]) -> None:
        self.values = values
        self.edges = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.array(runs, np.int64))])

    def of(self, first: int, last: int) -> NDArray[np.uint32]:
        return np.repeat(self.values, np.diff(self.edges.clip(first, last)))


class _RunShares:
    """Frequency << 16 | start for each symbol of a stream with runs."""

    def __init__(self, symbols: NDArray[Any], tables: Sequence[Table], runs: Sequence[int]) -> None:
        self.symbols = symbols
        shares = [_shares(table) for table in tables]
        self.shares = np.concatenate(shares)
        starts = np.cumsum([0, *(part.size for part in shares[:-1])])
        self.starts = _Runs(starts.astype(np.uint32), runs) if len(tables) > 1 else None

    def of(self, first: int, last: int) -> NDArray[np.uint32]:
        index = self.symbols[first:last]
        shares: NDArray[np.uint32] = self.shares[index + self.starts.of(first, last) if self.starts else index]
        return shares


def _encode_piece(states: NDArray[np.uint32], shares: NDArray[np.uint32], precision: int, words: "_Words") -> None:
    """Code one piece backwards, states.size symbols a step (fewer in its last step, which comes first)."""
    frequencies = shares >> _WORD
    starts = shares & _LOW
    limits = frequencies << np.uint32(32 - precision)
    spreads = np.uint32(1 << precision) - frequencies
    width = states.size
    for first in reversed(range(0, shares.size, width)):
        step = slice(first, first + width)
        limit = limits[step]
        lanes = states[: limit.size]
        full = (lanes >= limit).nonzero()[0]  # flatnonzero would cost more than the step
        if full.size:
            high = lanes[full]
            words.push(high)
            lanes[full] = high >> _WORD
        # (x // f) * M + c + x % f, written without the remainder
        quotients = lanes // frequencies[step]
        quotients *= spreads[step]
        lanes += quotients
        lanes += starts[step]


def _decode_piece(
    states: NDArray[np.uint32],
    slots: NDArray[np.uint32],
    lookup: NDArray[np.uint32],
    bases: NDArray[np.uint32] | None,
    precision: int,
    words: "_Words",
) -> None:
    """Fill `slots` (symbols of one piece) with state % M + base, states.size a step; slots become symbols later.

    With some lanes a step is all overhead: arrays of a constant are quicker than scalars, and all buffers are reused.
    """
    width, lanes = states.size, states
    constants = ((1 << precision) - 1, precision, int(_WORD), int(_LOW), _FLOOR)
    mask, shift, word, low_half, floor = (np.full(width, constant, np.uint32) for constant in constants)
    shares, frequencies = np.empty(width, np.uint32), np.empty(width, np.uint32)
    for first in range(0, slots.size, width):
        slot = slots[first : first + width]
        if slot.size < width:  # the last step
            used = slice(slot.size)
            lanes, shares, frequencies = lanes[used], shares[used], frequencies[used]
            mask, shift, word, low_half, floor = mask[used], shift[used], word[used], low_half[used], floor[used]
        np.bitwise_and(lanes, mask, slot)
        if bases is not None:
            slot += bases[first : first + width]
        lookup.take(slot, None, shares, "clip")
        np.right_shift(lanes, shift, lanes)
        np.right_shift(shares, word, frequencies)
        np.multiply(lanes, frequencies, lanes)
        np.bitwise_and(shares, low_half, shares)
        np.add(lanes, shares, lanes)
        low = (lanes < floor).nonzero()[0]  # flatnonzero would cost more than the step
        if low.size:
            fed = lanes[low]
            fed <<= _WORD
            fed |= words.take(low.size)
            lanes[low] = fed


class _Words:
    """The stack of 16-bit words. It grows downwards in `buffer`, so that decoders read it upwards."""

    def __init__(self, buffer: NDArray[np.uint16], top: int) -> None:
        self.buffer = buffer
        self.top = top
        self.end = top  # decoders: the end of what has been read of the stream

    @classmethod
    def read(cls, data: memoryview, count: int, lanes: int) -> "_Words":
        """A stack filled from a stream, with room for the words of retired lanes."""
        available = min(len(data) // 2, count + lanes)  # a symbol reads one word at most
        buffer = np.zeros(lanes + available, np.uint16)
        buffer[lanes:] = np.frombuffer(data, "<u2", available)
        return cls(buffer, lanes)

    def push(self, values: NDArray[np.uint32]) -> None:
        """Put the low halves on top; values[0] becomes the topmost."""
        self.top -= values.size
        self.buffer[self.top : self.top + values.size] = values & _LOW

    def pop(self, count: int) -> NDArray[np.uint32]:
        """Take the topmost words, and zeros when there are none left (the decoder finds these unread)."""
        words = np.zeros(count, np.uint32)
        found = self.buffer[self.top : self.top + count]
        words[: found.size] = found
        self.top += found.size
        return words

    def take(self, count: int) -> NDArray[np.uint16]:
        """Take the topmost words; raises FrameError when there are too few."""
        words = self.buffer[self.top : self.top + count]
        if words.size < count:
            raise FrameError("rANS stream: expected more words, got the end of the data; truncated or damaged")
        self.top += count
        self.end = max(self.end, self.top)
        return words


def _retire(states: NDArray[np.uint32]) -> NDArray[np.uint32]:
    if (states >> _WORD != 1).any():
        raise FrameError("rANS stream: expected a lane to end in its start state, got another; damaged")
    return states


def _piece(width: int) -> int:
    return max(_PIECE // width, 1) * width


def _phases(count: int, lanes: int, warm: int) -> list[tuple[int, int, int]]:
    """Parts (width, start, stop) of a stream in decoding order: most with all lanes, the end with fewer and fewer."""
    phases = []
    width, stop = 1, count
    while width < lanes and stop > width * warm:
        phases.append((width, stop - width * warm, stop))
        stop -= width * warm
        width *= 2
    phases.append((width, 0, stop))
    return phases[::-1]


def _least_lanes(count: int) -> int:
    """Fewest lanes allowed: they bound the steps, and so the time, that a stream of `count` symbols can take."""
    least = min(-(-count // 512), 32 + (count >> 12), 1 << _MAX_LANES_LOG)
    return 1 << (least - 1).bit_length()


def _choose_lanes(count: int, bits: int) -> tuple[int, int]:
    """(lanes, warm) as powers of two; `warm` steps of the lanes so far write about the words for as many new ones."""
    if count <= _SINGLE:
        return 1, 1
    warm = min((16 * count // max(bits, 1)).bit_length(), _MAX_WARM_LOG)
    nbytes = bits // 8
    affordable = max(nbytes // _LANE_BYTES, min(2 * nbytes // _LANE_BYTES, _SHORT_LANES), 1)
    lanes = max(1 << min(affordable.bit_length() - 1, _MAX_LANES_LOG), _least_lanes(count))
    return _phases(count, lanes, 1 << warm)[0][0], 1 << warm


def _read_lanes(data: memoryview, count: int) -> tuple[int, int, int]:
    """(lanes, warm, bytes consumed)."""
    if count <= _SINGLE:
        return 1, 1, 0
    if not len(data):
        raise FrameError("rANS stream: expected a byte for the lanes, got the end of the data; truncated")
    lanes, warm = 1 << (data[0] & 15), 1 << (data[0] >> 4)
    allowed = lanes <= 1 << _MAX_LANES_LOG and warm <= 1 << _MAX_WARM_LOG and lanes >= _least_lanes(count)
    if not allowed or _phases(count, lanes, warm)[0][0] != lanes:
        raise FrameError(f"rANS stream: {lanes} lanes, {warm} steps do not fit {count} symbols; damaged")
    return lanes, warm, 1


def _write_states(states: NDArray[np.uint32]) -> bytes:
    """One state as it is. Several as planes: is the top byte used (half are not), low words, third bytes, top bytes."""
    if states.size == 1:
        return states.astype("<u4").tobytes()
    tops = states >> np.uint32(24)
    planes: list[NDArray[Any]] = [
        np.packbits(tops != 0, bitorder="little"),
        (states & _LOW).astype("<u2"),
        (states >> _WORD).astype(np.uint8),
        tops[tops != 0].astype(np.uint8),
    ]
    return b"".join(plane.tobytes() for plane in planes)


def _read_states(data: memoryview, lanes: int) -> tuple[NDArray[np.uint32], int]:
    """(states (lanes,), bytes consumed); all states are in [2**16, 2**32)."""
    flags_end = 0 if lanes == 1 else -(-lanes // 8)
    used = flags_end + 3 * lanes
    if len(data) < used + (lanes == 1):
        raise FrameError(f"rANS stream: expected {lanes} states, got {len(data)} bytes; truncated")
    if lanes == 1:
        states, used = np.frombuffer(data, "<u4", 1).astype(np.uint32), 4
    else:
        flags = np.unpackbits(np.frombuffer(data, np.uint8, flags_end), bitorder="little")
        wide = np.flatnonzero(flags[:lanes])
        tops = np.frombuffer(data[used : used + wide.size], np.uint8)
        if flags[lanes:].any() or tops.size < wide.size or not tops.all():
            raise FrameError(f"rANS stream: expected {wide.size} upper bytes of states; truncated or damaged")
        states = np.frombuffer(data, "<u2", lanes, flags_end).astype(np.uint32)
        states |= np.frombuffer(data, np.uint8, lanes, flags_end + 2 * lanes).astype(np.uint32) << _WORD
        states[wide] |= tops.astype(np.uint32) << np.uint32(24)
        used += wide.size
    if (states < _FLOOR).any():
        raise FrameError("rANS stream: expected states of 17 to 32 bits, got a smaller one; damaged")
    return states, used


def _shares(table: Table) -> NDArray[np.uint32]:
    """Frequency << 16 | start for every symbol up to the last used one."""
    starts = np.cumsum(table.frequencies) - table.frequencies
    shares = np.zeros(int(table.symbols[-1]) + 1, np.uint32)
    shares[table.symbols] = table.frequencies << 16 | starts
    return shares


def _lookup(table: Table) -> NDArray[np.uint32]:
    """Frequency << 16 | slot - start for every slot in [0, 2**precision)."""
    starts = np.cumsum(table.frequencies) - table.frequencies
    slots = np.arange(1 << table.precision, dtype=np.int64)
    return (np.repeat((table.frequencies << 16) - starts, table.frequencies) + slots).astype(np.uint32)
