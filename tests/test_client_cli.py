"""The command line of a device: what it checks, what it trains, and how it explains mistakes."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import bundles
import numpy as np
import onnx
import pytest
from bundles import CLASSES, INPUTS

from fedcomp_clients import OnnxTrainer, read_bundle
from fedcomp_clients.bundle import EVAL, MANIFEST, TRAIN
from fedcomp_clients.cli import main
from fedcomp_clients.doctor import NEEDED, SAMPLE, Finding, examine


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A bundle, and data to train and test it with."""
    bundles.mlp(tmp_path / "bundle")
    x = np.random.default_rng(0).standard_normal((300, INPUTS)).astype(np.float32)
    for name, part in (("", slice(0, 200)), ("test-", slice(200, None))):
        np.save(tmp_path / f"{name}x.npy", x[part])
        np.save(tmp_path / f"{name}y.npy", x[part, :CLASSES].argmax(axis=1))
    return tmp_path


def run(files: Path, *more: str, x: str = "x.npy", y: str = "y.npy") -> int:
    return main(["run", str(files / "bundle"), "--x", str(files / x), "--y", str(files / y), *more])


def test_a_bundle_is_trained_on_local_files(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    test = ["--test-x", str(files / "test-x.npy"), "--test-y", str(files / "test-y.npy")]
    out = files / "params.npz"
    assert run(files, "--epochs", "20", "--batch-size", "20", "--lr", "0.05", *test, "--out", str(out)) == 0
    told = capsys.readouterr()
    lines = told.out.splitlines()
    assert not told.err
    assert len(lines) == 22
    assert lines[0].startswith("epoch 1: loss ")
    assert "200 samples in 10 steps" in lines[0]
    accuracy = float(lines[20].partition("accuracy ")[2].partition("%")[0])
    assert lines[20].startswith("test: loss ")
    assert accuracy > 90
    trainer = OnnxTrainer(files / "bundle")
    trainer.load(out)
    evaluation = trainer.evaluate(np.load(files / "test-x.npy"), np.load(files / "test-y.npy"))
    assert evaluation.accuracy == pytest.approx(accuracy / 100, abs=1e-4)
    assert trainer.get_parameters()["steps"] == 200
    again = files / "again.npz"
    assert run(files, "--start", str(out), "--lr", "0", "--out", str(again)) == 0
    with np.load(out) as first, np.load(again) as second:
        assert np.array_equal(first["w1"], second["w1"])


def mistake(code: int, capsys: pytest.CaptureFixture[str]) -> str:
    """What one line says about a mistake."""
    told = capsys.readouterr()
    assert code == 2
    assert told.err.count("\n") == 1
    assert told.err.startswith("fedcomp-client")
    return told.err


MISTAKES: dict[str, tuple[list[str], str]] = {
    "no epochs": (["--epochs", "0"], "--epochs: expected at least 1"),
    "batch size": (["--batch-size", "-3"], "batch_size: expected a whole number of at least 1, got -3"),
    "learning rate": (["--lr", "nan"], "lr: expected a number"),
    "text": (["--lr", "fast"], "argument --lr: invalid float value"),
    "seed": (["--seed", "-1"], "--seed: expected a whole number"),
    "threads": (["--threads", "0"], "threads: expected a whole number from 1"),
    "single": (["--single", "drop"], "single: expected one of 'merge'"),
    "only half of a test": (["--test-x", "x.npy"], "--test-x and --test-y belong together"),
    "no place": (["--out", "/nowhere/params.npz"], "--out: there is no folder /nowhere"),
    "no start": (["--start", "/nowhere.npz"], "/nowhere.npz holds no saved model"),
    "diverging": (["--lr", "1e9", "--epochs", "60"], "training diverged"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_one_line(name: str, files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, reason = MISTAKES[name]
    if name == "diverging":
        np.save(files / "x.npy", np.load(files / "x.npy") * np.float32(1e15))
    assert reason in mistake(run(files, *arguments), capsys)


def test_data_that_are_not_there_or_do_not_fit(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "cannot be read as a .npy file" in mistake(run(files, x="nowhere.npy"), capsys)
    assert "x: expected the shape (samples, 6), got (200,)" in mistake(run(files, x="y.npy"), capsys)
    assert "y: expected the shape (samples), got (200, 6)" in mistake(run(files, y="x.npy"), capsys)
    np.savez(files / "x.npz", np.zeros(3))
    assert "is an archive of arrays" in mistake(run(files, x="x.npz"), capsys)
    np.save(files / "objects.npy", np.array([None]))
    assert "cannot be read as a .npy file" in mistake(run(files, x="objects.npy"), capsys)
    np.save(files / "large.npy", np.load(files / "y.npy") + 7)
    assert "expected labels from 0 to 2" in mistake(run(files, y="large.npy"), capsys)
    assert "got 200 in x and 100 in y" in mistake(run(files, y="test-y.npy"), capsys)


def test_a_bundle_that_is_not_sound(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = files / "bundle" / MANIFEST
    told = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**told, "version": 9}))
    assert "version 9 is newer" in mistake(run(files), capsys)
    manifest.unlink()
    assert "manifest.json is missing" in mistake(run(files), capsys)


def test_a_full_disk_is_one_line_and_leaves_the_old_file(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = files / "params.npz"
    assert run(files, "--out", str(out)) == 0
    before = out.read_bytes()
    capsys.readouterr()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, hard))  # like a full disk: writing fails after 500 bytes
    try:
        code = run(files, "--out", str(out))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "cannot be saved" in mistake(code, capsys)
    assert out.read_bytes() == before


def test_help_and_no_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "doctor" in capsys.readouterr().out
    assert "arguments are required" in mistake(main([]), capsys)
    assert "invalid choice" in mistake(main(["walk"]), capsys)


def test_the_doctor_finds_this_machine_ready(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--state-dir", str(tmp_path / "state")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "this device is ready"
    assert all(line.startswith("ok  ") for line in lines[:-1])
    names = [line[6:19].strip() for line in lines[:-1]]
    assert names == ["Python", "machine", "fedcomp", "numpy", "flwr", "onnxruntime", "memory", "state", "training step",
                     "gradients", "encode"]  # fmt: skip
    assert "for 32 samples, a sample model of 4,876 values" in lines[8]
    assert not list((tmp_path / "state").iterdir())


def test_the_doctor_times_a_given_bundle(files: Path) -> None:
    findings = {finding.name: finding for finding in examine(files / "bundle", files / "state")}
    assert all(finding.ok for finding in findings.values())
    assert "of 61 values" in findings["training step"].found
    random = bundles.mlp(files / "random", dropout=True)
    findings = {finding.name: finding for finding in examine(random, files / "state")}
    assert "not compared" in findings["gradients"].found
    linear = bundles.linear(files / "linear")
    assert all(finding.ok for finding in examine(linear, files / "state"))


def test_the_doctor_says_what_is_wrong_and_what_to_do(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (files / "bundle" / TRAIN).unlink()
    (files / "file").write_text("")
    assert main(["doctor", "--bundle", str(files / "bundle"), "--state-dir", str(files / "file" / "state")]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "4 of 11 checks failed"
    assert "FAIL  state" in lines[7]
    assert "set FEDCOMP_STATE_DIR" in lines[7]
    assert "train.onnx is missing" in lines[8]


def test_the_doctor_knows_versions_that_are_too_old(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(NEEDED, "onnxruntime", ("onnxruntime", (99, 0)))
    monkeypatch.setitem(NEEDED, "flwr", ("flwr.nowhere", (1, 42)))
    findings = {finding.name: finding for finding in examine(None, tmp_path)}
    assert "version 99.0 or later is needed" in findings["onnxruntime"].line()
    assert "cannot be imported (ModuleNotFoundError" in findings["flwr"].line()
    assert {name for name, finding in findings.items() if not finding.ok} == {"onnxruntime", "flwr"}


def test_the_doctor_finds_gradients_that_optimizations_spoil(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the optimizers that are switched off; fails once onnxruntime is mended, and then they need not be."""
    bundle = bundles.linear(tmp_path / "linear")
    monkeypatch.setattr("fedcomp_clients.onnx_session.WRONG_OPTIMIZERS", [])
    findings = {finding.name: finding for finding in examine(bundle, tmp_path / "state")}
    assert not findings["gradients"].ok
    assert "use another version of onnxruntime" in findings["gradients"].line()


@pytest.mark.parametrize("name", ["flwr", "onnxruntime"])
def test_packages_that_are_missing(name: str, files: Path) -> None:
    def called(*arguments: str) -> "subprocess.CompletedProcess[str]":
        code = f"import sys; sys.modules[{name!r}] = None; from fedcomp_clients.cli import main; sys.exit(main())"
        environment = {**os.environ, "FEDCOMP_STATE_DIR": str(files / "state")}
        return subprocess.run(
            [sys.executable, "-c", code, *arguments], env=environment, capture_output=True, text=True, check=False
        )

    done = called("doctor")
    assert done.returncode == 1
    assert not done.stderr
    assert f"FAIL  {name}" in done.stdout
    assert 'run: pip install -U "fedcomp[client]"' in done.stdout
    done = called("run", str(files / "bundle"), "--x", str(files / "x.npy"), "--y", str(files / "y.npy"))
    if name == "onnxruntime":
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)
        assert "onnxruntime is not installed" in done.stderr
    else:  # training needs no Flower
        assert (done.returncode, done.stderr) == (0, "")


def test_the_command_line_starts_quickly() -> None:
    code = "import sys, fedcomp_clients.cli; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert not {"flwr", "onnxruntime", "torch", "numpy", "typer", "rich"} & set(loaded)


def test_the_sample_bundle_is_what_the_tests_make(tmp_path: Path) -> None:
    made = bundles.mlp(tmp_path / "made", sizes=(64, 64, 10))
    ours, theirs = read_bundle(SAMPLE), read_bundle(made)
    assert ours.manifest.tensors == theirs.manifest.tensors
    assert all(np.array_equal(ours.initial[name], theirs.initial[name]) for name in theirs.initial)
    for name in (TRAIN, EVAL):
        nodes: list[Any] = [list(onnx.load(folder / name).graph.node) for folder in (SAMPLE, made)]
        assert nodes[0] == nodes[1]
    assert Finding(False, "a", "b", "c").line() == "FAIL  a             b; c"
