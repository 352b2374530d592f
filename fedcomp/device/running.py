"""A running sum of what codecs decode to, and its implementation with numpy."""

from collections.abc import Iterable, Iterator
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from fedcomp import terms as term_sums
from fedcomp.layout import Vector
from fedcomp.terms import Product, Term

_BLOCK = 1 << 20  # values of a product that are made at a time


class RunningSum(Protocol):
    """A float32 vector that weighted terms are added to."""

    def add(self, terms: Iterable[Term], weight: float) -> float:
        """Add weight times a vector, given as terms; returns what none of that vector's magnitudes exceeds."""

    def result(self) -> Vector:
        """The sum so far as a float32 vector (size,), which belongs to the sum."""


class Products:
    """Products of the terms of many clients, tensor by tensor, until there are enough for one matrix product of all:

    sum_i w_i L_i R_i = [w_1 L_1 ... w_n L_n] [R_1; ...; R_n]

    Enough are more than half as many values as in a sum of `size`.
    """

    def __init__(self, size: int) -> None:
        self._most = size / 2
        self._waiting: dict[int, list[tuple[Product, float]]] = {}
        self._held = 0

    def add(self, product: Product, weight: float) -> None:
        """Let a product wait."""
        self._waiting.setdefault(product.where.start, []).append((product, weight))
        self._held += product.left.size + product.right.size

    @property
    def full(self) -> bool:
        """Whether they should be taken."""
        return self._held > self._most

    def take(self) -> Iterator[tuple[Product, NDArray[np.float32], NDArray[np.float32]]]:
        """For each tensor one of its products, and factors (m, all ranks), (all ranks, n) of the weighted sum."""
        waiting, self._waiting, self._held = self._waiting, {}, 0
        for products in waiting.values():
            left = np.concatenate([product.left * np.float32(weight) for product, weight in products], axis=1)
            yield products[0][0], left, np.concatenate([product.right for product, _ in products])


class NumpySum:
    """The sum on one core."""

    def __init__(self, size: int) -> None:
        self._total = np.zeros(size, np.float32)
        self._products = Products(size)

    def add(self, terms: Iterable[Term], weight: float) -> float:
        """See RunningSum."""
        waiting: list[Product] = []
        bound = term_sums.add(_set_apart(terms, waiting), self._total, weight)
        for product in waiting:
            bound = max(bound, product.peak())
            self._products.add(product, weight)
        if self._products.full:
            self._flush()
        return bound

    def result(self) -> Vector:
        """See RunningSum."""
        self._flush()
        return self._total

    def _flush(self) -> None:
        for first, left, right in self._products.take():
            outputs, height, inputs, width = first.split
            # The tensor as it is stored, seen as the matrix: rows (outputs, height), columns (inputs, width).
            target = self._total[first.where].reshape(outputs, inputs, height, width).transpose(0, 2, 1, 3)
            step = max(1, _BLOCK // (height * inputs * width))
            for start in range(0, outputs, step):
                rows = left[start * height : (start + step) * height] @ right
                target[start : start + step] += rows.reshape(-1, height, inputs, width)


def _set_apart(terms: Iterable[Term], products: list[Product]) -> Iterator[Term]:
    """The terms without the products, which are appended to the list."""
    for term in terms:
        if isinstance(term, Product):
            products.append(term)
        else:
            yield term
