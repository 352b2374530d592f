"""Low rank: the weights of a layer as a product of two thin matrices, by truncated singular value decomposition.

    M = U S V^T  ->  A = U_r sqrt(S_r),  B = sqrt(S_r) V_r^T,  M' = A B

The decomposition is randomised: N. Halko, P. G. Martinsson, J. A. Tropp, "Finding structure with randomness", SIAM
Review 2011, arXiv 0909.4061, with one power iteration. M' is the best approximation of rank r (Eckart and Young), up
to what the sketch misses.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from fedcomp.codec import Codec, register
from fedcomp.codecs.factored import Factor, Factored, Shape
from fedcomp.codecs.identity import FLOAT32
from fedcomp.layout import Layout, Tensor, Vector
from fedcomp.terms import MAX, Product, Values, as_stored

_OVERSAMPLE = 6  # directions that the sketch looks at beyond the rank
_NOISE = 1e-6  # singular values below this share of the largest are rounding errors of float32

Matrix = NDArray[np.float32]


@register
@dataclass(frozen=True)
class LowRank(Factored):
    """Matrices and convolutions as products of two thin matrices. Biased: use it with error feedback.

    Args:
        rank: columns of the thin matrices, 1 to 64. Larger: less error, more bytes.
        factors: codec of the thin matrices, and of all tensors with less than two dimensions or too small to gain.

    Near-ties depend on the machine's matrix product, so encoding (not decoding) may differ between platforms.

    >>> from fedcomp import Layout, Tensor
    >>> x = np.outer(np.arange(20), np.arange(30)).astype(np.float32).ravel()
    >>> codec, layout = LowRank(rank=1), Layout((Tensor("w", (20, 30)),))
    >>> parts = codec.encode(x, layout, np.random.default_rng(0))
    >>> parts["factors.values"].size, bool(np.allclose(codec.decode(parts, layout), x, rtol=1e-5))
    (50, True)
    """

    name: ClassVar[str] = "lowrank"
    number: ClassVar[int] = 18

    rank: int = 4
    factors: Codec = FLOAT32

    def shapes(self, tensor: Tensor) -> tuple[Shape, ...]:
        return thin_shapes(tensor, self.rank)

    def _split(self, x: Vector, layout: Layout, rng: np.random.Generator) -> Iterator[tuple[Factor, ...]]:
        for tensor, where in layout.slices():
            if shapes := self.shapes(tensor):
                matrix, root = unit_scale(to_matrix(x[where], tensor))
                left, right = truncated_svd(matrix, shapes[0][1], rng)
                yield left * root, right * root

    def _join(self, factors: tuple[Factor, ...], tensor: Tensor, where: slice) -> Product | Values:
        left, right = factors
        return product(left, right, tensor, where)


def thin_shapes(tensor: Tensor, rank: int) -> tuple[Shape, ...]:
    """Shapes (m, r), (r, n) of the factors of a tensor as a matrix, or none if they would be no smaller."""
    if len(tensor.shape) < 2 or tensor.size == 0:
        return ()
    m, n = sides(tensor)
    r = min(rank, m, n)
    return ((m, r), (r, n)) if r * (m + n) < m * n else ()


def sides(tensor: Tensor) -> tuple[int, int]:
    """(rows, columns): outputs x the rest; outputs, kernel rows x inputs, kernel columns where that is squarer."""
    m = tensor.shape[0]
    n = tensor.size // m
    if _is_regrouped(tensor):
        m *= tensor.shape[2]
        n //= tensor.shape[2]
    return m, n


def _is_regrouped(tensor: Tensor) -> bool:
    if len(tensor.shape) != 4:
        return False
    outputs, inputs, height, width = tensor.shape
    return outputs * height + inputs * width < outputs + inputs * height * width


def to_matrix(x: Vector, tensor: Tensor) -> Matrix:
    """The elements of a tensor as a matrix."""
    if _is_regrouped(tensor):
        x = x.reshape(tensor.shape).transpose(0, 2, 1, 3)
    return x.reshape(sides(tensor))


def from_matrix(matrix: NDArray[np.floating[Any]], tensor: Tensor) -> NDArray[np.floating[Any]]:
    """Inverse of to_matrix."""
    return as_stored(matrix, _split(tensor))


def _split(tensor: Tensor) -> tuple[int, int, int, int]:
    """The sides of the matrix as (outputs, height, inputs, width), see Product."""
    if _is_regrouped(tensor):
        outputs, inputs, height, width = tensor.shape
        return outputs, height, inputs, width
    m, n = sides(tensor)
    return m, 1, n, 1


def product(left: Matrix, right: Matrix, tensor: Tensor, where: slice) -> Product | Values:
    """left (m, r) times right (r, n) as the elements of a tensor, clipped to float32's range."""
    term = Product(where, left, right, _split(tensor))
    if term.peak() < MAX / 2:
        return term
    wide = left.astype(np.float64) @ right.astype(np.float64)
    return Values(where, np.clip(from_matrix(wide, tensor), -MAX, MAX).astype(np.float32))


def unit_scale(matrix: Matrix) -> tuple[Matrix, np.float32]:
    """An array over its largest magnitude, and the square root of that: products of values stay within float32."""
    peak = np.abs(matrix).max(initial=np.float32(0))
    return (matrix / peak if peak else matrix), np.sqrt(peak)


def truncated_svd(matrix: Matrix, rank: int, rng: np.random.Generator) -> tuple[Matrix, Matrix]:
    """Factors (m, rank), (rank, n) of nearly the best approximation of a matrix with values in [-1, 1]."""
    n = matrix.shape[1]
    width = min(rank + _OVERSAMPLE, *matrix.shape)
    sketch = matrix @ rng.standard_normal((n, width), np.float32)
    basis = orthonormal(matrix @ orthonormal(matrix.T @ orthonormal(sketch)))
    small = basis.T @ matrix  # (width, n)
    squares, vectors = np.linalg.eigh(np.matmul(small, small.T, dtype=np.float64))
    top = slice(-1, -rank - 1, -1)
    values = np.sqrt(np.maximum(squares[top], 0))
    real = values > _NOISE * values[0]
    roots = np.sqrt(np.where(real, values, 1))
    turn = (vectors[:, top] * real).astype(np.float32)  # (width, rank)
    return basis @ (turn * roots.astype(np.float32)), (turn / roots.astype(np.float32)).T @ small


def orthonormal(matrix: Matrix) -> Matrix:
    """Orthonormal columns that span the columns of a tall matrix (any directions where these are dependent)."""
    return np.linalg.qr(matrix)[0]
