"""Links: what users write, how long exchanges and rounds take, and how well bytes on the wire are estimated."""

import math
from dataclasses import replace
from typing import Any

import pytest

from fedcomp.errors import ConfigError
from fedcomp_simulations.links import PRESETS, Clock, Link, joules, link_seconds, round_seconds
from fedcomp_simulations.results import Exchange
from fedcomp_strategies.traffic import requests, transport, transport_down

SLOW = Link("slow", up_bps=8_000, down_bps=16_000, rtt_s=0.5, up_j_per_byte=2e-4, down_j_per_byte=1e-5)
"""1 kB/s up, 2 kB/s down."""


def exchange(client: int = 0, up: int = 3_000, down: int = 4_000, outcome: str = "ok") -> Exchange:
    """Nine requests; on SLOW 4.5 s of round trips, 2 s down and 3 s up."""
    return Exchange(client, up, down, 9, outcome)


def on_slow(client: int) -> Link:
    return SLOW


def test_presets_have_what_the_issue_of_planning_needs() -> None:
    assert (PRESETS["nb-iot"].up_bps, PRESETS["lte-m"].up_bps, PRESETS["dsl"].up_bps) == (20e3, 1e6, 10e6)
    for name, link in PRESETS.items():
        assert link.name == name
        assert link.source
        assert link.rtt_s > 0
        assert Link.parse(name) is link
        assert link.to_table() == name


