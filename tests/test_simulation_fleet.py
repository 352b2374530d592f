"""Fleets: drop-outs, lost and late replies, the same for every method, on every engine, and nothing lost by them."""

import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.run import Run

from fedcomp.errors import ConfigError, FedcompError
from fedcomp_clients import CompressMod, MemoryModelCache, MemoryStore
from fedcomp_simulations.apps import RoundOutcome, client_app, server_app
from fedcomp_simulations.config import from_config, to_config
from fedcomp_simulations.experiment import Experiment, Method
from fedcomp_simulations.fleet import Fleet
from fedcomp_simulations.fleet_grid import FleetGrid
from fedcomp_simulations.grid import InProcessGrid
from fedcomp_simulations.links import PRESETS
from fedcomp_simulations.results import Exchange
from fedcomp_simulations.runner import run_one
from fedcomp_strategies.traffic import transport_down

FLOAT32, EF = Method("float32", "float32"), Method("sign + EF", "sign", "ef")
TINY = Experiment(
    name="tiny", dataset="mnist", model="mlp", methods=(EF,), clients=20, clients_per_round=8, rounds=4, seeds=(0,),
    evaluate_every=9, last=1,
)  # fmt: skip
HARD = Fleet(
    link="nb-iot", dropout=0.1, loss=0.2, stragglers=0.25, slowdown=4.0, compute_s=100.0, deadline_s=300.0
)  # stragglers need 400 s for training alone
Next = Callable[[Message, Context], Message]

pytestmark = pytest.mark.usefixtures("one_thread")


def memory() -> CompressMod:
    return CompressMod(MemoryStore(), None, MemoryModelCache())


def run(
    experiment: Experiment,
    method: Method = EF,
    wrap: Callable[[InProcessGrid], Grid] = lambda grid: grid,
    mod: Any = None,
    clients: ClientApp | None = None,
) -> list[RoundOutcome]:
    """Run an experiment in this process, on a Grid made of the in-process one."""
    outcomes: list[RoundOutcome] = []
    app = clients or client_app(experiment, 0, mod or memory())
    with InProcessGrid(app, experiment.clients) as grid:
        server_app(experiment, method, 0, outcomes.append)(wrap(grid), grid.context(grid.get_node_ids()[0]))
    return outcomes


def model(outcomes: list[RoundOutcome]) -> np.ndarray:
    return np.concatenate([array.numpy().ravel() for array in outcomes[-1].arrays.values()])


def outcomes_of(outcomes: list[RoundOutcome]) -> Counter[str]:
    return Counter(each.outcome for asked in outcomes[-1].exchanges for each in asked)


class Without(InProcessGrid):
    """A Grid on which the exchanges of some rounds and clients never happen: nobody is asked."""

    def __init__(self, app: ClientApp, clients: int, missing: set[tuple[int, int]]) -> None:
        super().__init__(app, clients)
        self.missing = missing

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        return super().send_and_receive([message for message in messages if not self._is_missing(message)])

    def _is_missing(self, message: Message) -> bool:
        client = int(self.context(message.metadata.dst_node_id).node_config["partition-id"])
        return (int(message.content.config_records["config"]["server-round"]), client) in self.missing  # type: ignore[arg-type]


def without(experiment: Experiment, method: Method, missing: set[tuple[int, int]]) -> np.ndarray:
    """The model of a run in which these uploads never happened."""
    seen: list[RoundOutcome] = []
    with Without(client_app(experiment, 0, memory()), experiment.clients, missing) as grid:
        server_app(experiment, method, 0, seen.append)(grid, grid.context(grid.get_node_ids()[0]))
    return model(seen)


@pytest.mark.parametrize("downlink", ["pack", "uniform(8)"])
def test_what_is_lost_late_or_absent_never_happened(downlink: str) -> None:
    """With error feedback: what such an upload would have corrected is corrected by a later one."""
    method = replace(EF, downlink=downlink)
    met = run(replace(TINY, fleet=HARD), method)
    kinds = outcomes_of(met)
    assert min(kinds[kind] for kind in ("ok", "lost", "late", "absent")) >= 2
    missing = {
        (number, each.client)
        for number, asked in enumerate(met[-1].exchanges, 1)
        for each in asked
        if each.outcome != "ok"
    }
    np.testing.assert_allclose(model(met), without(TINY, method, missing), rtol=0, atol=1e-6)
    assert np.abs(model(met) - model(run(TINY, method))).max() > 1e-3
    assert sum(entry.failures for entry in met[-1].traffic) == len(missing)


