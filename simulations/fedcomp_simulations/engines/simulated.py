"""Flower's own simulation engine, which runs clients in processes of Ray: in a process of ours, as Ray leaves threads,
warnings and environment variables behind."""

import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from types import TracebackType
from typing import Self

from fedcomp.errors import ConfigError
from fedcomp_simulations.apps import OnRound
from fedcomp_simulations.deployment import DeploymentError
from fedcomp_simulations.deployment.environment import flower_environment
from fedcomp_simulations.deployment.process import Child
from fedcomp_simulations.deployment.signals import as_interrupts
from fedcomp_simulations.engines.base import Ran
from fedcomp_simulations.engines.clients import ORDER
from fedcomp_simulations.engines.following import QUIET_S, environment, follow
from fedcomp_simulations.engines.orders import Order, RunError
from fedcomp_simulations.engines.simulated_host import STOP
from fedcomp_simulations.experiment import Experiment, Method
from fedcomp_simulations.saving import write_text

_LONGEST = 40  # characters of the folder above Ray's, whose sockets' names have to be short
_STOP_S = 20.0


class RayEngine:
    """Flower's `run_simulation`, in one process of its own for all runs of as many clients.

    Args:
        cpus: how many clients train at a time; None: one for each processor.
        client_cpus: processors that a client is said to need. Flower's default is 2.
        quiet_s: seconds without the end of a round after which a run counts as stuck.

    Raises ConfigError if Ray is not installed.
    """

    def __init__(self, cpus: int | None = None, client_cpus: int = 1, quiet_s: float = QUIET_S) -> None:
        self._cpus = cpus or os.cpu_count() or 1
        self._client_cpus = client_cpus
        self._quiet_s = quiet_s
        self._held = contextlib.ExitStack()
        self._folder: Path | None = None
        self._host: Child | None = None
        self._clients = 0
        self._runs = 0

    def __enter__(self) -> Self:
        from importlib.util import find_spec

        if find_spec("ray") is None:
            raise ConfigError("engine 'ray': Ray is not installed; run: pip install \"flwr[simulation]\"")
        self._held.enter_context(as_interrupts())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._held:
            self._stop(orderly=kind is None)

    @property
    def pid(self) -> int | None:
        """Process id of Flower's process; None while there is none."""
        return None if self._host is None else self._host.pid

    def run(self, experiment: Experiment, method: Method, seed: int, on_round: OnRound | None = None) -> Ran:
        """See Engine.run. Raises DeploymentError, with the end of its log, if Flower's process ends early."""
        host, folder = self._start(experiment.clients)
        self._runs += 1
        order = Order(experiment, method, seed, folder / f"run-{self._runs}")
        order.folder.mkdir()
        write_text(folder / ORDER, order.to_text())

        def ended() -> Callable[[str], DeploymentError] | None:
            return None if host.exit_code is None else host.failure

        try:
            return follow(order, on_round, ended, self._quiet_s)
        except RunError:  # the next run may follow this one
            raise
        except BaseException:  # nobody knows what still goes on
            self._stop(orderly=False)
            raise

    def _start(self, clients: int) -> tuple[Child, Path]:
        if self._host is not None and self._folder is not None and clients == self._clients:
            return self._host, self._folder
        self._stop()
        above = gettempdir() if len(gettempdir()) < _LONGEST else "/tmp"
        self._folder = Path(self._held.enter_context(TemporaryDirectory(prefix="fc-", dir=above)))
        variables = environment() | {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
        command = [
            sys.executable, "-m", "fedcomp_simulations.engines.simulated_host",
            str(self._folder), str(clients), str(self._cpus), str(self._client_cpus), str(os.getpid()),
        ]  # fmt: skip
        whole = flower_environment(self._folder / "home", self._folder / "state", variables)
        self._host = Child(command, self._folder / "ray.log", whole)
        self._clients = clients
        return self._host, self._folder

    def _stop(self, *, orderly: bool = True) -> None:
        """End Flower's process and all of Ray."""
        host, self._host = self._host, None
        if host is None or self._folder is None:
            return
        if orderly:
            (self._folder / STOP).touch()
            host.wait(_STOP_S)
        host.stop()
