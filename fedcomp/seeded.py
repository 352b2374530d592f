"""Randomness that both sides derive from one seed in the frame: raw Philox words and integer arithmetic, nothing else.

numpy promises the words of a bit generator for ever (NEP 19), but not what `Generator` makes of them; hence none of its
methods appears here. The same seed gives the same signs and positions on every platform and in every version.
"""

import numpy as np
from numpy.typing import NDArray

from fedcomp.layout import Vector

SEED_LIMIT = 2**32 - 1
"""Largest seed that a frame carries."""

_SIGN = np.uint32(31)


def draw_seed(rng: np.random.Generator) -> NDArray[np.int64]:
    """A fresh seed, as the part that goes into the frame."""
    return np.array(rng.integers(0, SEED_LIMIT, endpoint=True))


def philox(seed: int) -> np.random.Philox:
    """Bit generator of a seed from the frame."""
    return np.random.Philox(seed)


def words(source: np.random.Philox, count: int) -> NDArray[np.uint64]:
    """The next `count` words of the source."""
    return np.asarray(source.random_raw(count), np.uint64)


def flips(source: np.random.Philox, count: int) -> NDArray[np.uint32]:
    """Random sign bits (count,), for `flip`; takes a word for 64 of them."""
    raw = words(source, -(-count // 64)).astype("<u8").view(np.uint8)
    return np.unpackbits(raw, count=count).astype(np.uint32) << _SIGN


def flip(x: Vector, signs: NDArray[np.uint32]) -> Vector:
    """x with its signs changed where `flips` says so. Its own inverse, and exact."""
    out: Vector = (x.view(np.uint32) ^ signs).view(np.float32)
    return out


def subset(source: np.random.Philox, k: int, size: int) -> NDArray[np.bool_]:
    """Mask (size,) with exactly k members, each subset equally likely (up to size / 2^64).

    Draws as many places as are missing until none is: half of them at least are new each time, because the smaller
    of the set and its complement is drawn.
    """
    few = min(k, size - k)
    mask = np.zeros(size, np.bool_)
    left = few
    while left:
        mask[words(source, left) % np.uint64(size)] = True
        left = few - int(np.count_nonzero(mask))
    return mask if few == k else ~mask
