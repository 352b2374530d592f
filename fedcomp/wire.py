"""The frame: the only place that turns parts into bytes and back. FORMAT.md beside this file is its specification.

Everything is checked before it is used: CRC, version, flags, layout, round, plan, every length, every float, every
symbol. Names and shapes are not in the frame: reader and writer share the layout, the frame names it by digest.
Whatever is wrong with the bytes ends in one exception, FrameError.
"""

import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcomp.codec import Columns, Count, Floats, Parts, PartSpec, Positions, Schema, Symbols, symbol_dtype
from fedcomp.descriptor import describe, read_plan, sized
from fedcomp.entropy import (
    columns_size,
    decode_columns,
    decode_matrices,
    decode_positions,
    decode_symbols,
    encode_columns,
    encode_matrices,
    encode_positions,
    encode_symbols,
)
from fedcomp.entropy.bits import LARGEST_HALF, read_half, read_varint, write_half, write_varint
from fedcomp.errors import FrameError, LayoutError, RoundError
from fedcomp.layout import DTYPES, Layout
from fedcomp.plan import Bucket, Plan

MAGIC = b"\xfc\x9d"
VERSION = 2
"""What is written. Version 1, with a longer header and plan, is read too."""

HEADER = struct.Struct("<2sBBI4s")
"""Magic, version, flags, CRC-32 of all other bytes, start of the layout digest: 12 bytes. The round follows."""

_OLD_TAIL = struct.Struct("<4sI")
"""In version 1 the rest of the digest and the round follow."""

_OTHER_DTYPES, _PREDICTED, _RESET, _SHORTENED, _NUMBERED, _UNKEPT, _MEASURED = (1 << bit for bit in range(7))  # flags
_FLAGS = {1: _MEASURED - 1, 2: 2 * _MEASURED - 1}
_CRC_AT = slice(4, 8)
_TOLD = 1000  # bytes of a wrong plan that are read just to name it


@dataclass(frozen=True)
class Notes:
    """What a client says about its feedback and about the model that it was sent.

    Attributes:
        predicted: the update was coded as a difference to the server's predictor.
        reset: the client's memory was lost, damaged or too old, and started again from zero.
        shortened: the client's memory had grown beyond its limit and was shortened.
        number: the client introduces itself by this number, which it keeps when its node id changes; None: it does not.
        unkept: the client was asked to keep the model of its package and could not: no difference to it can be sent.
        norm: the length of the update of the coded tensors, to three digits; None: the server does not need it.
    """

    predicted: bool = False
    reset: bool = False
    shortened: bool = False
    number: int | None = None
    unkept: bool = False
    norm: float | None = None

    @classmethod
    def rounded(cls, norm: float) -> float:
        """The norm as it is sent: the nearest number with 8 bits that float32 holds."""
        return read_half(write_half(norm))

    @classmethod
    def rounded_up(cls, norm: float) -> float:
        """Likewise, but the nearest that is not below the norm, as long as there is one."""
        near = cls.rounded(norm)
        return near if near >= norm else cls.rounded(norm * (1 + 2.0**-8))


@dataclass(frozen=True)
class Contents:
    """What a frame says.

    Attributes:
        plan: how the update was coded.
        layout: the model's tensors with the dtypes of the reply.
        round: server round that the update belongs to, 0 to 2^32 - 1.
        parts: one for each bucket of plan.buckets(layout), in that order.
        verbatim: the values (not updates) of the tensors of plan.verbatim(layout), by name.
        notes: what else the client says.
    """

    plan: Plan
    layout: Layout
    round: int
    parts: list[Parts]
    verbatim: dict[str, NDArray[Any]]
    notes: Notes = Notes()


# --- writing ---------------------------------------------------------------------------------------------------------


