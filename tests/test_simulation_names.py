"""Ids and orders of an engine's own change no bit of a run; networks made once share nothing that is written to."""

import random
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from engine_runs import METHODS, SAMPLED, SEED
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.run import Run

from fedcomp_clients import CompressMod, MemoryModelCache, MemoryStore
from fedcomp_simulations import models
from fedcomp_simulations.apps import RoundOutcome, client_app, server_app
from fedcomp_simulations.experiment import Method
from fedcomp_simulations.fleet import Fleet
from fedcomp_simulations.fleet_grid import FleetGrid
from fedcomp_simulations.grid import FIRST_NODE_ID, InProcessGrid

pytestmark = pytest.mark.usefixtures("one_thread")


class Strange(Grid):
    """A grid whose nodes have ids as a SuperLink draws them, and reply in any order."""

    def __init__(self, inner: InProcessGrid) -> None:
        self.inner, self.random = inner, random.Random(5)
        self.ids = {node: self.random.getrandbits(62) for node in inner.get_node_ids()}

    def set_run(self, run: Run) -> None:
        self.inner.set_run(run)

    @property
    def run(self) -> Run:
        return self.inner.run

    def create_message(self, *args: Any, **named: Any) -> Message:
        return self.inner.create_message(*args, **named)

    def get_node_ids(self) -> list[int]:
        return self.random.sample(list(self.ids.values()), len(self.ids))

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        known = {own: node for node, own in self.ids.items()}
        messages = list(messages)
        for message in messages:
            message.metadata.__dict__["_dst_node_id"] = known[message.metadata.dst_node_id]
        return self.inner.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        replies = self.inner.pull_messages(message_ids)
        for reply in replies:
            reply.metadata.__dict__["_src_node_id"] = self.ids[reply.metadata.src_node_id]
        return self.random.sample(replies, len(replies))

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        return self.pull_messages(self.push_messages(messages))


def outcomes(method: Method, *, strange: bool) -> list[RoundOutcome]:
    mod, told = CompressMod(MemoryStore(), models=MemoryModelCache()), list[RoundOutcome]()
    with InProcessGrid(client_app(SAMPLED, SEED, mod), SAMPLED.clients) as grid:
        context = grid.context(FIRST_NODE_ID)
        server_app(SAMPLED, method, SEED, told.append)(Strange(grid) if strange else grid, context)
    return told


@pytest.mark.parametrize("method", METHODS, ids=[method.name for method in METHODS])
def test_ids_and_orders_change_no_bit(method: Method) -> None:
    for strange, usual in zip(outcomes(method, strange=True), outcomes(method, strange=False), strict=True):
        assert replace(strange, arrays=usual.arrays) == usual
        for name, array in usual.arrays.items():
            assert strange.arrays[name].data == array.data


def test_a_node_that_comes_back_with_another_id_is_the_same() -> None:
    with InProcessGrid(client_app(SAMPLED, SEED, CompressMod()), 3) as grid:
        strange = Strange(grid)
        fleet = FleetGrid(strange, Fleet(), 3, SEED)
        nodes = fleet.get_node_ids()
        assert nodes == [FIRST_NODE_ID + partition for partition in range(3)]
        strange.ids[FIRST_NODE_ID + 1] = 77
        assert fleet.get_node_ids() == nodes
        ask = Message(RecordDict({"partition": ConfigRecord({"ask": True})}), FIRST_NODE_ID + 1, "query")
        (reply,) = fleet.send_and_receive([ask])
        assert (ask.metadata.dst_node_id, reply.metadata.src_node_id) == (FIRST_NODE_ID + 1,) * 2
        assert reply.content.config_records["partition"]["partition-id"] == 1
        del strange.ids[FIRST_NODE_ID]
        assert fleet.get_node_ids() == nodes[1:]


@pytest.mark.parametrize("name", ["cnn", "gru", "mlp", "transformer"])
def test_networks_share_nothing_that_is_written_to(name: str) -> None:
    start, other = models.initial_arrays(name, 0), models.initial_arrays(name, 1)
    first, second = models.build(name, start), models.build(name, other)
    first.eval()
    assert all(module.training for module in second.modules())
    assert not {id(module) for module in first.modules()} & {id(module) for module in second.modules()}
    with torch.no_grad():
        for weight in first.parameters():
            weight.zero_()
    for key, value in second.state_dict().items():
        np.testing.assert_array_equal(value.numpy(), other[key])
    assert all(not value.any() for value in first.state_dict().values())
    assert start[next(iter(start))].any()  # nor are they written to
