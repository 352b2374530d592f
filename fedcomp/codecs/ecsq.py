"""ECSQ, entropy-coded scalar quantization: one uniform step for all tensors, and the entropy coder does the rest.

    q = sgn(x) floor(|x|/step + rho),   x' = sgn(q) (|q| + o) step,   o = mean of |x|/step - |q| for |q| = 1, 2, >= 3

One common step is what reverse water-filling asks for: a tensor of small values costs next to nothing, instead of as
much as a tensor of large ones (Mitchell, Balle, Charles, Konecny, "Optimizing the communication-accuracy trade-off in
federated learning with rate-distortion theory", arXiv 2201.02664). rho below one half widens the cell of zero, which
saves more bits than it adds error; the offsets put each level at the mean of what it stands for.

rho = 0 chooses rho from the data: with the slope lambda = -dD/dR of error against bits at this step, the rho that
minimises D + lambda R. Rates and errors are estimated from a histogram with 128 cells per octave, never by encoding.

With stochastic rounding, q = floor(x/step + u) and x' = q step, the codec is exactly unbiased.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from fedcomp import _validate
from fedcomp.blocks import CHUNK, root_mean_square
from fedcomp.codec import Codec, Count, Floats, Parts, Schema, Symbols, matrix_shapes, register, symbol_dtype
from fedcomp.errors import ConfigError
from fedcomp.layout import Layout, Vector
from fedcomp.terms import Levels, Term

TOP = 32767
"""Largest |q|: 65535 symbols."""

MAX = float(np.finfo(np.float32).max)
LEAST = float(np.finfo(np.float32).smallest_subnormal)
CLASSES = 3  # |q| = 1, 2 and all above have an offset each
_RHOS = (0.5, 0.45, 0.4, 0.35, 0.3, 0.25)
_RHO = 0.4
_HALVINGS = 30


@register
@dataclass(frozen=True)
class ECSQ(Codec):
    """Uniform quantization with one step for the whole bucket, entropy coded: least bytes for the error.

    Args:
        step: the step in units of the bucket's root mean square, above 0 to 1000. Larger: fewer bytes, more error.
        bits: instead of the step, the bits per value to aim at, above 0 to 12 (estimated by the entropy of the symbols;
            contexts and small vectors make the frame differ).
        rounding: "deadzone" (least error, biased) or "stochastic" (unbiased, several times the error at low rates).
        rho: rounding offset of "deadzone", up to 0.5 (nearest). Smaller: more zeros. 0: chosen from the data.

    >>> from fedcomp import Layout
    >>> x = np.array([0.1, -4.0, 0.2, 4.0, 8.0, 0.0], np.float32)
    >>> codec, layout = ECSQ(step=1.0), Layout.vector(6)
    >>> codec.decode(codec.encode(x, layout, np.random.default_rng(0)), layout).round().tolist()
    [0.0, -4.0, 0.0, 4.0, 8.0, 0.0]
    """

    name: ClassVar[str] = "ecsq"
    number: ClassVar[int] = 22

    step: float = 0.0
    bits: float = 0.0
    rounding: str = "deadzone"
    rho: float = 0.0

    def __post_init__(self) -> None:
        check_step_or_bits(self.name, self.step, self.bits)
        _validate.one_of(choices=("deadzone", "stochastic"), rounding=self.rounding)
        _validate.number(low=0, high=0.5, rho=self.rho)

    @property
    def unbiased(self) -> bool:
        return self.rounding == "stochastic"

    @property
    def contractive(self) -> bool:
        """Levels lie at the mean of their cells, so that the error is at most that of sending zeros."""
        return self.rounding == "deadzone"

    def _encode(self, x: Vector, layout: Layout, rng: np.random.Generator) -> Parts:
        peak = float(np.maximum(x.max(initial=0), -x.min(initial=0)))
        step, rho = self._choose(x, peak) if peak else (np.float32(0), 0.0)
        ratio = peak / float(step) if peak else 0.0
        parts: Parts = {"step": np.array([step])}
        if self.rounding == "stochastic":
            return stochastic(x, step, peak, rng)
        top = int(min(ratio + rho, TOP))
        q, offsets = round_down(x, step, rho, top)
        return {**parts, "top": np.array(top), "offsets": offsets, "q": q}

    def _choose(self, x: Vector, peak: float) -> tuple[np.float32, float]:
        """The absolute step, so large that no quotient overflows, and rho."""
        stochastic = self.rounding == "stochastic"
        least = max(peak / (TOP - 1) if stochastic else peak * 2.0**-60, LEAST)
        given = self.step * root_mean_square(x)
        if self.step and (self.rho or stochastic):
            return float32_up(max(given, least)), self.rho
        cells = Cells.of(x)
        rho = self.rho or _RHO
        step = max(given if self.step else cells.step_for(self.bits, rho, stochastic), least)
        if not self.rho and not stochastic:
            rho = cells.best_rho(step)
            step = step if self.step else max(cells.step_for(self.bits, rho, stochastic), least)
        return float32_up(step), rho

    def schema(self, layout: Layout) -> Schema:
        yield Floats("step", 1, low=0.0)
        top = int((yield Count("top", TOP)))
        if self.rounding == "deadzone":
            yield Symbols("offsets", min(top, CLASSES), 256)
        yield Symbols("q", layout.size, 2 * top + 1, matrix_shapes(layout))

    def terms(self, parts: Parts, layout: Layout) -> Iterator[Term]:
        yield Levels(slice(0, layout.size), parts["q"], levels(float(parts["step"][0]), parts))


def levels(step: float, parts: Parts) -> Vector:
    """What each symbol stands for (2 top + 1,), by the parts top and offsets, if there are any."""
    top = int(parts["top"])
    sizes = np.arange(1, top + 1, dtype=np.float64)
    if "offsets" in parts:
        sizes += read_offsets(parts["offsets"])[np.minimum(sizes.astype(np.int64), CLASSES) - 1]
    sizes = np.minimum(sizes * step, MAX)
    return np.concatenate([-sizes[::-1], [0], sizes]).astype(np.float32)


def check_step_or_bits(name: str, step: float, bits: float) -> None:
    """Raise ConfigError unless exactly one of the two is given, and is in its range."""
    if bool(step) == bool(bits):
        raise ConfigError(f"{name}: give either step or bits, got step={step!r}, bits={bits!r}")
    if step:
        _validate.number(low=0, high=1000, above=True, step=step)
    else:
        _validate.number(low=0, high=12, above=True, bits=bits)


def float32_up(step: float) -> np.float32:
    """The step as float32, rounded up."""
    rounded = np.float32(min(step, MAX))
    return np.nextafter(rounded, np.float32(np.inf)) if rounded < min(step, MAX) else rounded


def table_bits(used: int, magnitudes: int, size: int) -> float:
    """About what the coder's table of `used` out of so many magnitudes costs; matters in small vectors only."""
    if used == 0:
        return 0.0
    symbols = min(2 * used, size)
    return float(symbols * (1.5 + np.log2(2 * magnitudes / symbols) + np.log2(size / symbols) / 2))


