"""CAFe: the last mean update, which the server tells, is the predictor of the next one (arXiv 2512.22623).

    client: q_i = C(x_i - beta p);   server: step = beta p + weighted mean of q_i,   the next p is that step

Clients keep nothing. Both sides use the predictor as it was sent: the server codes it and decodes its own bytes. What
the codec never picks up is applied again and again, shrunk by beta each time: CAFe carries momentum with a horizon of
up to 1 / (1 - beta) rounds, so its honest twin is FedAvgM on float32. At beta = 1 it is an integrator: it walked off on
a convolutional and on a recurrent network, and is refused unless forced.
"""

import statistics
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedcomp import _validate
from fedcomp.codec import Codec, Parts
from fedcomp.codecs.uniform import Uniform
from fedcomp.errors import ConfigError
from fedcomp.feedback.scheme import Feedback, Slots, register
from fedcomp.layout import Arrays, Layout, Vector

LEAST_BITS = 0.02
"""Bits per parameter below which CAFe is worse than nothing: the predictor drowns what is sent."""


@register
@dataclass(frozen=True)
class CAFe(Feedback):
    """The last mean update as predictor, for clients without state that the server can tell it to.

    Args:
        beta: how much of the predictor counts. Larger: longer memory, nearer to divergence; 0.8 to 0.9 held up.
        codec: how the predictor travels to the clients; its bytes count in the downlink.
        force: allow beta = 1.
    """

    name: ClassVar[str] = "cafe"

    beta: float = 0.9
    codec: Codec = Uniform(8)  # noqa: RUF009  (frozen)
    force: bool = False

    def __post_init__(self) -> None:
        _validate.number(low=0, high=1, beta=self.beta)
        _validate.flag(force=self.force)
        _validate.instance(kind=Codec, codec=self.codec)
        if self.codec.name == "auto":
            raise ConfigError("feedback 'cafe': budgets are for uploads; use a codec such as uniform(8), not auto")
        if self.beta > 0.95 and not self.force:
            raise ConfigError(
                f"feedback 'cafe': beta={self.beta} is beyond 0.95, where training diverges on convolutional and "
                "recurrent networks; use 0.8 to 0.9, or force=True"
            )

    def encode(
        self, codec: Codec, x: Vector, layout: Layout, before: Slots, rng: np.random.Generator, *, age: int = 1
    ) -> tuple[Parts, Slots]:
        """See Feedback; the memory may have the slot "predictor", from the server."""
        layout.check_finite(x)
        if "predictor" in before:
            with np.errstate(over="ignore"):  # found by the codec, which names the tensor
                x = x - np.float32(self.beta) * before["predictor"]
        return codec.encode(x, layout, rng), {}


class CAFeGuard:
    """Watches for divergence, and lowers beta when it shows.

    What CAFe re-applies round after round shows as mean updates that grow again after they had shrunk, or as weights
    that run away. Both are judged against the run's own past, as their scale is the task's.
    """

    GROWTH = 3.0
    """Times the calmest five rounds so far that the mean updates' norm may reach."""

    DRIFT = 1.5
    """Times its value five rounds ago that the weights' norm may reach, after the first ten rounds."""

    LOWER = 0.8
    """What beta is multiplied with."""

    _SPAN = 5

    def __init__(self, beta: float) -> None:
        self.beta = beta
        self._rounds = 0
        self._updates: list[float] = []
        self._weights: list[float] = []
        self._calmest = float("inf")

    def observe(self, update: float, weights: float) -> str:
        """Take in the norms of a round's mean update and of the new weights.

        Returns why beta was lowered, "" if it was not.
        """
        self._rounds += 1
        self._updates = [*self._updates, update][-self._SPAN :]
        self._weights = [*self._weights, weights][-self._SPAN - 1 :]
        if not (np.isfinite(update) and np.isfinite(weights)):
            return self._lower("the mean update is not finite")
        if len(self._updates) < self._SPAN:
            return ""
        usual = statistics.median(self._updates)
        if usual > self.GROWTH * self._calmest:
            return self._lower(f"mean updates have grown to a norm of {usual:.3g}, from {self._calmest:.3g}")
        self._calmest = min(self._calmest, usual)
        before = self._weights[0]
        if self._rounds > 2 * self._SPAN and weights > self.DRIFT * before:
            return self._lower(f"the weights' norm has grown to {weights:.3g}, from {before:.3g} five rounds ago")
        return ""

    def _lower(self, reason: str) -> str:
        self.beta *= self.LOWER
        self._updates, self._weights, self._calmest = [], [], float("inf")
        return f"{reason}: beta is lowered to {self.beta:.3g}"


def blank(model: Arrays) -> dict[str, Vector]:
    """Float32 zeros for every tensor of a model that a predictor can be about: what its frame is the difference to."""
    return {name: np.zeros(values.shape, np.float32) for name, values in model.items() if values.dtype.kind == "f"}
