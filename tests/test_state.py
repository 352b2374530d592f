"""Where clients keep what feedback remembers."""

import logging
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedcomp import FedcompError, Layout, Memory, Tensor
from fedcomp_clients import CompressMod, FileStore, MemoryStore, StateStore

LAYOUT = Layout((Tensor("fc.weight", (2, 3)), Tensor("a/b", (0,)), Tensor("file", ())))


def memory(round_: int, value: float = 1.0) -> Memory:
    return Memory(round_, {"residual": {t.name: np.full(t.shape, value, np.float32) for t in LAYOUT.tensors}})


def value(found: Memory | None) -> float | None:
    return None if found is None else float(found.slots["residual"]["file"])


def stored(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())


@pytest.mark.parametrize("kind", ["float32", "float16", "int8", "memory"])
def test_memories_come_back_for_their_run_node_and_round_only(kind: str, tmp_path: Path) -> None:
    store: StateStore = MemoryStore() if kind == "memory" else FileStore(tmp_path, precision=kind)
    store.save("1", "partition-1", memory(3, 0.5), LAYOUT)
    back = store.load("1", "partition-1", 3, LAYOUT)
    assert back is not None
    assert back.round == 3
    assert {n: a.shape for n, a in back.slots["residual"].items()} == {t.name: t.shape for t in LAYOUT.tensors}
    assert value(back) == 0.5
    for training, node, round_ in (("1", "partition-1", 2), ("1", "partition-10", 3), ("2", "partition-1", 3)):
        assert store.load(training, node, round_, LAYOUT) is None


@pytest.mark.parametrize("kind", ["file", "memory"])
def test_what_the_server_did_not_use_is_discarded(kind: str, tmp_path: Path) -> None:
    store: StateStore = FileStore(tmp_path) if kind == "file" else MemoryStore()
    for node in ("partition-1", "partition-11"):
        for round_ in (1, 2, 12):
            store.save("1", node, memory(round_), LAYOUT)
    store.discard("1", "partition-1", but=2)
    kept = [r for r in (1, 2, 12) if store.load("1", "partition-1", r, LAYOUT)]
    others = [r for r in (1, 2, 12) if store.load("1", "partition-11", r, LAYOUT)]
    assert (kept, others) == ([2], [1, 2, 12])
    store.discard("1", "partition-1", but=0)
    assert store.load("1", "partition-1", 2, LAYOUT) is None
    store.discard("never", "seen", but=1)


def test_exact_memories_are_not_rounded(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    for exact in (False, True):
        store.save("1", "n", memory(1, 1 / 3), LAYOUT, exact=exact)
        found = value(store.load("1", "n", 1, LAYOUT))
        assert (found == np.float32(1 / 3)) == exact


def test_the_directory_comes_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "flower"))
    monkeypatch.delenv("FEDCOMP_STATE_DIR", raising=False)
    assert FileStore().directory == tmp_path / "flower" / "fedcomp"
    monkeypatch.setenv("FEDCOMP_STATE_DIR", str(tmp_path / "state"))
    assert FileStore().directory == tmp_path / "state"
    store = pickle.loads(pickle.dumps(CompressMod())).store
    assert isinstance(store, FileStore)
    assert store.directory == tmp_path / "state"


def test_every_flipped_bit_counts_as_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = FileStore(tmp_path)
    store.save("1", "n", memory(1), LAYOUT)
    (path,) = tmp_path.rglob("*.memory")
    data = path.read_bytes()
    for bit in range(8 * len(data)):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        assert store.load("1", "n", 1, LAYOUT) is None
    assert "cannot be used" in caplog.text


def test_a_memory_of_another_model_counts_as_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = FileStore(tmp_path)
    store.save("1", "n", memory(1), LAYOUT)
    assert store.load("1", "n", 1, Layout((Tensor("fc.weight", (3, 2)),))) is None
    assert "another model" in caplog.text


def test_a_memory_under_the_wrong_round_counts_as_none(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    store.save("1", "n", memory(1), LAYOUT)
    (path,) = tmp_path.rglob("*.memory")
    path.rename(path.with_name("n.7.memory"))
    assert store.load("1", "n", 7, LAYOUT) is None


def test_old_trainings_and_leftovers_are_removed(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    for training in ("old", "recent"):
        store.save(training, "n", memory(1), LAYOUT)
    (tmp_path / "recent" / "killed.tmp").write_bytes(b"x" * 100)
    for path in (tmp_path / "old" / "n.1.memory", tmp_path / "old", tmp_path / "recent" / "killed.tmp"):
        os.utime(path, (0, 0))
    store.save("new", "n", memory(1), LAYOUT)
    assert stored(tmp_path) == ["new/n.1.memory", "recent/n.1.memory"]


def test_there_is_a_limit_to_the_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other trainings make room, the oldest first; one's own memories never do."""
    size = len(
        FileStore(tmp_path / "probe").save("1", "n", memory(1), LAYOUT)
        and (tmp_path / "probe/1/n.1.memory").read_bytes()
    )
    store = FileStore(tmp_path / "s", max_bytes=4 * size)
    for age, training in ((30, "old"), (20, "older"), (10, "own")):
        store.save(training, "n", memory(1), LAYOUT)
        os.utime(tmp_path / "s" / training / "n.1.memory", (1e9 - age, 1e9 - age))
    monkeypatch.setattr("fedcomp_clients.files._KEEP_S", float("inf"))
    for node in "abc":
        store.save("own", node, memory(1), LAYOUT)
    assert stored(tmp_path / "s") == [f"own/{node}.1.memory" for node in "abcn"]
    with pytest.raises(FedcompError, match=r"FEDCOMP_STATE_BYTES allows.*the old one is kept"):
        store.save("own", "d", memory(1), LAYOUT)
    assert stored(tmp_path / "s") == [f"own/{node}.1.memory" for node in "abcn"]
    monkeypatch.setenv("FEDCOMP_STATE_BYTES", "10")
    with pytest.raises(FedcompError, match="the 10 that"):
        FileStore(tmp_path / "t").save("1", "n", memory(1), LAYOUT)


@pytest.mark.parametrize("damage", [b"", b"PK\x03\x04rubbish", b"\xfc\x9f\x01\x01", None])
def test_a_damaged_file_counts_as_none(damage: bytes | None, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = FileStore(tmp_path)
    store.save("1", "n", memory(1), LAYOUT)
    (path,) = tmp_path.rglob("*.memory")
    path.write_bytes(path.read_bytes()[:-30] if damage is None else damage)
    with caplog.at_level(logging.WARNING):
        assert store.load("1", "n", 1, LAYOUT) is None
    assert "cannot be used" in caplog.text
    store.save("1", "n", memory(1), LAYOUT)
    assert store.load("1", "n", 1, LAYOUT)


def test_a_full_disk_keeps_the_old_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FileStore(tmp_path)
    store.save("1", "n", memory(1), LAYOUT)

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(FedcompError, match=r"cannot be stored .*No space left.*the old one is kept"):
        store.save("1", "n", memory(2), LAYOUT)
    assert stored(tmp_path) == ["1/n.1.memory"]
    assert value(store.load("1", "n", 1, LAYOUT)) == 1


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FedcompError, match="FEDCOMP_STATE_DIR"):
        FileStore(tmp_path / "file").save("1", "n", memory(1), LAYOUT)


def test_settings_that_make_no_sense_are_named() -> None:
    for wrong in ({"precision": "float8"}, {"max_bytes": 0}):
        with pytest.raises(FedcompError, match=next(iter(wrong))):
            FileStore(**wrong)
