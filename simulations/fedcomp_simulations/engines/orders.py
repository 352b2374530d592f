"""How another process is told what to run, and how it tells what came of it: text, JSON lines and a .npz, no pickle.

In a folder of the run:

    events.jsonl    {"event": "round", "round": 1, "accuracy": 0.5, "traffic": {..}, "exchanges": [..]}   one a round,
                    {"event": "done", "warnings": [..]} or {"event": "failed", "ours": true, "reason": ".."}
    model.npz       the arrays of the last round by name, there before its event
"""

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid

from fedcomp.errors import ConfigError, FedcompError
from fedcomp_clients.records import to_record
from fedcomp_simulations.apps import RoundOutcome, server_app
from fedcomp_simulations.config import from_config, to_config
from fedcomp_simulations.experiment import Experiment, Method
from fedcomp_simulations.results import Exchange
from fedcomp_simulations.runner import collected_warnings
from fedcomp_strategies import RoundTraffic

EVENTS, MODEL, PID = "events.jsonl", "model.npz", "pid"


class RunError(FedcompError):
    """A run has failed on another engine, and is over; the message says why, as the same run in this process would."""


@dataclass(frozen=True)
class Order:
    """A run to make.

    Attributes:
        folder: where to tell what comes of it.
    """

    experiment: Experiment
    method: Method
    seed: int
    folder: Path

    def to_text(self) -> str:
        """All of it as JSON, for a file or a run's configuration; of the methods only the one that is meant."""
        return json.dumps(
            {
                "experiment": to_config(self.experiment, skip=("methods", "seeds")),
                "method": to_config(self.method),
                "seed": self.seed,
                "folder": str(self.folder),
            }
        )

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Read what `to_text` wrote. Raises ConfigError for what is none."""
        try:
            told = json.loads(text)
            method, seed = from_config(told["method"], Method), int(told["seed"])
            experiment = from_config(told["experiment"], Experiment, methods=(method,), seeds=(seed,))
            return cls(experiment, method, seed, Path(told["folder"]))
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"expected the order of a run, got {text[:80]!r}: {error}") from error


def carry_out(order: Order, grid: Grid, context: Context) -> bool:
    """Be the server of a run, and write down what happens. Returns whether all went well; raises nothing."""
    (order.folder / PID).write_text(str(os.getpid()))
    try:
        with collected_warnings() as warnings:
            server_app(order.experiment, order.method, order.seed, _Reporter(order))(grid, context)
        _write(order.folder, {"event": "done", "warnings": list(warnings)})
        return True
    except Exception as error:  # whoever waits for this run must hear of it, whatever it is
        ours = isinstance(error, FedcompError)
        reason = str(error) if ours else f"{type(error).__name__}: {error}"
        _write(order.folder, {"event": "failed", "ours": ours, "reason": reason})
        return False


class _Reporter:
    """Writes down every round as it ends."""

    def __init__(self, order: Order) -> None:
        self._order = order

    def __call__(self, outcome: RoundOutcome) -> None:
        folder = self._order.folder
        if outcome.round == self._order.experiment.rounds:
            with (folder / f"{MODEL}.part").open("wb") as file:
                np.savez(file, **{name: array.numpy() for name, array in outcome.arrays.items()})  # type: ignore[arg-type]
            (folder / f"{MODEL}.part").replace(folder / MODEL)
        told = {
            "event": "round",
            "round": outcome.round,
            "accuracy": outcome.accuracy,
            "traffic": asdict(outcome.traffic[-1]),
            "exchanges": [asdict(exchange) for exchange in outcome.exchanges[-1]] if outcome.exchanges else [],
        }
        _write(folder, told)


def _write(folder: Path, event: dict[str, Any]) -> None:
    with (folder / EVENTS).open("a", encoding="utf-8") as file:
        file.write(json.dumps(event) + "\n")


class Followed:
    """A run of another process, as its events tell it.

    Attributes:
        outcomes: of the rounds so far; all but the last of the run have no arrays.
        done: whether the run has ended well.
        warnings: of the run, once it has ended.
    """

    def __init__(self, order: Order) -> None:
        self.outcomes: list[RoundOutcome] = []
        self.done = False
        self.warnings: tuple[str, ...] = ()
        self._order = order
        self._read = 0

    def follow(self) -> Iterator[RoundOutcome]:
        """The rounds that have ended since the last time. Raises RunError if the run has failed."""
        path = self._order.folder / EVENTS
        if not path.exists():
            return
        with path.open("rb") as file:
            file.seek(self._read)
            whole = file.read().rpartition(b"\n")[0]
        self._read += len(whole) + 1 if whole else 0
        for line in whole.splitlines():
            event = json.loads(line)
            if event["event"] == "round":
                self.outcomes.append(self._outcome(event))
                yield self.outcomes[-1]
            elif event["event"] == "done":
                self.done, self.warnings = True, tuple(event["warnings"])
            else:
                raise RunError(event["reason"] if event["ours"] else f"the run has failed: {event['reason']}")

    def _outcome(self, event: dict[str, Any]) -> RoundOutcome:
        before = self.outcomes[-1] if self.outcomes else RoundOutcome(0, None, ArrayRecord(), ())
        return replace(
            before,
            round=int(event["round"]),
            accuracy=event["accuracy"],
            arrays=self._model() if event["round"] == self._order.experiment.rounds else ArrayRecord(),
            traffic=(*before.traffic, RoundTraffic(**event["traffic"])),
            exchanges=(*before.exchanges, tuple(Exchange(**exchange) for exchange in event["exchanges"])),
        )

    def _model(self) -> ArrayRecord:
        with np.load(self._order.folder / MODEL, allow_pickle=False) as arrays:
            return to_record(dict(arrays))