def write_offsets(offsets: NDArray[np.float64]) -> NDArray[np.uint8]:
    """Offsets as bytes, in 128ths of a step, from -1 to 127/128."""
    return (np.clip(np.rint(offsets * 128), -128, 127) + 128).astype(np.uint8)


def read_offsets(written: NDArray[Any]) -> NDArray[np.float64]:
    """Inverse of write_offsets."""
    return (written.astype(np.float64) - 128) / 128


class Uniforms(Protocol):
    """A source of random numbers, as numpy's Generator is one."""

    def random(self, size: tuple[int, ...], dtype: type[np.float32]) -> Vector:
        """Numbers in [0, 1) of that shape."""


def stochastic(x: Vector, step: np.float32, peak: float, rng: Uniforms) -> Parts:
    """Parts of stochastic rounding at an absolute step; `peak` is the largest magnitude in x."""
    top = min(int(peak / float(step)) + 1, TOP) if peak else 0
    return {"step": np.array([step]), "top": np.array(top), "q": _round_at_random(x, step, top, rng)}


def _round_at_random(x: Vector, step: np.float32, top: int, rng: Uniforms) -> NDArray[Any]:
    q = np.zeros(x.size, symbol_dtype(2 * top + 1))
    if top == 0:
        return q
    for start in range(0, x.size, CHUNK):
        t = x[start : start + CHUNK] / step
        t += rng.random(t.shape, np.float32)  # before the offset, so that zeros stay zero whatever u is
        np.floor(t, out=t)
        np.clip(t, -top, top, out=t)
        t += np.float32(top)
        q[start : start + CHUNK] = t.astype(np.int32)
    return q


