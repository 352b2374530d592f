"""Spreads runs over worker processes, which report every round and end with their parent."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.queues import SimpleQueue
from multiprocessing.synchronize import Event
from typing import TYPE_CHECKING

from fedcomp.errors import FedcompError
from fedcomp_simulations.experiment import Experiment, Method
from fedcomp_simulations.results import RunResult
from fedcomp_simulations.runner import OnProgress, Progress, run_one

if TYPE_CHECKING:
    from fedcomp_simulations.engines import Engine

DRAIN_INTERVAL_S = 0.1
THREAD_LIMITS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")


@dataclass(frozen=True)
class Job:
    """A run to make: see runner.run_one."""

    experiment: Experiment
    method: Method
    seed: int
    task: str = ""
    monitor: bool = False

    def run(self, on_progress: OnProgress, engine: "Engine | None" = None) -> RunResult:
        """Make the run on an engine, or in this process."""
        return run_one(
            self.experiment, self.method, self.seed, on_progress, monitor=self.monitor, task=self.task, engine=engine
        )


OnResult = Callable[[Job, RunResult], None]


def default_workers() -> int:
    """Two worker processes, or one on a machine with a single processor."""
    return min(2, os.cpu_count() or 1)


def run_jobs(jobs: Sequence[Job], workers: int, on_progress: OnProgress, on_result: OnResult) -> None:
    """Make all runs; both functions are called in this process, the second as soon as a run has ended.

    Raises what the first failed run raised, or FedcompError if a worker died; other runs are given up then.
    """
    if min(workers, len(jobs)) <= 1:
        for job in jobs:
            on_result(job, job.run(on_progress))
        return
    spawn = multiprocessing.get_context("spawn")  # a forked torch can hang
    queue: SimpleQueue[Progress] = spawn.SimpleQueue()
    stop = spawn.Event()
    executor = ProcessPoolExecutor(min(workers, len(jobs)), spawn, initializer=_start_worker, initargs=(queue, stop))
    try:
        with _ignoring_interrupts(), _one_thread_each():  # the workers start here and inherit both
            futures = {executor.submit(_work, job): job for job in jobs}
        _follow(futures, queue, on_progress, on_result)
    except BrokenProcessPool as error:
        raise FedcompError("a worker process died, perhaps for lack of memory; try one worker") from error
    finally:
        stop.set()
        executor.shutdown(cancel_futures=True)


def _follow(
    futures: dict[Future[RunResult], Job], queue: SimpleQueue[Progress], on_progress: OnProgress, on_result: OnResult
) -> None:
    """Pass on progress and results until all runs have ended, or raise what the first failed run raised."""
    waiting = set(futures)
    while waiting:
        done, waiting = wait(waiting, timeout=DRAIN_INTERVAL_S, return_when=FIRST_COMPLETED)
        while not queue.empty():  # a worker writes to the pipe before it returns, so nothing is left behind
            on_progress(queue.get())
        failed = [future for future in done if future.exception() is not None]
        for future in done.difference(failed):  # first what is to be kept
            on_result(futures[future], future.result())
        for future in failed:
            future.result()


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


def _work(job: Job) -> RunResult:
    return job.run(_send_progress)


def _send_progress(progress: Progress) -> None:
    if _stop.is_set():
        raise _StoppedError
    _progress_queue.put(progress)


# In the parent process


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
