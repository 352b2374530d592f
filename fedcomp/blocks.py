"""Walks over a layout in blocks that share a scale, in pieces small enough to stay in a core's cache."""

from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from fedcomp.layout import Layout, Vector

CHUNK = 1 << 15
"""Values handled at a time: 128 kB of float32, so that the few passes over them run from the second-level cache."""


def block_count(layout: Layout, block: int) -> int:
    """Number of blocks of `block` values; blocks restart at each tensor, 0 makes each tensor one block."""
    if block == 0:
        return sum(t.size > 0 for t in layout.tensors)
    return sum(-(-t.size // block) for t in layout.tensors)


def spans(layout: Layout, block: int) -> Iterator[tuple[slice, slice]]:
    """Pieces (values, blocks): ``x[values].reshape(number of blocks, -1)`` has one block, or a part of one, a row."""
    return iter(_spans(layout, block))


@lru_cache(maxsize=32)
def _spans(layout: Layout, block: int) -> tuple[tuple[slice, slice], ...]:
    found, first = [], 0
    for tensor, where in layout.slices():
        if tensor.size == 0:
            continue
        width = block or tensor.size
        if width > CHUNK:  # one block over several pieces
            for index in range(-(-tensor.size // width)):
                start = where.start + index * width
                stop = min(start + width, where.stop)
                cuts = [*range(start, stop, CHUNK), stop]
                found += [(slice(a, b), slice(first + index, first + index + 1)) for a, b in pairwise(cuts)]
        else:
            whole = tensor.size // width
            step = max(1, CHUNK // width)
            for index in range(0, whole, step):
                count = min(step, whole - index)
                start = where.start + index * width
                found.append((slice(start, start + count * width), slice(first + index, first + index + count)))
            if whole * width < tensor.size:
                found.append((slice(where.start + whole * width, where.stop), slice(first + whole, first + whole + 1)))
        first += -(-tensor.size // width)
    return tuple(found)


def peaks(x: Vector, layout: Layout, block: int) -> Vector:
    """Largest |x| of each block, float32 (block_count,)."""
    out = np.zeros(block_count(layout, block), np.float32)
    for values, blocks in spans(layout, block):
        rows = np.abs(x[values]).reshape(blocks.stop - blocks.start, -1)
        np.maximum(out[blocks], rows.max(axis=1), out=out[blocks])
    return out


def means(x: Vector, layout: Layout, block: int) -> Vector:
    """Mean |x| of each block, float32 (block_count,), summed in float64."""
    total = np.zeros(block_count(layout, block))
    count = np.zeros_like(total)
    for values, blocks in spans(layout, block):
        rows = np.abs(x[values]).reshape(blocks.stop - blocks.start, -1)
        total[blocks] += rows.sum(axis=1, dtype=np.float64)
        count[blocks] += rows.shape[1]
    return (total / np.maximum(count, 1)).astype(np.float32)


def root_mean_square(x: Vector) -> float:
    """Root mean square of the values, in float64 inside."""
    total = 0.0
    for start in range(0, x.size, CHUNK):
        piece = x[start : start + CHUNK].astype(np.float64)
        total += float(piece @ piece)
    return float(np.sqrt(total / max(x.size, 1)))


def root_mean_squares(x: Vector, layout: Layout, block: int = 0) -> NDArray[np.float64]:
    """Root mean square of each block (block_count,), in float64."""
    total = np.zeros(block_count(layout, block))
    count = np.zeros_like(total)
    for values, blocks in spans(layout, block):
        rows = x[values].reshape(blocks.stop - blocks.start, -1).astype(np.float64)
        total[blocks] += np.einsum("ij,ij->i", rows, rows)
        count[blocks] += rows.shape[1]
    return np.sqrt(total / np.maximum(count, 1))


def bfloat16_up(scale: Vector) -> Vector:
    """Non-negative values rounded up to bfloat16 (kept as float32), so that no |x| exceeds its block's scale.

    The one exception is the topmost float32 range, which bfloat16 cannot reach: it is rounded down instead.
    """
    return _bfloat16(scale, 0xFFFF)


def bfloat16_nearest(scale: Vector) -> Vector:
    """Non-negative values rounded to the nearest bfloat16 (kept as float32)."""
    return _bfloat16(scale, 0x8000)


def _bfloat16(scale: Vector, carry: int) -> Vector:
    bits = (scale.view(np.uint32).astype(np.uint64) + carry) >> 16
    out: Vector = (np.minimum(bits, 0x7F7F).astype(np.uint32) << 16).view(np.float32)
    return out
