"""The same apps under Flower's own simulation engine give the same model as the in-process grid."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from engine_runs import METHODS, SEED, SMALL, try_everything
from leftovers import processes_with

from fedcomp_simulations.apps import RoundOutcome
from fedcomp_simulations.deployment import DeploymentError
from fedcomp_simulations.engines import start_engine
from fedcomp_simulations.engines.simulated import RayEngine

pytestmark = pytest.mark.usefixtures("one_thread")


def test_ray_trains_the_same_models_and_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FEDCOMP_TEST_MARK", mark := f"mark-of-{tmp_path}")
    with start_engine("ray") as engine:
        try_everything(engine, mark, processes=5)
    assert not processes_with(mark)


@pytest.mark.slow
def test_ray_ends_with_whoever_started_it(tmp_path: Path) -> None:
    script = (
        "from engine_runs import *\n"
        "from fedcomp_simulations.engines import start_engine\n"
        "with start_engine('ray') as engine:\n"
        "    engine.run(replace(SMALL, rounds=100_000), METHODS[0], 1, lambda told: print(told.round, flush=True))"
    )
    environment = dict(os.environ) | {
        "FEDCOMP_TEST_MARK": (mark := f"mark-of-{tmp_path}"),
        "PYTHONPATH": os.pathsep.join([*filter(None, sys.path), str(Path(__file__).parent)]),
    }
    for number, code in ((signal.SIGTERM, None), (signal.SIGINT, None), (signal.SIGKILL, -signal.SIGKILL)):
        parent = subprocess.Popen(
            [sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        assert parent.stdout is not None
        assert parent.stderr is not None
        with parent.stdout, parent.stderr:
            assert parent.stdout.readline() == b"1\n"
            assert len(processes_with(mark)) > 4
            parent.send_signal(number)
            parent.wait(60)
        assert code is None or parent.returncode == code
        until = time.monotonic() + 20  # those who notice by themselves that they are alone
        while processes_with(mark) and time.monotonic() < until:
            time.sleep(0.2)
        assert not processes_with(mark)


@pytest.mark.slow
def test_a_run_that_is_stuck_or_whose_process_dies_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FEDCOMP_TEST_MARK", mark := f"mark-of-{tmp_path}")
    with RayEngine(quiet_s=0.01) as engine, pytest.raises(DeploymentError, match=r"no round has ended for 0\.01 s"):
        engine.run(SMALL, METHODS[0], SEED)
    assert not processes_with(mark)

    def kill(outcome: RoundOutcome) -> None:
        assert engine.pid is not None
        os.kill(engine.pid, signal.SIGKILL)

    with (
        RayEngine() as engine,
        pytest.raises(DeploymentError, match=r"ended after round \d+ of 1000; the end of its log"),
    ):
        engine.run(replace(SMALL, rounds=1000), METHODS[0], SEED, kill)
    assert not processes_with(mark)
