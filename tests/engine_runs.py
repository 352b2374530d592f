"""What the tests of the engines run on each of them, and how the models are compared."""

from dataclasses import replace

import numpy as np
import pytest
from leftovers import processes_with

from fedcomp.errors import FedcompError
from fedcomp_simulations.apps import RoundOutcome
from fedcomp_simulations.engines import Engine, InProcess, Ran
from fedcomp_simulations.experiment import Experiment, Method

METHODS = (
    Method("float32", "float32"),
    Method("sign + EF", "sign", "ef"),
    Method("dithered", "auto", "none", budget="1 bits"),  # unbiased, with a place for each client among all
    Method("CAFe", "lrq(bits=4)", "cafe"),
)
SMALL = Experiment(
    name="small", dataset="mnist", model="mlp", methods=METHODS, clients=4, clients_per_round=4, rounds=2
)
SAMPLED = replace(SMALL, clients_per_round=2, rounds=3)
SEED = 1


def check_same(ran: Ran, expected: Ran) -> None:
    """All that can be told of a run is the same on both engines; models to 1e-6."""
    assert [outcome.round for outcome in ran.outcomes] == [outcome.round for outcome in expected.outcomes]
    assert [outcome.accuracy for outcome in ran.outcomes] == [outcome.accuracy for outcome in expected.outcomes]
    assert ran.outcomes[-1].traffic == expected.outcomes[-1].traffic
    assert ran.outcomes[-1].exchanges == expected.outcomes[-1].exchanges
    model, other = ran.outcomes[-1].arrays, expected.outcomes[-1].arrays
    assert list(model) == list(other)
    for key, array in other.items():
        np.testing.assert_allclose(model[key].numpy(), array.numpy(), rtol=0, atol=1e-6)


def compare(engine: Engine, methods: tuple[Method, ...] = METHODS) -> None:
    """Run all methods with all clients, and two with some of them, and compare with the engine in this process."""
    runs = [(SMALL, method) for method in methods] + [(SAMPLED, method) for method in methods[:2]]
    for experiment, method in runs:
        told: list[int] = []
        ran = engine.run(experiment, method, SEED, lambda outcome, told=told: told.append(outcome.round))  # type: ignore[misc]
        assert told == [outcome.round for outcome in ran.outcomes]
        check_same(ran, InProcess().run(experiment, method, SEED))


def try_everything(engine: Engine, mark: str, processes: int) -> None:
    """Runs that go well, runs that fail, and at last one that is interrupted while so many processes are there."""
    compare(engine)
    with pytest.raises(FedcompError, match="budget"):  # a run that fails ends with its own error, and only itself
        engine.run(SMALL, Method("small", "auto", budget="1 B"), SEED)
    with pytest.raises(FedcompError, match="min_samples = 3000 need"):
        engine.run(replace(SMALL, min_samples=3000), METHODS[0], SEED)

    def interrupt(outcome: RoundOutcome) -> None:
        assert outcome.round == 1
        assert len(processes_with(mark)) >= processes
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.run(SMALL, METHODS[0], SEED, interrupt)
    assert not processes_with(mark)
