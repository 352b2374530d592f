"""`fedcomp advise`: what is tried, the Pareto front, what is recommended and how it is said."""

import ast
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from flwr.serverapp.strategy import FedAvg
from hypothesis import given
from hypothesis import strategies as st

from fedcomp import BudgetError, ConfigError
from fedcomp_simulations import commands, simulating
from fedcomp_simulations.advise import advise, front, pareto_front, recommend, seeds_in_words, server_line, trial
from fedcomp_simulations.cli import main
from fedcomp_simulations.experiment import Experiment, Method
from fedcomp_simulations.results import Results, RunResult
from fedcomp_simulations.runner import run_one
from fedcomp_simulations.study import Study
from fedcomp_simulations.summary import Summary, summarize
from fedcomp_strategies import Compressed

FLOAT32 = Method("float32", "float32")
TASK = Experiment(
    name="tiny",
    dataset="mnist",
    model="mlp",
    methods=(Method("ignored", "int8"),),
    seeds=(0,),
    clients=12,
    clients_per_round=3,
    rounds=2,
)
TINY = """
dataset = "mnist"
model = "mlp"
clients = 12
clients_per_round = 3
rounds = 2
seeds = [0]
[[methods]]
name = "ignored"
codec = "int8"
"""


def setting(feedback: str, budget: str = "640 B") -> Method:
    return Method(f"{budget}, {feedback}", "auto", feedback, budget=budget)


def runs(method: Method, per_upload: int, *accuracies: float) -> list[RunResult]:
    """One run a seed, each of 10 uploads."""
    return [
        RunResult(method, seed, 1, ((1, 10 * per_upload, accuracy),), 10 * per_upload, 7, 10 * bool(per_upload), 0, 0.5)
        for seed, accuracy in enumerate(accuracies)
    ]


def results(*groups: list[RunResult]) -> Results:
    return Results("task", 1000, 20, 2, tuple(run for group in groups for run in group))


def summaries(*groups: list[RunResult]) -> list[Summary]:
    """Of the settings, against float32 at 90 % with every seed."""
    return summarize(results(runs(FLOAT32, 4000, *[0.9] * len(groups[0])), *groups))[1:]


def names(methods: Sequence[Method]) -> list[str]:
    return [method.name for method in methods]


# --- what is tried ----------------------------------------------------------------------------------------------------


def test_a_handful_is_tried_without_duplicates() -> None:
    chosen = trial(TASK, ["640 B"])
    assert names(chosen.experiment.methods) == [
        "float32",
        "213 B, automatic (cafe(beta=0.95))",
        "640 B, automatic (cafe(beta=0.95))",
        "640 B, none",
        "640 B, cafe",
        "640 B, ef",
        "1920 B, automatic (cafe(beta=0.95))",
    ]
    assert chosen.experiment == replace(TASK, methods=chosen.experiment.methods)
    assert (chosen.budgets, chosen.notes) == (("640 B",), ())
    assert all(method.codec == "auto" for method in chosen.experiment.methods[1:])


def test_what_the_server_chooses_hangs_on_the_task() -> None:
    recurrent = trial(replace(TASK, model="gru", dataset="shakespeare", partition="natural"), ["640 B"])
    assert names(recurrent.experiment.methods)[2:5] == [
        "640 B, automatic (none)",  # so "none" is not tried again
        "640 B, cafe",
        "640 B, ef",
    ]
    robust = trial(replace(TASK, strategy="fedmedian"), ["640 B"])
    assert names(robust.experiment.methods)[2:5] == ["640 B, automatic (ef)", "640 B, none", "640 B, cafe"]


def test_budgets_are_in_order_and_equal_ones_are_one() -> None:
    chosen = trial(TASK, [" 1920  B", "640 B", "640", "0.1 bits"])
    tried = dict.fromkeys(method.budget for method in chosen.experiment.methods[1:])
    assert list(tried) == ["212 B", "213 B", "0.1 bits", "640 B", "1908 B", "1920 B", "5760 B"]
    assert chosen.budgets == ("1920 B", "640 B", "0.1 bits")


def test_what_does_not_fit_is_left_out_with_a_note() -> None:
    chosen = trial(TASK, ["30 B", "100 kB"])
    assert chosen.notes == (
        "budget '10 B' with feedback auto is left out: an upload takes 21 bytes",
        "budget '30 B' with feedback none is left out: an upload takes 38 bytes",
        "budget '300000 B' is left out: float32 fits into it",
    )
    assert names(chosen.experiment.methods)[1:4] == ["30 B, automatic (cafe(beta=0.95))", "30 B, cafe", "30 B, ef"]


@pytest.mark.parametrize(("feedback", "least"), [("none", 38), ("cafe", 21), ("ef", 26)])
def test_the_smallest_upload_is_what_the_server_says_it_is(feedback: str, least: int) -> None:
    run_one(replace(TASK, rounds=1), setting(feedback, f"{least} B"), 0, lambda progress: None)
    with pytest.raises(BudgetError, match=f"takes {least} bytes"):
        run_one(replace(TASK, rounds=1), setting(feedback, f"{least - 1} B"), 0, lambda progress: None)
    tried = names(trial(TASK, ["30 B"]).experiment.methods)
    assert (f"30 B, {feedback}" in tried) == (least <= 30)


