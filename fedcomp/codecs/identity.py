"""No compression: values as float32, or rounded to a 16-bit float. The uncompressed twin of every comparison."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedcomp import _validate
from fedcomp.codec import Codec, Floats, Parts, Schema, alias, register
from fedcomp.layout import Layout, Vector
from fedcomp.terms import Term, Values

_FLOAT16_MAX = float(np.finfo(np.float16).max)


@register
@dataclass(frozen=True)
class Identity(Codec):
    """Values as they are, in float32 or rounded to float16 (nearest even; beyond +-65504 clipped).

    >>> from fedcomp import Layout
    >>> x = np.array([1.0, -2.5, 0.0], np.float32)
    >>> codec, layout = Identity("float16"), Layout.vector(3)
    >>> codec.decode(codec.encode(x, layout, np.random.default_rng(0)), layout).tolist()
    [1.0, -2.5, 0.0]
    """

    name: ClassVar[str] = "identity"
    number: ClassVar[int] = 1

    dtype: str = "float32"

    def __post_init__(self) -> None:
        _validate.one_of(choices=("float32", "float16"), dtype=self.dtype)

    @property
    def unbiased(self) -> bool:
        return self.dtype == "float32"

    @property
    def contractive(self) -> bool:
        return True

    def _encode(self, x: Vector, layout: Layout, rng: np.random.Generator) -> Parts:
        if self.dtype == "float32":
            return {"values": x.copy()}
        return {"values": np.clip(x, -_FLOAT16_MAX, _FLOAT16_MAX).astype(np.float16).astype(np.float32)}

    def schema(self, layout: Layout) -> Schema:
        yield Floats("values", layout.size, self.dtype)

    def terms(self, parts: Parts, layout: Layout) -> Iterator[Term]:
        yield Values(slice(0, layout.size), parts["values"])


FLOAT32 = Identity()
"""The values of sparse codecs and the factors of low-rank ones, unless asked otherwise."""

alias("float32", "identity()")
alias("float16", "identity('float16')")
