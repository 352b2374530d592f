"""The accuracy to reach, and after which evaluation a method has reached it."""

from dataclasses import dataclass

import numpy as np

from fedcomp.errors import ConfigError
from fedcomp_simulations.report.views import MethodView, TaskView

DEFAULT = "95 %"
STEADY = 3
"""Evaluations, one after the other, whose mean must reach the target: a single one may be luck."""


@dataclass(frozen=True)
class Target:
    """An accuracy to reach in one task.

    Attributes:
        accuracy: from 0 to 1.
        words: what it is, such as "95 % of float32's accuracy".
    """

    accuracy: float
    words: str


def check_target(target: str | float | None) -> None:
    """Raise ConfigError if the target is neither an accuracy nor a share."""
    _parse(target)


def target_of(view: TaskView, target: str | float | None) -> Target:
    """The target in a task: 0.85 is an accuracy, "95 %" a share of float32's final accuracy.

    Without a float32 twin to measure by it is a share of the best final accuracy.
    """
    number, is_share = _parse(target)
    if not is_share:
        return Target(number, f"an accuracy of {100 * number:.4g} %")
    reference = yardstick(view)
    if reference is not None:
        return Target(number * reference.summary.accuracy, f"{100 * number:.4g} % of float32's accuracy")
    best = max(view.methods, key=lambda each: each.summary.accuracy)
    return Target(number * best.summary.accuracy, f"{100 * number:.4g} % of the best method's accuracy")


def yardstick(view: TaskView) -> MethodView | None:
    """The float32 twin, unless it never uploaded anything or ends at an accuracy of 0: that is no measure."""
    reference = view.reference
    return reference if reference is not None and reference.uploads and reference.summary.accuracy > 0 else None


def reached(view: MethodView, target: Target) -> int | None:
    """The first evaluation whose mean with those just before it, STEADY in all, is at the target; None: none is.

    An accuracy of 0 is reached by nobody, as it takes no training.
    """
    if target.accuracy <= 0:
        return None
    window = min(STEADY, len(view.mean))
    steady = np.convolve(view.mean, np.full(window, 1 / window), "valid")
    at = np.flatnonzero(steady >= target.accuracy - 1e-12)
    return int(at[0]) + window - 1 if at.size else None


def _parse(target: str | float | None) -> tuple[float, bool]:
    """The number, and whether it is a share of float32's accuracy."""
    text = DEFAULT if target is None else str(target).strip()
    is_share = text.endswith("%")
    try:
        number = float(text.removesuffix("%")) / (100 if is_share else 1)
    except ValueError:
        number = -1.0
    if not (0 < number < (10 if is_share else 1 + 1e-12)):
        raise ConfigError(
            f'target: expected an accuracy such as 0.85 or a share of float32\'s such as "95 %", got {target!r}'
        )
    return number, is_share
