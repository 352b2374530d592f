"""What Compressed does with replies and the model: the mean or the models, the packed downlink, server feedback."""

import itertools
import logging
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from flower_app import CLIENTS, Model, OrderedGrid, arrays, client_app, record, run, start_model
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
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
from fedcomp.request import KEY, MODEL_STYPE
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
    """Every order of five replies, two of them plain."""
    real = InProcessGrid.send_and_receive
    models = []

    def some_plain(message: Message, context: Context, call_next: Any) -> Message:
        if context.node_config["partition-id"] in (1, 3):
            return call_next(message, context)  # type: ignore[no-any-return]
        return mod()(message, context, call_next)

    for order in itertools.permutations(range(5)):

        def shuffled(*args: Any, order: Any = order, **options: Any) -> list[Message]:
            replies = real(*args, **options)
            return [replies[i] for i in order] if replies else []

        monkeypatch.setattr(InProcessGrid, "send_and_receive", shuffled)
        with InProcessGrid(client_app([some_plain]), 5) as grid:
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
    ((_, sent),) = message.content.array_records.items()
    return [array.stype for array in sent.values()] == [MODEL_STYPE]


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
    assert len({id(next(iter(m.content.array_records["arrays"].values()))) for m in grid.sent[1]}) == 1
    close(model, train(fedavg(downlink="plain"), [mod()])[1], 0)
    nbytes = sum(len(a.data) for m in grid.sent[1] for a in m.content.array_records["arrays"].values())
    text = sum(len(str(m.content.config_records["config"][KEY])) for m in grid.sent[1])
    assert strategy.traffic[1].bytes_down == nbytes + text


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
    told = strategy._downlink.told if strategy._downlink else {}
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
