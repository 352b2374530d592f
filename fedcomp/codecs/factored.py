"""What codecs share that send a tensor as a few small factors: pooling, nesting, and the way out when it does not pay.

The factors of all tensors, and the tensors that have none, go through one inner codec as one vector, each a tensor of
its own in that vector's layout. The encoder decodes what it sends: where a tensor would come out worse than zero, a
flag makes it zero. So the codec is contractive whatever the inner codec does to the factors.
"""

from abc import abstractmethod
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from fedcomp import _validate
from fedcomp.codec import Codec, ContractiveCodec, Parts, Schema, Symbols, nested, put_below, take_below
from fedcomp.layout import Layout, Tensor, Vector
from fedcomp.terms import Product, Term, Values

MAX_RANK = 64

Shape = tuple[int, ...]
Factor = NDArray[np.float32]


class Factored(ContractiveCodec):
    """Base of codecs that write tensors as factors. Fields of all of them: rank, factors."""

    rank: int
    factors: Codec

    def __post_init__(self) -> None:
        _validate.integer(low=1, high=MAX_RANK, rank=self.rank)
        _validate.instance(kind=Codec, factors=self.factors)

    @abstractmethod
    def shapes(self, tensor: Tensor) -> tuple[Shape, ...]:
        """Shapes of the factors of a tensor; none for one that is sent as it is."""

    @abstractmethod
    def _split(self, x: Vector, layout: Layout, rng: np.random.Generator) -> Iterator[tuple[Factor, ...]]:
        """Finite factors of each tensor that has some, in the order of the layout."""

    @abstractmethod
    def _join(self, factors: tuple[Factor, ...], tensor: Tensor, where: slice) -> Product | Values:
        """The tensor that any finite factors stand for, finite, as one term at the given place."""

    @property
    def gentle(self) -> Codec | None:
        """That of the inner codec: small layers are not factored."""
        return self.factors.gentle

    def _encode(self, x: Vector, layout: Layout, rng: np.random.Generator) -> Parts:
        split = self._split(x, layout, rng)
        sent: list[NDArray[np.float32]] = [np.zeros(0, np.float32)]
        for tensor, where in layout.slices():
            sent += [factor.ravel() for factor in next(split)] if self.shapes(tensor) else [x[where]]
        parts = self.factors._encode(np.concatenate(sent), self._inner(layout), rng)
        kept = [
            _square(x[where] - values.astype(np.float64)) <= _square(x[where])
            for term in self._decoded(parts, layout)
            for where, values in term.pieces()
        ]
        return {"kept": np.array(kept, np.uint8), **put_below("factors", parts)}

    def schema(self, layout: Layout) -> Schema:
        yield Symbols("kept", sum(t.size > 0 for t in layout.tensors), 2)
        yield from nested("factors", self.factors.schema(self._inner(layout)))

    def terms(self, parts: Parts, layout: Layout) -> Iterator[Term]:
        decoded = self._decoded(take_below("factors", parts), layout)
        for term, kept in zip(decoded, parts["kept"].tolist(), strict=True):
            if kept:
                yield term

    def _inner(self, layout: Layout) -> Layout:
        """Layout of the vector of all factors; names are never sent."""
        shapes = [shape for tensor in layout.tensors for shape in self.shapes(tensor) or (tensor.shape,)]
        return Layout(tuple(Tensor(str(index), shape) for index, shape in enumerate(shapes)))

    def _decoded(self, parts: Parts, layout: Layout) -> Iterator[Product | Values]:
        """One term for each tensor that has elements, from the parts of the inner codec, flags not considered."""
        flat = self.factors.decode(parts, self._inner(layout))
        start = 0
        for tensor, where in layout.slices():
            shapes = self.shapes(tensor) or (tensor.shape,)
            edges = start + np.cumsum([0, *(int(np.prod(shape)) for shape in shapes)])
            start = int(edges[-1])
            if tensor.size == 0:
                continue
            factors = tuple(flat[a:b].reshape(shape) for (a, b), shape in zip(pairwise(edges), shapes, strict=True))
            if self.shapes(tensor):
                yield self._join(factors, tensor, where)
            else:
                yield Values(where, factors[0].reshape(-1))


def _square(x: NDArray[np.float64] | Vector) -> float:
    return float(np.square(x, dtype=np.float64).sum())
