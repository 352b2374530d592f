"""Engines: what they are told and tell, and real SuperNodes against the engine in this process."""

import io
import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from engine_runs import METHODS, SAMPLED, SEED, SMALL, check_same, try_everything
from flwr.app import Context, RecordDict
from leftovers import processes_with
from rich.console import Console

from fedcomp.errors import ConfigError
from fedcomp_simulations import cli
from fedcomp_simulations.apps import RoundOutcome
from fedcomp_simulations.bench import engines as bench
from fedcomp_simulations.engines import ENGINES, InProcess, run_on, start_engine
from fedcomp_simulations.engines.clients import OrderedClient
from fedcomp_simulations.engines.following import follow
from fedcomp_simulations.engines.orders import EVENTS, Followed, Order, RunError, carry_out
from fedcomp_simulations.experiment import Method
from fedcomp_simulations.fleet import Fleet
from fedcomp_simulations.grid import InProcessGrid
from fedcomp_simulations.runner import run_one

pytestmark = pytest.mark.usefixtures("one_thread")

NOWHERE = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config={})


def serve(order: Order, broken: bool = False) -> bool:
    """As the other engines do it, but in this process: the order as text, the outcome as a file."""
    text = order.to_text()
    with InProcessGrid(OrderedClient(lambda context: text), order.experiment.clients) as grid:
        if broken:
            grid.context(grid.get_node_ids()[0]).node_config.clear()
        return carry_out(Order.from_text(text), grid, NOWHERE)


def test_an_order_survives_as_text(tmp_path: Path) -> None:
    fleet = Fleet(links={"nb-iot": 0.5, "dsl": 0.5}, dropout=0.1, deadline_s=60.0)
    for method in METHODS:
        order = Order(replace(SAMPLED, fleet=fleet, methods=(method,), seeds=(7,)), method, 7, tmp_path)
        assert Order.from_text(order.to_text()) == order
    for text in ("", "[]", "{}", '{"experiment": {}, "method": {}, "seed": 1, "folder": "x"}'):
        with pytest.raises(ConfigError):
            Order.from_text(text)


def test_what_is_told_by_a_file_is_what_happened(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FEDCOMP_STATE_DIR", str(tmp_path / "state"))
    order = Order(replace(SAMPLED, evaluate_every=2, last=1), METHODS[1], SEED, tmp_path)
    assert serve(order)
    told: list[RoundOutcome] = []
    ran = follow(order, told.append, lambda: None, 1)
    assert told == list(ran.outcomes)
    assert [outcome.accuracy is None for outcome in told] == [True, False, False]
    assert [list(outcome.arrays) != [] for outcome in told] == [False, False, True]
    check_same(ran, run_on("inprocess", order.experiment, METHODS[1], SEED))


def test_half_a_line_is_read_once_it_is_whole(tmp_path: Path) -> None:
    order = Order(replace(SMALL, rounds=9), METHODS[0], SEED, tmp_path)
    followed = Followed(order)
    assert list(followed.follow()) == []
    outcome = InProcess().run(replace(SMALL, rounds=1), METHODS[0], SEED).outcomes[0]
    event = {"event": "round", "round": 1, "accuracy": 0.5, "traffic": asdict(outcome.traffic[0]), "exchanges": []}
    line = json.dumps(event) + "\n"
    for part, found in ((line[:40], []), (line[40:] + line[:9], [1]), (line[9:] + line, [1, 1])):
        with (tmp_path / EVENTS).open("a") as file:
            file.write(part)
        assert [each.round for each in followed.follow()] == found
    assert followed.outcomes[-1].traffic == (outcome.traffic[0],) * 3


def test_a_run_that_fails_says_why_where_it_is_waited_for(tmp_path: Path) -> None:
    cases = (
        (SMALL, Method("small", "auto", budget="1 B"), "^budget"),
        (replace(SMALL, min_samples=3000), METHODS[0], "min_samples = 3000 need"),
        (SMALL, METHODS[0], "^the run has failed: KeyError: 'partition-id'$"),
    )
    for number, (experiment, method, said) in enumerate(cases):
        (folder := tmp_path / str(number)).mkdir()
        order = Order(experiment, method, SEED, folder)
        assert not serve(order, broken=number == 2)
        with pytest.raises(RunError, match=said):
            follow(order, None, lambda: None, 1)


def test_engines_are_named_and_have_limits() -> None:
    assert list(ENGINES) == ["inprocess", "ray", "deployment"]
    with pytest.raises(ConfigError, match="unknown engine 'dask'; available: inprocess, ray, deployment"):
        start_engine("dask")
    with pytest.raises(ConfigError, match="engine 'deployment': expected at most 16 clients, got 17"):
        run_on("deployment", replace(SMALL, clients=17), METHODS[0], SEED)
    with pytest.raises(ConfigError, match="--monitor: only the engine inprocess"):
        run_one(SMALL, METHODS[0], SEED, lambda progress: None, monitor=True, engine=InProcess())


def test_mistakes_about_engines_are_told_in_a_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for arguments, said in (
        (["--engine", "dask"], "fedcomp: unknown engine 'dask'; available: inprocess, ray, deployment\n"),
        (["--engine", "ray", "--workers", "2"], "fedcomp: --engine ray: cannot be combined with --monitor or --work"),
        (
            ["--engine", "deployment", "--set", "clients=20"],
            "fedcomp: engine 'deployment': expected at most 16 clients",
        ),
    ):
        assert cli.main(["simulate", "--out", str(tmp_path), *arguments]) == cli.EXIT_MISTAKE
        assert said in capsys.readouterr().err


def test_results_of_another_engine_are_those_of_this_process() -> None:
    experiment = replace(SAMPLED, evaluate_every=2, last=1)
    plain = run_one(experiment, METHODS[1], SEED, lambda progress: None)
    through = run_one(experiment, METHODS[1], SEED, lambda progress: None, engine=InProcess())
    unmeasured = (None,) * experiment.rounds
    by_round = replace(plain.by_round, nmse=unmeasured, residual=unmeasured)
    assert through == replace(plain, by_round=by_round, seconds=through.seconds)


def test_the_bench_compares_with_ray() -> None:
    rows = bench.measure_engine("inprocess", InProcess, replace(SAMPLED, rounds=4), METHODS[:1], repeats=1)
    ((engine, method, rate),) = [(row.engine, row.method, row.rounds_per_s) for row in rows]
    assert (engine, method) == ("inprocess", "float32")
    assert rate > 0
    console = Console(width=100, file=io.StringIO(), record=True)
    console.print(bench.table([*rows, replace(rows[0], engine="ray", rounds_per_s=rate / 8)], SAMPLED, "here"))
    line = next(line for line in console.export_text().splitlines() if "inprocess" in line)
    assert line.replace("│", " ").split()[2:4] == [f"{rate:.2f}", "8.0"]


@pytest.mark.slow
def test_supernodes_train_the_same_models_and_leave_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FEDCOMP_TEST_MARK", mark := f"mark-of-{tmp_path}")
    with start_engine("deployment") as engine:
        try_everything(engine, mark, processes=9)
    assert not processes_with(mark)
