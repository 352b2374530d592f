"""Results: the JSON contract, the comparison with the uncompressed twin, table and plot."""

import json
from dataclasses import fields, replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fedcomp.errors import FedcompError
from fedcomp_simulations.config import to_config
from fedcomp_simulations.experiment import Method
from fedcomp_simulations.report.figures import save_plot
from fedcomp_simulations.results import ByRound, Exchange, Results, RunResult, Task, load_results
from fedcomp_simulations.summary import format_bytes, summarize
from fedcomp_simulations.tables import table

FLOAT32 = Method("plain", "float32")
SIGN = Method("sign [EF]", "sign", "ef")


def make_run(method: Method, seed: int, accuracy: float, per_upload: int, failures: int = 0) -> RunResult:
    uploads = 40 - failures
    curve = tuple((number, number * per_upload * 2, accuracy) for number in range(1, 21))
    return RunResult(method, seed, 20, curve, per_upload * uploads, 7, uploads, failures, 0.5)


def make_results(*runs: RunResult) -> Results:
    return Results("task", 1000, 20, 2, runs)


BOTH = make_results(
    make_run(FLOAT32, 0, 0.80, 4000),
    make_run(FLOAT32, 1, 0.90, 4000),
    make_run(SIGN, 0, 0.79, 125),
    make_run(SIGN, 1, 0.87, 125),
)


def render(results: Results, width: int = 200) -> str:
    page = StringIO()
    Console(width=width, file=page).print(table(results, narrow=width < 100))
    return page.getvalue()


def test_json_has_the_agreed_keys() -> None:
    value = json.loads(json.dumps(BOTH.to_json(seconds=True)))
    assert (value["format"], value["experiment"], value["parameters"], value["clients"]) == (2, "task", 1000, 20)
    assert value["runs"][2] == {
        "task": "",
        "name": "sign [EF]",
        "codec": "sign",
        "feedback": "ef",
        "method": to_config(SIGN),
        "seed": 0,
        "rounds": 20,
        "last": 10,
        "accuracy_final": pytest.approx(0.79),
        "accuracy_curve": [[number, number * 250, 0.79] for number in range(1, 21)],
        "payload_bytes_up": 5000,
        "payload_bytes_down": 7,
        "payload_per_upload": 125.0,
        "uploads": 40,
        "failures": 0,
        "messages": 0,
        "by_round": {entry.name: [] for entry in fields(ByRound)},
        "exchanges": [],
        "warnings": [],
        "seconds": 0.5,
    }
    assert "seconds" not in BOTH.to_json()["runs"][2]  # two runs of the same never take the same