def pack(contents: Contents, base: Layout, *, deflate: bool = True) -> bytes:
    """The frame of an update to a model with layout `base` (the same tensors, perhaps of other dtypes).

    Without `deflate` verbatim tensors are not compressed.

    Raises LayoutError if the parts do not fit their codec's schema.
    """
    flags, body = _write_notes(contents.notes)
    body = write_varint(contents.round) + body + sized(describe(contents.plan))
    if contents.layout.tensors != base.tensors:
        flags, body = flags | _OTHER_DTYPES, body + _write_dtypes(contents.layout)
    for bucket, parts in zip(contents.plan.buckets(contents.layout), contents.parts, strict=True):
        body += write_parts(parts, bucket)
    body += _write_verbatim(contents, deflate)
    head = HEADER.pack(MAGIC, VERSION, flags, 0, base.digest)
    crc = zlib.crc32(body, zlib.crc32(head[_CRC_AT.stop :], zlib.crc32(head[: _CRC_AT.start])))
    return HEADER.pack(MAGIC, VERSION, flags, crc, base.digest) + body


def _write_notes(notes: Notes) -> tuple[int, bytes]:
    flags = notes.predicted * _PREDICTED | notes.reset * _RESET | notes.shortened * _SHORTENED | notes.unkept * _UNKEPT
    body = b""
    if notes.number is not None:
        flags, body = flags | _NUMBERED, write_varint(notes.number)
    if notes.norm is not None:
        flags, body = flags | _MEASURED, body + write_half(notes.norm).to_bytes(2, "little")
    return flags, body


def _write_dtypes(layout: Layout) -> bytes:
    """Runs of (dtype code, how many tensors in a row)."""
    runs = [(DTYPES.index(d), len(list(group))) for d, group in groupby(t.dtype for t in layout.tensors)]
    return b"".join(bytes([code]) + write_varint(count) for code, count in runs)


def write_parts(parts: Parts, bucket: Bucket) -> bytes:
    """The streams of a bucket's parts. Raises LayoutError if they do not fit their codec's schema."""

    written: list[bytes] = []
    _visit(parts, bucket, lambda part, spec: written.append(_write_part(part, spec)))
    return b"".join(written)


def parts_size(parts: Parts, bucket: Bucket) -> int:
    """About the bytes of write_parts: columns, which take long, are estimated."""
    sizes: list[int] = []

    def measure(part: NDArray[Any], spec: PartSpec) -> None:
        if isinstance(spec, Columns):
            sizes.append(columns_size(part, spec.shapes, spec.kinds))
        else:
            sizes.append(len(_write_part(part, spec)))

    _visit(parts, bucket, measure)
    return sum(sizes)


def _visit(parts: Parts, bucket: Bucket, see: Callable[[NDArray[Any], PartSpec], None]) -> None:
    """Show each part with its specification, in the order of the frame."""

    def visit(spec: PartSpec) -> NDArray[Any]:
        part = parts.get(spec.name)
        if part is None or part.size != getattr(spec, "count", 1):
            raise LayoutError(f"codec {bucket.codec}: part {spec.name!r} does not fit {spec}")
        see(part, spec)
        return part

    _walk(bucket.codec.schema(bucket.layout), visit)


def _walk(schema: Schema, step: Callable[[PartSpec], NDArray[Any]]) -> None:
    """Drive a schema: hand each specification to `step` and its part back to the schema."""
    try:
        spec = next(schema)
        while True:
            spec = schema.send(step(spec))
    except StopIteration:
        return


def _write_part(part: NDArray[Any], spec: PartSpec) -> bytes:
    match spec:
        case Floats(dtype="float32"):
            return part.astype("<f4").tobytes()
        case Floats(dtype="float16"):
            return _write_planes(part.astype(np.float16).view(np.uint16))
        case Floats():
            return _write_planes((part.view(np.uint32) >> np.uint32(16)).astype(np.uint16))
        case Symbols(shapes=()):
            return encode_symbols(part, spec.size, fast=spec.fast)
        case Symbols():
            return encode_matrices(part, spec.size, spec.shapes)
        case Positions():
            return encode_positions(part.astype(np.int64, copy=False), spec.universe)  # 32-bit machines index by int32
        case Count():
            return write_varint(int(part))
        case Columns():
            return encode_columns(part, spec.shapes, spec.kinds)


