"""Live progress of a sweep with the time left: bars on a terminal, plain lines anywhere else."""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from fedcomp_simulations.runner import Progress
from fedcomp_simulations.summary import format_bytes
from fedcomp_simulations.workers import Job

PLAIN_EVERY = 20  # rounds between two plain lines of a run


class Display(AbstractContextManager["Display"]):
    """Shows round, accuracy and uploaded bytes of each running method; call it with every `Progress`."""

    def __init__(self, jobs: Sequence[Job], console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._width = max((len(_name(job.method.name, job.task)) for job in jobs), default=0)
        self._bars = Bars(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[state]}", markup=False),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._rows: dict[tuple[str, str, int], TaskID] = {}
        self._rounds = sum(job.experiment.rounds for job in jobs)
        self._done = 0
        self._started = clock()
        self._total = self._bars.add_task(f"all {len(jobs)} runs", total=self._rounds, state="")

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def __call__(self, progress: Progress) -> None:
        """Show that a round has ended."""
        self._done += 1
        if not self._console.is_terminal:
            if progress.round % PLAIN_EVERY == 0 or progress.round == progress.rounds:
                self._console.print(self._plain(progress), highlight=False, markup=False, soft_wrap=True)
            return
        key = progress.task, progress.method.name, progress.seed
        if key not in self._rows:
            name = f"{_name(progress.method.name, progress.task):{self._width}}  seed {progress.seed}"
            self._rows[key] = self._bars.add_task(name, total=progress.rounds, state="")
        self._bars.update(self._rows[key], completed=progress.round, state=_state(progress))
        self._bars.update(self._total, completed=self._done, state=self._left())
        if progress.round == progress.rounds:
            self._bars.remove_task(self._rows.pop(key))
            self._bars.console.print(self._plain(progress), highlight=False, markup=False)

    def _plain(self, progress: Progress) -> str:
        name = f"{_name(progress.method.name, progress.task):{self._width}}"
        line = f"{name}  seed {progress.seed}  round {progress.round}/{progress.rounds}  {_state(progress)}"
        return f"{line}  {left}" if (left := self._left()) else line

    def _left(self) -> str:
        """The time that the rest takes if its rounds take as long as those so far, workers and all."""
        rest = self._rounds - self._done
        if rest <= 0:
            return ""
        seconds = (self._clock() - self._started) / self._done * rest
        return f"about {format_time(seconds)} left"


def format_time(seconds: float) -> str:
    """Write a time in the unit that a person would use."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def _name(method: str, task: str) -> str:
    return f"{method} [{task}]" if task else method


def _state(progress: Progress) -> str:
    failed = f"  {progress.failures} failed" if progress.failures else ""
    accuracy = "" if progress.accuracy is None else f"accuracy {100 * progress.accuracy:.1f} %  "
    return f"{accuracy}uploaded {format_bytes(progress.bytes_up)}{failed}"
