"""The running sum with torch: symbols and small tables travel to the device, not the values they stand for.

Every operation is deterministic: positions within one term are distinct, and terms are added in order.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedcomp.device.running import joined
from fedcomp.layout import Vector
from fedcomp.terms import Index, Levels, Product, Term, peak


class TorchSum:
    """The sum on a torch device; see RunningSum and, for products, NumpySum."""

    def __init__(self, size: int, device: str) -> None:
        self._device = torch.device(device)
        self._total = torch.zeros(size, dtype=torch.float32, device=self._device)
        self._waiting: dict[int, list[tuple[Product, float]]] = {}
        self._held = 0

    def add(self, terms: Iterable[Term], weight: float) -> float:
        """See RunningSum."""
        bound = 0.0
        for term in terms:
            if isinstance(term, Product):
                bound = max(bound, term.peak())
                self._waiting.setdefault(term.where.start, []).append((term, weight))
                self._held += term.left.size + term.right.size
            elif isinstance(term, Levels):
                bound = max(bound, term.peak())
                table = self._send(term.table * np.float32(weight))
                self._put(term.where, table.index_select(0, self._symbols(term.q)))
            else:
                bound = max(bound, peak(term.values))
                self._put(term.where, self._send(term.values) * np.float32(weight).item())
        if 2 * self._held > self._total.numel():
            self._flush()
        return bound

    def result(self) -> Vector:
        """See RunningSum."""
        self._flush()
        values: Vector = self._total.cpu().numpy()
        return values

    def _send(self, values: NDArray[Any]) -> torch.Tensor:
        if not values.flags.writeable:  # torch warns of arrays that it could write to
            values = values.copy()
        return torch.from_numpy(np.ascontiguousarray(values)).to(self._device)

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
        for waiting in self._waiting.values():
            left, right = (self._send(factor) for factor in joined(waiting))
            first = waiting[0][0]
            outputs, height, inputs, width = first.split
            target = self._total[first.where].view(outputs, inputs, height, width).permute(0, 2, 1, 3)
            target += (left @ right).view(first.split)
        self._waiting.clear()
        self._held = 0
