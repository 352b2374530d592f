"""E8: groups of eight values to the nearest point of the densest lattice in eight dimensions.

    x' = g_m s p,   p = argmin over E8 of ||x / s - p||,   E8 = D8 + {0, (1/2, ..., 1/2)},   D8: integers of even sum

s is one step for the whole bucket, g_m a factor for each length of p (the centroid of its points, in the radial
direction). The nearest point: Conway & Sloane, IEEE Trans. IT 1982. Cells are rounder than cubes (normalised second
moment .0717 instead of .0833): up to 0.65 dB less error at equal rate.

How points become symbols: a class says the coset and, for the shells ||p||^2 / 2 = m <= 4, the length. Within a shell
the coordinates' magnitudes follow one by one, each in the context of what is left of the length, so that the last costs
nothing, nor do zeros once it is used up; then signs, one a nonzero coordinate (in the second coset the parity gives the
eighth). The points of a shell, equally likely for normal values, thus take log2 of their number. Longer points are
sent as eight integers, the last of them halved: its parity is that of the others.
"""

import math
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from fedcomp import _validate
from fedcomp.blocks import CHUNK
from fedcomp.codec import (
    Codec,
    ContractiveCodec,
    Count,
    Floats,
    Parts,
    PartSpec,
    Schema,
    Symbols,
    register,
    symbol_dtype,
)
from fedcomp.codecs.uniform import FOUR_BITS
from fedcomp.errors import ConfigError
from fedcomp.layout import Layout, Vector
from fedcomp.terms import Term, Values

Points = NDArray[np.signedinteger[Any]]
"""Lattice points times two (groups, 8): integers, all even or all odd, of a sum divisible by four."""

_SHELLS = 4
_LENGTHS = _SHELLS + 2  # the origin, the shells, and beyond
_REACH = 16_000  # coordinates are clipped there
_MAX = np.finfo(np.float32).max
_TINY = float(np.finfo(np.float32).tiny)
_STEPS = (0.125, 0.25, 0.5, 0.7, 1, 1.5, 2, 2.5, 3, 3.5, 4, 4.25, 4.5, 4.75, 5, 5.25, 5.5, 6)
_BITS = (
    5.053,
    4.053,
    3.065,
    2.6,
    2.115,
    1.582,
    1.235,
    0.983,
    0.75,
    0.506,
    0.289,
    0.203,
    0.136,
    0.089,
    0.054,
    0.033,
    0.018,
    0.005,
)
"""Bits per normal value, entropy coded, at steps in units of their root mean square."""


