"""Vector quantization: groups of `dim` values are sent as one index into a codebook (product quantization).

    x = g v,   i = argmin_j ||v - c_j||^2,   x' = g c_i          g: gain of a block (its root mean square, 4 per octave)

The codebook is trained by k-means (Lloyd's algorithm) on a seeded sample and travels in the frame as float16, or it is
shared: the server trains it on the last mean update, sends it along with the model, and frames name it by its digest
(the idea of FedMPQ, Yang et al., ICME 2025, arXiv 2404.13575). Product quantization: Jegou et al., TPAMI 2011.

The zero vector is always code 0 and is not sent. Hence no group moves further than its own length: the codec is
contractive, and groups of zeros stay zero. Indices are entropy coded by the frame, which makes the frequent zero cheap.
"""

import base64
import binascii
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from fedcomp import _validate
from fedcomp.blocks import block_count
from fedcomp.codec import Codec, ContractiveCodec, Count, Floats, Parts, Schema, Symbols, register, symbol_dtype
from fedcomp.codecs.uniform import FOUR_BITS
from fedcomp.errors import ConfigError
from fedcomp.layout import Layout, Vector
from fedcomp.terms import Term, Values

_MAX = np.finfo(np.float32).max
_TINY = float(np.finfo(np.float32).tiny)
_FLOAT16_MAX = float(np.finfo(np.float16).max)
_PER_OCTAVE = 4
_WORK = 1 << 18
"""Distances computed at a time (1 MB), whatever the number of groups: the full matrix is never built."""


@dataclass(frozen=True)
class Codebook:
    """Code vectors shared by server and clients: `data` holds (size - 1, dim) float16, little-endian; code 0 is zero.

    Raises ConfigError for data that is no whole number of finite vectors.
    """

    dim: int
    data: bytes

    def __post_init__(self) -> None:
        _validate.integer(low=1, high=64, dim=self.dim)
        if len(self.data) % (2 * self.dim) or not np.isfinite(np.frombuffer(self.data, "<f2")).all():
            raise ConfigError(
                f"codebook: expected whole finite float16 vectors of {self.dim}, got {len(self.data)} bytes"
            )

    @classmethod
    def of(cls, vectors: NDArray[np.float32]) -> "Codebook":
        """Codebook of the vectors (size - 1, dim), rounded to float16."""
        return cls(vectors.shape[1], np.clip(vectors, -_FLOAT16_MAX, _FLOAT16_MAX).astype("<f2").tobytes())

    @classmethod
    def from_text(cls, text: str, dim: int) -> "Codebook":
        """Inverse of to_text."""
        try:
            return cls(dim, base64.b64decode(text, validate=True))
        except (binascii.Error, ValueError) as error:
            raise ConfigError(f"codebook: expected base64 of float16 vectors of {dim} ({error})") from None

    def to_text(self) -> str:
        """The data in base64, for configurations."""
        return base64.b64encode(self.data).decode()

    @cached_property
    def vectors(self) -> NDArray[np.float32]:
        """All code vectors (size, dim), the zero vector first."""
        return with_zero(np.frombuffer(self.data, "<f2").astype(np.float32), self.dim)

    @cached_property
    def digest(self) -> bytes:
        """8 bytes that name the codebook in frames."""
        return hashlib.sha256(self.dim.to_bytes(2, "little") + self.data).digest()[:8]


