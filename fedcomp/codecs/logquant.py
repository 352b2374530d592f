"""Logarithmic quantization: fine levels near zero, coarse ones for large values.

    q = sgn(x) round(log2(1 + |x|/delta) / s),   x' = sgn(q) delta (2^(s|q|) - 1)

Of b bits, L = 2^(b-1) - 1 levels are on each side of zero. The step s and the offset delta follow from the tensor's (or
block's) largest magnitude m and from the range of `octaves`: the top level is m = delta (2^octaves - 1), so
s = octaves/L, and the smallest level above zero is m (2^s - 1) / (2^octaves - 1).

Three roundings share these levels. "nearest" takes the nearest level: least error, and no value moves further than its
own size. "log" is the formula: nearest in the logarithm, which favours the upper level. "stochastic" draws one of the
two levels around |x| in the *linear* domain, P(upper) = (|x| - lower) / (upper - lower), and is unbiased.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from fedcomp import _validate
from fedcomp.blocks import bfloat16_up, block_count, peaks, spans
from fedcomp.codec import Codec, Floats, Parts, Schema, Symbols, register
from fedcomp.layout import Layout, Vector
from fedcomp.terms import Term, scaled


@register
@dataclass(frozen=True)
class LogQuantizer(Codec):
    """Levels in geometric progression below the largest magnitude of a tensor or block.

    Args:
        bits: 2 to 8. More: less error, more bytes.
        octaves: dynamic range, 1 to 60: levels reach down to about 2^-octaves of the largest magnitude. Larger suits
            heavier tails; with few bits it makes the levels coarse.
        rounding: "nearest" (least error, biased), "log" (the formula's, biased) or "stochastic" (unbiased).
        block: values that share a largest magnitude (sent as bfloat16, rounded up). 0: one float32 per tensor.

    >>> from fedcomp import Layout
    >>> x = np.array([7.0, -1.2, 0.1, 3.4], np.float32)
    >>> codec, layout = LogQuantizer(bits=3, octaves=3), Layout.vector(4)  # levels 0, 1, 3, 7
    >>> codec.decode(codec.encode(x, layout, np.random.default_rng(0)), layout).round(3).tolist()
    [7.0, -1.0, 0.0, 3.0]
    """

    name: ClassVar[str] = "log"
    number: ClassVar[int] = 9

    bits: int = 4
    octaves: float = 5.0
    rounding: str = "nearest"
    block: int = 0

    def __post_init__(self) -> None:
        _validate.integer(low=2, high=8, bits=self.bits)
        _validate.number(low=1, high=60, octaves=self.octaves)
        _validate.one_of(choices=("nearest", "log", "stochastic"), rounding=self.rounding)
        _validate.integer(low=0, high=2**31 - 1, block=self.block)

    @property
    def unbiased(self) -> bool:
        return self.rounding == "stochastic"

    @property
    def contractive(self) -> bool:
        """Rounding in the logarithm can more than double a small value."""
        return self.rounding == "nearest"

    @property
    def _top(self) -> int:
        return (1 << (self.bits - 1)) - 1

    def _encode(self, x: Vector, layout: Layout, rng: np.random.Generator) -> Parts:
        high = peaks(x, layout, self.block)
        high = bfloat16_up(high) if self.block else high
        divisor = np.where(high == 0, np.float32(1), high)
        q = np.empty(layout.size, np.uint8)
        for values, blocks in spans(layout, self.block):
            t = (x[values].reshape(blocks.stop - blocks.start, -1) / divisor[blocks, None]).ravel()
            q[values] = self._round(t, rng)
        return {"high": high, "q": q}

    def _round(self, t: NDArray[Any], rng: np.random.Generator) -> NDArray[Any]:
        """Symbols of values in [-1, 1]."""
        levels = _levels(self._top, self.octaves)
        size = np.minimum(np.abs(t), np.float32(1))
        if self.rounding == "stochastic":
            q = np.searchsorted(levels[1:], size, side="right")
            lower = levels[q]
            width = np.append(np.diff(levels), np.float32(1))[q]
            q += rng.random(t.shape, np.float32) < (size - lower) / width
        else:
            q = np.searchsorted(_borders(self._top, self.octaves, self.rounding), size, side="right")
        np.negative(q, out=q, where=t < 0)
        symbols: NDArray[Any] = q + self._top
        return symbols

    def schema(self, layout: Layout) -> Schema:
        blocks = block_count(layout, self.block)
        yield Floats("high", blocks, "bfloat16" if self.block else "float32", low=0.0)
        yield Symbols("q", layout.size, 2 * self._top + 1)

    def terms(self, parts: Parts, layout: Layout) -> Iterator[Term]:
        levels = _levels(self._top, self.octaves)
        levels = np.concatenate([-levels[:0:-1], levels])
        yield from scaled(parts["q"], levels, parts["high"], layout, self.block)


@lru_cache(maxsize=32)
def _levels(top: int, octaves: float) -> Vector:
    """Levels (top + 1,) from 0 to 1, in units of the largest magnitude."""
    return _progression(np.arange(top + 1) / top, octaves)


@lru_cache(maxsize=32)
def _borders(top: int, octaves: float, rounding: str) -> Vector:
    """Where the next level (top,) begins."""
    if rounding == "nearest":
        levels = _levels(top, octaves)
        middle: Vector = (levels[1:] + levels[:-1]) / np.float32(2)
        return middle
    return _progression((np.arange(top) + 0.5) / top, octaves)


def _progression(share: NDArray[np.float64], octaves: float) -> Vector:
    """(2^(octaves share) - 1) / (2^octaves - 1)"""
    values: NDArray[np.float64] = np.expm1(np.log(2) * octaves * share) / (2.0**octaves - 1)
    return values.astype(np.float32)
