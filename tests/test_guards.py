"""The norm cap and the moving average of the model, alone and through real Flower."""

import itertools
import logging
import math
import pickle
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from flower_app import CLIENTS, Model, OrderedGrid, arrays, client_app, frame_of, package_of, record, run, start_model
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord
from flwr.serverapp.strategy import FedAvg, FedAvgM, FedMedian, Result, Strategy
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
from fedcomp_strategies.guards import MovingAverage, capped

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
        seen = wire.peek(frame_of(reply) or b"")
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
        strategy = fedavg("eden(0.1)", norm_cap=1.0, average=0.5)
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


# --- the moving average ----------------------------------------------------------------------------------------------


def weighted(models: list[Model], decay: float, name: str) -> NDArray[Any]:
    """What the average should be, from its definition."""
    weights = decay ** np.arange(len(models))[::-1]
    values = np.stack([model[name].astype(np.float64) for model in models])
    return np.asarray(np.tensordot(weights / weights.sum(), values, 1))


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", ">f4"])
@pytest.mark.parametrize("decay", [0.1, 0.8, 0.999])
def test_the_average_is_weighted_by_age(dtype: str, decay: float) -> None:
    rng, average, models = np.random.default_rng(0), MovingAverage(decay), list[Model]()
    for round_ in range(12):
        models.append({
            "w": np.asfortranarray(rng.standard_normal((5, 3)).astype(dtype)),
            "scalar": np.array(rng.standard_normal(), dtype),
            "steps": np.array(round_, np.int64),
            "widened": np.array(round_, np.float64),
        })  # fmt: skip
        average.add(record(models[-1]), {"widened"})
        assert average.record is not None
        told = arrays(average.record)
        assert list(told) == list(models[-1])
        assert all(told[name].dtype == values.dtype for name, values in models[-1].items())
        assert told["steps"] == told["widened"] == round_
        for name in ("w", "scalar"):
            tolerance = 1e-3 if dtype == "float16" else 1e-6
            assert np.allclose(told[name].astype(float), weighted(models, decay, name), rtol=tolerance, atol=tolerance)
    average.restart()
    assert average.record is None


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_model_that_stays_is_its_own_average_to_the_last_bit(dtype: str) -> None:
    top = np.finfo(dtype).max
    model = {"w": np.append(np.random.default_rng(0).standard_normal(1000), [top, -top, 0, 1e-7]).astype(dtype)}
    average = MovingAverage(0.9)
    for _ in range(20):
        average.add(record(model))
        assert average.record is not None
        assert same(arrays(average.record), model)


def test_other_tensors_begin_anew_and_trees_pass_through() -> None:
    average = MovingAverage(0.9)
    for shape in (3, 3, 4):
        average.add(record({"w": np.full(shape, shape, np.float32)}))
    assert average.record is not None
    assert arrays(average.record)["w"].tolist() == [4] * 4
    trees = ArrayRecord({"0": Array(np.frombuffer(b"{}", np.uint8).copy()), "x": Array("uint8", (1,), "other", b"?")})
    average.add(trees)
    assert average.record == trees


class Spied(Compressed):
    """Keeps the models that it made, as they are trained on."""

    made: list[Model]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        made, metrics = super().aggregate_train(server_round, replies)
        if made is not None:
            self.__dict__.setdefault("made", []).append(arrays(made))
        return made, metrics


class Watching:
    """A mod that keeps the models that its clients are to train and to evaluate, as user code sees them."""

    def __init__(self) -> None:
        self.seen: dict[str, list[Model]] = {"train": [], "evaluate": []}

    def __call__(self, message: Message, context: Context, call_next: Any) -> Message:
        self.seen[message.metadata.message_type].append(arrays(message.content.array_records["arrays"]))
        return call_next(message, context)  # type: ignore[no-any-return]


def start(
    strategy: Strategy, mods: list[Any], rounds: int = 4, fault: Any = None
) -> tuple[Result, list[tuple[int, Model]]]:
    evaluated: list[tuple[int, Model]] = []

    def evaluate(server_round: int, model: ArrayRecord) -> MetricRecord:
        evaluated.append((server_round, arrays(model)))
        return MetricRecord({"round": server_round})

    with OrderedGrid(client_app(mods, fault, evaluate=True), CLIENTS) as grid:
        result = strategy.start(grid, record(start_model()), num_rounds=rounds, evaluate_fn=evaluate)
    return result, evaluated


@pytest.mark.parametrize("downlink", ["pack", "plain", "uniform(8)"])
@pytest.mark.parametrize("kind", [FedAvg, FedMedian])
def test_the_average_is_evaluated_and_returned_and_the_newest_is_trained(kind: Any, downlink: str) -> None:
    user = Watching()
    strategy = Spied(kind(), "int8", downlink=downlink, average=0.8)
    result, evaluated = start(strategy, [mod(), user])
    assert strategy.averaged is not None
    assert result.arrays is strategy.averaged
    assert [round_ for round_, _ in evaluated] == list(range(5))
    assert same(evaluated[0][1], start_model())
    assert same(evaluated[4][1], arrays(strategy.averaged))
    assert sorted(result.evaluate_metrics_serverapp) == list(range(5))
    for round_ in range(1, 5):
        sent = user.seen["evaluate"][(round_ - 1) * CLIENTS :][:CLIENTS]
        assert all(same(model, evaluated[round_][1]) for model in sent)  # whole, whatever the downlink loses
    for round_ in range(1, 5):
        model = evaluated[round_][1]
        for name in (*CODED, "bn.running_var", "temperature"):
            assert np.allclose(model[name], weighted(strategy.made[:round_], 0.8, name), rtol=1e-6, atol=1e-6), name
        assert model["bn.num_batches_tracked"] == strategy.made[round_ - 1]["bn.num_batches_tracked"]
        trained = user.seen["train"][round_ * CLIENTS :][:CLIENTS]
        for sent_model in trained:
            far = moved(sent_model, strategy.made[round_ - 1])
            assert far < 0.01 if downlink == "uniform(8)" else same(sent_model, strategy.made[round_ - 1])


