"""Scaled sign: one bit per value and one scale per tensor.

    C(x) = mean|x| sign(x)          (EF-signSGD: Karimireddy et al., ICML 2019, arXiv 1901.09847)

with sign(0) = +1, so that one bit suffices; a tensor of zeros has scale zero and stays exactly zero, and error
feedback returns what single zeros were given too much. The contraction is delta = ||x||_1^2 / (d ||x||_2^2).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedcomp.blocks import block_count, means, spans
from fedcomp.codec import Codec, Floats, Index, Parts, Schema, Symbols, register
from fedcomp.layout import Layout, Vector


@register
@dataclass(frozen=True)
class Sign(Codec):
    """The sign of each value times its tensor's mean magnitude. Biased: use it with error feedback.

    >>> from fedcomp import Layout
    >>> x = np.array([3.0, -1.0, 0.0, 2.0], np.float32)
    >>> codec, layout = Sign(), Layout.vector(4)
    >>> codec.decode(codec.encode(x, layout, np.random.default_rng(0)), layout).tolist()
    [1.5, -1.5, 1.5, 1.5]
    """

    name: ClassVar[str] = "sign"
    number: ClassVar[int] = 3

    @property
    def unbiased(self) -> bool:
        return False

    @property
    def contractive(self) -> bool:
        return True

    def _encode(self, x: Vector, layout: Layout, rng: np.random.Generator) -> Parts:
        return {"scale": means(x, layout, 0), "sign": (x >= 0).view(np.uint8)}

    def schema(self, layout: Layout) -> Schema:
        yield Floats("scale", block_count(layout, 0), low=0.0)
        yield Symbols("sign", layout.size, 2)

    def pieces(self, parts: Parts, layout: Layout) -> Iterator[tuple[Index, Vector]]:
        scale, sign = parts["scale"], parts["sign"]
        for values, blocks in spans(layout, 0):
            ends = np.array([-scale[blocks.start], scale[blocks.start]], np.float32)
            yield values, ends[sign[values]]
