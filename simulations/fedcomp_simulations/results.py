"""The results of an experiment, and their form in a file: what a sweep writes and a report reads.

The file holds nothing that differs between two runs of the same code with the same settings, such as times, so that an
interrupted sweep that went on gives the same file as one that never stopped.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from statistics import fmean
from typing import Any, Self

from fedcomp.errors import ConfigError, FedcompError
from fedcomp.monitor import TensorStats
from fedcomp_simulations.config import from_config, to_config
from fedcomp_simulations.experiment import Experiment, Method

FORMAT = 2
MOST = 2**63 - 1
OUTCOMES = ("ok", "lost", "late", "absent", "failed")


@dataclass(frozen=True)
class Exchange:
    """What was asked of one client in one round.

    Attributes:
        client: its partition id.
        wire_up, wire_down: estimated bytes on its link, Flower's transport included.
        requests: of its SuperNode, one after the other: each costs a round trip.
        outcome: "ok", "lost" on the way, "late" after the deadline, "absent" from the start, or "failed" with an error.
    """

    client: int
    wire_up: int
    wire_down: int
    requests: int
    outcome: str

    @classmethod
    def from_json(cls, value: Iterable[Any]) -> Self:
        """Make the exchange from the list of its fields. Raises TypeError or ValueError if it is none."""
        *numbers, outcome = value
        if outcome not in OUTCOMES:
            raise ValueError(f"expected an outcome among {', '.join(OUTCOMES)}, got {_short(outcome)}")
        client, wire_up, wire_down, requests = map(_whole, numbers)
        return cls(client, wire_up, wire_down, requests, outcome)


@dataclass(frozen=True)
class ByRound:
    """What each round came to; every field has an entry a round.

    Attributes:
        round: its number, from 1 on.
        payload_up: bytes of the uploads that arrived; those of lost and late replies are not among them.
        payload_down: bytes of all messages to clients, those that absent clients never got among them.
        wire_up, wire_down: estimated bytes on all links, Flower's transport included: the sums of `Exchange`. Lost and
            late replies are sent, so they count; absent clients send and get nothing.
        failures: clients that were asked and delivered nothing usable.
        nmse: quantization error of one upload against the true update; None where it was not measured.
        residual: mean length of the uploading clients' residuals, in lengths of their updates; None without feedback
            at the clients, or where it was not measured.
    """

    round: tuple[int, ...] = ()
    payload_up: tuple[int, ...] = ()
    payload_down: tuple[int, ...] = ()
    wire_up: tuple[int, ...] = ()
    wire_down: tuple[int, ...] = ()
    failures: tuple[int, ...] = ()
    nmse: tuple[float | None, ...] = ()
    residual: tuple[float | None, ...] = ()

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Make it from lists by the names of the fields. Raises KeyError, TypeError, ValueError for other things."""
        measured = ("nmse", "residual")
        counted = {key.name: tuple(map(_whole, value[key.name])) for key in fields(cls) if key.name not in measured}
        nmse, residual = (tuple(None if entry is None else _number(entry) for entry in value[key]) for key in measured)
        return cls(**counted, nmse=nmse, residual=residual)


