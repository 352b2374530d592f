"""Where clients keep what feedback remembers."""

import contextlib
import logging
import os
import pickle
import time
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
    for training in ("1-old", "1-recent"):
        store.save(training, "node-7", memory(1), LAYOUT)
    old = [tmp_path / "1-old" / "node-7.1.memory", tmp_path / "1-recent" / ".fedcomp-ki_l3d.tmp"]
    old += [tmp_path / "2" / "partition-3.model", tmp_path / "2" / "node-3.model"]
    (tmp_path / "2").mkdir()
    for path in old[1:]:
        path.write_bytes(b"x" * 100)
    for path in (*old, tmp_path / "1-old", tmp_path / "2"):
        os.utime(path, (0, 0))
    (tmp_path / "1-recent" / ".fedcomp-wr1t1ng.tmp").write_bytes(b"another process")
    store.save("1-new", "node-7", memory(1), LAYOUT)
    kept = ["1-new/node-7.1.memory", "1-recent/.fedcomp-wr1t1ng.tmp", "1-recent/node-7.1.memory"]
    assert stored(tmp_path) == kept
    for folder in ("1-old", "2"):  # emptied just now
        os.utime(tmp_path / folder, (0, 0))
    store.save("1-newer", "node-7", memory(1), LAYOUT)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1-new", "1-newer", "1-recent"]


STRANGERS = (
    "docs/thesis.tex", ".ssh/id_ed25519", "2019/photo.jpg", "2019/bert.model", "2019/notes.memory", "7-own/scratch.tmp",
    "7-own/tmpabc.tmp", "1-old/.fedcomp-readme", "1-old/node-1.1.memory.bak", "1-old/node-x.1.memory",
    "2-a-b/node-1.model", "runs/node-1.1.memory", "7_own/node-1.model", "1-old/deep/node-1.model", "node-1.model",
)  # fmt: skip
"""Files that are not ours, in a home directory that FEDCOMP_STATE_DIR names."""


@pytest.mark.parametrize("age_days", [0, 1, 29, 31, 10_000])
def test_the_files_of_others_stay_whatever_their_age_and_size(age_days: int, tmp_path: Path) -> None:
    """A1: they do not count either, so they leave no less room."""
    home = tmp_path / "home"
    then = time.time() - age_days * 24 * 3600
    folders = [home / name for name in ("empty", "2018 empty", "7-own/node-2.1.memory", "3-empty-too")]
    for folder in folders:
        folder.mkdir(parents=True)
    for name in STRANGERS:
        (home / name).parent.mkdir(exist_ok=True)
        (home / name).write_bytes(b"x" * 10_000)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "node-1.1.memory").write_bytes(b"x")
    (home / "9").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    for path in [*home.rglob("*"), tmp_path / "elsewhere" / "node-1.1.memory", tmp_path / "elsewhere"]:
        os.utime(path, (then, then))
    store = FileStore(home, max_bytes=1000)
    store.save("1-old", "node-1", memory(1), LAYOUT)
    for round_ in range(1, 8):
        for training in ("1-old", "7-own", "8-new"):
            store.save(training, "node-1", memory(round_), LAYOUT)
    for _ in range(2):  # the second time in a new training, after all folders have grown old
        for path in home.rglob("*"):
            os.utime(path, (then, then))
        with contextlib.suppress(FedcompError):
            store.save(f"{then:.0f}", "node-1", memory(1), LAYOUT)
    assert all((home / name).stat().st_size == 10_000 for name in STRANGERS)
    assert all(folder.is_dir() for folder in folders)
    assert (home / "9" / "node-1.1.memory").exists()
    ours = [home / name for name in stored(home) if name not in STRANGERS]
    assert 0 < sum(path.stat().st_size for path in ours) <= 1000


def size_of_a_memory(directory: Path) -> int:
    return Path(FileStore(directory).save("1", "node-1", memory(1), LAYOUT)).stat().st_size