# --- the front --------------------------------------------------------------------------------------------------------

few = st.integers(0, 6).map(float)


@given(st.lists(st.tuples(few, few), max_size=12))
def test_no_point_on_the_front_is_dominated_and_every_other_is(points: list[tuple[float, float]]) -> None:
    def dominates(a: tuple[float, float], b: tuple[float, float]) -> bool:
        return (a[0] <= b[0] and a[1] > b[1]) or (a[0] < b[0] and a[1] >= b[1])

    on = pareto_front(points)
    for index, point in enumerate(points):
        if index in on:
            assert not any(dominates(other, point) for other in points)
        else:
            assert any(dominates(points[other], point) for other in on)


def test_settings_that_never_uploaded_are_not_on_the_front() -> None:
    cheap, silent = setting("ef"), setting("cafe")
    assert front(results(runs(FLOAT32, 4000, 0.8), runs(cheap, 90, 0.7), runs(silent, 0, 0.9))) == (FLOAT32, cheap)


# --- the recommendation -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("automatic", "ef", "expected"),
    [
        ([0.850], [0.855], "auto"),  # half a point: about as good
        ([0.850], [0.856], "ef"),
        ([0.860], [0.850], "auto"),
        ([0.85, 0.85, 0.85], [0.856, 0.856, 0.856], "ef"),  # steadily better
        ([0.85, 0.85, 0.85], [0.872, 0.84, 0.862], "auto"),  # 0.8 points, but with a standard error of 0.9
        ([0.75, 0.85], [0.85, 0.85], "ef"),  # a standard error of 5 points is no excuse for a collapse
    ],
)
def test_the_automatic_choice_is_preferred_if_about_as_good(
    automatic: list[float], ef: list[float], expected: str
) -> None:
    both = summaries(runs(setting("auto"), 600, *automatic), runs(setting("ef"), 600, *ef))
    assert recommend(both).method.feedback == expected


def test_without_an_automatic_setting_the_best_is_recommended() -> None:
    both = summaries(runs(setting("none"), 600, 0.85), runs(setting("ef"), 600, 0.851))
    assert recommend(both).method.feedback == "ef"


@pytest.mark.parametrize(
    "method", trial(TASK, ["640 B", "0.1 bits", "30 s at 2 kbit/s", "1/1000"]).experiment.methods[1:]
)
def test_the_line_builds_this_very_setting(method: Method) -> None:
    (assignment,) = ast.parse(server_line(method)).body
    assert isinstance(assignment, ast.Assign)
    assert isinstance(assignment.value, ast.Call)
    assert ast.unparse(assignment.targets[0]) == ast.unparse(assignment.value.args[0]) == "strategy"
    options = {str(entry.arg): ast.literal_eval(entry.value) for entry in assignment.value.keywords}
    assert Compressed(FedAvg(), **options).strategy is not None
    assert (options["uplink"], options["budget"]) == ("auto", method.budget)
    assert options.get("feedback", "auto") == method.feedback


def test_what_it_costs_is_said() -> None:
    told = results(
        runs(FLOAT32, 4000, 0.90),
        runs(setting("auto"), 10, 0.888),
        runs(setting("ef"), 12, 0.89),
        runs(setting("none"), 9, 0.7),
    )
    (advice,) = advise(told, ["640 B"])
    assert advice.line == 'strategy = Compressed(strategy, uplink="auto", budget="640 B")'
    assert advice.words == (
        "It is 1.2 points below float32, for 1/400 of the bytes.",
        "ef was 0.2 points better, too few to be sure of.",
    )
    assert seeds_in_words(told) == "1 seed: differences below about 1 point are noise, --seeds 3 tells more"
    better = results(runs(FLOAT32, 4000, 0.8, 0.9), runs(setting("ef"), 1000, 0.82, 0.90))
    (advice,) = advise(better, ["640 B"])
    assert advice.line.endswith('budget="640 B", feedback="ef")')
    assert advice.words == ("It is 1.0 point above float32, for 1/4.0 of the bytes.",)
    assert seeds_in_words(better) == "2 seeds: one setting differs by up to ± 7.1 points between them"
    (advice,) = advise(results(runs(FLOAT32, 4000, 0.8), runs(setting("cafe"), 100, 0.82)), ["640 B"])
    assert advice.words[1:] == (
        "Its feedback carries momentum, from which float32 would gain too: compare with FedAvgM.",
    )
    (advice,) = advise(results(runs(FLOAT32, 4000, 0.9), runs(setting("ef"), 100, 0.9)), ["640 B"])
    assert advice.words == ("It is as accurate as float32, for 1/40 of the bytes.",)


