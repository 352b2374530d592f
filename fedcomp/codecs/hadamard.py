"""Fast Hadamard transforms of sizes n = m 2^k, m in {1, 12, 20, 28}: orthogonal, all entries +-1.

Four sizes an octave instead of one let a vector be cut into few pieces with hardly any padding. H_n is the Kronecker
product of Paley's matrix of order m (R. Paley, "On orthogonal matrices", 1933) and Sylvester's of order 2^k. It is
applied without its normalising factor 1 / sqrt(n), by additions in a fixed order: bit-identical on all platforms.
"""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from fedcomp.layout import Vector

_ORDERS = {1: 1, 3: 12, 5: 20, 7: 28}
"""Order of the dense factor by the odd part of n."""


def size_below(n: int) -> int:
    """Largest size that is at most n >= 1."""
    return max(size for size in _around(n) if size <= n)


def size_above(n: int) -> int:
    """Smallest size that is at least n >= 1."""
    return min(size for size in _around(n) if size >= n)


def _around(n: int) -> list[int]:
    octave = 1 << (n.bit_length() - 1)
    between = [octave // 4 * m for m in (5, 6, 7)] if octave >= 16 else [12] if octave == 8 else []
    return [octave, *between, 2 * octave]


def transform(x: Vector, *, inverse: bool = False) -> Vector:
    """H x, or its transpose times x, for x (n,), which serves as work space and is destroyed."""
    rows, columns = _shape(x.size)
    if inverse:  # a matrix product from each side, undone in the other order
        return _along(_along(x, columns, inverse).reshape(columns, rows).T.reshape(-1), rows, inverse)
    return _along(_along(x, rows, inverse).reshape(rows, columns).T.reshape(-1), columns, inverse)


def _shape(n: int) -> tuple[int, int]:
    """n as rows times columns, about square, so that every pass runs over long rows; columns are a power of two."""
    power = (n & -n).bit_length() - 1
    columns = min(n.bit_length() // 2, power if n == 1 << power else power - 2)
    return n >> columns, 1 << columns


def _along(x: Vector, rows: int, inverse: bool) -> Vector:
    """Transform x, taken as (rows, x.size // rows), along the first axis."""
    order = _ORDERS[rows // (rows & -rows)]
    if order > 1:
        x = _dense(order, x.reshape(order, -1), inverse)
    out, width = np.empty_like(x), x.size // rows
    while order * width < x.size:
        a, b = x.reshape(-1, 2, width), out.reshape(-1, 2, width)
        np.add(a[:, 0], a[:, 1], out=b[:, 0])
        np.subtract(a[:, 0], a[:, 1], out=b[:, 1])
        x, out, width = out, x, 2 * width
    return x


def _dense(order: int, x: NDArray[np.float32], inverse: bool) -> Vector:
    matrix = paley(order).T if inverse else paley(order)
    out = np.zeros_like(x)
    for j in range(order):
        out += matrix[:, j, None] * x[j]
    return out.reshape(-1)


@lru_cache
def paley(order: int) -> NDArray[np.float32]:
    """Hadamard matrix (order, order) of order q + 1 for a prime q = 3 mod 4, or 2 (q + 1) for a prime q = 1 mod 4."""
    q = order - 1 if order in (12, 20) else order // 2 - 1
    residues = np.zeros(q, np.int64) - 1
    residues[np.arange(1, q) ** 2 % q] = 1
    residues[0] = 0
    core = np.zeros((q + 1, q + 1), np.int64)
    core[1:, 1:] = residues[(np.arange(q)[:, None] - np.arange(q)) % q]
    core[0, 1:], core[1:, 0] = 1, (1 if q % 4 == 1 else -1)
    one = np.eye(q + 1, dtype=np.int64)
    if q % 4 == 3:
        return (one + core).astype(np.float32)
    sign, other = np.array([[1, 1], [1, -1]]), np.array([[1, -1], [-1, -1]])
    return (np.kron(core, sign) + np.kron(one, other)).astype(np.float32)