def round_down(x: Vector, step: np.float32, rho: float, top: int) -> tuple[NDArray[Any], NDArray[np.uint8]]:
    """Symbols (x.size,), q + top, and the offsets of the classes that can occur."""
    if top == 0:
        return np.zeros(x.size, np.uint8), np.zeros(0, np.uint8)
    q = np.empty(x.size, symbol_dtype(2 * top + 1))
    count, excess = np.zeros(CLASSES + 1), np.zeros(CLASSES + 1)
    for start in range(0, x.size, CHUNK):
        t = x[start : start + CHUNK] / step
        size = np.abs(t)
        k = size + np.float32(rho)
        np.minimum(k, np.float32(top), out=k)
        np.floor(k, out=k)
        size -= k
        kind = np.minimum(k, np.float32(CLASSES)).astype(np.int32)
        count += np.bincount(kind, minlength=CLASSES + 1)
        excess += np.bincount(kind, size, CLASSES + 1)
        np.copysign(k, t, out=k)
        k += np.float32(top)
        q[start : start + CHUNK] = k.astype(np.int32)
    return q, write_offsets(excess / np.maximum(count, 1))[1 : top + 1]


@dataclass(frozen=True)
class Cells:
    """Histogram of the magnitudes of a vector, by the upper half of their bits: 128 cells per octave.

    Attributes:
        middle: the middle of each cell that is not empty, increasing (cells,).
        share: the share of the values in it (cells,).
        size: the number of values.
        sign: bits that the sign of a value costs, less than 1 where most are of one sign.
    """

    middle: NDArray[np.float64]
    share: NDArray[np.float64]
    size: int
    sign: float

    @classmethod
    def of(cls, x: Vector) -> "Cells":
        """Histogram of the vector, which must hold a value at least."""
        words = x.view(np.uint32)
        count = np.zeros(1 << 16, np.int64)
        for start in range(0, x.size, CHUNK):
            count += np.bincount(words[start : start + CHUNK] >> 16, minlength=1 << 16)
        signs = count.reshape(2, -1)[:, 1:].sum(axis=1)
        count = count.reshape(2, -1).sum(axis=0)
        used = np.flatnonzero(count)
        middle = (used.astype(np.uint32) << 16 | 0x8000).view(np.float32).astype(np.float64)
        middle[used == 0] = 0  # zeros and the tiniest subnormals
        shares = signs[signs > 0] / max(int(signs.sum()), 1)
        return cls(middle, count[used] / x.size, x.size, -float(shares @ np.log2(shares)))

    def estimate(self, step: float, rho: float, stochastic: bool) -> tuple[float, float]:
        """Bits per value and squared error per value, in units of the step."""
        t = self.middle / step
        if stochastic:
            k = np.minimum(np.floor(t), TOP - 1)
            upper = np.minimum(t - k, 1)
            index = k.astype(np.int64)
            mass = np.bincount(index, self.share * (1 - upper), int(index[-1]) + 2)
            mass[1:] += np.bincount(index, self.share * upper)
            return self._bits(mass, step), float(self.share @ (upper * (1 - upper)))
        k = np.minimum(np.floor(t + rho), TOP)
        index = k.astype(np.int64)
        kind = np.minimum(index, CLASSES)
        count = np.bincount(kind, self.share, CLASSES + 1)
        excess = np.bincount(kind, self.share * (t - k), CLASSES + 1)
        offset = np.concatenate([[0], (excess / np.maximum(count, 1e-300))[1:]])
        return self._bits(np.bincount(index, self.share), step), float(self.share @ np.square(t - k - offset[kind]))

    def _bits(self, mass: NDArray[Any], step: float) -> float:
        """Entropy of the levels and signs; a cell wider than a step is taken as spread evenly over several levels."""
        used = mass[mass > 0]
        width = np.maximum(self.middle / (128 * step), 1)
        entropy = self.sign * (1 - mass[0]) - used @ np.log2(used) + self.share @ np.log2(width)
        return float(entropy) + table_bits(used.size, mass.size, self.size) / self.size

    def step_for(self, bits: float, rho: float, stochastic: bool) -> float:
        """The step at which about `bits` per value are needed, by bisection of its logarithm."""
        peak = max(float(self.middle[-1]), LEAST)
        low, high = np.log2(peak) - 15, np.log2(peak) + 10
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            needed, _ = self.estimate(float(2.0**middle), rho, stochastic)
            low, high = (middle, high) if needed > bits else (low, middle)
        return float(2.0**high)

    def best_rho(self, step: float) -> float:
        """The rho with the least D + lambda R at this step, lambda being the slope at which the step trades them."""
        slope = self.slope(step)
        costs = [error + slope * bits for bits, error in (self.estimate(step, rho, False) for rho in _RHOS)]
        return _RHOS[int(np.argmin(costs))]

    def slope(self, step: float) -> float:
        """Squared error per value, in units of the step, that a bit per value more would save; 0 if none would."""
        bits, error = self.estimate(step, _RHO, False)
        fewer, more = self.estimate(1.1 * step, _RHO, False)
        return max((1.21 * more - error) / (bits - fewer), 0.0) if bits > fewer else 0.0