def test_a_fleet_without_faults_changes_no_bit() -> None:
    wrapped = model(run(TINY))
    np.testing.assert_array_equal(wrapped, without(TINY, EF, set()))
    timed = run(replace(TINY, fleet=Fleet(link="nb-iot", compute_s=3.0, deadline_s=1e6)))
    np.testing.assert_array_equal(wrapped, model(timed))
    assert outcomes_of(timed) == {"ok": 32}


def test_exchanges_add_up_to_what_the_strategy_has_counted() -> None:
    last = run(TINY)[-1]
    assert [len(asked) for asked in last.exchanges] == [8, 8, 8, 8]
    for entry, asked in zip(last.traffic, last.exchanges, strict=True):
        assert sum(each.wire_up for each in asked) == entry.wire_up
        assert sum(each.wire_down - transport_down(3, 3, 0) for each in asked) == entry.bytes_down
        assert {each.requests for each in asked} == {9}


def test_bytes_of_lost_and_late_replies_are_spent_and_those_of_absent_clients_are_not() -> None:
    last = run(replace(TINY, fleet=HARD))[-1]
    for asked in last.exchanges:
        for each in asked:
            spent = (each.wire_up > 12_000, each.wire_down > 200_000, each.requests == 9)
            assert spent == ((False,) * 3 if each.outcome == "absent" else (True,) * 3)
            if each.outcome == "absent":
                assert (each.wire_up, each.wire_down, each.requests) == (0, 0, 0)
    for entry, asked in zip(last.traffic, last.exchanges, strict=True):
        assert entry.uploads == sum(each.outcome == "ok" for each in asked)
        assert entry.dropped == {"missing": 8 - entry.uploads}


def test_all_methods_meet_the_same_fate_as_far_as_it_does_not_hang_on_bytes() -> None:
    experiment = replace(TINY, rounds=2, fleet=Fleet(dropout=0.3, loss=0.3))
    fates = [
        [[(each.client, each.outcome) for each in asked] for asked in run(experiment, method)[-1].exchanges]
        for method in (FLOAT32, EF)
    ]
    assert fates[0] == fates[1]
    assert {outcome for asked in fates[0] for _, outcome in asked} == {"ok", "lost", "absent"}
    on_nbiot = replace(experiment, rounds=1, fleet=Fleet(link="nb-iot", deadline_s=120.0))
    late = [run(on_nbiot, method)[-1] for method in (FLOAT32, EF)]  # 77 s down; 4 s up, or 84 s
    assert [outcomes_of([outcome]) for outcome in late] == [{"late": 8}, {"ok": 8}]


