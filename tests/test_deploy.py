"""Models for devices: small, as accurate as the trained one, and refused where something does not fit."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from digits_bundle import Model, trained, write_digits_bundle

from fedcomp import FedcompError
from fedcomp.errors import BundleError, DataError, LayoutError, NonFiniteError
from fedcomp_clients.bundle import EVAL, Bundle, read_bundle, write_manifest
from fedcomp_clients.deploy import DYNAMIC, FLOAT32, STATIC, Report, deploy, quantized
from fedcomp_clients.deploy.measure import open_model, outputs, score
from fedcomp_simulations.cli import main
from fedcomp_simulations.datasets import load
from fedcomp_simulations.models import build

CALIBRATION = 320


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return write_digits_bundle(tmp_path_factory.mktemp("deploy") / "bundle")


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield trained(steps=120)
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def report(bundle: Bundle, model: Model, tmp_path_factory: pytest.TempPathFactory) -> Report:
    digits = load("mnist")
    return deploy(
        bundle,
        model,
        tmp_path_factory.mktemp("deploy") / "out",
        calibration=digits.train_x[:CALIBRATION],
        test=(digits.test_x, digits.test_y),
    )


def test_int8_is_as_accurate_in_a_third_of_the_bytes(report: Report) -> None:
    scores = {row.file: row.score or 0 for row in report.rows}
    assert list(scores) == [FLOAT32, DYNAMIC, STATIC]
    assert scores[FLOAT32] > 0.8
    for name in (DYNAMIC, STATIC):
        assert scores[name] == pytest.approx(scores[FLOAT32], abs=0.01)
        assert report[name].bytes == (report.folder / name).stat().st_size <= 0.33 * report[FLOAT32].bytes
    assert all(ms > 0 for row in report.rows for ms in row.latency_ms.values())


def test_the_float32_model_says_what_torch_says(report: Report, model: Model) -> None:
    x = load("mnist").test_x[:70].copy()
    with torch.no_grad():
        expected = build("cnn", model)(torch.from_numpy(x)).numpy()
    for rows in (1, 70):
        found = outputs(open_model(report.folder / FLOAT32, 1), x[:rows])
        np.testing.assert_allclose(found, expected[:rows], rtol=1e-5, atol=1e-5)


def test_a_model_is_a_plain_graph_from_x_to_output(report: Report) -> None:
    for row in report.rows:
        graph = onnx.load(report.folder / row.file).graph
        assert [each.name for each in graph.input] == ["x"]
        assert [each.name for each in graph.output] == ["output"]
    plain = onnx.load(report.folder / FLOAT32)
    onnx.checker.check_model(plain, full_check=True)
    assert {node.domain for node in plain.graph.node} == {""}
    assert not {"Transpose", "ArgMax", "SoftmaxCrossEntropyLoss"} & {node.op_type for node in plain.graph.node}
    quantised = onnx.load(report.folder / STATIC).graph
    big = [tensor for tensor in quantised.initializer if np.prod(tensor.dims) > 1000]
    assert {tensor.data_type for tensor in big} == {onnx.TensorProto.INT8}


def test_without_calibration_there_is_no_static_model(bundle: Bundle, model: Model, tmp_path: Path) -> None:
    report = deploy(bundle.folder, list(model.values()), tmp_path)  # in the manifest's order
    assert [row.file for row in report.rows] == sorted([path.name for path in tmp_path.iterdir()], reverse=True)
    assert STATIC not in str(report).partition("note: ")[0]
    (note,) = report.notes
    assert note.startswith(f"{STATIC} left out: it needs inputs to calibrate with")
    assert all(row.score is None for row in report.rows)


def test_counters_that_an_average_made_floats_of_are_no_obstacle(bundle: Bundle, model: Model, tmp_path: Path) -> None:
    wide = {name: value.astype(np.float64) for name, value in model.items()}
    assert deploy(bundle, wide, tmp_path)[FLOAT32].bytes > 0


def change(model: Model, **changed: Any) -> Model:
    return {name: changed.get(name.replace(".", "_"), value) for name, value in model.items()}


def test_what_does_not_fit_is_refused_and_nothing_written(bundle: Bundle, model: Model, tmp_path: Path) -> None:
    digits = load("mnist")
    missing = {name: value for name, value in model.items() if name != "conv1.bias"}
    cases: list[tuple[Any, dict[str, Any], type[FedcompError], str]] = [
        (missing, {}, LayoutError, r"missing .*\['conv1.bias'\]"),
        (model | {"new": model["conv1.bias"]}, {}, LayoutError, r"unexpected .*\['new'\]"),
        ([model["conv1.bias"]], {}, LayoutError, "expected 8 tensors .*, got 1"),
        (change(model, conv1_bias=np.zeros(9, np.float32)), {}, LayoutError, r"'conv1.bias' .*expected \(8,\)"),
        (change(model, conv1_bias=np.full(8, np.nan, np.float32)), {}, NonFiniteError, "'conv1.bias'"),
        (model, {"calibration": digits.train_x[:5, :-1]}, DataError, r"calibration x: .*784"),
        (model, {"calibration": digits.train_x[:0]}, DataError, "at least one sample"),
        (model, {"test": (digits.test_x, digits.test_y[:-1])}, DataError, "as many x as y"),
        (model, {"test": (digits.test_x, digits.test_y[:, None])}, DataError, "expected labels"),
    ]
    for parameters, options, error, said in cases:
        with pytest.raises(error, match=said):
            deploy(bundle, parameters, tmp_path / "out", **options)
        assert not list((tmp_path / "out").glob("*"))


def test_a_graph_whose_output_needs_labels_is_no_model(tmp_path: Path, model: Model) -> None:
    bundle = write_digits_bundle(tmp_path / "bundle")
    graph = onnx.load(bundle.folder / EVAL)
    (last,) = (node for node in graph.graph.node if "output" in node.output)
    last.output[0] = "scores"
    graph.graph.node.append(onnx.helper.make_node("Cast", ["y"], ["labels"], to=onnx.TensorProto.FLOAT))
    graph.graph.node.append(onnx.helper.make_node("Unsqueeze", ["labels", "axis"], ["column"]))
    graph.graph.initializer.append(onnx.helper.make_tensor("axis", onnx.TensorProto.INT64, [1], [1]))
    graph.graph.node.append(onnx.helper.make_node("Add", ["scores", "column"], ["output"]))
    onnx.save(graph, bundle.folder / EVAL)
    write_manifest(bundle.folder, bundle.manifest)
    with pytest.raises(BundleError, match=r"got \['y'\]"):
        deploy(read_bundle(bundle.folder), model, tmp_path / "out")


def test_a_batch_size_that_is_read_off_the_labels_is_read_off_the_inputs(tmp_path: Path, model: Model) -> None:
    bundle = write_digits_bundle(tmp_path / "bundle")
    graph = onnx.load(bundle.folder / EVAL)
    (flat,) = (node for node in graph.graph.node if node.op_type == "Flatten")
    at = list(graph.graph.node).index(flat)
    made = [
        onnx.helper.make_node("Shape", ["y"], ["samples"], start=0, end=1),
        onnx.helper.make_node("Concat", ["samples", "features"], ["flat"], axis=0),
        onnx.helper.make_node("Reshape", ["f", "flat"], ["g"]),
    ]
    graph.graph.initializer.append(onnx.helper.make_tensor("features", onnx.TensorProto.INT64, [1], [784]))
    graph.graph.node.remove(flat)
    for node in reversed(made):
        graph.graph.node.insert(at, node)
    onnx.save(graph, bundle.folder / EVAL)
    write_manifest(bundle.folder, bundle.manifest)
    report = deploy(read_bundle(bundle.folder), model, tmp_path / "out")
    x = load("mnist").test_x[:7]
    plain = deploy(write_digits_bundle(tmp_path / "other"), model, tmp_path / "plain")
    found, expected = (outputs(open_model(each.folder / FLOAT32, 1), x) for each in (report, plain))
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_what_cannot_be_quantised_by_channel_is_quantised_as_a_whole_or_left_out(
    bundle: Bundle, model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = quantized.quantize_dynamic

    def picky(model: onnx.ModelProto, path: Path, *, per_channel: bool) -> None:
        whole(model, path, per_channel=per_channel)
        if per_channel:
            path.write_bytes(b"which does not run")

    def hopeless(model: onnx.ModelProto, path: Path, calibration: Any, *, per_channel: bool) -> None:
        raise RuntimeError("no such scale\nand so on")

    monkeypatch.setattr(quantized, "quantize_dynamic", picky)
    monkeypatch.setattr(quantized, "quantize_static", hopeless)
    report = deploy(bundle, model, tmp_path, calibration=load("mnist").train_x[:10])
    assert [row.file for row in report.rows] == [FLOAT32, DYNAMIC]
    assert report.notes == (f"{STATIC} left out: onnxruntime cannot quantise this model (no such scale)",)


def test_scores() -> None:
    labels = np.array([[0, 1, 1], [1, 0, 0]])
    last = np.eye(2)[labels]  # (2, 3, 2)
    assert score(last, labels, "classification") == 1
    assert score(last.transpose(0, 2, 1), labels, "classification") == 1
    assert score(last, 1 - labels, "classification") == 0
    assert score(np.array([1.0, 3.0]), np.array([1.0, 1.0]), "regression") == 2
    with pytest.raises(DataError, match="shape of the model's output"):
        score(np.ones((2, 1)), np.ones(2), "regression")


@pytest.fixture
def files(bundle: Bundle, model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A command line that works."""
    monkeypatch.chdir(tmp_path)
    digits = load("mnist")
    np.savez("model.npz", **model)  # type: ignore[arg-type]
    for name, values in (("cx", digits.train_x[:64]), ("x", digits.test_x[:100]), ("y", digits.test_y[:100])):
        np.save(f"{name}.npy", values)
    data = ["--calibration-x", "cx.npy", "--test-x", "x.npy", "--test-y", "y.npy"]
    return ["deploy", str(bundle.folder), "--parameters", "model.npz", "--out", "out", *data]


