"""One run: a method with a seed, trained from the start to the last round, in this process and on one thread."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING

import torch
from flwr.clientapp.typing import Mod

from fedcomp.errors import ConfigError
from fedcomp.metrics import length
from fedcomp.monitor import TensorStats
from fedcomp_clients import CompressMod, MemoryModelCache, MemoryStore
from fedcomp_clients.mod import Upload
from fedcomp_simulations.apps import OnRound, RoundOutcome, client_app, server_app
from fedcomp_simulations.experiment import Experiment, Method
from fedcomp_simulations.grid import run_in_process
from fedcomp_simulations.ledger import Ledger
from fedcomp_simulations.results import ByRound, RunResult

if TYPE_CHECKING:
    from fedcomp_simulations.engines import Engine


@dataclass(frozen=True)
class Progress:
    """A round of one run has ended.

    Attributes:
        accuracy: of the last evaluation; None before the first.
        task: name of the grid point.
    """

    method: Method
    seed: int
    round: int
    rounds: int
    accuracy: float | None
    bytes_up: int
    failures: int
    task: str = ""


OnProgress = Callable[[Progress], None]


def run_one(
    experiment: Experiment,
    method: Method,
    seed: int,
    on_progress: OnProgress,
    *,
    monitor: bool = False,
    task: str = "",
    engine: "Engine | None" = None,
) -> RunResult:
    """Train once with one method and one seed; `on_progress` is called after every round.

    Args:
        monitor: keep the statistics of every tensor and upload, which costs a decoding for each.
        task: name of the grid point that the experiment is.
        engine: what runs it, which cannot be monitored, nor tell what compression loses; None: this process.
    """
    if engine is not None and monitor:
        raise ConfigError("--monitor: only the engine inprocess sees what compression does to each tensor")
    outcomes: list[RoundOutcome] = []

    def on_round(outcome: RoundOutcome) -> None:
        outcomes.append(outcome)
        so_far = Ledger(outcome.traffic)
        on_progress(
            Progress(
                method=method,
                seed=seed,
                round=outcome.round,
                rounds=experiment.rounds,
                accuracy=next((each.accuracy for each in reversed(outcomes) if each.accuracy is not None), None),
                bytes_up=so_far.bytes_up,
                failures=so_far.failures,
                task=task,
            )
        )

    stats: list[TensorStats] = []
    losses = _Losses()
    mod = CompressMod(MemoryStore(), stats.append if monitor else None, MemoryModelCache(), losses)
    started = time.perf_counter()
    if engine is not None:
        warnings = engine.run(experiment, method, seed, on_round).warnings
    else:
        warnings = run_here(experiment, method, seed, on_round, mod)
    return to_result(
        experiment, method, seed, outcomes,
        seconds=time.perf_counter() - started, warnings=warnings, stats=tuple(stats), losses=losses, task=task,
    )  # fmt: skip


def run_here(experiment: Experiment, method: Method, seed: int, on_round: OnRound, mod: Mod) -> tuple[str, ...]:
    """Run the apps in this process on one thread, the mod on every client. Returns what they warned of."""
    with one_thread(), collected_warnings() as warnings:
        run_in_process(
            server_app(experiment, method, seed, on_round), client_app(experiment, seed, mod), experiment.clients
        )
    return tuple(warnings)


class _Losses:
    """What compression loses: of the first upload of each round the quantization error, of all the residual."""

    def __init__(self) -> None:
        self.nmse: dict[int, float | None] = {}
        self.residuals: dict[int, list[float]] = {}

    def __call__(self, upload: Upload) -> None:
        if upload.round not in self.nmse:  # one is enough for a curve, and each would cost a decoding
            self.nmse[upload.round] = _nmse(upload)
        if "residual" in upload.update.memory.slots:
            self.residuals.setdefault(upload.round, []).append(upload.update.residual_ratio)


NO_LOSSES = _Losses()


def _nmse(upload: Upload) -> float | None:
    """Squared error of the decoded update over the update's square, all tensors of floats together; None: no update."""
    decoded = upload.decoded()
    names = [name for name, values in upload.new.items() if values.dtype.kind == "f"]
    error = length([decoded[name] - upload.new[name] for name in names])
    moved = length([upload.new[name] - upload.base[name] for name in names])
    return (error / moved) ** 2 if moved else None


def to_result(
    experiment: Experiment,
    method: Method,
    seed: int,
    outcomes: list[RoundOutcome],
    *,
    seconds: float,
    warnings: tuple[str, ...] = (),
    stats: tuple[TensorStats, ...] = (),
    losses: _Losses = NO_LOSSES,
    task: str = "",
) -> RunResult:
    """The result of a run from the outcomes of all its rounds."""
    last = outcomes[-1]
    ledger = Ledger(last.traffic)
    rounds = last.traffic
    residuals = losses.residuals
    return RunResult(
        method=method,
        seed=seed,
        rounds=experiment.rounds,
        accuracy_curve=tuple(
            (outcome.round, ledger.bytes_up_until(outcome.round), outcome.accuracy)
            for outcome in outcomes
            if outcome.accuracy is not None
        ),
        payload_bytes_up=ledger.bytes_up,
        payload_bytes_down=ledger.bytes_down,
        uploads=ledger.uploads,
        failures=ledger.failures,
        seconds=seconds,
        warnings=warnings,
        stats=stats,
        messages=ledger.messages,
        last=experiment.last,
        task=task,
        by_round=ByRound(
            round=tuple(entry.round for entry in rounds),
            payload_up=tuple(entry.bytes_up for entry in rounds),
            payload_down=tuple(entry.bytes_down + entry.bytes_down_evaluate for entry in rounds),
            wire_up=tuple(sum(each.wire_up for each in asked) for asked in last.exchanges),
            wire_down=tuple(sum(each.wire_down for each in asked) for asked in last.exchanges),
            failures=tuple(entry.failures for entry in rounds),
            nmse=tuple(losses.nmse.get(entry.round) for entry in rounds),
            residual=tuple(fmean(residuals[e.round]) if e.round in residuals else None for e in rounds),
        ),
        exchanges=last.exchanges,
    )


@contextmanager
def one_thread() -> Iterator[None]:
    """Sums of floats depend on the number of threads, and the layers are too small to gain from more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _Collector(logging.Handler):
    """Keeps each different warning once."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: dict[str, None] = {}

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage().strip()
        if not message.startswith("fraction_evaluate is set to 0.0"):  # as intended: the server evaluates
            self.messages[message] = None


LOGGERS = ("flwr", "fedcomp", "fedcomp_clients", "fedcomp_simulations", "fedcomp_strategies")


@contextmanager
def collected_warnings() -> Iterator[dict[str, None]]:
    """Keep warnings and errors for the user, and silence Flower's report of every step."""
    collector = _Collector()
    loggers = [logging.getLogger(name) for name in LOGGERS]
    before = [(logger.level, logger.handlers, logger.propagate) for logger in loggers]
    for logger in loggers:
        logger.handlers, logger.propagate = [collector], False
        logger.setLevel(logging.WARNING)
    try:
        yield collector.messages
    finally:
        for logger, (level, handlers, propagate) in zip(loggers, before, strict=True):
            logger.handlers, logger.propagate = handlers, propagate
            logger.setLevel(level)