@pytest.mark.parametrize("downlink", ["pack", "uniform(4)"])
def test_training_is_as_without_an_average(downlink: str) -> None:
    users, strategies = [Watching(), Watching()], []
    for user, decay in zip(users, (0.0, 0.9), strict=True):
        strategies.append(Compressed(FedAvg(), "int8", downlink=downlink, average=decay))
        start(strategies[-1], [mod(), user], rounds=5)
    assert all(same(a, b) for a, b in zip(users[0].seen["train"], users[1].seen["train"], strict=True))
    plain, averaged = (
        [replace(traffic, bytes_down=0, bytes_down_evaluate=0) for traffic in strategy.traffic]
        for strategy in strategies
    )
    assert plain == averaged
    assert strategies[0].averaged is None


def test_a_node_that_evaluates_what_it_did_not_train_is_not_taken_for_one_that_holds_the_model() -> None:
    """Under a lossy downlink: else it would be sent differences to a model that it never got."""

    def lost(message: Message, context: Context, call_next: Any) -> Message:
        config = next(iter(message.content.config_records.values()))
        training = message.metadata.message_type == "train"
        if training and config["server-round"] in (2, 3) and context.node_config["partition-id"] == 2:
            raise OSError("no network")
        return client(message, context, call_next)

    client = mod()
    strategy = Compressed(FedAvg(), "int8", downlink="uniform(8)", mixed_fleet=False, average=0.5)
    start(strategy, [lost], rounds=5)
    assert [dict(traffic.dropped) for traffic in strategy.traffic] == [{}, {"error": 1}, {"error": 1}, {}, {}]


def test_another_training_begins_another_average() -> None:
    strategy = Compressed(FedAvg(), "int8", average=0.8)
    (first, seen), (second, again) = start(strategy, [mod()]), start(strategy, [mod()])
    assert same(again[0][1], start_model())
    assert all(same(a[1], b[1]) for a, b in zip(seen, again, strict=True))
    assert same(arrays(first.arrays), arrays(second.arrays))
    with InProcessGrid(client_app([]), CLIENTS) as grid:  # also where somebody else drives the rounds
        strategy.configure_train(1, record(start_model()), ConfigRecord(), grid)
    assert strategy.averaged is None


def test_models_that_are_not_finite_and_rounds_without_one_are_not_averaged() -> None:
    class Broken(FedAvg):
        def aggregate_train(
            self, server_round: int, replies: Iterable[Message]
        ) -> tuple[ArrayRecord | None, MetricRecord | None]:
            made, metrics = super().aggregate_train(server_round, replies)
            assert made is not None
            if server_round == 2:
                made["fc.bias"] = Array(np.full(30, np.nan, np.float32))
            return (None if server_round == 3 else made), metrics

    strategy = Spied(Broken(), "int8", average=0.8)
    result, evaluated = start(strategy, [mod()])
    assert len(strategy.made) == 2
    assert same(evaluated[1][1], evaluated[2][1])
    assert same(evaluated[1][1], evaluated[3][1])
    for name in CODED:
        expected = weighted(strategy.made, 0.8, name)
        assert np.allclose(arrays(result.arrays)[name], expected, rtol=1e-6, atol=1e-6)


def test_a_first_round_without_a_model_leaves_the_start_to_be_evaluated() -> None:
    def broken(reply: Message, context: Context, round_: int) -> None:
        raise RuntimeError("out of memory")

    strategy = Compressed(FedAvg(), "int8", average=0.8)
    result, evaluated = start(strategy, [mod()], rounds=1, fault=broken)
    assert strategy.averaged is None
    assert not result.arrays
    assert all(same(model, start_model()) for _, model in evaluated)


def test_without_an_average_everything_is_flowers_own() -> None:
    strategy = Compressed(FedAvg(), "int8")
    result, evaluated = start(strategy, [mod()])
    assert strategy.averaged is None
    assert same(arrays(result.arrays), evaluated[-1][1])
    assert same(arrays(result.arrays), run(Compressed(FedAvg(**QUIET), "int8"), [mod()], rounds=4))


def test_averages_travel_in_pickles_and_as_packages() -> None:
    strategy = Compressed(FedAvg(), "int8", average=0.8, norm_cap=1, mixed_fleet=False)
    result, _ = start(strategy, [mod()])
    back = pickle.loads(pickle.dumps(strategy)).averaged
    assert same(arrays(back), arrays(result.arrays))
    with InProcessGrid(client_app([]), CLIENTS) as grid:
        messages = strategy.configure_evaluate(9, record(start_model()), ConfigRecord(), grid)
    assert all(package_of(message) for message in messages)


@pytest.mark.parametrize("wrong", [1, 0.9999, -0.1, math.nan, True, "0.8"])
def test_decays_that_make_no_sense_are_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match=r"average: expected a number from 0 to 0\.999"):
        fedavg(average=wrong)
