"""Live progress of an experiment: bars on a terminal, plain lines anywhere else."""

from contextlib import AbstractContextManager
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from fedcomp_simulations.experiment import Experiment, Method
from fedcomp_simulations.report import format_bytes
from fedcomp_simulations.runner import Progress

PLAIN_EVERY = 20  # rounds between two plain lines of a run


class Display(AbstractContextManager["Display"]):
    """Shows round, accuracy and uploaded bytes of each running method; call it with every `Progress`."""

    def __init__(self, experiment: Experiment, console: Console) -> None:
        self._console = console
        self._width = max(len(method.name) for method in experiment.methods)
        self._bars = Bars(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[state]}", markup=False),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._rows: dict[tuple[Method, int], TaskID] = {}
        runs = len(experiment.methods) * len(experiment.seeds)
        self._total = self._bars.add_task("all runs", total=runs * experiment.rounds, state="")

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def __call__(self, progress: Progress) -> None:
        """Show that a round has ended."""
        if not self._console.is_terminal:
            if progress.round % PLAIN_EVERY == 0 or progress.round == progress.rounds:
                self._console.print(self._plain(progress), highlight=False, markup=False, soft_wrap=True)
            return
        key = progress.method, progress.seed
        if key not in self._rows:
            name = f"{progress.method.name:{self._width}}  seed {progress.seed}"
            self._rows[key] = self._bars.add_task(name, total=progress.rounds, state="")
        self._bars.update(self._rows[key], completed=progress.round, state=_state(progress))
        self._bars.advance(self._total)
        if progress.round == progress.rounds:
            self._bars.remove_task(self._rows.pop(key))
            self._bars.console.print(self._plain(progress), highlight=False, markup=False)

    def _plain(self, progress: Progress) -> str:
        name = f"{progress.method.name:{self._width}}"
        return f"{name}  seed {progress.seed}  round {progress.round}/{progress.rounds}  {_state(progress)}"


def _state(progress: Progress) -> str:
    failed = f"  {progress.failures} failed" if progress.failures else ""
    return f"accuracy {100 * progress.accuracy:.1f} %  uploaded {format_bytes(progress.bytes_up)}{failed}"
