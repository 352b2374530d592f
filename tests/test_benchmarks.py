"""The published tables: their experiments can be read, and what `benchmarks/run.py` makes of results."""

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType

import pytest

from fedcomp_simulations.config import to_config
from fedcomp_simulations.experiment import Experiment, Method
from fedcomp_simulations.results import ByRound, Results, RunResult, Task
from fedcomp_simulations.study import load_experiment

FOLDER = Path(__file__).parent.parent / "benchmarks"
NAMES = ("fashion-cnn", "fedvqcs", "imu-cnn", "mnist-cnn", "mnist-mlp", "shakespeare-gru")
PLAIN = Method("float32", "float32")
SIGN = Method("1 bit, sign + EF", "sign", "ef")
VERSIONS = {"fedcomp": "0.1", "python": "3.11.7", "numpy": "2.4", "torch": "2.13", "flwr": "1.42", "platform": "Linux"}


@pytest.fixture(scope="module")
def run() -> ModuleType:
    spec = importlib.util.spec_from_file_location("benchmarks_run", FOLDER / "run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def result(method: Method, seed: int, accuracies: list[float], nbytes: int) -> RunResult:
    """A run that evaluates every round, with two uploads of nbytes in each."""
    rounds = len(accuracies)
    return RunResult(
        method=method,
        seed=seed,
        rounds=rounds,
        accuracy_curve=tuple((n, 2 * n * nbytes, value) for n, value in enumerate(accuracies, 1)),
        payload_bytes_up=2 * rounds * nbytes,
        payload_bytes_down=10_000 * rounds,
        messages=2 * rounds,
        uploads=2 * rounds,
        failures=0,
        seconds=1.0,
        last=2,
        by_round=ByRound(),
    )


def results() -> Results:
    runs = [
        result(PLAIN, 0, [0.5, 0.7, 0.8, 0.8], 4000),
        result(PLAIN, 1, [0.6, 0.8, 0.9, 0.9], 4000),
        result(SIGN, 0, [0.7, 0.81, 0.82, 0.78], 100),
        result(SIGN, 1, [0.7, 0.81, 0.82, 0.88], 100),
    ]
    settings = to_config(Experiment("small", "mnist", "mlp", (PLAIN, SIGN)), skip=("name", "methods"))
    task = Task("", 1000, 10, 2, {}, settings)
    return Results.of("small", [task], runs, "inprocess", VERSIONS)


@pytest.mark.parametrize("name", NAMES)
def test_every_experiment_compares_with_float32_at_the_budgets_that_its_methods_name(name: str) -> None:
    experiment = load_experiment(str(FOLDER / f"{name}.toml"))
    plain, momentum = experiment.methods[:2]
    assert plain.uncompressed
    assert momentum.codec == "float32"
    assert momentum.strategy == "fedavgm"
    budgets = {method.budget for method in experiment.methods if method.budget}
    assert len(budgets) == (1 if name == "fedvqcs" else 4)
    for method in experiment.methods:  # each is in the row of a budget, and `auto` keeps to the one it names
        if method.codec == "float32":
            continue
        match = re.match(r"[\d,]+ B", method.name)
        assert match is not None, method.name
        assert match[0].replace(",", "") in budgets
        assert method.budget in ("", match[0].replace(",", ""))
    assert experiment.seeds == (0, 1, 2)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "fedvqcs"])
def test_the_task_is_that_of_the_shipped_experiment(name: str) -> None:
    task, shipped = (
        to_config(load_experiment(which), skip=("name", "methods", "evaluate_every"))
        for which in (str(FOLDER / f"{name}.toml"), f"budgets-{name}")
    )
    assert task == shipped


def test_there_is_no_other_experiment(run: ModuleType) -> None:
    assert tuple(run.available()) == NAMES


def test_the_table_compares_with_float32_of_the_same_seeds(run: ModuleType) -> None:
    _, _, plain, sign = run.table(results())
    assert plain == "| float32 | 85.0 ± 7.1 |  | 100.0 % | 4,000 | 1 | 5,000 | 32 kB |"
    assert sign == "| 1 bit, sign + EF | 82.5 ± 3.5 | -2.5 (-5.0, +0.0) | 97.1 % | 100 | 40 | 5,000 | 800 B |"


def test_a_target_counts_once_three_evaluations_are_there_on_average(run: ModuleType) -> None:
    runs = [result(SIGN, 0, [0.9, 0.3, 0.5, 0.6, 0.7, 0.8], 10)]
    assert run.until(runs, 0.55) == 2 * 10 * 3
    assert run.until(runs, 0.6) == 2 * 10 * 5
    assert run.until(runs, 0.71) is None
    assert run.until(runs, None) is None


def test_tables_are_written_with_what_repeats_them(
    run: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "runs" / "mnist-mlp").mkdir(parents=True)
    (tmp_path / "runs" / "mnist-mlp" / "results.json").write_text(json.dumps(results().to_json()))
    command = ["mnist-mlp", "--tables-only", "--out", str(tmp_path / "runs"), "--results", str(tmp_path / "tables")]
    assert run.main(command) == 0
    text = (tmp_path / "tables" / "mnist-mlp.md").read_text()
    for part in ("`python benchmarks/run.py mnist-mlp`", "Seeds: 0, 1", "torch 2.13", "1,000 parameters", "alpha 0.3"):
        assert part in text
    kept = json.loads((tmp_path / "tables" / "mnist-mlp.json").read_text())
    assert kept["runs"][2] == {
        "method": "1 bit, sign + EF", "seed": 0, "accuracy_final": 0.8, "payload_bytes_up": 800,
        "payload_bytes_down": 40_000, "uploads": 8, "failures": 0,
    }  # fmt: skip

    (tmp_path / "tables" / "mnist-mlp.json").write_text(json.dumps(kept | {"machine": "where it ran"}))
    assert run.main(command) == 0
    assert "Machine: where it ran" in (tmp_path / "tables" / "mnist-mlp.md").read_text()
    assert capsys.readouterr().err == ""


def test_mistakes_are_told_in_a_line(run: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["mnist-mlp", "--tables-only", "--out", str(tmp_path)]) == 2
    assert "cannot read" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        run.main(["mnist"])
    assert "unknown experiment 'mnist'; available: fashion-cnn" in capsys.readouterr().err