def test_results_come_back_from_json(tmp_path: Path) -> None:
    rounds = ByRound((1, 2), (5, 6), (7, 8), (9, 10), (11, 12), (0, 1), (0.5, None), (None, 1.5))
    exchanges = ((Exchange(3, 9, 11, 5, "ok"),), (Exchange(4, 10, 12, 5, "late"), Exchange(5, 0, 0, 0, "absent")))
    run = replace(
        make_run(SIGN, 0, 0.8, 125), task="lr=0.1", by_round=rounds, exchanges=exchanges, warnings=("w",), messages=40
    )
    task = Task("lr=0.1", 1000, 20, 2, {"lr": 0.1}, {"clip_norm": "inf", "lr": 0.1})
    told = Results.of("task", [task], [run], "ray", {"numpy": "2"})
    path = tmp_path / "results.json"
    path.write_text(json.dumps(told.to_json(), allow_nan=False))
    assert load_results(path) == replace(told, runs=(replace(run, seconds=0.0),))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot read .*results.json: No such file"),
        ("{", "expected the results of fedcomp simulate, got no JSON"),
        ("[" * 100_000, "expected the results of fedcomp simulate, got no JSON"),
        ("[]", "expected results in format 2, got none"),
        ('{"format": 1}', "expected results in format 2, got 1; write them again with fedcomp simulate"),
        ('{"format": 2}', "results are incomplete or damaged: KeyError"),
        ('{"format": 2, "experiment": "x", "runs": 3}', "incomplete or damaged: TypeError"),
    ],
)
def test_files_that_hold_no_results_are_refused(content: str | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(FedcompError, match=message):
        load_results(path)


def replaced(value: Any, places: list[str | int], other: Any) -> Any:
    """A copy of nested lists and tables with another value at one place."""
    first, *rest = places
    copy = value.copy()
    copy[first] = replaced(value[first], rest, other) if rest else other
    return copy


@pytest.mark.parametrize(
    "place",
    [
        "parameters", "experiment", "engine", "versions", "versions.numpy", "tasks.0.name", "tasks.0.clients",
        "tasks.0.grid", "tasks.0.settings", "runs.0.task", "runs.0.seed", "runs.0.last", "runs.0.messages",
        "runs.0.accuracy_curve.0.1", "runs.0.accuracy_curve.0.2", "runs.0.by_round.wire_up.0", "runs.0.by_round.nmse.0",
        "runs.0.exchanges.0.0", "runs.0.exchanges.0.0.1", "runs.0.exchanges.0.0.4", "runs.0.warnings",
    ],
)  # fmt: skip
def test_values_of_other_types_are_told_as_damage(place: str, tmp_path: Path) -> None:
    rounds = ByRound((1,), (5,), (7,), (9,), (11,), (0,), (0.5,), (None,))
    run = replace(make_run(SIGN, 0, 0.8, 125), by_round=rounds, exchanges=((Exchange(3, 9, 11, 5, "ok"),),))
    whole = Results.of("task", [Task("", 1000, 20, 2)], [run], "inprocess", {"numpy": "2"}).to_json()
    path = tmp_path / "results.json"
    places: list[str | int] = [int(part) if part.isdigit() else part for part in place.split(".")]
    for other in (True, [True], 10**400):
        path.write_text(json.dumps(replaced(whole, places, other)))
        with pytest.raises(FedcompError, match=r"results are incomplete or damaged: (Type|Value)Error: "):
            load_results(path)


def test_results_of_an_unknown_method_are_refused(tmp_path: Path) -> None:
    value = BOTH.to_json()
    value["runs"][0]["method"]["codec"] = "zip"
    path = tmp_path / "results.json"
    path.write_text(json.dumps(value))
    with pytest.raises(FedcompError, match=r"results.json: unknown codec 'zip'"):
        load_results(path)


def test_final_accuracy_is_the_mean_of_the_last_ten_evaluations() -> None:
    curve = tuple((number, number, 0.0 if number <= 5 else 0.1 * (number - 5)) for number in range(1, 16))
    run = RunResult(FLOAT32, 0, 15, curve, 1, 1, 1, 0, 0.0)
    assert run.accuracy_final == pytest.approx(0.55)


def test_methods_are_compared_with_the_twin_of_the_same_seed() -> None:
    plain, sign = summarize(BOTH)
    assert plain.ratio == 1
    assert plain.points == (0, 0)
    assert sign.points == pytest.approx((-1.0, -3.0))
    assert sign.accuracy == pytest.approx(0.83)
    assert sign.accuracy_spread == pytest.approx(0.0566, abs=1e-4)
    assert sign.ratio == 32
    text = render(BOTH)
    assert "sign [EF]" in text
    assert "-2.0 (-3.0, -1.0)" in text
    assert "83.0 ± 5.7" in text
    assert "32x" in text
    assert "failed" not in text
    assert "*" not in text


def test_without_a_twin_four_bytes_a_parameter_are_assumed_and_marked() -> None:
    results = make_results(make_run(SIGN, 0, 0.79, 125))
    (sign,) = summarize(results)
    assert (sign.ratio, sign.points, sign.accuracy_spread) == (32, (), None)
    text = render(results)
    assert "ratio*" in text
    assert "* against 4 bytes per parameter, as no plain float32 run was made" in text


def test_float32_with_feedback_is_no_twin() -> None:
    assert Method("x", "identity()").uncompressed
    assert not Method("x", "float32", "ef").uncompressed
    assert not Method("x", "float16").uncompressed


def test_a_narrow_terminal_gets_no_codec_column() -> None:
    lines = render(BOTH, 80).splitlines()
    assert max(map(len, lines)) <= 80
    assert "codec" not in lines[2]
    assert any("sign [EF]" in line and "-2.0 (-3.0, -1.0)" in line for line in lines)


def test_failures_are_shown() -> None:
    text = render(make_results(make_run(FLOAT32, 0, 0.8, 4000), make_run(SIGN, 0, 0.8, 0, failures=40)))
    assert "failed" in text
    assert "40" in text


def test_bytes_are_written_with_decimal_units() -> None:
    sizes = (0, 999, 1000, 12_345, 123_456, 999_949, 2.5e9, 1.2e13)
    assert [format_bytes(size) for size in sizes] == [
        "0 B",
        "999 B",
        "1 kB",
        "12.3 kB",
        "123 kB",
        "1 MB",
        "2.5 GB",
        "12,000 GB",
    ]


def test_the_plot_is_a_picture_even_when_a_method_never_uploaded(tmp_path: Path) -> None:
    silent = make_run(SIGN, 0, 0.5, 0, failures=40)
    for index, results in enumerate((BOTH, make_results(silent), make_results(*BOTH.runs, silent))):
        path = tmp_path / f"{index}.png"
        save_plot(results, path)
        assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
        assert path.stat().st_size > 10_000


def test_tables_of_a_grid_say_which_point_they_are_of() -> None:
    runs = [replace(run, task="lr=[1]") for run in BOTH.runs]
    assert "task [lr=[1]]: 1,000 parameters" in render(make_results(*runs))
    assert "task: 1,000 parameters" in render(BOTH)


def test_the_first_plain_float32_is_the_twin() -> None:
    other = Method("again", "float32", downlink="plain")
    told = make_results(*BOTH.runs, make_run(other, 0, 0.5, 4000), make_run(other, 1, 0.5, 4000))
    assert [summary.points for summary in summarize(told)][1] == pytest.approx((-1.0, -3.0))
    assert not Method("x", "float32", norm_cap=1.0).uncompressed
