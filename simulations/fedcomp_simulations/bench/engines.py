"""How many rounds a second the engines make of an experiment: this process, and Flower's simulation with Ray.

    python -m fedcomp_simulations.bench.engines [--experiment mnist-mlp] [--rounds 40] [--repeats 2] [--deployment]

Measured one after the other in the same run, each `repeats` times, of which the fastest counts: float32, and signs with
error feedback. Rates are those of the rounds after the second, so without anything's start, which is told apart.

    inprocess         one run in one process
    inprocess x 2     as many runs at a time as there are processors, which is what a sweep does: rounds of all runs
    ray               a client on each processor, the best that Ray can do
    ray, as Flower    two processors for each client, Flower's default
    deployment        with --deployment: 4 clients on SuperNodes of this machine, few rounds
"""

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path

from rich.console import Console
from rich.table import Table

from fedcomp_simulations.apps import RoundOutcome
from fedcomp_simulations.engines import DEPLOYMENT, Engine, InProcess, start_engine
from fedcomp_simulations.engines.simulated import RayEngine
from fedcomp_simulations.experiment import Experiment, Method
from fedcomp_simulations.results import RunResult
from fedcomp_simulations.runner import Progress
from fedcomp_simulations.study import load_experiment
from fedcomp_simulations.workers import Job, run_jobs

METHODS = (Method("float32", "float32"), Method("sign + EF", "sign", "ef"))
SKIPPED = 2
"""Rounds at the beginning that do not count: processes import and cache things."""

_DEPLOYED_ROUNDS = 4
_DEPLOYED_CLIENTS = 4
_WIDTH = 110
_LONGER = 4  # times as many rounds in this process, as they are short


@dataclass(frozen=True)
class EngineRow:
    """What an engine did with a method.

    Attributes:
        rounds_per_s: after the first ones.
        start_s: from the order to the end of the first round, engine's start included.
    """

    engine: str
    method: str
    rounds_per_s: float
    start_s: float


class _Clock:
    """Notes when rounds end."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.ends: list[float] = []

    def __call__(self, told: RoundOutcome | Progress) -> None:
        del told
        self.ends.append(time.perf_counter())

    @property
    def rate(self) -> float:
        counted = self.ends[SKIPPED - 1 :]
        return (len(counted) - 1) / (counted[-1] - counted[0])

    @property
    def start(self) -> float:
        return self.ends[0] - self.began


def measure_engine(
    name: str, make: Callable[[], Engine], experiment: Experiment, methods: tuple[Method, ...], repeats: int
) -> list[EngineRow]:
    """Start an engine and run all methods, `repeats` times each."""
    rows = []
    begun = time.perf_counter()
    with make() as engine:
        for method in methods:
            clocks = []
            for _ in range(repeats):
                clocks.append(_Clock())
                engine.run(experiment, method, 0, clocks[-1])
            started = begun if method is methods[0] else clocks[0].began
            rows.append(EngineRow(name, method.name, max(c.rate for c in clocks), clocks[0].ends[0] - started))
    return rows


def measure_workers(experiment: Experiment, methods: tuple[Method, ...], workers: int, repeats: int) -> list[EngineRow]:
    """The same with several runs at a time, of different seeds."""
    rows = []
    for method in methods:
        best = None
        for _ in range(repeats):
            clocks = {seed: _Clock() for seed in range(workers)}
            jobs = [Job(experiment, method, seed) for seed in clocks]

            def tell(progress: Progress, clocks: dict[int, _Clock] = clocks) -> None:
                clocks[progress.seed](progress)

            run_jobs(jobs, workers, tell, _forget)
            row = EngineRow(
                f"inprocess x {workers}",
                method.name,
                sum(clock.rate for clock in clocks.values()),
                max(clock.start for clock in clocks.values()),
            )
            best = row if best is None or row.rounds_per_s > best.rounds_per_s else best
        assert best is not None
        rows.append(best)
    return rows


def measure_engines(experiment: Experiment, rounds: int, repeats: int, *, deployment: bool = False) -> list[EngineRow]:
    """Measure all of them on this machine."""
    short, long = replace(experiment, rounds=rounds), replace(experiment, rounds=_LONGER * rounds)
    cores = os.cpu_count() or 1
    rows = measure_engine("inprocess", InProcess, long, METHODS, repeats)
    if cores > 1:
        rows += measure_workers(long, METHODS, cores, repeats)
    rows += measure_engine("ray", RayEngine, short, METHODS, repeats)
    rows += measure_engine("ray, as Flower", lambda: RayEngine(client_cpus=2), short, METHODS, repeats)
    if deployment:
        few = replace(short, clients=_DEPLOYED_CLIENTS, clients_per_round=_DEPLOYED_CLIENTS, rounds=_DEPLOYED_ROUNDS)
        rows += measure_engine("deployment", lambda: start_engine(DEPLOYMENT), few, METHODS[:1], 1)
    return rows


def machine() -> str:
    """This machine and what runs on it, in one line."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        found = [
            line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")
        ]
        name = found[0] if found else name
    load = f", load {os.getloadavg()[0]:.1f} before" if hasattr(os, "getloadavg") else ""
    packages = ", ".join(f"{package} {version(package)}" for package in ("flwr", "ray", "torch", "numpy"))
    return f"{name}, {os.cpu_count()} processors{load}; Python {platform.python_version()}, {packages}"


def table(rows: list[EngineRow], experiment: Experiment, where: str) -> Table:
    """One line an engine and method; the ratio is to "ray" with the same method."""
    sheet = Table(
        title=f"{experiment.name}: {experiment.clients} clients, {experiment.clients_per_round} a round",
        caption=where, title_justify="left", caption_justify="left",
    )  # fmt: skip
    sheet.add_column("engine")
    sheet.add_column("method")
    for heading in ("rounds/s", "times ray", "first round after, s"):
        sheet.add_column(heading, justify="right", no_wrap=True)
    peers = {row.method: row.rounds_per_s for row in rows if row.engine == "ray"}
    for row in rows:
        ratio = row.rounds_per_s / peers[row.method] if row.method in peers else float("nan")
        sheet.add_row(row.engine, row.method, f"{row.rounds_per_s:.2f}", f"{ratio:.1f}", f"{row.start_s:.1f}")
    return sheet


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(prog="python -m fedcomp_simulations.bench.engines")
    parser.add_argument("--experiment", default="mnist-mlp")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--deployment", action="store_true", help="4 SuperNodes too, about a minute")
    parser.add_argument("--json", type=Path, help="write the rows to this file too")
    given = parser.parse_args()
    experiment, where = load_experiment(given.experiment), machine()
    rows = measure_engines(experiment, max(given.rounds, SKIPPED + 2), given.repeats, deployment=given.deployment)
    Console(width=_WIDTH, file=sys.stdout).print(table(rows, experiment, where))
    if given.json is not None:
        given.json.write_text(json.dumps({"machine": where, "rows": [asdict(row) for row in rows]}, indent=1) + "\n")


def _forget(job: Job, run: RunResult) -> None:
    del job, run


if __name__ == "__main__":
    main()
