"""What Compressed does with replies and the model: the mean or the models, the packed downlink, server feedback."""

import copy
import itertools
import logging
import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from flower_app import (
    CLIENTS,
    Model,
    OrderedGrid,
    arrays,
    client_app,
    frame_of,
    package_of,
    put_frame,
    record,
    run,
    start_model,
)
from flwr.app import ArrayRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp.strategy import (
    DifferentialPrivacyServerSideFixedClipping,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedMedian,
    FedProx,
    FedTrimmedAvg,
    Krum,
    QFedAvg,
    Strategy,
)

import fedcomp
from fedcomp import ConfigError, CountSketch, Identity, Plan, Rule, Sign, TopK, Uniform
from fedcomp.request import KEY
from fedcomp_clients import CompressMod, MemoryModelCache, MemoryStore
from fedcomp_simulations.grid import InProcessGrid
from fedcomp_strategies import Compressed
from fedcomp_strategies.averaging import averages

QUIET: dict[str, Any] = {"fraction_evaluate": 0.0, "min_evaluate_nodes": 0}
UPLINK = Plan(TopK(0.05, values=Uniform(8)), gentle_share=0)


def mod() -> CompressMod:
    return CompressMod(MemoryStore(), models=MemoryModelCache())


def fedavg(**options: Any) -> Compressed:
    return Compressed(FedAvg(**QUIET), **{"uplink": "int8", **options})


def close(a: Model, b: Model, tolerance: float = 1e-6) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype, name
        assert np.allclose(a[name], b[name], rtol=tolerance, atol=tolerance), name


class Seen(FedAvg):
    """Not an averaging strategy any more, as far as anybody can tell: it looks at the replies."""

    replies: list[list[Message]]

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
        replies = list(replies)
        self.__dict__.setdefault("seen", []).append(replies)
        return super().aggregate_train(server_round, replies)


# --- the mean or the models ------------------------------------------------------------------------------------------


def test_strategies_that_average_are_known() -> None:
    class Named(FedAvg):
        pass

    assert all(averages(s) for s in (FedAvg(), FedAvgM(), FedProx(), FedAdam(), Named()))
    private = DifferentialPrivacyServerSideFixedClipping(FedAvg(), 0.0, 1.0, 2)
    others: list[Strategy] = [FedMedian(), FedTrimmedAvg(), Krum(), QFedAvg(client_learning_rate=0.1), Seen(), private]
    assert not any(averages(s) for s in others)


@pytest.mark.parametrize("kind", [FedAvg, FedAvgM, FedAdam])
def test_the_mean_is_that_of_the_models(kind: Any) -> None:
    """The same frames, once summed and once decoded one by one."""

    class Models(kind):  # type: ignore[misc]
        def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
            return super().aggregate_train(server_round, replies)

    for uplink in ("int8", "topk(0.1, values=uniform(8))", "lowrank(2, factors=uniform(8))", "sign"):
        summed = run(Compressed(kind(**QUIET), uplink=uplink), [mod()])
        decoded = run(Compressed(Models(**QUIET), uplink=uplink), [mod()])
        close(summed, decoded)


def test_an_averaging_strategy_sees_one_reply_with_all_the_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[Message]] = []
    real = FedAvg._check_and_log_replies

    def spy(self: FedAvg, replies: Iterable[Message], is_train: bool, validate: bool = True) -> Any:
        seen.append(list(replies))
        return real(self, seen[-1], is_train, validate)

    metrics: list[list[RecordDict]] = []

    def largest_loss(contents: list[RecordDict], key: str) -> MetricRecord:
        metrics.append(contents)
        return MetricRecord({"largest": max(float(c.metric_records["metrics"]["loss"]) for c in contents)})  # type: ignore[arg-type]

    inner = FedAvg(train_metrics_aggr_fn=largest_loss, **QUIET)
    monkeypatch.setattr(FedAvg, "_check_and_log_replies", spy)
    strategy = Compressed(inner, uplink="int8")
    with OrderedGrid(client_app([mod()]), CLIENTS) as grid:
        result = strategy.start(grid, record(start_model()), num_rounds=1)
    (replies,) = [r for r in seen if r]
    assert [m.content.metric_records["metrics"]["num-examples"] for m in replies] == [sum(range(10, 16))]
    assert len(metrics[-1]) == CLIENTS
    assert not any(content.array_records for content in metrics[-1])
    assert result.train_metrics_clientapp[1] == MetricRecord({"largest": 1.0})


def test_other_strategies_see_every_model() -> None:
    inner = Seen(**QUIET)
    run(Compressed(inner, uplink="int8"), [mod()], rounds=2)
    assert [len(replies) for replies in inner.__dict__["seen"]] == [CLIENTS, CLIENTS]
    for message in inner.__dict__["seen"][0]:
        assert set(message.content.array_records["arrays"]) == set(start_model())