@pytest.mark.parametrize(("accuracy", "too_small"), [(0.841, False), (0.84, True), (0.5, True)])
def test_a_budget_that_is_too_small_is_told_with_one_that_would_do(accuracy: float, too_small: bool) -> None:
    other = setting("auto", "1920 B"), setting("auto", "9 kB")
    told = results(
        runs(FLOAT32, 4000, 0.9), runs(setting("ef"), 10, accuracy), runs(other[1], 90, 0.9), runs(other[0], 19, 0.85)
    )
    (advice,) = advise(told, ["640 B"])
    verdict = (
        "640 B is too small for this task, but of the budgets tried 1920 B would do:",
        'strategy = Compressed(strategy, uplink="auto", budget="1920 B")',
    )
    assert advice.words[1:] == (verdict if too_small else ())
    (advice,) = advise(results(runs(FLOAT32, 4000, 0.9), runs(setting("ef"), 10, accuracy)), ["640 B"])
    none = ("640 B is too small for this task, and none of the budgets tried would do: try larger ones.",)
    assert advice.words[1:] == (none if too_small else ())


def test_nothing_is_recommended_if_nothing_arrived() -> None:
    (advice,) = advise(results(runs(FLOAT32, 0, 0.1), runs(setting("ef"), 0, 0.1)), ["640 B"])
    assert (advice.recommended, advice.line) == (None, "")
    assert advice.words == ("No upload arrived, so there is nothing to recommend; see the warnings.",)


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tiny.toml").write_text(TINY)


@pytest.mark.usefixtures("tiny")
def test_the_command_tries_shows_and_recommends(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["advise", "--experiment", "tiny.toml", "--budget", "2 kB", "--json", "advice.json", "--workers", "1"]
    assert main(arguments) == 0
    captured = capsys.readouterr()
    assert "tiny: 50,890 parameters, 3 of 12 clients a round, 2 rounds, 1 seed" in captured.out
    assert "front" in captured.out
    assert "1 seed: differences below about 1 point are noise" in captured.out
    assert "WARNING" not in captured.err
    value = json.loads(Path("advice.json").read_text())
    assert len(value["runs"]) == 7
    assert value["front"]
    (advice,) = value["advice"]
    said = "\n".join(["Recommended for 2 kB:", advice["line"], *advice["words"]])
    assert captured.out.endswith(f"\n{said}\n")
    marked = [line for line in captured.out.splitlines() if re.search(r"\* │$", line)]
    assert len(marked) == len(value["front"])
    assert advice["recommended"] in [run["name"] for run in value["runs"]]


@pytest.mark.usefixtures("tiny")
def test_a_narrow_terminal_has_room(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "PLAIN_WIDTH", 80)
    told = results(runs(FLOAT32, 4000, 0.9), runs(setting("cafe(beta=0.8)"), 100, 0.9))
    commands._show_advice(told, ["640 B"], None)
    sheet, *_ = capsys.readouterr().out.partition("seed:")
    assert max(map(len, sheet.splitlines())) <= 80


@pytest.mark.usefixtures("tiny")
def test_results_that_cannot_be_written_are_shown_and_kept(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(study: Study, workers: int | None) -> Results:
        Path("below").rmdir()
        return results(runs(FLOAT32, 4000, 0.9), runs(setting("ef"), 100, 0.9))

    monkeypatch.setattr(simulating, "run", run)
    Path("below").mkdir()
    assert main(["advise", "--experiment", "tiny.toml", "--budget", "640B", "--json", "below/advice.json"]) == 1
    captured = capsys.readouterr()
    assert "Recommended for 640B:" in captured.out
    rescued = captured.err.rpartition("the results are in ")[2].strip()
    assert json.loads(Path(rescued).read_text())["experiment"] == "task"


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "Missing option '--budget'"),
        (["--budget", "much"], "budget 'much': cannot be read; write for example"),
        (["--budget", "640 B | 5: 2 kB"], "cannot be read"),
        (
            ["--budget", "18 B"],
            "budget '18 B' is 18 bytes for this model, whose smallest upload takes 21 bytes; give at",
        ),
        (["--budget", "640 B", "--budget", "0.1 B"], "smallest upload takes 21 bytes"),
        (["--budget", "1 MB"], "budget '1 MB': float32 fits into it, with 203560 bytes; nothing to compress"),
        (["--budget", "640 B", "--experiment", "cifar"], "unknown experiment 'cifar': no such file, and shipped are"),
        (["--budget", "640 B", "--rounds", "0"], "rounds: expected at least 1, got 0"),
        (["--budget", "640 B", "--seeds", "x"], "--seeds: expected a count"),
        (["--budget", "640 B", "--workers", "0"], "--workers: expected at least 1, got 0"),
        (["--budget", "640 B", "--json", "missing/advice.json"], "--json: cannot write missing/advice.json: No such"),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulating, "run", lambda *given: pytest.fail("the mistake should have been found before"))
    assert main(["advise", "--experiment", "tiny.toml", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("fedcomp: ")
    assert captured.err.count("\n") == 1
    assert expected in captured.err


def test_float32_that_fits_is_a_mistake_only_if_asked_for() -> None:
    with pytest.raises(ConfigError, match="nothing to compress"):
        trial(TASK, ["203560 B"])
    assert "203559 B, ef" in names(trial(TASK, ["203559 B"]).experiment.methods)
