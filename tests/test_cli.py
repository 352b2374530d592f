"""The command line: what it prints, what it writes, and how it answers to mistakes."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
from report_data import SIGN, bare, make_results, make_run
from rich.console import Console

import fedcomp
from fedcomp import Plan, Sign, compress
from fedcomp_simulations import saving, simulating
from fedcomp_simulations.cli import main
from fedcomp_simulations.results import Results
from fedcomp_simulations.study import Study
from fedcomp_simulations.sweep import run_experiment

TINY = """
dataset = "mnist"
model = "mlp"
clients = 12
clients_per_round = 3
rounds = 2
seeds = [0]
[[methods]]
name = "plain"
codec = "float32"
[[methods]]
name = "sign + EF"
codec = "sign"
feedback = "ef"
"""


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tiny.toml").write_text(TINY)


@pytest.fixture
def never_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(study: Study, workers: int | None, **options: object) -> Results:
        pytest.fail("the mistake should have been found before the run")

    monkeypatch.setattr(simulating, "run", run)


def mistake(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run a command line that must fail with one line on stderr, and return the line."""
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("fedcomp: ")
    assert captured.err.count("\n") == 1
    return captured.err


def test_simulate_writes_results_and_shows_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "tiny.toml", "--json", "copy.json", "--workers", "1"]) == 0
    captured = capsys.readouterr()
    assert "tiny: 50,890 parameters, 3 of 12 clients a round, 2 rounds, 1 seed" in captured.out
    assert "sign + EF" in captured.out
    assert str(Path("results", "tiny", "accuracy.png")) in captured.out
    assert "round 2/2" in captured.err
    assert "INFO" not in captured.err
    assert Path("results", "tiny", "accuracy.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    copy = json.loads(Path("copy.json").read_text())
    check_contract(copy)
    kept = json.loads(Path("results", "tiny", "results.json").read_text())
    for run in copy["runs"]:
        del run["seconds"]
    assert kept == copy


def check_contract(value: dict[str, object]) -> None:
    """Keys and types that others read; there may be more of them."""
    types = {"experiment": str, "parameters": int, "clients": int, "clients_per_round": int, "runs": list}
    assert {key: type(value[key]) for key in types} == types
    run_types = {
        "name": str,
        "codec": str,
        "feedback": str,
        "seed": int,
        "rounds": int,
        "accuracy_final": float,
        "accuracy_curve": list,
        "payload_bytes_up": int,
        "payload_bytes_down": int,
        "payload_per_upload": float,
        "seconds": float,
    }
    runs = value["runs"]
    assert isinstance(runs, list)
    assert [run["name"] for run in runs] == ["plain", "sign + EF"]
    for run in runs:
        assert {key: type(run[key]) for key in run_types} == run_types
        curve = run["accuracy_curve"]
        assert [[type(entry) for entry in point] for point in curve] == [[int, int, float]] * 2
        assert [point[0] for point in curve] == [1, 2]
        assert 0 < curve[0][1] < curve[1][1] == run["payload_bytes_up"]
        assert run["payload_per_upload"] == run["payload_bytes_up"] / 6
        assert run["accuracy_final"] == pytest.approx((curve[0][2] + curve[1][2]) / 2)


def test_options_change_the_experiment(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Study, int | None]] = []

    def run(study: Study, workers: int | None, **options: object) -> Results:
        seen.append((study, workers))
        raise KeyboardInterrupt

    monkeypatch.setattr(simulating, "run", run)
    arguments = "simulate tiny.toml --rounds 7 --seeds 0,4,7 --codec sign+ef --codec int8 --workers 3 --out there"
    assert main(arguments.split()) == 130
    assert main(["simulate", "mnist-cnn", "--seeds", "2"]) == 130
    assert main(["simulate", "tiny.toml", "--seeds", "7,"]) == 130  # as a report says of a single seed other than 0
    (one, workers), (other, none), (single, _) = seen
    assert single.points[0].experiment.seeds == (7,)
    first, second = one.points[0].experiment, other.points[0].experiment
    assert (first.name, first.rounds, first.seeds, workers) == ("tiny", 7, (0, 4, 7), 3)
    methods = [(method.name, method.codec, method.feedback) for method in first.methods]
    assert methods == [("float32", "float32", "none"), ("sign+ef", "sign", "ef"), ("int8", "int8", "none")]
    assert (second.name, second.seeds, none) == ("mnist-cnn", (0, 1), None)
    assert Path("there").is_dir()
    assert Path("results", "mnist-cnn").is_dir()


