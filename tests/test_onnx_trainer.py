"""Training on the device: right steps, nothing changed by what fails, no torch, no growth."""

import gc
import resource
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bundles
import numpy as np
import onnx
import pytest
from bundles import CLASSES, INPUTS
from numpy.typing import NDArray

from fedcomp import BundleError, ConfigError, DataError, FedcompError, LayoutError, NonFiniteError
from fedcomp_clients import FitResult, OnnxTrainer
from fedcomp_clients.bundle import EVAL, SGD, TRAIN, read_bundle, write_manifest

Array = NDArray[Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bundles.mlp(tmp_path_factory.mktemp("bundles") / "mlp")


def data(count: int, seed: int = 0) -> tuple[Array, Array]:
    """Samples whose label is the largest of their first values."""
    random = np.random.default_rng(seed)
    x = random.standard_normal((count, INPUTS)).astype(np.float32)
    return x, x[:, :CLASSES].argmax(axis=1)


def same(a: dict[str, Array], b: dict[str, Array], atol: float = 0.0) -> None:
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_allclose(a[name], b[name], rtol=0, atol=atol, err_msg=name)


def gradients(values: dict[str, Array], x: Array, y: Array) -> dict[str, Array]:
    """Of the mean cross-entropy of the perceptron, in float64."""
    v = {name: array.astype(np.float64) for name, array in values.items()}
    scaled = x * v["scale"]
    hidden = np.maximum(scaled @ v["w1"].T + v["b1"], 0)
    scores = hidden @ v["w2"].T + v["b2"]
    p = np.exp(scores - scores.max(axis=1, keepdims=True))
    wrong = (p / p.sum(axis=1, keepdims=True) - np.eye(CLASSES)[y]) / len(y)
    back = wrong @ v["w2"] * (hidden > 0)
    return {"w1": back.T @ scaled, "b1": back.sum(axis=0), "w2": wrong.T @ hidden, "b2": wrong.sum(axis=0)}


def reference(
    start: dict[str, Array],
    steps: list[tuple[Array, Array]],
    sgd: SGD,
    lr: float,
    mu: float = 0.0,
    clip: float = np.inf,
) -> dict[str, Array]:
    """The same steps in float64, written out from torch's documentation of SGD."""
    names = ["w1", "b1", "w2", "b2"]
    p = {name: start[name].astype(np.float64) for name in names}
    velocity: dict[str, Array] = {}
    for x, y in steps:
        g = gradients({**start, **p}, x, y)
        g = {name: g[name] + mu * (p[name] - start[name]) for name in names}
        norm = np.sqrt(sum((a**2).sum() for a in g.values()))
        g = {name: a * min(1.0, clip / (norm + 1e-6)) + sgd.weight_decay * p[name] for name, a in g.items()}
        velocity = {name: g[name] + sgd.momentum * velocity.get(name, 0) for name in names}
        d = {name: g[name] + sgd.momentum * velocity[name] for name in names} if sgd.nesterov else velocity
        p = {name: p[name] - lr * d[name] for name in names}
    return p


OPTIMIZERS = {
    "plain": SGD(),
    "momentum": SGD(0.9),
    "decay": SGD(0.0, 0.1),
    "momentum and decay": SGD(0.9, 0.1),
    "nesterov": SGD(0.9, 0.1, True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_are_those_of_torch(name: str, tmp_path: Path) -> None:
    sgd = OPTIMIZERS[name]
    trainer, (x, y) = OnnxTrainer(bundles.mlp(tmp_path, optimizer=sgd)), data(20)
    start = trainer.get_parameters()
    result = trainer.fit(x, y, batch_size=8, lr=0.2, shuffle=False)
    expected = reference(start, [(x[:8], y[:8]), (x[8:16], y[8:16]), (x[16:], y[16:])], sgd, 0.2)
    got = trainer.get_parameters()
    for key, values in expected.items():
        np.testing.assert_allclose(got[key], values, rtol=0, atol=1e-6)
        assert not np.allclose(start[key], values, atol=1e-3)
    assert (result.steps, result.samples) == (3, 20)


@pytest.mark.parametrize(("mu", "clip"), [(0.5, np.inf), (0.0, 0.05), (0.5, 0.05)])
def test_proximal_term_and_clipping(mu: float, clip: float, folder: Path) -> None:
    trainer, (x, y) = OnnxTrainer(folder), data(24)
    start = trainer.get_parameters()
    trainer.fit(x, y, batch_size=8, lr=0.5, shuffle=False, proximal=mu, clip_norm=None if clip == np.inf else clip)
    expected = reference(start, [(x[i : i + 8], y[i : i + 8]) for i in (0, 8, 16)], SGD(0.9), 0.5, mu, clip)
    unlike = reference(start, [(x[i : i + 8], y[i : i + 8]) for i in (0, 8, 16)], SGD(0.9), 0.5)
    for key, values in expected.items():
        np.testing.assert_allclose(trainer.get_parameters()[key], values, rtol=0, atol=2e-6)
    assert not np.allclose(expected["w1"], unlike["w1"], atol=1e-4)


def test_buffers_are_what_the_graph_says_and_frozen_tensors_stay(folder: Path) -> None:
    trainer, (x, y) = OnnxTrainer(folder), data(10)
    trainer.fit(x, y, batch_size=5, shuffle=False)
    after = trainer.get_parameters()
    assert after["steps"] == 2
    assert after["steps"].dtype == np.int64
    expected = 0.9 * (0.1 * x[:5].mean(axis=0)) + 0.1 * x[5:].mean(axis=0)
    np.testing.assert_allclose(after["mean"], expected, atol=1e-7)
    assert after["scale"] == np.float32(0.5)
    assert list(after) == [tensor.name for tensor in trainer.manifest.tensors]


@pytest.mark.parametrize("pieces", [2, 3, 4, 1000])
def test_a_batch_in_pieces_makes_the_same_step(pieces: int, folder: Path) -> None:
    x, y = data(33)
    whole, cut = OnnxTrainer(folder), OnnxTrainer(folder)
    first = whole.fit(x, y, epochs=2, batch_size=33, lr=0.3)
    second = cut.fit(x, y, epochs=2, batch_size=33, lr=0.3, accumulate=pieces)
    a, b = whole.get_parameters(), cut.get_parameters()
    for name in ("w1", "b1", "w2", "b2"):
        np.testing.assert_allclose(a[name], b[name], rtol=0, atol=1e-6)
    assert (first.steps, first.samples, first.accuracy) == (second.steps, second.samples, second.accuracy)
    assert second.loss == pytest.approx(first.loss, abs=1e-6)
    assert b["steps"] == 2 * min(pieces, 16)


def test_loss_and_accuracy_are_means_over_samples(folder: Path) -> None:
    trainer, (x, y) = OnnxTrainer(folder), data(21)
    told = trainer.evaluate(x, y, batch_size=8)
    assert told == trainer.evaluate(x, y, batch_size=8)
    whole = trainer.evaluate(x, y)
    assert told.loss == pytest.approx(whole.loss, abs=1e-6)
    assert (told.accuracy, told.samples) == (whole.accuracy, 21)
    still = trainer.fit(x, y, batch_size=8, lr=0.0)
    assert still.loss == pytest.approx(whole.loss, abs=1e-6)
    assert still.accuracy == whole.accuracy
    same({**trainer.get_parameters(), "steps": 0, "mean": 0}, {**read_bundle(folder).initial, "steps": 0, "mean": 0})  # type: ignore[dict-item]


def test_it_learns(folder: Path) -> None:
    trainer = OnnxTrainer(folder, threads=2)
    result = trainer.fit(*data(600), epochs=20, batch_size=20, lr=0.05)
    told = trainer.evaluate(*data(300, seed=1))
    assert told.accuracy is not None
    assert result.accuracy is not None
    assert min(told.accuracy, result.accuracy) > 0.9
    assert result.steps == 600


def test_regression(tmp_path: Path) -> None:
    """Its gradient is transpose(x) @ vector, which an optimizer of onnxruntime computes wrongly."""
    trainer = OnnxTrainer(bundles.linear(tmp_path))
    x, _ = data(200)
    y = x @ np.arange(INPUTS, dtype=np.float32) + 3
    result = trainer.fit(x, y, epochs=30, batch_size=16, lr=0.05)
    assert result.accuracy is None
    assert trainer.evaluate(x, y).loss < 1e-3
    np.testing.assert_allclose(trainer.get_parameters()["w"], np.arange(INPUTS), atol=0.02)
    assert trainer.get_parameters()["b"].shape == ()


def test_a_schedule_of_learning_rates(folder: Path) -> None:
    seen: list[int] = []

    def rate(step: int) -> float:
        seen.append(step)
        return 0.1 if step == 0 else 0.0

    one, two = OnnxTrainer(folder), OnnxTrainer(folder)
    x, y = data(16)
    one.fit(x, y, batch_size=8, lr=rate, shuffle=False)
    two.fit(x[:8], y[:8], batch_size=8, lr=0.1, shuffle=False)
    assert seen == [0, 1]
    np.testing.assert_array_equal(one.get_parameters()["w1"], two.get_parameters()["w1"])
    with pytest.raises(ConfigError, match="lr: expected a number"):
        one.fit(x, y, lr=lambda step: -1.0)


def test_velocities_go_on_until_a_model_is_received(folder: Path) -> None:
    x, y = data(16)
    through, stopped, fresh = OnnxTrainer(folder), OnnxTrainer(folder), OnnxTrainer(folder)
    through.fit(x, y, batch_size=8, shuffle=False)
    for part in (slice(0, 8), slice(8, 16)):
        stopped.fit(x[part], y[part], batch_size=8, shuffle=False)
    same(through.get_parameters(), stopped.get_parameters())
    fresh.fit(x[:8], y[:8], batch_size=8, shuffle=False)
    fresh.set_parameters(fresh.get_parameters())
    fresh.fit(x[8:], y[8:], batch_size=8, shuffle=False)
    assert not np.allclose(fresh.get_parameters()["w1"], through.get_parameters()["w1"], atol=1e-5)


@pytest.mark.parametrize(
    ("count", "single", "steps", "samples"),
    [
        (1, "merge", 1, 1),
        (32, "merge", 1, 32),
        (33, "merge", 1, 33),
        (34, "merge", 2, 34),
        (65, "merge", 2, 65),
        (33, "skip", 1, 32),
        (65, "skip", 2, 64),
        (33, "keep", 2, 33),
    ],
)
def test_one_sample_left_over(count: int, single: str, steps: int, samples: int, folder: Path) -> None:
    """C15: batch norm cannot normalise it."""
    result = OnnxTrainer(folder).fit(*data(count), batch_size=32, single=single)
    assert (result.steps, result.samples) == (steps, samples)


def test_batches_of_one_are_what_was_asked_for(folder: Path) -> None:
    assert OnnxTrainer(folder).fit(*data(5), batch_size=1).steps == 5


def test_one_sample_alone_under_batch_norm(tmp_path: Path) -> None:
    """Its variance is 0/0: nothing is trained, and the result says so."""
    trainer, (x, y) = OnnxTrainer(bundles.mlp(tmp_path, variance=True)), data(4)
    before = trainer.get_parameters()
    result = trainer.fit(x[:1], y[:1], epochs=3)
    told = trainer.evaluate(x[:1], y[:1])
    assert result == FitResult(told.loss, told.accuracy, 0, 0)
    same(trainer.get_parameters(), before)
    assert trainer.fit(x, y).steps == 1
    np.testing.assert_allclose(trainer.get_parameters()["mean"], 0.1 * x.var(axis=0, ddof=1), rtol=1e-4)


def test_the_same_seed_gives_the_same_model(folder: Path) -> None:
    def trained(seed: int | None) -> dict[str, Array]:
        trainer = OnnxTrainer(folder)
        trainer.fit(*data(40), epochs=2, batch_size=8, seed=seed)
        return trainer.get_parameters()

    same(trained(1), trained(1))
    assert not np.array_equal(trained(1)["w1"], trained(2)["w1"])
    assert not np.array_equal(trained(None)["w1"], trained(None)["w1"])


def test_dropout_follows_the_seed(tmp_path: Path) -> None:
    """onnxruntime reads the seed only when a session is made."""
    trainer = OnnxTrainer(bundles.mlp(tmp_path, dropout=True))
    start = trainer.get_parameters()

    def trained(seed: int) -> Array:
        trainer.set_parameters(start)
        trainer.fit(*data(40), batch_size=8, seed=seed, shuffle=False)
        return trainer.get_parameters()["w2"]

    first = trained(1)
    np.testing.assert_array_equal(first, trained(1))
    assert not np.array_equal(first, trained(2))
    np.testing.assert_array_equal(first, trained(1))


def test_parameters_are_nobody_elses(folder: Path) -> None:
    trainer = OnnxTrainer(folder)
    given = {name: values.copy() for name, values in trainer.get_parameters().items()}
    trainer.set_parameters(given)
    before = given["w1"].copy()
    given["w1"][:] = 0
    np.testing.assert_array_equal(trainer.get_parameters()["w1"], before)
    with pytest.raises(ValueError, match="read-only"):
        trainer.get_parameters()["w1"][:] = 0
    held = trainer.get_parameters()
    trainer.fit(*data(8))
    np.testing.assert_array_equal(held["w1"], before)
    with pytest.raises(ValueError, match="read-only"):
        trainer.get_parameters()["steps"][...] = 0


def test_parameters_in_order_and_as_servers_widen_them(folder: Path) -> None:
    trainer = OnnxTrainer(folder)
    start = list(trainer.get_parameters().values())
    wide = [
        (values + 0.4 if name == "steps" else values).astype(np.float64)
        for name, values in trainer.get_parameters().items()
    ]
    trainer.set_parameters(wide)
    for before, after in zip(start, trainer.get_parameters().values(), strict=True):
        assert after.dtype == before.dtype
        assert after.shape == before.shape
        np.testing.assert_array_equal(before, after)
    trainer.set_parameters({name: trainer.get_parameters()[name] for name in reversed(list(trainer.get_parameters()))})
    assert next(iter(trainer.get_parameters())) == "w1"


BAD_PARAMETERS: dict[str, tuple[Callable[[dict[str, Any]], object], type[FedcompError], str]] = {
    "one missing": (lambda p: p.pop("b2"), LayoutError, r"missing tensors \['b2'\]"),
    "one too many": (lambda p: p.update(more=p["b2"]), LayoutError, r"unexpected tensors \['more'\]"),
    "another shape": (lambda p: p.update(w1=p["w1"].T), LayoutError, r"'w1' has shape \(6, 5\), expected \(5, 6\)"),
    "one dimension more": (lambda p: p.update(scale=np.ones(1, np.float32)), LayoutError, "'scale' has shape"),
    "integers": (lambda p: p.update(w1=p["w1"].astype(np.int64)), LayoutError, "'w1' is int64, expected float32"),
    "texts": (lambda p: p.update(b1=np.array(list("abcde"))), LayoutError, "'b1' is <U1"),
    "complex": (lambda p: p.update(b1=p["b1"] + 0j), LayoutError, "'b1' is complex64"),
    "nan": (lambda p: p.update(b1=np.full(5, np.nan, np.float32)), NonFiniteError, "'b1': expected finite.*5 NaN"),
    "too large": (lambda p: p.update(b1=np.full(5, 1e39)), NonFiniteError, "'b1'"),
    "nan counter": (lambda p: p.update(steps=np.array(np.nan)), NonFiniteError, "'steps'"),
}


@pytest.mark.parametrize("name", BAD_PARAMETERS)
def test_wrong_parameters_change_nothing(name: str, folder: Path) -> None:
    edit, kind, reason = BAD_PARAMETERS[name]
    trainer = OnnxTrainer(folder)
    before = trainer.get_parameters()
    given = dict(before)
    edit(given)
    with pytest.raises(kind, match=reason):
        trainer.set_parameters(given)
    same(trainer.get_parameters(), before)


def test_too_few_parameters_in_order(folder: Path) -> None:
    with pytest.raises(LayoutError, match="expected 7 tensors in the order w1, b1"):
        OnnxTrainer(folder).set_parameters([np.zeros(1)])


X, Y = data(10)
BAD_DATA: dict[str, tuple[Any, Any, str]] = {
    "no array": (X.tolist(), Y, "x: expected a numpy array, got list"),
    "features": (X[:, :5], Y, r"x: expected the shape \(samples, 6\), got \(10, 5\)"),
    "one sample": (X[0], Y, r"x: expected the shape"),
    "scalar": (np.float32(1), Y, "x: expected a numpy array"),
    "double": (X.astype(np.float64), Y, r"x: expected float32, got float64.*astype\('float32'\)"),
    "bytes for floats": (X.astype(np.uint8), Y, "x: expected float32, got uint8"),
    "objects": (X.astype(object), Y, "x: expected float32, got object"),
    "columns of labels": (X, Y[:, None], r"y: expected the shape \(samples\), got \(10, 1\)"),
    "float labels": (X, Y.astype(np.float32), "y: expected int64, got float32"),
    "unsigned labels too wide": (X, Y.astype(np.uint64), "y: expected int64, got uint64"),
    "fewer labels": (X, Y[:9], "got 10 in x and 9 in y"),
    "nothing": (X[:0], Y[:0], "at least one sample"),
    "label too large": (X, np.where(np.arange(10) == 7, 3, Y), "labels from 0 to 2, got 3 in row 7"),
    "negative label": (X, np.where(np.arange(10) == 9, -1, Y), "labels from 0 to 2, got -1 in row 9"),
    "nan": (np.where(np.arange(60).reshape(10, 6) == 59, np.float32(np.nan), X), Y, "x: expected finite values, got 1"),
    "infinity": (np.where(np.arange(60).reshape(10, 6) == 0, np.float32(np.inf), X), Y, "x: expected finite values"),
}


@pytest.mark.parametrize("name", BAD_DATA)
def test_wrong_data_change_nothing(name: str, folder: Path) -> None:
    x, y, reason = BAD_DATA[name]
    trainer, twin = OnnxTrainer(folder), OnnxTrainer(folder)
    for one in (trainer, twin):
        one.fit(X, Y, batch_size=4)
    with pytest.raises(DataError, match=reason):
        trainer.fit(x, y, epochs=2, batch_size=2)
    with pytest.raises(DataError, match=reason):
        trainer.evaluate(x, y)
    same(trainer.get_parameters(), twin.get_parameters())
    for one in (trainer, twin):  # velocities too
        one.fit(X, Y, batch_size=4)
    same(trainer.get_parameters(), twin.get_parameters())


def test_targets_that_are_not_finite(tmp_path: Path) -> None:
    trainer = OnnxTrainer(bundles.linear(tmp_path))
    with pytest.raises(DataError, match="y: expected finite values"):
        trainer.fit(X, np.full(10, np.nan, np.float32))


def test_data_of_narrower_dtypes_are_widened(folder: Path) -> None:
    narrow, wide = OnnxTrainer(folder), OnnxTrainer(folder)
    half = X.astype(np.float16)
    narrow.fit(half, Y.astype(np.uint8))
    wide.fit(half.astype(np.float32), Y)
    same(narrow.get_parameters(), wide.get_parameters())


def test_what_the_graph_refuses_is_an_error_of_the_data(tmp_path: Path) -> None:
    """Labels whose number the manifest does not know: OneHot takes any, so break the batch for the graph itself."""
    trainer = OnnxTrainer(bundles.mlp(tmp_path))
    graph = trainer._train_graph(0)
    with pytest.raises(DataError, match=r"train\.onnx cannot compute a batch of 10 samples"):
        graph.run(["loss"], trainer.get_parameters(), X[:, :3], Y)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("epochs", 0), ("batch_size", 0), ("lr", float("nan")), ("lr", -0.1), ("lr", "fast"), ("seed", -1),
        ("accumulate", 0), ("proximal", -1.0), ("clip_norm", 0.0), ("single", "drop"), ("batch_size", 1.5),
    ],
)  # fmt: skip
def test_arguments_out_of_range(argument: str, value: Any, folder: Path) -> None:
    with pytest.raises(ConfigError, match=f"{argument}: expected"):
        OnnxTrainer(folder).fit(X, Y, **{argument: value})


@pytest.mark.parametrize("more", [{}, {"clip_norm": 1e8}, {"accumulate": 2}])
def test_training_that_diverges_changes_nothing(more: dict[str, Any], folder: Path) -> None:
    trainer, twin = OnnxTrainer(folder), OnnxTrainer(folder)
    for one in (trainer, twin):
        one.fit(X, Y, batch_size=5)
    with pytest.raises(NonFiniteError, match=r"training diverged: .*left as it was.*lower learning rate"):
        trainer.fit(X * np.float32(1e18), Y, epochs=50, batch_size=5, lr=1e6, **more)
    same(trainer.get_parameters(), twin.get_parameters())
    for one in (trainer, twin):
        one.fit(X, Y, batch_size=5)
    same(trainer.get_parameters(), twin.get_parameters())


def test_a_last_step_that_ends_in_infinity_is_seen(folder: Path) -> None:
    trainer = OnnxTrainer(folder)
    before = trainer.get_parameters()
    with pytest.raises(NonFiniteError, match="diverged: tensor"):
        trainer.fit(X * np.float32(1e35), Y, batch_size=10, lr=1e9)
    same(trainer.get_parameters(), before)


def test_memory_mapped_data(folder: Path, tmp_path: Path) -> None:
    x, y = data(50)
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "y.npy", y)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r"), np.load(tmp_path / "y.npy", mmap_mode="r")
    one, two = OnnxTrainer(folder), OnnxTrainer(folder)
    assert one.fit(x, y, batch_size=8) == two.fit(*mapped, batch_size=8)
    same(one.get_parameters(), two.get_parameters())
    assert one.evaluate(x, y) == two.evaluate(*mapped)


