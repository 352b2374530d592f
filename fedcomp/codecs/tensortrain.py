"""Tensor train: a tensor of many small dimensions as a chain of small cores.

    x(i_1, ..., i_d) = G_1(i_1) G_2(i_2) ... G_d(i_d),   G_k(i_k) a matrix (r_(k-1), r_k),  r_0 = r_d = 1

The cores come from successive truncated decompositions (TT-SVD): I. Oseledets, "Tensor-train decomposition", SIAM J.
Sci. Comput. 2011; for layers: Novikov et al., "Tensorizing neural networks", NeurIPS 2015, arXiv 1509.06569. Each
dimension of a layer is first split in two of nearly equal size (1024 = 32 x 32), where the savings come from.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import numpy as np

from fedcomp.codec import Codec, register
from fedcomp.codecs.factored import Factor, Factored, Shape
from fedcomp.codecs.identity import FLOAT32
from fedcomp.codecs.lowrank import truncated_svd, unit_scale
from fedcomp.layout import Layout, Tensor, Vector
from fedcomp.terms import Product, Values

_MAX = float(np.finfo(np.float32).max)
_MAX_EXPONENT = 900  # of the scale of a decoded tensor: with any cores, values stay within float64


@register
@dataclass(frozen=True)
class TensorTrain(Factored):
    """Tensors of two and more dimensions as tensor trains. Biased, slow, and of use only for very smooth updates.

    Args:
        rank: largest rank between cores, 1 to 64. Larger: less error, more bytes.
        factors: codec of the cores, and of all tensors with less than two dimensions or too small to gain.

    Near-ties depend on the machine's matrix product, so encoding (not decoding) may differ between platforms.

    >>> from fedcomp import Layout, Tensor
    >>> x = np.outer(np.arange(20), np.arange(30)).astype(np.float32).ravel()
    >>> codec, layout = TensorTrain(rank=2), Layout((Tensor("w", (20, 30)),))
    >>> parts = codec.encode(x, layout, np.random.default_rng(0))
    >>> parts["factors.values"].size, bool(np.allclose(codec.decode(parts, layout), x, atol=1e-3))
    (60, True)
    """

    name: ClassVar[str] = "tensortrain"
    number: ClassVar[int] = 20

    rank: int = 4
    factors: Codec = FLOAT32

    def shapes(self, tensor: Tensor) -> tuple[Shape, ...]:
        return _core_shapes(tensor.shape, self.rank)

    def _split(self, x: Vector, layout: Layout, rng: np.random.Generator) -> Iterator[tuple[Factor, ...]]:
        for tensor, where in layout.slices():
            if shapes := self.shapes(tensor):
                yield _train(x[where], shapes, rng)

    def _join(self, factors: tuple[Factor, ...], tensor: Tensor, where: slice) -> Product | Values:
        """Cores are contracted over their peaks, which are multiplied apart: any floats stay within float64."""
        mantissa, exponent = 1.0, 0
        chain = np.ones((1, 1))
        for core in factors:
            peak = float(np.abs(core).max())
            if peak == 0:
                return Values(where, np.zeros(tensor.size, np.float32))
            mantissa, more = math.frexp(mantissa * peak)
            exponent += more
            chain = (chain @ (core / np.float64(peak)).reshape(len(core), -1)).reshape(-1, core.shape[-1])
        scale = math.ldexp(mantissa, min(exponent, _MAX_EXPONENT))
        return Values(where, np.clip(chain.reshape(-1) * scale, -_MAX, _MAX).astype(np.float32))


@lru_cache(maxsize=256)
def _core_shapes(shape: Shape, rank: int) -> tuple[Shape, ...]:
    """Shapes (r, n, r') of the cores, or none if they would hold no fewer values than the tensor."""
    size = math.prod(shape)
    dims = [factor for side in shape for factor in _halves(side) if factor > 1]
    if len(shape) < 2 or size == 0 or len(dims) < 2:
        return ()
    cores, left, r = [], 1, 1
    for n in dims:
        left *= n
        after = min(rank, left, size // left)
        cores.append((r, n, after))
        r = after
    return tuple(cores) if sum(map(math.prod, cores)) < size else ()


def _halves(side: int) -> tuple[int, int]:
    """Two factors of a dimension, as equal as they can be."""
    low = next((k for k in range(math.isqrt(side), 0, -1) if side % k == 0), 1)
    return low, side // max(low, 1)


def _train(x: Vector, shapes: tuple[Shape, ...], rng: np.random.Generator) -> tuple[Factor, ...]:
    """TT-SVD of a tensor. All but the last core are orthonormal until the end, so that each cut is the best one."""
    rest, root = unit_scale(x)
    cores: list[Factor] = []
    for r, n, after in shapes[:-1]:
        left, right = truncated_svd(rest.reshape(r * n, -1), after, rng)
        norms: Vector = np.sqrt(np.square(left).sum(axis=0))
        norms[norms == 0] = 1
        cores.append((left / norms).reshape(r, n, after))
        rest = right * norms[:, None]
    return _balanced([*cores, rest.reshape(shapes[-1])], float(root) ** 2)


def _balanced(cores: list[Factor], scale: float) -> tuple[Factor, ...]:
    """Scale times the same tensor from cores of one root mean square: one step for all of them treats them alike."""
    sizes = [math.sqrt(float(np.mean(np.square(core, dtype=np.float64)))) for core in cores]
    if not all(sizes):
        return tuple(np.zeros_like(core) for core in cores)
    mean = math.exp((math.log(scale) + sum(map(math.log, sizes))) / len(sizes))
    return tuple((core * (mean / size)).astype(np.float32) for core, size in zip(cores, sizes, strict=True))
