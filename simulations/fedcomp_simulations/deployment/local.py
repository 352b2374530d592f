"""A whole deployment on loopback: one SuperLink, SuperNodes, runs; everything is stopped at the end."""

import contextlib
import http.client
import json
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from fedcomp.errors import ConfigError
from fedcomp_simulations.deployment.environment import UserValue, as_toml, flower_environment, write_federation
from fedcomp_simulations.deployment.process import LOOPBACK, Child, check_port, free_port
from fedcomp_simulations.deployment.signals import as_interrupts, uninterrupted
from fedcomp_simulations.deployment.supernode import SuperNode

FEDERATION = "loopback"
COMPLETED = "finished:completed"

_START_S = 60.0
_STATUS_S = 60.0
_LOOK_S = 0.5
_RUN_ID = re.compile(r"Successfully started run (\d+)")


@dataclass(frozen=True)
class Run:
    """How a run ended.

    Attributes:
        run_id: Flower's number of it.
        status: "finished:completed", "finished:failed" or "finished:stopped".
        details: what Flower says about a failure.
        log: what the ServerApp logged.
    """

    run_id: int
    status: str
    details: str
    log: Path


class Deployment:
    """A SuperLink on loopback with everything that connects to it. Leaving it stops all, in order of appearance.

        with Deployment(folder) as deployment:
            for partition in range(3):
                deployment.add_node({"partition-id": partition, "num-partitions": 3})
            deployment.run(app, {"rounds": 3})

    Args:
        folder: holds homes, state directories and logs; is kept.
        environment: variables of all processes.
        port: of the SuperLink; None: a free one.
        simulation: whether the SuperLink simulates the nodes itself, with Ray, instead of waiting for SuperNodes.

    Raises DeploymentError if the port is taken or the SuperLink does not start.
    """

    def __init__(
        self,
        folder: Path,
        environment: Mapping[str, str] | None = None,
        port: int | None = None,
        *,
        simulation: bool = False,
    ) -> None:
        self.folder = folder.absolute()
        self.nodes: list[SuperNode] = []
        self._extra = dict(environment or {})
        self._environment = flower_environment(self.folder / "home", None, self._extra)
        self._port = free_port() if port is None else port
        self._simulation = simulation
        self._link: Child | None = None
        self._runs: list[Child] = []
        self._held = contextlib.ExitStack()

    @property
    def address(self) -> str:
        """Host and port of the SuperLink."""
        return f"{LOOPBACK}:{self._port}"

    @property
    def log(self) -> Path:
        """The SuperLink's log, with those of the ServerApps."""
        return self.folder / "superlink.log"

    def __enter__(self) -> Self:
        check_port(self._port, "SuperLink")
        write_federation(self.folder / "home", FEDERATION, self.address)
        command = ["flower-superlink", "--insecure", "--host", LOOPBACK, "--port", str(self._port)]
        command += ["--disable-runtime-dependency-installation", *(["--simulation"] if self._simulation else [])]
        self._held.enter_context(as_interrupts())
        self._link = Child(command, self.log, self._environment)
        try:
            self._link.wait_for(self._healthy, _START_S, f"the SuperLink to answer on {self.address}")
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def add_node(
        self,
        config: Mapping[str, UserValue],
        environment: Mapping[str, str] | None = None,
        *,
        superlink: str | None = None,
        port: int | None = None,
        wait: bool = True,
    ) -> SuperNode:
        """Start a SuperNode.

        Args:
            config: its node config.
            environment: variables of this node only; with a PATH, it runs in the Python environment whose programs are
                first there.
            superlink: the address that it is told; None: that of the SuperLink.
            port: of its own API; None: a free one.
            wait: until it is connected; without, call its `connect`.
        """
        folder = self.folder / f"node-{len(self.nodes)}"
        node = SuperNode(folder, superlink or self.address, config, self._extra | dict(environment or {}), port)
        self.nodes.append(node)
        node.launch()
        if wait:
            node.connect()
        return node

    def submit(self, app: Path, config: Mapping[str, UserValue] | None = None) -> Child:
        """Start `flwr run` on the folder of an app, and return the process that streams its log; see `finish`."""
        if not (app / "pyproject.toml").is_file():
            raise ConfigError(f"expected the folder of a Flower app, got {app}, which holds no pyproject.toml")
        number = len(self._runs) + 1
        command = ["flwr", "run", str(app), FEDERATION, "--stream"]
        if config:
            lines = [f"{key} = {text}\n" for key, text in as_toml(config).items()]
            file = self.folder / f"run-{number}.toml"
            file.write_text("".join(lines), "utf-8")
            command += ["--run-config", str(file)]
        child = Child(command, self.folder / f"run-{number}.log", self._environment)
        self._runs.append(child)
        return child

    def finish(self, child: Child, timeout_s: float, show: Callable[[str], None] | None = None) -> Run:
        """Wait for the end of a run that `submit` has started.

        Args:
            show: called with what the run has logged since the last time.

        Raises DeploymentError if the run does not start, fails or takes too long, or if the SuperLink ends meanwhile.
        """
        deadline, shown = time.monotonic() + timeout_s, 0
        while True:  # the stream of the log ends with the run
            ended = child.wait(_LOOK_S) is not None
            text = child.text()
            if show is not None:
                show(text[shown:])
            shown = len(text)
            if ended:
                break
            self._check_alive()
            if time.monotonic() > deadline:
                raise child.failure(f"the run has not ended after {timeout_s:g} s")
        started = _RUN_ID.search(text)
        if started is None:
            raise child.failure("did not start the run")
        while not (state := self._state(int(started[1])))["status"].startswith("finished"):  # the stream broke off
            self._check_alive()
            if time.monotonic() > deadline:
                raise child.failure(f"the run is {state['status']} after {timeout_s:g} s")
        run = Run(int(started[1]), state["status"], state["status-details"], child.log)
        if run.status != COMPLETED:
            raise child.failure(f"run {run.run_id} {run.status}: {run.details or 'no details'}")
        return run

    def run(
        self,
        app: Path,
        config: Mapping[str, UserValue] | None = None,
        timeout_s: float = 600,
        show: Callable[[str], None] | None = None,
    ) -> Run:
        """Run an app to its end: `submit`, then `finish`."""
        return self.finish(self.submit(app, config), timeout_s, show)

    def stop(self) -> None:
        """Stop runs, SuperNodes and the SuperLink; harmless if they have ended."""
        everything: list[Child | SuperNode] = [*self._runs, *self.nodes, *([self._link] if self._link else [])]
        try:
            for node in self.nodes:  # together, while the SuperLink is still there to be told
                node.ask_to_stop()
            for each in everything:
                each.stop()
        finally:  # after Ctrl-C, at once
            with uninterrupted():
                for each in everything:
                    each.kill()
            self._held.close()

    def _healthy(self) -> bool | None:
        connection = http.client.HTTPConnection(self.address, timeout=2)
        try:
            connection.request("GET", "/health")
            return True if connection.getresponse().status == 200 else None
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()

    def _check_alive(self) -> None:
        if self._link is not None and self._link.exit_code is not None:
            raise self._link.failure(f"ended during a run, with exit code {self._link.exit_code}")

    def _state(self, run_id: int) -> dict[str, Any]:
        """What `flwr ls` says about a run."""
        command = ["flwr", "ls", FEDERATION, "--run-id", str(run_id), "--format", "json"]
        with Child(command, self.folder / "status.log", self._environment) as child:
            if child.wait(_STATUS_S) != 0:
                raise child.failure(f"could not tell the state of run {run_id}")
        text = child.text()
        try:
            found: dict[str, Any] = json.loads(text[text.index("{") :])["runs"][0]
        except (ValueError, LookupError) as error:
            raise child.failure(f"expected JSON about run {run_id}") from error
        return found
