"""Block top-k (structured) sparsification: the blocks of consecutive values with the most energy.

    C(x) = x 1[block of x among the k with the largest ||x_b||_2],   contraction delta >= k / blocks

A position names a whole block: it costs 1/block of what top-k pays for positions, and it keeps weaker values in return.
Where large values come in rows (embeddings, filters, inputs that are mostly dead) that is a bargain.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from fedcomp import _validate
from fedcomp.blocks import block_count, spans
from fedcomp.codec import Codec, Parts, Positions, Schema, register
from fedcomp.codecs.identity import FLOAT32
from fedcomp.codecs.sparse import Sparse, count_kept
from fedcomp.codecs.topk import largest
from fedcomp.codecs.uniform import FOUR_BITS
from fedcomp.layout import Layout, Vector
from fedcomp.terms import Term


@register
@dataclass(frozen=True)
class BlockTopK(Sparse):
    """Keep the blocks of values with the largest energy; the rest are sent as zero. Biased: use it with error feedback.

    Args:
        fraction: share of the blocks to keep, in (0, 1]; at least one is kept. Larger: less error, more bytes.
        block: consecutive values in a block; blocks restart at each tensor, so that its last one may be shorter.
            Larger: fewer bytes for positions, a coarser choice.
        values: codec of the kept values.

    >>> from fedcomp import Layout
    >>> x = np.array([1, 0, 3, 3, 0, 4], np.float32)
    >>> codec, layout = BlockTopK(0.34, block=2), Layout.vector(6)
    >>> codec.decode(codec.encode(x, layout, np.random.default_rng(0)), layout).tolist()
    [0.0, 0.0, 3.0, 3.0, 0.0, 0.0]
    """

    name: ClassVar[str] = "blocktopk"
    number: ClassVar[int] = 12

    fraction: float
    block: int = 32
    values: Codec = FLOAT32

    def __post_init__(self) -> None:
        _validate.number(low=0, high=1, above=True, fraction=self.fraction)
        _validate.integer(low=1, high=1 << 31, block=self.block)
        _validate.instance(kind=Codec, values=self.values)

    @property
    def gentle(self) -> Codec | None:
        """Below one value in sixteen, small layers get four bits a value."""
        return FOUR_BITS if self.fraction < 1 / 16 else None

    def kept(self, blocks: int) -> int:
        """How many of the blocks are kept."""
        return count_kept(blocks, self.fraction)

    def _encode(self, x: Vector, layout: Layout, rng: np.random.Generator) -> Parts:
        blocks = largest(_strengths(x, layout, self.block), self.kept(block_count(layout, self.block)))
        return {"blocks": blocks, **self._kept_parts(x[_members(layout, self.block, blocks)], rng)}

    def schema(self, layout: Layout) -> Schema:
        count = block_count(layout, self.block)
        blocks = yield Positions("blocks", self.kept(count), count)
        starts = _edges(layout, self.block)
        kept = int((starts[blocks + 1] - starts[blocks]).sum())
        yield from self._kept_schema(kept)

    def terms(self, parts: Parts, layout: Layout) -> Iterator[Term]:
        yield from self._kept_terms(parts, _members(layout, self.block, parts["blocks"]))


@lru_cache(maxsize=32)
def _edges(layout: Layout, block: int) -> NDArray[np.int64]:
    """First value of each block, and the end of the last (blocks + 1,). Tensors lie back to back, so blocks do too."""
    starts = [np.arange(where.start, where.stop, block) for _, where in layout.slices()]
    return np.concatenate([*starts, [layout.size]]).astype(np.int64)


def _members(layout: Layout, block: int, blocks: NDArray[np.int64]) -> NDArray[np.int64]:
    """Ascending positions of all values of the given blocks."""
    edges = _edges(layout, block)
    length = edges[blocks + 1] - edges[blocks]
    skipped = edges[blocks] - (np.cumsum(length) - length)  # values that are left out before each block
    members: NDArray[np.int64] = np.arange(int(length.sum())) + np.repeat(skipped, length)
    return members


def _strengths(x: Vector, layout: Layout, block: int) -> Vector:
    """Energy of each block as the root of its share in a full block: in float32's range whatever the values are."""
    energy = np.zeros(block_count(layout, block))
    for values, blocks in spans(layout, block):
        rows = x[values].reshape(blocks.stop - blocks.start, -1)
        energy[blocks] += np.square(rows, dtype=np.float64).sum(axis=1)
    return np.sqrt(energy / block).astype(np.float32)
