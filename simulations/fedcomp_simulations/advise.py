"""Which setting suits a task: the handful to try, the Pareto front of what they gave, and the line for a server.

For every budget asked for, `auto` is tried with each of FEEDBACKS, and as the server sets it with a third and three
times the bytes: how much they bring is as good to know as how to spend them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import Any

from flwr.serverapp.strategy import Strategy

from fedcomp import Auto, Budget, BudgetError, ConfigError, Plan, as_feedback
from fedcomp.compressor import smallest_frame
from fedcomp.layout import Layout
from fedcomp_simulations import models
from fedcomp_simulations.apps import make_strategy
from fedcomp_simulations.experiment import Experiment, Method
from fedcomp_simulations.results import Results
from fedcomp_simulations.runner import collected_warnings
from fedcomp_simulations.summary import Summary, summarize
from fedcomp_strategies.averaging import averages
from fedcomp_strategies.rates import Choice, choose, notes_size

FEEDBACKS = ("auto", "none", "cafe", "ef")
"""What is tried with every budget that is asked for; "auto" first, so that it is not what is dropped as a duplicate."""

NEIGHBOURS = (1 / 3, 3.0)
"""Other budgets to try, in budgets."""

NEAR, NOISE = 0.5, 1.0
"""Points below the best at which the automatic choice is still preferred: always, and at most if seeds differ."""

TOO_FAR = 6.0
"""Points below float32 from which on a budget counts as too small for the task."""


# --- before the run ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trial:
    """What to run.

    Attributes:
        experiment: the task, with the settings to try as its methods.
        budgets: that were asked for, as they were written.
        notes: what was left out, and why.
    """

    experiment: Experiment
    budgets: tuple[str, ...]
    notes: tuple[str, ...] = ()


def trial(experiment: Experiment, budgets: Sequence[str]) -> Trial:
    """The settings to try on the task of an experiment, whose own methods do not count.

    Raises ConfigError for a budget that cannot be read or that float32 fits into, BudgetError for one too small.
    """
    task = _Task.of(experiment)
    size = task.layout.size
    asked: dict[int, str] = {}
    for text in budgets:
        asked.setdefault(Budget.parse(text).bytes(size), " ".join(text.split()))
    others = [round(nbytes * share) for nbytes in asked for share in NEIGHBOURS]
    methods: list[Method] = [Method("float32", "float32")]
    notes: list[str] = []
    for nbytes in sorted({*asked, *others}):
        text = asked.get(nbytes, f"{nbytes} B")
        if nbytes >= 4 * size and nbytes in asked:
            raise ConfigError(f"budget {text!r}: float32 fits into it, with {4 * size} bytes; nothing to compress")
        if nbytes >= 4 * size:
            notes.append(f"budget {text!r} is left out: float32 fits into it")
            continue
        found, unfit = task.settings(nbytes, text, FEEDBACKS if nbytes in asked else ("auto",))
        if not found and nbytes in asked:
            least = min(unfit.values())
            raise BudgetError(
                f"budget {text!r} is {nbytes} bytes for this model, whose smallest upload takes {least} bytes; "
                f'give at least "{least} B"'
            )
        methods += found
        notes += [f"budget {text!r} with feedback {f} is left out: an upload takes {n} bytes" for f, n in unfit.items()]
    return Trial(replace(experiment, methods=tuple(methods)), tuple(asked.values()), tuple(notes))


@dataclass(frozen=True)
class _Task:
    """What the server's choices hang on."""

    layout: Layout
    clients: int
    strategy: Strategy

    @classmethod
    def of(cls, experiment: Experiment) -> "_Task":
        with collected_warnings():  # they come again with the runs
            strategy = make_strategy(experiment)
        layout = Layout.of(models.initial_arrays(experiment.network(), 0))
        return cls(layout, experiment.clients_per_round, strategy)

    def settings(self, nbytes: int, text: str, feedbacks: Sequence[str]) -> tuple[list[Method], dict[str, int]]:
        """The different methods that a budget can be spent by, and by feedback the bytes that the others need."""
        found: dict[Choice, Method] = {}
        unfit = {}
        for feedback in feedbacks:
            wanted = None if feedback == "auto" else as_feedback(feedback)
            choice = choose(self.layout, 8 * nbytes / self.layout.size, self.clients, self.strategy, wanted)
            least = self._least(choice)
            if least > nbytes:
                unfit[feedback] = least
                continue
            name = f"automatic ({choice.feedback})" if feedback == "auto" else feedback
            found.setdefault(replace(choice, reason=""), Method(f"{text}, {name}", "auto", feedback, budget=text))
        return list(found.values()), unfit

    def _least(self, choice: Choice) -> int:
        """Bytes of the smallest upload, with all that clients note in it."""
        noted = notes_size(choice.norm_cap is not None and averages(self.strategy), choice.feedback)
        return smallest_frame(Plan(Auto("1 B", unbiased=choice.unbiased)), self.layout) + noted


