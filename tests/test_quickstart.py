"""The quickstart app learns: in this process, in Flower's simulation, and deployed by the script that people run."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest
from test_deployment import IMPORTABLE, processes_of

from fedcomp_simulations.deployment import Deployment
from fedcomp_simulations.grid import run_in_process

ROOT = Path(__file__).parent.parent
APP = ROOT / "simulations" / "quickstart"
SCRIPT = ROOT / "scripts" / "deploy.py"
ENVIRONMENT = IMPORTABLE | {"OMP_NUM_THREADS": "1"}


def project() -> dict[str, Any]:
    return tomllib.loads((APP / "pyproject.toml").read_text())


def check(results: Path, rounds: int, budget: int) -> None:
    told = json.loads(results.read_text())
    assert len(told["accuracies"]) == len(told["uploads"]) == rounds
    assert told["accuracies"][-1] > 0.75
    assert max(told["uploads"]) < 1.3 * budget
    assert sum(told["uploads"]) > 0.3 * budget * rounds


@pytest.mark.usefixtures("one_thread")
def test_it_learns_in_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(APP))
    from fedcomp_quickstart import client_app, server_app

    config = project()["tool"]["flwr"]["app"]["config"] | {"rounds": 2, "results": str(tmp_path / "results.json")}
    run_in_process(server_app.app, client_app.app, 3, config)
    check(tmp_path / "results.json", 2, 2000)


def test_each_side_has_two_lines_for_fedcomp() -> None:
    for side in ("server", "client"):
        lines = (APP / "fedcomp_quickstart" / f"{side}_app.py").read_text().splitlines()
        assert [line.rpartition("# ")[2] for line in lines if re.search(r"# \d$", line)] == ["1", "2"]
        ours = [line for line in lines if re.search("fedcomp_(clients|strategies)|Compressed|compress_mod", line)]
        assert len(ours) == 2
    assert project()["project"]["license"] == {"file": "LICENSE"}
    assert (APP / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()


def test_the_script_tells_mistakes_before_anything_is_started(tmp_path: Path) -> None:
    for arguments, said in (
        (["--nodes", "0"], "--nodes: expected at least 1, got 0"),
        (["--run-config", "rounds=many"], "expected key=value pairs of TOML"),
        (["--port", "99999"], "port 99999 of 127.0.0.1 cannot be used"),
    ):
        command = [sys.executable, str(SCRIPT), "--folder", str(tmp_path), *arguments]
        done = subprocess.run(command, env=os.environ | ENVIRONMENT, capture_output=True, text=True, timeout=60)
        assert done.returncode in (1, 2)
        assert said in done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_it_learns_in_flowers_simulation(tmp_path: Path) -> None:
    with Deployment(tmp_path / "run", ENVIRONMENT, simulation=True) as deployment:
        run = deployment.run(APP, {"rounds": 2, "results": str(tmp_path / "results.json")}, timeout_s=200)
        assert "after 2 rounds" in run.log.read_text()
    check(tmp_path / "results.json", 2, 2000)
    assert not processes_of(tmp_path)


@pytest.mark.slow
def test_the_script_deploys_it_and_leaves_nothing_running(tmp_path: Path) -> None:
    config = f'rounds=2 budget="1 kB" results="{tmp_path}/results.json"'
    command = [sys.executable, str(SCRIPT), "--folder", str(tmp_path / "run"), "--run-config", config]
    done = subprocess.run(command, env=os.environ | ENVIRONMENT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "after 2 rounds" in done.stdout
    assert done.stdout.count("SuperNode ") == 3
    check(tmp_path / "results.json", 2, 1000)
    assert not processes_of(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_script_stops_everything_when_it_is_stopped(number: signal.Signals, tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--folder", str(tmp_path / "run")]
    with subprocess.Popen(command, env=os.environ | ENVIRONMENT, stderr=subprocess.PIPE, text=True) as script:
        try:
            deadline = time.monotonic() + 90
            while not any("flower-supernode" in line for line in processes_of(tmp_path)):
                assert time.monotonic() < deadline
                time.sleep(0.2)
            time.sleep(2)
            script.send_signal(number)
            _, said = script.communicate(timeout=60)
        finally:
            script.kill()
    assert script.returncode == 130
    assert said == "deploy: interrupted, everything is stopped\n"
    assert not processes_of(tmp_path)