@register
@dataclass(frozen=True)
class E8(ContractiveCodec):
    """Nearest points of the E8 lattice with one step for the whole bucket, entropy coded. Biased.

    Args:
        bits: bits per value that normal values would take, 0.01 to 12; others may take more or, mostly, less. Larger:
            less error, more bytes.
        step: instead of `bits`, the step in units of the bucket's root mean square. Larger: more error, fewer bytes.

    Groups run across tensors. Shells are used where they pay: above 8000 values and below 1.2 to 1.8 bits.

    >>> from fedcomp import Layout
    >>> x = np.array([1, -1, 0, 0, 0, 0, 0, 0], np.float32)
    >>> codec, layout = E8(step=2), Layout.vector(8)
    >>> codec.decode(codec.encode(x, layout, np.random.default_rng(0)), layout).tolist()
    [1.0, -1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    """

    name: ClassVar[str] = "e8"
    number: ClassVar[int] = 17

    bits: float = 0.0
    step: float = 0.0

    def __post_init__(self) -> None:
        if bool(self.bits) == bool(self.step):
            raise ConfigError(f"e8: give either bits or step, got bits={self.bits!r}, step={self.step!r}")
        if self.bits:
            _validate.number(low=0.01, high=12, bits=self.bits)
        else:
            _validate.number(low=1e-4, high=100, step=self.step)

    @property
    def gentle(self) -> Codec | None:
        """Small layers get four bits a value."""
        return FOUR_BITS

    def _encode(self, x: Vector, layout: Layout, rng: np.random.Generator) -> Parts:
        step = self._step(x)
        points = np.zeros((-(-x.size // 8), 8), np.int32)
        gains = _Gains()
        for start in range(0, x.size if step else 0, CHUNK):
            groups = np.zeros((-(-min(CHUNK, x.size - start) // 8), 8), np.float32)
            groups.reshape(-1)[: x.size - start] = x[start : start + CHUNK]
            groups /= step
            found = nearest(groups)
            points[start // 8 : start // 8 + len(found)] = found
            gains.add(groups, found)
        return {"step": np.array([step]), "gain": gains.best(), **_symbols(points, self._shells(x.size))}

    @property
    def _relative(self) -> float:
        """The step in units of the root mean square: a bit more halves it, once it is small."""
        fine = max(self.bits - _BITS[0], 0)
        return self.step or float(np.exp(np.interp(-self.bits, np.negative(_BITS), np.log(_STEPS)))) * 0.5**fine

    def _shells(self, size: int) -> int:
        """How many shells pay for their contexts' tables, by measurement: of normal values, all of them or none."""
        return _SHELLS if self._relative > (1.25 if size >= 100_000 else 2) and size >= 8000 else 0

    def _step(self, x: Vector) -> np.float32:
        """The common step; 0 for values all below float32's normal range, which count as zeros."""
        energy = sum(float(np.square(x[at : at + CHUNK], dtype=np.float64).sum()) for at in range(0, x.size, CHUNK))
        step = min(self._relative * math.sqrt(energy / max(x.size, 1)), float(_MAX))
        return np.float32(step if step >= _TINY else 0)

    def schema(self, layout: Layout) -> Schema:
        yield Floats("step", 1, low=0.0)
        yield Floats("gain", _LENGTHS - 1, "float16", low=0.0, high=2.0)
        yield from _read(-(-layout.size // 8))

    def terms(self, parts: Parts, layout: Layout) -> Iterator[Term]:
        points = _drive(_read(-(-layout.size // 8)), parts)
        scale = np.append(0, parts["gain"]).astype(np.float32) / 2
        for start in range(0, layout.size, CHUNK):
            rows = points[start // 8 : (start + CHUNK) // 8]
            with np.errstate(over="ignore"):  # near float32's limit, clipped at once
                values = (rows.astype(np.float32) * scale[_length(rows)][:, None]).ravel()[
                    : layout.size - start
                ] * parts["step"]
            yield Values(slice(start, min(start + CHUNK, layout.size)), np.clip(values, -_MAX, _MAX))


# --- the lattice -----------------------------------------------------------------------------------------------------


def nearest(x: NDArray[np.float32]) -> Points:
    """Twice the lattice point nearest to each row of x (groups, 8), |x| clipped at 16 000."""
    x = np.clip(x, -_REACH, _REACH)
    half = np.float32(0.5)
    even, odd = _nearest_d8(x), _nearest_d8(x - half) + half
    closer = np.square(x - odd).sum(axis=1) < np.square(x - even).sum(axis=1)
    return (2 * np.where(closer[:, None], odd, even)).astype(np.int32)


def _nearest_d8(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """Round; where the sum is odd, round the coordinate with the largest error the other way."""
    rounded = np.rint(x)
    rows = np.flatnonzero(rounded.sum(axis=1) % 2)
    off = x[rows] - rounded[rows]
    worst = np.abs(off).argmax(axis=1)
    rounded[rows, worst] += np.where(off[np.arange(rows.size), worst] >= 0, 1, -1)
    return rounded


def _shell(points: Points) -> NDArray[np.int64]:
    """m = ||p||^2 / 2 of each point."""
    shell: NDArray[np.int64] = np.square(points, dtype=np.int64).sum(axis=1) // 8
    return shell


def _length(points: Points) -> NDArray[np.int64]:
    """Shell, where all beyond the last count as one more."""
    return np.minimum(_shell(points), _LENGTHS - 1)


class _Gains:
    """Collects the factor for each length that brings its points closest to their values."""

    def __init__(self) -> None:
        self.inner, self.square = np.zeros(_LENGTHS), np.zeros(_LENGTHS)

    def add(self, groups: NDArray[np.float32], points: Points) -> None:
        p = points * np.float32(0.5)
        length = _length(points)
        self.inner += np.bincount(length, (groups * p).sum(axis=1), _LENGTHS)
        self.square += np.bincount(length, np.square(p).sum(axis=1), _LENGTHS)

    def best(self) -> Vector:
        """From the first shell to beyond the last (lengths - 1,), exact in float16."""
        gain = self.inner[1:] / np.where(self.square[1:] == 0, 1, self.square[1:])
        return np.clip(gain, 0, 2).astype(np.float16).astype(np.float32)


# --- points as symbols -----------------------------------------------------------------------------------------------
# In a shell the magnitudes are |p| in the first coset, |p| - 1/2 in the second. A magnitude v takes v^2 of the 2m that
# the length leaves to all of them in the first coset, v (v + 1) / 2 of m - 1 in the second.

_ROOTS = np.stack([
    np.sqrt(np.arange(2 * _SHELLS + 1)).astype(np.int64),
    ((np.sqrt(8 * np.arange(2 * _SHELLS + 1) + 1) - 1) / 2).astype(np.int64),
])  # fmt: skip
"""Largest magnitude that each remaining length allows, for both cosets."""


def _taken(magnitude: NDArray[np.int64], coset: int) -> NDArray[np.int64]:
    return magnitude * (magnitude + 1) // 2 if coset else magnitude * magnitude


def _symbols(points: Points, shells: int) -> Parts:
    """The parts that `_read` turns into points again."""
    coset, shell = points[:, 0] & 1 if len(points) else np.zeros(0, np.int32), _shell(points)
    near = shell <= shells
    classes = np.where(near, np.maximum(2 * shell - 1 + coset, 0), 2 * shells + 1 + coset)
    parts: Parts = {"shells": np.array(shells), "class": classes.astype(np.uint8)}
    for c in (0, 1):
        rows = points[near & (coset == c) & (shell > 0)]
        left = 2 * _shell(rows) if c == 0 else _shell(rows) - 1
        magnitudes = np.abs(rows.astype(np.int64)) // 2
        for i in range(7):
            for r in range(1, int(left.max(initial=0)) + 1):
                if (left == r).any():
                    parts[f"near{c}.{i}.{r}"] = magnitudes[left == r, i].astype(np.uint8)
            left = left - _taken(magnitudes[:, i], c)
        signs = rows[:, :7] < 0 if c else (rows < 0)[rows != 0]
        parts[f"sign{c}"] = signs.ravel().astype(np.uint8)
    return parts | _far_symbols(points[~near], coset[~near])


def _far_symbols(points: Points, coset: NDArray[np.int32]) -> Parts:
    parts: Parts = {}
    whole = (points - coset[:, None]) // 2  # integers of even sum
    reach = int(np.abs(whole).max(initial=0))
    parts["reach"] = np.array(reach)
    kind = symbol_dtype(2 * reach + 1)
    for c in (0, 1):
        rows = whole[coset == c]
        parts[f"far{c}"] = (rows[:, :7] + reach).astype(kind).ravel()
        parts[f"last{c}"] = ((rows[:, 7] + reach) // 2).astype(symbol_dtype(reach + 1))
    return parts


Reader = Generator[PartSpec, NDArray[Any], NDArray[np.int64]]


def _read(groups: int) -> Reader:
    """Asks for parts in the order of the frame and returns twice the points (groups, 8).

    Both the schema and the decoder run this: what the next part looks like depends on the points so far. Forged parts
    give other points than the lattice's, never larger ones than their class and `reach` allow.
    """
    shells = int((yield Count("shells", _SHELLS)))
    far = 2 * shells + 1
    classes = (yield Symbols("class", groups, far + 2)).astype(np.int64)
    points = np.zeros((groups, 8), np.int64)
    for c in (0, 1):
        rows = np.flatnonzero((classes % 2 == 1 - c) & (classes > 0) & (classes < far))
        points[rows] = yield from _read_near((classes[rows] + 1) // 2, c)
    reach = int((yield Count("reach", _REACH + 1)))
    for c in (0, 1):
        rows = np.flatnonzero(classes == far + c)
        points[rows] = yield from _read_far(rows.size, reach, c)
    return points


def _read_near(shell: NDArray[np.int64], c: int) -> Reader:
    left = shell - 1 if c else 2 * shell
    magnitudes = np.zeros((shell.size, 8), np.int64)
    for i in range(7):
        for r in range(1, int(left.max(initial=0)) + 1):
            here = np.flatnonzero(left == r)
            if here.size:
                magnitudes[here, i] = yield Symbols(f"near{c}.{i}.{r}", here.size, int(_ROOTS[c, r]) + 1)
        left = left - _taken(magnitudes[:, i], c)
    magnitudes[:, 7] = _ROOTS[c, left]
    points = 2 * magnitudes + c
    if c == 0:
        signed = np.flatnonzero(points)
        points.reshape(-1)[signed] *= 1 - 2 * (yield Symbols("sign0", signed.size, 2)).astype(np.int64)
    else:
        points[:, :7] *= 1 - 2 * (yield Symbols("sign1", 7 * len(points), 2)).astype(np.int64).reshape(-1, 7)
        points[:, 7] *= np.where((points.sum(axis=1)) % 4 == 0, 1, -1)
    return points


def _read_far(count: int, reach: int, c: int) -> Reader:
    whole = np.zeros((count, 8), np.int64)
    whole[:, :7] = (yield Symbols(f"far{c}", 7 * count, 2 * reach + 1)).astype(np.int64).reshape(-1, 7) - reach
    whole[:, 7] = 2 * (yield Symbols(f"last{c}", count, reach + 1)).astype(np.int64) - reach
    whole[:, 7] += whole.sum(axis=1) % 2
    return 2 * whole + c


def _drive(reader: Reader, parts: Parts) -> NDArray[np.int64]:
    """Run a reader on parts that are already there."""
    try:
        spec = next(reader)
        while True:
            spec = reader.send(parts[spec.name])
    except StopIteration as done:
        points: NDArray[np.int64] = done.value
        return points
