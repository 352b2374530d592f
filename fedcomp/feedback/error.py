"""Error feedback: what compression lost in one round is added to the next update.

    p = x + e,   send C(p),   e' = p - C(p)          (EF14: Seide et al., Interspeech 2014;
                                                      Fed-EF: Li & Li, ICML 2023, arXiv 2211.14292)

The memory e is the *residual*. With clients that take part rarely it settles at several times an update (4 to 8 times
at .1 to .01 bits per parameter and one round in ten) and still helps; shrinking it with age loses most of the gain.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedcomp import _validate
from fedcomp.codec import Codec, Parts
from fedcomp.feedback.scheme import Feedback, Slots, refuse_unless_contractive, register
from fedcomp.layout import Layout, Vector
from fedcomp.metrics import length
from fedcomp.plan import Plan


@dataclass(frozen=True)
class Remembering(Feedback):
    """Base of the schemes that keep residuals at the client, with limits to their length and age.

    Args:
        max_norm: longest residual, in lengths of the update it is made with; 0: no limit. Smaller: a client that was
            away, or whose task changed, disturbs less, and loses more. When it acts, the frame says so. An update of
            length 0, as of a client that found nothing to train on, is no measure: it shortens nothing.
        max_age: rounds after which a residual is dropped; 0: never. When it acts, the frame says so.
    """

    max_norm: float = 0.0
    max_age: int = 0

    def __post_init__(self) -> None:
        _validate.number(low=0, high=1e9, max_norm=self.max_norm)
        _validate.integer(low=0, high=2**32 - 1, max_age=self.max_age)

    def check(self, plan: Plan) -> None:
        """See Feedback."""
        refuse_unless_contractive(plan, f"feedback {self.name!r}", "the residual would grow without bound")

    def limit(self, memory: dict[str, dict[str, Vector]], norm: float) -> bool:
        """See Feedback."""
        if not self.max_norm or not norm:
            return False
        total = length(memory.get("residual", {}).values())
        if total <= self.max_norm * norm:
            return False
        factor = np.float32(self.max_norm * norm / total)
        for slot in memory.values():
            for values in slot.values():
                values *= factor
        return True


@register
@dataclass(frozen=True)
class ErrorFeedback(Remembering):
    """Error feedback at the client. Codecs must be contractive.

    Args:
        max_norm, max_age: see Remembering.
        decay: the residual is multiplied by this for every round that the client missed, above 0 to 1.

    >>> from fedcomp import Layout, TopK
    >>> x, rng = np.array([3.0, 2.0], np.float32), np.random.default_rng(0)
    >>> nothing = {"residual": np.zeros(2, np.float32)}
    >>> _, after = ErrorFeedback().encode(TopK(k=1), x, Layout.vector(2), nothing, rng)
    >>> after["residual"].tolist()
    [0.0, 2.0]
    """

    name: ClassVar[str] = "ef"
    slots: ClassVar[tuple[str, ...]] = ("residual",)

    decay: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _validate.number(low=0, high=1, above=True, decay=self.decay)

    def encode(
        self, codec: Codec, x: Vector, layout: Layout, before: Slots, rng: np.random.Generator, *, age: int = 1
    ) -> tuple[Parts, Slots]:
        """See Feedback."""
        layout.check_finite(x)
        with np.errstate(over="ignore"):  # found by the codec, which names the tensor
            p = before["residual"] * np.float32(self.decay ** max(0, age - 1))
            p += x
        parts = codec.encode(p, layout, rng)
        p -= codec.decode(parts, layout)
        return parts, {"residual": p}
