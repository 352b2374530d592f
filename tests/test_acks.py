"""What the server tells clients of their former uploads, and what a client can make of the numbers of others."""

import time
from typing import Any

import pytest
from flower_app import OrderedGrid, client_app, record, start_model
from flwr.app import Context, Message
from flwr.serverapp.strategy import FedAvg

from fedcomp.request import ACK
from fedcomp_clients import CompressMod, MemoryModelCache, MemoryStore
from fedcomp_strategies import Compressed
from fedcomp_strategies.acks import MOST_ORPHANS, Acknowledgements


def test_nodes_are_told_the_last_round_that_was_used() -> None:
    acks = Acknowledgements()
    assert acks.told(11) is None
    acks.accept(11, 3)
    acks.accept(11, 5)
    assert acks.told(11) == 5
    assert acks.orphans([]) == []  # it has no number


def test_the_numbers_of_nodes_that_are_gone_are_told_those_seen_last_first() -> None:
    acks = Acknowledgements()
    for number in range(100):
        acks.accept(1000 + number, 1 + number % 50, number)
    assert acks.orphans(range(1000, 1100)) == []
    assert acks.orphans({*range(1000, 1099)} - {1030}) == [99, 50, 30, 31]
    told = acks.orphans([1049])
    assert len(told) == 2 * MOST_ORPHANS
    assert told[:4] == [99, 50, 98, 49]
    assert 49 not in told[::2]


def test_a_node_that_comes_back_under_another_id_is_the_successor() -> None:
    acks = Acknowledgements()
    acks.accept(11, 5, 0)
    assert acks.orphans([99]) == [0, 5]
    acks.accept(99, 6, 0)
    assert acks.told(99) == 6
    assert acks.orphans([99]) == []
    assert acks.orphans([]) == [0, 6]


@pytest.mark.parametrize("asked_before", [True, False])
def test_nobody_takes_away_what_another_node_is_told(asked_before: bool, caplog: pytest.LogCaptureFixture) -> None:
    """B8: node 99 gives the number of node 11, which is there."""
    acks = Acknowledgements()
    acks.accept(11, 5, 0)
    if asked_before:
        assert acks.orphans([11, 99]) == []
    acks.accept(99, 6, 0)
    assert (acks.told(11), acks.told(99)) == (5, 6)
    assert "node 99 says that it is client 0 (its partition-id), as node 11 does" in caplog.text
    assert acks.orphans([99]) == [0, 5]
    caplog.clear()
    acks.accept(99, 7, 0)  # known by now: its number is no news
    assert acks.orphans([99]) == [0, 5]
    assert not caplog.text


def test_a_known_node_cannot_take_the_number_of_one_that_was_away_for_a_while() -> None:
    acks = Acknowledgements()
    acks.accept(11, 5, 0)
    acks.accept(12, 5, 1)
    acks.orphans([12])
    acks.accept(12, 6, 0)
    acks.accept(99, 6, 0)  # a stranger may, as it may be node 11 restarted ...
    assert acks.told(11) == 5  # ... which loses nothing if it is not


def test_thousands_of_introductions_take_no_time() -> None:
    """B8: each one copied all numbers."""
    acks, start = Acknowledgements(), time.perf_counter()
    for node in range(20_000):
        acks.accept(node, 1, node)
    assert time.perf_counter() - start < 1


def test_two_devices_with_one_partition_id_train_on_with_their_own_memories(caplog: pytest.LogCaptureFixture) -> None:
    told: list[dict[int, Any]] = []
    mods: dict[int, CompressMod] = {}

    class Spy(OrderedGrid):
        def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> list[Message]:
            messages = list(messages)
            told.append({m.metadata.dst_node_id: m.content.config_records["config"].get(ACK) for m in messages})
            return super().send_and_receive(messages, timeout=timeout)

    def own_disk(message: Message, context: Context, call_next: Any) -> Message:
        mod = mods.setdefault(context.node_id, CompressMod(MemoryStore(), models=MemoryModelCache()))
        return mod(message, context, call_next)

    strategy = Compressed(FedAvg(fraction_evaluate=0.0, min_evaluate_nodes=0), "topk(0.05)", feedback="ef")
    with Spy(client_app([own_disk]), 3) as grid:
        for node in grid.get_node_ids():
            grid.context(node).node_config["partition-id"] = 0
        nodes = grid.get_node_ids()
        strategy.start(grid, record(start_model()), num_rounds=4)
    assert [t for t in told if t] == [dict.fromkeys(nodes, ack) for ack in (None, 1, 2, 3)]
    assert not any(traffic.resets for traffic in strategy.traffic)
    assert caplog.text.count("says that it is client 0") == 2


def test_a_node_that_fell_silent_counts_as_gone_though_flower_still_lists_it() -> None:
    acks = Acknowledgements()
    acks.accept(11, 5, 0)
    acks.accept(12, 5, 1)
    acks.miss(11)
    assert acks.orphans([11, 12, 99]) == [0, 5]
    acks.accept(99, 6, 0)
    assert acks.orphans([11, 12, 99]) == []
    acks.accept(11, 7)  # it was only slow
    assert acks.told(11) == 7
    acks.miss(12)
    acks.accept(12, 7)
    assert acks.orphans([11, 12, 99]) == []
