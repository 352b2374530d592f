"""What codecs share that keep some values of a vector: how many, and the codec that the kept ones go through."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from fedcomp import _validate
from fedcomp.codec import Codec, Parts, Schema, nested, put_below, take_below
from fedcomp.errors import ConfigError
from fedcomp.layout import Layout, Vector
from fedcomp.terms import Term, scatter


class Sparse(Codec):
    """Base of codecs whose kept values go through another one. Field of all: values. Biased by default."""

    values: Codec

    @property
    def unbiased(self) -> bool:
        return False

    @property
    def contractive(self) -> bool:
        return self.values.contractive

    def _kept_parts(self, kept: Vector, rng: np.random.Generator) -> Parts:
        return put_below("values", self.values._encode(kept, Layout.vector(kept.size), rng))

    def _kept_schema(self, count: int) -> Schema:
        yield from nested("values", self.values.schema(Layout.vector(count)))

    def _kept_terms(self, parts: Parts, positions: NDArray[np.int64]) -> Iterator[Term]:
        yield from scatter(self.values.terms(take_below("values", parts), Layout.vector(positions.size)), positions)


def check_fraction_or_k(name: str, fraction: float, k: int) -> None:
    """Raise ConfigError unless exactly one of the two is given, and is in its range."""
    if bool(fraction) == bool(k):
        raise ConfigError(f"{name}: give either fraction or k, got fraction={fraction!r}, k={k!r}")
    if fraction:
        _validate.number(low=0, high=1, above=True, fraction=fraction)
    else:
        _validate.integer(low=1, high=2**40, k=k)


def count_kept(size: int, fraction: float, k: int = 0) -> int:
    """How many of `size` are kept: k, or else a fraction of them and at least one; never more than there are."""
    return min(size, k or max(1, round(fraction * size)))
