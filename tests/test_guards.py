"""The norm cap, alone and through real Flower."""

import itertools
import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from flower_app import CLIENTS, Model, arrays, run, start_model
from flwr.app import ArrayRecord, Context, Message
from flwr.serverapp.strategy import FedAvg, FedAvgM, FedMedian
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from fedcomp import ConfigError, CountSketch, Identity, Plan, Sign, compress, generator, wire
from fedcomp.layout import Layout
from fedcomp.metrics import length
from fedcomp.request import KEY, Request
from fedcomp_clients import CompressMod, MemoryModelCache, MemoryStore
from fedcomp_simulations.grid import InProcessGrid
from fedcomp_strategies import Compressed
from fedcomp_strategies.aggregator import Aggregator
from fedcomp_strategies.feedback import ServerFeedback
from fedcomp_strategies.guards import capped

QUIET: dict[str, Any] = {"fraction_evaluate": 0.0, "min_evaluate_nodes": 0}
ALONE: dict[str, Any] = {**QUIET, "min_train_nodes": 1, "min_available_nodes": 1}
CODED = ("fc.weight", "fc.bias")


def mod() -> CompressMod:
    return CompressMod(MemoryStore(), models=MemoryModelCache())


def fedavg(uplink: Any = "int8", **options: Any) -> Compressed:
    return Compressed(FedAvg(**ALONE), uplink, **options)


def norm(model: Mapping[str, NDArray[Any]], names: Iterable[str] = CODED) -> float:
    """In float64, apart from what is tested."""
    return math.sqrt(sum(float(np.square(model[name].astype(np.float64)).sum()) for name in names))


def moved(new: Model, old: Model) -> float:
    return norm({name: new[name].astype(np.float64) - old[name] for name in CODED})


def same(a: Model, b: Model) -> bool:
    return a.keys() == b.keys() and all(a[n].dtype == b[n].dtype and np.array_equal(a[n], b[n]) for n in a)


# --- lengths in frames -----------------------------------------------------------------------------------------------


@given(st.floats(min_value=1e-37, max_value=3.38e38))
def test_lengths_are_never_noted_as_shorter(value: float) -> None:
    noted = wire.Notes.rounded_up(value)
    assert value <= noted <= value * (1 + 2**-7)
    assert wire.Notes.rounded(noted) == noted


def test_noting_the_length_costs_two_bytes_and_is_left_out_unless_asked_for() -> None:
    base, rng = {"w": np.zeros(100, np.float32)}, np.random.default_rng(0)
    new = {"w": rng.standard_normal(100).astype(np.float32)}
    frames = [
        compress(base, new, "int8", round=1, rng=generator(0, 1, 0)).frame,
        compress(base, new, "int8", round=1, rng=generator(0, 1, 0), measured=True).frame,
    ]
    assert len(frames[1]) == len(frames[0]) + 2
    noted = [wire.unpack(frame, Layout.of(base)).notes.norm for frame in frames]
    assert noted == [None, wire.Notes.rounded_up(norm(new, ["w"]))]


def test_what_is_noted_is_the_update_before_feedback_and_predictor() -> None:
    base, new = {"w": np.zeros(100, np.float32)}, {"w": np.full(100, 0.1, np.float32)}
    predictor = {"w": np.full(100, 7, np.float32)}
    made = compress(base, new, "int8", round=1, rng=generator(0, 1, 0), predictor=predictor, measured=True)
    assert made.notes.norm == wire.Notes.rounded_up(1.0)


def test_requests_of_before_are_read_and_written_as_ever() -> None:
    old = '{"v":1,"plan":{"codec":{"codec":"sign"}},"feedback":"none","round":3,"seed":5,"session":"a"}'
    request = Request.from_text(old)
    assert request == Request(Plan(Sign()), 3, seed=5, session="a")
    assert request.to_text() == old
    asked = replace(request, norm=True)
    assert asked.to_text() == old[:-1] + ',"norm":true}'
    assert Request.from_text(asked.to_text()) == asked
    with pytest.raises(ConfigError, match="norm: expected True or False, got 1"):
        Request.from_text(old[:-1] + ',"norm":1}')


