"""Uniform scalar quantization: 1 to 8 bits, symmetric or affine, nearest or stochastic rounding.

Symmetric, per block (a block is a tensor, or `block` consecutive values of one), L = 2^(bits-1) - 1:

    s = max|x|,   q = round(L x / s) in {-L, ..., L},   x' = s (q / L)

With one bit there is no L; the two levels are -s and +s, with s = mean|x| under nearest rounding (scaled sign) and
s = max|x|, P(+s) = (1 + x/s) / 2 under stochastic rounding.

Affine, L = 2^bits - 1:  q = round(L (x - min) / (max - min)),  x' = min (1 - q/L) + max (q/L).

Nearest rounding is biased; stochastic rounding q = floor(t + u), u ~ U[0, 1), is unbiased (the rounding of QSGD,
Alistarh et al., NeurIPS 2017, arXiv 1610.02132, with the largest instead of the l2 norm as scale).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from fedcomp import _validate
from fedcomp.blocks import bfloat16_nearest, bfloat16_up, block_count, means, peaks, spans
from fedcomp.codec import Codec, Floats, Parts, Schema, Symbols, alias, register
from fedcomp.layout import Layout, Vector
from fedcomp.terms import Levels, Term, Values, scaled, tensors


@register
@dataclass(frozen=True)
class Uniform(Codec):
    """Uniform quantization with one scale per tensor or per block of values.

    Args:
        bits: 1 to 8. More bits, less error, more bytes; the entropy coder takes back what the data does not use.
        block: values that share a scale (sent as bfloat16; as two float32 when affine). Smaller follows local
            magnitude better and costs more scales. 0: one float32 scale per tensor.
        rounding: "nearest" (least error, biased) or "stochastic" (unbiased, about twice the squared error).
        affine: code between the block's minimum and maximum instead of around zero; for one-sided data.
        fast: pack the symbols into bits and leave the entropy coder out: several times faster, more bytes.

    >>> from fedcomp import Layout
    >>> x = np.array([0.0, 1.0, -127.0, 63.4], np.float32)
    >>> codec, layout = Uniform(8), Layout.vector(4)
    >>> codec.decode(codec.encode(x, layout, np.random.default_rng(0)), layout).round(3).tolist()
    [0.0, 1.0, -127.0, 63.0]
    """

    name: ClassVar[str] = "uniform"
    number: ClassVar[int] = 2

    bits: int = 8
    block: int = 0
    rounding: str = "nearest"
    affine: bool = False
    fast: bool = False

    def __post_init__(self) -> None:
        _validate.integer(low=1, high=8, bits=self.bits)
        _validate.integer(low=0, high=2**31 - 1, block=self.block)
        _validate.one_of(choices=("nearest", "stochastic"), rounding=self.rounding)
        _validate.flag(affine=self.affine)
        _validate.flag(fast=self.fast)

    @property
    def unbiased(self) -> bool:
        return self.rounding == "stochastic"

    @property
    def contractive(self) -> bool:
        """Symmetric levels include zero, so no value moves further than its own size.

        Affine ones need not: of d values in a block, each may move by half a step, in all d/(2L^2) of ||x||^2 at worst.
        """
        return self.rounding == "nearest" and (not self.affine or 0 < self.block < 2 * (2**self.bits - 1) ** 2)

    @property
    def _size(self) -> int:
        """Number of levels."""
        return (1 << self.bits) - (not self.affine and self.bits > 1)

    def _encode(self, x: Vector, layout: Layout, rng: np.random.Generator) -> Parts:
        low, high = self._ends(x, layout)
        q = np.empty(layout.size, np.uint8)
        if self.rounding == "nearest" and not self.affine and self.bits > 1 and _tame(high):
            self._quantize(x, layout, high, q)
            return {"high": high, "q": q}
        steps = np.float32(self._size - 1)
        for values, blocks in spans(layout, self.block):
            piece = x[values].reshape(blocks.stop - blocks.start, -1)
            t = (
                _fraction(piece, low[blocks, None], high[blocks, None])
                if self.affine
                else _ratio(piece, high[blocks, None])
            )
            t *= steps
            if self.rounding == "stochastic":
                down = np.floor(t)
                t -= down
                down += rng.random(t.shape, np.float32) < t  # t + u would round up some exact levels
                t = down
            elif self.bits == 1 and not self.affine:
                np.greater_equal(piece, 0, out=t)  # halfway goes up: zero codes as plus
            else:
                np.rint(t, out=t)
            np.clip(t, 0, steps, out=t)
            q[values] = t.ravel()
        return {"high": high, "q": q} if not self.affine else {"low": low, "high": high, "q": q}

    def _quantize(self, x: Vector, layout: Layout, high: Vector, q: NDArray[np.uint8]) -> None:
        """The commonest case in the fewest passes: symmetric, nearest, scales that can be inverted."""
        top = np.float32(self._size // 2)
        inverse = np.where(high == 0, np.float32(0), top / (high + (high == 0)))
        for values, blocks in spans(layout, self.block):
            t = x[values].reshape(blocks.stop - blocks.start, -1) * inverse[blocks, None]
            np.rint(t, out=t)
            t += top
            q[values] = t.ravel()

    def _ends(self, x: Vector, layout: Layout) -> tuple[Vector, Vector]:
        """Lowest and highest level of each block, as they will be sent."""
        if self.affine:
            return _extremes(x, layout, self.block)
        if self.bits == 1 and self.rounding == "nearest":
            high = means(x, layout, self.block)
            high = bfloat16_nearest(high) if self.block else high
        else:
            high = peaks(x, layout, self.block)
            high = bfloat16_up(high) if self.block else high
        return -high, high

    def schema(self, layout: Layout) -> Schema:
        blocks = block_count(layout, self.block)
        if self.affine:
            yield Floats("low", blocks)
            yield Floats("high", blocks)
        else:
            yield Floats("high", blocks, "bfloat16" if self.block else "float32", low=0.0)
        yield Symbols("q", layout.size, self._size, fast=self.fast)

    def terms(self, parts: Parts, layout: Layout) -> Iterator[Term]:
        high, q = parts["high"], parts["q"]
        low = parts["low"] if self.affine else None
        levels, rest = _levels(self._size, self.affine)
        if low is None:
            yield from scaled(q, levels, high, layout, self.block, even=True)
        elif self.block == 0:
            for values, blocks in tensors(layout):
                yield Levels(values, q[values], levels * high[blocks] + rest * low[blocks], even=True)
        else:
            for values, blocks in spans(layout, self.block):
                rows = q[values].reshape(blocks.stop - blocks.start, -1)
                yield Values(values, (levels[rows] * high[blocks, None] + rest[rows] * low[blocks, None]).ravel())


@lru_cache(maxsize=32)
def _levels(size: int, affine: bool) -> tuple[Vector, Vector]:
    """Weights of the high and of the low end for each symbol. At most 1, so that the product cannot overflow."""
    up = np.arange(size, dtype=np.float64) / (size - 1)
    high = up if affine else 2 * up - 1
    return high.astype(np.float32), (1 - up).astype(np.float32)


def _tame(high: Vector) -> bool:
    """Whether all scales are zero or far from the ends of float32."""
    used = high[high > 0]
    return used.size == 0 or bool(used.min() > 1e-30 and used.max() < 3e38)


def _ratio(x: Vector, high: Vector) -> NDArray[np.float32]:
    """(x + high) / (2 high) in float32; one half, the level of zero, where high is 0."""
    t: NDArray[np.float32] = x / (high + (high == 0))
    t *= np.float32(0.5)
    t += np.float32(0.5)
    return t


def _fraction(x: Vector, low: Vector, high: Vector) -> NDArray[np.float32]:
    """(x - low) / (high - low) in float32, 0 where the ends meet. Near float32's limit halves keep it from overflow."""
    scale = np.where(np.maximum(high, -low) > 1e38, np.float32(0.5), np.float32(1))
    width = high * scale - low * scale
    t = x * scale
    t -= low * scale
    t /= np.where(width == 0, np.float32(1), width)
    return t


def _extremes(x: Vector, layout: Layout, block: int) -> tuple[Vector, Vector]:
    """Minimum and maximum of each block."""
    low = np.full(block_count(layout, block), np.inf, np.float32)
    high = -low
    for values, blocks in spans(layout, block):
        rows = x[values].reshape(blocks.stop - blocks.start, -1)
        np.minimum(low[blocks], rows.min(axis=1), out=low[blocks])
        np.maximum(high[blocks], rows.max(axis=1), out=high[blocks])
    return low, high


FOUR_BITS = Uniform(4)
"""The gentle companion of codecs that would starve small layers, see Codec.gentle."""

alias("int8", "uniform(8)")
alias("int4", "uniform(4, block=64)")
