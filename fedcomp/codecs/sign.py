"""Scaled sign: one bit per value and one scale per tensor.

    C(x) = mean|x| sign(x)          (EF-signSGD: Karimireddy et al., ICML 2019, arXiv 1901.09847)

The contraction is delta = ||x||_1^2 / (d ||x||_2^2), with ||x||_1 and d over what gets a sign.

Zero has two documented rules. "keep": exact zeros (the rows of dead inputs, which real updates are full of) are sent as
positions and stay zero, and the mean is over the others; this costs a byte where there are none. "plus": sign(0) = +1.
Under both a tensor of zeros stays exactly zero, and error feedback takes back what a zero was given too much.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from fedcomp import _validate
from fedcomp.blocks import block_count, spans
from fedcomp.codec import Codec, ContractiveCodec, Count, Floats, Parts, Positions, Schema, Symbols, register
from fedcomp.codecs.uniform import FOUR_BITS
from fedcomp.layout import Layout, Vector
from fedcomp.terms import Term, scaled

_THREE = np.array([-1, 0, 1], np.float32)
_FEW = 256  # zeros that are put between the signs one by one


@register
@dataclass(frozen=True)
class Sign(ContractiveCodec):
    """The sign of each value times its tensor's mean magnitude. Biased: use it with error feedback.

    Args:
        zeros: "keep" sends exact zeros as such (their positions are coded), "plus" gives them the sign +.

    >>> from fedcomp import Layout
    >>> x = np.array([3.0, -1.0, 0.0, 2.0], np.float32)
    >>> layout, rng = Layout.vector(4), np.random.default_rng(0)
    >>> [Sign(zeros).decode(Sign(zeros).encode(x, layout, rng), layout).tolist() for zeros in ("keep", "plus")]
    [[2.0, -2.0, 0.0, 2.0], [1.5, -1.5, 1.5, 1.5]]
    """

    name: ClassVar[str] = "sign"
    number: ClassVar[int] = 3

    zeros: str = "keep"

    def __post_init__(self) -> None:
        _validate.one_of(choices=("keep", "plus"), zeros=self.zeros)

    @property
    def gentle(self) -> Codec | None:
        """Small layers get four bits a value: on the digits' MLP that halves what sign loses, for 2 % more bytes."""
        return FOUR_BITS

    def _encode(self, x: Vector, layout: Layout, rng: np.random.Generator) -> Parts:
        positive = x >= 0
        if self.zeros == "plus":
            return {"scale": _scales(x, layout, None), "sign": positive.view(np.uint8)}
        zero = np.flatnonzero(x == 0)
        signs = np.delete(positive, zero) if zero.size else positive
        return {
            "zeros": np.array(zero.size),
            "where": zero,
            "scale": _scales(x, layout, zero),
            "sign": signs.view(np.uint8),
        }

    def schema(self, layout: Layout) -> Schema:
        zeros = 0
        if self.zeros == "keep":
            zeros = int((yield Count("zeros", layout.size)))
            yield Positions("where", zeros, layout.size)
        yield Floats("scale", block_count(layout, 0), low=0.0)
        yield Symbols("sign", layout.size - zeros, 2)

    def terms(self, parts: Parts, layout: Layout) -> Iterator[Term]:
        zero = parts.get("where", np.zeros(0, np.int64))
        if zero.size:
            yield from scaled(_with_zeros(parts["sign"], zero), _THREE, parts["scale"], layout, 0, even=True)
        else:
            yield from scaled(parts["sign"], _THREE[::2], parts["scale"], layout, 0)


def _with_zeros(sign: NDArray[np.uint8], zero: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Symbols 0, 1 and 2 for -, 0 and + at all places, from the signs at the others."""
    places = zero - np.arange(zero.size)
    doubled = sign << 1
    if zero.size > _FEW:
        return np.insert(doubled, places, 1)
    one = np.ones(1, np.uint8)
    return np.concatenate([part for run in np.split(doubled, places) for part in (run, one)][:-1])


def _sum(x: Vector) -> float:
    """Sum of one piece: float32 in pairs is exact enough and quicker, unless it overflows."""
    with np.errstate(over="ignore"):
        total = float(x.sum())
    return total if np.isfinite(total) else float(x.sum(dtype=np.float64))


def _scales(x: Vector, layout: Layout, zero: np.ndarray[tuple[int], np.dtype[np.int64]] | None) -> Vector:
    """Mean |x| of each tensor with elements, in float64 inside; given the zeros' positions, over the others only."""
    total = np.zeros(block_count(layout, 0))
    for values, blocks in spans(layout, 0):
        total[blocks.start] += _sum(np.abs(x[values]))
    ends = np.array([where.stop for t, where in layout.slices() if t.size])
    count = np.diff(ends, prepend=0)
    if zero is not None:
        count = count - np.diff(np.searchsorted(zero, ends), prepend=0)
    return (total / np.maximum(count, 1)).astype(np.float32)
