"""Compressed and compress_mod through real Flower strategies: equal where they must be, robust to bad replies."""

import json
import logging
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from flower_app import CLIENTS, Fault, Model, client_app, frame_of, put_frame, record, run, start_model, trained
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp.mod import arrays_size_mod, fixedclipping_mod, message_size_mod
from flwr.serverapp import Grid
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideFixedClipping,
    FedAdagrad,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedMedian,
    FedTrimmedAvg,
    FedXgbBagging,
    FedXgbCyclic,
    FedYogi,
    Krum,
    MultiKrum,
    QFedAvg,
    Strategy,
)

import fedcomp
from fedcomp import Identity, Plan, Rule, Sign, TopK, Uniform, VectorQuantizer
from fedcomp.request import KEY
from fedcomp_clients import CompressMod, MemoryStore
from fedcomp_simulations.grid import InProcessGrid
from fedcomp_strategies import Compressed

QUIET: dict[str, Any] = {"fraction_evaluate": 0.0, "min_evaluate_nodes": 0}

STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "FedAvg": lambda: FedAvg(**QUIET),
    "FedAvgM": lambda: FedAvgM(server_momentum=0.9, **QUIET),
    "FedAdam": lambda: FedAdam(**QUIET),
    "FedYogi": lambda: FedYogi(**QUIET),
    "FedAdagrad": lambda: FedAdagrad(**QUIET),
    "FedMedian": lambda: FedMedian(**QUIET),
    "FedTrimmedAvg": lambda: FedTrimmedAvg(**QUIET),
    "Krum": lambda: Krum(num_malicious_nodes=1, **QUIET),
    "MultiKrum": lambda: MultiKrum(num_malicious_nodes=1, num_nodes_to_select=3, **QUIET),
    "DP server": lambda: DifferentialPrivacyServerSideFixedClipping(FedAvg(**QUIET), 0.0, 1.0, CLIENTS),
}


def mod() -> CompressMod:
    return CompressMod(MemoryStore())


def close(a: Model, b: Model, tolerance: float = 1e-6) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype, name
        assert a[name].shape == b[name].shape, name
        assert np.allclose(a[name], b[name], rtol=tolerance, atol=tolerance), name


# --- nothing changes that should not ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", STRATEGIES)
def test_uncompressed_frames_give_the_unwrapped_result(name: str) -> None:
    """FedAdagrad divides by how little a weight has moved so far, which magnifies the rounding of means."""
    plain = run(STRATEGIES[name](), [])
    wrapped = run(Compressed(STRATEGIES[name](), uplink=Identity()), [mod()])
    close(plain, wrapped, 1e-5 if name == "FedAdagrad" else 1e-6)


@pytest.mark.parametrize("uplink", ["int8", "sign", "topk(0.1, values=uniform(8))", "vq(dim=2, size=16)", "float16"])
def test_every_codec_trains_near_the_uncompressed_model(uplink: str) -> None:
    plain, start = run(FedAvg(**QUIET), []), start_model()
    wrapped = run(Compressed(FedAvg(**QUIET), uplink=uplink), [mod()])
    moved = np.linalg.norm(plain["fc.weight"] - start["fc.weight"])
    assert np.linalg.norm(wrapped["fc.weight"] - plain["fc.weight"]) < 0.95 * moved
    close({"v": plain["bn.running_var"]}, {"v": wrapped["bn.running_var"]})  # statistics are never coded with loss


def test_the_result_does_not_hang_on_the_order_of_arrival(monkeypatch: pytest.MonkeyPatch) -> None:
    first = run(Compressed(FedAvg(**QUIET), uplink="int8"), [mod()])
    real = InProcessGrid.send_and_receive
    monkeypatch.setattr(InProcessGrid, "send_and_receive", lambda *a, **k: real(*a, **k)[::-1])
    second = run(Compressed(FedAvg(**QUIET), uplink="int8"), [mod()])
    assert all(np.array_equal(first[name], second[name]) for name in first)