@dataclass(frozen=True)
class RunResult:
    """One method with one seed.

    Attributes:
        accuracy_curve: round, payload bytes that have arrived so far and accuracy of every evaluation.
        payload_bytes_up, payload_bytes_down: over all rounds, see ByRound.
        seconds: that it took; not part of the results file.
        stats: of every tensor and upload, if the run was monitored; not part of the results file.
        messages: train messages to clients.
        last: evaluations behind the final accuracy.
        task: name of the grid point, see Task.
        exchanges: what was asked of which client, round by round.
    """

    method: Method
    seed: int
    rounds: int
    accuracy_curve: tuple[tuple[int, int, float], ...]
    payload_bytes_up: int
    payload_bytes_down: int
    uploads: int
    failures: int
    seconds: float
    warnings: tuple[str, ...] = ()
    stats: tuple[TensorStats, ...] = ()
    messages: int = 0
    last: int = Experiment.last
    task: str = ""
    by_round: ByRound = ByRound()
    exchanges: tuple[tuple[Exchange, ...], ...] = ()

    @property
    def accuracy_final(self) -> float:
        """Mean of the last evaluations, as many as `last` says."""
        return fmean(accuracy for _, _, accuracy in self.accuracy_curve[-self.last :])

    @property
    def payload_per_upload(self) -> float:
        """Mean payload of an upload in bytes; 0 when nothing was uploaded."""
        return self.payload_bytes_up / self.uploads if self.uploads else 0.0

    @property
    def payload_per_download(self) -> float:
        """Mean payload of a train message to a client in bytes; 0 when none was sent."""
        return self.payload_bytes_down / self.messages if self.messages else 0.0

    def to_json(self) -> dict[str, Any]:
        """Return plain values for `json.dumps`; the keys are a contract with whoever reads the file."""
        return {
            "task": self.task,
            "name": self.method.name,
            "codec": self.method.codec,
            "feedback": self.method.feedback,
            "method": to_config(self.method),
            "seed": self.seed,
            "rounds": self.rounds,
            "last": self.last,
            "accuracy_final": self.accuracy_final,
            "accuracy_curve": [list(point) for point in self.accuracy_curve],
            "payload_bytes_up": self.payload_bytes_up,
            "payload_bytes_down": self.payload_bytes_down,
            "payload_per_upload": self.payload_per_upload,
            "uploads": self.uploads,
            "failures": self.failures,
            "messages": self.messages,
            "by_round": {key: list(values) for key, values in asdict(self.by_round).items()},
            "exchanges": [[list(asdict(each).values()) for each in asked] for asked in self.exchanges],
            "warnings": list(self.warnings),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Make the result from what `to_json` returned. Raises KeyError, TypeError, ValueError if it did not."""
        return cls(
            method=from_config(value["method"], Method),
            seed=_whole(value["seed"]),
            rounds=_whole(value["rounds"]),
            accuracy_curve=tuple((_whole(a), _whole(b), _number(c)) for a, b, c in value["accuracy_curve"]),
            seconds=_number(value.get("seconds", 0.0)),
            warnings=tuple(map(_text, value["warnings"])),
            task=_text(value["task"]),
            by_round=ByRound.from_json(value["by_round"]),
            exchanges=tuple(tuple(map(Exchange.from_json, asked)) for asked in value["exchanges"]),
            payload_bytes_up=_whole(value["payload_bytes_up"]),
            payload_bytes_down=_whole(value["payload_bytes_down"]),
            uploads=_whole(value["uploads"]),
            failures=_whole(value["failures"]),
            messages=_whole(value["messages"]),
            last=_whole(value["last"]),
        )


@dataclass(frozen=True)
class Task:
    """An experiment at one point of its grid.

    Attributes:
        name: says where in the grid, as in "alpha=0.1, lr=0.05"; "" without grid.
        grid: the keys of the grid and their values here.
        settings: all keys of the experiment but its methods, as in its file.
    """

    name: str
    parameters: int
    clients: int
    clients_per_round: int
    grid: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Make it from its fields by name. Raises KeyError, TypeError, ValueError for other things."""
        sizes = {key: _whole(value[key]) for key in ("parameters", "clients", "clients_per_round")}
        return cls(_text(value["name"]), **sizes, grid=_table(value["grid"]), settings=_table(value["settings"]))


@dataclass(frozen=True)
class Results:
    """All runs of an experiment: task by task, method by method and seed by seed."""

    experiment: str
    parameters: int
    clients: int
    clients_per_round: int
    runs: tuple[RunResult, ...]
    tasks: tuple[Task, ...] = ()
    engine: str = "inprocess"
    versions: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls, experiment: str, tasks: Iterable[Task], runs: Iterable[RunResult], engine: str, versions: Mapping[str, str]
    ) -> Self:
        """Put tasks and their runs together; the sizes are those of the first task."""
        tasks = tuple(tasks)
        first = tasks[0]
        sizes = (first.parameters, first.clients, first.clients_per_round)
        return cls(experiment, *sizes, tuple(runs), tasks, engine, versions)

    def by_method(self) -> dict[Method, list[RunResult]]:
        """Group the runs by method, in the order they were listed."""
        groups: dict[Method, list[RunResult]] = {}
        for run in self.runs:
            groups.setdefault(run.method, []).append(run)
        return groups

    def by_task(self) -> list[tuple[Task, "Results"]]:
        """The results of each task, in the order they were listed, as if nothing else had been run."""
        tasks = self.tasks or (Task("", self.parameters, self.clients, self.clients_per_round),)
        runs = {task.name: [run for run in self.runs if run.task == task.name] for task in tasks}
        return [
            (task, Results.of(self.experiment, [task], runs[task.name], self.engine, self.versions)) for task in tasks
        ]

    def to_json(self, *, seconds: bool = False) -> dict[str, Any]:
        """Return plain values for `json.dumps`; the keys are a contract with whoever reads the file.

        Args:
            seconds: say how long each run took, which is never the same twice.
        """
        return {
            "format": FORMAT,
            "experiment": self.experiment,
            "engine": self.engine,
            "versions": dict(self.versions),
            "parameters": self.parameters,
            "clients": self.clients,
            "clients_per_round": self.clients_per_round,
            "tasks": [asdict(task) for task, _ in self.by_task()],
            "runs": [run.to_json() | ({"seconds": run.seconds} if seconds else {}) for run in self.runs],
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Make the results from what `to_json` returned. Raises KeyError, TypeError, ValueError if it did not."""
        return cls(
            experiment=_text(value["experiment"]),
            runs=tuple(RunResult.from_json(run) for run in value["runs"]),
            tasks=tuple(Task.from_json(task) for task in value["tasks"]),
            engine=_text(value["engine"]),
            versions={key: _text(version) for key, version in _table(value["versions"]).items()},
            **{key: _whole(value[key]) for key in ("parameters", "clients", "clients_per_round")},
        )


def load_results(path: Path) -> Results:
    """Read a results file. Raises FedcompError, which says what is wrong with it and what to do."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise FedcompError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise FedcompError(f"{path}: expected the results of fedcomp simulate, got no JSON: {error}") from error
    found = value.get("format") if isinstance(value, dict) else None
    if found != FORMAT:
        raise FedcompError(
            f"{path}: expected results in format {FORMAT}, got {found if found is not None else 'none'}; "
            "write them again with fedcomp simulate"
        )
    try:
        return Results.from_json(value)
    except ConfigError as error:
        raise FedcompError(f"{path}: {error}") from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FedcompError(f"{path}: results are incomplete or damaged: {type(error).__name__}: {error}") from error


def _whole(value: Any) -> int:
    """A count, a number of bytes, a seed: a whole number from 0 on that arrays can hold."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"expected a whole number, got {_short(value)}")
    if not 0 <= value <= MOST:
        raise ValueError(f"expected a whole number from 0 to {MOST}, got {_short(value)}")
    return value


def _number(value: Any) -> float:
    """A float; those of runs that diverged may be infinite or NaN."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"expected a number, got {_short(value)}")
    if isinstance(value, int) and abs(value) > MOST:
        raise ValueError(f"expected a number, got {_short(value)}")
    return float(value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected a text, got {_short(value)}")
    return value


def _table(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"expected a table, got {_short(value)}")
    return value


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
