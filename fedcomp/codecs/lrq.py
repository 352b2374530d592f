"""LRQ: low rank with entropy-coded factors, and one uniform step for the factors of all matrices and all other values.

    M ~ sum_k s_k u_k v_k^T       singular value decomposition, u_k along the longer side of M
    a_k = round(s_k u_k / step)   integers; with g_k = |a_k|, a_k / g_k is nearly u_k and of length 1
    b_k = round(g_k w_k / step)   W = (A^T A)^-1 A^T M, the least-squares partner of these integers
    M' = sum_k (a_k / g_k) (b_k step)^T

Since its partner has length 1, an error in s_k u_k or in g_k w_k is as large an error in M': one step for both, and for
all matrices, is what reverse water-filling asks for (see `ecsq`). The rank falls out: weak directions do not pay.
Client updates are nearly of low rank, so that this takes several times fewer bytes than to quantize value by value at
equal error. The decomposition is that of `lowrank`.

Each tensor goes the way of the least D + lambda R: as factors, value by value with the same step (vectors always), or
not at all. lambda is below the slope at which the step trades error for bits, and at most 0.1 step^2. Integers with
quiet neighbours in their column are rounded down a little more, and those between busy ones a little less, since there
they cost more or fewer bits.
"""

from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from fedcomp import _validate
from fedcomp.blocks import root_mean_square
from fedcomp.codec import Columns, ContractiveCodec, Count, Parts, PartSpec, Schema, Symbols, matrix_shapes, register
from fedcomp.codecs.ecsq import CLASSES, check_step_or_bits, levels
from fedcomp.codecs.factored import MAX_RANK
from fedcomp.codecs.ways import Encoder, places
from fedcomp.entropy.bits import LARGEST_HALF, read_half
from fedcomp.entropy.columns import TOP
from fedcomp.layout import Layout, Vector
from fedcomp.terms import Levels, Term


@register
@dataclass(frozen=True)
class LRQ(ContractiveCodec):
    """Matrices and convolutions as quantized thin factors: least bytes for the error on updates of such layers.

    Args:
        step: the step in units of the bucket's root mean square, above 0 to 1000. Larger: fewer bytes, more error.
        bits: instead of the step, the bits per value to aim at, above 0 to 12. The frame has about 12 bytes more, and
            5 bits for each tensor.
        rank: most columns of a factor, 1 to 64. Larger: less error at high rates, slower.
        rho: rounding offset, up to 0.5 (nearest). Smaller: more zeros. 0: 0.39, and chosen from the data for large
            tensors that are sent value by value.

    Near-ties depend on the machine's matrix product, so encoding (not decoding) may differ between platforms.

    >>> from fedcomp import Layout, Tensor
    >>> x = np.outer(np.sin(np.arange(200) / 9), np.cos(np.arange(100) / 9)).astype(np.float32).ravel()
    >>> codec, layout = LRQ(step=1.0), Layout((Tensor("w", (200, 100)),))
    >>> parts = codec.encode(x, layout, np.random.default_rng(0))
    >>> parts["columns"].size, bool(np.square(codec.decode(parts, layout) - x).mean() < 0.002)
    (300, True)
    """

    name: ClassVar[str] = "lrq"
    number: ClassVar[int] = 24

    step: float = 0.0
    bits: float = 0.0
    rank: int = 16
    rho: float = 0.0

    def __post_init__(self) -> None:
        check_step_or_bits(self.name, self.step, self.bits)
        _validate.integer(low=1, high=MAX_RANK, rank=self.rank)
        _validate.number(low=0, high=0.5, rho=self.rho)

    def _encode(self, x: Vector, layout: Layout, rng: np.random.Generator) -> Parts:
        if not x.any():
            return {"step": np.array(0)}
        encoder = Encoder.of(x, layout, self.rank, self.rho, rng)
        chosen = encoder.at(self.step * root_mean_square(x)) if self.step else encoder.near(self.bits * x.size)
        return encoder.parts(chosen)

    def schema(self, layout: Layout) -> Schema:
        if not int((yield Count("step", LARGEST_HALF))):
            return
        found = places(layout, self.rank)
        modes = (yield from self._modes(len(found))).tolist()
        rests = yield from self._rests([place.has_factors(mode) for place, mode in zip(found, modes, strict=True)])
        ways = list(zip(found, modes, rests, strict=True))
        large = [place for place, mode, rest in ways if place.has_table(mode, rest)]
        if large:
            top = int((yield Count("top", TOP)))
            yield Symbols("offsets", min(top, CLASSES), 256)
            inner = Layout(tuple(place.tensor for place in large))
            yield Symbols("q", inner.size, 2 * top + 1, matrix_shapes(inner))
        matrices = [matrix for place, mode, rest in ways for matrix in place.columns(mode, rest)]
        yield Columns("columns", tuple(shape for shape, _ in matrices), tuple(kind for _, kind in matrices))

    def _modes(self, count: int) -> Generator[PartSpec, NDArray[Any], NDArray[Any]]:
        return (yield Symbols("modes", count, self.rank + 2))

    def _rests(self, factored: list[bool]) -> Generator[PartSpec, NDArray[Any], list[bool]]:
        """For each tensor, whether what its factors leave is sent too."""
        yield from ()
        return [False] * len(factored)

    def terms(self, parts: Parts, layout: Layout) -> Iterator[Term]:
        step = read_half(int(parts["step"]))
        if not step:
            return
        table = levels(step, parts) if "q" in parts else np.zeros(0, np.float32)
        rests = iter(parts["rest"].tolist() if "rest" in parts else ())
        start = first = 0
        for place, mode in zip(places(layout, self.rank), parts["modes"].tolist(), strict=True):
            rest = place.has_factors(mode) and bool(next(rests, 0))
            q = None
            if place.has_table(mode, rest):
                q = parts["q"][first : first + place.tensor.size]
                first += place.tensor.size
            columns = []
            for (rows, count), _ in place.columns(mode, rest):
                columns.append(parts["columns"][start : start + rows * count].reshape(count, rows))
                start += rows * count
            if columns:
                yield place.term(columns, step, None if q is None else table[q])
            elif q is not None:
                yield Levels(place.where, q, table)


@dataclass(frozen=True)
class ShortLRQ(LRQ):
    """LRQ as `auto` sends it: the largest mode that occurs goes first, so that modes take few bits."""

    rank: int = MAX_RANK

    def _modes(self, count: int) -> Generator[PartSpec, NDArray[Any], NDArray[Any]]:
        highest = int((yield Count("highest", self.rank + 1)))
        return (yield Symbols("modes", count, highest + 1))

    with_rests: ClassVar[bool] = False

    def _rests(self, factored: list[bool]) -> Generator[PartSpec, NDArray[Any], list[bool]]:
        if not self.with_rests:
            return [False] * len(factored)
        rests = iter((yield Symbols("rest", sum(factored), 2)).tolist())
        return [has and bool(next(rests)) for has in factored]

    @staticmethod
    def shortened(parts: Parts) -> Parts:
        """The parts of an Encoder, with what this schema has besides."""
        return {**parts, "highest": np.array(parts["modes"].max())} if "modes" in parts else parts

    @staticmethod
    def step_of(parts: Parts) -> float:
        """The absolute step."""
        return read_half(int(parts["step"]))


class RestLRQ(ShortLRQ):
    """ShortLRQ that also says of which tensors with factors the rest is sent value by value, at the same step."""

    with_rests: ClassVar[bool] = True
