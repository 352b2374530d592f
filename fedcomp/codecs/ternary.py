"""Three levels: -s, 0 and +s. TernGrad draws them at random, STC keeps the largest values.

TernGrad (Wen et al., NeurIPS 2017, arXiv 1705.07878), per tensor, sigma = root mean square of x:

    x <- clip(x, -2.5 sigma, 2.5 sigma),   s = max|x|,   Q(x_i) = s sgn(x_i) b_i,   P(b_i = 1) = |x_i| / s

It is unbiased for the clipped x only; without clipping (clip=0) for x itself, at a much larger variance.

STC, sparse ternary compression (Sattler et al., IEEE TNNLS 2020, arXiv 1903.02891), over the whole bucket:

    M = the k values of largest |x|,   mu = mean |x| over M,   Q(x_i) = mu sgn(x_i) for i in M, else 0

mu is the least-squares scale: ||Q(x) - x||^2 = ||x||^2 - k mu^2. Hence STC is contractive; use it with error feedback.
The paper's Golomb code is replaced by the frame's coder for positions.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedcomp import _validate
from fedcomp.blocks import block_count, peaks, root_mean_squares, spans
from fedcomp.codec import Codec, ContractiveCodec, Count, Floats, Parts, Positions, Schema, Symbols, register
from fedcomp.codecs.topk import largest
from fedcomp.codecs.uniform import FOUR_BITS
from fedcomp.layout import Layout, Vector
from fedcomp.terms import Levels, Term, scaled


@register
@dataclass(frozen=True)
class TernGrad(Codec):
    """A random ternary value per value and one scale per tensor.

    Args:
        clip: largest kept magnitude in units of the tensor's root mean square, up to 1000. Smaller: less variance and
            fewer bytes, more bias. 0: no clipping, exactly unbiased.

    >>> from fedcomp import Layout
    >>> x = np.array([2.0, -2.0, 0.0], np.float32)
    >>> codec, layout = TernGrad(), Layout.vector(3)
    >>> codec.decode(codec.encode(x, layout, np.random.default_rng(0)), layout).tolist()
    [2.0, -2.0, 0.0]
    """

    name: ClassVar[str] = "terngrad"
    number: ClassVar[int] = 7

    clip: float = 2.5

    def __post_init__(self) -> None:
        _validate.number(low=0, high=1000, clip=self.clip)

    @property
    def unbiased(self) -> bool:
        """Only without clipping."""
        return self.clip == 0

    @property
    def contractive(self) -> bool:
        return False

    def _encode(self, x: Vector, layout: Layout, rng: np.random.Generator) -> Parts:
        scale = peaks(x, layout, 0)
        if self.clip:
            scale = np.minimum(scale, self.clip * root_mean_squares(x, layout)).astype(np.float32)
        q = np.empty(layout.size, np.uint8)
        for values, blocks in spans(layout, 0):
            top = scale[blocks.start]
            t = np.clip(x[values], -top, top)
            t /= top if top > 0 else np.float32(1)
            t += rng.random(t.shape, np.float32)  # before the offset, so that zeros stay zero whatever u is
            np.floor(t, out=t)
            t += np.float32(1)
            q[values] = np.minimum(t, np.float32(2), out=t)
        return {"scale": scale, "q": q}

    def schema(self, layout: Layout) -> Schema:
        yield Floats("scale", block_count(layout, 0), low=0.0)
        yield Symbols("q", layout.size, 3)

    def terms(self, parts: Parts, layout: Layout) -> Iterator[Term]:
        yield from scaled(parts["q"], np.array([-1, 0, 1], np.float32), parts["scale"], layout, 0, even=True)


@register
@dataclass(frozen=True)
class STC(ContractiveCodec):
    """The largest values as signs with one common magnitude; the rest are sent as zero. Biased.

    Args:
        fraction: share of the values to keep, in (0, 1]; at least one is kept, zeros never are. Larger: more bytes,
            less error up to about a third.

    >>> from fedcomp import Layout
    >>> x = np.array([0.5, -3.0, 0.1, 2.0], np.float32)
    >>> codec, layout = STC(0.5), Layout.vector(4)
    >>> codec.decode(codec.encode(x, layout, np.random.default_rng(0)), layout).tolist()
    [0.0, -2.5, 0.0, 2.5]
    """

    name: ClassVar[str] = "stc"
    number: ClassVar[int] = 14

    fraction: float = 0.01

    def __post_init__(self) -> None:
        _validate.number(low=0, high=1, above=True, fraction=self.fraction)

    @property
    def gentle(self) -> Codec | None:
        """Below one value in sixteen, small layers get four bits a value."""
        return FOUR_BITS if self.fraction < 1 / 16 else None

    def kept(self, size: int) -> int:
        """How many of `size` values are kept, unless fewer differ from zero."""
        return min(size, max(1, round(self.fraction * size)))

    def _encode(self, x: Vector, layout: Layout, rng: np.random.Generator) -> Parts:
        positions = largest(x, self.kept(layout.size))
        picked = x[positions]
        positions, picked = positions[picked != 0], picked[picked != 0]
        mean = np.abs(picked).sum(dtype=np.float64) / max(picked.size, 1)
        return {
            "kept": np.array(positions.size),
            "positions": positions,
            "scale": np.array([mean], np.float32),
            "sign": (picked > 0).view(np.uint8),
        }

    def schema(self, layout: Layout) -> Schema:
        kept = int((yield Count("kept", self.kept(layout.size))))
        yield Positions("positions", kept, layout.size)
        yield Floats("scale", 1, low=0.0)
        yield Symbols("sign", kept, 2)

    def terms(self, parts: Parts, layout: Layout) -> Iterator[Term]:
        scale = parts["scale"][0]
        yield Levels(parts["positions"], parts["sign"], np.array([-scale, scale], np.float32))
