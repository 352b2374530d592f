"""Error feedback: what compression lost in one round is added to the next update.

    p = x + e,   send C(p),   e' = p - C(p)          (EF14: Seide et al., Interspeech 2014;
                                                      Fed-EF: Li & Li, ICML 2023, arXiv 2211.14292)

The memory e, the *residual*, belongs to the caller: it goes in, the next one comes out, nothing is kept here. It is a
plain mapping from tensor name to float32 array, so that it can be stored, compared and checked after a model change.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from fedcomp.codec import Codec, Parts
from fedcomp.errors import ConfigError
from fedcomp.layout import Layout, Vector

Residual = Mapping[str, Vector]
"""Float32 arrays of the tensors' shapes by tensor name. Missing tensors count as zero."""

FEEDBACKS = ("none", "ef")
"""Names of the feedbacks that a server can ask for."""

log = logging.getLogger("fedcomp")


@dataclass(frozen=True)
class ErrorFeedback:
    """Error feedback around a codec. Raises ConfigError for a codec with which it would diverge.

    >>> from fedcomp import Layout, TopK
    >>> feedback, layout = ErrorFeedback(TopK(k=1)), Layout.vector(2)
    >>> x, rng = np.array([3.0, 2.0], np.float32), np.random.default_rng(0)
    >>> _, residual = feedback.encode(x, layout, {}, rng)
    >>> residual["x"].tolist()
    [0.0, 2.0]
    """

    codec: Codec

    def __post_init__(self) -> None:
        if not self.codec.contractive:
            raise ConfigError(
                f"error feedback cannot go around {self.codec}: it is not contractive, so the residual would grow "
                'without bound; use feedback="none" with it, or a codec such as sign(), topk(0.01) or uniform(8)'
            )

    def encode(
        self, x: Vector, layout: Layout, residual: Residual, rng: np.random.Generator
    ) -> tuple[Parts, dict[str, Vector]]:
        """Parts of x + residual for x of shape (layout.size,), and the next residual. Inputs are not written to.

        A residual tensor of another shape or with values that are not finite is dropped with a warning that names it.
        Raises what codec.encode raises.
        """
        layout.check_finite(x)
        with np.errstate(over="ignore"):  # found by the codec, which names the tensor
            p = x + _flat(residual, layout)
        parts = self.codec.encode(p, layout, rng)
        p -= self.codec.decode(parts, layout)
        return parts, layout.unflatten(p)


def _flat(residual: Residual, layout: Layout) -> Vector:
    out = np.zeros(layout.size, np.float32)
    for tensor, where in layout.slices():
        known = residual.get(tensor.name)
        if known is None:
            continue
        if known.shape != tensor.shape or not np.isfinite(known).all():
            log.warning(
                "residual of tensor %r dropped: shape %s, expected %s with finite values",
                tensor.name, known.shape, tensor.shape,
            )  # fmt: skip
            continue
        out[where] = known.ravel()
    return out
