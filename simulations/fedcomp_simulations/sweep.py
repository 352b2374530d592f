"""Runs every method of a study with every seed, and goes on where an interrupted sweep stopped.

A run depends on its settings alone, so the results are the same whatever the number of workers and interruptions.
"""

import platform
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version

import numpy as np

import fedcomp
from fedcomp.errors import FedcompError
from fedcomp_simulations import models
from fedcomp_simulations.apps import client_samples
from fedcomp_simulations.config import to_config
from fedcomp_simulations.engines import INPROCESS, start_engine
from fedcomp_simulations.experiment import Experiment
from fedcomp_simulations.results import Results, RunResult, Task
from fedcomp_simulations.runner import OnProgress, Progress
from fedcomp_simulations.store import RunStore
from fedcomp_simulations.study import Point, Study, study_of
from fedcomp_simulations.workers import Job, run_jobs


@dataclass(frozen=True)
class Plan:
    """What a sweep has to do.

    Attributes:
        jobs: all runs, in the order of the results.
        found: by their places, the runs that are there already.
    """

    jobs: tuple[Job, ...]
    found: dict[int, RunResult]

    @property
    def missing(self) -> list[int]:
        """Places of the runs to make."""
        return [place for place in range(len(self.jobs)) if place not in self.found]


def plan_study(study: Study, store: RunStore | None = None, *, monitor: bool = False) -> Plan:
    """List the runs of a study, and look which of them are in the store."""
    jobs = tuple(
        Job(point.experiment, method, seed, point.name, monitor)
        for point in study.points
        for method in point.experiment.methods
        for seed in point.experiment.seeds
    )
    there = {} if store is None else {place: store.load(job) for place, job in enumerate(jobs)}
    return Plan(jobs, {place: run for place, run in there.items() if run is not None})


def check_study(study: Study) -> None:
    """Look at the data of every point, and split them, before anything is trained.

    Raises FedcompError, which names the point, if data are missing, do not suit the model or cannot be split like this.
    """
    for point in study.points:
        try:
            point.experiment.network()
            client_samples(point.experiment, point.experiment.seeds[0])
        except FedcompError as error:
            where = f" (where {point.name})" if point.name else ""
            raise FedcompError(f"{study.name}: {error}{where}") from error


def run_plan(
    plan: Plan,
    *,
    workers: int = 1,
    on_progress: OnProgress | None = None,
    store: RunStore | None = None,
    on_failure: Callable[[str], None] | None = None,
    engine: str = INPROCESS,
) -> tuple[RunResult, ...]:
    """Make the missing runs and return all of them; each is stored as soon as it has ended.

    Args:
        on_progress: called in this process after every round.
        on_failure: called if a run could not be stored, with the reason; the run counts all the same.
        engine: name of what makes the runs; others than the one in this process make one after the other.
    """
    missing = plan.missing
    places = {id(plan.jobs[place]): place for place in missing}
    made = dict(plan.found)

    def keep(job: Job, run: RunResult) -> None:
        made[places[id(job)]] = run
        if store is None:
            return
        try:
            store.save(job, run)
        except OSError as error:
            if on_failure is not None:
                on_failure(f"cannot keep a finished run in {store.folder}: {error.strerror or error}")

    jobs = [plan.jobs[place] for place in missing]
    if engine == INPROCESS or not jobs:
        run_jobs(jobs, workers, on_progress or _silent, keep)
    else:
        with start_engine(engine) as started:
            for job in jobs:
                keep(job, job.run(on_progress or _silent, started))
    return tuple(made[place] for place in range(len(plan.jobs)))


def results_of(study: Study, runs: tuple[RunResult, ...], engine: str = INPROCESS) -> Results:
    """Put the runs of a study together."""
    return Results.of(study.name, map(_task, study.points), runs, engine, versions())


def run_experiment(
    experiment: Experiment, *, workers: int = 1, on_progress: OnProgress | None = None, monitor: bool = False
) -> Results:
    """Run all methods of an experiment with all seeds, and store nothing.

    With `monitor` each run keeps the statistics of every tensor and upload, which costs a decoding for each.
    """
    study = study_of(experiment)
    return results_of(study, run_plan(plan_study(study, monitor=monitor), workers=workers, on_progress=on_progress))


def versions() -> dict[str, str]:
    """Of what the results hang on."""
    return {
        "fedcomp": fedcomp.__version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "torch": version("torch"),
        "flwr": version("flwr"),
        "platform": f"{platform.system()} {platform.machine()}",
    }


def _task(point: Point) -> Task:
    experiment = point.experiment
    return Task(
        name=point.name,
        grid=dict(point.grid),
        parameters=sum(array.size for array in models.initial_arrays(experiment.network(), 0).values()),
        clients=experiment.clients,
        clients_per_round=experiment.clients_per_round,
        settings=to_config(experiment, skip=("name", "methods")),
    )


def _silent(progress: Progress) -> None:
    del progress