@pytest.mark.parametrize("value", [0.1, 1.0, 1e-30, 1e30])
def test_lengths_of_large_models_are_exact(value: float) -> None:
    """Of ten million squares summed at once in float32, one in two thousand was missing."""
    x = np.full(10**7, value, np.float32)
    assert length([x]) == pytest.approx(float(x[0]) * math.sqrt(x.size), rel=2e-6)


# --- the cap ---------------------------------------------------------------------------------------------------------

VECTORS = st.lists(st.floats(-(2.0**99), 2.0**99, width=32), min_size=24, max_size=24)


@given(
    st.lists(st.tuples(VECTORS, st.floats(0, 1e18)), min_size=1, max_size=5),
    st.floats(1e-3, 10),
    st.booleans(),
    st.booleans(),
)
def test_exact_updates_are_never_capped_and_no_update_is_too_long(
    replies: list[tuple[list[float], float]], limit: float, parallel: bool, plain: bool
) -> None:
    """Frames without loss and plain replies; parallel ones, whose mean is as long as can be."""
    base, plan = {"w": np.zeros(24, np.float32)}, Plan(Identity(), min_size=1)
    aggregator, weights = Aggregator(base, plan, round=1), {}
    for node, (values, weight) in enumerate(replies):
        new = {"w": np.array(replies[0][0] if parallel else values, np.float32)}
        weights[node] = weight
        if plain:
            aggregator.add_plain(new, weight, node=node)
        else:
            frame = compress(base, new, plan, round=1, rng=generator(0, 1, node), measured=True).frame
            aggregator.add(frame, weight, node=node)
    mean = aggregator.mean()
    norms = aggregator.norms(mean)
    assert norms.keys() == weights.keys()
    assert capped(mean.update, norms, weights, max(limit, 1.0)).factor == 1
    step = capped(mean.update, norms, weights, limit)
    assert norm(step.update, ["w"]) <= step.most * (1 + 1e-5)
    if sum(weights.values()):
        expected = limit * sum(weights[n] * norms[n] for n in weights) / sum(weights.values())
        assert step.most == pytest.approx(expected, rel=1e-12)
    if step.factor == 1:
        assert step.update is mean.update


def test_replies_without_a_note_are_left_out_and_plain_ones_are_measured() -> None:
    base: Model = {"w": np.zeros(64, np.float32), "n": np.zeros(3, np.int64)}
    plan = Plan(Identity())
    aggregator = Aggregator(base, plan, round=1)
    for node, scale in enumerate((1.0, 2.0, 4.0)):
        new: Model = {"w": np.full(64, scale, np.float32), "n": np.full(3, 1000)}
        if node == 2:
            aggregator.add_plain(new, 1, node=node)
        else:
            frame = compress(base, new, plan, round=1, rng=generator(0, 1, node), measured=node == 0).frame
            aggregator.add(frame, 1, node=node)
    aggregator.add(b"nonsense", 1, node=3)
    mean = aggregator.mean()
    norms = aggregator.norms(mean)
    assert norms == {0: 8.0, 2: 32.0}
    step = capped(mean.update, norms, dict.fromkeys(range(4), 1.0), 0.5)
    assert step.most == 10
    assert norm(step.update, ["w"]) == pytest.approx(10, rel=1e-6)
    assert capped(mean.update, {}, {}, 0.5).factor == 1
    assert capped(mean.update, {0: 8.0}, {0: 0.0}, 0.5).factor == 1


