"""Runs every method of an experiment with every seed, in this process or spread over worker processes.

A run depends on its method and seed alone, so the results are the same whatever the number of workers.
"""

import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.queues import SimpleQueue
from multiprocessing.synchronize import Event

import torch

from fedcomp.errors import FedcompError
from fedcomp.monitor import TensorStats
from fedcomp_clients import CompressMod, MemoryModelCache, MemoryStore
from fedcomp_simulations import models
from fedcomp_simulations.apps import RoundOutcome, client_app, server_app
from fedcomp_simulations.experiment import Experiment, Method
from fedcomp_simulations.grid import run_in_process
from fedcomp_simulations.ledger import Ledger
from fedcomp_simulations.report import Results, RunResult

DRAIN_INTERVAL_S = 0.1
THREAD_LIMITS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")


@dataclass(frozen=True)
class Progress:
    """A round of one run has ended."""

    method: Method
    seed: int
    round: int
    rounds: int
    accuracy: float
    bytes_up: int
    failures: int


OnProgress = Callable[[Progress], None]


def default_workers() -> int:
    """Two worker processes, or one on a machine with a single processor."""
    return min(2, os.cpu_count() or 1)


def run_experiment(
    experiment: Experiment, *, workers: int = 1, on_progress: OnProgress | None = None, monitor: bool = False
) -> Results:
    """Run all methods with all seeds; `on_progress` is called in this process after every round.

    With `monitor` each run keeps the statistics of every tensor and upload, which costs a decoding for each.
    """
    tasks = [(method, seed) for method in experiment.methods for seed in experiment.seeds]
    report = on_progress or (lambda progress: None)
    workers = min(workers, len(tasks))
    if workers > 1:
        runs = _run_in_workers(experiment, tasks, workers, report, monitor)
    else:
        runs = [run_one(experiment, method, seed, report, monitor=monitor) for method, seed in tasks]
    return Results(
        experiment=experiment.name,
        parameters=sum(array.size for array in models.initial_arrays(experiment.model, 0).values()),
        clients=experiment.clients,
        clients_per_round=experiment.clients_per_round,
        runs=tuple(runs),
    )


def run_one(
    experiment: Experiment, method: Method, seed: int, on_progress: OnProgress, *, monitor: bool = False
) -> RunResult:
    """Train once with one method and one seed, in this process and on one thread."""
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
                accuracy=outcome.accuracy,
                bytes_up=so_far.bytes_up,
                failures=so_far.failures,
            )
        )

    stats: list[TensorStats] = []
    mod = CompressMod(MemoryStore(), stats.append if monitor else None, MemoryModelCache())
    started = time.perf_counter()
    with _one_thread(), collected_warnings() as warnings:
        run_in_process(
            server_app(experiment, method, seed, on_round), client_app(experiment, seed, mod), experiment.clients
        )
    ledger = Ledger(outcomes[-1].traffic)
    return RunResult(
        method=method,
        seed=seed,
        rounds=experiment.rounds,
        accuracy_curve=tuple(
            (outcome.round, ledger.bytes_up_until(outcome.round), outcome.accuracy) for outcome in outcomes
        ),
        payload_bytes_up=ledger.bytes_up,
        payload_bytes_down=ledger.bytes_down,
        uploads=ledger.uploads,
        failures=ledger.failures,
        seconds=time.perf_counter() - started,
        warnings=tuple(warnings),
        stats=tuple(stats),
        messages=ledger.messages,
        last=experiment.last,
    )


# In a worker process


class _StoppedError(Exception):
    """The parent process wants this run to end early."""


_progress_queue: SimpleQueue[Progress]
_stop: Event


def _start_worker(queue: SimpleQueue[Progress], stop: Event) -> None:
    global _progress_queue, _stop
    _progress_queue, _stop = queue, stop
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then sets the event
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    """End this process when the parent was killed: nobody else would."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _work(experiment: Experiment, method: Method, seed: int, monitor: bool) -> RunResult:
    return run_one(experiment, method, seed, _send_progress, monitor=monitor)


def _send_progress(progress: Progress) -> None:
    if _stop.is_set():
        raise _StoppedError
    _progress_queue.put(progress)


# In the parent process


def _run_in_workers(
    experiment: Experiment, tasks: list[tuple[Method, int]], workers: int, on_progress: OnProgress, monitor: bool
) -> list[RunResult]:
    spawn = multiprocessing.get_context("spawn")  # a forked torch can hang
    queue: SimpleQueue[Progress] = spawn.SimpleQueue()
    stop = spawn.Event()
    executor = ProcessPoolExecutor(workers, spawn, initializer=_start_worker, initargs=(queue, stop))
    try:
        with _ignoring_interrupts(), _one_thread_each():  # the workers start here and inherit both
            futures = [executor.submit(_work, experiment, method, seed, monitor) for method, seed in tasks]
        _follow(futures, queue, on_progress)
        return [future.result() for future in futures]
    except BrokenProcessPool as error:
        raise FedcompError("a worker process died, perhaps for lack of memory; try one worker") from error
    finally:
        stop.set()
        executor.shutdown(cancel_futures=True)


def _follow(futures: list[Future[RunResult]], queue: SimpleQueue[Progress], on_progress: OnProgress) -> None:
    """Pass on progress until all runs have ended, or raise what the first failed run raised."""
    waiting = set(futures)
    while waiting:
        done, waiting = wait(waiting, timeout=DRAIN_INTERVAL_S, return_when=FIRST_COMPLETED)
        while not queue.empty():  # a worker writes to the pipe before it returns, so nothing is left behind
            on_progress(queue.get())
        for future in done:
            future.result()


@contextmanager
def _ignoring_interrupts() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():  # only the main thread may change handlers
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _one_thread_each() -> Iterator[None]:
    """Have numpy's and torch's libraries, which read the environment once, use one thread in the workers."""
    before = {name: os.environ.get(name) for name in THREAD_LIMITS}
    os.environ.update(dict.fromkeys(THREAD_LIMITS, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


# In either


@contextmanager
def _one_thread() -> Iterator[None]:
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