def _write_planes(words: NDArray[np.uint16]) -> bytes:
    """High bytes, then low bytes: exponents repeat, so the first plane nearly vanishes."""
    return encode_symbols((words >> 8).astype(np.uint8), 256) + encode_symbols(words.astype(np.uint8), 256)


def _write_verbatim(contents: Contents, deflate: bool) -> bytes:
    tensors = contents.plan.verbatim(contents.layout)
    if not tensors:
        return b""
    arrays = [contents.verbatim[t.name] for t in tensors]
    raw = b"".join(a.astype(a.dtype.newbyteorder("<"), copy=False).tobytes() for a in arrays)
    small = zlib.compress(raw, 9) if deflate else raw
    return b"\1" + sized(small) if len(small) + 2 < len(raw) else b"\0" + raw


# --- reading ---------------------------------------------------------------------------------------------------------


def unpack(frame: bytes, base: Layout, *, plan: Plan | None = None, round: int | None = None) -> Contents:
    """Check a frame against the model's layout and take it apart.

    Args:
        frame: the bytes.
        base: layout of the model the update applies to; its dtypes hold unless the frame says otherwise.
        plan: the plan asked for; a frame made with another one is refused. None: whatever the frame says.
        round: the round asked for, likewise.

    Raises FrameError whatever is wrong with the bytes, before anything is allocated that the layout does not bound.
    """
    head, reader = _open(frame)
    notes = _read_notes(reader, head.flags)
    if not base.digest.startswith(head.digest):
        raise FrameError(f"frame is for another model: layout {head.digest.hex()}, expected {base.digest.hex()}")
    if round is not None and head.round != round:
        raise RoundError(f"frame is for round {head.round}, expected round {round}")
    plan = _read_plan(reader, plan, head.version)
    layout = _read_dtypes(reader, base) if head.flags & _OTHER_DTYPES else base
    parts = [_read_parts(reader, bucket.codec.schema(bucket.layout)) for bucket in plan.buckets(layout)]
    verbatim = _read_verbatim(reader, plan, layout)
    if reader.left:
        raise FrameError(f"frame has {reader.left} bytes too many")
    return Contents(plan, layout, head.round, parts, verbatim, notes)


def peek(frame: bytes) -> tuple[int, Notes] | None:
    """The round and the notes of a frame; None if the bytes are no sound frame. Reads the checksum, not the content."""
    try:
        head, reader = _open(frame)
        return head.round, _read_notes(reader, head.flags)
    except FrameError:
        return None


def version_of(frame: bytes) -> int:
    """The version of what is a sound frame."""
    return frame[len(MAGIC)]


def inspect(frame: bytes) -> dict[str, Any]:
    """What a frame says about itself without the model: JSON-ready. Raises FrameError if it is damaged."""
    head, reader = _open(frame)
    notes = _read_notes(reader, head.flags)
    described = reader.take(reader.varint())
    try:
        plan: Any = read_plan(described).to_config()
    except FrameError as error:
        plan = str(error)
    return {
        "bytes": len(frame),
        "version": head.version,
        "round": head.round,
        "layout": head.digest.hex(),
        "plan": plan,
        "notes": {key: value for key, value in vars(notes).items() if value is not False and value is not None},
        "header_bytes": head.size,
        "plan_bytes": len(described),
        "body_bytes": reader.left,
    }


@dataclass(frozen=True)
class _Head:
    version: int
    flags: int
    digest: bytes  # its first 4 bytes, in version 1 all 8
    round: int
    size: int  # bytes of the header


