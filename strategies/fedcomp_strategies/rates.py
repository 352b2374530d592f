"""What the server does about bytes: what `auto` is to be for a model, and the step of each round.

The choices follow what was measured on four tasks (a perceptron and a convolutional network on images, a recurrent one
on text, a 1-D convolutional one on motion; the experiments `budgets-...` repeat it):

* Without feedback only unbiased coding holds up at low rates, biased coding loses several points.
* Biased coding with CAFe is the best use of few bytes on perceptrons. On recurrent networks, and on convolutional ones
  with harder images, unbiased coding is: the least error may leave out small layers, such as the first one, for good.
* What unbiased coding adds below one bit is many times as long as the update. Convolutional networks do best with steps
  up to twice as long as the updates; recurrent ones leave the region where they are stable unless steps are no longer
  than the updates, and shorter at the lowest rates.
* Adaptive server steps suffer from biased coding with feedback, and not from unbiased coding.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from flwr.serverapp.strategy import Strategy

from fedcomp import Auto, Budget, BudgetError, CAFe, ErrorFeedback, Feedback, NoFeedback, Plan
from fedcomp.budget import RateControl
from fedcomp.compressor import smallest_frame
from fedcomp.layout import Layout
from fedcomp_strategies.averaging import averages, traits_of

log = logging.getLogger("fedcomp")

RECURRENT = ("*weight_hh*", "*lstm*", "*gru*", "*rnn*", "*recurrent*")
"""Names that the tensors of recurrent layers go by."""

LEAST_BITS = 0.02
"""Bits per parameter below which no setting is near the accuracy of float32."""

_NUMBER_BYTES, _NORM_BYTES = 5, 2  # of a client's number, which it sends once, and of its norm

_NOISY_BITS = 1.0  # below, unbiased coding adds more than the update is long
_CAP, _RECURRENT_CAP = 2.0, 1.0
_LOW_BITS, _LOW_CAP = 0.05, 0.7  # of recurrent networks
_BETA = 0.95  # of CAFe on perceptrons, where it does not diverge


@dataclass(frozen=True)
class Choice:
    """What suits a model.

    Attributes:
        unbiased: whether to code without bias.
        feedback: what makes up for losses.
        norm_cap: see Compressed; None: none.
        reason: in words.
    """

    unbiased: bool
    feedback: Feedback
    norm_cap: float | None
    reason: str


def choose(
    layout: Layout, bits: float, clients: int, strategy: Strategy, feedback: Feedback | None, *, predictors: bool = True
) -> Choice:
    """What suits a model.

    Args:
        layout: of the model.
        bits: of the budget, per parameter.
        clients: that take part in a round; 0: not known.
        strategy: that is wrapped.
        feedback: what the user wants; None: whatever suits.
        predictors: whether the downlink can carry one.
    """
    recurrent = any(fnmatchcase(t.name.lower(), pattern) for t in layout.tensors for pattern in RECURRENT)
    if feedback is None:
        feedback, reason = _feedback(layout, recurrent, strategy, predictors)
    elif isinstance(feedback, NoFeedback):
        reason = "without feedback only unbiased coding holds up"
    else:
        reason = f"feedback {feedback} makes up for the least error"
    unbiased = isinstance(feedback, NoFeedback)
    capped = unbiased and bits < _NOISY_BITS and averages(strategy)
    cap = None
    if capped:
        cap = _CAP if not recurrent else _LOW_CAP if bits < _LOW_BITS else _RECURRENT_CAP
    if unbiased and 0 < clients < 4:
        reason += f"; but the noise of {clients} clients hardly averages out"
    return Choice(unbiased, feedback, cap, reason)


def _feedback(layout: Layout, recurrent: bool, strategy: Strategy, predictors: bool) -> tuple[Feedback, str]:
    traits = traits_of(strategy)
    if traits.private:
        return NoFeedback(), "residuals would carry what was not noised from round to round"
    if not traits.averages:
        return ErrorFeedback(), f"{traits.name} looks at each client's model, which unbiased noise would spoil"
    if traits.adaptive:
        return NoFeedback(), f"the adaptive steps of {traits.name} bear unbiased coding best"
    if recurrent:
        return NoFeedback(), "recurrent networks bear unbiased coding best"
    if any(len(t.shape) > 2 for t in layout.tensors):
        return NoFeedback(), "convolutional networks are safest with unbiased coding"
    if not predictors:
        return NoFeedback(), "the plain downlink carries no predictor for feedback"
    return CAFe(_BETA), "low rank with the last mean update as predictor suits perceptrons"


def notes_size(norm: bool, feedback: Feedback) -> int:
    """Bytes of a frame that hang on what is asked for besides the update."""
    return _NORM_BYTES * norm + _NUMBER_BYTES * bool(feedback.slots)


class Rates:
    """The steps that are announced, round by round, for the plans of `auto` in a schedule.

    Args:
        shared: whether clients share the bytes by their weights, so that only the mean length is kept to; if not, each
            upload has the budget.
    """

    def __init__(self, shared: bool) -> None:
        self.shared = shared
        self.restart()

    def restart(self) -> None:
        """Another training begins."""
        self._controls: dict[Auto, RateControl] = {}

    def check(self, plan: Plan, layout: Layout, notes: int) -> tuple[int, int]:
        """The bytes of the budget, and those of the smallest frame; 0 and 0 for another codec than auto.

        Args:
            layout: of the model as clients train it.
            notes: bytes of a frame that hang on what is asked for besides.

        Raises BudgetError if no frame fits the budget.
        """
        if not isinstance(plan.codec, Auto):
            return 0, 0
        least = smallest_frame(replace(plan, codec=replace(plan.codec, step=0.0)), layout) + notes
        budget = Budget.parse(plan.codec.budget).bytes(layout.size)
        if least > budget:
            raise BudgetError(
                f"budget {plan.codec.budget!r} is {budget} bytes for this model, whose smallest upload takes {least} "
                f'bytes; give at least budget="{least} B", or rules that send fewer tensors verbatim'
            )
        return budget, least

    def plan(self, plan: Plan, layout: Layout, notes: int) -> Plan:
        """The plan with this round's step; arguments and errors as of `check`."""
        budget, least = self.check(plan, layout, notes)
        if not self.shared or not isinstance(plan.codec, Auto):
            return plan
        control = self._controls.setdefault(_key(plan.codec), RateControl(budget, least))
        control.aim(budget, least)
        return replace(plan, codec=replace(plan.codec, step=control.step))

    def observe(
        self, plan: Plan, sizes: Sequence[int], levels: Mapping[int, float], weights: Mapping[int, float]
    ) -> None:
        """Take in a round.

        Args:
            plan: of the schedule, without a step.
            sizes: of the frames that were used, in bytes.
            levels: the step of each by node, 0: it had none.
            weights: by node.
        """
        if isinstance(plan.codec, Auto) and _key(plan.codec) in self._controls:
            self._controls[_key(plan.codec)].observe(sizes, [level * weights[node] for node, level in levels.items()])


def _key(codec: Auto) -> Auto:
    """What one step goes on for, whatever the budget is in other rounds."""
    return replace(codec, budget="", step=0.0)
