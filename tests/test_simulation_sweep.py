"""Sweeps: an interrupted one goes on and ends in the same file; runs made by other code are made again."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fedcomp.errors import ConfigError
from fedcomp_simulations import store as stored
from fedcomp_simulations import sweep
from fedcomp_simulations.cli import main
from fedcomp_simulations.experiment import Experiment, Method
from fedcomp_simulations.results import RunResult
from fedcomp_simulations.runner import run_one
from fedcomp_simulations.store import RunStore
from fedcomp_simulations.study import study_of
from fedcomp_simulations.sweep import plan_study, run_plan, versions
from fedcomp_simulations.workers import Job

SWEEP = """
dataset = "mnist"
model = "mlp"
clients = 12
clients_per_round = 3
rounds = 8
seeds = [0, 1]
last = 2
[grid]
alpha = [0.2, 2]
[[methods]]
name = "plain"
codec = "float32"
[[methods]]
name = "top-k + EF"
codec = "topk(0.01)"
feedback = "ef"
"""
TINY = Experiment(
    name="tiny",
    dataset="mnist",
    model="mlp",
    methods=(Method("float32", "float32"), Method("sign + EF", "sign", "ef")),
    seeds=(0,),
    clients=12,
    clients_per_round=3,
    rounds=2,
)
JOB = Job(TINY, TINY.methods[1], 0)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("grid.toml").write_text(SWEEP)


def silent(progress: object) -> None:
    pass


def test_a_killed_sweep_goes_on_and_gives_the_same_file(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["simulate", "grid.toml", "--workers", "1"]
    assert main([*command, "--out", "whole"]) == 0
    process = subprocess.Popen(
        [sys.executable, "-m", "fedcomp_simulations.cli", *command, "--out", "killed"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    ended = 0
    for line in process.stderr:
        ended += "round 8/8" in line
        if ended == 3:
            break
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=30)
    process.stderr.close()
    found = list(Path("killed", "runs").glob("*.json"))
    assert len(found) in (2, 3)  # the third may have been killed while it was saved
    assert not Path("killed", "results.json").exists()
    capsys.readouterr()
    times = {path: path.stat().st_mtime_ns for path in found}
    assert main([*command, "--out", "killed"]) == 0
    assert f"{len(found)} of 8 runs are in {Path('killed', 'runs')} already; --fresh" in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in found} == times
    assert Path("killed", "results.json").read_bytes() == Path("whole", "results.json").read_bytes()
    value = json.loads(Path("whole", "results.json").read_text())
    assert [(run["task"], run["name"], run["seed"]) for run in value["runs"]][:5] == [
        ("alpha=0.2", "plain", 0),
        ("alpha=0.2", "plain", 1),
        ("alpha=0.2", "top-k + EF", 0),
        ("alpha=0.2", "top-k + EF", 1),
        ("alpha=2", "plain", 0),
    ]
    assert [task["settings"]["alpha"] for task in value["tasks"]] == [0.2, 2.0]


@pytest.fixture
def run() -> RunResult:
    return run_one(JOB.experiment, JOB.method, JOB.seed, silent)


def test_a_run_is_used_again_only_if_all_is_the_same(
    run: RunResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = RunStore(tmp_path, "inprocess", versions())
    assert store.load(JOB) is None
    store.save(JOB, run)
    assert store.load(JOB) == replace(run, seconds=round(run.seconds, 3))
    assert store.load(replace(JOB, seed=1)) is None
    assert store.load(replace(JOB, experiment=replace(TINY, lr=0.2))) is None
    assert store.load(replace(JOB, method=replace(JOB.method, name="other"))) is None
    assert store.load(replace(JOB, monitor=True)) is None
    assert store.load(replace(JOB, experiment=replace(TINY, seeds=(0, 5), methods=TINY.methods[1:]))) is not None
    assert RunStore(tmp_path, "ray", versions()).load(JOB) is None
    assert RunStore(tmp_path, "inprocess", versions() | {"torch": "1"}).load(JOB) is None
    assert RunStore(tmp_path, "inprocess", versions(), fresh=True).load(JOB) is None
    monkeypatch.setattr(stored, "code_digest", lambda: "other")
    assert RunStore(tmp_path, "inprocess", versions()).load(JOB) is None


def test_a_damaged_file_is_as_none(run: RunResult, tmp_path: Path) -> None:
    store = RunStore(tmp_path, "inprocess", versions())
    store.save(JOB, run)
    path = store.path(JOB)
    whole = path.read_text()
    for text in (
        "",
        whole[: len(whole) // 2],
        "[]",
        "[" * 100_000,
        "{}",
        whole.replace('"round"', '"rund"'),
        whole.replace('"ef"', '"f"'),
    ):
        path.write_text(text)
        assert store.load(JOB) is None
    path.write_text(whole)
    assert store.load(JOB) is not None


def test_statistics_of_a_monitored_run_are_kept(tmp_path: Path) -> None:
    job = replace(JOB, monitor=True)
    store = RunStore(tmp_path, "inprocess", versions())
    made = job.run(silent)
    store.save(job, made)
    found = store.load(job)
    assert found is not None
    assert found.stats == made.stats != ()


def test_a_run_that_cannot_be_kept_counts_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file where a folder should be")
    store = RunStore(tmp_path, "inprocess", versions())
    reasons: list[str] = []
    runs = run_plan(plan_study(study_of(TINY), store), store=store, on_failure=reasons.append)
    assert len(runs) == len(reasons) == 2
    assert reasons[0].startswith(f"cannot keep a finished run in {tmp_path / 'runs'}: ")


def test_finished_runs_are_kept_when_another_one_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = RunStore(tmp_path, "inprocess", versions())

    def fail(progress: object) -> None:
        if getattr(progress, "method", None) == TINY.methods[1]:
            raise RuntimeError("power cut")

    with pytest.raises(RuntimeError, match="power cut"):
        run_plan(plan_study(study_of(TINY), store), on_progress=fail, store=store)
    assert list(plan_study(study_of(TINY), store).found) == [0]


def test_losses_of_compression_are_in_the_results() -> None:
    float32, sign = sweep.run_experiment(replace(TINY, rounds=3)).runs
    assert [value is not None and value < 1e-9 for value in float32.by_round.nmse] == [True] * 3
    assert float32.by_round.residual == (None, None, None)
    assert all(value is not None and 0.1 < value < 1 for value in sign.by_round.nmse)
    assert all(value is not None and 0.3 < value < 3 for value in sign.by_round.residual)
    assert sum(sign.by_round.payload_up) == sign.payload_bytes_up
    assert sum(sign.by_round.payload_down) == sign.payload_bytes_down


def test_what_the_server_adds_to_a_decoded_update_is_no_error() -> None:
    """CAFe codes the difference to its prediction: of an almost exact code nearly nothing is lost."""
    method = Method("8 bits + CAFe", "uniform(8)", "cafe")
    (run,) = sweep.run_experiment(replace(TINY, methods=(method,), rounds=4)).runs
    assert all(value is not None and value < 0.01 for value in run.by_round.nmse)


def test_rounds_between_evaluations_cost_nothing_at_the_end() -> None:
    often = run_one(replace(TINY, rounds=7, last=2), JOB.method, 0, silent)
    seldom = run_one(replace(TINY, rounds=7, last=2, evaluate_every=3), JOB.method, 0, silent)
    assert [point[0] for point in seldom.accuracy_curve] == [3, 6, 7]
    assert set(seldom.accuracy_curve) <= set(often.accuracy_curve)
    assert seldom.accuracy_final == often.accuracy_final


def test_points_that_cannot_be_are_refused_before_anything_is_trained(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "grid.toml", "--grid", "clients=10,1000", "--out", "there"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "1000 clients with min_samples = 8 need 8000 samples, got 4000" in line
    assert line.endswith("(where alpha=0.2, clients=1000)")
    assert not Path("there", "runs").exists()


def test_runs_on_data_that_changed_meanwhile_are_not_kept(run: RunResult, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    np.savez("own.npz", x=rng.random((60, 4), np.float32), y=np.arange(60) % 3)
    job = replace(JOB, experiment=replace(TINY, dataset="own.npz", clients=3))
    store = RunStore(tmp_path / "kept", "inprocess", versions())
    assert store.load(job) is None
    store.save(job, run)
    np.savez("own.npz", x=rng.random((90, 4), np.float32), y=np.arange(90) % 3)
    with pytest.raises(ConfigError, match=r"'own.npz' has changed while runs were made on it; run the same"):
        store.save(job, run)


def test_data_that_changed_are_read_again_in_the_same_process() -> None:
    rng = np.random.default_rng(0)
    own = replace(TINY, dataset="own.npz", clients=3, rounds=4, batch=5, methods=TINY.methods[:1])
    curves = []
    for classes in (3, 2):
        np.savez("own.npz", x=rng.random((60, 4), np.float32), y=np.arange(60) % classes)
        (made,) = sweep.run_experiment(own).runs
        curves.append(made.accuracy_curve)
    assert curves[0] != curves[1]


def test_engines_keep_their_runs_beside_each_other(tmp_path: Path) -> None:
    paths = {RunStore(tmp_path, engine, versions()).path(JOB) for engine in ("inprocess", "ray")}
    assert len(paths) == 2
