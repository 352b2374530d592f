"""EDEN and DRIVE: random rotation, then the best scalar quantizer of the normal distribution.

    y = H D x,   D: random signs, H: orthonormal Hadamard          every y_i is nearly normal, whatever x is
    c = nearest Lloyd-Max level of sqrt(d) y / ||x||,   x' = S D H^T c
    S = ||x||^2 / <y, c>   unbiased          S = <y, c> / ||c||^2   least squares

EDEN: Vargaftik et al., ICML 2022, arXiv 2108.08842; with one bit it is DRIVE: NeurIPS 2021, arXiv 2105.08339. With D_b
the distortion of the b-bit quantizer, the error ||x' - x||^2 / ||x||^2 is D_b / (1 - D_b): .571, .133, .036, .0096 for
1 to 4 bits (least squares: D_b, .363 at one bit). At a rate p below one, a random share p of the y_i gets one bit and
the others none: (pi/2) / p - 1, or 1 - (2/pi) p. Between integers b and b + 1 a random share gets the better quantizer.

The vector is not padded to a power of two but cut into pieces of up to 2^17 values, each rotated and scaled by itself;
only the last, small one is padded, by at most 0.4 % of the vector or 32 bytes. With one round of signs and Hadamard a
vector with a single value comes back exactly at one bit (all |y_i| are equal), but where a few values dominate a piece,
the others come back too small on average: y is not normal then. Two rounds mend that.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedcomp import _validate, seeded
from fedcomp.codec import Codec, Count, Floats, Parts, Schema, Symbols, register
from fedcomp.codecs import hadamard, normal
from fedcomp.entropy.bits import LARGEST_HALF, read_half
from fedcomp.layout import Layout, Vector
from fedcomp.terms import Term, Values

_MAX = np.finfo(np.float32).max
_TINY = float(np.finfo(np.float32).tiny)
_LONGEST = 1 << 17  # values in a piece: half a megabyte stays in the second-level cache
_SEEDS = 1 << 14  # of a compact frame
_FEWEST = 16  # rotated values that get a bit, however low the rate: with one or two, 1 / <y, c> has no variance


@register
@dataclass(frozen=True)
class EDEN(Codec):
    """Random rotation and normal quantizer; the least error that a fixed rate and no bias allow.

    Args:
        bits: bits per value, above 0 to 8, fractions allowed. Larger: less error, more bytes. The entropy coder takes
            back up to 9 % where there are more than two levels.
        scale: "unbiased", or "mse" for the least error: contractive, for error feedback.
        rounds: 1, or 2 rotations in a row for vectors in which a few values dominate; twice the time.
        compact: seed and scales in 2 bytes each instead of 4 to 5, for uploads of few bytes. There are 16,384 rotations
            then, and scales are rounded, at random and without bias, to three digits.

    Rotated values near a decision level depend on the last bits of the norm, so encoding may differ between platforms;
    decoding does not.

    >>> from fedcomp import Layout
    >>> x = np.zeros(100, np.float32)
    >>> x[7] = -3
    >>> codec, layout = EDEN(1), Layout.vector(100)
    >>> decoded = codec.decode(codec.encode(x, layout, np.random.default_rng(0)), layout)
    >>> bool(np.allclose(decoded, x, atol=1e-5))
    True
    """

    name: ClassVar[str] = "eden"
    number: ClassVar[int] = 15

    bits: float = 1.0
    scale: str = "unbiased"
    rounds: int = 1
    compact: bool = False

    def __post_init__(self) -> None:
        _validate.number(low=0, high=8, above=True, bits=self.bits)
        _validate.flag(compact=self.compact)
        _validate.one_of(choices=("unbiased", "mse"), scale=self.scale)
        _validate.integer(low=1, high=2, rounds=self.rounds)

    @property
    def unbiased(self) -> bool:
        """Exactly so for uniformly random rotations; for these, as long as no few values dominate (see above)."""
        return self.scale == "unbiased"

    @property
    def contractive(self) -> bool:
        return self.scale == "mse"

    def split(self, size: int) -> "tuple[_Piece, ...]":
        """The pieces of a vector. None has under 256 bits (128 at one bit): fewer rotated values are biased, being far
        from normal."""
        return _split(size, math.ceil(256 / max(self.bits, 2)))

    @property
    def _low(self) -> int:
        """Bits of the coarser of the two quantizers."""
        return math.ceil(self.bits) - 1

    def _fine(self, n: int) -> int:
        """How many of n rotated values get one bit more."""
        return min(n, max(_FEWEST, round((self.bits - self._low) * n)))

    def _encode(self, x: Vector, layout: Layout, rng: np.random.Generator) -> Parts:
        seed = np.array(rng.integers(_SEEDS)) if self.compact else seeded.draw_seed(rng)
        source, pieces = seeded.philox(int(seed)), self.split(layout.size)
        scale = np.zeros(len(pieces), np.float32)
        symbols: dict[str, list[NDArray[np.uint8]]] = {"coarse": [], "fine": []}
        for index, piece in enumerate(pieces):
            rotation = self._rotation(source, piece.n)
            rms, y = rotation.forward(x[piece.where])
            c = np.empty_like(y)
            for group in rotation.groups:
                q = normal.quantize(y[group.where], group.bits)
                c[group.where] = normal.levels(group.bits)[q]
                symbols[group.name].append(q)
            scale[index] = self._scale(rms, y, c)
        joined = {name: np.concatenate([np.zeros(0, np.uint8), *found]) for name, found in symbols.items()}
        if self.compact:
            return {
                "seed": seed,
                **{f"scale.{i}": half for i, half in enumerate(_round_at_random(scale, rng))},
                **joined,
            }
        return {"seed": seed, "scale": scale, **joined}

    def _scale(self, rms: float, y: Vector, c: Vector) -> float:
        """S, with ||y||^2 = n and the piece's root mean square apart. In float64: sums of float32 products drift."""
        product = float(np.sum(y * c, dtype=np.float64))
        if product <= 0:  # none of the few values that get a bit holds anything
            return 0.0
        wide = y.size / product if self.unbiased else product / float(np.sum(c * c, dtype=np.float64))
        return min(rms * wide, float(_MAX))

    def schema(self, layout: Layout) -> Schema:
        pieces = self.split(layout.size)
        fine = sum(self._fine(piece.n) for piece in pieces)
        yield Count("seed", _SEEDS - 1 if self.compact else seeded.SEED_LIMIT)
        if self.compact:
            for index in range(len(pieces)):
                yield Count(f"scale.{index}", LARGEST_HALF)
        else:
            yield Floats("scale", len(pieces), low=0.0)
        yield Symbols("coarse", sum(piece.n for piece in pieces) - fine, 1 << self._low)  # no bits, no bytes
        yield Symbols("fine", fine, 2 << self._low)

    def terms(self, parts: Parts, layout: Layout) -> Iterator[Term]:
        source = seeded.philox(int(parts["seed"]))
        at = {"coarse": 0, "fine": 0}
        for piece, scale in zip(self.split(layout.size), self.scales(parts, layout), strict=True):
            rotation = self._rotation(source, piece.n)
            c = np.empty(piece.n, np.float32)
            for group in rotation.groups:
                q = parts[group.name][at[group.name] : at[group.name] + group.total]
                c[group.where] = normal.levels(group.bits)[q]
                at[group.name] += group.total
            values = rotation.backward(c)[: piece.where.stop - piece.where.start]
            with np.errstate(over="ignore"):  # of values near float32's limit, clipped at once
                values *= scale
            yield Values(piece.where, np.clip(values, -_MAX, _MAX, out=values))

    def longest(self, layout: Layout) -> Parts:
        """Parts, of a compact codec, that take as many bytes as any at this rate."""
        pieces = self.split(layout.size)
        fine = sum(self._fine(piece.n) for piece in pieces)
        coarse = sum(piece.n for piece in pieces) - fine
        scales = {f"scale.{index}": np.array(LARGEST_HALF) for index in range(len(pieces))}
        symbols = {
            "coarse": (np.arange(coarse) % (1 << self._low)).astype(np.uint8),
            "fine": (np.arange(fine) % (2 << self._low)).astype(np.uint8),
        }
        return {"seed": np.array(_SEEDS - 1), **scales, **symbols}

    def captured(self, n: int) -> float:
        """The share of the energy of n rotated values that their levels keep, on average: 1 - D."""
        fine = self._fine(n) / n
        return fine * normal.captured(self._low + 1) + (1 - fine) * normal.captured(self._low)

    def sizes(self, size: int) -> tuple[int, int, int]:
        """Of a vector of so many values: the number of pieces, and the bits of the coarse and of the fine symbols."""
        pieces = self.split(size)
        fine = sum(self._fine(piece.n) for piece in pieces)
        return len(pieces), (sum(piece.n for piece in pieces) - fine) * self._low, fine * (self._low + 1)

    def norm(self, parts: Parts, layout: Layout) -> float:
        """About the length of the vector that was coded without bias, from the scales in its parts."""
        pieces = zip(self.split(layout.size), self.scales(parts, layout), strict=True)
        return math.hypot(*(float(scale) * self.captured(piece.n) * math.sqrt(piece.n) for piece, scale in pieces))

    def scales(self, parts: Parts, layout: Layout) -> list[np.float32]:
        """S of each piece."""
        if not self.compact:
            return list(parts["scale"])
        count = len(self.split(layout.size))
        return [np.float32(read_half(int(parts[f"scale.{index}"]))) for index in range(count)]

    def _rotation(self, source: np.random.Philox, n: int) -> "_Rotation":
        signs = [seeded.flips(source, n) for _ in range(self.rounds)]
        fine = self._fine(n)
        if fine == n:
            return _Rotation(signs, [_Group("fine", self._low + 1, n, slice(None))])
        mask = seeded.subset(source, fine, n)
        groups = [_Group("coarse", self._low, n - fine, ~mask), _Group("fine", self._low + 1, fine, mask)]
        return _Rotation(signs, groups)