def test_the_callers_config_reaches_clients_and_stays_his(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[dict[str, Any]] = []

    def spy(message: Message, context: Context, call_next: Any) -> Message:
        seen.append(dict(next(iter(message.content.config_records.values()))))
        return call_next(message, context)  # type: ignore[no-any-return]

    config = ConfigRecord({"lr": 0.5})
    run(Compressed(FedAvg(**QUIET), uplink="int8"), [mod(), spy], rounds=1, config=config)
    assert KEY not in config
    assert seen[0]["lr"] == 0.5
    assert json.loads(seen[0][KEY])["plan"] == {"codec": {"codec": "uniform"}}


def test_attributes_and_evaluation_are_those_of_the_wrapped_strategy() -> None:
    inner = FedAvg(fraction_evaluate=1.0)
    strategy = Compressed(inner, uplink="int8")
    assert strategy.weighted_by_key == "num-examples"
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = strategy.no_such_thing
    assert pickle.loads(pickle.dumps(strategy)).strategy.fraction_evaluate == 1.0
    run(strategy, [mod()], rounds=1, evaluate=True)


def test_client_side_clipping_runs_inside() -> None:
    strategy = Compressed(DifferentialPrivacyClientSideFixedClipping(FedAvg(**QUIET), 0.0, 0.1, CLIENTS), uplink="int8")
    model = run(strategy, [mod(), fixedclipping_mod], rounds=1)
    assert strategy.traffic[0].failures == 0
    moved = np.sqrt(sum(np.square(model[n] - v).sum() for n, v in start_model().items() if v.dtype.kind == "f"))
    assert moved < 0.11


def test_size_mods_outside_see_the_compressed_reply(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        run(Compressed(FedAvg(**QUIET), uplink="sign"), [message_size_mod, arrays_size_mod, mod()], rounds=1)


# --- bytes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compact", [True, False])
def test_traffic_is_the_length_of_what_travels(compact: bool) -> None:
    lengths: list[int] = []

    def spy(message: Message, context: Context, call_next: Any) -> Message:
        reply: Message = call_next(message, context)
        lengths.append(len(frame_of(reply) or b""))
        return reply

    strategy = Compressed(FedAvg(**QUIET), uplink=TopK(0.01, values=Uniform(8)), feedback="ef", compact=compact)
    run(strategy, [spy, mod()], rounds=2)
    assert len(strategy.traffic) == 2
    assert sum(t.bytes_up for t in strategy.traffic) == sum(lengths)
    assert [t.uploads for t in strategy.traffic] == [CLIENTS] * 2
    assert all(t.bytes_down > CLIENTS * 4 * 600 for t in strategy.traffic)


def test_a_codebook_from_the_server_leaves_the_frames() -> None:
    sizes: list[int] = []

    def spy(message: Message, context: Context, call_next: Any) -> Message:
        reply: Message = call_next(message, context)
        sizes.append(len(frame_of(reply) or b""))
        return reply

    codec = VectorQuantizer(dim=2, size=64, shared=True)
    strategy = Compressed(FedAvg(**QUIET), uplink=Plan(codec), downlink="plain")
    run(strategy, [spy, mod()], rounds=3)
    first, later = sizes[:CLIENTS], sizes[CLIENTS:]
    assert max(later) < min(first) - 63 * 2 * 2 + 40
    assert strategy.traffic[1].bytes_down > strategy.traffic[0].bytes_down + CLIENTS * 63 * 2 * 2


# --- mixed fleets ----------------------------------------------------------------------------------------------------


def only_for(partitions: set[int], wrapped: Any) -> Any:
    """A mod that acts on some nodes only."""

    def chosen(message: Message, context: Context, call_next: Any) -> Message:
        if context.node_config["partition-id"] in partitions:
            return wrapped(message, context, call_next)  # type: ignore[no-any-return]
        return call_next(message, context)  # type: ignore[no-any-return]

    return chosen


def test_clients_without_fedcomp_are_averaged_along() -> None:
    strategy = Compressed(FedAvg(**QUIET), uplink=Identity())
    mixed = run(strategy, [only_for({0, 3}, mod())])
    close(run(FedAvg(**QUIET), []), mixed)
    assert [t.failures for t in strategy.traffic] == [0, 0, 0]


def test_clients_with_fedcomp_reply_plainly_to_other_servers() -> None:
    close(run(FedAvg(**QUIET), []), run(FedAvg(**QUIET), [mod()]))


def test_a_frame_at_an_unwrapped_server_fails_loudly() -> None:
    def ask(message: Message, context: Context, call_next: Any) -> Message:
        config = message.content.config_records["config"]
        config[KEY] = fedcomp.request.Request(Plan(Sign()), 1).to_text()
        return mod()(message, context, call_next)

    with pytest.raises(TypeError, match="Unsupported serialization type"):
        run(FedAvg(**QUIET), [ask], rounds=1)


def test_a_request_that_the_client_cannot_read_is_answered_plainly(caplog: pytest.LogCaptureFixture) -> None:
    def newer(message: Message, context: Context, call_next: Any) -> Message:
        message.content.config_records["config"][KEY] = '{"v":99}'
        return mod()(message, context, call_next)

    close(run(FedAvg(**QUIET), [], rounds=1), run(Compressed(FedAvg(**QUIET), uplink="sign"), [newer], rounds=1))
    assert "replying uncompressed" in caplog.text


@pytest.mark.parametrize("kind", [FedXgbBagging, FedXgbCyclic])
def test_trees_pass_through_untouched(kind: Callable[..., Strategy]) -> None:
    """XGBoost strategies send JSON trees as bytes, sometimes as many as before: there is no update to compress."""

    def trees(reply: Message, context: Context, round_: int) -> None:
        tree = json.dumps({"learner": {"gradient_booster": {"model": {"gbtree_model_param": {"num_parallel_tree": "1",
            "num_trees": "1"}, "trees": [{"id": 0}], "iteration_indptr": [0, 1], "tree_info": [0]}}}})  # fmt: skip
        reply.content["arrays"] = ArrayRecord({"0": Array(np.frombuffer(tree.encode(), np.uint8).copy())})

    start = {"0": np.frombuffer(b"", np.uint8).copy()}
    plain = run(kind(fraction_evaluate=0.0), [], fault=trees, model=start, rounds=2)
    strategy = Compressed(kind(fraction_evaluate=0.0), uplink="int8")
    wrapped = run(strategy, [mod()], fault=trees, model=start, rounds=2)
    assert plain["0"].tobytes() == wrapped["0"].tobytes()
    assert not any(t.failures for t in strategy.traffic)


@pytest.mark.parametrize("dtype", [">f4", ">f8", "float16", "int8", "int64", "bool"])
def test_models_of_one_dtype(dtype: str) -> None:
    start = {"w": np.ones((20, 20), dtype)}
    plain = run(FedAvg(**QUIET), [], model=start)
    wrapped = run(Compressed(FedAvg(**QUIET), uplink="float32"), [mod()], model=start)
    assert np.allclose(plain["w"].astype(float), wrapped["w"].astype(float), atol=1e-6)


class DecayingFedAvg(FedAvg):
    """Halves the learning rate every other round by changing the config, as users do."""

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Any:
        if server_round % 2 == 0:
            config["lr"] = float(config["lr"]) * 0.5  # type: ignore[arg-type]
        return super().configure_train(server_round, arrays, config, grid)


class StubbornFedAvg(FedAvg):
    """Sends a configuration record of its own, always the same object."""

    own = ConfigRecord({"server-round": 1})

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Any:
        self.own["server-round"] = server_round
        return super().configure_train(server_round, arrays, self.own, grid)


def test_what_the_inner_strategy_does_to_the_config_lasts() -> None:
    def seen_by(strategy: Strategy) -> list[Any]:
        seen: list[Any] = []

        def spy(message: Message, context: Context, call_next: Any) -> Message:
            if context.node_config["partition-id"] == 0:
                seen.append(message.content.config_records["config"]["lr"])
            return call_next(message, context)  # type: ignore[no-any-return]

        run(strategy, [mod(), spy], rounds=5, config=ConfigRecord({"lr": 1.0}))
        return seen

    assert (
        seen_by(Compressed(DecayingFedAvg(**QUIET), "int8"))
        == seen_by(DecayingFedAvg(**QUIET))
        == [1, 0.5, 0.5, 0.25, 0.25]
    )


def test_a_config_that_the_inner_strategy_keeps_is_asked_anew_each_round() -> None:
    strategy = Compressed(StubbornFedAvg(**QUIET), "int8")
    run(strategy, [mod()])
    assert [t.failures for t in strategy.traffic] == [0, 0, 0]
    assert KEY not in StubbornFedAvg.own


class TwiceFedAvg(FedAvg):
    """Sends every node two models in a round."""

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Any:
        more = record({n: np.asarray(a.numpy() + a.numpy().dtype.type(100)) for n, a in arrays.items()})
        first = list(super().configure_train(server_round, arrays, config, grid))
        return first + list(super().configure_train(server_round, more, config, grid))


def test_nodes_that_get_two_models_reply_plainly() -> None:
    close(
        run(TwiceFedAvg(**QUIET), [], rounds=1),
        run(Compressed(TwiceFedAvg(**QUIET), "float32"), [mod()], rounds=1),
        1e-5,
    )


def test_one_codec_object_in_plan_and_rule_means_the_same_on_both_sides() -> None:
    codec = Sign()
    plan = Plan(codec, rules=(Rule("fc.bias", codec),))
    far = Plan.from_config(json.loads(json.dumps(plan.to_config())))
    layout = fedcomp.Layout.of({"fc.weight": np.zeros((100, 40)), "fc.bias": np.zeros(40)})
    fedcomp.plan._assign.cache_clear()
    here = plan.assign(layout)
    fedcomp.plan._assign.cache_clear()
    assert here == far.assign(layout) == (Sign(), Sign())


# --- faults ----------------------------------------------------------------------------------------------------------


def replace_frame(reply: Message, change: Any) -> None:
    put_frame(reply, change(frame_of(reply)))


def frames_changed(change: Any) -> Any:
    """A mod outside of the compressing one that damages the frames of partition 2."""

    def damage(message: Message, context: Context, call_next: Any) -> Message:
        reply: Message = call_next(message, context)
        if context.node_config["partition-id"] == 2:
            replace_frame(reply, change)
        return reply

    return damage


def without_client_2(rounds: int = 2) -> Model:
    """The model of a run in which partition 2 never takes part."""

    def absent(reply: Message, context: Context, round_: int) -> None:
        if context.node_config["partition-id"] == 2:
            raise RuntimeError("away")

    return run(Compressed(FedAvg(**QUIET), uplink="int8"), [mod()], fault=absent, rounds=rounds)


@pytest.mark.parametrize(
    "change",
    [
        lambda f: f[:-1],
        lambda f: f + b"\0",
        lambda f: f[:30],
        lambda f: b"\0" * len(f),
        lambda f: f[:40] + b"\xff" + f[41:],
        lambda f: b"",
    ],
    ids=["truncated", "longer", "cut in half", "zeros", "flipped", "empty"],
)
def test_a_damaged_frame_is_a_failure_of_its_client_alone(change: Any) -> None:
    strategy = Compressed(FedAvg(**QUIET), uplink="int8")
    model = run(strategy, [frames_changed(change), mod()], rounds=2)
    assert [t.failures for t in strategy.traffic] == [1, 1]
    close(without_client_2(), model, 0)


def nan_update(reply: Message, context: Context, round_: int) -> None:
    if context.node_config["partition-id"] == 2:
        model = {n: a.numpy().copy() for n, a in reply.content.array_records["arrays"].items()}
        model["fc.weight"][3, 4] = np.nan
        reply.content["arrays"] = record(model)


def lacks_a_tensor(reply: Message, context: Context, round_: int) -> None:
    """c18"""
    if context.node_config["partition-id"] == 2:
        del reply.content.array_records["arrays"]["fc.bias"]


def other_shape(reply: Message, context: Context, round_: int) -> None:
    if context.node_config["partition-id"] == 2:
        reply.content.array_records["arrays"]["fc.bias"] = Array(np.zeros(1, np.float32))


def metric(key: str, value: Any) -> Fault:
    def change(reply: Message, context: Context, round_: int) -> None:
        if context.node_config["partition-id"] == 2:
            reply.content.metric_records["metrics"][key] = value

    return change


def second_metric_record(reply: Message, context: Context, round_: int) -> None:
    if context.node_config["partition-id"] == 2:
        reply.content["more"] = MetricRecord({"x": 1.0})


def other_dtype(dtype: str) -> Fault:
    def change(reply: Message, context: Context, round_: int) -> None:
        if context.node_config["partition-id"] == 2:
            model = {n: a.numpy() for n, a in reply.content.array_records["arrays"].items()}
            reply.content["arrays"] = record({**model, "fc.bias": model["fc.bias"].astype(dtype)})

    return change


def renamed(old: str, new: str) -> Fault:
    def change(reply: Message, context: Context, round_: int) -> None:
        if context.node_config["partition-id"] == 2:
            reply.content = RecordDict({new if key == old else key: value for key, value in reply.content.items()})

    return change


def no_weight(reply: Message, context: Context, round_: int) -> None:
    if context.node_config["partition-id"] == 2:
        del reply.content.metric_records["metrics"]["num-examples"]


FAULTS: dict[str, Fault] = {
    "no weight": no_weight,
    "weight beyond floats": metric("num-examples", 10**400),
    "complex": other_dtype("complex64"),
    "text": other_dtype("U20"),
    "dates": other_dtype("datetime64[s]"),
    "metric record renamed": renamed("metrics", "measures"),
    "array record renamed": renamed("arrays", "weights"),
    "nan": nan_update,
    "missing tensor": lacks_a_tensor,
    "other shape": other_shape,
    "weight nan": metric("num-examples", float("nan")),
    "weight negative": metric("num-examples", -1),
    "weight is a list": metric("num-examples", [1, 2]),
    "extra metric": metric("surprise", 1.0),
    "metric of another kind": metric("loss", [1.0, 2.0]),
    "second metric record": second_metric_record,
}


@pytest.mark.parametrize("with_mod", [True, False], ids=["framed", "plain"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_reply_is_a_failure_of_its_client_alone(fault: str, with_mod: bool) -> None:
    """c18 c40: Flower alone would end the run, or average NaN into the model without a word."""
    strategy = Compressed(FedAvg(**QUIET), uplink="int8")
    others = {0, 1, 3, 4, 5} | ({2} if with_mod else set())
    model = run(strategy, [only_for(others, mod())], rounds=2, fault=FAULTS[fault])
    assert [t.failures for t in strategy.traffic] == [1, 1]
    close(without_client_2(), model, 0)


@pytest.mark.parametrize("clients", [1, 2])
def test_few_clients_of_whom_the_first_has_no_weight(clients: int) -> None:
    def first_has_none(reply: Message, context: Context, round_: int) -> None:
        if context.node_config["partition-id"] == 0:
            del reply.content.metric_records["metrics"]["num-examples"]

    strategy = Compressed(FedAvg(min_train_nodes=1, min_available_nodes=1, **QUIET), uplink="int8")
    run(strategy, [mod()], rounds=2, fault=first_has_none, clients=clients)
    assert [t.failures for t in strategy.traffic] == [1, 1]


def test_a_strategy_that_makes_nan_of_a_metric_does_not_spoil_the_model(caplog: pytest.LogCaptureFixture) -> None:
    """QFedAvg weighs by the loss."""

    def losses(reply: Message, context: Context, round_: int) -> None:
        bad = round_ == 1 and context.node_config["partition-id"] == 2
        reply.content.metric_records["metrics"]["train_loss"] = float("nan") if bad else 1.0

    floats = {name: values for name, values in start_model().items() if values.dtype.kind == "f"}
    strategy = Compressed(QFedAvg(client_learning_rate=0.1, **QUIET), uplink="float32")
    model = run(strategy, [mod()], rounds=2, fault=losses, model=floats)
    assert all(np.isfinite(values).all() for values in model.values())
    assert "the aggregated model is not finite" in caplog.text
    assert [t.failures for t in strategy.traffic] == [0, 0]


def test_plain_replies_reach_the_inner_strategy_in_the_order_of_the_model() -> None:
    """c19: privacy wrappers and QFedAvg match arrays by position."""

    def reversed_(reply: Message, context: Context, round_: int) -> None:
        if context.node_config["partition-id"] in (1, 3):
            items = list(reply.content.array_records["arrays"].items())
            reply.content["arrays"] = ArrayRecord(dict(items[::-1]))

    start = {"a": np.zeros((4, 4), np.float32), "b": np.full((4, 4), 100, np.float32)}
    private = DifferentialPrivacyServerSideFixedClipping(FedAvg(**QUIET), 0.0, 10.0, CLIENTS)
    model = run(Compressed(private, uplink="float32"), [], fault=reversed_, model=start, rounds=1)
    assert abs(model["a"].mean()) < 1
    assert abs(model["b"].mean() - 100) < 1


def test_a_round_without_any_reply_is_an_error_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with InProcessGrid(None, 2):  # type: ignore[arg-type]
        assert Compressed(FedAvg(**QUIET), uplink="int8").aggregate_train(1, []) == (None, None)
    assert "none of 0 replies can be used" in caplog.text


def test_one_odd_evaluation_is_a_failure_of_its_client_alone() -> None:
    def odd(message: Message, context: Context, call_next: Any) -> Message:
        reply: Message = call_next(message, context)
        if message.metadata.message_type == "evaluate" and context.node_config["partition-id"] == 2:
            del reply.content.metric_records["metrics"]["num-examples"]
        return reply

    run(Compressed(FedAvg(), uplink="int8"), [odd, mod()], rounds=2, evaluate=True)


def test_nan_names_the_tensor(caplog: pytest.LogCaptureFixture) -> None:
    run(Compressed(FedAvg(**QUIET), uplink="sign"), [mod()], rounds=1, fault=nan_update)
    assert "tensor 'fc.weight': expected finite values, got 1 NaN or infinite of 600" in caplog.text


def test_a_frame_of_another_plan_or_round_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    def stale(message: Message, context: Context, call_next: Any) -> Message:
        if context.node_config["partition-id"] == 2:
            request = json.loads(message.content.config_records["config"][KEY])  # type: ignore[arg-type]
            message.content.config_records["config"][KEY] = json.dumps({**request, "round": request["round"] + 1})
        return mod()(message, context, call_next)

    strategy = Compressed(FedAvg(**QUIET), uplink="int8")
    close(without_client_2(1), run(strategy, [stale], rounds=1), 0)
    assert "frame is for round 2, expected round 1" in caplog.text


@pytest.mark.parametrize("weights", [[0] * 6, [0, 5, 0, 0, 0, 0], [10**15, 1, 1, 1, 1, 1]])
def test_weights_of_zero_and_enormous_ones(weights: list[int]) -> None:
    """c40: all zero keeps the old model and says so; otherwise normalised over the replies."""

    def weigh(reply: Message, context: Context, round_: int) -> None:
        reply.content.metric_records["metrics"]["num-examples"] = weights[int(context.node_config["partition-id"])]

    model = run(Compressed(FedAvg(**QUIET), uplink=Identity()), [mod()], rounds=1, fault=weigh)
    if not any(weights):
        close(start_model(), model, 0)
    else:
        expected = trained(start_model(), int(np.argmax(weights)), 1)
        assert np.allclose(model["fc.weight"], expected["fc.weight"], atol=1e-5)


def test_when_all_fail_the_old_model_stays_and_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """c42"""

    def broken(reply: Message, context: Context, round_: int) -> None:
        if round_ == 2:
            raise RuntimeError("disk on fire")

    strategy = Compressed(FedAvg(**QUIET), uplink="int8")
    model = run(strategy, [mod()], rounds=2, fault=broken)
    assert [t.failures for t in strategy.traffic] == [0, CLIENTS]
    assert "none of 6 replies can be used" in caplog.text
    close(run(Compressed(FedAvg(**QUIET), uplink="int8"), [mod()], rounds=1), model, 0)


# --- error feedback --------------------------------------------------------------------------------------------------


def test_feedback_makes_up_for_what_was_not_sent() -> None:
    """c29 c39: with a constant update, 1 % top-k without memory would send the same few values for ever."""

    def constant(reply: Message, context: Context, round_: int) -> None:
        pass

    plan = Plan(TopK(0.02), min_size=0)
    plain, start = run(FedAvg(**QUIET), [], rounds=12, fault=constant), start_model()
    moved = np.linalg.norm(plain["fc.weight"] - start["fc.weight"])
    errors = {}
    for feedback in ("none", "ef"):
        model = run(Compressed(FedAvg(**QUIET), uplink=plan, feedback=feedback), [mod()], rounds=12)
        errors[feedback] = np.linalg.norm(model["fc.weight"] - plain["fc.weight"]) / moved
    assert errors["ef"] < 0.9 * errors["none"]


def test_memories_do_not_leak_into_another_training() -> None:
    found: list[bool] = []

    class Spy(MemoryStore):
        def discard(self, training: str, node: str, *, but: int) -> None:
            found.append(but > 0)
            super().discard(training, node, but=but)

    strategy = Compressed(FedAvg(**QUIET), uplink=TopK(0.02), feedback="ef")
    with InProcessGrid(client_app([CompressMod(Spy())]), 2) as grid:
        for again in (strategy, strategy, Compressed(FedAvg(**QUIET), uplink=TopK(0.02), feedback="ef")):
            again.start(grid, record(start_model()), num_rounds=2)
    assert found == 3 * [False, False, True, True]


@pytest.mark.parametrize(
    "uplink", [Uniform(2, rounding="stochastic"), Plan(Sign(), (Rule("*.bias", Uniform(8, affine=True)),))]
)
def test_feedback_around_codecs_that_diverge_is_refused_before_the_run(uplink: Any) -> None:
    with pytest.raises(fedcomp.ConfigError, match="not contractive"):
        Compressed(FedAvg(**QUIET), uplink=uplink, feedback="ef")


@pytest.mark.parametrize("wrong", [{"uplink": "zip"}, {"uplink": 3}, {"uplink": "sign", "feedback": "maybe"}])
def test_wrong_arguments_are_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(fedcomp.ConfigError, match=r"zip|plan|maybe"):
        Compressed(FedAvg(**QUIET), **wrong)


def _unused(strategy: Strategy) -> None:
    """Compressed is a Strategy for type checkers."""


_unused(Compressed(FedAvg(**QUIET), uplink="int8"))