@register
@dataclass(frozen=True)
class VectorQuantizer(ContractiveCodec):
    """Groups of values as indices into a k-means codebook, entropy coded. Biased.

    Args:
        dim: values in a group, 1 to 64. Larger: fewer bits, more error, larger codebook.
        size: number of code vectors with the zero vector, 2 to 4096. Larger: less error, log2(size)/dim bits per value.
        block: values that share a gain, a multiple of dim; 0: one gain per tensor.
        shared: let the server supply the codebook (until it has one, frames carry their own).
        codebook: the shared codebook, filled in by the server. Then no codebook byte is in the frame.

    Where there are no more groups than code vectors, the values are sent as they are, since a codebook would be no
    smaller. Near-ties between code vectors depend on the machine's matrix product, so encoding (not decoding) may
    differ between platforms.

    >>> from fedcomp import Layout
    >>> x = np.tile(np.array([1, 2, 0, 0, -3, 1], np.float32), 50)
    >>> codec, layout = VectorQuantizer(dim=2, size=4), Layout.vector(300)
    >>> bool(np.allclose(codec.decode(codec.encode(x, layout, np.random.default_rng(0)), layout), x, atol=0.01))
    True
    """

    name: ClassVar[str] = "vq"
    number: ClassVar[int] = 5

    dim: int = 8
    size: int = 256
    block: int = 0
    shared: bool = False
    codebook: Codebook | None = None

    def __post_init__(self) -> None:
        _validate.integer(low=1, high=64, dim=self.dim)
        _validate.integer(low=2, high=4096, size=self.size)
        _validate.integer(low=0, high=2**31 - 1, block=self.block)
        _validate.flag(shared=self.shared)
        if self.block % self.dim:
            raise ConfigError(f"vq: block must be a multiple of dim, got block={self.block}, dim={self.dim}")
        if isinstance(self.codebook, str):
            object.__setattr__(self, "codebook", Codebook.from_text(self.codebook, self.dim))
        if self.codebook is not None:
            _validate.instance(kind=Codebook, codebook=self.codebook)
            if self.codebook.dim != self.dim or len(self.codebook.vectors) > self.size:
                raise ConfigError(
                    f"vq: codebook has {len(self.codebook.vectors)} vectors of {self.codebook.dim}, "
                    f"expected at most {self.size} of {self.dim}"
                )

    @property
    def gentle(self) -> Codec | None:
        """Small layers get four bits a value."""
        return FOUR_BITS

    def adapt(self, update: Vector, layout: Layout, rng: np.random.Generator) -> Codec:
        """With shared=True: the codec with a codebook trained on the last mean update."""
        if not self.shared:
            return self
        groups, _, _ = self.normalise(update, layout)
        vectors = train(groups, self.size, rng)
        return replace(self, codebook=Codebook.of(vectors)) if len(vectors) else self

    def _encode(self, x: Vector, layout: Layout, rng: np.random.Generator) -> Parts:
        if self.codebook is None and _group_count(layout, self.dim) <= self.size:
            return {"size": np.array(0), "values": x.copy()}
        groups, top, levels = self.normalise(x, layout)
        parts: Parts = {"top": top, "gain": levels}
        book = self.codebook or Codebook.of(train(groups, self.size, rng))
        if self.codebook is None:
            parts = {"size": np.array(len(book.vectors)), "codebook": book.vectors[1:].ravel(), **parts}
        return {**parts, "index": nearest(groups, book.vectors)}

    def schema(self, layout: Layout) -> Schema:
        size = len(self.codebook.vectors) if self.codebook else int((yield Count("size", self.size)))
        if size == 0:
            yield Floats("values", layout.size)
            return
        if self.codebook is None:
            yield Floats("codebook", (size - 1) * self.dim, "float16")
        yield Floats("top", 1, low=0.0)
        yield Symbols("gain", self._blocks(layout), 256)
        yield Symbols("index", _group_count(layout, self.dim), size)

    def terms(self, parts: Parts, layout: Layout) -> Iterator[Term]:
        if "values" in parts:
            yield Values(slice(0, layout.size), parts["values"])
            return
        vectors = self.codebook.vectors if self.codebook else with_zero(parts["codebook"], self.dim)
        gain = _gains(parts["top"], parts["gain"])
        for where, groups, blocks in self._places(layout):
            values = vectors[parts["index"][groups]].reshape(-1)
            with np.errstate(
                over="ignore"
            ):  # a code vector longer than its group's true one may pass the float32 limit
                values = values * np.repeat(gain[blocks], min(self.block or values.size, values.size))[: values.size]
            yield Values(where, np.clip(values[: where.stop - where.start], -_MAX, _MAX))

    def _blocks(self, layout: Layout) -> int:
        return block_count(layout, self.block)

    def _places(self, layout: Layout) -> Iterator[tuple[slice, slice, slice]]:
        """(values, groups, blocks) of each tensor with elements; the last group of a tensor is padded with zeros."""
        group = block = 0
        for tensor, where in layout.slices():
            if tensor.size:
                groups = -(-tensor.size // self.dim)
                blocks = -(-tensor.size // self.block) if self.block else 1
                yield where, slice(group, group + groups), slice(block, block + blocks)
                group, block = group + groups, block + blocks

    def normalise(self, x: Vector, layout: Layout) -> tuple[NDArray[np.float32], Vector, NDArray[np.uint8]]:
        """Groups divided by their block's gain (n, dim), the largest gain (1,) and the gains' levels (blocks,)."""
        groups = np.zeros((_group_count(layout, self.dim), self.dim), np.float32)
        gain = np.zeros(self._blocks(layout))
        for where, rows, blocks in self._places(layout):
            groups[rows].reshape(-1)[: where.stop - where.start] = x[where]
            starts = np.arange(0, where.stop - where.start, self.block or where.stop - where.start)
            square = np.square(x[where], dtype=np.float64)
            length = np.diff(np.append(starts, square.size))
            gain[blocks] = np.sqrt(np.add.reduceat(square, starts) / length)
        top = np.array([gain.max(initial=0)], np.float32)
        levels = _levels(gain, float(top[0]))
        decoded = _gains(top, levels)
        for _, rows, blocks in self._places(layout):
            count = rows.stop - rows.start
            scale = np.repeat(decoded[blocks], min(self.block // self.dim or count, count))[:count]
            groups[rows] *= np.where(scale == 0, 0, 1 / np.where(scale == 0, 1, scale.astype(np.float64)))[:, None]
        return groups, top, levels


def _group_count(layout: Layout, dim: int) -> int:
    return block_count(layout, dim)


def with_zero(codebook: NDArray[np.float32], dim: int) -> NDArray[np.float32]:
    """All code vectors (size, dim), the zero vector first, from the others in any shape."""
    return np.concatenate([np.zeros((1, dim), np.float32), codebook.reshape(-1, dim)])


def _levels(gain: NDArray[np.float64], top: float) -> NDArray[np.uint8]:
    """Logarithmic levels of the gains below the top one: 1 is the top, 255 is 2^-63.5 of it, 0 means all zeros.

    Gains below float32's normal range count as zero: rounding there could add more error than the values are worth.
    """
    if top < _TINY:
        return np.zeros(gain.size, np.uint8)
    below = np.rint(_PER_OCTAVE * np.log2(top / np.maximum(gain, top * 2.0**-70)))
    decoded = top * 2.0 ** (-below / _PER_OCTAVE)
    return np.where((below > 254) | (decoded < _TINY), 0, below + 1).astype(np.uint8)


def _gains(top: Vector, levels: NDArray[np.uint8]) -> Vector:
    """Gains (blocks,) from their levels, 0 for level 0."""
    scale = 2.0 ** (-(np.arange(256) - 1) / _PER_OCTAVE)
    scale[0] = 0
    return (float(top[0]) * scale).astype(np.float32)[levels]


def nearest(groups: NDArray[np.float32], vectors: NDArray[np.float32]) -> NDArray[Any]:
    """Index of the nearest vector for each group: groups (n, dim), vectors (size, dim) -> uint8 or uint16 (n,)."""
    out = np.empty(len(groups), symbol_dtype(len(vectors)))
    half = np.square(vectors).sum(axis=1) / 2
    rows = max(1, _WORK // len(vectors))
    for start in range(0, len(groups), rows):
        score = groups[start : start + rows] @ vectors.T  # (rows, size)
        score -= half
        out[start : start + rows] = score.argmax(axis=1)
    return out


def train(groups: NDArray[np.float32], size: int, rng: np.random.Generator, rounds: int = 12) -> NDArray[np.float32]:
    """K-means code vectors (at most size - 1, dim) beside the zero vector, trained on a sample of the groups (n, dim).

    Lloyd's algorithm on at most 128 groups a code vector; a code vector that attracts nothing is moved to the group
    with the largest error. Sums are float64. Fewer distinct groups than `size` give fewer vectors.
    """
    sample = groups[np.flatnonzero(groups.any(axis=1))]
    if len(sample) > 128 * size:
        sample = sample[np.sort(rng.choice(len(sample), 128 * size, replace=False))]
    distinct = (
        sample[np.sort(np.unique(sample.round(4), axis=0, return_index=True)[1])] if len(sample) < 4 * size else sample
    )
    if len(distinct) < size:
        return distinct
    vectors = distinct[np.sort(rng.choice(len(distinct), size - 1, replace=False))]
    for _ in range(rounds):
        vectors = _lloyd(sample, vectors)
    return vectors


def _lloyd(sample: NDArray[np.float32], vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    """One step: assign to the nearest of the vectors and zero, then move each vector to the mean of its groups."""
    every = np.concatenate([np.zeros((1, vectors.shape[1]), np.float32), vectors])
    index = nearest(sample, every)
    count = np.bincount(index, minlength=len(every))
    total = np.stack([np.bincount(index, sample[:, j], len(every)) for j in range(sample.shape[1])], axis=1)
    moved = np.where(count[:, None] > 0, total / np.maximum(count, 1)[:, None], every).astype(np.float32)
    empty = np.flatnonzero(count[1:] == 0) + 1
    if empty.size:
        error = np.square(sample - every[index]).sum(axis=1)
        moved[empty] = sample[np.argsort(-error, kind="stable")[: empty.size]]
    return moved[1:]
