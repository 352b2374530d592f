"""The curves behind a report: each method of a task over its evaluations, mean over seeds."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from fedcomp.errors import FedcompError
from fedcomp_simulations.report.timing import Timed, timed_on
from fedcomp_simulations.results import ByRound, Results, RunResult, Task
from fedcomp_simulations.summary import Summary, summarize

Floats = NDArray[np.float64]

ABOUT = 1.02
"""Times the bytes of another method up to which uploads count as equally long, as budgets are not met to the byte."""

COMPRESSED = 1.05
"""Times fewer bytes than float32 from which on a method counts as compressed."""


@dataclass(frozen=True)
class MethodView:
    """One method of a task.

    Attributes:
        number: its place among the methods, from 1 on; stands for its name in figures.
        rounds: that all its runs have evaluated, (points,).
        accuracy: from 0 to 1, (seeds, points).
        payload: bytes of uploads that have arrived until then, of all clients, (points,).
        wire_up, wire: estimated bytes on all links until then, uplinks alone and both ways, (points,); None if not
            recorded.
        seconds: by name of what they are timed on: time until then, (points,); empty if not recorded.
        joules: the same: energy of all clients' bytes until then, (points,); only where a link knows it.
        nmse, residual: by round, mean over seeds, (rounds,), NaN where there is none; None if there is none at all.
    """

    number: int
    summary: Summary
    runs: tuple[RunResult, ...]
    rounds: NDArray[np.int64]
    accuracy: Floats
    payload: Floats
    wire_up: Floats | None
    wire: Floats | None
    seconds: Mapping[str, Floats]
    joules: Mapping[str, Floats]
    nmse: Floats | None
    residual: Floats | None

    @property
    def name(self) -> str:
        """As in the experiment."""
        return self.summary.method.name

    @cached_property
    def mean(self) -> Floats:
        """Accuracy, mean over seeds, (points,)."""
        mean: Floats = self.accuracy.mean(axis=0)
        return mean

    @property
    def uploads(self) -> bool:
        """Whether anything was ever uploaded."""
        return self.summary.payload_per_upload > 0

    @property
    def compressed(self) -> bool:
        """Whether uploads are shorter than plain float32, as those of float32 under another strategy are not."""
        return self.summary.ratio is not None and self.summary.ratio > COMPRESSED

    def per_exchange(self) -> tuple[float, float] | None:
        """Mean wire bytes of a client in a round, up and down; None if not recorded or nobody was asked."""
        asked = [exchange for run in self.runs for each in run.exchanges for exchange in each]
        if not asked:
            return None
        return sum(each.wire_up for each in asked) / len(asked), sum(each.wire_down for each in asked) / len(asked)

    def outcomes(self) -> dict[str, int]:
        """How often what became of a request to a client, over all rounds and seeds."""
        counts: dict[str, int] = {}
        for run in self.runs:
            for each in run.exchanges:
                for exchange in each:
                    counts[exchange.outcome] = counts.get(exchange.outcome, 0) + 1
        return counts


@dataclass(frozen=True)
class TaskView:
    """A task: an experiment at one point of its grid.

    Attributes:
        title: to be shown, such as "mnist-mlp, alpha=0.1".
        slug: of its anchors and files.
        methods: in the order they were listed; empty if no run has finished.
        links: that there are times for: the experiment's own first, if it has any, then presets.
    """

    title: str
    slug: str
    task: Task
    results: Results
    methods: tuple[MethodView, ...]
    links: tuple[Timed, ...]

    @property
    def reference(self) -> MethodView | None:
        """The uncompressed twin that the others are compared with."""
        return next((view for view in self.methods if view.summary.method.uncompressed), None)

    @cached_property
    def front(self) -> tuple[MethodView, ...]:
        """The methods that no other beats in accuracy and bytes per upload, from few bytes to many."""
        views = [view for view in self.methods if view.uploads]
        best = [view for view in views if not any(_beats(other.summary, view.summary) for other in views)]
        return tuple(sorted(best, key=lambda view: view.summary.payload_per_upload))

    @property
    def seeds(self) -> tuple[int, ...]:
        """Of all runs."""
        return tuple(sorted({run.seed for run in self.results.runs}))


def view_task(title: str, slug: str, task: Task, results: Results) -> TaskView:
    """Work a task out. Raises FedcompError if its runs cannot have come from a simulation."""
    for run in results.runs:
        _check(run, task)
    groups, timed = results.by_method(), timed_on(task)
    views = tuple(
        _view(number, summary, groups[summary.method], timed)
        for number, summary in enumerate(_summaries(results), start=1)
    )
    recorded = {name for view in views for name in view.seconds}
    return TaskView(title, slug, task, results, views, tuple(each for each in timed if each.name in recorded))


def _beats(a: Summary, b: Summary) -> bool:
    """Whether a is more accurate for about as few bytes, or as accurate for fewer."""
    if a.accuracy > b.accuracy:
        return a.payload_per_upload <= ABOUT * b.payload_per_upload
    return a.accuracy == b.accuracy and a.payload_per_upload < b.payload_per_upload


def _summaries(results: Results) -> list[Summary]:
    return summarize(results) if results.runs else []


def _check(run: RunResult, task: Task) -> None:
    where = f"run of {run.method.name!r} with seed {run.seed}"
    if not run.accuracy_curve:
        raise FedcompError(f"{where}: expected at least one evaluation, got none; run the experiment again")
    if not all(math.isfinite(accuracy) and 0 <= accuracy <= 1 for _, _, accuracy in run.accuracy_curve):
        raise FedcompError(f"{where}: expected accuracies from 0 to 1; run the experiment again")
    history = run.by_round
    lengths = {len(entries) for entries in vars(history).values()}
    if len(lengths) > 1:
        raise FedcompError(f"{where}: by_round: expected lists of one length, got {sorted(lengths)}")
    strangers = {each.client for asked in run.exchanges for each in asked if not 0 <= each.client < task.clients}
    if strangers:
        raise FedcompError(f"{where}: exchanges: expected clients from 0 to {task.clients - 1}, got {min(strangers)}")


def _view(number: int, summary: Summary, runs: list[RunResult], timed: Sequence[Timed]) -> MethodView:
    rounds = sorted(set.intersection(*({point[0] for point in run.accuracy_curve} for run in runs)))
    points = [{number: (sent, accuracy) for number, sent, accuracy in run.accuracy_curve} for run in runs]
    if not rounds:
        raise FedcompError(f"method {summary.method.name!r}: its seeds were never evaluated after the same round")
    wired = all(run.by_round.round for run in runs)
    exchanged = all(run.exchanges for run in runs)
    return MethodView(
        number=number,
        summary=summary,
        runs=tuple(runs),
        rounds=np.array(rounds, np.int64),
        accuracy=np.array([[by_round[r][1] for r in rounds] for by_round in points], np.float64),
        payload=np.mean([[float(by_round[r][0]) for r in rounds] for by_round in points], axis=0),
        wire_up=_wire(runs, rounds, lambda history: [history.wire_up]) if wired else None,
        wire=_wire(runs, rounds, lambda history: [history.wire_up, history.wire_down]) if wired else None,
        seconds={each.name: _summed(runs, rounds, each.seconds) for each in timed if exchanged},
        joules={each.name: _summed(runs, rounds, each.joules) for each in timed if exchanged and each.knows_energy},
        nmse=_history([run.by_round.nmse for run in runs]),
        residual=_history([run.by_round.residual for run in runs]),
    )


def _wire(runs: list[RunResult], rounds: list[int], pick: Callable[[ByRound], list[tuple[int, ...]]]) -> Floats:
    """Bytes until each of the rounds, mean over runs, (points,)."""
    totals = []
    for run in runs:
        until = np.cumsum(np.sum(pick(run.by_round), axis=0, dtype=np.float64))
        totals.append(_until(until, np.array(run.by_round.round), rounds))
    mean: Floats = np.mean(totals, axis=0)
    return mean


def _summed(runs: list[RunResult], rounds: list[int], running: Callable[[RunResult], list[float]]) -> Floats:
    """A run's total after each round, here at each of the rounds, mean over runs, (points,)."""
    totals = []
    for run in runs:
        until = np.array(running(run), np.float64)
        totals.append(_until(until, np.arange(1, len(until) + 1), rounds))
    mean: Floats = np.mean(totals, axis=0)
    return mean


def _until(total: Floats, numbers: NDArray[np.int64], rounds: list[int]) -> Floats:
    """The running total, known after the numbered rounds, at each of the rounds."""
    index = np.searchsorted(numbers, rounds, side="right") - 1
    return np.where(index < 0, 0.0, total[np.maximum(index, 0)])


def _history(entries: list[tuple[float | None, ...]]) -> Floats | None:
    """Mean over runs, (rounds,); rounds that some run lacks are left out of its mean."""
    longest = max(map(len, entries))
    table = np.full((len(entries), longest), np.nan)
    for row, values in zip(table, entries, strict=True):
        row[: len(values)] = [np.nan if value is None else value for value in values]
    known = np.isfinite(table)
    if not known.any():
        return None
    count = known.sum(axis=0)
    mean: Floats = np.where(count > 0, np.where(known, table, 0.0).sum(axis=0) / np.maximum(count, 1), np.nan)
    return mean
