"""What runs an experiment's apps: this process, Flower's simulation with Ray, or real SuperNodes on loopback.

    with start_engine("ray") as engine:
        ran = engine.run(experiment, method, seed, on_round)

All three train the same model. An engine may make any number of runs, one after the other, and starts what it needs
with the first; leaving it stops all of that.
"""

from collections.abc import Callable

from fedcomp_simulations.apps import OnRound
from fedcomp_simulations.config import one_of
from fedcomp_simulations.engines.base import Engine, InProcess, Ran
from fedcomp_simulations.experiment import Experiment, Method

__all__ = ["DEPLOYMENT", "ENGINES", "INPROCESS", "RAY", "Engine", "InProcess", "Ran", "run_on", "start_engine"]

INPROCESS, RAY, DEPLOYMENT = "inprocess", "ray", "deployment"


def _ray() -> Engine:
    from fedcomp_simulations.engines.simulated import RayEngine

    return RayEngine()


def _deployment() -> Engine:
    from fedcomp_simulations.engines.deployed import DeploymentEngine

    return DeploymentEngine()


ENGINES: dict[str, Callable[[], Engine]] = {INPROCESS: InProcess, RAY: _ray, DEPLOYMENT: _deployment}
"""By name, what makes each of them."""


def start_engine(name: str) -> Engine:
    """Make the engine of this name, to be used as a context manager. Raises ConfigError for an unknown one."""
    one_of("engine", name, ENGINES)
    return ENGINES[name]()


def run_on(name: str, experiment: Experiment, method: Method, seed: int, on_round: OnRound | None = None) -> Ran:
    """Start an engine, train once, and stop it. See Engine.run."""
    with start_engine(name) as engine:
        return engine.run(experiment, method, seed, on_round)