@pytest.mark.parametrize(
    "uplink", ["int8", "sign", "topk(0.1)", "ecsq(bits=1)", "lowrank(2)", "eden(1.0)", "sketch(ratio=4)"]
)
def test_no_bit_of_the_model_hangs_on_the_order_of_arrival(uplink: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every order of four replies, one of them plain; tests/test_aggregator.py has five of each."""
    real = InProcessGrid.send_and_receive
    models = []

    def some_plain(message: Message, context: Context, call_next: Any) -> Message:
        if context.node_config["partition-id"] == 1:
            return call_next(message, context)  # type: ignore[no-any-return]
        return mod()(message, context, call_next)

    for order in itertools.permutations(range(4)):

        def shuffled(*args: Any, order: Any = order, **options: Any) -> list[Message]:
            replies = real(*args, **options)
            return [replies[i] for i in order] if replies else []

        monkeypatch.setattr(InProcessGrid, "send_and_receive", shuffled)
        with InProcessGrid(client_app([some_plain]), 4) as grid:
            result = Compressed(FedAvg(**QUIET), uplink=uplink).start(grid, record(start_model()), num_rounds=1)
        assert result.arrays is not None
        models.append({name: values.tobytes() for name, values in arrays(result.arrays).items()})
    assert all(model == models[0] for model in models)


def test_integers_are_averaged_as_flower_does_or_the_largest_is_taken() -> None:
    """c06: six clients count 1 to 6 batches; float64 3.5 is Flower's mean, weighted."""
    mean = run(fedavg(), [mod()], rounds=1)["bn.num_batches_tracked"]
    assert mean.dtype == np.float64
    assert mean == pytest.approx(sum((10 + i) * (1 + i) for i in range(6)) / 75)
    largest = run(fedavg(integers="max"), [mod()], rounds=2)
    assert largest["bn.num_batches_tracked"].dtype in (np.int64, np.float64)
    assert float(largest["bn.num_batches_tracked"]) == 12
    with pytest.raises(ConfigError, match="integers"):
        fedavg(integers="sum")


def test_running_variances_stay_positive(monkeypatch: pytest.MonkeyPatch) -> None:
    """c13: they are never coded with loss; what an optimiser at the server does to them is its own affair."""
    model = {"bn.weight": np.ones(40, np.float32), "bn.running_var": np.full(40, 1e-3, np.float32), **start_model()}
    for uplink in ("sign", "int8"):
        trained = run(Compressed(FedAvg(**QUIET), uplink=uplink, feedback="ef"), [mod()], rounds=20, model=model)
        assert (trained["bn.running_var"] >= 0).all()


def test_a_device_that_is_not_there_is_named_before_the_run() -> None:
    with pytest.raises(ConfigError, match="device"):
        fedavg(device="abacus")


# --- the downlink ----------------------------------------------------------------------------------------------------


class Watched(OrderedGrid):
    """Keeps what was sent."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.sent: list[list[Message]] = []

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        messages = list(messages)
        if messages:
            self.sent.append(messages)
        return super().send_and_receive(messages, timeout=timeout)


def packed(message: Message) -> bool:
    return package_of(message) is not None


def train(strategy: Strategy, mods: list[Any], rounds: int = 3, evaluate: bool = False) -> tuple[Watched, Model]:
    grid = Watched(client_app(mods, None, evaluate), CLIENTS)
    with grid:
        result = strategy.start(grid, record(start_model()), num_rounds=rounds)
    assert result.arrays is not None
    return grid, arrays(result.arrays)


@pytest.mark.parametrize("mixed", [True, False])
def test_the_model_travels_as_one_array_to_clients_that_understand_it(mixed: bool) -> None:
    strategy = fedavg(mixed_fleet=mixed)
    grid, model = train(strategy, [mod()])
    assert [sum(map(packed, messages)) for messages in grid.sent] == [0 if mixed else CLIENTS, CLIENTS, CLIENTS]
    assert len({id(package_of(m)) for m in grid.sent[1]}) == 1
    close(model, train(fedavg(downlink="plain"), [mod()])[1], 0)
    nbytes = sum(len(package_of(m) or b"") for m in grid.sent[1])
    text = sum(len(str(m.content.config_records["config"][KEY])) for m in grid.sent[1])
    assert nbytes + text < strategy.traffic[1].bytes_down < nbytes + text + CLIENTS * 20


def test_clients_without_fedcomp_get_plain_models() -> None:
    def some(message: Message, context: Context, call_next: Any) -> Message:
        if context.node_config["partition-id"] in (0, 4):
            return call_next(message, context)  # type: ignore[no-any-return]
        return mod()(message, context, call_next)

    strategy = fedavg()
    grid, model = train(strategy, [some])
    assert [sum(map(packed, messages)) for messages in grid.sent] == [0, 4, 4]
    assert not any(t.failures for t in strategy.traffic)
    close(model, train(fedavg(downlink="plain"), [some])[1], 0)


def test_a_client_that_lost_its_mod_fails_once_and_then_gets_plain_models() -> None:
    rounds = {"n": 0}

    def fading(message: Message, context: Context, call_next: Any) -> Message:
        if context.node_config["partition-id"] == 3:
            rounds["n"] += 1
            if rounds["n"] >= 2:
                return call_next(message, context)  # type: ignore[no-any-return]
        return mod()(message, context, call_next)

    strategy = fedavg()
    train(strategy, [fading], rounds=4)
    assert [t.failures for t in strategy.traffic] == [0, 1, 0, 0]


def test_evaluation_gets_packed_models_too() -> None:
    seen: list[set[str]] = []

    def spy(message: Message, context: Context, call_next: Any) -> Message:
        if message.metadata.message_type == "evaluate":
            seen.append(set(message.content.array_records["arrays"]))
        return call_next(message, context)  # type: ignore[no-any-return]

    client = mod()
    for downlink in ("pack", "uniform(8)"):
        seen.clear()
        strategy = Compressed(FedAvg(), uplink="int8", downlink=downlink)
        grid, _ = train(strategy, [client, spy], evaluate=True)
        evaluations = [ms for ms in grid.sent if ms[0].metadata.message_type == "evaluate"]
        assert all(packed(message) for messages in evaluations for message in messages)
        assert seen == [set(start_model())] * CLIENTS * 3
        assert not any(t.failures for t in strategy.traffic)


@pytest.mark.parametrize("downlink", ["uniform(4)", "sign", "topk(0.2, values=uniform(8))"])
def test_a_lossy_downlink_keeps_what_it_has_not_told(downlink: str) -> None:
    """The global model trains as with an exact downlink, but for what clients see of it; bytes fall several times."""
    clients = [CompressMod(MemoryStore(), models=MemoryModelCache())]
    strategy = fedavg(downlink=downlink, mixed_fleet=False)
    grid, model = train(strategy, clients, rounds=10)
    exact, start = train(fedavg(mixed_fleet=False), [mod()], rounds=10)[1], start_model()
    moved = np.linalg.norm(exact["fc.weight"] - start["fc.weight"])
    assert np.linalg.norm(model["fc.weight"] - exact["fc.weight"]) < 0.05 * moved
    assert strategy.traffic[9].bytes_down < 0.6 * strategy.traffic[0].bytes_down
    held = arrays(_last_model(grid, clients[0]))
    told = strategy._delivery.downlink.told if strategy._delivery.downlink else {}
    assert all(np.array_equal(held[name], told[name]) for name in told)


def _last_model(grid: Watched, client: CompressMod) -> ArrayRecord:
    node = grid.get_node_ids()[0]
    model = client.models.load(str(grid.context(node).run_id), "partition-0")
    assert model is not None
    return record(model)


def test_the_result_under_a_lossy_downlink_does_not_hang_on_who_replies_plainly() -> None:
    """A plain model trained from what was told counts as the same update of the global model."""

    def plainly(message: Message, context: Context, call_next: Any) -> Message:
        if message.content.config_records["config"]["server-round"] == 3:
            del message.content.config_records["config"][KEY]
        return client(message, context, call_next)

    client = mod()
    framed = train(Compressed(FedAvg(**QUIET), Identity(), downlink="uniform(4)", mixed_fleet=False), [mod()])[1]
    mixed = train(Compressed(FedAvg(**QUIET), Identity(), downlink="uniform(4)", mixed_fleet=False), [plainly])[1]
    close(framed, mixed, 1e-6)


def test_downlinks_that_cannot_work_are_refused_before_the_run() -> None:
    for wrong in ("zip", "eden(1.0)"):
        with pytest.raises(ConfigError):
            fedavg(downlink=wrong)


# --- feedback at the server ------------------------------------------------------------------------------------------


def test_cafe_with_frames_without_loss_changes_nothing() -> None:
    """C = identity is FedAvg, whatever beta."""
    plain = train(Compressed(FedAvg(**QUIET), uplink=Identity()), [mod()], rounds=6)[1]
    for mixed in (True, False):
        cafe = Compressed(FedAvg(**QUIET), uplink=Identity(), feedback="cafe(beta=0.8)", mixed_fleet=mixed)
        close(plain, train(cafe, [mod()], rounds=6)[1], 1e-5)


@pytest.mark.parametrize("kind", [FedAvg, Seen], ids=["mean", "models"])
@pytest.mark.parametrize("feedback", ["ef", "cafe", "dgc(momentum=0.3)"])
def test_feedback_brings_sparse_uploads_nearer_to_exact_ones(feedback: str, kind: Any) -> None:
    exact, start = run(kind(**QUIET), [], rounds=15), start_model()
    moved = np.linalg.norm(exact["fc.weight"] - start["fc.weight"])
    far = {}
    for name in ("none", feedback):
        model = run(Compressed(kind(**QUIET), uplink=UPLINK, feedback=name, mixed_fleet=False), [mod()], rounds=15)
        far[name] = np.linalg.norm(model["fc.weight"] - exact["fc.weight"]) / moved
    assert far[feedback] < 0.9 * far["none"]


def test_the_predictor_travels_beside_the_model_and_counts() -> None:
    sizes = {}
    for feedback in ("none", "cafe", "cafe(codec=sign())"):
        strategy = Compressed(FedAvg(**QUIET), uplink=UPLINK, feedback=feedback, mixed_fleet=False)
        train(strategy, [mod()])
        sizes[feedback] = [t.bytes_down for t in strategy.traffic]
    assert sizes["cafe"][0] <= sizes["none"][0] + CLIENTS * 20
    assert sizes["cafe"][2] > sizes["none"][2] + CLIENTS * 300
    assert sizes["cafe"][2] > sizes["cafe(codec=sign())"][2] > sizes["none"][2] + CLIENTS * 70


def test_after_a_round_without_a_model_nothing_is_applied_again() -> None:
    """All clients refused: p is reset, not re-applied."""

    def broken(reply: Message, context: Context, round_: int) -> None:
        if round_ == 2:
            raise RuntimeError("no network")

    strategy = Compressed(FedAvg(**QUIET), uplink=UPLINK, feedback="cafe", mixed_fleet=False)
    run(strategy, [mod()], rounds=2, fault=broken)
    assert strategy._feedback.predictor is None
    assert strategy._feedback.predictor_frame is None


def test_the_guard_lowers_beta_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """Clients whose updates grow without end: the server asks for less and less of the predictor."""
    asked: list[str] = []

    def growing(reply: Message, context: Context, round_: int) -> None:
        model = arrays(reply.content.array_records["arrays"])
        scale = np.float32(0.02 * 1.7 ** max(0, round_ - 8))
        reply.content["arrays"] = record(
            {n: np.asarray(v + scale) if v.dtype.kind == "f" else v for n, v in model.items()}
        )

    def spy(message: Message, context: Context, call_next: Any) -> Message:
        asked.append(str(message.content.config_records["config"][KEY]))
        return call_next(message, context)  # type: ignore[no-any-return]

    strategy = Compressed(FedAvg(**QUIET), uplink="int8", feedback="cafe(beta=0.9)", mixed_fleet=False)
    with caplog.at_level(logging.WARNING):
        run(strategy, [spy, mod()], rounds=20, fault=growing)
    assert "beta is lowered to 0.72" in caplog.text
    assert "beta=0.72" in asked[-1] or "beta=0.5" in asked[-1]


def test_fetchsgd_trains_with_stateless_clients() -> None:
    exact, start = run(FedAvg(**QUIET), [], rounds=15), start_model()
    uplink = Plan(CountSketch(rows=5, columns=600, seed=7), (Rule("*.bias", Uniform(8)),), gentle_share=0)
    feedback = "fetchsgd(momentum=0.5, lr=0.5, fraction=0.2)"
    model = run(Compressed(FedAvg(**QUIET), uplink=uplink, feedback=feedback), [mod()], rounds=15)
    moved = np.linalg.norm(exact["fc.weight"] - start["fc.weight"])
    assert np.linalg.norm(model["fc.weight"] - exact["fc.weight"]) < 0.8 * moved
    assert np.allclose(model["fc.bias"], exact["fc.bias"], atol=0.05)


@pytest.mark.parametrize("feedback", ["ef21", "fetchsgd"])
def test_schemes_that_need_the_mean_refuse_robust_strategies(feedback: str) -> None:
    uplink: Any = CountSketch(columns=50) if feedback == "fetchsgd" else TopK(0.1)
    for inner in (FedMedian(), Krum()):
        with pytest.raises(ConfigError, match="does not take"):
            Compressed(inner, uplink=uplink, feedback=feedback)


def test_ef21_refuses_plain_replies(caplog: pytest.LogCaptureFixture) -> None:
    def some(message: Message, context: Context, call_next: Any) -> Message:
        if context.node_config["partition-id"] == 1:
            return call_next(message, context)  # type: ignore[no-any-return]
        return client(message, context, call_next)

    client = mod()
    strategy = Compressed(FedAvg(**QUIET), uplink="sign", feedback="ef21")
    run(strategy, [some], rounds=2)
    assert [t.dropped for t in strategy.traffic] == [{"mismatch": 1}, {"mismatch": 1}]


def test_biased_feedback_under_adaptive_strategies_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        Compressed(FedAdam(), uplink="sign", feedback="ef")
    assert "feedback ef under FedAdam" in caplog.text


def test_dgc_asks_for_more_values_at_first() -> None:
    strategy = Compressed(FedAvg(**QUIET), uplink=TopK(0.01), feedback="dgc")
    run(strategy, [mod()], rounds=5)
    sizes = [t.bytes_up for t in strategy.traffic]
    assert sizes[0] > 1.5 * sizes[1]
    assert sizes[1] > 1.2 * sizes[2]
    assert max(sizes[3:]) < 1.05 * min(sizes[3:])


def test_memories_of_one_scheme_do_not_serve_another() -> None:
    assert fedcomp.as_feedback("ef").slots != fedcomp.as_feedback("ef21").slots
    assert Sign().contractive


# --- what reviews have found -----------------------------------------------------------------------------------------


INTEGERS = {**start_model(), "position_ids": np.arange(32), "mask": np.arange(40) % 2 == 0}


def torch_like(message: Message, context: Context, call_next: Any) -> Message:
    """Buffers keep their dtype at the client, whatever the server makes of them."""
    given = arrays(message.content.array_records["arrays"])
    reply: Message = call_next(message, context)
    model = arrays(reply.content.array_records["arrays"])
    kept = {name: given[name].astype(INTEGERS[name].dtype) for name in ("position_ids", "mask")}
    kept["bn.num_batches_tracked"] = model["bn.num_batches_tracked"].astype(np.int64)
    reply.content["arrays"] = record({**model, **kept})
    return reply


@pytest.mark.parametrize("kind", [FedAvg, FedAvgM, FedAdam, FedMedian])
@pytest.mark.parametrize("integers", ["mean", "max"])
@pytest.mark.parametrize("uplink", ["int8", "sketch(ratio=4)"])
def test_large_integer_buffers_do_not_stop_training(kind: Any, integers: str, uplink: str) -> None:
    """Position ids and masks: Flower hands them out as float64 from the second round on, clients reply integers."""
    feedback = "fetchsgd" if uplink.startswith("sketch") and kind is not FedMedian else "none"
    strategy = Compressed(kind(**QUIET), uplink=uplink, integers=integers, feedback=feedback)
    model = run(strategy, [mod(), torch_like], rounds=4, model=INTEGERS)
    assert [t.failures for t in strategy.traffic] == [0] * 4
    if kind is FedAvg:
        assert np.array_equal(model["position_ids"], np.arange(32))


@pytest.mark.parametrize("kind", [FedAvg, FedAvgM, FedAdam])
def test_the_largest_integer_keeps_its_dtype_through_every_strategy(kind: Any) -> None:
    """c06"""
    strategy = Compressed(kind(**QUIET), uplink="int8", integers="max")
    model = run(strategy, [mod(), torch_like], rounds=3, model=INTEGERS)
    assert {n: v.dtype for n, v in model.items() if INTEGERS[n].dtype.kind != "f"} == {
        n: v.dtype for n, v in INTEGERS.items() if v.dtype.kind != "f"
    }
    assert int(model["bn.num_batches_tracked"]) == 3 * CLIENTS
    assert np.array_equal(model["mask"], INTEGERS["mask"])


def test_clients_that_turn_weights_into_integers_are_refused() -> None:
    def whole(reply: Message, context: Context, round_: int) -> None:
        if context.node_config["partition-id"] == 2:
            model = arrays(reply.content.array_records["arrays"])
            reply.content["arrays"] = record({**model, "fc.weight": model["fc.weight"].astype(np.int64)})

    strategy = fedavg()
    run(strategy, [mod()], rounds=2, fault=whole)
    assert [t.dropped for t in strategy.traffic] == [{"damaged": 1}, {"damaged": 1}]


@pytest.mark.parametrize("kind", [FedAvg, FedAvgM, FedAdam])
def test_cafe_predicts_the_mean_update_not_the_servers_step(kind: Any) -> None:
    """An optimiser's step may be many times as long: re-applying it would be a feedback loop."""
    options = {"server_momentum": 0.9} if kind is FedAvgM else {}
    drifts = {}
    for feedback in ("none", "cafe"):
        strategy = Compressed(kind(**options, **QUIET), uplink=UPLINK, feedback=feedback, mixed_fleet=False)
        model = run(strategy, [mod()], rounds=25)
        drifts[feedback] = float(np.linalg.norm(model["fc.weight"] - start_model()["fc.weight"]))
    exact = run(kind(**options, **QUIET), [], rounds=25)
    limit = 1.5 * float(np.linalg.norm(exact["fc.weight"] - start_model()["fc.weight"]))
    assert drifts["cafe"] < limit


@pytest.mark.parametrize("kind", [FedMedian, Krum])
def test_robust_strategies_have_packed_models_and_predictors_in_mixed_fleets_too(kind: Any) -> None:
    strategy = Compressed(kind(**QUIET), uplink=UPLINK, feedback="cafe", downlink="uniform(8)")
    grid, _ = train(strategy, [mod()], rounds=4)
    assert [sum(map(packed, messages)) for messages in grid.sent] == [0, CLIENTS, CLIENTS, CLIENTS]
    assert strategy.traffic[3].bytes_down < 0.5 * strategy.traffic[0].bytes_down


def test_evaluate_messages_are_in_the_ledger() -> None:
    grid, _ = train(Compressed(FedAvg(), uplink="int8"), [strategy_mod := mod()], evaluate=True)
    assert strategy_mod.models is not None
    strategy = Compressed(FedAvg(), uplink="int8", downlink="uniform(8)", mixed_fleet=False)
    grid, _ = train(strategy, [mod()], evaluate=True)
    for messages, traffic in zip(grid.sent[1::2], strategy.traffic, strict=True):
        sent = sum(len(package_of(m) or b"") for m in messages)
        assert messages[0].metadata.message_type == "evaluate"
        assert 0 < sent <= traffic.bytes_down_evaluate <= sent + CLIENTS * 20
    assert len(strategy.traffic) == 3


@pytest.mark.parametrize("feedback", ["ef21", "fetchsgd"])
def test_schemes_of_the_mean_refuse_monitors_and_several_models(
    feedback: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Personal(FedAvg):
        def configure_train(self, *args: Any, **options: Any) -> Iterable[Message]:
            messages = list(super().configure_train(*args, **options))
            for index, message in enumerate(messages):
                model = arrays(message.content.array_records["arrays"])
                changed = {**model, "fc.bias": model["fc.bias"] + np.float32(index)}
                message.content = RecordDict({**message.content, "arrays": record(changed)})
            return messages

    uplink: Any = CountSketch(columns=50) if feedback == "fetchsgd" else TopK(0.1)
    with pytest.raises(ConfigError, match="a monitor prevents"):
        Compressed(FedAvg(), uplink=uplink, feedback=feedback, monitor=lambda stats: None)
    model = run(Compressed(Personal(**QUIET), uplink=uplink, feedback=feedback), [mod()], rounds=2)
    assert "nodes were sent different ones" in caplog.text
    close(model, start_model(), 0)


def test_records_of_their_own_with_the_same_arrays_are_one_model() -> None:
    class Own(FedAvg):
        def configure_train(self, *args: Any, **options: Any) -> Iterable[Message]:
            messages = list(super().configure_train(*args, **options))
            for message in messages:
                own = ArrayRecord(dict(message.content.array_records["arrays"]))
                message.content = RecordDict({**message.content, "arrays": own})
            return messages

    strategy = Compressed(Own(**QUIET), uplink=TopK(0.1), feedback="ef21")
    grid, model = train(strategy, [mod()])
    assert [sum(map(packed, messages)) for messages in grid.sent] == [0, CLIENTS, CLIENTS]
    close(model, train(Compressed(FedAvg(**QUIET), uplink=TopK(0.1), feedback="ef21"), [mod()])[1], 0)


@pytest.mark.parametrize("extra", ["arrays", "metrics", "frame beside arrays", "no metrics"])
@pytest.mark.parametrize("clients", [1, 2, 3])
def test_a_reply_with_records_too_many_is_dropped_alone(extra: str, clients: int) -> None:
    """Also if it is one of two, or the only one: then the old model stays."""

    def odd(message: Message, context: Context, call_next: Any) -> Message:
        reply: Message = call_next(message, context)
        if context.node_config["partition-id"] == 0 and message.metadata.message_type == "train":
            if extra == "metrics":
                reply.content["more"] = MetricRecord({"x": 1.0})
            elif extra == "no metrics":
                del reply.content["metrics"]
            else:
                reply.content["more"] = record(start_model())
        return reply

    mods: list[Any] = [odd, mod()] if extra == "frame beside arrays" else [mod(), odd]
    strategy = Compressed(FedAvg(min_train_nodes=1, min_available_nodes=1, **QUIET), uplink="int8")
    with OrderedGrid(client_app(mods), clients) as grid:
        strategy.start(grid, record(start_model()), num_rounds=2)
    cause = "weight" if extra == "no metrics" else "mismatch"
    assert [t.dropped for t in strategy.traffic] == [{cause: 1}] * 2
    assert [t.failures for t in strategy.traffic] == [1, 1]


@pytest.mark.parametrize("kind", [FedAvg, Seen], ids=["mean", "models"])
def test_verbatim_tensors_lose_nothing_under_a_lossy_downlink(kind: Any) -> None:
    """Clients add one in each round to what they were told, which differs from the global model."""

    def one_more(reply: Message, context: Context, round_: int) -> None:
        reply.content["arrays"] = record({n: np.asarray(v + 1) for n, v in told["model"].items()})

    told: dict[str, Model] = {}

    def spy(message: Message, context: Context, call_next: Any) -> Message:
        told["model"] = arrays(message.content.array_records["arrays"])
        return call_next(message, context)  # type: ignore[no-any-return]

    start = {"w": np.zeros((20, 30), np.float32), "v": np.arange(40, dtype=np.float32)}
    for uplink in (Plan(Identity()), Plan(Identity(), min_size=1000), Plan(Uniform(8), (Rule("*", None),))):
        strategy = Compressed(kind(**QUIET), uplink=uplink, downlink="topk(0.1)", mixed_fleet=False)
        model = run(strategy, [mod(), spy], rounds=10, fault=one_more, model=start)
        assert np.allclose(model["w"], 10, atol=1e-4), uplink
        assert np.allclose(model["v"], start["v"] + 10, atol=1e-4), uplink


def constant(value: float) -> Any:
    def step(reply: Message, context: Context, round_: int) -> None:
        start = {"w": np.zeros((20, 30), np.float32)}
        reply.content["arrays"] = record({"w": start["w"] + np.float32(value * round_)})

    return step


def test_ef21_begins_anew_when_a_client_has_lost_its_estimate(caplog: pytest.LogCaptureFixture) -> None:
    """With frames without loss every round moves the model by exactly one update, whatever was lost before."""
    client = mod()

    def forgets(message: Message, context: Context, call_next: Any) -> Message:
        if message.content.config_records["config"]["server-round"] == 4 and context.node_config["partition-id"] == 1:
            client.store = MemoryStore()
        return client(message, context, call_next)

    strategy = Compressed(FedAvg(**QUIET), uplink=Identity(), feedback="ef21")
    start = {"w": np.zeros((20, 30), np.float32)}
    model = run(strategy, [forgets], rounds=6, fault=constant(1.0), model=start)
    assert "all begin anew" in caplog.text
    assert np.allclose(model["w"], 6, atol=1e-5)


def test_ef21_keeps_to_a_clients_first_weight() -> None:
    def heavier(reply: Message, context: Context, round_: int) -> None:
        constant(1.0)(reply, context, round_)
        if context.node_config["partition-id"] == 1 and round_ > 2:
            reply.content.metric_records["metrics"]["num-examples"] = 1000

    strategy = Compressed(FedAvg(**QUIET), uplink=Identity(), feedback="ef21")
    model = run(strategy, [mod()], rounds=6, fault=heavier, model={"w": np.zeros((20, 30), np.float32)})
    assert np.allclose(model["w"], 6, atol=1e-5)


def test_a_schedule_of_sketches_is_refused_under_fetchsgd() -> None:
    with pytest.raises(ConfigError, match="one sketch"):
        fedavg(uplink="sketch(ratio=2) | 3: sketch(ratio=4)", feedback="fetchsgd")


def test_the_warm_up_ends_also_where_codecs_learn() -> None:
    uplink = Plan(TopK(0.01), rules=(Rule("other*", fedcomp.PowerSGD(rank=1)),), gentle_share=0)
    model = {"fc.weight": np.ones((60, 50), np.float32), "other": np.ones((30, 20), np.float32)}
    strategy = Compressed(FedAvg(**QUIET), uplink=uplink, feedback="dgc")
    run(strategy, [mod()], rounds=6, model=model)
    sizes = [t.bytes_up for t in strategy.traffic]
    assert sizes[0] > 2.5 * sizes[5]


def test_cafe_needs_packages() -> None:
    with pytest.raises(ConfigError, match="must not be 'plain'"):
        fedavg(feedback="cafe", downlink="plain")


def test_clients_that_cannot_evaluate_go_on_getting_packages() -> None:
    for mixed in (True, False):
        strategy = Compressed(FedAvg(), uplink="int8", downlink="uniform(8)", mixed_fleet=mixed)
        grid, _ = train(strategy, [mod()], rounds=6)
        trains = [m for m in grid.sent if m[0].metadata.message_type == "train"]
        assert [sum(map(packed, messages)) for messages in trains[1:]] == [CLIENTS] * 5
        assert strategy.traffic[5].bytes_down < 0.6 * strategy.traffic[1].bytes_down


def test_zero_weight_counts_where_weights_are_ignored() -> None:
    """FedMedian uses the model, so the client may not send it again."""

    def weightless(reply: Message, context: Context, round_: int) -> None:
        if context.node_config["partition-id"] == 1:
            reply.content.metric_records["metrics"]["num-examples"] = 0

    acks: dict[str, list[int]] = {}
    for kind in (FedMedian, FedAvg):
        strategy = Compressed(kind(**QUIET), uplink=UPLINK, feedback="ef")
        with OrderedGrid(client_app([mod()], weightless), 3) as grid:
            strategy.start(grid, record(start_model()), num_rounds=3)
            acks[kind.__name__] = [strategy._acks.told(node) or 0 for node in grid.get_node_ids()]
    assert acks == {"FedMedian": [3, 3, 3], "FedAvg": [3, 0, 3]}


def test_models_of_unknown_dtypes_pass_through(caplog: pytest.LogCaptureFixture) -> None:
    def complex_(reply: Message, context: Context, round_: int) -> None:
        model = {"w": np.ones((20, 30), np.float32) * round_, "z": np.full(20, 1j * round_, np.complex64)}
        reply.content["arrays"] = record(model)

    strategy = fedavg(feedback="ef")
    start = {"w": np.zeros((20, 30), np.float32), "z": np.zeros(20, np.complex64)}
    with OrderedGrid(client_app([mod()], complex_), 2) as grid:
        result = strategy.start(grid, record(start), num_rounds=2)
    assert "uncompressed" in caplog.text
    assert result.arrays is not None
    assert np.allclose(arrays(result.arrays)["z"], 2j)


@pytest.mark.parametrize("weight", [1e-320, 5e-324, 1e-30, 1e18])
def test_weights_of_every_size_give_the_mean(weight: float) -> None:
    def weigh(reply: Message, context: Context, round_: int) -> None:
        reply.content.metric_records["metrics"]["num-examples"] = weight

    light = run(fedavg(uplink=Identity()), [mod()], rounds=1, fault=weigh)
    even = run(fedavg(uplink=Identity()), [mod()], rounds=1, fault=lambda r, c, n: _one(r))
    assert np.allclose(light["fc.weight"], even["fc.weight"], atol=1e-6)


def _one(reply: Message) -> None:
    reply.content.metric_records["metrics"]["num-examples"] = 1


def test_metrics_are_aggregated_once_and_from_real_replies() -> None:
    calls: list[int] = []

    def count(contents: list[RecordDict], key: str) -> MetricRecord:
        calls.append(len(contents))
        return MetricRecord({"replies": len(contents)})

    inner = FedAvg(train_metrics_aggr_fn=count, **QUIET)
    run(Compressed(inner, uplink="int8"), [mod()], rounds=2)
    assert calls == [CLIENTS, CLIENTS]
    assert inner.train_metrics_aggr_fn is count


def test_a_second_training_is_like_the_first() -> None:
    strategy = Compressed(FedAvg(**QUIET), uplink=fedcomp.PowerSGD(rank=2), feedback="ef")
    models = [run(strategy, [mod()], rounds=3) for _ in range(2)]
    close(models[0], models[1], 0)


def test_two_good_replies_of_one_node_are_told_apart_by_content() -> None:
    results = []
    for order in (1, -1):

        class Twice(OrderedGrid):
            def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
                messages = list(messages)
                replies = super().send_and_receive(messages, timeout=timeout)
                if not replies:
                    return []
                other = Message(content=RecordDict({**replies[0].content}), metadata=replies[0].metadata)  # type: ignore[call-overload]
                put_frame(other, frame_of(replies[1]) or b"")
                return [*replies, other][::order]  # noqa: B023

        with Twice(client_app([mod()]), 3) as grid:
            result = Compressed(FedAvg(**QUIET), uplink="int8").start(grid, record(start_model()), num_rounds=1)
        assert result.arrays is not None
        results.append(arrays(result.arrays))
    close(results[0], results[1], 0)


def test_residuals_around_privacy_wrappers_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    private = DifferentialPrivacyServerSideFixedClipping(FedAvg(**QUIET), 0.0, 1.0, CLIENTS)
    Compressed(private, uplink="sign", feedback="ef")
    assert "not noised" in caplog.text


def test_a_frame_that_was_not_asked_for_does_not_reach_the_inner_strategy() -> None:
    """From a node that gets two models, and so was asked for plain replies."""

    class Double(FedAvg):
        def configure_train(self, *args: Any, **options: Any) -> Iterable[Message]:
            messages = list(super().configure_train(*args, **options))
            again = messages[0]
            copy = Message(again.content, again.metadata.dst_node_id, again.metadata.message_type)
            return [*messages, copy]

    frames: list[bytes] = []

    def forger(message: Message, context: Context, call_next: Any) -> Message:
        reply: Message = mod()(message, context, call_next)
        if context.node_config["partition-id"] == 5:
            frames[:] = [frame_of(reply) or b""]
        if KEY not in message.content.config_records["config"] and frames[0:]:
            put_frame(reply, frames[0])
        return reply

    random.seed(3)  # which Flower draws the order of nodes from
    strategy = Compressed(Double(**QUIET), uplink="int8")
    run(strategy, [forger], rounds=3)
    assert all(set(t.dropped) <= {"mismatch", "late"} for t in strategy.traffic)
    assert sum(sum(t.dropped.values()) for t in strategy.traffic) >= 3


def huge(reply: Message, context: Context, round_: int) -> None:
    if context.node_config["partition-id"] == 0:
        model = arrays(reply.content.array_records["arrays"])
        signs = np.where(np.arange(model["w"].size) % 2, 1, -1).reshape(model["w"].shape)
        reply.content["arrays"] = record({"w": (signs * 3.3e38).astype(np.float32)})
        reply.content.metric_records["metrics"]["num-examples"] = 1000


@pytest.mark.parametrize("uplink", ["sign", "uniform(1)", "uniform(8)", "uniform(8, fast=True)"])
def test_updates_at_the_limit_of_float32_do_not_end_the_run(uplink: str) -> None:
    strategy = fedavg(uplink=uplink)
    run(strategy, [mod()], rounds=2, fault=huge, clients=3, model={"w": np.zeros((60, 50), np.float32)})
    assert len(strategy.traffic) == 2


@pytest.mark.parametrize("again", ["same object", "another object"])
def test_training_goes_on_from_a_model_that_flower_averaged(again: str) -> None:
    """Its integers are float64 by now; clients go on replying integers."""
    first = fedavg()
    model = run(first, [mod(), torch_like], rounds=2, model=INTEGERS)
    assert model["position_ids"].dtype == np.float64
    second = first if again == "same object" else fedavg()
    model = run(second, [mod(), torch_like], rounds=2, model=model)
    assert [t.failures for t in second.traffic] == [0] * (4 if second is first else 2)
    assert np.array_equal(model["position_ids"], np.arange(32))


def test_integers_among_wide_floats_are_taken_too() -> None:
    """FedAdam's model is float64 throughout: nothing tells what was an integer once."""
    model = run(Compressed(FedAdam(**QUIET), uplink="int8"), [mod(), torch_like], rounds=2, model=INTEGERS)
    strategy = Compressed(FedAdam(**QUIET), uplink="int8")
    run(strategy, [mod(), torch_like], rounds=2, model=model)
    assert [t.failures for t in strategy.traffic] == [0, 0]


@pytest.mark.parametrize("weights", [(0, 10, 10), (10, 0, 10), (10, 0, 0), (0, 0, 10)])
def test_ef21_with_weights_of_zero(weights: tuple[int, ...]) -> None:
    def weigh(reply: Message, context: Context, round_: int) -> None:
        constant(1.0)(reply, context, round_)
        alone = context.node_config["partition-id"] == 1
        reply.content.metric_records["metrics"]["num-examples"] = weights[round_ - 1] if alone else 0

    strategy = Compressed(FedAvg(**QUIET), uplink=Identity(), feedback="ef21")
    with OrderedGrid(client_app([mod()], weigh), 2) as grid:
        result = strategy.start(grid, record({"w": np.zeros((20, 30), np.float32)}), num_rounds=3)
    assert result.arrays is not None
    assert np.allclose(arrays(result.arrays)["w"], 3 if sum(weights[1:]) or weights[0] else 0, atol=3)
    assert np.isfinite(arrays(result.arrays)["w"]).all()


def test_ef21_with_one_number_for_all_is_as_with_one_each() -> None:
    """Every device was given partition 0: they are told apart by their nodes."""
    models = []
    for same in (False, True):
        clients = {node: mod() for node in range(6)}

        def chosen(message: Message, context: Context, call_next: Any, same: bool = same) -> Message:
            own = int(context.node_config["partition-id"])
            told = Context(
                context.run_id, context.node_id, {"partition-id": 0 if same else own}, context.state, context.run_config
            )
            return clients[own](message, told, lambda m, _: call_next(m, context))  # noqa: B023

        def weigh(reply: Message, context: Context, round_: int) -> None:
            own = int(context.node_config["partition-id"])
            reply.content["arrays"] = record({"w": np.full((20, 30), float(own), np.float32)})
            reply.content.metric_records["metrics"]["num-examples"] = 10 * (own + 1)

        strategy = Compressed(FedAvg(**QUIET), uplink=Identity(), feedback="ef21")
        models.append(run(strategy, [chosen], rounds=3, fault=weigh, model={"w": np.zeros((20, 30), np.float32)}))
    close(models[0], models[1], 1e-6)


def test_ef21_leaves_out_a_client_that_forgets_again_and_again() -> None:
    def forgetful(message: Message, context: Context, call_next: Any) -> Message:
        if context.node_config["partition-id"] == 1:
            return mod()(message, context, call_next)
        return client(message, context, call_next)

    client = mod()
    strategy = Compressed(FedAvg(**QUIET), uplink=Identity(), feedback="ef21")
    run(strategy, [forgetful], rounds=8, fault=constant(1.0), model={"w": np.zeros((20, 30), np.float32)})
    assert [sum(t.dropped.values()) for t in strategy.traffic] == [0, 1, 0, 1, 1, 1, 1, 1]


def test_the_guard_does_not_watch_counters(caplog: pytest.LogCaptureFixture) -> None:
    """Batch counters grow without end, as float64 after the first round."""

    def count(reply: Message, context: Context, round_: int) -> None:
        model = arrays(reply.content.array_records["arrays"])
        reply.content["arrays"] = record({**model, "bn.num_batches_tracked": np.array(50 * round_)})

    half = {n: v.astype(np.float16) if n == "fc.weight" else v for n, v in start_model().items()}
    for start in (start_model(), half):
        strategy = Compressed(FedAvg(**QUIET), uplink="int8", feedback="cafe", mixed_fleet=False)
        run(strategy, [mod()], rounds=14, fault=count, model=start)
        assert "beta is lowered" not in caplog.text


@pytest.mark.parametrize("kind", [FedMedian, FedTrimmedAvg, Krum])
def test_weights_that_sum_to_zero_do_not_end_the_run(kind: Any, caplog: pytest.LogCaptureFixture) -> None:
    def weightless(reply: Message, context: Context, round_: int) -> None:
        reply.content.metric_records["metrics"]["num-examples"] = 0

    model = run(Compressed(kind(**QUIET), uplink="int8"), [mod()], rounds=2, fault=weightless)
    close(model, start_model(), 0)
    assert "the old model stays" in caplog.text


def test_krum_is_not_given_replies_without_weight() -> None:
    def one(reply: Message, context: Context, round_: int) -> None:
        if int(context.node_config["partition-id"]) < 5:
            reply.content.metric_records["metrics"]["num-examples"] = 0

    strategy = Compressed(Krum(**QUIET), uplink="int8")
    run(strategy, [mod()], rounds=2, fault=one)
    assert [t.dropped for t in strategy.traffic] == [{"weight": 5}] * 2


def test_evaluations_without_weight_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    def weightless(message: Message, context: Context, call_next: Any) -> Message:
        reply: Message = call_next(message, context)
        if message.metadata.message_type == "evaluate":
            reply.content.metric_records["metrics"]["num-examples"] = 0
        return reply

    train(Compressed(FedAvg(), uplink="int8"), [weightless, mod()], evaluate=True)
    assert "weight zero and are left out" in caplog.text


def test_fetchsgd_remembers_whatever_the_dtypes_of_the_model() -> None:
    def wide_once(reply: Message, context: Context, round_: int) -> None:
        if context.node_config["partition-id"] == 1 and round_ == 3:
            model = arrays(reply.content.array_records["arrays"])
            reply.content["arrays"] = record({**model, "fc.bias": model["fc.bias"].astype(np.float64)})

    strategy = Compressed(FedAvg(**QUIET), uplink="sketch(ratio=2)", feedback="fetchsgd")
    run(strategy, [mod()], rounds=5, fault=wide_once)
    assert len(strategy._feedback._fetchsgd) == 1


def test_a_client_with_a_full_disk_evaluates_and_loses_no_round() -> None:
    class Full(MemoryModelCache):
        def save(self, training: str, node: str, package: bytes) -> None:
            raise fedcomp.FedcompError("no space left")

    for mixed in (True, False):
        strategy = Compressed(FedAvg(), uplink="int8", downlink="uniform(8)", mixed_fleet=mixed)
        train(strategy, [CompressMod(models=Full())], rounds=5, evaluate=True)
        assert [t.dropped for t in strategy.traffic] == [{}] * 5


def test_a_superlink_that_answers_for_a_node_that_is_gone_is_understood(caplog: pytest.LogCaptureFixture) -> None:
    """It does so in its own name, once the node's heartbeats have run out."""
    gone: list[int] = []

    class Gone(OrderedGrid):
        def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
            replies = super().send_and_receive(messages, timeout=timeout)
            if not replies:
                return []
            gone[:] = [replies[2].metadata.src_node_id]
            metadata = copy.copy(replies[2].metadata)
            metadata.__dict__["_src_node_id"] = 1
            error = Error(ErrorCode.NODE_UNAVAILABLE, "Node Unavailable")
            replies[2] = Message(error=error, metadata=metadata)  # type: ignore[call-overload]
            return replies

    strategy = Compressed(FedAvg(**QUIET), "int8")
    with Gone(client_app([mod()]), CLIENTS) as grid:
        strategy.start(grid, record(start_model()), num_rounds=2)
    assert [t.dropped for t in strategy.traffic] == [{"error": 1}] * 2
    assert [t.failures for t in strategy.traffic] == [1, 1]
    assert f"node {gone[0]}: Node Unavailable" in caplog.text