@pytest.mark.usefixtures("never_run")
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ["simulate", "cifar"],
            "unknown experiment 'cifar': no such file, and shipped are budgets-fashion-cnn, "
            "budgets-fashion-skewed, budgets-imu-cnn, budgets-mnist-cnn, budgets-mnist-mlp, "
            "budgets-shakespeare-gru, mnist-cnn, mnist-feedback, mnist-mlp, shakespeare-transformer, spoken-cnn",
        ),
        (["simulate", "--codec", "zip"], "unknown codec 'zip'; known: "),
        (["simulate", "--codec", "sign("], "codec 'sign(': cannot be read"),
        (["simulate", "--rounds", "0"], "rounds: expected at least 1, got 0"),
        (["simulate", "--rounds", "many"], "'many' is not a valid integer"),
        (["simulate", "--seeds", "x"], "--seeds: expected a count such as"),
        (["simulate", "--seeds", ","], "--seeds: expected a count such as"),
        (["simulate", "--seeds", "1,,2"], "--seeds: expected a count such as"),
        (["simulate", "--seeds", "0"], "seeds: expected one or more numbers from 0 on"),
        (["simulate", "--seeds", "1,1"], "seeds: 1 is there twice"),
        (["simulate", "--workers", "0"], "--workers: expected at least 1, got 0"),
        (["simulate", "bad.toml"], "bad.toml: unknown key 'clint'; available: dataset, "),
        (["simulate", "--out", "tiny.toml"], "--out: cannot write into tiny.toml"),
        (["simulate", "--out", "tiny.toml/below"], "--out: cannot write into tiny.toml/below"),
        (["simulate", "--out", "odd"], "--out: cannot write odd/accuracy.png: Is a directory"),
        (["simulate", "--json", "missing/results.json"], "--json: cannot write missing/results.json: No such file"),
        (["simulate", "--json", "."], "--json: cannot write .: Is a directory"),
        (["simulate", "--bits", "3"], "No such option"),
        (["train"], "No such command 'train'"),
        (["inspect"], "Missing argument 'FRAME'"),
        (["inspect", "nothing"], "cannot read nothing: No such file"),
        (["inspect", "tiny.toml"], "not a fedcomp frame"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("bad.toml").write_text(TINY.replace("clients =", "clint =", 1))
    Path("odd", "accuracy.png").mkdir(parents=True)
    assert expected in mistake(capsys, *arguments)


@pytest.mark.usefixtures("never_run")
def test_probing_leaves_existing_files_alone(capsys: pytest.CaptureFixture[str]) -> None:
    Path("old.json").write_text("precious")
    mistake(capsys, "simulate", "--json", "old.json", "--out", "tiny.toml")
    mistake(capsys, "simulate", "--json", "new.json", "--out", "tiny.toml")
    assert Path("old.json").read_text() == "precious"
    assert not Path("new.json").exists()


def test_results_that_cannot_be_written_in_the_end_are_an_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(study: Study, workers: int | None, **options: object) -> Results:
        Path("results", "tiny").rmdir()
        return run_experiment(study.points[0].experiment)

    monkeypatch.setattr(simulating, "run", run)
    assert main(["simulate", "tiny.toml", "--rounds", "1"]) == 1
    errors = capsys.readouterr().err
    assert "No such file or directory" in errors
    rescued = Path(errors.rpartition(" ")[2].strip())
    assert len(json.loads(rescued.read_text())["runs"]) == 2


def test_the_report_is_there_even_if_the_table_cannot_be_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*objects: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(simulating, "run", lambda *given, **options: make_results(bare(make_run(SIGN))))
    monkeypatch.setattr(Console, "print", full)
    assert main(["simulate", "tiny.toml", "--out", "there"]) == 1
    assert Path("there", "report.html").is_file()
    assert Path("there", "accuracy.png").is_file()


def test_where_nothing_can_be_written_the_table_is_shown_and_the_file_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, text: str) -> None:
        path.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(simulating, "run", lambda *given, **options: make_results(bare(make_run(SIGN))))
    monkeypatch.setattr(saving, "write_text", full)
    monkeypatch.setattr(tempfile, "tempdir", str(Path.cwd()))
    assert main(["simulate", "tiny.toml", "--out", "there"]) == 1
    shown = capsys.readouterr()
    assert "sign + EF" in shown.out
    assert shown.err == (
        "fedcomp: cannot write there/results.json: No space left on device; "
        "nor can the results be put where temporary files go: No space left on device\n"
    )
    assert not list(Path().glob("fedcomp-*"))


