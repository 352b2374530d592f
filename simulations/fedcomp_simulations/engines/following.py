"""What the engines in other processes have in common: their environment, and waiting for what they tell."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import fedcomp
import fedcomp_clients
import fedcomp_simulations
import fedcomp_strategies
from fedcomp_simulations.apps import OnRound
from fedcomp_simulations.deployment import DeploymentError
from fedcomp_simulations.engines.base import Ran
from fedcomp_simulations.engines.orders import Followed, Order
from fedcomp_simulations.workers import THREAD_LIMITS

QUIET_S = 900.0
"""Seconds without the end of a round after which a run counts as stuck."""

_POLL_S = 0.05


def environment() -> dict[str, str]:
    """What all processes of an engine need: one thread each, as sums of floats hang on that, and this fedcomp."""
    found = [Path(str(package.__file__)).parents[1] for package in _PACKAGES]
    paths = [*dict.fromkeys(map(str, found)), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, paths))} | dict.fromkeys(THREAD_LIMITS, "1")


def follow(
    order: Order, on_round: OnRound | None, ended: Callable[[], Callable[[str], DeploymentError] | None], quiet_s: float
) -> Ran:
    """Wait for the end of a run, and tell each of its rounds at once.

    Args:
        ended: says whether the process that tells them has ended: what makes an error with the end of its log.

    Raises RunError if the run has failed, DeploymentError if that process has ended, or no round for `quiet_s`.
    """
    followed, heard = Followed(order), time.monotonic()
    while True:
        gone = ended()  # before the last look
        for outcome in followed.follow():
            heard = time.monotonic()
            if on_round is not None:
                on_round(outcome)
        if followed.done:
            return Ran(tuple(followed.outcomes), followed.warnings)
        if gone is not None:
            raise gone(f"ended after round {len(followed.outcomes)} of {order.experiment.rounds}")
        if time.monotonic() - heard > quiet_s:
            raise DeploymentError(f"no round has ended for {quiet_s:g} s; {len(followed.outcomes)} have before")
        time.sleep(_POLL_S)


_PACKAGES = (fedcomp, fedcomp_clients, fedcomp_simulations, fedcomp_strategies)
