"""What does not go together is refused before a training, and what does not go well together is said."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from flwr.serverapp.strategy import Strategy

from fedcomp import Auto, CAFe, Codec, ConfigError, Feedback, FetchSGD, NoFeedback, Plan
from fedcomp_strategies.averaging import averages, traits_of

log = logging.getLogger("fedcomp")


@dataclass(frozen=True)
class Choices:
    """What a server has chosen, or what was chosen for it.

    Attributes:
        strategy: that is wrapped.
        plans: of all rounds.
        feedback: what makes up for losses.
        needs_mean: whether feedback computes with the mean of the updates.
        monitored: whether a monitor looks at every update.
        capped: whether the mean update's length is limited.
        packs: whether the model travels in packages.
        coding_chosen, feedback_chosen: whether these are of fedcomp's own choice, about which it does not warn.
    """

    strategy: Strategy
    plans: Sequence[Plan]
    feedback: Feedback
    needs_mean: bool
    monitored: bool
    capped: bool
    packs: bool
    coding_chosen: bool
    feedback_chosen: bool

    def check(self) -> None:
        """Raise ConfigError for what cannot work, log warnings for what will not work well."""
        self._refuse()
        self._warn()

    def _refuse(self) -> None:
        feedback, name = self.feedback, traits_of(self.strategy).name
        for plan in self.plans:
            feedback.check(plan)
            if any(isinstance(rule.codec, Auto) for rule in plan.rules):
                raise ConfigError(
                    "rules cannot use auto: a budget is for the whole upload; give it as the plan's codec"
                )
        if self.needs_mean and (not averages(self.strategy) or self.monitored):
            raise ConfigError(
                f"feedback {feedback.name!r} computes with the mean of all updates, which {name} does not take, or a "
                "monitor prevents; use a strategy that averages, such as FedAvg, without a monitor, or feedback='ef'"
            )
        if self.needs_mean and self.capped:
            raise ConfigError(
                f"norm_cap does not go with feedback {feedback.name!r}, whose server counts on every step being taken "
                "whole; use feedback 'none', 'ef', 'cafe' or 'dgc', or norm_cap=None"
            )
        if isinstance(feedback, FetchSGD) and len({plan.codec for plan in self.plans}) > 1:
            raise ConfigError("feedback 'fetchsgd' adds sketches over rounds: the schedule must keep to one sketch")
        if isinstance(feedback, CAFe) and not self.packs:
            raise ConfigError("feedback 'cafe' sends its predictor in packages: downlink must not be 'plain'")

    def _warn(self) -> None:
        feedback, traits = self.feedback, traits_of(self.strategy)
        if traits.adaptive and not isinstance(feedback, NoFeedback):
            log.warning(
                "feedback %s under %s: adaptive server steps lose accuracy with biased codecs and feedback; "
                "an unbiased codec such as eden(0.1) without feedback holds up better", feedback, traits.name,
            )  # fmt: skip
        if traits.momentum and isinstance(feedback, CAFe) and not self.feedback_chosen:
            log.warning(
                "feedback %s carries momentum itself: it does not go well with the momentum of %s",
                feedback,
                traits.name,
            )
        if isinstance(feedback, NoFeedback) and not self.coding_chosen and any(_loses(p.codec) for p in self.plans):
            log.warning("auto without feedback loses accuracy at low rates; use auto(..., unbiased=True), or feedback")
        if traits.private and feedback.slots:
            log.warning(
                "feedback %s under %s: residuals carry what was not noised from round to round", feedback, traits.name
            )
        if type(self.strategy).start is not Strategy.start:
            log.warning("%s has a start() of its own, which the wrapped strategy does not use", traits.name)


def _loses(codec: Codec) -> bool:
    return isinstance(codec, Auto) and not codec.unbiased
