"""`fedcomp bench --wire`: which requests count, what rows say, and that a round costs what we say it does."""

import json
import subprocess
import sys
from typing import Any

import pytest
from test_deployment import IMPORTABLE

from fedcomp import FedcompError
from fedcomp_simulations.bench import wire
from fedcomp_simulations.bench.show import wire_table
from fedcomp_simulations.deployment import Exchange

PULL, OBJECT, PUSH = (wire.FLEET + name for name in ("pull-messages", "pull-object", "push-object"))

KEYS = {
    "method": str, "messages": int, "requests": dict, "bytes_up_by_kind": dict, "payload_up": int, "bytes_up": int,
    "bytes_down": int, "bytes_up_beyond": int, "estimate_up": int, "start_bytes_up": int, "start_bytes_down": int,
    "idle_bytes_up": int,
}  # fmt: skip


def exchange(path: str, started: float, up: int = 10, down: int = 100, body: int = 50) -> Exchange:
    return Exchange(path, started, 200, up, down, up - 5, body)


def run_of_four() -> list[Exchange]:
    """A message a round at 10, 20, 30, 40 s, of which the third is the largest; polls and a heartbeat between them."""
    seen = [exchange(wire.FLEET + "register-node", 0), exchange(PULL, 5, up=853, body=0)]
    for round_ in range(1, 5):
        seen.append(exchange(PULL, 10 * round_))
        if round_ == 1:
            seen += [exchange(wire.FLEET + name, 11, up=100, down=1000) for name in ("get-run", "get-fab")]
        seen += [exchange(OBJECT, 10 * round_ + 1 + i) for i in range(round_)]
        seen.append(exchange(wire.FLEET + "send-node-heartbeat", 10 * round_ + 5, up=7777))
        seen += [exchange(PUSH, 10 * round_ + 6, up=1000), exchange(PULL, 10 * round_ + 7, up=853, body=0)]
    return seen


def test_a_row_holds_one_round_and_nothing_idle() -> None:
    results = {"begun": [9.0, 19.0, 29.0, 39.0], "payloads": [1, 2, 900, 4], "estimates": [0, 0, 1100, 0]}
    row = wire._row("x", run_of_four(), results)
    assert row.requests == {"pull-messages": 1, "pull-object": 3, "push-object": 1}
    assert row.bytes_up_by_kind == {"pull-messages": 10, "pull-object": 30, "push-object": 1000}
    assert (row.messages, row.payload_up, row.bytes_up, row.bytes_up_beyond) == (1, 900, 1040, 140)
    assert (row.bytes_down, row.estimate_up, row.idle_bytes_up) == (500, 1100, 853)
    assert (row.start_bytes_up, row.start_bytes_down) == (200, 2000)
    assert {key: type(value) for key, value in row.to_json().items()} == KEYS
    assert json.loads(json.dumps(row.to_json())) == row.to_json()
    assert wire_table([row]).row_count == 1


def test_a_round_that_the_proxy_has_not_seen_is_an_error() -> None:
    results = {"begun": [0.0, 1.0, 2.0, 3.0], "payloads": [1] * 4, "estimates": [0] * 4}
    with pytest.raises(FedcompError, match="x: the proxy has seen no message in round 3"):
        wire._row("x", run_of_four(), results)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--server"], "--wire: cannot be combined with --server, --input, --peers or --plot"),
        (["--peers"], "--wire: cannot be combined"),
        (["--codec", "int8", "--codec", "sign"], "--codec: expected one with --wire, got 2"),
        (["--codec", "nonsense"], "unknown codec 'nonsense'"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], said: str) -> None:
    command = [sys.executable, "-m", "fedcomp_simulations.cli", "bench", "--wire", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.slow
def test_a_round_costs_at_most_10_kb_beyond_the_payload(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frame, metrics and evaluation, the requests for the model that comes down included."""
    monkeypatch.setenv("PYTHONPATH", IMPORTABLE["PYTHONPATH"])
    told: list[Any] = []
    plain, piggyback = wire.measure_wire([wire.settings("int8")[0], wire.settings("int8")[-1]], told.append)
    assert told == [plain, piggyback]
    assert piggyback.bytes_up_beyond <= 10_000
    assert piggyback.messages == 1
    assert piggyback.requests == {
        "pull-messages": 1, "pull-object": 3, "confirm-message-received": 1, "push-messages": 1, "push-object": 3,
    }  # fmt: skip
    assert piggyback.estimate_up == pytest.approx(piggyback.bytes_up, rel=0.02)
    assert plain.messages == 2
    assert plain.bytes_up > 600_000
    assert plain.payload_up == pytest.approx(60 * 4 * 1024 + 4, rel=0.05)