class _Piece(NamedTuple):
    """Values that are rotated together: where they are, and their number with padding."""

    where: slice
    n: int


class _Group(NamedTuple):
    """Rotated values with the same quantizer: the name of their part, their bits, number and places."""

    name: str
    bits: int
    total: int
    where: slice | NDArray[np.bool_]


@dataclass(frozen=True)
class _Rotation:
    """One or more rounds of random signs and Hadamard transform, and who gets which quantizer afterwards."""

    signs: list[NDArray[np.uint32]]
    groups: list[_Group]

    def forward(self, x: Vector) -> tuple[float, Vector]:
        """Root mean square of x (as padded), and x divided by it and rotated. Subnormal values count as zeros."""
        y = np.zeros(self.signs[0].size, np.float32)
        rms = math.sqrt(float(np.square(x, dtype=np.float64).sum()) / y.size)
        if rms < _TINY:
            return 0.0, y
        np.divide(x, np.float32(rms), out=y[: x.size])
        for signs in self.signs:
            y = hadamard.transform(seeded.flip(y, signs))
            y *= np.float32(y.size**-0.5)
        return rms, y

    def backward(self, y: Vector) -> Vector:
        for signs in reversed(self.signs):
            y = hadamard.transform(y, inverse=True)
            y *= np.float32(y.size**-0.5)
            y = seeded.flip(y, signs)
        return y


def _round_at_random(scale: Vector, rng: np.random.Generator) -> list[NDArray[np.int64]]:
    """The upper halves of these numbers from 0 on, up or down so that each is right on average."""
    bits = scale.view(np.uint32).astype(np.int64)
    halves = np.minimum(bits + rng.integers(1 << 16, size=bits.size) >> 16, LARGEST_HALF)
    return [np.array(half) for half in halves]


@lru_cache(maxsize=32)
def _split(size: int, shortest: int) -> tuple[_Piece, ...]:
    """Pieces as large as Hadamard transforms are; the rest is padded once that costs under 0.4 % or a few values."""
    pieces, start = [], 0
    while start < size:
        rest = size - start
        n = hadamard.size_above(max(rest, shortest))
        if n > _LONGEST or n - rest > max(size >> 8, shortest):
            n = min(hadamard.size_below(rest), _LONGEST)
        pieces.append(_Piece(slice(start, min(start + n, size)), n))
        start += n
    return tuple(pieces)
