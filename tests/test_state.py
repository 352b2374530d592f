"""Where clients keep residuals."""

import logging
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedcomp import FedcompError
from fedcomp_clients import CompressMod, FileStore, MemoryStore, ResidualStore

RESIDUAL = {"fc.weight": np.ones((2, 3), np.float32), "a/b": np.zeros(0, np.float32), "file": np.array(2.0, np.float32)}


@pytest.mark.parametrize("kind", ["file", "memory"])
def test_residuals_come_back_for_their_run_and_node_only(kind: str, tmp_path: Path) -> None:
    store: ResidualStore = FileStore(tmp_path) if kind == "file" else MemoryStore()
    store.save("1", "partition-0", RESIDUAL)
    back = store.load("1", "partition-0")
    assert {n: a.tolist() for n, a in back.items()} == {n: a.tolist() for n, a in RESIDUAL.items()}
    assert all(a.dtype == np.float32 for a in back.values())
    assert not store.load("1", "partition-1")
    assert not store.load("2", "partition-0")


def test_the_directory_comes_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "flower"))
    monkeypatch.delenv("FEDCOMP_STATE_DIR", raising=False)
    assert FileStore().directory == tmp_path / "flower" / "fedcomp"
    monkeypatch.setenv("FEDCOMP_STATE_DIR", str(tmp_path / "state"))
    assert FileStore().directory == tmp_path / "state"
    assert pickle.loads(pickle.dumps(CompressMod())).store.directory == tmp_path / "state"


def test_every_flipped_bit_counts_as_none_or_changes_nothing_else(tmp_path: Path) -> None:
    """A zip file that is damaged raises half a dozen kinds of errors; none may stop the client for ever."""
    store = FileStore(tmp_path)
    store.save("1", "n", {"w": np.ones(3, np.float32)})
    (path,) = tmp_path.rglob("*.npz")
    data = path.read_bytes()
    for bit in range(0, 8 * len(data), 5):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        assert all(values.dtype == np.float32 for values in store.load("1", "n").values())
    for array in (np.ones(3), np.array(["a"])):
        np.savez(path, names=np.array(["w"]), r0=array)
        assert not store.load("1", "n")
    np.save(path.with_suffix(".npy"), np.ones(3))
    path.with_suffix(".npy").replace(path)
    assert not store.load("1", "n")


def test_old_trainings_and_leftovers_are_removed(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    for training in ("old", "recent"):
        store.save(training, "n", RESIDUAL)
    (tmp_path / "recent" / "killed.tmp").write_bytes(b"x" * 100)
    for path in (tmp_path / "old" / "n.npz", tmp_path / "old", tmp_path / "recent" / "killed.tmp"):
        os.utime(path, (0, 0))
    store.save("new", "n", RESIDUAL)
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.*")} == {"recent/n.npz", "new/n.npz"}


@pytest.mark.parametrize("damage", [b"", b"PK\x03\x04rubbish", b"\x93NUMPY\x01\x00", None])
def test_a_damaged_file_counts_as_none(damage: bytes | None, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = FileStore(tmp_path)
    store.save("1", "n", RESIDUAL)
    (path,) = tmp_path.rglob("*.npz")
    path.write_bytes(path.read_bytes()[:-30] if damage is None else damage)
    with caplog.at_level(logging.WARNING):
        assert not store.load("1", "n")
    assert "cannot be read" in caplog.text
    store.save("1", "n", RESIDUAL)
    assert store.load("1", "n")


def test_a_full_disk_keeps_the_old_residual(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FileStore(tmp_path)
    store.save("1", "n", RESIDUAL)

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(FedcompError, match=r"cannot be stored .*No space left.*the old one is kept"):
        store.save("1", "n", {"fc.weight": np.zeros((2, 3), np.float32)})
    assert store.load("1", "n")["fc.weight"].sum() == 6
    assert [path.suffix for path in tmp_path.rglob("*") if path.is_file()] == [".npz"]


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FedcompError, match="FEDCOMP_STATE_DIR"):
        FileStore(tmp_path / "file").save("1", "n", RESIDUAL)


def test_files_hold_no_pickles(tmp_path: Path) -> None:
    FileStore(tmp_path).save("1", "n", RESIDUAL)
    (path,) = tmp_path.rglob("*.npz")
    with np.load(path, allow_pickle=False) as stored:
        assert stored["names"].tolist() == list(RESIDUAL)
    assert os.path.basename(path.parent) == "1"  # noqa: PTH119
