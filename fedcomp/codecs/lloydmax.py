"""Lloyd-Max quantization: the levels that minimise the squared error for the data at hand (k-means in one dimension).

    x = g v,   q = argmin_j |v - c_j|,   x' = g c_q          g: root mean square of a tensor or block

Lloyd's two conditions, iterated: borders halfway between levels, levels at the mean of their cells (S. P. Lloyd,
"Least squares quantization in PCM", IEEE Trans. Inf. Theory 28, 1982; J. Max, 1960). The data enter as a histogram
with 128 cells per octave, so that an iteration takes microseconds. The levels start where high-resolution theory puts
them, with a density proportional to the cube root of the data's (Panter and Dite, 1951).

The codebook travels in the frame as float16, or it is shared: the server trains it on the last mean update, sends it
along with the model, and frames name it by its digest. Zero is always a level, so that no value moves further than its
own size and zeros stay zero.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from fedcomp import _validate
from fedcomp.blocks import bfloat16_nearest, block_count, root_mean_squares, spans
from fedcomp.codec import Codec, ContractiveCodec, Count, Floats, Parts, Schema, Symbols, register
from fedcomp.codecs.vq import Codebook
from fedcomp.errors import ConfigError
from fedcomp.layout import Layout, Vector
from fedcomp.terms import Term, scaled

_ROUNDS = 100


@register
@dataclass(frozen=True)
class LloydMax(ContractiveCodec):
    """Scalar quantization with levels trained on the data, entropy coded. Biased.

    Args:
        bits: 1 to 8: 2^bits levels with zero among them. More: less error, more bytes.
        block: values that share a gain (sent as bfloat16). Smaller follows local magnitude better and costs more gains.
            0: one float32 gain per tensor.
        shared: let the server supply the levels (until it has any, frames carry their own).
        codebook: the shared levels, filled in by the server. Then no codebook byte is in the frame.

    >>> from fedcomp import Layout
    >>> x = np.array([5.0, 5.0, 0.0, -2.0, 1.0, 0.0], np.float32)
    >>> codec, layout = LloydMax(bits=2), Layout.vector(6)
    >>> codec.decode(codec.encode(x, layout, np.random.default_rng(0)), layout).round(2).tolist()
    [5.0, 5.0, 0.0, -2.0, 1.0, 0.0]
    """

    name: ClassVar[str] = "lloydmax"
    number: ClassVar[int] = 10

    bits: int = 2
    block: int = 0
    shared: bool = False
    codebook: Codebook | None = None

    def __post_init__(self) -> None:
        _validate.integer(low=1, high=8, bits=self.bits)
        _validate.integer(low=0, high=2**31 - 1, block=self.block)
        _validate.flag(shared=self.shared)
        if isinstance(self.codebook, str):
            object.__setattr__(self, "codebook", Codebook.from_text(self.codebook, 1))
        if self.codebook is not None:
            _validate.instance(kind=Codebook, codebook=self.codebook)
            if self.codebook.dim != 1 or len(self.codebook.vectors) > 1 << self.bits:
                raise ConfigError(
                    f"lloydmax: codebook has {len(self.codebook.vectors)} vectors of {self.codebook.dim}, "
                    f"expected at most {1 << self.bits} of 1"
                )

    def adapt(self, update: Vector, layout: Layout, rng: np.random.Generator) -> Codec:
        """With shared=True: the codec with levels trained on the last mean update."""
        if not self.shared:
            return self
        levels = train(*_histogram(update, self._gains(update, layout), layout, self.block), 1 << self.bits)
        return replace(self, codebook=Codebook.of(levels[:, None])) if levels.size else self

    def _gains(self, x: Vector, layout: Layout) -> Vector:
        gain = root_mean_squares(x, layout, self.block).astype(np.float32)
        return bfloat16_nearest(gain) if self.block else gain

    def _encode(self, x: Vector, layout: Layout, rng: np.random.Generator) -> Parts:
        gain = self._gains(x, layout)
        parts: Parts = {"gain": gain}
        levels = self.codebook.vectors[1:, 0] if self.codebook else None
        if levels is None:
            levels = train(*_histogram(x, gain, layout, self.block), 1 << self.bits)
            levels = Codebook.of(levels[:, None]).vectors[1:, 0]
            parts |= {"size": np.array(levels.size), "codebook": levels}
        order = np.argsort(np.append(levels, 0), kind="stable")
        every = np.append(levels, np.float32(0))[order]
        borders = (every[1:] + every[:-1]) / 2
        name = ((order + 1) % every.size).astype(np.uint8)  # zero, the last, is symbol 0
        q = np.empty(layout.size, np.uint8)
        for values, blocks in spans(layout, self.block):
            rows = x[values].reshape(blocks.stop - blocks.start, -1)
            q[values] = name[np.searchsorted(borders, _divided(rows, gain[blocks]).ravel())]
        return {**parts, "q": q}

    def schema(self, layout: Layout) -> Schema:
        yield Floats("gain", block_count(layout, self.block), "bfloat16" if self.block else "float32", low=0.0)
        if self.codebook:
            size = len(self.codebook.vectors) - 1
        else:
            size = int((yield Count("size", (1 << self.bits) - 1)))
            yield Floats("codebook", size, "float16")
        yield Symbols("q", layout.size, size + 1)

    def terms(self, parts: Parts, layout: Layout) -> Iterator[Term]:
        levels = np.append(np.float32(0), self.codebook.vectors[1:, 0] if self.codebook else parts["codebook"])
        yield from scaled(parts["q"], levels, parts["gain"], layout, self.block)


def _divided(rows: NDArray[np.float32], gain: Vector) -> NDArray[np.float32]:
    """Rows (blocks, n) divided by their gain; zeros where it is zero."""
    divisor = np.where(gain == 0, np.float32(1), gain)[:, None]
    divided: NDArray[np.float32] = np.where(gain[:, None] == 0, np.float32(0), rows / divisor)
    return divided


def _histogram(
    x: Vector, gain: Vector, layout: Layout, block: int
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Count, sum and width of the values x / gain in cells by the upper half of their bits, in increasing order."""
    count, total = np.zeros(1 << 16), np.zeros(1 << 16)
    for values, blocks in spans(layout, block):
        t = _divided(x[values].reshape(blocks.stop - blocks.start, -1), gain[blocks]).ravel()
        cell = t.view(np.uint32) >> 16
        count += np.bincount(cell, minlength=1 << 16)
        total += np.bincount(cell, t, 1 << 16)
    used = np.flatnonzero(count)
    count, total = count[used], total[used]
    order = np.argsort(total / count, kind="stable")
    return count[order], total[order], np.abs(total / count)[order] / 128


def train(
    count: NDArray[np.float64], total: NDArray[np.float64], width: NDArray[np.float64], size: int
) -> NDArray[np.float32]:
    """The levels beside zero (at most size - 1), increasing, for a histogram in increasing order."""
    value = total / count
    levels: NDArray[np.float64] = value[value != 0]
    if levels.size < size:
        return levels.astype(np.float32)
    place = np.cumsum(np.cbrt(count * np.square(width)))  # cube root of the density, times the width
    levels = np.interp((np.arange(size) + 0.5) / size * place[-1], place, value)
    levels[np.abs(levels).argmin()] = 0
    counts, totals = (np.append(0, np.cumsum(part)) for part in (count, total))
    for _ in range(_ROUNDS):
        ends = np.concatenate([[0], np.searchsorted(value, (levels[1:] + levels[:-1]) / 2), [value.size]])
        number, amount = np.diff(counts[ends]), np.diff(totals[ends])
        moved = np.where((number == 0) | (levels == 0), levels, amount / np.maximum(number, 1))
        if np.array_equal(moved, levels):
            break
        levels = moved
    used: NDArray[np.float64] = levels[(number > 0) & (levels != 0)]
    return used.astype(np.float32)
