"""Real SuperNodes on loopback, one for each client, that talk to a SuperLink as devices would."""

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Self

from fedcomp.errors import ConfigError
from fedcomp_simulations.apps import OnRound
from fedcomp_simulations.deployment import Deployment, DeploymentError
from fedcomp_simulations.deployment.app import write_app
from fedcomp_simulations.engines.base import Ran
from fedcomp_simulations.engines.clients import ORDER
from fedcomp_simulations.engines.following import QUIET_S, environment, follow
from fedcomp_simulations.engines.orders import PID, Order, RunError
from fedcomp_simulations.experiment import Experiment, Method

MOST_NODES = 16
"""Each is two processes of about 130 MB, and a third while it trains."""

_APP = "fedcomp_simulations.engines.deployed_app"
_FINISH_S = 120.0
_NOTICE_S, _NOTICE_TRIES = 0.1, 50


class DeploymentEngine:
    """One SuperLink and as many SuperNodes as clients, for all runs of as many clients.

    Args:
        quiet_s: seconds without the end of a round after which a run counts as stuck.
    """

    def __init__(self, quiet_s: float = QUIET_S) -> None:
        self._quiet_s = quiet_s
        self._held = contextlib.ExitStack()
        self._folder = Path()
        self._deployment: Deployment | None = None
        self._clients = 0
        self._runs = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def run(self, experiment: Experiment, method: Method, seed: int, on_round: OnRound | None = None) -> Ran:
        """See Engine.run. Raises ConfigError for too many clients, DeploymentError if one of Flower's processes fails.

        Clients' warnings stay in the logs of their nodes, which are gone with the engine.
        """
        deployment = self._start(experiment.clients)
        self._runs += 1
        order = Order(experiment, method, seed, self._folder / f"run-{self._runs}")
        order.folder.mkdir()
        child = deployment.submit(self._folder / "harness", {ORDER: order.to_text()})

        def ended() -> Callable[[str], DeploymentError] | None:
            return None if child.exit_code is None else child.failure

        try:
            ran = follow(order, on_round, ended, self._quiet_s)
            deployment.finish(child, _FINISH_S)
        except RunError:  # the next run may follow this one
            child.wait(_FINISH_S)
            raise
        except BaseException:  # nobody knows what still goes on
            pid = order.folder / PID
            server = int(pid.read_text()) if pid.exists() else None
            self._stop_flower()
            if server is not None:
                _end(server)
            self._stop()
            raise
        return ran

    def _start(self, clients: int) -> Deployment:
        if clients > MOST_NODES:
            raise ConfigError(
                f"engine 'deployment': expected at most {MOST_NODES} clients, got {clients}, each of which would be a "
                "SuperNode of about 300 MB; lower clients, or use the engine inprocess, which trains the same model"
            )
        if self._deployment is not None and clients == self._clients:
            return self._deployment
        self._stop()
        self._folder = Path(self._held.enter_context(TemporaryDirectory(prefix="fedcomp-deployment-")))
        write_app(self._folder, "harness", f"{_APP}:server", f"{_APP}:client", {ORDER: ""})
        self._deployment = self._held.enter_context(Deployment(self._folder / "flower", environment()))
        for partition in range(clients):
            self._deployment.add_node({"partition-id": partition, "num-partitions": clients}, wait=False)
        for node in self._deployment.nodes:
            node.connect()
        self._clients = clients
        return self._deployment

    def _stop(self) -> None:
        self._deployment = None
        self._held.close()

    def _stop_flower(self) -> None:
        if self._deployment is not None:
            self._deployment.stop()


def _end(server: int) -> None:
    """Wait until a ServerApp, which Flower starts in a session of its own, has noticed its parent's end; or end it."""
    with contextlib.suppress(ProcessLookupError):
        for _ in range(_NOTICE_TRIES):
            os.kill(server, 0)
            time.sleep(_NOTICE_S)
        os.kill(server, signal.SIGKILL)