def test_there_is_a_limit_to_the_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other trainings make room, the oldest first; one's own memories never do."""
    monkeypatch.setattr("fedcomp_clients.files._KEEP_S", float("inf"))
    store = FileStore(tmp_path / "s", max_bytes=4 * size_of_a_memory(tmp_path / "probe"))
    for age, training in ((30, "2-older"), (20, "1-old"), (10, "3-own")):
        store.save(training, "node-9", memory(1), LAYOUT)
        os.utime(tmp_path / "s" / training / "node-9.1.memory", (1e9 - age, 1e9 - age))
    expected = ["3-own/node-1.1.memory", "3-own/node-9.1.memory"]
    store.save("3-own", "node-1", memory(1), LAYOUT)
    assert stored(tmp_path / "s") == ["1-old/node-9.1.memory", "2-older/node-9.1.memory", *expected]
    store.save("3-own", "node-2", memory(1), LAYOUT)
    assert stored(tmp_path / "s")[0] == "1-old/node-9.1.memory"
    store.save("3-own", "node-3", memory(1), LAYOUT)
    assert stored(tmp_path / "s") == [f"3-own/node-{node}.1.memory" for node in "1239"]
    with pytest.raises(FedcompError, match=r"FEDCOMP_STATE_BYTES allows.*the old one is kept"):
        store.save("3-own", "node-4", memory(1), LAYOUT)
    assert stored(tmp_path / "s") == [f"3-own/node-{node}.1.memory" for node in "1239"]
    monkeypatch.setenv("FEDCOMP_STATE_BYTES", "10")
    with pytest.raises(FedcompError, match="the 10 that"):
        FileStore(tmp_path / "t").save("1", "node-1", memory(1), LAYOUT)


def test_a_file_that_is_replaced_counts_once(tmp_path: Path) -> None:
    """C6: the directory is full, and stays as full as it is."""
    size = size_of_a_memory(tmp_path / "probe")
    store = FileStore(tmp_path / "s", max_bytes=2 * size)
    for _ in range(3):
        for node in ("node-1", "node-2"):
            store.save("1", node, memory(1), LAYOUT)
    assert stored(tmp_path / "s") == ["1/node-1.1.memory", "1/node-2.1.memory"]


def test_what_a_killed_process_left_in_this_training_makes_room(tmp_path: Path) -> None:
    size = size_of_a_memory(tmp_path)
    leftover = tmp_path / "1" / ".fedcomp-killed.tmp"
    leftover.write_bytes(b"x" * size)
    store = FileStore(tmp_path, max_bytes=2 * size)
    with pytest.raises(FedcompError, match="FEDCOMP_STATE_BYTES"):  # perhaps somebody is writing it
        store.save("1", "node-2", memory(1), LAYOUT)
    os.utime(leftover, (0, 0))
    store.save("1", "node-2", memory(1), LAYOUT)
    assert stored(tmp_path) == ["1/node-1.1.memory", "1/node-2.1.memory"]


@pytest.mark.parametrize("by_whom", ["another process", "nobody"])
def test_a_file_that_cannot_be_removed_counts_as_removed_only_if_it_is_gone(
    by_whom: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C6: between listing and removing, another process may have removed it."""
    size = size_of_a_memory(tmp_path)
    store, unlink = FileStore(tmp_path, max_bytes=size), Path.unlink

    def failing(self: Path, missing_ok: bool = False) -> None:
        if by_whom == "nobody":
            raise PermissionError(13, "Permission denied")
        unlink(self)
        unlink(self, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", failing)
    if by_whom == "nobody":
        with pytest.raises(FedcompError, match="FEDCOMP_STATE_BYTES"):
            store.save("2", "node-1", memory(1), LAYOUT)
    else:
        store.save("2", "node-1", memory(1), LAYOUT)
    assert stored(tmp_path) == [f"{1 if by_whom == 'nobody' else 2}/node-1.1.memory"]


def test_files_are_not_counted_for_each_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """C6: and yet the limit holds, as they are counted the more often the less room there is."""
    size = size_of_a_memory(tmp_path / "probe")
    store, scanned, scandir = FileStore(tmp_path / "s", max_bytes=400 * size), [0], os.scandir

    def counting(path: Any) -> Any:
        scanned[0] += 1
        return scandir(path)

    monkeypatch.setattr(os, "scandir", counting)
    seen = []
    for number in range(400):
        before = scanned[0]
        store.save("1", f"node-{number}", memory(1), LAYOUT)
        seen.append(scanned[0] > before)
    assert sum(seen[:200]) <= 60
    assert seen[-1]
    with pytest.raises(FedcompError, match="FEDCOMP_STATE_BYTES"):
        store.save("1", "node-400", memory(1), LAYOUT)


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


def test_a_process_keeps_the_memories_of_its_last_trainings_only() -> None:
    """C5: a client that lives through hundreds of trainings does not fill up, and forgets none that is going on."""
    store = MemoryStore()
    store.save("0", "node-1", memory(1), LAYOUT)
    for number in range(1, 30):
        for node in ("node-1", "node-2"):
            store.save(str(number), node, memory(1), LAYOUT)
        assert store.load("0", "node-1", 1, LAYOUT) is not None
    kept = [n for n in range(30) if store.load(str(n), "node-1", 1, LAYOUT)]
    assert kept == [0, *range(23, 30)]
    assert len(pickle.dumps(store)) < 10_000
    revived = pickle.loads(pickle.dumps(store))
    assert revived.load("29", "node-1", 1, LAYOUT) is not None