def test_shares_are_of_clients_and_probabilities_of_draws() -> None:
    fleet = Fleet(
        links={"nb-iot": 0.3, "cellar": {"share": 0.1, "preset": "nb-iot", "rtt": "5 s"}, "lte-m": 0.6},
        dropout=0.2, loss=0.5, stragglers=0.15, slowdown=3.0, compute_s=2.0,
    )  # fmt: skip
    links = [fleet.link_of(client, 200, 7) for client in range(200)]
    assert Counter(link.name for link in links if link) == {"nb-iot": 60, "cellar": 20, "lte-m": 120}
    assert links != [fleet.link_of(client, 200, 8) for client in range(200)]
    assert Counter(fleet.compute_of(client, 200, 7) for client in range(200)) == {2.0: 170, 6.0: 30}
    assert next(link.rtt_s for link in links if link and link.name == "cellar") == 5.0
    fates = Counter(fleet.fate(client, number, 7) for client in range(100) for number in range(100))
    for fate, share in {"absent": 0.2, "lost": 0.4, "ok": 0.4}.items():  # a lost reply must first have been made
        assert abs(fates[fate] - 10_000 * share) < 5 * (10_000 * share * (1 - share)) ** 0.5


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"dropout": 1.5}, "fleet.dropout: expected a number from 0 to 1, got 1.5"),
        ({"loss": "often"}, "fleet.loss: expected a number, got 'often'"),
        ({"slowdown": 0.5}, "fleet.slowdown: expected a finite number from 1 on, got 0.5"),
        ({"deadline_s": 0}, "fleet.deadline_s: expected a number of seconds above 0, got 0"),
        ({"deadline_s": 60}, "fleet.deadline_s: nothing takes time"),
        ({"stragglers": 0.1}, "fleet.stragglers: needs fleet.compute_s"),
        ({"link": "isdn"}, "fleet.link: unknown link 'isdn'"),
        ({"link": ["dsl"]}, "fleet.link: expected the name of a link or a table"),
        ({"link": "dsl", "links": {"dsl": 1}}, "fleet.links: give either link or links"),
        ({"links": {"dsl": 0.5}}, "fleet.links: expected shares that sum to 1, got 0.5"),
        ({"links": {"dsl": 0.5, "isdn": 0.5}}, "fleet.links: unknown link 'isdn'"),
        ({"links": {"dsl": True}}, "fleet.links.dsl: expected a share above 0, at most 1, got True"),
        ({"links": {"own": {"up": 1, "down": 1}}}, "fleet.links.own: expected a share above 0, at most 1, got None"),
        ({"links": {"own": {"share": 1, "up": 1}}}, "fleet.links.own.down: is missing"),
        ({"drop": 0.1}, "'fleet.drop'"),
        ({"mix": []}, "'fleet.mix'"),
    ],
)
def test_mistakes_in_the_table_name_the_key(table: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_config(table, Fleet, prefix="fleet.")
    assert said in str(caught.value)


def test_a_fleet_survives_its_table() -> None:
    for fleet in (Fleet(), HARD, Fleet(links={"dsl": 0.25, "own": {"share": 0.75, "up": "1 Mbit/s", "down": 2e6}})):
        experiment = replace(TINY, fleet=fleet)
        again = from_config(to_config(experiment, skip=["name"]), Experiment, name="tiny")
        assert again == experiment
        assert again.fleet.mix == fleet.mix
    assert Fleet(link="dsl").mix == ((PRESETS["dsl"], 1.0),)


# Grids of other engines: nodes have ids in any order, and say themselves which partition they are


class Foreign(Grid):
    """A Grid as of a SuperLink: ids say nothing, and the contexts are elsewhere."""

    def __init__(self, grid: InProcessGrid, hidden: int = 0, silent: bool = False) -> None:
        self.inner, self.hidden, self.silent = grid, hidden, silent

    def set_run(self, run: Run) -> None:
        self.inner.set_run(run)

    @property
    def run(self) -> Run:
        return self.inner.run

    def create_message(self, *args: Any, **named: Any) -> Message:
        return self.inner.create_message(*args, **named)

    def get_node_ids(self) -> list[int]:
        random.random()  # as SuperLinks' heartbeats do
        shown = self.inner.get_node_ids()[self.hidden :]
        return shown[1::2] + shown[::2]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        return self.inner.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return self.inner.pull_messages(message_ids)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        random.random()
        replies = self.inner.send_and_receive(messages)
        if self.silent and replies[0].metadata.message_type == "train":
            return replies[3:]  # the others have not come within the timeout
        return replies[::-1]


def test_on_any_grid_the_same_clients_are_drawn() -> None:
    same = run(replace(TINY, rounds=3))
    foreign = run(replace(TINY, rounds=3), wrap=Foreign)
    assert foreign[-1].exchanges == same[-1].exchanges
    np.testing.assert_allclose(model(foreign), model(same), rtol=0, atol=1e-6)


def test_replies_that_an_engine_has_waited_for_in_vain_are_late() -> None:
    last = run(replace(TINY, rounds=1), wrap=lambda grid: Foreign(grid, silent=True))[-1]
    assert [each.outcome for each in last.exchanges[0]] == ["late"] * 3 + ["ok"] * 5
    assert {(each.requests, each.wire_up < 5_000) for each in last.exchanges[0][:3]} == {(5, True)}
    assert last.traffic[0].uploads == 5


def test_a_client_that_fails_is_heard() -> None:
    mod = memory()

    def fail_some(message: Message, context: Context, call_next: Next) -> Message:
        if int(context.node_config["partition-id"]) % 2:
            raise OSError("sensor unplugged")
        return mod(message, context, call_next)

    last = run(replace(TINY, rounds=1), mod=fail_some)[-1]
    for each in last.exchanges[0]:
        assert each.outcome == ("failed" if each.client % 2 else "ok")
    failed = sum(each.outcome == "failed" for each in last.exchanges[0])
    assert failed > 0
    assert last.traffic[0].dropped == {"error": failed}


def test_nodes_that_are_not_there_end_the_wait() -> None:
    with InProcessGrid(client_app(TINY, 0, memory()), TINY.clients) as grid:
        fleet = FleetGrid(Foreign(grid, hidden=3), Fleet(), TINY.clients, 0, nodes_s=0.0)
        with pytest.raises(FedcompError, match="expected 20 nodes, got 17 within 0 s"):
            fleet.get_node_ids()


def test_a_client_app_that_cannot_tell_its_partition_is_named() -> None:
    with InProcessGrid(ClientApp(), 2) as grid, pytest.raises(FedcompError, match="node 1001 does not tell its partit"):
        FleetGrid(Foreign(grid), Fleet(), 2, 0).get_node_ids()


class Renamed(Foreign):
    """One whose nodes say that they are other partitions than they are."""

    def __init__(self, grid: InProcessGrid, told: dict[int, int]) -> None:
        super().__init__(grid)
        self.told, self.shown, self.asked = told, list(told), list[int]()

    def get_node_ids(self) -> list[int]:
        return self.shown

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        messages = list(messages)
        self.asked = [message.metadata.dst_node_id for message in messages]
        return [
            Message(RecordDict({"partition": ConfigRecord({"partition-id": self.told[node]})}), reply_to=message)
            for message, node in zip(messages, self.asked, strict=True)
        ]


def test_a_node_that_restarts_takes_the_place_of_its_former_self() -> None:
    with InProcessGrid(ClientApp(), 2) as grid:
        inner = Renamed(grid, {7: 1, 3: 0, 9: 1})
        inner.shown = [7, 3]
        fleet = FleetGrid(inner, Fleet(), 2, 0)
        assert fleet.get_node_ids() == [1001, 1002]
        inner.shown = [7, 3, 9]  # 7 is gone, but the engine has not noticed
        assert fleet.get_node_ids() == [1001, 1002]
        fleet.send_and_receive([Message(RecordDict(), node, "query") for node in fleet.get_node_ids()])
        assert inner.asked == [3, 9]


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({7: 1, 3: 1}, "nodes 7 and 3 both have partition-id 1; give each its own"),
        ({7: 0, 3: 2}, "node 3 has partition-id 2, expected one from 0 to 1"),
    ],
)
def test_partitions_must_be_those_of_the_experiment(told: dict[int, int], said: str) -> None:
    with InProcessGrid(ClientApp(), 2) as grid, pytest.raises(FedcompError, match=said):
        FleetGrid(Renamed(grid, told), Fleet(), 2, 0).get_node_ids()