class Noted:
    """A mod around the client's that keeps what frames note: lengths by round and partition."""

    def __init__(self) -> None:
        self.norms: dict[tuple[int, int], float | None] = {}
        self._client = mod()

    def __call__(self, message: Message, context: Context, call_next: Any) -> Message:
        reply = self._client(message, context, call_next)
        (packed,) = reply.content.array_records["arrays"].values()
        seen = wire.peek(packed.data)
        assert seen is not None
        self.norms[seen[0], int(context.node_config["partition-id"])] = seen[1].norm
        return reply

    def mean(self, round_: int) -> float:
        """The weighted mean of a round: partition p has 10 + p examples."""
        found = {partition: noted or 0.0 for (r, partition), noted in self.norms.items() if r == round_}
        return sum((10 + p) * n for p, n in found.items()) / sum(10 + p for p in found)


@pytest.mark.parametrize("kind", [FedAvg, FedAvgM])
@pytest.mark.parametrize("limit", [0.5, 1, 2.0])
def test_eden_far_below_a_bit_on_one_client_is_capped(
    kind: Any, limit: float, caplog: pytest.LogCaptureFixture
) -> None:
    """Alone, it makes of an update what is many times as long."""
    start = start_model()
    wild = run(Compressed(kind(**ALONE), "eden(0.05)"), [client := Noted()], rounds=1, clients=1)
    assert client.norms == {(1, 0): None}
    strategy = Compressed(kind(**ALONE), "eden(0.05)", norm_cap=limit)
    with caplog.at_level(logging.INFO, "fedcomp"):
        model = run(strategy, [client := Noted()], rounds=1, clients=1)
    noted = client.mean(1)
    assert moved(wild, start) > 3 * noted
    assert moved(model, start) == pytest.approx(limit * noted, rel=1e-5)
    assert strategy.traffic[0].capped == pytest.approx(limit * noted / moved(wild, start), rel=1e-4)
    assert f"scaled down to the norm cap of {limit * noted:.4g}" in caplog.text
    direction = {name: model[name].astype(np.float64) - start[name] for name in CODED}
    for name in CODED:
        assert np.allclose(direction[name], strategy.traffic[0].capped * (wild[name] - start[name]), atol=1e-6)
    for name in start.keys() - {*CODED}:  # these travel as they are
        assert np.array_equal(model[name], wild[name])


def test_every_round_that_is_capped_is_as_long_as_the_cap() -> None:
    models: list[Model] = [{}]

    class Kept(FedAvg):
        def configure_train(self, server_round: int, arrays_: ArrayRecord, *rest: Any) -> Any:
            models.append(arrays(arrays_))
            return super().configure_train(server_round, arrays_, *rest)

    client = Noted()
    strategy = Compressed(Kept(**QUIET), "eden(0.02)", norm_cap=1.0)
    models.append(run(strategy, [client], rounds=4))
    for round_, traffic in enumerate(strategy.traffic, 1):
        assert traffic.capped < 1
        assert moved(models[round_ + 1], models[round_]) == pytest.approx(client.mean(round_), rel=1e-5)


@pytest.mark.parametrize("clients", [1, CLIENTS])
def test_exact_uploads_train_as_without_a_cap(clients: int) -> None:
    strategy = fedavg(Identity(), norm_cap=1.0)
    assert same(run(strategy, [mod()], clients=clients), run(fedavg(Identity()), [mod()], clients=clients))
    assert [traffic.capped for traffic in strategy.traffic] == [1.0] * 3


def test_plain_replies_are_measured_and_capped() -> None:
    free, start = run(fedavg(), [], rounds=1, clients=1), start_model()
    strategy = fedavg(norm_cap=0.5)
    model = run(strategy, [], rounds=1, clients=1)
    assert strategy.traffic[0].capped == pytest.approx(0.5, rel=1e-6)
    assert moved(model, start) == pytest.approx(0.5 * moved(free, start), rel=1e-5)