class _Reader:
    """The unread rest of a frame."""

    def __init__(self, data: memoryview) -> None:
        self.data = data

    @property
    def left(self) -> int:
        return len(self.data)

    def take(self, count: int) -> bytes:
        if count > len(self.data):
            raise FrameError(f"frame ends too early: {count} bytes expected, {len(self.data)} left")
        taken, self.data = self.data[:count], self.data[count:]
        return bytes(taken)

    def varint(self) -> int:
        value, used = read_varint(self.data)
        self.data = self.data[used:]
        return value

    def symbols(self, count: int, size: int) -> NDArray[Any]:
        values, used = decode_symbols(self.data, count, size)
        self.data = self.data[used:]
        return values

    def matrices(self, count: int, size: int, shapes: tuple[tuple[int, int], ...]) -> NDArray[Any]:
        values, used = decode_matrices(self.data, count, size, shapes)
        self.data = self.data[used:]
        return values

    def columns(self, shapes: tuple[tuple[int, int], ...], kinds: tuple[int, ...]) -> NDArray[np.int32]:
        values, used = decode_columns(self.data, shapes, kinds)
        self.data = self.data[used:]
        return values

    def positions(self, count: int, universe: int) -> NDArray[np.int64]:
        values, used = decode_positions(self.data, count, universe)
        self.data = self.data[used:]
        return values


def _open(frame: bytes) -> tuple[_Head, _Reader]:
    if len(frame) < HEADER.size:
        raise FrameError(f"frame of {len(frame)} bytes is shorter than its header of {HEADER.size}")
    magic, version, flags, crc, digest = HEADER.unpack_from(frame)
    if magic != MAGIC:
        raise FrameError(f"not a fedcomp frame: starts with {magic.hex()}, expected {MAGIC.hex()}")
    if version not in _FLAGS:
        raise FrameError(
            f"frame of version {version}, this fedcomp reads versions {', '.join(map(str, _FLAGS))}; "
            "update the older side"
        )
    view = memoryview(frame)
    if zlib.crc32(view[_CRC_AT.stop :], zlib.crc32(view[: _CRC_AT.start])) != crc:
        raise FrameError("frame is damaged: its checksum does not match")
    if flags & ~_FLAGS[version]:
        raise FrameError(f"frame has unknown flags {flags:#04x}; it may come from a newer fedcomp")
    reader = _Reader(view[HEADER.size :])
    if version == 1:
        rest, round_ = _OLD_TAIL.unpack(reader.take(_OLD_TAIL.size))
        return _Head(version, flags, digest + rest, round_, len(frame) - reader.left), reader
    round_ = reader.varint()
    if round_ >> 32:
        raise FrameError(f"frame is for round {round_}, expected one below 2^32")
    return _Head(version, flags, digest, round_, len(frame) - reader.left), reader


def _read_notes(reader: _Reader, flags: int) -> Notes:
    number = reader.varint() if flags & _NUMBERED else None
    if number is not None and number >> 63:  # as far as the integers of Flower's messages go
        raise FrameError(f"frame has a client number of {number}, expected one below 2^63")
    written = int.from_bytes(reader.take(2), "little") if flags & _MEASURED else None
    if written is not None and written > LARGEST_HALF:
        raise FrameError("frame has a norm that is negative or not finite")
    predicted, reset, shortened, unkept = (bool(flags & bit) for bit in (_PREDICTED, _RESET, _SHORTENED, _UNKEPT))
    return Notes(predicted, reset, shortened, number, unkept, None if written is None else read_half(written))


def _read_plan(reader: _Reader, expected: Plan | None, version: int) -> Plan:
    described = reader.take(reader.varint())
    if expected is None:
        plan = read_plan(described)
        if describe(plan, whole=version == 1) != described:
            raise FrameError("descriptor: expected the shortest form of the plan, got another")
        return plan
    if described != describe(expected, whole=version == 1):
        try:
            came = str(read_plan(described[:_TOLD]).to_config())
        except FrameError as error:
            came = str(error)
        raise FrameError(f"frame was made with another plan: {came[:200]}, expected {str(expected.to_config())[:200]}")
    return expected