def test_the_command_compares(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*files, "--json", "report.json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert " ".join(lines[0].split()) == "file bytes size accuracy ms at batch 1 ms at batch 64"
    assert [line.split()[0] for line in lines[1:4]] == [FLOAT32, DYNAMIC, STATIC]
    assert lines[4] == "models: out"
    assert len({len(line) for line in lines[:4]}) == 1
    told = json.loads(Path("report.json").read_text())
    assert [row["bytes"] for row in told["rows"]] == [Path("out", row["file"]).stat().st_size for row in told["rows"]]


def test_the_command_says_what_to_install(
    files: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    assert main(files) == 2
    assert capsys.readouterr().err == 'fedcomp: onnx is not installed; run: pip install "fedcomp[export,simulation]"\n'


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"model.npz": "absent.npz"}, "--parameters: cannot read absent.npz: No such file"),
        ({"model.npz": "x.npy"}, "--parameters: expected a .npz file"),
        ({"x.npy": "model.npz"}, "--test-x: expected a .npy file"),
        ({"x.npy": "text"}, "--test-x: text holds no arrays"),
        ({"--test-y": "--json"}, "--test-x and --test-y: expected both or none"),
        ({"cx.npy": "y.npy"}, "calibration x: expected at least one sample, float32"),
        ({"deploy": "deploy", "out": "text/out"}, "text"),
    ],
)
def test_mistakes_are_told_in_one_line(
    files: list[str], changed: dict[str, str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("text").write_text("not an array")
    assert main([changed.get(word, word) for word in files]) in (1, 2)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("fedcomp: ")
    assert said in captured.err
    assert captured.err.count("\n") == 1
    assert not list(Path().glob("out/*"))
