"""FleetGrid: any of Flower's Grids, seen by a server whose clients are those of a Fleet.

It wraps the Grid of whichever engine at the server, so that an experiment is the same on each: nodes have ids by their
partitions, not those that the engine has drawn, and Flower's draws from Python's global generator go on from the last
one, whatever the engine's own threads take from it in between. So the same clients are drawn, and replies, which are
added up in the order of these ids, have the same sum to the last bit; every exchange is written down; and clients are
absent, replies lost or late as the Fleet wants it.
"""

import logging
import random
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.run import Run

from fedcomp.errors import FedcompError
from fedcomp_simulations.fleet import Fleet
from fedcomp_simulations.grid import FIRST_NODE_ID, InProcessGrid
from fedcomp_simulations.results import Exchange
from fedcomp_strategies.replies import Reply
from fedcomp_strategies.traffic import objects_in, payload, requests, transport, transport_down

NODES_S = 120.0
"""Seconds that are waited for all nodes to be there, and to say which partition they have."""

_POLL_S = 0.5
_ASKED, _TOLD = "partition", "partition-id"


def answer_query(message: Message, context: Context) -> Message:
    """Say which partition this node has: the query function of an experiment's ClientApp."""
    told = ConfigRecord({_TOLD: int(context.node_config["partition-id"])})
    return Message(RecordDict({_ASKED: told}), reply_to=message)


@contextmanager
def expected_missing(fleet: Fleet) -> Iterator[None]:
    """Keep the strategy quiet about replies that are missing, round after round, where the fleet is to lose some."""

    def is_news(record: logging.LogRecord) -> bool:
        causes = record.args[1] if isinstance(record.args, tuple) and len(record.args) == 2 else None
        return not (isinstance(causes, dict) and causes.keys() == {"missing"})

    log = logging.getLogger("fedcomp")
    if fleet.loses:
        log.addFilter(is_news)
    try:
        yield
    finally:
        log.removeFilter(is_news)