# --- after it ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Advice:
    """What to do about one budget.

    Attributes:
        budget: as it was written.
        recommended: None if none of its settings ever uploaded.
        line: to paste into a server; "" without recommendation.
        words: what is to be said about it, sentence by sentence.
    """

    budget: str
    recommended: Summary | None
    line: str
    words: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return plain values for `json.dumps`."""
        return {
            "budget": self.budget,
            "recommended": self.recommended.method.name if self.recommended else None,
            "line": self.line,
            "words": list(self.words),
        }


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Which (bytes, accuracy) no other beats: in one of the two without being worse in the other."""

    def beaten(point: tuple[float, float]) -> bool:
        return any(a <= point[0] and b >= point[1] and (a, b) != point for a, b in points)

    return [index for index, point in enumerate(points) if not beaten(point)]


def front(results: Results) -> tuple[Method, ...]:
    """The methods that no other beats in accuracy and bytes per upload; those that never uploaded do not count."""
    summaries = [summary for summary in summarize(results) if summary.payload_per_upload]
    points = [(summary.payload_per_upload, summary.accuracy) for summary in summaries]
    return tuple(summaries[index].method for index in pareto_front(points))


def recommend(summaries: Sequence[Summary]) -> Summary:
    """The most accurate of the settings of a budget, but the automatic one if it is about as good."""
    best = max(summaries, key=lambda summary: summary.accuracy)
    automatic = next((summary for summary in summaries if summary.method.feedback == "auto"), best)
    behind = 100 * (best.accuracy - automatic.accuracy)
    return automatic if behind <= _tolerated(best, automatic) + 1e-9 else best


def _tolerated(a: Summary, b: Summary) -> float:
    """Points that tell two settings apart: the standard error of the difference by seed, within NEAR and NOISE."""
    differences = [p - q for p, q in zip(a.points, b.points, strict=True)]
    if len(differences) < 2:
        return NEAR
    return min(max(stdev(differences) / math.sqrt(len(differences)), NEAR), NOISE)


def server_line(method: Method) -> str:
    """The line that makes a server communicate like this method."""
    feedback = "" if method.feedback == "auto" else f', feedback="{method.feedback}"'
    return f'strategy = Compressed(strategy, uplink="auto", budget="{method.budget}"{feedback})'


def advise(results: Results, budgets: Sequence[str]) -> list[Advice]:
    """What to do about each of the budgets that were asked for."""
    tried: dict[str, list[Summary]] = {}
    for summary in summarize(results):
        if summary.method.budget and summary.payload_per_upload:
            tried.setdefault(summary.method.budget, []).append(summary)
    return [_advice(budget, tried) for budget in budgets]


def seeds_in_words(results: Results) -> str:
    """How far the accuracies can be trusted."""
    seeds = len({run.seed for run in results.runs})
    if seeds == 1:
        return f"1 seed: differences below about {NOISE:g} point are noise, --seeds 3 tells more"
    spread = max(summary.accuracy_spread or 0.0 for summary in summarize(results))
    return f"{seeds} seeds: one setting differs by up to ± {100 * spread:.1f} points between them"


def _advice(budget: str, tried: dict[str, list[Summary]]) -> Advice:
    if budget not in tried:
        return Advice(budget, None, "", ("No upload arrived, so there is nothing to recommend; see the warnings.",))
    chosen = recommend(tried[budget])
    words = [_cost(chosen)]
    if fmean(chosen.points) > NOISE and "cafe" in chosen.method.name:
        words.append("Its feedback carries momentum, from which float32 would gain too: compare with FedAvgM.")
    best = max(tried[budget], key=lambda summary: summary.accuracy)
    if best.accuracy > chosen.accuracy:
        ahead = 100 * (best.accuracy - chosen.accuracy)
        words.append(f"{best.method.feedback} was {ahead:.1f} points better, too few to be sure of.")
    if _too_far(best):
        words += _too_small(budget, tried)
    return Advice(budget, chosen, server_line(chosen.method), tuple(words))


def _cost(summary: Summary) -> str:
    """What a setting costs against float32, and what it saves."""
    assert summary.ratio is not None  # it uploaded
    share = f"1/{summary.ratio:.{0 if summary.ratio >= 10 else 1}f}"
    points = round(fmean(summary.points), 1)
    if not points:
        return f"It is as accurate as float32, for {share} of the bytes."
    amount = f"{abs(points)} point{'s' * (abs(points) != 1)} {'below' if points < 0 else 'above'}"
    return f"It is {amount} float32, for {share} of the bytes."


def _too_far(summary: Summary) -> bool:
    return fmean(summary.points) <= -TOO_FAR + 1e-9


def _too_small(budget: str, tried: dict[str, list[Summary]]) -> list[str]:
    """Say that a budget is too small, and which other one would do."""
    enough = [recommend(group) for group in tried.values() if not all(map(_too_far, group))]
    verdict = f"{budget} is too small for this task, "
    if not enough:
        return [f"{verdict}and none of the budgets tried would do: try larger ones."]
    least = min(enough, key=lambda summary: summary.payload_per_upload)
    return [f"{verdict}but of the budgets tried {least.method.budget} would do:", server_line(least.method)]