def _read_dtypes(reader: _Reader, base: Layout) -> Layout:
    dtypes: list[str] = []
    while len(dtypes) < len(base.tensors):
        code, count = reader.take(1)[0], reader.varint()
        if code >= len(DTYPES) or not 0 < count <= len(base.tensors) - len(dtypes):
            raise FrameError(f"dtype table: code {code} for {count} tensors is not possible here")
        dtypes += [DTYPES[code]] * count
    return base.with_dtypes(dtypes)


def _read_parts(reader: _Reader, schema: Schema) -> Parts:
    def read(spec: PartSpec) -> NDArray[Any]:
        parts[spec.name] = _read_part(reader, spec)
        return parts[spec.name]

    parts: Parts = {}
    _walk(schema, read)
    return parts


def _read_part(reader: _Reader, spec: PartSpec) -> NDArray[Any]:
    match spec:
        case Floats():
            return _check_floats(_read_floats(reader, spec), spec)
        case Symbols(shapes=()):
            return reader.symbols(spec.count, spec.size).astype(symbol_dtype(spec.size), copy=False)
        case Symbols():
            return reader.matrices(spec.count, spec.size, spec.shapes)
        case Positions():
            return reader.positions(spec.count, spec.universe)
        case Count():
            value = reader.varint()
            if value > spec.high:
                raise FrameError(f"part {spec.name!r}: {value} is beyond its limit {spec.high}")
            return np.array(value, np.int64)
        case Columns():
            return reader.columns(spec.shapes, spec.kinds)


def _read_floats(reader: _Reader, spec: Floats) -> NDArray[np.float32]:
    if spec.dtype == "float32":
        return np.frombuffer(reader.take(4 * spec.count), "<f4").astype(np.float32)
    high, low = reader.symbols(spec.count, 256), reader.symbols(spec.count, 256)
    words = high.astype(np.uint16) << 8 | low
    half: NDArray[np.float16] = words.view(np.float16)
    return half.astype(np.float32) if spec.dtype == "float16" else (words.astype(np.uint32) << 16).view(np.float32)


def _check_floats(values: NDArray[np.float32], spec: Floats) -> NDArray[np.float32]:
    if values.size and not (spec.low <= values.min() and values.max() <= spec.high):  # NaN fails both
        raise FrameError(f"part {spec.name!r}: expected finite values from {spec.low:g} to {spec.high:g}")
    return values


def _read_verbatim(reader: _Reader, plan: Plan, layout: Layout) -> dict[str, NDArray[Any]]:
    tensors = plan.verbatim(layout)
    if not tensors:
        return {}
    total = sum(t.size * np.dtype(t.dtype).itemsize for t in tensors)
    mode = reader.take(1)[0]
    if mode > 1:
        raise FrameError(f"verbatim section: mode {mode} is unknown")
    raw = _inflate(reader.take(reader.varint()), total) if mode else reader.take(total)
    out, at = {}, 0
    for tensor in tensors:
        dtype = np.dtype(tensor.dtype)
        data = raw[at : at + tensor.size * dtype.itemsize]
        at += len(data)
        out[tensor.name] = _check_verbatim(tensor.name, data, dtype).reshape(tensor.shape)
    return out


def _inflate(data: bytes, total: int) -> bytes:
    inflater = zlib.decompressobj()
    try:
        raw = inflater.decompress(data, total + 1)  # never more than the tensors need, whatever the data says
    except zlib.error as error:
        raise FrameError(f"verbatim section: {error}") from None
    if len(raw) != total or not inflater.eof or inflater.unused_data:
        raise FrameError(f"verbatim section: expected {total} bytes of tensors in one zlib stream")
    return raw


def _check_verbatim(name: str, data: bytes, dtype: np.dtype[Any]) -> NDArray[Any]:
    if dtype == np.bool_ and data.strip(b"\0\1"):
        raise FrameError(f"verbatim tensor {name!r}: a boolean is neither 0 nor 1")
    values = np.frombuffer(data, dtype.newbyteorder("<")).astype(dtype)
    if dtype.kind == "f" and not np.isfinite(values).all():
        raise FrameError(f"verbatim tensor {name!r}: expected finite values")
    return values
