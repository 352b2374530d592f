"""Flower's wrappers for differential privacy, given what codecs made of updates instead of what clients sent.

They fit their noise to the clipping norm. Where clients clip, a codec without bias makes longer what they have clipped,
and so does error feedback: the server has to clip what it decodes once more, which is post-processing and costs no
privacy. Where the server clips, it divides by the length of the update, which a codec may have made zero.
"""

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
from flwr.serverapp.strategy import Strategy
from numpy.typing import NDArray

from fedcomp_strategies.records import Model

log = logging.getLogger("fedcomp")

_AT_CLIENTS = "DifferentialPrivacyClientSide"  # beginnings of the names of the wrappers, in both of Flower's APIs
_AT_CLIENTS_ONCE = "DPFedAvg"  # and of what legacy apps had before
_AT_SERVER = "DifferentialPrivacyServerSide"


class Bound:
    """What a strategy's privacy asks of decoded models; nothing of those of other strategies."""

    def __init__(self, strategy: Strategy) -> None:
        clients = next((s for s in _chain(strategy) if _is(s, _AT_CLIENTS)), None)
        before = next((s for s in _chain(strategy) if _is(s, _AT_CLIENTS_ONCE)), None)
        self._clients, self._norm_of = (before, "clip_norm") if clients is None else (clients, "clipping_norm")
        self._server = any(_is(s, _AT_SERVER) for s in _chain(strategy))
        self._norm: float | None = None
        self._told = False

    def announce(self) -> None:
        """Remember the norm that clients are told in this round: the adaptive wrapper changes it afterwards."""
        self._norm = None if self._clients is None else float(getattr(self._clients, self._norm_of))

    def __call__(self, base: Mapping[str, NDArray[Any]], model: Model, node: int) -> Model:
        """The model as the wrapper may see it: no further from the base than the norm, and not the base itself."""
        if self._norm is not None:
            model = self._clipped(base, model, node, self._norm)
        if self._server and all(np.array_equal(base[name], model[name]) for name in base):
            model = _nudged(model)
        return model

    def _clipped(self, base: Mapping[str, NDArray[Any]], model: Model, node: int, norm: float) -> Model:
        moved = {
            name: model[name].astype(np.float64) - start
            for name, start in base.items()
            if start.ndim and start.dtype.kind == model[name].dtype.kind == "f"  # those that Flower's mods clip
        }
        length = float(np.sqrt(sum(np.square(step).sum() for step in moved.values())))
        if length <= norm * (1 + 1e-6):
            return model
        if not self._told and length > norm * 1.01:
            self._told = True
            log.warning(
                "node %d: its update of length %.4g is clipped to %.4g again: either the codec lengthens updates, as "
                "unbiased ones and error feedback do, or the client does not clip", node, length, norm,
            )  # fmt: skip
        shorter = {n: np.asarray(base[n] + step * (norm / length), model[n].dtype) for n, step in moved.items()}
        return model | shorter


def _chain(strategy: Strategy) -> list[Any]:
    """The strategy and all that it wraps."""
    chain: list[Any] = []
    inner: Any = strategy
    while inner is not None and inner not in chain:
        chain.append(inner)
        inner = getattr(inner, "strategy", None)
    return chain


def _is(strategy: object, name: str) -> bool:
    """Whether the strategy, or one that it derives from, has a name that begins so."""
    return any(kind.__name__.startswith(name) for kind in type(strategy).__mro__)


def _nudged(model: Model) -> Model:
    """The model with one value moved, by no more than what has a length in its own precision."""
    for name, values in model.items():
        if values.dtype.kind == "f" and values.size and values.ndim:
            moved = values.copy()
            least = 2 * np.sqrt(np.finfo(values.dtype).tiny)  # the square of less would be zero
            moved.flat[0] += max(least, np.spacing(np.abs(moved.flat[0])))
            return model | {name: moved}
    return model