class FleetGrid(Grid):
    """A Grid whose clients are those of a fleet.

    Messages of other kinds than "train" pass, and count as nothing.

    Args:
        grid: of an engine.
        fleet: what happens to the clients.
        clients: how many nodes there are, with the partition ids from 0 on.
        seed: feeds all chance.
        nodes_s: seconds to wait for all of them.

    Attributes:
        exchanges: by round, in the order in which the clients were asked.
    """

    def __init__(self, grid: Grid, fleet: Fleet, clients: int, seed: int, nodes_s: float = NODES_S) -> None:
        self.exchanges: dict[int, tuple[Exchange, ...]] = {}
        self._grid = grid
        self._fleet = fleet
        self._clients = clients
        self._seed = seed
        self._nodes_s = nodes_s
        self._clock = fleet.clock(clients, seed)
        self._partitions: dict[int, int] = {}  # by the engine's id of the node
        self._drawn: Any = None  # state of the global generator when clients had last been drawn
        self._gone: set[int] = set()  # nodes that others have taken the place of; engines list them for a while

    def set_run(self, run: Run) -> None:
        """Set the run of the engine's Grid."""
        self._grid.set_run(run)

    @property
    def run(self) -> Run:
        """Information about the run."""
        return self._grid.run

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        """Make a message; `Message(...)` does the same."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> list[int]:
        """Ids of the nodes that are there, in the order of their partitions; the first time, once all are there.

        A node that restarts has the id of its former self.

        Raises FedcompError if some are not within `nodes_s`, or do not say which partition they have.
        """
        if self._drawn is not None:
            random.setstate(self._drawn)
            self._drawn = None  # what is drawn now counts
        state = random.getstate()
        try:
            return self._nodes()
        finally:
            random.setstate(state)

    def _nodes(self) -> list[int]:
        nodes = list(self._grid.get_node_ids())
        if not self._partitions:
            until = time.monotonic() + self._nodes_s
            while len(nodes) < self._clients and time.monotonic() < until:
                time.sleep(_POLL_S)
                nodes = list(self._grid.get_node_ids())
            if len(nodes) < self._clients:
                raise FedcompError(
                    f"expected {self._clients} nodes, got {len(nodes)} within {self._nodes_s:g} s; start the others, "
                    "or see in their logs why they are not connected"
                )
        self._learn([node for node in nodes if node not in self._partitions and node not in self._gone])
        return sorted(FIRST_NODE_ID + self._partitions[node] for node in nodes if node in self._partitions)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """As the engine's Grid; nothing happens to these messages."""
        messages = list(messages)
        with self._addressed(messages):
            return list(self._grid.push_messages(messages))

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """As the engine's Grid."""
        return self._renamed(self._grid.pull_messages(message_ids))

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        """Send messages that reach their clients, and return the replies that reach the server in time."""
        messages = list(messages)
        if messages:
            self._drawn = random.getstate()
        train = [message for message in messages if message.metadata.message_type.partition(".")[0] == "train"]
        if not train:
            return self._exchanged(messages, timeout)
        fates = {id(message): self._fate(message) for message in train}
        sent = [message for message in messages if fates.get(id(message)) != "absent"]
        replies = self._exchanged(sent, timeout)
        by_message = {reply.metadata.reply_to_message_id: reply for reply in replies}
        exchanges = []
        unheard = set()
        for message in train:
            reply = by_message.get(message.metadata.message_id)
            exchanges.append(self._exchange(message, reply, fates[id(message)]))
            if exchanges[-1].outcome in ("lost", "late"):
                unheard.add(message.metadata.message_id)
        self.exchanges[_round_of(train[0])] = tuple(exchanges)
        self._clock.end_round(exchanges)
        return [reply for reply in replies if reply.metadata.reply_to_message_id not in unheard]

    def _fate(self, message: Message) -> str:
        return self._fleet.fate(self._client(message), _round_of(message), self._seed)

    def _client(self, message: Message) -> int:
        return message.metadata.dst_node_id - FIRST_NODE_ID

    def _exchanged(self, messages: list[Message], timeout: float | None) -> list[Message]:
        if not messages:
            return []
        with self._addressed(messages):
            return self._renamed(self._grid.send_and_receive(messages, timeout=timeout))

    @contextmanager
    def _addressed(self, messages: list[Message]) -> Iterator[None]:
        """Inside, the messages go to the nodes as the engine knows them."""
        theirs = {FIRST_NODE_ID + partition: node for node, partition in self._partitions.items()}
        ours = [message.metadata.dst_node_id for message in messages]
        for message, node in zip(messages, ours, strict=True):
            message.metadata.__dict__["_dst_node_id"] = theirs.get(node, node)
        try:
            yield
        finally:
            for message, node in zip(messages, ours, strict=True):
                message.metadata.__dict__["_dst_node_id"] = node

    def _renamed(self, replies: Iterable[Message]) -> list[Message]:
        """Replies of the nodes as the server knows them; a SuperLink may answer in its own name."""
        replies = list(replies)
        for reply in replies:
            partition = self._partitions.get(reply.metadata.src_node_id)
            if partition is not None:
                reply.metadata.__dict__["_src_node_id"] = FIRST_NODE_ID + partition
        return replies

    def _exchange(self, message: Message, reply: Message | None, fate: str) -> Exchange:
        """What a message and its reply came to."""
        client = self._client(message)
        if fate == "absent":
            return Exchange(client, 0, 0, 0, fate)
        read = None if reply is None else Reply.of(reply)
        down, up = objects_in(message.content), 0 if read is None else read.objects
        moved = Exchange(
            client,
            wire_up=transport(down, up, 0 if read is None else read.payload),
            wire_down=transport_down(down, up, payload([message])),
            requests=requests(down, up),
            outcome="late" if read is None else fate if read.arrived else "failed",
        )
        return replace(moved, outcome="late") if moved.outcome == "ok" and self._clock.is_late(moved) else moved

    def _learn(self, nodes: list[int]) -> None:
        """Learn the partitions of nodes; one that has another's is that one after a restart, under another id."""
        told = self._ask(nodes) if nodes else {}
        by_partition: dict[int, int] = {}
        for node, partition in told.items():
            if not 0 <= partition < self._clients:
                raise FedcompError(
                    f"node {node} has partition-id {partition}, expected one from 0 to {self._clients - 1}: as many "
                    "nodes as the experiment has clients"
                )
            if (other := by_partition.setdefault(partition, node)) != node:
                raise FedcompError(f"nodes {other} and {node} both have partition-id {partition}; give each its own")
        self._gone |= {node for node, partition in self._partitions.items() if partition in by_partition}
        self._partitions = {n: p for n, p in self._partitions.items() if n not in self._gone} | dict(told)

    def _ask(self, nodes: list[int]) -> Mapping[int, int]:
        """The partitions of nodes, as they say themselves."""
        if isinstance(self._grid, InProcessGrid):
            return {node: int(self._grid.context(node).node_config[_TOLD]) for node in nodes}
        messages = [Message(RecordDict({_ASKED: ConfigRecord({"ask": True})}), node, "query") for node in nodes]
        replies = self._grid.send_and_receive(messages, timeout=self._nodes_s)
        told: dict[int, int] = {}
        for reply in replies:
            if reply.has_error():
                raise FedcompError(
                    f"node {reply.metadata.src_node_id} does not tell its partition: {reply.error.reason}"
                )
            told[reply.metadata.src_node_id] = int(reply.content.config_records[_ASKED][_TOLD])  # type: ignore[arg-type]
        if missing := [node for node in nodes if node not in told]:
            raise FedcompError(f"nodes {missing[:5]} have not told their partitions within {self._nodes_s:g} s")
        return told


def _round_of(message: Message) -> int:
    """The round that strategies write into the configuration; 0 without."""
    found = [c["server-round"] for c in message.content.config_records.values() if "server-round" in c]
    return int(found[0]) if found else 0  # type: ignore[arg-type]
