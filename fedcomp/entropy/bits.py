"""Bits and bytes: fixed-width packing, variable-width fields, varints. Everything is little-endian, least bit first.

Fixed width w: the full low bytes of all values are stored as planes of their own, and only the w % 8 bits above
them are packed, eight values to a 64-bit word. That needs exactly ceil(count * w / 8) bytes and no per-value work.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcomp.errors import ConfigError, FrameError

LARGEST_HALF = 0x7F7F
"""Upper half of the largest float32."""

_POWERS = np.left_shift(np.int64(1), np.arange(62, dtype=np.int64))
_MAX_VARINT = 10  # bytes: enough for 64 bits
# Even fields of 8, 16 and 32 bits in a 64-bit word.
_EVEN = {8: 0x00FF00FF00FF00FF, 16: 0x0000FFFF0000FFFF, 32: 0x00000000FFFFFFFF}


def bit_length(values: NDArray[np.int64]) -> NDArray[np.int64]:
    """Bits needed to write each value (0 for 0), values in [0, 2**61); integer arithmetic only."""
    return np.searchsorted(_POWERS, values, side="right").astype(np.int64)


def pack_bits(values: NDArray[Any], width: int) -> bytes:
    """Pack a 1-D integer array, values in [0, 2**width), into ceil(values.size * width / 8) bytes; width 0 to 64."""
    planes = []
    for _ in range(width // 8):
        planes.append((values & 255).astype(np.uint8).tobytes())
        values = values >> 8
    if width % 8:
        planes.append(_pack_narrow(values.astype(np.uint8), width % 8))
    return b"".join(planes)


def unpack_bits(
    data: bytes | memoryview, count: int, width: int, *, shared_tail: bool = False
) -> NDArray[np.unsignedinteger[Any]]:
    """Undo `pack_bits`: (count,) of the smallest unsigned dtype that holds `width` bits; perhaps a view of the data.

    With `shared_tail` the unused high bits of the last byte belong to the caller; otherwise they must be zero.
    Raises FrameError when data is short or those bits are not zero.
    """
    nbytes = -(-count * width // 8)
    if len(data) < nbytes:
        raise FrameError(f"packed bits: expected {nbytes} bytes for {count} values, got {len(data)}; truncated")
    raw = np.frombuffer(data, np.uint8, nbytes)
    planes = [raw[plane * count : (plane + 1) * count] for plane in range(width // 8)]
    if width % 8:
        tail = raw[width // 8 * count :]
        used = count * width % 8
        if used and not shared_tail and tail[-1] >> used:
            raise FrameError("packed bits: expected zero bits after the last value, got ones; damaged")
        planes.append(_unpack_narrow(tail, count, width % 8))
    if len(planes) == 1:
        return planes[0]
    values = np.zeros(count, _dtype_for(width))
    for index, plane in enumerate(planes):
        values |= plane.astype(values.dtype) << values.dtype.type(8 * index)
    return values


def _dtype_for(width: int) -> np.dtype[np.unsignedinteger[Any]]:
    return np.min_scalar_type((1 << width) - 1)


def _pack_narrow(values: NDArray[np.uint8], width: int) -> bytes:
    """Pack (count,) values of 1 to 7 bits: pairs of fields are pushed together three times, 8 -> 16 -> 32 -> 64."""
    count = values.size
    if width == 1:
        return np.packbits(values, bitorder="little").tobytes()
    padded = np.zeros(-(-count // 8) * 8, np.uint8)
    padded[:count] = values
    groups = padded.view("<u8")
    for span, even in _EVEN.items():
        odd = (groups >> np.uint64(span)) & np.uint64(even)
        groups = (groups & np.uint64(even)) | (odd << np.uint64(span // 8 * width))
    kept = groups.astype("<u8").view(np.uint8).reshape(-1, 8)[:, :width]
    return kept.tobytes()[: -(-count * width // 8)]


def _unpack_narrow(data: NDArray[np.uint8], count: int, width: int) -> NDArray[np.uint8]:
    """Undo `_pack_narrow`; bits above a shared tail fall off because only `count` values are kept."""
    if width == 1:
        return np.unpackbits(data, count=count, bitorder="little")
    padded = np.zeros((-(-count // 8), width), np.uint8)
    padded.reshape(-1)[: data.size] = data
    spread = np.zeros((padded.shape[0], 8), np.uint8)
    spread[:, :width] = padded
    groups = spread.reshape(-1).view("<u8")
    for span in (32, 16, 8):
        field = span // 8 * width
        low = np.uint64(((1 << field) - 1) * (((1 << 64) - 1) // ((1 << 2 * span) - 1)))
        groups = (groups & low) | (((groups >> np.uint64(field)) & low) << np.uint64(span))
    return groups.astype("<u8").view(np.uint8)[:count]


def write_varint(value: int) -> bytes:
    """Unsigned LEB128 of a value in [0, 2**64): seven bits a byte, low first, the high bit says that more follow.

    Raises ConfigError for other values.

    >>> write_varint(300).hex()
    'ac02'
    """
    if not 0 <= value < 1 << 64:
        raise ConfigError(f"varint: expected a value in [0, 2**64), got {value}")
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def read_varint(data: bytes | memoryview, start: int = 0) -> tuple[int, int]:
    """Read the varint at `start`: (value, index after it).

    Raises FrameError when it is truncated, longer than ten bytes, above 64 bits, or longer than needed.
    """
    value = 0
    for place, byte in enumerate(data[start : start + _MAX_VARINT]):
        value |= (byte & 127) << 7 * place
        if byte < 128:
            if value >> 64 or (place and not byte):
                raise FrameError(f"varint at byte {start}: expected the shortest form below 2**64; damaged")
            return value, start + place + 1
    raise FrameError(f"varint at byte {start}: expected an end within {_MAX_VARINT} bytes; truncated or damaged")


class BitWriter:
    """Collects fields of varying widths, whole arrays at a time, least bit first."""

    def __init__(self) -> None:
        self._values: list[NDArray[np.int64]] = []
        self._widths: list[NDArray[np.int64]] = []

    def put(self, values: NDArray[np.int64], widths: NDArray[np.int64]) -> None:
        """Append fields: values[i] in [0, 2**widths[i]), widths 0 to 48."""
        self._values.append(values)
        self._widths.append(widths)

    def put_bounded(self, values: NDArray[np.int64], tops: NDArray[np.int64]) -> None:
        """Append values[i] in [0, tops[i]] in truncated binary: floor(log2(tops[i] + 1)) bits, for some one more.

        The extra bits follow as a plane of their own, so that a reader needs two vector steps, not a loop.
        """
        widths = bit_length(tops + 1) - 1
        short = (np.int64(2) << widths) - (tops + 1)  # so many values go without the extra bit
        long = values >= short
        codes = np.where(long, values + short, values << 1)
        self.put(codes >> 1, widths)
        self.put((codes & 1)[long], np.ones(np.count_nonzero(long), np.int64))

    def to_bytes(self) -> bytes:
        """The bits so far, the last byte filled up with zeros."""
        widths = np.concatenate([np.zeros(0, np.int64), *self._widths])
        values = np.concatenate([np.zeros(0, np.int64), *self._values])
        ends = np.cumsum(widths)
        nbytes = -(-int(ends[-1]) // 8) if ends.size else 0
        starts = ends - widths
        shifted = values << (starts & 7)
        out = np.zeros(nbytes + 8)
        for place in range(_span(widths)):
            # Fields never overlap, so adding is or-ing; sums stay below 256 and are exact in bincount's float64.
            out += np.bincount((starts >> 3) + place, weights=(shifted >> 8 * place) & 255, minlength=out.size)
        return out[:nbytes].astype(np.uint8).tobytes()


class BitReader:
    """Reads what `BitWriter` wrote. Raises FrameError when the data ends too soon."""

    def __init__(self, data: bytes | memoryview) -> None:
        self._bytes = np.frombuffer(data, np.uint8)
        self._position = 0  # in bits

    def take(self, widths: NDArray[np.int64]) -> NDArray[np.int64]:
        """The next fields, widths[i] from 0 to 48."""
        start, ends = self._position, np.cumsum(widths) + self._position
        if not ends.size or int(ends[-1]) == start:
            return np.zeros(widths.size, np.int64)
        if int(ends[-1]) > 8 * self._bytes.size:
            raise FrameError(f"bit fields: expected {int(ends[-1])} bits, got {8 * self._bytes.size}; truncated")
        self._position = int(ends[-1])
        first, last = start >> 3, self._position + 7 >> 3
        padded = np.zeros(last - first + 8, np.uint8)
        padded[: last - first] = self._bytes[first:last]
        words = np.ndarray(last - first + 1, "<i8", padded, strides=(1,))  # eight bytes from each byte on
        starts = ends - widths - 8 * first
        values: NDArray[np.int64] = words[starts >> 3] >> (starts & 7)  # a field ends within seven bytes
        values &= (1 << widths) - 1
        return values

    def take_bounded(self, tops: NDArray[np.int64]) -> NDArray[np.int64]:
        """The next values in [0, tops[i]], see `BitWriter.put_bounded`."""
        widths = bit_length(tops + 1) - 1
        short = (np.int64(2) << widths) - (tops + 1)
        parts = self.take(widths)
        long = parts >= short
        places = np.flatnonzero(long)
        if places.size:
            parts[places] += parts[places] - short[places] + self.take(np.ones(places.size, np.int64))
        return parts

    def finish(self) -> int:
        """Bytes consumed; raises FrameError when the rest of the last byte is not zero."""
        nbytes = -(-self._position // 8)
        if self._position % 8 and self._bytes[nbytes - 1] >> self._position % 8:
            raise FrameError("bit fields: expected zero bits after the last field, got ones; damaged")
        return nbytes


def _span(widths: NDArray[np.int64]) -> int:
    """Most bytes that a field of these widths can touch."""
    return (int(widths.max(initial=0)) + 14) // 8


def write_half(value: float) -> int:
    """A number from 0 on as the upper half of a float32, to the nearest; what is larger counts as the largest."""
    bits = np.array([min(value, float(np.finfo(np.float32).max))], np.float32).view(np.uint32)
    return min(int(bits[0]) + 0x8000 >> 16, LARGEST_HALF)


def read_half(written: int) -> float:
    """Inverse of write_half."""
    return float(np.array([written << 16], np.uint32).view(np.float32)[0])
