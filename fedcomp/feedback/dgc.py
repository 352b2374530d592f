"""Deep Gradient Compression: error feedback on a momentum that each client keeps.

    u = m u + x              momentum correction (clip x with a clipping mod, which runs before this)
    v = v + u
    send C(v);   v = v - C(v);   u = 0 where something was sent          momentum factor masking

With C = top-k this is Algorithm 1 of Lin et al., ICLR 2018, arXiv 1712.01887. The share of values grows sparse over the
first rounds: 25 %, 6.25 %, 1.6 %, 0.4 %, 0.1 %, until that of the codec is reached. In the long run m makes updates 1 /
(1 - m) times as long where nothing is masked; with few local rounds per client it matters little.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from fedcomp import _validate
from fedcomp.codec import Codec, Parts
from fedcomp.feedback.error import Remembering
from fedcomp.feedback.scheme import Slots, register
from fedcomp.layout import Layout, Vector
from fedcomp.plan import Plan


@register
@dataclass(frozen=True)
class DGC(Remembering):
    """Momentum correction at the client, for sparse codecs such as topk. Codecs must be contractive.

    Args:
        max_norm, max_age: see Remembering.
        momentum: m, from 0 (plain error feedback) to below 1.
        warm_up: rounds for each step of the sparsity warm-up; 0: none. Longer: safer start, more bytes at first.
    """

    name: ClassVar[str] = "dgc"
    slots: ClassVar[tuple[str, ...]] = ("residual", "momentum")

    momentum: float = 0.9
    warm_up: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        _validate.number(low=0, high=0.999, momentum=self.momentum)
        _validate.integer(low=0, high=1_000_000, warm_up=self.warm_up)

    def plan(self, plan: Plan, round: int) -> Plan:
        """The plan, with codecs that keep a fraction keeping at least that of the warm-up."""
        if not self.warm_up or round < 1:
            return plan
        least = 4.0 ** -(1 + min((round - 1) // self.warm_up, 60))

        def warm(codec: Codec) -> Codec:
            sparse: Any = codec
            return replace(sparse, fraction=least) if 0 < getattr(codec, "fraction", 0) < least else codec

        rules = tuple(replace(r, codec=warm(r.codec) if r.codec else None) for r in plan.rules)
        return replace(plan, codec=warm(plan.codec), rules=rules)

    def encode(
        self, codec: Codec, x: Vector, layout: Layout, before: Slots, rng: np.random.Generator, *, age: int = 1
    ) -> tuple[Parts, Slots]:
        """See Feedback."""
        layout.check_finite(x)
        with np.errstate(over="ignore"):  # found by the codec, which names the tensor
            u = before["momentum"] * np.float32(self.momentum)
            u += x
            v = before["residual"] + u
        parts = codec.encode(v, layout, rng)
        sent = codec.decode(parts, layout)
        v -= sent
        u[sent != 0] = 0
        return parts, {"residual": v, "momentum": u}
