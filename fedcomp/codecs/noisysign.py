"""Noisy sign: the sign of each value after noise, so that the mean over many clients keeps the magnitudes.

    C(x) = eta s sgn(x + s xi)          z-SignFedAvg: Tang, Wang, Chang, arXiv 2302.02589

Gaussian noise (z = 1): xi ~ N(0, 1), s = sigma times the tensor's root mean square, eta = sqrt(pi/2). E C(x) = x up
to a bias that falls as sigma grows, while the variance grows as sigma^2.
Uniform noise (z = infinity): xi ~ U(-1, 1), s = sigma max|x|, eta = 1. Exactly unbiased from sigma = 1 on.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from fedcomp import _validate
from fedcomp.blocks import block_count, peaks, root_mean_squares, spans
from fedcomp.codec import Codec, Floats, Parts, Schema, Symbols, register
from fedcomp.layout import Layout, Vector
from fedcomp.terms import Term, scaled

_MAX = float(np.finfo(np.float32).max)
_ETA = {"gaussian": math.sqrt(math.pi / 2), "uniform": 1.0}


@register
@dataclass(frozen=True)
class NoisySign(Codec):
    """The sign of each value plus noise, times one scale per tensor. For clients without memory.

    Args:
        sigma: noise in units of the tensor's root mean square (gaussian) or largest magnitude (uniform), 0.01 to 100.
            Larger: less bias, more variance.
        noise: "gaussian" (biased, least error in the mean for ordinary tensors) or "uniform" (exactly unbiased for
            sigma of at least 1, far more variance where a few values are large).

    Zeros get a random sign, but tensors of zeros stay zero.

    >>> from fedcomp import Layout
    >>> x = np.array([2.0, -2.0], np.float32)
    >>> codec, layout = NoisySign(noise="uniform"), Layout.vector(2)
    >>> codec.decode(codec.encode(x, layout, np.random.default_rng(0)), layout).tolist()
    [2.0, -2.0]
    """

    name: ClassVar[str] = "noisysign"
    number: ClassVar[int] = 8

    sigma: float = 1.0
    noise: str = "gaussian"

    def __post_init__(self) -> None:
        _validate.number(low=0.01, high=100, sigma=self.sigma)
        _validate.one_of(choices=tuple(_ETA), noise=self.noise)

    @property
    def unbiased(self) -> bool:
        """Gaussian noise only approaches it as sigma grows."""
        return self.noise == "uniform" and self.sigma >= 1

    @property
    def contractive(self) -> bool:
        return False

    def _encode(self, x: Vector, layout: Layout, rng: np.random.Generator) -> Parts:
        width: NDArray[np.float64]
        width = root_mean_squares(x, layout) if self.noise == "gaussian" else peaks(x, layout, 0).astype(np.float64)
        scale = np.minimum(self.sigma * width * _ETA[self.noise], _MAX).astype(np.float32)
        sign = np.empty(layout.size, np.uint8)
        for values, blocks in spans(layout, 0):
            s = float(scale[blocks.start]) / _ETA[self.noise]  # of the scale as sent, so that its rounding is no bias
            sign[values] = self._draw(x[values] / np.float32(max(s, 1e-45)), rng)
        return {"scale": scale, "sign": sign}

    def _draw(self, t: Vector, rng: np.random.Generator) -> NDArray[np.uint8]:
        """1 where t + xi is positive."""
        if self.noise == "gaussian":
            return np.less(rng.standard_normal(t.shape, np.float32), t).view(np.uint8)
        t += np.float32(1)
        t *= np.float32(0.5)
        return np.less(rng.random(t.shape, np.float32), t).view(np.uint8)  # P = (1 + x/s) / 2

    def schema(self, layout: Layout) -> Schema:
        yield Floats("scale", block_count(layout, 0), low=0.0)
        yield Symbols("sign", layout.size, 2)

    def terms(self, parts: Parts, layout: Layout) -> Iterator[Term]:
        yield from scaled(parts["sign"], np.array([-1, 1], np.float32), parts["scale"], layout, 0)
