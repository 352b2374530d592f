"""Layout: names, shapes, dtypes and offsets of a model's tensors in one flat float32 vector.

Codecs see a whole bucket of tensors as one vector, because the best of them need more than one tensor at a time;
the layout tells them where each tensor lies. Tensors are always matched by name, never by position.
"""

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcomp.errors import LayoutError, NonFiniteError

Vector = NDArray[np.float32]
Arrays = Mapping[str, NDArray[Any]]

DTYPES = (
    "float32", "float64", "float16", "bool",
    "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
)  # fmt: skip
"""Tensor dtypes a model may hold. The order is part of the frame format: only append."""


@dataclass(frozen=True)
class Tensor:
    """Name, shape and dtype (a native numpy name such as "float32") of one tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise LayoutError(
                f"tensor {self.name!r}: dtype {self.dtype} is not supported; use one of {', '.join(DTYPES)}"
            )

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def is_float(self) -> bool:
        """Whether the tensor holds floating-point numbers (others are never coded with loss)."""
        return self.dtype.startswith("float")


@dataclass(frozen=True)
class Layout:
    """The tensors of a model or of a part of it, in order, back to back in one vector.

    >>> layout = Layout.of({"w": np.zeros((2, 3), np.float32), "b": np.zeros(3, np.float32)})
    >>> layout.size, [(t.name, where.start) for t, where in layout.slices()]
    (9, [('w', 0), ('b', 6)])
    """

    tensors: tuple[Tensor, ...]

    def __post_init__(self) -> None:
        names = [t.name for t in self.tensors]
        if len(set(names)) != len(names):
            raise LayoutError(f"tensor names must differ, got {sorted({n for n in names if names.count(n) > 1})} twice")

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Layouts are keys of caches that every frame asks several times."""
        return hash(self.tensors)

    def __getstate__(self) -> dict[str, Any]:
        """Without the hash: another process has other hashes of texts."""
        return {name: value for name, value in vars(self).items() if name != "_hash"}

    @classmethod
    def of(cls, arrays: Arrays) -> "Layout":
        """Layout of named arrays, any byte order. Raises LayoutError for a dtype that models cannot hold."""
        return cls(tuple(Tensor(n, a.shape, a.dtype.newbyteorder("=").name) for n, a in arrays.items()))

    @classmethod
    def vector(cls, size: int, name: str = "x") -> "Layout":
        """Layout of one float32 vector."""
        return cls((Tensor(name, (size,)),))

    @cached_property
    def size(self) -> int:
        """Number of elements of all tensors together."""
        return sum(t.size for t in self.tensors)

    @cached_property
    def names(self) -> frozenset[str]:
        """Names of the tensors."""
        return frozenset(t.name for t in self.tensors)

    def slices(self) -> Iterator[tuple[Tensor, slice]]:
        """Each tensor with the place of its elements in the flat vector."""
        start = 0
        for tensor in self.tensors:
            yield tensor, slice(start, start + tensor.size)
            start += tensor.size

    @cached_property
    def digest(self) -> bytes:
        """8 bytes that name the layout: SHA-256 over names and shapes.

        Dtypes stay out, because a server may widen them (FedAdam hands out float64) while the model stays the same.
        """
        told = "\n".join(f"{t.name}\t{','.join(map(str, t.shape))}" for t in self.tensors)
        return hashlib.sha256(told.encode()).digest()[:8]

    def with_dtypes(self, dtypes: Iterable[str]) -> "Layout":
        """The same tensors with other dtypes, in order."""
        return Layout(tuple(replace(t, dtype=d) for t, d in zip(self.tensors, dtypes, strict=True)))

    def unflatten(self, x: Vector) -> dict[str, Vector]:
        """Views of the vector x (size,) by tensor name and shape."""
        return {t.name: x[where].reshape(t.shape) for t, where in self.slices()}

    def check_finite(self, x: Vector) -> None:
        """Raise NonFiniteError naming the first tensor of x that holds NaN or infinity."""
        if x.size == 0 or (np.isfinite(x.min()) and np.isfinite(x.max())):  # NaN is either; twice as fast as all of x
            return
        for tensor, where in self.slices():
            check_finite(tensor.name, x[where])


def is_float_dtype(name: str) -> bool:
    """Whether a dtype's name, of whatever byte order, is that of a floating-point type of numpy."""
    try:
        return np.dtype(name).kind == "f"
    except TypeError:
        return False


def check_finite(name: str, values: NDArray[Any]) -> None:
    """Raise NonFiniteError if the named floating-point tensor holds NaN or infinity."""
    bad = values.size - int(np.isfinite(values).sum())
    if bad:
        raise NonFiniteError(
            f"tensor {name!r}: expected finite values, got {bad} NaN or infinite of {values.size}; "
            "look at the learning rate and the loss of this client"
        )


def check_same_tensors(expected: Arrays, got: Arrays, whose: str) -> None:
    """Raise LayoutError unless both hold the same names with the same shapes (in any order)."""
    missing, extra = expected.keys() - got.keys(), got.keys() - expected.keys()
    if missing or extra:
        raise LayoutError(f"{whose}: missing tensors {sorted(missing)}, unexpected tensors {sorted(extra)}")
    for name, array in expected.items():
        if got[name].shape != array.shape:
            raise LayoutError(f"{whose}: tensor {name!r} has shape {got[name].shape}, expected {array.shape}")