@pytest.mark.parametrize(
    ("table", "link"),
    [
        (
            {"up": "20 kbit/s", "down": "26kbps", "rtt": "1.6 s"},
            Link("custom", up_bps=20e3, down_bps=26e3, rtt_s=1.6),
        ),
        (
            {"name": "mine", "up": "1 MBit/s", "down": "1.5 Mbps", "rtt": "80 ms", "up_energy": "0.2 mJ/byte"},
            Link("mine", up_bps=1e6, down_bps=1.5e6, rtt_s=0.08, up_j_per_byte=2e-4),
        ),
        (
            {"preset": "nb-iot", "rtt": "4 s", "down_energy": "30 uJ"},
            replace(PRESETS["nb-iot"], name="nb-iot, changed", rtt_s=4.0, down_j_per_byte=30e-6, source=""),
        ),
    ],
)
def test_a_table_makes_a_link_and_comes_back(table: dict[str, Any], link: Link) -> None:
    made = Link.parse(table)
    for key in ("up_bps", "down_bps", "rtt_s", "up_j_per_byte", "down_j_per_byte"):
        assert getattr(made, key) == pytest.approx(getattr(link, key)), key
    assert made.name == link.name
    assert Link.parse(made.to_table()) == made


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("nbiot", "fleet.link: unknown link 'nbiot'; there are nb-iot, lte-m,"),
        (7, "fleet.link: expected the name of a link or a table with up, down and rtt, got 7"),
        ({"up": "20 kbit/s"}, "fleet.link.down: is missing"),
        ({"up": "20 kB/s", "down": 1}, "fleet.link.up: expected \"20 kbit/s\" or a number, got '20 kB/s'"),
        ({"up": "20 kBps", "down": 1}, "got '20 kBps'; rates are of bits, a large B means bytes"),
        ({"up": 1, "down": "3 KBPS"}, "fleet.link.down: expected"),
        (
            {"up": 1, "down": 1, "up_energy": "2 MJ"},
            'up_energy: expected energy of a byte such as "0.2 mJ" or a number',
        ),
        ({"up": 1, "down": 1, "rtt": "5 Ms"}, "fleet.link.rtt: expected"),
        ({"up": 10**400, "down": 1}, 'fleet.link.up: expected "20 kbit/s" or a number, got 1000'),
        ({"up": 1, "down": 1, "rtt": "fast"}, "fleet.link.rtt: expected \"1.6 s\" or a number, got 'fast'"),
        ({"up": 1, "down": 1, "rtt": True}, 'fleet.link.rtt: expected "1.6 s" or a number, got True'),
        ({"up": 0, "down": 1}, "fleet.link: up_bps: expected a number above 0"),
        ({"up": 1, "down": 1, "rtt": -1}, "fleet.link: rtt_s: expected a number from 0"),
        ({"up": 1, "down": 1, "ping": 1}, "fleet.link: unknown key 'ping'; available: name, preset, up, down"),
        ({"preset": "isdn"}, "fleet.link.preset: unknown link 'isdn'"),
        ({"name": "", "up": 1, "down": 1}, "fleet.link.name: expected a text, got ''"),
    ],
)
def test_mistakes_name_the_key(given: Any, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Link.parse(given, "fleet.link")
    assert said in str(caught.value)


def test_an_exchange_takes_round_trips_bytes_and_training() -> None:
    assert SLOW.seconds(exchange()) == pytest.approx(9.5)
    assert SLOW.seconds(exchange(), compute_s=2.0) == pytest.approx(11.5)
    assert SLOW.seconds(exchange(outcome="absent"), compute_s=2.0) == 0


def test_a_round_takes_as_long_as_its_slowest_client_and_no_longer_than_the_deadline() -> None:
    three = [exchange(0), exchange(1, up=13_000), exchange(2)]
    assert round_seconds(three, on_slow, math.inf) == pytest.approx(19.5)
    assert round_seconds(three, on_slow, 15.0) == 15.0
    assert round_seconds([], on_slow, math.inf) == 0


@pytest.mark.parametrize("outcome", ["lost", "late", "absent"])
def test_a_server_waits_for_what_does_not_come_until_the_deadline(outcome: str) -> None:
    two = [exchange(0), exchange(1, up=13_000, outcome=outcome)]
    assert round_seconds(two, on_slow, 60.0) == 60.0
    assert round_seconds(two, on_slow, math.inf) == pytest.approx(9.5)
    failed = [exchange(0), exchange(1, up=0, down=24_000, outcome="failed")]
    assert round_seconds(failed, on_slow, 60.0) == pytest.approx(16.5)


def test_a_client_that_is_still_busy_begins_later() -> None:
    clock = Clock(on_slow, lambda client: 1.0, deadline_s=12.0)
    late, prompt = exchange(0, up=13_000), exchange(1)  # 20.5 s and 10.5 s
    assert clock.seconds(late) == pytest.approx(20.5)
    assert [clock.is_late(each) for each in (late, prompt)] == [True, False]
    assert clock.end_round([replace(late, outcome="late"), prompt]) == 12.0
    assert clock.seconds(exchange(0)) == pytest.approx(8.5 + 10.5)  # it is free at 20.5 s, this round begins at 12 s
    assert clock.seconds(prompt) == pytest.approx(10.5)
    assert clock.end_round([replace(exchange(0), outcome="absent"), prompt]) == 12.0
    assert clock.now == 24.0
    assert clock.seconds(exchange(0)) == pytest.approx(10.5)  # the message that never came took no time


def test_the_time_of_a_run_on_any_link_adds_up() -> None:
    rounds = [[exchange(0), exchange(1)], [], [exchange(0, up=13_000)]]
    assert link_seconds(rounds, SLOW) == pytest.approx([9.5, 9.5, 29.0])
    slower = link_seconds(rounds, Clock(on_slow, lambda client: 0.5))
    assert slower == pytest.approx([10.0, 10.0, 30.0])
    assert link_seconds([], SLOW) == []


def test_transmission_alone_is_over_when_the_last_byte_is_there_whatever_becomes_of_it() -> None:
    slowest = exchange(1, up=13_000)
    for outcome, seconds in {"lost": 19.5, "late": 19.5, "failed": 19.5, "absent": 9.5}.items():
        assert link_seconds([[exchange(0), replace(slowest, outcome=outcome)]] * 2, SLOW) == [seconds, 2 * seconds]


def test_energy_is_of_bytes_each_way() -> None:
    rounds = [[exchange(), exchange(1, outcome="lost")], [exchange(up=0, down=0, outcome="absent")]]
    assert joules(rounds, SLOW) == pytest.approx(2 * (3_000 * 2e-4 + 4_000 * 1e-5))
    assert joules(rounds, PRESETS["dsl"]) == 0
    assert joules(rounds, lambda client: SLOW if client else None) == pytest.approx(3_000 * 2e-4 + 4_000 * 1e-5)


@pytest.mark.parametrize(
    ("messages", "asked", "up", "down"),
    [  # objects down and up, payload down and up of each message; what `fedcomp bench --wire` measured
        ([(126, 126, 253_572, 253_572), (126, 3, 253_572, 0)], 387, 648_332, 626_800),
        ([(6, 6, 247_021, 56_508), (6, 3, 246_919, 0)], 27, 84_073, 501_101),
        ([(3, 3, 247_035, 56_508), (3, 3, 246_925, 0)], 18, 74_959, 498_451),
        ([(3, 3, 247_051, 56_508)], 9, 65_862, 249_355),
    ],
    ids=["plain Flower", "as arrays", "Compressed", "piggyback"],
)
def test_estimates_are_what_a_proxy_has_counted(
    messages: list[tuple[int, int, int, int]], asked: int, up: int, down: int
) -> None:
    assert sum(requests(*each[:2]) for each in messages) == asked
    assert sum(transport(*each[:2], each[3]) for each in messages) == pytest.approx(up, rel=0.005)
    estimate = sum(transport_down(*each[:3]) for each in messages)
    assert estimate == pytest.approx(down, rel=0.001)
    payload = sum(each[2] for each in messages)
    assert estimate - payload == pytest.approx(down - payload, rel=0.06)
