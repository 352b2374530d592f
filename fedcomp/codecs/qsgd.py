"""QSGD: stochastic levels between zero and the l2 norm of a bucket of values.

    Q(x_i) = ||x|| sgn(x_i) l_i / s,   l_i = floor(s |x_i| / ||x|| + u_i),   u ~ U[0, 1)

Alistarh et al., NeurIPS 2017, arXiv 1610.02132. E Q(x) = x, and E||Q(x) - x||^2 <= min(d/s^2, sqrt(d)/s) ||x||^2 for
buckets of d values. FedPAQ (Reisizadeh et al., AISTATS 2020, arXiv 1909.13014) is this codec on the updates of local
training. The paper's Elias code is replaced by the frame's entropy coder, which is shorter.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedcomp import _validate
from fedcomp.blocks import bfloat16_up, block_count, spans
from fedcomp.codec import Codec, Floats, Parts, Schema, Symbols, register
from fedcomp.layout import Layout, Vector
from fedcomp.terms import Term, scaled

_MAX = float(np.finfo(np.float32).max)


@register
@dataclass(frozen=True)
class QSGD(Codec):
    """Stochastic rounding to multiples of norm/levels. Unbiased; needs no memory at the client.

    Args:
        levels: steps between zero and the norm, 1 to 127. More: less error, more bytes.
        bucket: values that share a norm (sent as bfloat16, rounded up). Smaller: less error (at equal levels), more
            bits. 0: one float32 norm per tensor.

    >>> from fedcomp import Layout
    >>> x = np.array([3.0, -4.0, 0.0, 0.0], np.float32)
    >>> codec, layout = QSGD(levels=5, bucket=0), Layout.vector(4)
    >>> codec.decode(codec.encode(x, layout, np.random.default_rng(0)), layout).tolist()
    [3.0, -4.0, 0.0, 0.0]
    """

    name: ClassVar[str] = "qsgd"
    number: ClassVar[int] = 6

    levels: int = 16
    bucket: int = 512

    def __post_init__(self) -> None:
        _validate.integer(low=1, high=127, levels=self.levels)
        _validate.integer(low=0, high=2**31 - 1, bucket=self.bucket)

    @property
    def unbiased(self) -> bool:
        return True

    @property
    def contractive(self) -> bool:
        return False

    def _encode(self, x: Vector, layout: Layout, rng: np.random.Generator) -> Parts:
        norm = _norms(x, layout, self.bucket)
        norm = bfloat16_up(norm) if self.bucket else norm
        divisor = np.where(norm == 0, np.float32(1), norm)
        q = np.empty(layout.size, np.uint8)
        for values, blocks in spans(layout, self.bucket):
            t = x[values].reshape(blocks.stop - blocks.start, -1) / divisor[blocks, None]  # (blocks, bucket)
            t *= np.float32(self.levels)
            t += rng.random(t.shape, np.float32)  # before the offset, so that zeros stay zero whatever u is
            np.floor(t, out=t)
            t += np.float32(self.levels)
            np.clip(t, 0, np.float32(2 * self.levels), out=t)
            q[values] = t.ravel()
        return {"norm": norm, "q": q}

    def schema(self, layout: Layout) -> Schema:
        yield Floats("norm", block_count(layout, self.bucket), "bfloat16" if self.bucket else "float32", low=0.0)
        yield Symbols("q", layout.size, 2 * self.levels + 1)

    def terms(self, parts: Parts, layout: Layout) -> Iterator[Term]:
        share = np.arange(-self.levels, self.levels + 1, dtype=np.float32) / np.float32(self.levels)
        yield from scaled(parts["q"], share, parts["norm"], layout, self.bucket, even=True)


def _norms(x: Vector, layout: Layout, bucket: int) -> Vector:
    """Length of each bucket (block_count,), in float64 inside; at most float32's maximum, and at least max|x|."""
    total = np.zeros(block_count(layout, bucket))
    for values, blocks in spans(layout, bucket):
        rows = x[values].reshape(blocks.stop - blocks.start, -1).astype(np.float64)
        total[blocks] += np.einsum("ij,ij->i", rows, rows)
    return np.minimum(np.sqrt(total), _MAX).astype(np.float32)