def test_a_picture_that_cannot_be_written_is_named_and_the_report_is_there(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(results: Results, path: Path) -> None:
        raise OSError(27, "File too large")

    monkeypatch.setattr(simulating, "run", lambda *given, **options: make_results(bare(make_run(SIGN))))
    monkeypatch.setattr(simulating, "save_plot", full)
    assert main(["simulate", "tiny.toml", "--out", "there"]) == 1
    shown = capsys.readouterr()
    assert shown.err == "fedcomp: cannot write there/accuracy.png: File too large\n"
    assert shown.out.endswith("report: there/report.html\nresults: there/results.json\n")
    assert Path("there", "report.html").is_file()


def test_warnings_are_shown_but_not_all_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    simulating.warn([f"round {number}: node 7:\n no sensor" for number in range(30)])
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "fedcomp: warning: round 0: node 7: no sensor"
    assert lines[10:] == ["fedcomp: and 20 more warnings"]


def test_codecs_lists_every_codec_on_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["codecs"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name, kind in fedcomp.registered().items():
        (line,) = [line for line in lines if line.startswith(f"{name}(")]
        assert (kind.__doc__ or "").strip().partition("\n")[0] in line
    assert any(line.startswith("float32 ") for line in lines)


def test_inspect_describes_a_frame(capsys: pytest.CaptureFixture[str]) -> None:
    base = {"w": np.zeros((8, 8), np.float32)}
    update = compress(base, {"w": np.ones((8, 8), np.float32)}, Plan(Sign()), round=3, rng=np.random.default_rng(0))
    Path("frame.bin").write_bytes(update.frame)
    assert main(["inspect", "frame.bin"]) == 0
    assert json.loads(capsys.readouterr().out) == fedcomp.wire.inspect(update.frame)


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"fedcomp {fedcomp.__version__}\n"
    assert main([]) == 0
    assert main(["--help"]) == 0
    assert "simulate" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("module", "command"),
    [
        ("typer", "codecs"),
        ("rich", "codecs"),
        ("torch", "simulate tiny.toml"),
        ("flwr", "simulate tiny.toml"),
        ("matplotlib", "simulate tiny.toml"),
    ],
)
def test_a_missing_extra_is_named(module: str, command: str) -> None:
    done = python(f"import sys; sys.modules[{module!r}] = None", command)
    assert done.returncode == 2
    assert done.stderr == f'fedcomp: {module} is not installed; run: pip install "fedcomp[simulation]"\n'


def test_listing_codecs_needs_no_heavy_imports() -> None:
    heavy = "{'torch', 'flwr', 'matplotlib', 'ray', 'fedcomp_clients', 'fedcomp_strategies'}"
    check = f"import atexit, sys; atexit.register(lambda: print({heavy} & set(sys.modules)))"
    assert python(check, "codecs").stdout.splitlines()[-1] == "set()"


def test_ctrl_c_ends_everything_quietly() -> None:
    arguments = [sys.executable, "-m", "fedcomp_simulations.cli", "simulate", "tiny.toml", "--rounds", "100000"]
    process = subprocess.Popen(
        arguments,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a suite run in the background ignores it
    )
    assert process.stderr is not None
    assert "round 20/100000" in process.stderr.readline()
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the workers too
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert [line for line in errors.splitlines() if " round " not in line] == []
    assert group_is_gone(process.pid)


def test_workers_end_when_the_parent_is_killed() -> None:
    arguments = [sys.executable, "-m", "fedcomp_simulations.cli", "simulate", "tiny.toml", "--rounds", "100000"]
    process = subprocess.Popen(arguments, env=environment(), stderr=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stderr is not None
    assert "round 20/100000" in process.stderr.readline()
    process.kill()
    process.wait(timeout=30)
    process.stderr.close()
    assert group_is_gone(process.pid)


def group_is_gone(group: int) -> bool:
    """Wait until no process of the group is left."""
    for _ in range(100):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False


def python(preparation: str, command: str) -> subprocess.CompletedProcess[str]:
    """Run a command line in a process of its own, after some preparation."""
    code = f"{preparation}\nimport sys\nfrom fedcomp_simulations.cli import main\nsys.exit(main({command.split()}))"
    arguments = [sys.executable, "-c", code]
    return subprocess.run(arguments, env=environment(), capture_output=True, text=True, timeout=60)


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
