"""Real SuperLinks and SuperNodes on loopback: the model is that of the in-process grid, and nothing stays behind."""

import json
import os
import socket
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from deployed_app import ACCIDENT, CONFIG, PLAIN, RETURNED, STALL
from flower_app import Model, arrays, client_app, record, start_model
from flwr.app import Context, Message, RecordDict
from flwr.serverapp.strategy import FedAvg

from fedcomp import ConfigError
from fedcomp_clients import CompressMod, FileModelCache, FileStore
from fedcomp_simulations.bench.wire import is_idle, kind, split_messages
from fedcomp_simulations.deployment import CountingProxy, Deployment, DeploymentError
from fedcomp_simulations.deployment.app import write_app
from fedcomp_simulations.deployment.environment import node_config
from fedcomp_simulations.deployment.process import Child, check_port, free_port
from fedcomp_simulations.grid import InProcessGrid
from fedcomp_strategies import Compressed

IMPORTABLE = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])}
VICTIM, WITHOUT = 1, 2
"""Partitions of the node that is killed, and of the one without fedcomp's mod."""


def processes_of(folder: Path) -> list[str]:
    """Processes that were told of this folder in their environment, whoever started them."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if str(folder).encode() in (path / "environ").read_bytes():
                found.append((path / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:  # it has ended, or is not ours
            continue
    return found


class Fleet(InProcessGrid):
    """The same nodes in this process: one without the mod; perhaps one whose reply is lost, and who comes back new."""

    def __init__(self, folder: Path, nodes: int, killed: bool = False, forgets: bool = False) -> None:
        self.folder, self.killed, self.forgets = folder, killed, forgets
        self.mods = [
            CompressMod(FileStore(folder / str(i)), models=FileModelCache(folder / str(i))) for i in range(nodes)
        ]
        self.round = 0
        super().__init__(client_app([self.around]), nodes)

    def around(self, message: Message, context: Context, call_next: Any) -> Message:
        partition = int(context.node_config["partition-id"])
        return (
            call_next(message, context) if partition == WITHOUT else self.mods[partition](message, context, call_next)
        )

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        messages = list(messages)
        if not messages:  # nobody evaluates
            return []
        self.round += 1
        replies = super().send_and_receive(messages, timeout=timeout)
        if self.round != ACCIDENT or not self.killed:
            return replies
        (old,) = (n for n in self.get_node_ids() if self.context(n).node_config["partition-id"] == VICTIM)
        before = self._contexts.pop(old)
        self._contexts[9_999] = Context(before.run_id, 9_999, before.node_config, RecordDict(), before.run_config)
        if self.forgets:
            for path in (self.folder / str(VICTIM)).rglob("*.memory"):
                path.unlink()
        return [reply for reply in replies if reply.metadata.src_node_id != old]


def in_process(grid: Fleet, nodes: int, rounds: int) -> tuple[Model, Compressed]:
    inner = FedAvg(fraction_evaluate=0, min_train_nodes=nodes, min_available_nodes=nodes)
    strategy = Compressed(inner, str(CONFIG["uplink"]), feedback=str(CONFIG["feedback"]))
    with grid:
        result = strategy.start(grid, record(start_model()), num_rounds=rounds)
    assert result.arrays is not None
    return arrays(result.arrays), strategy


def results(folder: Path) -> tuple[Model, list[dict[str, Any]]]:
    with np.load(folder / "model.npz") as model:
        return dict(model), json.loads((folder / "traffic.json").read_text())


def difference(a: Model, b: Model) -> float:
    assert a.keys() == b.keys()
    return max(float(np.abs(a[name] - b[name]).max()) for name in a)


def test_two_rounds_on_real_nodes_through_a_proxy(tmp_path: Path) -> None:
    app = write_app(tmp_path, "short", "deployed_app:server", "deployed_app:client", CONFIG)
    with Deployment(tmp_path / "run", IMPORTABLE) as deployment, CountingProxy(deployment.address) as proxy:
        for partition in range(2):
            through = proxy.address if partition == 0 else None
            deployment.add_node({"partition-id": partition, "num-partitions": 2}, superlink=through, wait=False)
        run = deployment.run(app, {"folder": str(tmp_path)}, timeout_s=120)
        ids = {node.connect() for node in deployment.nodes}
        assert run.status == "finished:completed"
        assert "aggregate_train: Received" in run.log.read_text()
        assert len(processes_of(tmp_path)) >= 6  # each with the one that starts apps
    assert not processes_of(tmp_path)
    assert len(ids) == 2

    model, traffic = results(tmp_path)
    expected, strategy = in_process(Fleet(tmp_path / "grid", 2), 2, 2)
    assert difference(model, expected) < 1e-6
    uploaded = [t["bytes_up"] for t in traffic]
    assert uploaded == [t.bytes_up for t in strategy.traffic]
    for exchanges, both in zip(split_messages(proxy.exchanges), uploaded, strict=True):
        pushed = sum(exchange.bytes_up for exchange in exchanges if kind(exchange) == "push-object")
        assert both / 2 < pushed < both / 2 + 10_000
        assert {kind(e) for e in exchanges} >= {
            "pull-messages",
            "pull-object",
            "confirm-message-received",
            "push-messages",
        }
    assert any(map(is_idle, proxy.exchanges))
    states = [sorted(path.name for path in node.state.rglob("*.memory")) for node in deployment.nodes]
    assert states == [[f"partition-{i}.{r}.memory" for r in (1, 2)] for i in range(2)]


@pytest.mark.slow
def test_a_node_that_is_killed_comes_back_with_its_residual_and_one_does_without(tmp_path: Path) -> None:
    app = write_app(tmp_path, "long", "deployed_app:server", "deployed_app:client", CONFIG)
    stalled, third = tmp_path / "stalled", tmp_path / RETURNED.format(ACCIDENT + 1)
    environments = [{}, {STALL: str(stalled)}, {PLAIN: "1"}]
    with Deployment(tmp_path / "run", IMPORTABLE) as deployment:
        for partition, environment in enumerate(environments):
            config = {"partition-id": partition, "num-partitions": 3}
            deployment.add_node(config, environment, wait=False)
        run = deployment.submit(app, {"folder": str(tmp_path), "rounds": 3, "nodes": 3, "timeout": 30, "wait-new": 3})
        victim = deployment.nodes[VICTIM]
        run.wait_for(lambda: stalled.exists() or None, 90, "round 2 of the victim")
        before = victim.connect()
        victim.kill()
        assert not processes_of(victim.folder)
        run.wait_for(lambda: third.exists() or None, 90, "round 3")
        after = victim.start()
        deployment.finish(run, 180)
    assert not processes_of(tmp_path)
    assert before != after

    model, traffic = results(tmp_path)
    expected, strategy = in_process(Fleet(tmp_path / "grid", 3, killed=True), 3, 3)
    forgotten, other = in_process(Fleet(tmp_path / "forgotten", 3, killed=True, forgets=True), 3, 3)
    undisturbed, _ = in_process(Fleet(tmp_path / "undisturbed", 3), 3, 3)
    assert difference(model, expected) < 1e-6
    assert difference(model, forgotten) > 1e-3
    assert difference(model, undisturbed) > 1e-3
    assert [t["resets"] for t in traffic] == [t.resets for t in strategy.traffic] == [0, 0, 0]
    assert other.traffic[-1].resets == 1
    assert [t["uploads"] for t in traffic] == [t.uploads for t in strategy.traffic] == [3, 2, 3]
    assert [t["bytes_up"] for t in traffic] == [t.bytes_up for t in strategy.traffic]
    assert [t["dropped"] for t in traffic[:2]] == [{}, {"missing": 1}]
    assert set(traffic[2]["dropped"]) <= {"missing", "error"}  # the dead node is asked again if Flower still lists it


# --- processes -------------------------------------------------------------------------------------------------------

FAMILY = """
import subprocess, sys, time, signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # children inherit that
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("both are there", flush=True)
time.sleep(600)
"""


def test_a_process_runs_the_programs_of_its_own_environment(tmp_path: Path) -> None:
    own = tmp_path / "bin" / "flwr"
    own.parent.mkdir()
    own.write_text("#!/bin/sh\necho mine\n")
    own.chmod(0o755)
    with Child(["flwr"], tmp_path / "log", {"PATH": str(own.parent)}) as child:
        assert child.wait(10) == 0
    assert child.text() == "mine\n"


def family(folder: Path) -> Child:
    child = Child(["python", "-c", FAMILY], folder / "log", dict(os.environ) | {"WHERE": str(folder)})
    child.wait_for(lambda: "both" in child.text() or None, 20, "both")
    return child


@pytest.mark.parametrize("end", [Child.kill, lambda child: child.stop(0.2)], ids=["kill", "stop"])
def test_a_child_ends_with_all_that_it_has_started(end: Callable[[Child], None], tmp_path: Path) -> None:
    child = family(tmp_path)
    assert len(processes_of(tmp_path)) == 2
    end(child)
    assert not processes_of(tmp_path)
    assert child.exit_code == -9
    end(child)  # harmless


def test_a_child_ends_when_its_owner_is_interrupted(tmp_path: Path) -> None:
    with (
        pytest.raises(KeyboardInterrupt),
        Child(
            ["python", "-c", "import time; time.sleep(600)"], tmp_path / "log", os.environ | {"WHERE": str(tmp_path)}
        ),
    ):
        raise KeyboardInterrupt
    assert not processes_of(tmp_path)


def test_a_child_that_ends_early_is_told_with_the_end_of_its_log(tmp_path: Path) -> None:
    command = ["python", "-c", "for i in range(50): print('\\033[92mline\\033[0m', i)\nraise SystemExit(3)"]
    with (
        Child(command, tmp_path / "log", os.environ) as child,
        pytest.raises(DeploymentError, match="python: ended early, with exit code 3, instead of: a miracle") as caught,
    ):
        child.wait_for(lambda: None, 20, "a miracle")
    assert str(caught.value).endswith("line 48\nline 49")
    assert "line 20" not in str(caught.value)


def test_a_child_that_is_late_is_told(tmp_path: Path) -> None:
    with (
        Child(["python", "-c", "import time; time.sleep(60)"], tmp_path / "log", os.environ) as child,
        pytest.raises(DeploymentError, match=r"python: timeout of 0\.2 s for: a miracle(.|\n)*\(nothing\)"),
    ):
        child.wait_for(lambda: None, 0.2, "a miracle")


def test_mistakes_are_told_before_anything_is_started(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(DeploymentError, match=f"SuperLink: port {port} of 127.0.0.1 cannot be used"):
            Deployment(tmp_path, port=port).__enter__()
    with pytest.raises(DeploymentError, match="no-such-program: not found beside"):
        Child(["no-such-program"], tmp_path / "log", {})
    with pytest.raises(ConfigError, match="expected the folder of a Flower app"):
        Deployment(tmp_path).submit(tmp_path)
    with pytest.raises(ConfigError, match="expected \"module:attribute\", got 'a b'"):
        write_app(tmp_path, "app", "a b", "c:d", {})
    with pytest.raises(ConfigError, match="config 'x': expected a bool, int, float or str, got list"):
        write_app(tmp_path, "other", "a:b", "c:d", {"x": []})  # type: ignore[dict-item]
    with pytest.raises(ConfigError, match="values no quotes"):
        node_config({"name": 'a "quoted" one'})
    assert not processes_of(tmp_path)


def test_ports_are_free_until_they_are_not() -> None:
    port = free_port()
    check_port(port, "it")
    with socket.create_server(("127.0.0.1", port)), pytest.raises(DeploymentError, match="it: port"):
        check_port(port, "it")


def test_node_configs_are_written_as_flower_reads_them() -> None:
    assert node_config({"partition-id": 3, "budget": "2 kB", "fast": True}) == 'partition-id=3 budget="2 kB" fast=true'
