"""PowerSGD: low rank by one step of subspace iteration from a start that all clients share.

    P = orthonormalise(M Q),   Q' = M^T P,   M' = P Q'^T            Vogels et al., NeurIPS 2019, arXiv 1905.13727

The paper keeps Q' as the next start (warm start) and averages P between workers before Q'. Uploads of federated
clients are single messages, so each sends its own P and Q'; and since clients come and go, the *server* makes the next
start, by the same step on the last mean update, and sends it along with the model. Before that, the start is random.
M' is the projection of M on a subspace that the start chose: cheaper than lowrank's, and with a good start as good.
"""

import base64
import binascii
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import numpy as np

from fedcomp import _validate
from fedcomp.codec import Codec, register
from fedcomp.codecs.factored import Factor, Factored, Shape
from fedcomp.codecs.identity import FLOAT32
from fedcomp.codecs.lowrank import Matrix, orthonormal, product, thin_shapes, to_matrix, unit_scale
from fedcomp.errors import ConfigError, LayoutError
from fedcomp.layout import Layout, Tensor, Vector
from fedcomp.terms import Product, Values


@dataclass(frozen=True)
class Start:
    """Start matrices shared by server and clients: `data` holds all of them, (n, r) each, as little-endian float16.

    Raises ConfigError for data that is not finite float16.
    """

    data: bytes

    def __post_init__(self) -> None:
        if len(self.data) % 2 or not np.isfinite(np.frombuffer(self.data, "<f2")).all():
            raise ConfigError(f"start: expected finite float16 values, got {len(self.data)} bytes")

    @classmethod
    def of(cls, matrices: list[Matrix]) -> "Start":
        """Start of matrices with orthonormal columns, rounded to float16."""
        return cls(b"".join(matrix.astype("<f2").tobytes() for matrix in matrices))

    @classmethod
    def from_text(cls, text: str) -> "Start":
        """Inverse of to_text."""
        try:
            return cls(base64.b64decode(text, validate=True))
        except (binascii.Error, ValueError) as error:
            raise ConfigError(f"start: expected base64 of float16 values ({error})") from None

    def to_text(self) -> str:
        """The data in base64, for configurations."""
        return base64.b64encode(self.data).decode()

    @cached_property
    def values(self) -> Vector:
        """All values in a row."""
        return np.frombuffer(self.data, "<f2").astype(np.float32)

    @cached_property
    def digest(self) -> bytes:
        """8 bytes that name the start in frames."""
        return hashlib.sha256(self.data).digest()[:8]


@register
@dataclass(frozen=True)
class PowerSGD(Factored):
    """Matrices and convolutions as products of two thin matrices, in one step from a shared start. Biased.

    Args:
        rank: columns of the thin matrices, 1 to 64. Larger: less error, more bytes.
        factors: codec of the thin matrices, and of all tensors with less than two dimensions or too small to gain.
        seed: of the random start, 0 to 2^32 - 1.
        warm: let the server supply a better start from each round's mean update.
        start: that start, filled in by the server. Decoding does not need it.

    >>> from fedcomp import Layout, Tensor
    >>> x = np.outer(np.arange(20), np.arange(30)).astype(np.float32).ravel()
    >>> codec, layout = PowerSGD(rank=1), Layout((Tensor("w", (20, 30)),))
    >>> parts = codec.encode(x, layout, np.random.default_rng(0))
    >>> parts["factors.values"].size, bool(np.allclose(codec.decode(parts, layout), x, rtol=1e-5))
    (50, True)
    """

    name: ClassVar[str] = "powersgd"
    number: ClassVar[int] = 19

    rank: int = 4
    factors: Codec = FLOAT32
    seed: int = 0
    warm: bool = True
    start: Start | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _validate.integer(low=0, high=2**32 - 1, seed=self.seed)
        _validate.flag(warm=self.warm)
        if isinstance(self.start, str):
            object.__setattr__(self, "start", Start.from_text(self.start))
        if self.start is not None:
            _validate.instance(kind=Start, start=self.start)

    def shapes(self, tensor: Tensor) -> tuple[Shape, ...]:
        return thin_shapes(tensor, self.rank)

    def adapt(self, update: Vector, layout: Layout, rng: np.random.Generator) -> Codec:
        """With warm=True: the codec with the start that one step on the last mean update gives."""
        if not self.warm:
            return self
        starts = list(self._starts(layout))
        for index, (matrix, _) in enumerate(self._matrices(update, layout)):
            _, right = _step(matrix, starts[index])
            if right.any():  # nothing can be learnt from a layer that did not move
                starts[index] = orthonormal(right)
        return replace(self, start=Start.of(starts)) if starts else self

    def _split(self, x: Vector, layout: Layout, rng: np.random.Generator) -> Iterator[tuple[Factor, ...]]:
        for (matrix, root), start in zip(self._matrices(x, layout), self._starts(layout), strict=True):
            left, right = _step(matrix, start)
            # Both factors get the same scale, so that a codec with one step for all treats them alike.
            share = np.sqrt(np.linalg.norm(right, axis=0))
            share[share == 0] = 1
            yield left * (share * root), (right / share * root).T

    def _join(self, factors: tuple[Factor, ...], tensor: Tensor, where: slice) -> Product | Values:
        left, right = factors
        return product(left, right, tensor, where)

    def _matrices(self, x: Vector, layout: Layout) -> Iterator[tuple[Matrix, np.float32]]:
        for tensor, where in layout.slices():
            if self.shapes(tensor):
                yield unit_scale(to_matrix(x[where], tensor))

    def _starts(self, layout: Layout) -> Iterator[Matrix]:
        """The start (n, r) of each matrix. Raises LayoutError if the shared one is for other matrices."""
        shapes = [both[1] for both in map(self.shapes, layout.tensors) if both]  # (r, n)
        total = sum(r * n for r, n in shapes)
        if self.start is None:
            values = np.random.default_rng(self.seed).standard_normal(total, np.float32)
        elif self.start.values.size == total:
            values = self.start.values
        else:
            raise LayoutError(
                f"powersgd: the shared start has {self.start.values.size} values, expected {total}; "
                "it was made for another model"
            )
        at = 0
        for r, n in shapes:
            yield values[at : at + r * n].reshape(n, r)
            at += r * n


def _step(matrix: Matrix, start: Matrix) -> tuple[Matrix, Matrix]:
    """(P, Q') for a matrix M (m, n) and a start Q (n, r)."""
    left = orthonormal(matrix @ start)
    return left, matrix.T @ left