def test_other_messages_pass_and_count_as_nothing() -> None:
    app = ClientApp()
    app.query()(lambda message, context: Message(RecordDict(), reply_to=message))
    with InProcessGrid(app, 2) as grid:
        fleet = FleetGrid(grid, Fleet(dropout=1.0), 2, 0)
        asked = [Message(RecordDict({"config": ConfigRecord()}), node, "query") for node in fleet.get_node_ids()]
        assert len(fleet.send_and_receive(asked)) == 2
        assert fleet.exchanges == {}
        pushed = Message(RecordDict(), grid.get_node_ids()[0], "query")
        assert len(list(fleet.pull_messages(fleet.push_messages([pushed])))) == 1
        assert fleet.run.run_id == grid.run.run_id


def test_results_hold_the_exchanges() -> None:
    result = run_one(replace(TINY, rounds=2, fleet=HARD), EF, 0, lambda progress: None)
    asked = result.exchanges[1]
    assert isinstance(asked[0], Exchange)
    assert len(asked) == 8
    assert result.warnings == ()  # what the fleet is meant to lose is no news
    assert {each.outcome for asked in result.exchanges for each in asked} >= {"absent", "lost"}
    assert result.by_round.wire_down == tuple(sum(each.wire_down for each in asked) for asked in result.exchanges)
    assert result.by_round.wire_up == tuple(sum(each.wire_up for each in asked) for asked in result.exchanges)


def test_nobody_there_is_a_round_without_a_change() -> None:
    outcomes = run(replace(TINY, rounds=2, fleet=Fleet(dropout=1.0)))
    assert outcomes_of(outcomes) == {"absent": 16}
    assert [entry.uploads for entry in outcomes[-1].traffic] == [0, 0]
