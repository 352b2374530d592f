"""One SuperNode on loopback: a process with files and a configuration of its own, which can die and come back."""

import re
from collections.abc import Mapping
from pathlib import Path

from fedcomp_simulations.deployment.environment import UserValue, flower_environment, node_config
from fedcomp_simulations.deployment.process import LOOPBACK, Child, check_port, free_port

_START_S = 60.0
_CONNECTED = re.compile(r"SuperNode ID: (\d+)")


class SuperNode:
    """A SuperNode and its files below `folder`; `start` and `stop`, or `kill` and `start` again, as often as you like.

    Args:
        folder: holds FLWR_HOME, the state directory and a log for each start.
        superlink: address of the SuperLink, or of a proxy before it.
        config: its node config, such as partition-id and num-partitions.
        environment: variables of this node only; with a PATH, it runs in the Python environment whose programs are
            first there.
        port: of its own API, for the apps it starts; None: a free one at each start.

    Attributes:
        node_id: the identity that the SuperLink gave it; another one after each start. None: not started yet.
        state: FEDCOMP_STATE_DIR of its apps; outlives restarts.
        log: of the last start.
    """

    def __init__(
        self,
        folder: Path,
        superlink: str,
        config: Mapping[str, UserValue],
        environment: Mapping[str, str],
        port: int | None = None,
    ) -> None:
        self.folder = folder
        self.state = folder / "state"
        self.node_id: int | None = None
        self.log = folder / "supernode-1.log"
        self._config = node_config(config)
        self._environment = flower_environment(folder / "home", self.state, environment)
        self._superlink = superlink
        self._port = port
        self._starts = 0
        self._child: Child | None = None

    @property
    def running(self) -> bool:
        """Whether its process is there."""
        return self._child is not None and self._child.exit_code is None

    def launch(self) -> None:
        """Start the process without waiting until it is connected."""
        self.stop()
        port = free_port() if self._port is None else self._port
        check_port(port, f"SuperNode in {self.folder}")
        self._starts += 1
        self.log = self.folder / f"supernode-{self._starts}.log"
        command = ["flower-supernode", "--insecure", "--superlink", self._superlink]
        command += ["--host", LOOPBACK, "--port", str(port), "--node-config", self._config]
        self._child = Child(command, self.log, self._environment)

    def connect(self, timeout_s: float = _START_S) -> int:
        """Wait until the SuperLink knows it. Returns its node id. Raises DeploymentError if that does not happen."""
        if self._child is None:
            self.launch()
        assert self._child is not None
        child = self._child
        found = child.wait_for(
            lambda: _CONNECTED.search(child.text()), timeout_s, "the SuperLink to accept the SuperNode"
        )
        self.node_id = int(found[1])
        return self.node_id

    def start(self, timeout_s: float = _START_S) -> int:
        """`launch`, then `connect`."""
        self.launch()
        return self.connect(timeout_s)

    def kill(self) -> None:
        """SIGKILL to the SuperNode and to the processes of its apps, as when the power goes."""
        if self._child is not None:
            self._child.kill()

    def ask_to_stop(self) -> None:
        """Have it begin to stop, without waiting."""
        if self._child is not None:
            self._child.terminate()

    def stop(self) -> None:
        """Stop it in order; it tells the SuperLink that it leaves."""
        if self._child is not None:
            self._child.stop()
