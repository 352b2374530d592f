"""Sets of positions: k increasing integers below n, near log2 C(n, k) bits, less when they cluster.

A set with more than n / 2 members is coded by what it lacks; k, n, or no members at all need no bytes. Else a mode
byte tells the form:

    0-3  Rice codes of the gaps (S. Golomb, "Run-length encodings", 1966; R. Rice, JPL 79-22, 1979): low bits packed,
         then all unary parts, as two planes; the mode is the parameter minus one derived from (n, k)
         (with parameter 0 this is the bitmap itself)
    4    the bitmap's bytes through rANS, for dense sets, where a Rice code loses up to 4 %. The table is that of
         independent bits with probability k / n, which both sides compute
    5    gap classes (two mantissa bits below the leading one) as a stream of symbols, then the remaining bits raw
"""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

import fedcomp.entropy.symbols as streams  # gaps codes its classes as symbols, symbols their sparse kind as gaps
from fedcomp.entropy import models, rans
from fedcomp.entropy.bits import BitReader, BitWriter, pack_bits, unpack_bits
from fedcomp.errors import ConfigError, FrameError

_RICE_CHOICES = 4
_BITMAP, _CLASSES = range(4, 6)
_MAX_UNIVERSE = 1 << 40
_DENSE = 16  # bitmaps are for sets with at least 1/16 of the universe
_PRECISION = 15  # of the Bernoulli table
_MANTISSA = 2  # bits kept in a gap's class


def encode_positions(positions: NDArray[np.int64], universe: int) -> bytes:
    """Code (count,) strictly increasing int64 positions in [0, universe), universe <= 2**40; the count is not stored.

    Raises ConfigError when positions are not that.

    >>> encode_positions(np.array([3, 5], np.int64), 10).hex()
    '021b'
    """
    _check(positions, universe)
    count = positions.size
    if count in (0, universe):
        return b""
    if count > universe - count:
        return encode_positions(_complement(positions, universe), universe)
    gaps = np.diff(positions, prepend=-1) - 1
    forms = [_encode_rice(gaps, universe)]
    if count * _DENSE >= universe:
        forms += _encode_bitmap(positions, universe, len(forms[0]))
    forms += _encode_classes(gaps, universe, min(map(len, forms)))
    return min(forms, key=len)


def decode_positions(data: bytes | memoryview, count: int, universe: int) -> tuple[NDArray[np.int64], int]:
    """Undo `encode_positions`: ((count,) int64 positions, bytes consumed). More data may follow.

    Raises FrameError when the data is truncated or damaged in a way that shows, or count > universe; otherwise the
    positions are strictly increasing in [0, universe).
    """
    if not 0 <= count <= universe:
        raise FrameError(f"positions: expected 0 to {universe} of them, got {count}")
    if count in (0, universe):
        return np.arange(count, dtype=np.int64), 0
    if count > universe - count:
        missing, used = decode_positions(data, universe - count, universe)
        return _complement(missing, universe), used
    view = memoryview(data).cast("B")
    if not len(view):
        raise FrameError(f"positions: expected {count} of them, got no data; truncated")
    mode, body = view[0], view[1:]
    if mode < _RICE_CHOICES:
        positions, used = _decode_rice(body, count, universe, mode)
    elif mode == _CLASSES:
        gaps, used = _decode_classes(body, count, universe)
        positions = np.cumsum(gaps + 1) - 1
    elif mode == _BITMAP and count * _DENSE >= universe:
        positions, used = _decode_bitmap(body, count, universe)
    else:
        raise FrameError(f"positions: expected a known form, got mode byte {mode}; damaged")
    # Gaps stay below 2**42, so a sum that overflows is negative somewhere before it could turn valid again.
    if int(positions.min()) < 0 or int(positions.max()) >= universe:
        raise FrameError(f"positions: expected all below {universe}, got some above; damaged")
    return positions, 1 + used


def _check(positions: NDArray[np.int64], universe: int) -> None:
    if not 0 <= universe <= _MAX_UNIVERSE:
        raise ConfigError(f"positions: expected a universe of 0 to 2**40, got {universe}")
    if positions.ndim != 1 or positions.dtype != np.int64:
        raise ConfigError(f"positions: expected 1-D int64, got {positions.dtype} of shape {positions.shape}")
    if positions.size and (positions[0] < 0 or positions[-1] >= universe or (np.diff(positions) <= 0).any()):
        raise ConfigError(f"positions: expected strictly increasing values in [0, {universe})")


def _complement(positions: NDArray[np.int64], universe: int) -> NDArray[np.int64]:
    """All others; only called when they or `positions` are the larger half, so this is linear in the sets."""
    missing = np.ones(universe, np.bool_)
    missing[positions] = False
    return np.flatnonzero(missing).astype(np.int64)