def test_mapped_data_are_never_loaded_whole(folder: Path, tmp_path: Path) -> None:
    count = 400_000  # 9.6 MB
    x = np.lib.format.open_memmap(tmp_path / "x.npy", mode="w+", dtype=np.float32, shape=(count, INPUTS))
    y = np.zeros(count, np.uint8)
    trainer = OnnxTrainer(folder)
    trainer.fit(x[:64], y[:64])
    tracemalloc.start()
    trainer.fit(x, y, batch_size=20_000)
    trainer.evaluate(x, y, batch_size=20_000)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8 * count + 3e6  # the order of the samples, and some batches


def test_a_thousand_steps_leave_nothing_behind(folder: Path) -> None:
    trainer, (x, y) = OnnxTrainer(folder), data(64)
    trainer.fit(x, y, epochs=100, batch_size=8)
    gc.collect()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    tracemalloc.start()
    trainer.fit(x, y, epochs=5, batch_size=8)
    first, _ = tracemalloc.get_traced_memory()
    trainer.fit(x, y, epochs=125, batch_size=8, accumulate=2)
    gc.collect()
    second, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert second - first < 20_000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 8_000  # kB


def test_saved_parameters_come_back(folder: Path, tmp_path: Path) -> None:
    trainer, other = OnnxTrainer(folder), OnnxTrainer(folder)
    trainer.fit(X, Y)
    trainer.save(tmp_path / "model.npz")
    other.load(tmp_path / "model.npz")
    same(other.get_parameters(), trainer.get_parameters())
    assert [path.name for path in tmp_path.iterdir()] == ["model.npz"]


