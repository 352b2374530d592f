"""What an engine is, and the one that needs no other process."""

from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from flwr.clientapp.typing import Mod

from fedcomp_clients import CompressMod, MemoryModelCache, MemoryStore
from fedcomp_simulations.apps import OnRound, RoundOutcome
from fedcomp_simulations.experiment import Experiment, Method
from fedcomp_simulations.runner import run_here


@dataclass(frozen=True)
class Ran:
    """What came of a run.

    Attributes:
        outcomes: of every round; other engines than the one in this process tell the model of the last round only.
        warnings: what server, and where they run in its process clients, had to say.
    """

    outcomes: tuple[RoundOutcome, ...]
    warnings: tuple[str, ...]


class Engine(Protocol):
    """Trains models with an experiment's apps. A context manager: leaving it stops whatever it has started."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def run(self, experiment: Experiment, method: Method, seed: int, on_round: OnRound | None = None) -> Ran:
        """Train once, with one thread for each client. `on_round` is called in this process after every round.

        Raises FedcompError if the run fails or cannot work.
        """


class InProcess:
    """One client after the other in this process: nothing to start, and no message ever leaves memory."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def run(
        self,
        experiment: Experiment,
        method: Method,
        seed: int,
        on_round: OnRound | None = None,
        mod: Mod | None = None,
    ) -> Ran:
        """See Engine.run; `mod` takes the place of one that keeps what clients must remember in memory."""
        outcomes: list[RoundOutcome] = []

        def keep(outcome: RoundOutcome) -> None:
            outcomes.append(outcome)
            if on_round is not None:
                on_round(outcome)

        mod = mod or CompressMod(MemoryStore(), models=MemoryModelCache())
        warnings = run_here(experiment, method, seed, keep, mod)
        return Ran(tuple(outcomes), warnings)
