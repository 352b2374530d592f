"""Bytes that a round really costs a client's link: a SuperLink and a SuperNode on loopback, and a proxy that counts.

Payload is what a strategy wants to send; the wire carries requests, headers, the ids of objects and a request for every
object of the model that comes down as well.
"""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fedcomp.errors import FedcompError
from fedcomp_simulations.bench.wire_app import CONFIG
from fedcomp_simulations.deployment import CountingProxy, Deployment, Exchange
from fedcomp_simulations.deployment.app import write_app

ROUNDS = 4
MEASURED = 3
"""The round that is measured: all is settled, and the end of the run does not count into it."""
FLEET = "/v1/fleet/"

_APP = "fedcomp_simulations.bench.wire_app"
_RUN_S = 300.0
_FIRST = ("get-run", "get-fab")
_IDLE = ("send-node-heartbeat", "register-node", "activate-node", "deactivate-node", "unregister-node")


@dataclass(frozen=True)
class Setting:
    """A way to run rounds: an uplink, "" for plain Flower, and further arguments of Compressed."""

    name: str
    uplink: str = ""
    options: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class WireRow:
    """What one round in the middle of a run cost one client.

    Attributes:
        method: name of the setting.
        messages: that the client was sent in the round.
        requests: number of requests by kind.
        bytes_up_by_kind: what these requests took, headers included.
        payload_up: of the upload: the frame, or the arrays of a plain reply.
        bytes_up, bytes_down: of all requests and responses of the round.
        bytes_up_beyond: bytes_up without the payload.
        estimate_up: bytes_up as the strategy's own accounting estimates them; 0: it has none.
        start_bytes_up, start_bytes_down: what the first message of a run costs once, for the run and its app.
        idle_bytes_up: of a request that asks for messages when there are none, every 3 s; the mean.
    """

    method: str
    messages: int
    requests: dict[str, int]
    bytes_up_by_kind: dict[str, int]
    payload_up: int
    bytes_up: int
    bytes_down: int
    bytes_up_beyond: int
    estimate_up: int
    start_bytes_up: int
    start_bytes_down: int
    idle_bytes_up: int

    def to_json(self) -> dict[str, Any]:
        """Plain values; the keys are a contract with whoever reads the file."""
        return asdict(self)


def settings(codec: str) -> list[Setting]:
    """What is measured: plain Flower, and Compressed with this codec in its ways to send what is beside the frame."""
    piggyback = (("mixed_fleet", False), ("evaluation", "piggyback"))
    return [
        Setting("plain Flower"),
        Setting("Compressed, as arrays", codec, (("compact", False),)),
        Setting("Compressed", codec),
        Setting("Compressed, piggyback", codec, piggyback),
    ]


def measure_wire(chosen: Sequence[Setting], on_done: Callable[[WireRow], None] | None = None) -> list[WireRow]:
    """Run each setting for four rounds on one SuperNode behind a counting proxy. Takes about 45 s for each.

    Raises DeploymentError if a process or a run fails; the message has the end of its log.
    """
    rows = []
    with TemporaryDirectory(prefix="fedcomp-wire-") as name:
        folder = Path(name)
        app = write_app(folder, "wire", f"{_APP}:server", f"{_APP}:client", CONFIG | {"rounds": ROUNDS})
        with Deployment(folder / "run") as deployment, CountingProxy(deployment.address) as proxy:
            deployment.add_node({"partition-id": 0, "num-partitions": 1}, superlink=proxy.address)
            for number, setting in enumerate(chosen):
                before, results = len(proxy.exchanges), folder / f"{number}.json"
                config = {"uplink": setting.uplink, "options": json.dumps(dict(setting.options))}
                deployment.run(app, config | {"results": str(results)}, _RUN_S)
                rows.append(_row(setting.name, proxy.exchanges[before:], json.loads(results.read_text("utf-8"))))
                if on_done is not None:
                    on_done(rows[-1])
    return rows


def kind(exchange: Exchange) -> str:
    """The last part of its path, such as "pull-object"."""
    return exchange.path.removeprefix(FLEET)


def is_idle(exchange: Exchange) -> bool:
    """Whether it is a heartbeat, or a question for messages when there were none: what costs as much without rounds."""
    return kind(exchange) in _IDLE or (kind(exchange) == "pull-messages" and not exchange.body_down)


def split_messages(exchanges: Sequence[Exchange]) -> list[list[Exchange]]:
    """What belongs to each message, idle requests left out: a node sees to one after the other."""
    messages: list[list[Exchange]] = []
    for exchange in exchanges:
        if is_idle(exchange):
            continue
        if kind(exchange) == "pull-messages":
            messages.append([])
        if messages:
            messages[-1].append(exchange)
    return messages


def _row(method: str, exchanges: Sequence[Exchange], results: Mapping[str, Any]) -> WireRow:
    """Sum up a run.

    Args:
        results: as the app writes them: when its rounds began, by the clock of this machine, and their payloads.
    """
    messages = split_messages(exchanges)
    begin, end = results["begun"][MEASURED - 1 : MEASURED + 1]
    counted = [message for message in messages if begin <= message[0].started < end]
    if not counted:
        raise FedcompError(f"{method}: the proxy has seen no message in round {MEASURED}")
    requests = list(chain.from_iterable(counted))
    by_kind: Counter[str] = Counter()
    for exchange in requests:
        by_kind[kind(exchange)] += exchange.bytes_up
    start = [exchange for exchange in messages[0] if kind(exchange) in _FIRST]
    idle = [e.bytes_up for e in exchanges if is_idle(e) and kind(e) == "pull-messages"]
    payload, up = int(results["payloads"][MEASURED - 1]), sum(by_kind.values())
    return WireRow(
        method=method,
        messages=len(counted),
        requests=dict(Counter(map(kind, requests))),
        bytes_up_by_kind=dict(by_kind),
        payload_up=payload,
        bytes_up=up,
        bytes_down=sum(e.bytes_down for e in requests),
        bytes_up_beyond=up - payload,
        estimate_up=int(results["estimates"][MEASURED - 1]),
        start_bytes_up=sum(e.bytes_up for e in start),
        start_bytes_down=sum(e.bytes_down for e in start),
        idle_bytes_up=round(sum(idle) / max(len(idle), 1)),
    )
