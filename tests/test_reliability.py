"""What is lost on the way never happened: uploads, replies, SuperNodes, files; and bad replies are counted by cause."""

import copy
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flower_app import CLIENTS, Fault, Model, OrderedGrid, arrays, client_app, frame_of, put_frame, record, start_model
from flwr.app import Context, Message, RecordDict
from flwr.serverapp.strategy import FedAvg, FedMedian

from fedcomp import FedcompError, Layout, Memory, NonFiniteError, Plan, TopK, Uniform, decompress
from fedcomp.feedback.stored import memory_layout
from fedcomp.request import ACK, ACKS, KEY
from fedcomp_clients import CompressMod, FileModelCache, FileStore, MemoryModelCache, MemoryStore, StateStore
from fedcomp_strategies import Compressed
from fedcomp_strategies.accounts import DROPPED

QUIET: dict[str, Any] = {"fraction_evaluate": 0.0, "min_evaluate_nodes": 0}
UPLINK = Plan(TopK(0.05, values=Uniform(8)), gentle_share=0)
WHO, WHEN = 2, 2
"""The client and the round of the accident."""

Event = Callable[["Fleet", int], None]


class Fleet(OrderedGrid):
    """Clients with a mod each, as on devices, and accidents between and within rounds."""

    def __init__(self, directory: Path | None, accident: str = "", fault: Fault | None = None) -> None:
        self.accident = accident
        self.directory = directory
        self.round = 0
        self.seen: list[Message] = []
        self.stores: dict[int, StateStore] = {}
        self.mods = {i: self.new_mod(i) for i in range(CLIENTS)}
        super().__init__(client_app([self._around], fault), CLIENTS)

    def new_mod(self, partition: int) -> CompressMod:
        if self.directory is None:
            self.stores.setdefault(partition, MemoryStore())
            return CompressMod(self.stores[partition], models=MemoryModelCache())
        self.stores[partition] = FileStore(self.directory / str(partition), precision="float32")
        return CompressMod(self.stores[partition], models=FileModelCache(self.directory / str(partition)))

    def _around(self, message: Message, context: Context, call_next: Any) -> Message:
        partition = int(context.node_config["partition-id"])
        struck = partition == WHO and self.round == WHEN
        if struck and self.accident == "never asked to train":
            raise RuntimeError("no power")
        reply: Message = self.mods[partition](message, context, call_next)
        if struck and self.accident == "dies after training":
            raise RuntimeError("power cut")
        if struck and self.accident == "frame damaged":
            frame = bytearray(frame_of(reply) or b"")
            frame[len(frame) // 2] ^= 1
            put_frame(reply, bytes(frame))
        return reply

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        messages = list(messages)
        if not messages:  # nobody evaluates
            return []
        self.round += 1
        self.seen += messages
        if self.round == WHEN + 1:
            self.between()
        replies = super().send_and_receive(messages, timeout=timeout)
        struck = [r for r in replies if self.partition(r.metadata.src_node_id) == WHO and self.round == WHEN]
        return [r for r in replies if r not in struck] if self.accident == "reply lost" else replies

    def partition(self, node: int) -> int:
        return int(self.context(node).node_config["partition-id"])

    def between(self) -> None:
        """What happens to the client after the round of the accident."""
        if self.accident in ("pending file truncated", "file truncated"):
            self.mods[WHO] = self.new_mod(WHO)
            assert self.directory is not None
            for path in (self.directory / str(WHO)).rglob("*.memory"):
                path.write_bytes(path.read_bytes()[:-9])
        if self.accident == "files removed":
            assert self.directory is not None
            for path in (self.directory / str(WHO)).rglob("*.memory"):
                path.unlink()
        if self.accident == "mod restarted":
            self.mods[WHO] = self.new_mod(WHO)


def train(grid: Fleet, strategy: Compressed | None = None, rounds: int = 5, **options: Any) -> tuple[Model, Compressed]:
    strategy = strategy or Compressed(FedAvg(**QUIET), uplink=UPLINK, **{"feedback": "ef", **options})
    with grid:
        result = strategy.start(grid, record(start_model()), num_rounds=rounds)
    assert result.arrays is not None
    return arrays(result.arrays), strategy


def equal(a: Model, b: Model) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


# --- kill tests ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("feedback", ["ef", "dgc(momentum=0.5)", "ef21", "cafe"])
@pytest.mark.parametrize("files", [True, False], ids=["files", "memory"])
@pytest.mark.parametrize("accident", ["dies after training", "reply lost", "frame damaged"])
def test_an_upload_that_the_server_did_not_use_never_happened(
    accident: str, files: bool, feedback: str, tmp_path: Path
) -> None:
    def place(name: str) -> Path | None:
        return tmp_path / name if files else None

    options: dict[str, Any] = {"feedback": feedback, "mixed_fleet": False}
    expected, reference = train(Fleet(place("a"), "never asked to train"), **options)
    untroubled, _ = train(Fleet(place("b")), **options)
    got, strategy = train(Fleet(place("c"), accident), **options)
    assert equal(got, expected)
    assert not equal(got, untroubled)
    assert [t.failures for t in strategy.traffic] == [t.failures for t in reference.traffic] == [0, 1, 0, 0, 0]
    assert not any(t.resets for t in strategy.traffic)
    causes = {"dies after training": "error", "reply lost": "missing", "frame damaged": "damaged"}
    assert strategy.traffic[1].dropped == {causes[accident]: 1}


@pytest.mark.parametrize("feedback", ["ef", "dgc", "ef21"])
def test_a_restarted_client_finds_its_memory(feedback: str, tmp_path: Path) -> None:
    expected, _ = train(Fleet(tmp_path / "a"), feedback=feedback)
    got, strategy = train(Fleet(tmp_path / "b", "mod restarted"), feedback=feedback)
    assert equal(got, expected)
    assert not any(t.resets for t in strategy.traffic)


def test_a_truncated_file_counts_as_a_new_start_and_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected, _ = train(Fleet(tmp_path / "a", "files removed"))
    caplog.clear()
    got, strategy = train(Fleet(tmp_path / "b", "file truncated"))
    assert equal(got, expected)
    assert [t.resets for t in strategy.traffic] == [0, 0, 1, 0, 0]
    assert [t.failures for t in strategy.traffic] == [0] * 5
    assert "cannot be used" in caplog.text
    assert "1 clients had lost what feedback remembers" in caplog.text


class NewIdentity(Fleet):
    """The SuperNode of the accident comes back under another node id, as one without a registered key does."""

    NEW = 9_999

    def between(self) -> None:
        """See send_and_receive."""

    def restart(self) -> None:
        old = next(node for node in self.get_node_ids() if self.partition(node) == WHO)
        before = self._contexts.pop(old)
        self._contexts[self.NEW] = Context(before.run_id, self.NEW, before.node_config, RecordDict(), before.run_config)
        self.mods[WHO] = self.new_mod(WHO)
        self._contexts = dict(sorted(self._contexts.items()))

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        replies = super().send_and_receive(messages, timeout=timeout)
        if self.round == WHEN and self.NEW not in self._contexts:  # before the next round's messages are made
            self.restart()
        return replies


@pytest.mark.parametrize("accident", ["", "reply lost"])
def test_a_supernode_that_restarts_under_another_id_finds_its_memory(accident: str, tmp_path: Path) -> None:
    """The order of the nodes, and with it that of the sum, changes: hence not to the last bit."""
    expected, _ = train(Fleet(tmp_path / "a", "never asked to train" if accident else ""))
    fleet = NewIdentity(tmp_path / "b", accident)
    got, strategy = train(fleet)
    assert not any(t.resets for t in strategy.traffic)
    for name, values in expected.items():
        assert np.allclose(got[name], values, atol=1e-6), name
    told = [c for m in fleet.seen for c in m.content.config_records.values() if ACKS in c]
    assert [c[ACKS] for c in told] == [[WHO, WHEN - bool(accident)]]
    acks = [c[ACK] for m in fleet.seen for c in m.content.config_records.values() if ACK in c]
    assert sorted(set(acks)) == [1, 2, 3, 4]


def test_what_was_accepted_plus_what_is_committed_is_the_sum_of_all_accepted_updates(tmp_path: Path) -> None:
    """The telescoping law through Flower: 50 rounds, a quarter of the replies lost at random, files of float32."""
    lost = random.Random(5)
    sent: dict[int, list[tuple[int, Model, Model]]] = {i: [] for i in range(CLIENTS)}
    accepted: dict[int, list[int]] = {i: [] for i in range(CLIENTS)}

    class Lossy(Fleet):
        def _around(self, message: Message, context: Context, call_next: Any) -> Message:
            partition = int(context.node_config["partition-id"])
            kept: dict[str, Model] = {}

            def spy(inner: Message, context: Context) -> Message:
                kept["base"] = arrays(inner.content.array_records["arrays"])
                reply: Message = call_next(inner, context)
                kept["new"] = arrays(reply.content.array_records["arrays"])
                return reply

            reply = self.mods[partition](message, context, spy)
            frame = frame_of(reply) or b""
            update = {n: kept["new"][n] - kept["base"][n] for n in ("fc.weight", "fc.bias")}
            decoded = decompress(frame, kept["base"])
            sent[partition].append((self.round, update, {n: decoded[n] - kept["base"][n] for n in update}))
            return reply

        def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
            replies = [r for r in super().send_and_receive(messages, timeout=timeout) if lost.random() < 0.75]
            for reply in replies:
                accepted[self.partition(reply.metadata.src_node_id)].append(self.round)
            return replies

    fleet = Lossy(tmp_path)
    train(fleet, rounds=50)
    for partition, uploads in sent.items():
        (training,) = {path.parent.name for path in (tmp_path / str(partition)).rglob("*.memory")}
        last = accepted[partition][-1]
        layout = memory_layout(Layout.of(start_model()))
        memory = fleet.stores[partition].load(training, f"partition-{partition}", last, layout)
        assert isinstance(memory, Memory)
        for name in ("fc.weight", "fc.bias"):
            used = [(update[name], decoded[name]) for r, update, decoded in uploads if r in accepted[partition]]
            given = np.sum([u for u, _ in used], axis=0, dtype=np.float64)
            told = np.sum([d for _, d in used], axis=0, dtype=np.float64)
            assert np.allclose(told + memory.slots["residual"][name], given, atol=2e-5), name
            assert 25 < len(used) < 48


# --- drops, by cause -------------------------------------------------------------------------------------------------


class Nuisance(Fleet):
    """Adds replies that nobody asked for."""

    old: Message | None = None

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        replies = super().send_and_receive(messages, timeout=timeout)
        if not replies:
            return []
        one = replies[3]
        if self.round == 1:
            self.old = one
            return replies
        if self.round == 2:
            return [*replies, one]  # repeated
        if self.round == 3:
            foreign = copy.deepcopy(one)
            foreign.metadata.__dict__["_src_node_id"] = 77
            return [*replies, foreign]
        if self.round == 4:
            assert self.old is not None
            return [*replies, self.old]  # late, beside the right one
        return replies


@pytest.mark.parametrize("strategy", [FedAvg, FedMedian])
def test_replies_nobody_asked_for_change_nothing_and_are_counted(
    strategy: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected, _ = train(Fleet(None), Compressed(strategy(**QUIET), uplink=UPLINK, feedback="ef"))
    wrapped = Compressed(strategy(**QUIET), uplink=UPLINK, feedback="ef")
    grid = Nuisance(None)
    with grid:
        result = wrapped.start(grid, record(start_model()), num_rounds=5)
    assert result.arrays is not None
    assert equal(arrays(result.arrays), expected)
    causes = [{}, {"repeated": 1}, {"foreign": 1}, {"late": 1}, {}]
    assert [t.dropped for t in wrapped.traffic] == causes
    assert [t.failures for t in wrapped.traffic] == [0] * 5
    for round_, dropped in enumerate(causes, 1):
        metrics = result.train_metrics_clientapp[round_]
        assert {k.removeprefix(DROPPED): v for k, v in metrics.items() if k.startswith(DROPPED)} == dropped
        assert "loss" in metrics
    assert "round 3: replies dropped by cause: {'foreign': 1}" in caplog.text


def test_an_update_that_is_not_finite_is_refused_at_the_client(caplog: pytest.LogCaptureFixture) -> None:
    def nan(reply: Message, context: Context, round_: int) -> None:
        if context.node_config["partition-id"] == WHO and round_ == WHEN:
            model = {n: v.copy() for n, v in arrays(reply.content.array_records["arrays"]).items()}
            model["fc.weight"][0, 0] = np.inf
            reply.content["arrays"] = record(model)

    expected, _ = train(Fleet(None, "never asked to train"))
    got, strategy = train(Fleet(None, fault=nan))
    assert equal(got, expected)
    assert strategy.traffic[WHEN - 1].dropped == {"non-finite": 1}
    assert issubclass(NonFiniteError, ValueError)


def test_a_lost_model_is_counted_as_stale_and_sent_whole(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Forgetful(Fleet):
        def between(self) -> None:
            self.mods[WHO] = CompressMod(self.stores[WHO], models=MemoryModelCache())

    grid = Forgetful(None)
    _, strategy = train(grid, feedback="none", downlink="uniform(8)", mixed_fleet=False)
    assert [t.dropped for t in strategy.traffic] == [{}, {}, {"stale": 1}, {}, {}]
    chains, one_whole = strategy.traffic[4].bytes_down, strategy.traffic[3].bytes_down
    assert one_whole - chains > 3 * 600  # a whole model takes four bytes a weight


def test_zero_weight_is_not_acknowledged() -> None:
    """What counts nothing has not been used: the client sends it again."""

    def weightless(reply: Message, context: Context, round_: int) -> None:
        if context.node_config["partition-id"] == WHO and round_ == WHEN:
            reply.content.metric_records["metrics"]["num-examples"] = 0

    expected, _ = train(Fleet(None, "never asked to train"))
    got, _ = train(Fleet(None, fault=weightless))
    assert equal(got, expected)


def test_no_two_clients_share_a_memory() -> None:
    """c39: one store for all, as in a simulation in one process."""
    shared = MemoryStore()

    class Shared(Fleet):
        def new_mod(self, partition: int) -> CompressMod:
            return CompressMod(shared)

    expected, _ = train(Fleet(None))
    got, _ = train(Shared(None))
    assert equal(got, expected)


def test_the_pointer_is_all_that_is_in_the_context(tmp_path: Path) -> None:
    grid = Fleet(tmp_path)
    train(grid)
    for node in grid.get_node_ids():
        state = grid.context(node).state
        assert set(state) == {KEY}
        pointer = state.config_records[KEY]
        assert Path(str(pointer["memory"])).is_file()
        assert pointer["round"] == 5
        kept = list((tmp_path / str(grid.partition(node))).rglob("*.memory"))
        assert len(kept) == 2  # the one that counts, and the one that waits for its acknowledgement


def test_a_client_that_cannot_keep_the_model_gets_it_whole_and_loses_no_round() -> None:
    class Full(MemoryModelCache):
        def save(self, training: str, node: str, package: bytes) -> None:
            raise FedcompError("no space left")

    class Fulls(Fleet):
        def new_mod(self, partition: int) -> CompressMod:
            return CompressMod(models=Full() if partition == WHO else MemoryModelCache())

    expected, reference = train(Fleet(None), feedback="none", downlink="uniform(8)", mixed_fleet=False)
    got, strategy = train(Fulls(None), feedback="none", downlink="uniform(8)", mixed_fleet=False)
    assert [t.dropped for t in strategy.traffic] == [{}] * 5
    assert equal(got, expected)
    assert strategy.traffic[4].bytes_down > reference.traffic[4].bytes_down + 3 * 600