def test_without_any_length_there_is_no_cap() -> None:
    def unasked(message: Message, context: Context, call_next: Any) -> Message:
        config = message.content.config_records["config"]
        request = Request.from_text(str(config[KEY]))
        assert request.norm
        config[KEY] = replace(request, norm=False).to_text()
        return client(message, context, call_next)

    client = mod()
    strategy = fedavg("eden(0.1)", norm_cap=0.01)
    free = run(fedavg("eden(0.1)"), [mod()], rounds=1)
    assert same(free, run(strategy, [unasked], rounds=1))
    assert strategy.traffic[0].capped == 1


def test_no_bit_of_a_capped_model_hangs_on_the_order_of_arrival(monkeypatch: pytest.MonkeyPatch) -> None:
    real, models = InProcessGrid.send_and_receive, []

    def some_plain(message: Message, context: Context, call_next: Any) -> Message:
        if context.node_config["partition-id"] == 1:
            return call_next(message, context)  # type: ignore[no-any-return]
        return mod()(message, context, call_next)

    for order in itertools.permutations(range(4)):

        def shuffled(*args: Any, order: Any = order, **options: Any) -> list[Message]:
            replies = real(*args, **options)
            return [replies[i] for i in order] if replies else []

        monkeypatch.setattr(InProcessGrid, "send_and_receive", shuffled)
        strategy = fedavg("eden(0.1)", norm_cap=1.0)
        models.append(run(strategy, [some_plain], rounds=1, clients=4))
        assert strategy.traffic[0].capped < 1
    assert all(same(model, models[0]) for model in models)


def test_the_predictor_of_cafe_is_the_update_that_was_applied(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[float] = []
    real = ServerFeedback.learn

    def spy(self: ServerFeedback, update: Any, weights: Any, round: int) -> None:
        seen.append(norm(update))
        real(self, update, weights, round)

    monkeypatch.setattr(ServerFeedback, "learn", spy)
    client = Noted()
    strategy = fedavg("eden(0.05)", feedback="cafe", norm_cap=1.0, mixed_fleet=False)
    run(strategy, [client], rounds=3, clients=1)
    for round_, (learnt, traffic) in enumerate(zip(seen, strategy.traffic, strict=True), 1):
        assert traffic.capped < 1
        assert learnt == pytest.approx(client.mean(round_), rel=1e-5)


@pytest.mark.parametrize("feedback", ["none", "ef", "cafe", "dgc"])
def test_schemes_whose_memory_is_the_clients_go_with_a_cap(feedback: str) -> None:
    strategy = fedavg("topk(0.1, values=uniform(8))", feedback=feedback, norm_cap=0.3)
    run(strategy, [mod()], rounds=3)
    assert min(traffic.capped for traffic in strategy.traffic) < 1
    assert not any(traffic.failures for traffic in strategy.traffic)


@pytest.mark.parametrize(("feedback", "uplink"), [("ef21", Sign()), ("fetchsgd", CountSketch(ratio=4))])
def test_schemes_that_count_on_whole_steps_refuse_a_cap(feedback: str, uplink: Any) -> None:
    with pytest.raises(ConfigError, match=f"norm_cap does not go with feedback '{feedback}'.*norm_cap=None"):
        fedavg(uplink, feedback=feedback, norm_cap=1.0)
    fedavg(uplink, feedback=feedback)


@pytest.mark.parametrize("wrong", [0, -1.0, math.nan, math.inf, True, "1"])
def test_caps_that_make_no_sense_are_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="norm_cap: expected a number above 0"):
        fedavg(norm_cap=wrong)


def test_strategies_that_are_given_every_model_say_once_that_there_is_no_cap(caplog: pytest.LogCaptureFixture) -> None:
    client = Noted()
    strategy = Compressed(FedMedian(**QUIET), "int8", norm_cap=0.01)
    model = run(strategy, [client], rounds=3)
    assert caplog.text.count("the norm cap does not apply: FedMedian is given every client's model") == 1
    assert set(client.norms.values()) == {None}
    assert same(model, run(Compressed(FedMedian(**QUIET), "int8"), [mod()], rounds=3))
