"""The running sum with torch: symbols and small tables travel to the device, not the values they stand for.

Every operation is deterministic: positions within one term are distinct, and terms are added in order.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedcomp.device.running import NumpySum, Products
from fedcomp.entropy import SparseSymbols
from fedcomp.layout import Vector
from fedcomp.terms import MAX, Index, Levels, Product, Term, Values, peak

_CACHED = 1 << 17  # values of the sum that are worked on at a time: 512 kB
_WAITING = 0.7  # bytes of integers that wait, in bytes of the sum
_FEW = 1024  # symbols below which calling torch costs more than it saves


@dataclass(frozen=True)
class _Steps:
    """Levels at equal distances: x[where] = offset + step * counts, for int8 counts (n,)."""

    where: slice
    counts: NDArray[np.int8]
    step: float
    offset: float


def _steps(term: Levels, weight: float) -> _Steps | None:
    """The term as steps; None where levels are not of that kind, or are mostly zero and better added one by one.

    Also None where the step times the weight is beyond float32, which torch refuses.
    """
    levels = term.table.size
    if not levels or abs(weight) * (float(term.table[-1]) - float(term.table[0])) > MAX:
        return None
    if not isinstance(term.where, slice) or isinstance(term.q, SparseSymbols) or term.q.dtype != np.uint8:
        return None
    low, high = float(term.table[0]), float(term.table[-1])
    if levels == 2:
        return _Steps(term.where, term.q.view(np.int8), high - low, low)
    if term.even and levels % 2 and levels < 256:  # from the middle, so that the counts cancel out as the values do
        counts = (term.q - np.uint8(levels // 2)).view(np.int8)
        return _Steps(term.where, counts, high / (levels - 1) - low / (levels - 1), low / 2 + high / 2)
    return None


def _writeable(values: NDArray[Any]) -> NDArray[Any]:
    """The array, copied if it is read-only: torch warns of arrays that it must not write to, though it does not."""
    return values if values.flags.writeable else values.copy()


class _Offsets:
    """Sums of weighted offsets by place, which are added once in the end."""

    def __init__(self) -> None:
        self._sums: dict[tuple[int, int], float] = {}

    def add(self, steps: _Steps, weight: float) -> None:
        """Take in the offset of one term."""
        if steps.offset:
            place = (steps.where.start, steps.where.stop)
            self._sums[place] = self._sums.get(place, 0.0) + weight * steps.offset

    def add_to(self, total: torch.Tensor) -> None:
        """Add what has come in so far, and forget it."""
        for (start, stop), offset in self._sums.items():
            total[start:stop] += offset
        self._sums.clear()


class CpuSum(NumpySum):
    """The sum on the CPU: with numpy, but torch adds integers times a number in one pass where numpy takes three.

    Integers wait for those of a few more replies, so that a part of the sum is fetched from memory once for all of
    them. Each value of the sum still meets them one after the other: no bit hangs on how many wait.
    """

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self._shared = torch.from_numpy(self._total)  # the same memory
        self._offsets = _Offsets()
        self._steps: dict[tuple[int, int], list[tuple[torch.Tensor, float]]] = {}
        self._bytes = 0

    def add(self, terms: Iterable[Term], weight: float) -> float:
        """See RunningSum."""
        rest: list[Term] = []
        bound = 0.0
        for term in terms:
            steps = _steps(term, weight) if isinstance(term, Levels) and term.q.size >= _FEW else None
            if isinstance(term, Values) and not isinstance(term.where, slice):
                bound = max(bound, peak(term.values))
                places, values = torch.from_numpy(term.where), torch.from_numpy(_writeable(term.values))
                self._shared.index_add_(0, places, values, alpha=weight)
            elif steps is None:
                rest.append(term)
            else:
                bound = max(bound, term.peak())
                self._hold(steps, weight)
        if rest:
            self._add_steps()  # in the order of the replies
            bound = max(bound, super().add(rest, weight))
        return bound

    def result(self) -> Vector:
        """See RunningSum."""
        self._add_steps()
        self._offsets.add_to(self._shared)
        return super().result()

    def _hold(self, steps: _Steps, weight: float) -> None:
        counts = torch.from_numpy(_writeable(steps.counts))
        self._steps.setdefault((steps.where.start, steps.where.stop), []).append((counts, weight * steps.step))
        self._offsets.add(steps, weight)
        self._bytes += steps.counts.nbytes
        if self._bytes > _WAITING * self._total.nbytes:
            self._add_steps()

    def _add_steps(self) -> None:
        for (start, stop), waiting in self._steps.items():
            target = self._shared[start:stop]
            for first in range(0, stop - start, _CACHED):
                part = slice(first, first + _CACHED)
                for counts, step in waiting:
                    target[part].add_(counts[part], alpha=step)
        self._steps.clear()
        self._bytes = 0


class TorchSum:
    """The sum on a torch device; see RunningSum and, for products, NumpySum."""

    def __init__(self, size: int, device: str) -> None:
        self._device = torch.device(device)
        self._total = torch.zeros(size, dtype=torch.float32, device=self._device)
        self._offsets = _Offsets()
        self._products = Products(size)

    def add(self, terms: Iterable[Term], weight: float) -> float:
        """See RunningSum."""
        bound = 0.0
        for term in terms:
            if isinstance(term, Product):
                bound = max(bound, term.peak())
                self._products.add(term, weight)
            elif isinstance(term, Levels):
                bound = max(bound, term.peak())
                if (steps := _steps(term, weight)) is not None:
                    self._total[steps.where].add_(self._send(steps.counts), alpha=weight * steps.step)
                    self._offsets.add(steps, weight)
                    continue
                table = self._send(term.table * np.float32(weight))
                self._put(term.where, table.index_select(0, self._symbols(term.q)))
            else:
                bound = max(bound, peak(term.values))
                self._put(term.where, self._send(term.values) * np.float32(weight).item())
        if self._products.full:
            self._flush()
        return bound

    def result(self) -> Vector:
        """See RunningSum."""
        self._flush()
        self._offsets.add_to(self._total)
        values: Vector = self._total.cpu().numpy()
        return values

    def _send(self, values: NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(_writeable(values))).to(self._device)

    def _symbols(self, q: NDArray[Any]) -> torch.Tensor:
        if q.dtype == np.uint8:
            return self._send(q).to(torch.int32)
        return self._send(q.view(np.int16)).to(torch.int32) & 0xFFFF  # torch knows uint16 on some devices only

    def _put(self, where: Index, values: torch.Tensor) -> None:
        if isinstance(where, slice):
            self._total[where] += values
        else:
            self._total.index_add_(0, self._send(where), values)

    def _flush(self) -> None:
        for first, left, right in self._products.take():
            outputs, height, inputs, width = first.split
            target = self._total[first.where].view(outputs, inputs, height, width).permute(0, 2, 1, 3)
            target += (self._send(left) @ self._send(right)).view(first.split)
