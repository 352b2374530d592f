"""Residual vector quantization: a second codebook for what the first left over, and so on.

    r_0 = v,   i_s = argmin_j ||r_s - c_sj||^2,   r_(s+1) = r_s - c_(s,i_s),   v' = sum_s c_(s,i_s)

(Juang & Gray, ICASSP 1982; Chen, Guan & Wang, Sensors 2010.) Stages of `size` vectors reach what one codebook of
size^stages would cost too much to train, search and send. Groups, gains and codebooks are those of `vq`: code 0 is the
zero vector in every stage, so that no stage adds error.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from fedcomp import _validate
from fedcomp.blocks import block_count
from fedcomp.codec import Codec, ContractiveCodec, Count, Floats, Parts, Schema, Symbols, register
from fedcomp.codecs.uniform import FOUR_BITS
from fedcomp.codecs.vq import Codebook, VectorQuantizer, nearest, train, with_zero
from fedcomp.errors import ConfigError
from fedcomp.layout import Layout, Vector
from fedcomp.terms import Term, Values

_MAX = np.finfo(np.float32).max


@register
@dataclass(frozen=True)
class ResidualVQ(ContractiveCodec):
    """Groups of values as one index a stage into that stage's k-means codebook, entropy coded. Biased.

    Args:
        stages: codebooks, 1 to 8. More: less error, log2(size)/dim bits per value each.
        dim: values in a group, 1 to 64. Larger: fewer bits, more error, larger codebooks.
        size: code vectors in a stage with the zero vector, 2 to 4096. Larger: less error, larger codebooks.
        block: values that share a gain, a multiple of dim; 0: one gain per tensor.
        shared: let the server supply the codebooks (until it has them, frames carry their own).
        codebook: the shared codebooks one after the other, filled in by the server.

    Where there are no more groups than code vectors in a stage, the values are sent as they are. Near-ties between
    code vectors depend on the machine's matrix product, so encoding (not decoding) may differ between platforms.

    >>> from fedcomp import Layout
    >>> x = np.tile(np.array([1, 2, 0, 0, -3, 1], np.float32), 50)
    >>> codec, layout = ResidualVQ(2, dim=2, size=4), Layout.vector(300)
    >>> bool(np.allclose(codec.decode(codec.encode(x, layout, np.random.default_rng(0)), layout), x, atol=0.01))
    True
    """

    name: ClassVar[str] = "rvq"
    number: ClassVar[int] = 16

    stages: int = 2
    dim: int = 8
    size: int = 256
    block: int = 0
    shared: bool = False
    codebook: Codebook | None = None

    def __post_init__(self) -> None:
        _validate.integer(low=1, high=8, stages=self.stages)
        VectorQuantizer(self.dim, self.size, self.block, self.shared)  # checks these
        if isinstance(self.codebook, str):
            object.__setattr__(self, "codebook", Codebook.from_text(self.codebook, self.dim))
        if self.codebook is not None:
            _validate.instance(kind=Codebook, codebook=self.codebook)
            got, expected = (
                (len(self.codebook.vectors) - 1, self.codebook.dim),
                (self.stages * (self.size - 1), self.dim),
            )
            if got != expected:
                raise ConfigError(
                    f"rvq: codebook has {got[0]} vectors of {got[1]}, expected {expected[0]} of {expected[1]}"
                )

    @property
    def gentle(self) -> Codec | None:
        """Small layers get four bits a value."""
        return FOUR_BITS

    @property
    def _plain(self) -> VectorQuantizer:
        """What groups values and finds their gains."""
        return VectorQuantizer(self.dim, self.size, self.block)

    def adapt(self, update: Vector, layout: Layout, rng: np.random.Generator) -> Codec:
        """With shared=True: the codec with codebooks trained on the last mean update."""
        if not self.shared:
            return self
        groups, _, _ = self._plain.normalise(update, layout)
        if not groups.any():
            return self
        books, _ = self._train(groups, rng)
        padded = [np.pad(book, ((0, self.size - 1 - len(book)), (0, 0))) for book in books]  # with zeros: never chosen
        return replace(self, codebook=Codebook.of(np.concatenate(padded)))

    def _train(
        self, groups: NDArray[np.float32], rng: np.random.Generator
    ) -> tuple[list[NDArray[np.float32]], list[NDArray[Any]]]:
        """Codebooks of the stages without their zero vectors, as float16 will hold them, and the groups' indices."""
        books, indices, residual = [], [], groups
        for _ in range(self.stages):
            book = Codebook.of(train(residual, self.size, rng)).vectors
            index = nearest(residual, book)
            residual = residual - book[index]
            books.append(book[1:])
            indices.append(index)
        return books, indices

    def _encode(self, x: Vector, layout: Layout, rng: np.random.Generator) -> Parts:
        if self.codebook is None and block_count(layout, self.dim) <= self.size:
            return {"coded": np.array(0), "values": x.copy()}
        groups, top, levels = self._plain.normalise(x, layout)
        parts: Parts = {}
        if self.codebook is None:
            books, indices = self._train(groups, rng)
            parts["coded"] = np.array(1)
            for s, book in enumerate(books):
                parts |= {f"size.{s}": np.array(len(book)), f"codebook.{s}": book.ravel()}
        else:
            indices = []
            for vectors in self._shared:
                book = with_zero(vectors, self.dim)
                indices.append(nearest(groups, book))
                groups = groups - book[indices[-1]]
        return {**parts, "top": top, "gain": levels, **{f"index.{s}": index for s, index in enumerate(indices)}}

    def schema(self, layout: Layout) -> Schema:
        groups = block_count(layout, self.dim)
        sizes = [self.size - 1] * self.stages
        if self.codebook is None:
            if not int((yield Count("coded", 1))):
                yield Floats("values", layout.size)
                return
            for s in range(self.stages):
                sizes[s] = int((yield Count(f"size.{s}", min(self.size - 1, groups))))
                yield Floats(f"codebook.{s}", sizes[s] * self.dim, "float16")
        yield Floats("top", 1, low=0.0)
        yield Symbols("gain", block_count(layout, self.block), 256)
        for s, size in enumerate(sizes):
            yield Symbols(f"index.{s}", groups, size + 1)

    def terms(self, parts: Parts, layout: Layout) -> Iterator[Term]:
        if "values" in parts:
            yield Values(slice(0, layout.size), parts["values"])
            return
        stages = (self._plain.pieces(self._stage(parts, s), layout) for s in range(self.stages))
        for pieces in zip(*stages, strict=True):
            with np.errstate(over="ignore"):  # as in vq: sums may pass the float32 limit where forged, or by a hair
                values = np.sum([values for _, values in pieces], axis=0)
            yield Values(pieces[0][0], np.clip(values, -_MAX, _MAX))

    def _stage(self, parts: Parts, s: int) -> Parts:
        """The parts of one stage as those of a vq."""
        vectors = self._shared[s] if self.codebook else parts[f"codebook.{s}"]
        return {"codebook": vectors.ravel(), "top": parts["top"], "gain": parts["gain"], "index": parts[f"index.{s}"]}

    @property
    def _shared(self) -> NDArray[np.float32]:
        """The shared codebooks without their zero vectors (stages, size - 1, dim)."""
        assert self.codebook is not None
        return self.codebook.vectors[1:].reshape(self.stages, self.size - 1, self.dim)
