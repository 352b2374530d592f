"""EF21: clients send how their update differs from an estimate of it that both sides move along.

    c = C(x - g),   send c,   g = g + c;          server: G = G + sum over the cohort of n_i c_i,   step G / sum n_i

(Richtarik, Sokolov & Fatkhullin, NeurIPS 2021, arXiv 2106.05203; with partial participation arXiv 2110.03294.)

The server's step holds the estimates of all clients seen so far, also of those that did not take part in this round.
The scheme needs updates that change little from round to round, as full gradients do; for updates of several noisy
local steps plain error feedback is better. It is here for comparison.
"""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from fedcomp.codec import Codec, Parts
from fedcomp.feedback.scheme import Feedback, Slots, refuse_unless_contractive, register
from fedcomp.layout import Layout, Vector
from fedcomp.plan import Plan


@register
@dataclass(frozen=True)
class EF21(Feedback):
    """EF21 at the client; the server's half is EF21Server. Codecs must be contractive; for strategies that average."""

    name: ClassVar[str] = "ef21"
    slots: ClassVar[tuple[str, ...]] = ("estimate",)
    exact: ClassVar[bool] = True

    def check(self, plan: Plan) -> None:
        """See Feedback."""
        refuse_unless_contractive(plan, "feedback 'ef21'", "the estimates would run away")

    def encode(
        self, codec: Codec, x: Vector, layout: Layout, before: Slots, rng: np.random.Generator, *, age: int = 1
    ) -> tuple[Parts, Slots]:
        """See Feedback."""
        layout.check_finite(x)
        with np.errstate(over="ignore"):  # found by the codec, which names the tensor
            difference = x - before["estimate"]
        parts = codec.encode(difference, layout, rng)
        return parts, {"estimate": before["estimate"] + codec.decode(parts, layout)}


class EF21Server:
    """The sum of all clients' estimates, each times its client's weight. A step counts only once it is committed."""

    def __init__(self) -> None:
        self._sum: dict[str, Vector] = {}
        self._weights: dict[Hashable, float] = {}
        self._pending = self._sum, self._weights

    def weight(self, client: Hashable, weight: float) -> float:
        """The weight to average a client with: that of its first upload, with which its estimate is in the sum."""
        return self._weights.get(client, weight)

    def step(self, mean: Mapping[str, Vector], weights: Mapping[Any, float]) -> dict[str, Vector]:
        """The update of the global model, by tensor name.

        Args:
            mean: the weighted mean of what the clients of this round sent, by tensor name.
            weights: of these clients, as `weight` returns them.
        """
        total = sum(weights.values())
        everybody = {**self._weights, **{client: weight for client, weight in weights.items() if weight}}
        sums = dict(self._sum)
        for name, values in mean.items():
            added = values * np.float32(total)
            sums[name] = sums[name] + added if name in sums else added
        self._pending = sums, everybody
        return {name: values / np.float32(sum(everybody.values())) for name, values in sums.items()}

    def rename(self, former: Hashable, client: Hashable) -> None:
        """A client goes on under another name."""
        if former in self._weights:
            self._weights[client] = self._weights.pop(former)

    def commit(self) -> None:
        """The last step was taken: its clients will be told so."""
        self._sum, self._weights = self._pending
