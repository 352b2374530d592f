"""Streams of small integers: the cheapest of constant, bit packing, sparse and static rANS.

A stream starts with a byte, kind | (precision - 1) << 4, unless it is empty anyway. Kinds:

    0 constant   the symbol in whole bytes
    1 packed     every symbol in ceil(log2 size) bits, see `bits.pack_bits`
    2 rANS       frequency table of that precision, then the coder's output
    3 sparse     the most frequent symbol, the number of others (varint), their positions, then the others as a
                 stream over the alphabet without the frequent one. By the chain rule this costs as much as coding
                 all symbols, but only the few others are touched, and clustered positions cost less.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

import fedcomp.entropy.gaps as gaps  # gaps codes its classes as symbols, symbols their sparse kind as gaps
from fedcomp.entropy import models, rans
from fedcomp.entropy.bits import pack_bits, read_varint, unpack_bits, write_varint
from fedcomp.errors import ConfigError, FrameError

Symbols = NDArray[np.uint8] | NDArray[np.uint16]

_CONSTANT, _PACKED, _RANS, _SPARSE = range(4)
_MAX_SIZE = 1 << 16
_SPARSE_SHARE = 16  # sparse when all but the most frequent symbol make up at most 1/16
_PIECE = 1 << 16


class SparseSymbols(np.ndarray[tuple[int], np.dtype[np.uint8 | np.uint16]]):
    """Decoded symbols that are all alike but for a few, whose places are known: a read-only array like any other, and
    a shortcut for who has use for the few only. What is derived from it is a plain array or has no places.

    Attributes:
        common: the symbol of most.
        places: increasing places of the others; None for slices and the like.
    """

    common: int = 0
    places: NDArray[np.int64] | None = None

    @classmethod
    def of(cls, symbols: Symbols, common: int, places: NDArray[np.int64]) -> "SparseSymbols":
        """The symbols, as a view that knows their places."""
        view = symbols.view(cls)
        view.common, view.places = common, places
        view.flags.writeable = False
        return view


def encode_symbols(symbols: NDArray[np.uint8] | NDArray[np.uint16], size: int, *, fast: bool = False) -> bytes:
    """Code (count,) symbols in [0, size), 1 <= size <= 65536, as short as a static order-0 model allows.

    The count is not stored. The result has no bytes when count is 0 or size is 1, and is never longer than a mode
    byte and ceil(count * ceil(log2 size) / 8) bytes. With `fast` it is just that, and the symbols are trusted to be in
    range. Raises ConfigError for another dtype, shape or range.

    >>> encode_symbols(np.array([0, 1, 1, 1], np.uint8), 2).hex()
    '010e'
    """
    count = symbols.size
    if fast and count and size > 1:
        return _encode_packed(symbols, size)
    counts = histogram(symbols, size)
    if count == 0 or size == 1:
        return b""
    used = np.flatnonzero(counts)
    if used.size == 1:
        return bytes([_CONSTANT]) + int(used[0]).to_bytes(_symbol_bytes(size), "little")
    limit = 1 + -(-count * _width(size) // 8)  # of the packed form
    # Hopeless cases end here, with nothing but a histogram: no coder runs for a gain below 0.5 %.
    bits = (models.entropy_cost(counts[used]) >> models.COST_SHIFT) + models.table_bits(used.size, size, count)
    if bits >= 8 * limit * 199 // 200:
        return _encode_packed(symbols, size)
    candidates = []
    if (count - int(counts.max())) * _SPARSE_SHARE <= count:
        candidates.append(_encode_sparse(symbols, size, int(counts.argmax())))
        limit = min(limit, len(candidates[0]))
    candidates += _encode_rans(symbols, size, counts, limit)
    best = min(candidates, key=len, default=None)
    return best if best is not None and len(best) <= limit else _encode_packed(symbols, size)


def decode_symbols(data: bytes | memoryview, count: int, size: int) -> tuple[NDArray[np.uint8 | np.uint16], int]:
    """Undo `encode_symbols`: ((count,) uint8 when size <= 256, else uint16; bytes consumed). More data may follow.

    Raises FrameError when the data is truncated or damaged in a way that shows; otherwise the result is `count`
    symbols in [0, size).
    """
    dtype = _dtype(size)
    if count == 0 or size == 1:
        return np.zeros(count, dtype), 0
    view = memoryview(data).cast("B")
    if not len(view):
        raise FrameError(f"symbols: expected {count} of them, got no data; truncated")
    kind, precision = view[0] & 15, (view[0] >> 4) + 1
    if kind > _SPARSE or (kind != _RANS and precision != 1):
        raise FrameError(f"symbols: expected a known kind of stream, got mode byte {view[0]}; damaged")
    body = view[1:]
    if kind == _CONSTANT:
        symbol, used = _read_symbol(body, size)
        return np.full(count, symbol, dtype), 1 + used
    if kind == _PACKED:
        symbols = unpack_bits(body, count, _width(size)).astype(dtype, copy=False)
        if size != 1 << _width(size) and int(symbols.max()) >= size:
            raise FrameError(f"symbols: expected all below {size}, got {symbols.max()}; damaged")
        return symbols, 1 + -(-count * _width(size) // 8)
    if kind == _SPARSE:
        symbols, used = _decode_sparse(body, count, size)
        return symbols, 1 + used
    table, used = models.read_table(body, size, precision, count)
    symbols, used_stream = rans.decode(body[used:], count, table, dtype)
    return symbols, 1 + used + used_stream


def _encode_packed(symbols: Symbols, size: int) -> bytes:
    return bytes([_PACKED]) + pack_bits(symbols, _width(size))


def _encode_rans(symbols: Symbols, size: int, counts: NDArray[np.int64], limit: int) -> list[bytes]:
    """The rANS form, unless its estimate is above `limit` bytes."""
    table = models.fit(counts)
    header = bytes([_RANS | (table.precision - 1) << 4]) + models.write_table(table, size)
    bits = table.cost(counts[table.symbols]) >> models.COST_SHIFT
    if len(header) + (bits + rans.lane_bits(symbols.size, bits)) // 8 > limit + limit // 200:
        return []
    return [header + rans.encode(symbols, table, bits)]


def _encode_sparse(symbols: Symbols, size: int, frequent: int) -> bytes:
    positions = np.flatnonzero(symbols != frequent).astype(np.int64)
    others = symbols[positions]
    others = (others - (others > frequent)).astype(_dtype(size - 1))
    header = bytes([_SPARSE]) + frequent.to_bytes(_symbol_bytes(size), "little") + write_varint(positions.size)
    return header + gaps.encode_positions(positions, symbols.size) + encode_symbols(others, size - 1)


def _decode_sparse(body: memoryview, count: int, size: int) -> tuple[NDArray[np.uint8 | np.uint16], int]:
    frequent, used = _read_symbol(body, size)
    nonzeros, used = read_varint(body, used)
    if not 0 < nonzeros * _SPARSE_SHARE <= count:  # also bounds how deep streams can nest
        raise FrameError(f"symbols: expected at most {count // _SPARSE_SHARE} rare ones, got {nonzeros}; damaged")
    positions, used_positions = gaps.decode_positions(body[used:], nonzeros, count)
    used += used_positions
    others, used_others = decode_symbols(body[used:], nonzeros, size - 1)
    symbols = np.full(count, frequent, _dtype(size))
    symbols[positions] = others + (others >= frequent).astype(symbols.dtype)
    return SparseSymbols.of(symbols, frequent, positions), used + used_others


def _read_symbol(body: memoryview, size: int) -> tuple[int, int]:
    """(symbol, bytes consumed)."""
    nbytes = _symbol_bytes(size)
    symbol = int.from_bytes(body[:nbytes], "little")
    if len(body) < nbytes or symbol >= size:
        raise FrameError(f"symbols: expected {nbytes} bytes with a symbol below {size}; truncated or damaged")
    return symbol, nbytes


def histogram(symbols: Symbols, size: int) -> NDArray[np.int64]:
    """Counts (size,) of a valid stream; piecewise, because bincount makes 64-bit copies."""
    if not 1 <= size <= _MAX_SIZE:
        raise ConfigError(f"symbols: expected an alphabet of 1 to {_MAX_SIZE} symbols, got {size}")
    if symbols.ndim != 1 or symbols.dtype not in (np.uint8, np.uint16):
        raise ConfigError(f"symbols: expected 1-D uint8 or uint16, got {symbols.dtype} of shape {symbols.shape}")
    if size == 2:  # counting ones is far quicker
        if symbols.size and int(symbols.max()) > 1:
            raise ConfigError(f"symbols: expected all below 2, got {symbols.max()}")
        ones = int(np.count_nonzero(symbols))
        return np.array([symbols.size - ones, ones], np.int64)
    counts = np.zeros(size, np.int64)
    for first in range(0, symbols.size, _PIECE):
        part = np.bincount(symbols[first : first + _PIECE], minlength=size)
        if part.size > size:
            raise ConfigError(f"symbols: expected all below {size}, got {part.size - 1}")
        counts += part
    return counts


def _width(size: int) -> int:
    return (size - 1).bit_length()


def _symbol_bytes(size: int) -> int:
    return (_width(size) + 7) // 8


def _dtype(size: int) -> type[Any]:
    return np.uint8 if size <= 256 else np.uint16