def _rice_parameter(count: int, universe: int, choice: int) -> int:
    """log2 of about 0.69 times the mean gap, which is best for geometric gaps, plus choice - 2."""
    return max((universe * 11 // (count * 16)).bit_length() - 3 + choice, 0)


def _encode_rice(gaps: NDArray[np.int64], universe: int) -> bytes:
    """Mode byte, low bits, unary parts. Both planes share a byte where one ends and the other begins."""
    parameters = [_rice_parameter(gaps.size, universe, choice) for choice in range(_RICE_CHOICES)]
    lengths = [parameter * gaps.size + int((gaps >> parameter).sum()) for parameter in parameters]
    choice = lengths.index(min(lengths))
    parameter = parameters[choice]
    low = pack_bits(gaps & ((1 << parameter) - 1), parameter)
    shared = parameter * gaps.size % 8  # bits of the last low byte that are taken
    ends = np.cumsum((gaps >> parameter) + 1) + (shared - 1)
    plane = np.zeros(int(ends[-1]) + 1, np.uint8)
    plane[ends] = 1
    unary = np.packbits(plane, bitorder="little")
    if shared:
        unary[0] |= low[-1]
        low = low[:-1]
    return bytes([choice]) + low + unary.tobytes()


def _decode_rice(body: memoryview, count: int, universe: int, choice: int) -> tuple[NDArray[np.int64], int]:
    """(positions, bytes consumed).

    With p the parameter and e_i the bit of the unary plane in which code i ends, e_i - i zeros came before, so that

        position_i = sum of the gaps up to i, plus i = (e_i - i) 2^p + (sum of the low bits up to i) + i
    """
    parameter = _rice_parameter(count, universe, choice)
    low = unpack_bits(body, count, parameter, shared_tail=True)
    start, shared = divmod(parameter * count, 8)
    most = shared + count + ((universe - count) >> parameter)  # bits of a valid unary plane; at most 13 * count
    plane = np.unpackbits(np.frombuffer(body[start : start + -(-most // 8)], np.uint8), bitorder="little")
    ends = np.flatnonzero(plane[shared:].view(np.bool_))[:count]
    if ends.size < count:
        raise FrameError(f"positions: expected {count} unary codes, got {ends.size}; truncated or damaged")
    end = shared + int(ends[-1]) + 1
    used = -(-end // 8)
    if plane[end : 8 * used].any():
        raise FrameError("positions: expected zero bits after the last code, got ones; damaged")
    index = np.arange(count, dtype=np.int64)
    positions: NDArray[np.int64] = (ends - index) << parameter
    positions += index
    positions += np.cumsum(low, dtype=np.int64)
    return positions, start + used


def _encode_bitmap(positions: NDArray[np.int64], universe: int, limit: int) -> list[bytes]:
    """The bitmap through rANS, if that promises less than 99.5 % of `limit` bytes."""
    members = np.zeros(universe, np.bool_)
    members[positions] = True
    bitmap = np.packbits(members, bitorder="little")
    table = _bernoulli(positions.size, universe)
    bits = table.cost(np.bincount(bitmap, minlength=256)) >> models.COST_SHIFT
    if 8 + bits + rans.lane_bits(bitmap.size, bits) >= 8 * limit * 199 // 200:
        return []
    return [bytes([_BITMAP]) + rans.encode(bitmap, table, bits)]


def _decode_bitmap(body: memoryview, count: int, universe: int) -> tuple[NDArray[np.int64], int]:
    """(positions, bytes consumed)."""
    bitmap, used = rans.decode(body, -(-universe // 8), _bernoulli(count, universe), np.uint8)
    positions = np.flatnonzero(np.unpackbits(bitmap.astype(np.uint8, copy=False), bitorder="little"))
    if positions.size != count:
        raise FrameError(f"positions: expected a bitmap of {count} members, got {positions.size}; damaged")
    return positions.astype(np.int64, copy=False), used


@lru_cache(maxsize=16)  # per-tensor streams often share (count, universe)
def _bernoulli(count: int, universe: int) -> models.Table:
    """The table of a byte of eight independent bits, each set with probability count / universe; in integers."""
    weights = [count**ones * (universe - count) ** (8 - ones) for ones in range(9)]
    scaled = np.array([max((weight << 44) // universe**8, 1) for weight in weights], np.int64)
    ones = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1).sum(axis=1)
    return models.Table(np.arange(256, dtype=np.int64), models.normalise(scaled[ones], _PRECISION), _PRECISION)


def _encode_classes(gaps: NDArray[np.int64], universe: int, limit: int) -> list[bytes]:
    """The gap-class form, if the histogram of classes promises less than 99 % of `limit` bytes."""
    lifted = gaps + (1 << _MANTISSA)  # so that every gap has a leading one and the mantissa bits below it
    # The top bits of a float64 are exponent and mantissa: the class, exactly, because gaps are below 2**53.
    classes = (lifted.astype(np.float64).view(np.int64) >> (52 - _MANTISSA)) - ((1023 + _MANTISSA) << _MANTISSA)
    raw_widths = classes >> _MANTISSA
    counts = np.bincount(classes)
    used = counts[counts > 0]
    size = _class_count(universe)
    bits = (models.entropy_cost(used) >> models.COST_SHIFT) + models.table_bits(used.size, size, gaps.size)
    if bits + int(raw_widths.sum()) >= 8 * limit * 99 // 100:
        return []
    stream = streams.encode_symbols(classes.astype(np.uint8), size)
    writer = BitWriter()
    writer.put(lifted & ((np.int64(1) << raw_widths) - 1), raw_widths)
    return [bytes([_CLASSES]) + stream + writer.to_bytes()]


def _decode_classes(body: memoryview, count: int, universe: int) -> tuple[NDArray[np.int64], int]:
    """(gaps, bytes consumed)."""
    symbols, used = streams.decode_symbols(body, count, _class_count(universe))
    classes = symbols.astype(np.int64)
    raw_widths = classes >> _MANTISSA
    reader = BitReader(body[used:])
    raw = reader.take(raw_widths)
    leading = (classes & ((1 << _MANTISSA) - 1)) + (1 << _MANTISSA)
    return (leading << raw_widths | raw) - (1 << _MANTISSA), used + reader.finish()


def _class_count(universe: int) -> int:
    """Classes of gaps below `universe`: at most 156."""
    largest = universe - 1 + (1 << _MANTISSA)
    exponent = largest.bit_length() - 1 - _MANTISSA
    return (exponent << _MANTISSA) + (largest >> exponent) - (1 << _MANTISSA) + 1