def test_a_full_disk_leaves_the_old_file(folder: Path, tmp_path: Path) -> None:
    trainer, path = OnnxTrainer(folder), tmp_path / "model.npz"
    trainer.save(path)
    before, kept = path.read_bytes(), trainer.get_parameters()
    trainer.fit(X, Y)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, hard))  # like a full disk: writing fails after 500 bytes
    try:
        with pytest.raises(FedcompError, match=r"cannot be saved at .*untouched; free some space"):
            trainer.save(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["model.npz"]
    assert trainer.get_parameters()["steps"] == 1
    trainer.load(path)
    same(trainer.get_parameters(), kept)
    with pytest.raises(FedcompError, match="cannot be saved"):
        trainer.save(tmp_path / "nowhere" / "model.npz")


@pytest.mark.parametrize("content", [None, b"", b"nothing", "npy", "objects", "other"])
def test_files_that_hold_no_model(content: object, folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.npz"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content == "npy":
        with path.open("wb") as file:
            np.save(file, X)
    elif content is not None:
        np.savez(path, w1=np.array([None]) if content == "objects" else X)
    trainer = OnnxTrainer(folder)
    before = trainer.get_parameters()
    with pytest.raises(FedcompError, match="missing tensors" if content == "other" else "holds no saved model"):
        trainer.load(path)
    same(trainer.get_parameters(), before)


def edited(folder: Path, into: Path, name: str, edit: Callable[[onnx.ModelProto], object]) -> Path:
    """A copy of the bundle with another graph, and digests that fit."""
    into.mkdir()
    for path in folder.iterdir():
        (into / path.name).write_bytes(path.read_bytes())
    model = onnx.load(into / name)
    edit(model)
    (into / name).write_bytes(model.SerializeToString())
    write_manifest(into, read_bundle(folder).manifest)
    return into


def drop_output(model: onnx.ModelProto) -> None:
    model.graph.output.remove(next(o for o in model.graph.output if o.name in ("g/w1", "correct")))


def other_shape(model: onnx.ModelProto) -> None:
    value = next(i for i in model.graph.input if i.name == "t/b2")
    value.type.tensor_type.shape.dim[0].dim_value = 1


def other_input(model: onnx.ModelProto) -> None:
    model.graph.input.append(onnx.helper.make_tensor_value_info("lr", onnx.TensorProto.FLOAT, ()))


def newer_opset(model: onnx.ModelProto) -> None:
    model.opset_import[0].version = 999


@pytest.mark.parametrize(
    ("name", "edit", "reason"),
    [
        (TRAIN, drop_output, r"train.onnx: outputs \['correct'\] are missing"),
        (TRAIN, other_shape, r"t/b2 is float32 \(1,\), but the manifest says float32 \(3,\)"),
        (TRAIN, other_input, "but the manifest says"),
        (EVAL, drop_output, r"eval.onnx: outputs \['correct'\] are missing"),
        (EVAL, newer_opset, "eval.onnx cannot be loaded by onnxruntime"),
    ],
)  # fmt: skip
def test_graphs_that_do_not_fit_the_manifest(
    name: str, edit: Callable[[onnx.ModelProto], object], reason: str, folder: Path, tmp_path: Path
) -> None:
    trainer = OnnxTrainer(edited(folder, tmp_path / "copy", name, edit))
    with pytest.raises(BundleError, match=reason):
        trainer.fit(X, Y) if name == TRAIN else trainer.evaluate(X, Y)


def test_a_constant_gradient_is_not_worked_into(folder: Path, tmp_path: Path) -> None:
    """Gradients serve as scratch space, which a constant of the graph must not."""

    def constant(model: onnx.ModelProto) -> None:
        node = next(node for node in model.graph.node if node.output[0] == "g/b2")
        node.output[0] = "unused"
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(CLASSES, np.float32), "ones"))
        model.graph.node.append(onnx.helper.make_node("Identity", ["ones"], ["g/b2"]))

    trainer = OnnxTrainer(edited(folder, tmp_path / "copy", TRAIN, constant))
    for _ in range(3):
        trainer.set_parameters(read_bundle(folder).initial)
        trainer.fit(X, Y, batch_size=10, lr=0.5)
        np.testing.assert_allclose(trainer.get_parameters()["b2"], np.full(CLASSES, -0.5))


def test_neither_torch_nor_onnx_is_needed(folder: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", X)
    np.save(tmp_path / "y.npy", Y)
    code = f"""
import sys
for name in ("torch", "onnx", "onnxscript", "flwr"):
    sys.modules[name] = None
import numpy as np
from fedcomp_clients import OnnxTrainer
trainer = OnnxTrainer({str(folder)!r})
x, y = np.load({str(tmp_path / "x.npy")!r}, mmap_mode="r"), np.load({str(tmp_path / "y.npy")!r})
print(trainer.fit(x, y).steps, trainer.evaluate(x, y).samples)
print(*(name for name in sys.modules if name.partition(".")[0] in ("torch", "onnx", "flwr") and sys.modules[name]))
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.split("\n")[:2] == ["1 10", ""]
    assert not done.stderr
