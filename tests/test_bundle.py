"""Reading training bundles: what is sound is read, and what is not is refused with a reason."""

import hashlib
import io
import json
import re
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import bundles
import numpy as np
import pytest

from fedcomp import BundleError, FedcompError
from fedcomp_clients.bundle import FILES, INITIAL, MANIFEST, TRAIN, Manifest, Tensor, read_bundle, write_manifest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return bundles.mlp(tmp_path / "bundle")


def change(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Edit the manifest as JSON."""
    told = json.loads((folder / MANIFEST).read_text())
    edit(told)
    (folder / MANIFEST).write_text(json.dumps(told))


def replace_initial(folder: Path, data: bytes) -> None:
    """Another init.npz, with the digest that fits."""
    (folder / INITIAL).write_bytes(data)
    told = {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
    change(folder, lambda manifest: manifest["files"].update({INITIAL: told}))


def npz(**arrays: Any) -> bytes:
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def test_a_sound_bundle_is_read(folder: Path) -> None:
    bundle = read_bundle(str(folder))
    assert [t.name for t in bundle.manifest.named("parameter")] == ["w1", "b1", "w2", "b2"]
    assert bundle.manifest.tensors[4] == Tensor("scale", (), "float32", "frozen")
    assert list(bundle.initial) == ["w1", "b1", "w2", "b2", "scale", "steps", "mean"]
    assert bundle.initial["steps"].shape == ()
    assert bundle.initial["steps"].dtype == np.int64
    with np.load(folder / INITIAL) as stored:
        assert all(np.array_equal(bundle.initial[name], stored[name]) for name in stored)
    assert bundle.graph(TRAIN) == (folder / TRAIN).read_bytes()
    with pytest.raises(ValueError, match="read-only"):
        bundle.initial["w1"][:] = 0


def test_the_manifest_survives_json(folder: Path) -> None:
    manifest = read_bundle(folder).manifest
    assert Manifest.from_json(manifest.to_json()) == manifest
    assert manifest.to_json() == (folder / MANIFEST).read_text()
    unchecked = replace(manifest, check=None, classes=None)
    assert Manifest.from_json(unchecked.to_json()) == unchecked


def test_unknown_keys_are_left_to_later_versions(folder: Path) -> None:
    change(folder, lambda told: told.update(colour="red"))
    assert read_bundle(folder).manifest.opset == 18


@pytest.mark.parametrize("name", [MANIFEST, *FILES])
def test_a_missing_file_is_named(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(BundleError, match=rf"{re.escape(name)} is missing"):
        read_bundle(folder)


def test_no_folder_at_all(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="nowhere: expected the folder of a training bundle"):
        read_bundle(tmp_path / "nowhere")
    assert issubclass(BundleError, FedcompError)


@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_named(folder: Path, name: str) -> None:
    data = bytearray((folder / name).read_bytes())
    data[len(data) // 2] ^= 1
    (folder / name).write_bytes(data)
    with pytest.raises(BundleError, match=rf"{re.escape(name)}: expected SHA-256 [0-9a-f]{{64}}, found .*again"):
        read_bundle(folder)
    (folder / name).write_bytes(data[:-1])
    with pytest.raises(BundleError, match=rf"{re.escape(name)}: expected {len(data)} bytes, found {len(data) - 1}"):
        read_bundle(folder)


def test_a_graph_that_changed_since_is_refused(folder: Path) -> None:
    bundle = read_bundle(folder)
    data = bytearray((folder / TRAIN).read_bytes())
    data[100] ^= 1
    (folder / TRAIN).write_bytes(data)
    with pytest.raises(BundleError, match=r"train\.onnx: expected SHA-256"):
        bundle.graph(TRAIN)


def test_a_newer_version_is_refused(folder: Path) -> None:
    change(folder, lambda told: told.update(version=2))
    with pytest.raises(BundleError, match=r"version 2 is newer than 1.*upgrade fedcomp"):
        read_bundle(folder)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"format": "other", "version": 1}', "[" * 100_000])
def test_a_damaged_manifest_is_refused(folder: Path, text: str) -> None:
    (folder / MANIFEST).write_text(text)
    with pytest.raises(BundleError, match=MANIFEST):
        read_bundle(folder)


def test_a_manifest_that_is_no_text_is_refused(folder: Path) -> None:
    (folder / MANIFEST).write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BundleError, match="no UTF-8"):
        read_bundle(folder)


WRONG = {
    "no version": lambda told: told.update(version="1"),
    "truth as version": lambda told: told.update(version=True),
    "tensors are no list": lambda told: told.update(tensors={}),
    "negative side": lambda told: told["tensors"][0].update(shape=[-1, 6]),
    "side is no number": lambda told: told["tensors"][0].update(shape=["a"]),
    "unknown dtype": lambda told: told["tensors"][0].update(dtype="object"),
    "integer parameter": lambda told: told["tensors"][0].update(dtype="int64"),
    "unknown role": lambda told: told["tensors"][0].update(role="king"),
    "same name twice": lambda told: told["tensors"][1].update(name="w1"),
    "roles out of order": lambda told: told["tensors"].reverse(),
    "no tensors": lambda told: told.update(tensors=[]),
    "unknown optimizer": lambda told: told["optimizer"].update(name="adam"),
    "momentum too large": lambda told: told["optimizer"].update(momentum=1.5),
    "momentum is nan": lambda told: told["optimizer"].update(momentum=float("nan")),
    "unknown task": lambda told: told.update(task="chess"),
    "no classes": lambda told: told.update(classes=0),
    "data of objects": lambda told: told["x"].update(dtype="object"),
    "unknown input": lambda told: told["inputs"]["train.onnx"].append("t/other"),
    "file not listed": lambda told: told["files"].pop(TRAIN),
    "inputs missing": lambda told: told.pop("inputs"),
    "opset is a text": lambda told: told.update(opset="18"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_manifest_is_refused(folder: Path, name: str) -> None:
    change(folder, WRONG[name])
    with pytest.raises(BundleError, match=MANIFEST):
        read_bundle(folder)


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "sub/train.onnx", "train.onnx.data"])
def test_files_elsewhere_are_refused(folder: Path, name: str) -> None:
    (folder.parent / "secret").write_bytes(b"")
    change(folder, lambda told: told["files"].update({name: told["files"][TRAIN]}))
    with pytest.raises(BundleError, match="does not belong into a bundle"):
        read_bundle(folder)


def test_initial_values_must_fit_the_tensors(folder: Path) -> None:
    initial = dict(read_bundle(folder).initial)
    for values, reason in [
        ({**initial, "w1": np.zeros((5, 7), np.float32)}, "'w1' has shape \\(5, 7\\)"),
        ({**initial, "w1": initial["w1"].astype(np.float64)}, "'w1' has shape .* float64"),
        ({**initial, "w1": np.zeros((500, 600), np.float32)}, "'w1' has 1200128 bytes, expected 120"),
        ({**initial, "more": np.zeros(1)}, r"unexpected \['more.npy'\]"),
        ({name: initial[name] for name in initial if name != "b2"}, r"missing \['b2.npy'\]"),
        ({**initial, "b1": np.array([None] * 5)}, "'b1' cannot be read .*pickle"),
    ]:
        replace_initial(folder, npz(**values))
        with pytest.raises(BundleError, match=reason):
            read_bundle(folder)


def test_initial_values_that_are_no_archive(folder: Path) -> None:
    replace_initial(folder, b"nothing")
    with pytest.raises(BundleError, match=r"init\.npz cannot be read"):
        read_bundle(folder)
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name in read_names(folder):
            archive.writestr(f"{name}.npy", b"")
    replace_initial(folder, file.getvalue())
    with pytest.raises(BundleError, match="'w1' cannot be read"):
        read_bundle(folder)


def read_names(folder: Path) -> list[str]:
    return [t.name for t in Manifest.from_json((folder / MANIFEST).read_text()).tensors]


def test_compressed_initial_values_are_read_too(folder: Path) -> None:
    initial = read_bundle(folder).initial
    file = io.BytesIO()
    np.savez_compressed(file, **initial)  # type: ignore[arg-type]
    replace_initial(folder, file.getvalue())
    assert np.array_equal(read_bundle(folder).initial["w1"], initial["w1"])


def test_a_manifest_is_replaced_whole_or_not_at_all(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest, before = read_bundle(folder).manifest, (folder / MANIFEST).read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        with pytest.raises(OSError, match="No space"):
            write_manifest(folder, replace(manifest, opset=19))
    assert (folder / MANIFEST).read_bytes() == before
    assert len(list(folder.iterdir())) == 4
    assert write_manifest(folder, replace(manifest, opset=19)) == read_bundle(folder).manifest


def test_a_manifest_needs_its_files(folder: Path) -> None:
    manifest = read_bundle(folder).manifest
    (folder / TRAIN).unlink()
    with pytest.raises(BundleError, match=r"train\.onnx is missing"):
        write_manifest(folder, manifest)
