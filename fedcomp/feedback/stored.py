"""A client's memory as bytes, for its disk.

    2 bytes magic, version, number of slots; for each slot: name, exponent (int16), frame; CRC-32 of all before

Names and frames stand behind their lengths. A slot's values times 2^-exponent are one frame of this model (FORMAT.md),
so that a file of another model, or a damaged one, is refused.
"""

import struct
import zlib

import numpy as np

from fedcomp import wire
from fedcomp.codec import Codec
from fedcomp.codecs.identity import Identity
from fedcomp.codecs.uniform import Uniform
from fedcomp.descriptor import sized
from fedcomp.entropy.bits import read_varint
from fedcomp.errors import FrameError
from fedcomp.feedback.scheme import Memory
from fedcomp.layout import Layout, Tensor, Vector
from fedcomp.plan import Plan, Rule

PRECISIONS: dict[str, Codec] = {
    "float32": Identity("float32"),
    "float16": Identity("float16"),
    "int8": Uniform(8, block=64, fast=True),
}
"""How memory may be stored: float16 keeps 11 bits of values down to 2^-28 of the largest, int8 seven of a block's."""

_MAGIC = b"\xfc\x9f"
_VERSION = 1
_EXPONENT = struct.Struct("<h")
_PEAK = 15  # largest values go to [2^14, 2^15): the top of float16's range


def memory_layout(layout: Layout) -> Layout:
    """The tensors of a model as float32.

    Those of which nothing is remembered are there too, as dtypes change (FedAvg hands out int64 counters as float64).
    """
    return Layout(tuple(Tensor(t.name, t.shape) for t in layout.tensors))


def pack_memory(memory: Memory, layout: Layout, precision: str = "float16") -> bytes:
    """The memory of a model with this layout (see memory_layout) as bytes."""
    plan = _plan(precision)
    out = _MAGIC + bytes([_VERSION, len(memory.slots)])
    for slot in memory.slots:
        values, exponent = _normalised(memory.flat(slot, layout))
        parts = [
            bucket.codec.encode(values, bucket.layout, np.random.default_rng(0)) for bucket in plan.buckets(layout)
        ]
        frame = wire.pack(wire.Contents(plan, layout, memory.round, parts, {}), layout)
        out += sized(slot.encode()) + _EXPONENT.pack(exponent) + sized(frame)
    return out + struct.pack("<I", zlib.crc32(out))


def unpack_memory(data: bytes, layout: Layout) -> Memory:
    """Inverse of pack_memory. Raises FrameError for bytes that are damaged or of another model."""
    body = data[:-4]
    if len(data) < 8 or body[:2] != _MAGIC or struct.pack("<I", zlib.crc32(body)) != data[-4:]:
        raise FrameError("stored memory is damaged or is something else")
    if body[2] != _VERSION:
        raise FrameError(f"stored memory of version {body[2]}, this fedcomp reads version {_VERSION}")
    rest = memoryview(body)[4:]
    slots: dict[str, dict[str, Vector]] = {}
    round_ = 0
    for _ in range(body[3]):
        name, rest = _take(rest)
        exponent = _EXPONENT.unpack_from(rest)[0] if len(rest) >= _EXPONENT.size else 0
        frame, rest = _take(rest[_EXPONENT.size :])
        contents = wire.unpack(frame, layout)
        round_ = contents.round
        slots[name.decode("ascii", "replace")] = {}
        for bucket, parts in zip(contents.plan.buckets(layout), contents.parts, strict=True):
            values = np.ldexp(bucket.codec.decode(parts, bucket.layout), exponent)
            slots[name.decode("ascii", "replace")] |= bucket.layout.unflatten(values)
    return Memory(round_, slots)


def _plan(precision: str) -> Plan:
    codec = PRECISIONS[precision]
    return Plan(codec, (Rule("*", codec),))


def _normalised(values: Vector) -> tuple[Vector, int]:
    """The values over a power of two that brings the largest near 2^15, and its exponent."""
    peak = float(np.abs(values).max(initial=0))
    exponent = int(np.frexp(peak)[1]) - _PEAK if peak else 0
    return np.ldexp(values, -exponent), exponent


def _take(data: memoryview) -> tuple[bytes, memoryview]:
    count, used = read_varint(data)
    if count > len(data) - used:
        raise FrameError("stored memory ends too early")
    return bytes(data[used : used + count]), data[used + count :]
