"""CompressedStrategy around strategies of flwr.server.strategy, with clients of a ClientApp's client_fn."""

import json
import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

import flwr.server.strategy as legacy
import numpy as np
import pytest
from flower_app import CLIENTS
from flwr.app import Array, ConfigRecord, Context, Message, Metadata, RecordDict
from flwr.client import Client
from flwr.client.mod import fixedclipping_mod
from flwr.common import (
    Code,
    EvaluateRes,
    FitIns,
    FitRes,
    Parameters,
    Scalar,
    Status,
    ndarrays_to_parameters,
    parameters_to_ndarrays,
)
from flwr.server import SimpleClientManager
from flwr.server.client_proxy import ClientProxy
from flwr.serverapp.strategy import FedAvg as MessageFedAvg
from legacy_app import (
    OK,
    QUIET,
    Arrays,
    Direct,
    Trainer,
    client_app,
    one_round,
    run,
    serve,
    start_arrays,
    start_parameters,
)
from marked import check_section

from fedcomp import ConfigError, Plan, TopK
from fedcomp.request import ACKS, KEY, MODEL_STYPE, STYPE, Request
from fedcomp_clients import CompressMod, MemoryModelCache, MemoryStore
from fedcomp_clients.legacy import wrap_client
from fedcomp_clients.told import Told
from fedcomp_strategies import Compressed
from fedcomp_strategies.averaging import traits_of
from fedcomp_strategies.legacy import CompressedStrategy, Failure
from fedcomp_strategies.legacy_adapter import node_id
from fedcomp_strategies.legacy_records import to_parameters, to_record
from fedcomp_strategies.records import views
from fedcomp_strategies.traffic import objects_in, transport

MEAN, MODELS, PLAINLY = "works, given the mean", "works, given every client's model", "works, uncompressed"


def mod() -> CompressMod:
    return CompressMod(MemoryStore())


def given(**options: Any) -> dict[str, Any]:
    return {"initial_parameters": start_parameters(), **QUIET, **options}


def fedavg(**options: Any) -> legacy.FedAvg:
    return legacy.FedAvg(**given(**options))


def evaluation(server_round: int, arrays: Arrays, config: dict[str, Scalar]) -> tuple[float, dict[str, Scalar]]:
    return 0.5 + float(np.abs(arrays[0]).mean()), {"round": server_round}


def flat(arrays: Arrays) -> Any:
    return np.concatenate([values.ravel() for values in arrays])


def close(a: Arrays, b: Arrays, tolerance: float = 1e-5) -> None:
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance)


# --- every strategy of Flower ----------------------------------------------------------------------------------------

DP = legacy.DifferentialPrivacyServerSideFixedClipping
CASES: dict[str, tuple[str, Callable[[], legacy.Strategy]]] = {
    "FedAvg": (MEAN, fedavg),
    "FedAvgM": (MEAN, lambda: legacy.FedAvgM(server_momentum=0.9, **given())),
    "FedProx": (MEAN, lambda: legacy.FedProx(proximal_mu=0.1, **given())),
    "FedOpt": (MEAN, lambda: legacy.FedOpt(**given())),
    "FedAdam": (MEAN, lambda: legacy.FedAdam(tau=1e-2, **given())),
    "FedYogi": (MEAN, lambda: legacy.FedYogi(tau=1e-2, **given())),
    "FedAdagrad": (MEAN, lambda: legacy.FedAdagrad(tau=1e-2, **given())),
    "FaultTolerantFedAvg": (MODELS, lambda: legacy.FaultTolerantFedAvg(**given())),
    "FedMedian": (MODELS, lambda: legacy.FedMedian(**given())),
    "FedTrimmedAvg": (MODELS, lambda: legacy.FedTrimmedAvg(**given())),
    "Krum": (MODELS, lambda: legacy.Krum(num_malicious_clients=1, num_clients_to_keep=3, **given())),
    "Bulyan": (MODELS, lambda: legacy.Bulyan(num_malicious_clients=0, to_keep=0, **given())),
    "QFedAvg": (MODELS, lambda: legacy.QFedAvg(**given(evaluate_fn=evaluation))),
    "DPFedAvgFixed": (MODELS, lambda: legacy.DPFedAvgFixed(fedavg(), CLIENTS, 10.0, 0.0)),
    "DPFedAvgAdaptive": (MODELS, lambda: legacy.DPFedAvgAdaptive(fedavg(), CLIENTS, 10.0, 0.0)),
    "DifferentialPrivacyServerSideFixedClipping": (MODELS, lambda: DP(fedavg(), 0.0, 0.5, CLIENTS)),
    "DifferentialPrivacyClientSideFixedClipping": (
        MODELS,
        lambda: legacy.DifferentialPrivacyClientSideFixedClipping(fedavg(), 0.0, 0.5, CLIENTS),
    ),
    "DifferentialPrivacyServerSideAdaptiveClipping": (
        MODELS,
        lambda: legacy.DifferentialPrivacyServerSideAdaptiveClipping(fedavg(), 0.0, CLIENTS, clipped_count_stddev=0.0),
    ),
    "DifferentialPrivacyClientSideAdaptiveClipping": (
        MODELS,
        lambda: legacy.DifferentialPrivacyClientSideAdaptiveClipping(
            fedavg(), 0.0, CLIENTS, initial_clipping_norm=10.0, clipped_count_stddev=0.0
        ),
    ),
    "FedAvgAndroid": (PLAINLY, lambda: legacy.FedAvgAndroid(**given(initial_parameters=raw(start_arrays())))),
    "FedXgbBagging": (PLAINLY, lambda: legacy.FedXgbBagging(**QUIET)),
    "FedXgbCyclic": (PLAINLY, lambda: legacy.FedXgbCyclic(**QUIET)),
    "FedXgbNnAvg": ("refused: Flower itself cannot carry its parameters", lambda: legacy.FedXgbNnAvg(**QUIET)),
}
CLIENTS_OF: dict[str, Callable[[int], Client]] = {
    "FedAvgAndroid": lambda partition: Android(partition),
    "FedXgbBagging": lambda partition: Trees(partition),
    "FedXgbCyclic": lambda partition: Trees(partition),
}


def rows() -> list[tuple[str, str]]:
    """(strategy, what becomes of it) for the documentation; checked by the tests below."""
    return [(name, verdict) for name, (verdict, _) in CASES.items()]


def test_the_table_in_the_documentation_is_what_these_tests_check() -> None:
    lines = [
        "| strategy | in `CompressedStrategy` |",
        "|---|---|",
        *(f"| `{name}` | {told} |" for name, told in rows()),
    ]
    check_section("strategies.md", "legacy", "".join(f"{line}\n" for line in lines))


def raw(arrays: Arrays) -> Parameters:
    return Parameters([values.tobytes() for values in arrays], "numpy.nda")


class Android(Client):
    """Speaks in plain bytes, as Flower's clients for telephones do."""

    def __init__(self, partition: int) -> None:
        self.partition = partition

    def fit(self, ins: FitIns) -> FitRes:
        moved = [np.frombuffer(data, np.float32) + np.float32(self.partition) for data in ins.parameters.tensors]
        return FitRes(OK, raw(moved), 1, {})


class Trees(Client):
    """Grows one tree a round."""

    def __init__(self, partition: int) -> None:
        self.partition = partition

    def fit(self, ins: FitIns) -> FitRes:
        model = {
            "gbtree_model_param": {"num_trees": "1", "num_parallel_tree": "1"},
            "iteration_indptr": [0, 1],
            "trees": [{"id": 0, "grown by": self.partition % 1}],
            "tree_info": [0],
        }
        told = json.dumps({"learner": {"gradient_booster": {"model": model}}}).encode()
        return FitRes(OK, Parameters([told], ""), 1, {})


def trained_by(name: str, strategy: legacy.Strategy, mods: list[Any]) -> list[bytes]:
    server = serve(strategy, client_app(mods, client=CLIENTS_OF.get(name)), 3)
    return server.parameters.tensors


def test_the_table_has_every_strategy_of_flower() -> None:
    assert {*CASES, "Strategy"} == set(legacy.__all__)


@pytest.mark.parametrize("name", [name for name, (verdict, _) in CASES.items() if verdict in (MEAN, MODELS)])
def test_uncompressed_frames_give_the_unwrapped_result(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    verdict, make = CASES[name]
    inner = [fixedclipping_mod] if name == "DifferentialPrivacyClientSideFixedClipping" else []
    plain = parameters_to_ndarrays(Parameters(trained_by(name, make(), [*inner]), ""))
    strategy, seen = make(), []
    real = type(strategy).aggregate_fit

    def spy(server_round: int, results: Any, failures: Any) -> Any:
        seen.append(len(results))
        assert not failures
        return real(strategy, server_round, results, failures)

    traits = traits_of(CompressedStrategy(strategy, "float32").compressed.strategy)
    assert traits.averages == (verdict == MEAN)
    monkeypatch.setattr(strategy, "aggregate_fit", spy)
    wrapped = CompressedStrategy(strategy, "float32")
    trained = parameters_to_ndarrays(Parameters(trained_by(name, wrapped, [mod(), *inner]), ""))
    close(plain, trained)
    assert seen == [1 if verdict == MEAN else CLIENTS] * 3
    assert all(3 * 2000 < traffic.bytes_up < 6 * 2900 for traffic in wrapped.traffic)  # frames of 2,644 bytes


@pytest.mark.parametrize("name", [name for name, (verdict, _) in CASES.items() if verdict == PLAINLY])
def test_what_is_no_array_passes_through(name: str) -> None:
    _, make = CASES[name]
    plain = trained_by(name, make(), [])
    strategy = CompressedStrategy(make(), "sign", feedback="ef")
    trained = trained_by(name, strategy, [mod()])
    if name == "FedAvgAndroid":  # Flower adds up in the order of arrival
        exact, same = ([np.frombuffer(data, np.float32) for data in model] for model in (plain, trained))
        close(exact, same)
    else:
        assert trained == plain
    assert [traffic.failures for traffic in strategy.traffic] == [0, 0, 0]


def test_formats_of_the_users_own_pass_through() -> None:
    """As in Flower's tutorial on serialization, which puts compressed sparse matrices where arrays are expected."""

    class Sparse(legacy.FedAvg):
        def aggregate_fit(self, server_round: int, results: Any, failures: Any) -> Any:
            assert [result.parameters.tensors[0][-1:] for _, result in results] == [b"!"] * CLIENTS
            return Parameters([results[0][1].parameters.tensors[0]], "numpy.ndarray"), {}

    class Zipping(Client):
        def fit(self, ins: FitIns) -> FitRes:
            return FitRes(OK, Parameters([ins.parameters.tensors[0] + b"!"], "numpy.ndarray"), 1, {})

    strategy = CompressedStrategy(Sparse(**given(initial_parameters=Parameters([b"PK"], "numpy.ndarray"))), "sign")
    server = serve(strategy, client_app([mod()], client=lambda partition: Zipping()), 2)
    assert server.parameters == Parameters([b"PK!!"], "numpy.ndarray")


def test_what_cannot_work_is_refused() -> None:
    with pytest.raises(ConfigError, match="pairs of a network and trees"):
        CompressedStrategy(CASES["FedXgbNnAvg"][1](), "sign")
    with pytest.raises(ConfigError, match="go into fedcomp_strategies"):
        CompressedStrategy(MessageFedAvg(), "sign")  # type: ignore[arg-type]
    for option in ({"compact": True}, {"evaluation": "piggyback"}, {"budgets": {"a=b": "2 kB"}}):
        with pytest.raises(ConfigError, match="the legacy API has no such choice"):
            CompressedStrategy(fedavg(), "auto", budget="2 kB", **option)


def test_traits_see_below_wrappers_and_through_subclasses() -> None:
    class Saving(legacy.FedAdam):
        def aggregate_fit(self, *args: Any, **kwargs: Any) -> Any:
            return super().aggregate_fit(*args, **kwargs)

    class Named(legacy.FedAdam):
        pass

    def traits(strategy: legacy.Strategy) -> Any:
        return traits_of(CompressedStrategy(strategy, "int8").compressed.strategy)

    assert traits(Named(**given())).averages
    assert traits(Named(**given())).adaptive
    saving = traits(Saving(**given()))
    assert (saving.name, saving.averages, saving.adaptive) == ("Saving", False, True)
    private = traits(DP(legacy.Krum(**given()), 0.0, 1.0, CLIENTS))
    assert (private.private, private.picks_replies, private.ignores_weights) == (True, True, False)
    assert traits(DP(legacy.FedMedian(**given()), 0.0, 1.0, CLIENTS)).ignores_weights
    assert traits(legacy.FedAvgM(server_momentum=0.5, **given())).momentum
    assert not traits(legacy.FedAvgM(**given())).momentum


# --- what travels ----------------------------------------------------------------------------------------------------


class Spy:
    """A mod outside the others: what came to each client and what went."""

    def __init__(self) -> None:
        self.down: list[tuple[str, str]] = []
        self.up: list[tuple[str, int]] = []
        self.configs: list[dict[str, Any]] = []

    def __call__(self, message: Message, context: Context, call_next: Any) -> Message:
        (down,) = message.content.array_records.values()
        self.down.append((message.metadata.message_type, next(iter(down.values())).stype))
        self.configs.append(dict(next(iter(message.content.config_records.values()))))
        reply: Message = call_next(message, context)
        for record in reply.content.array_records.values():
            self.up.append((next(iter(record.values())).stype, sum(len(array.data) for array in record.values())))
        return reply


def test_frames_go_up_and_packed_models_down() -> None:
    spy, strategy = Spy(), CompressedStrategy(fedavg(fraction_evaluate=1.0, min_evaluate_clients=2), "sign")
    serve(strategy, client_app([spy, mod()]), 2)
    assert Counter(spy.down) == {
        ("train", "numpy.ndarray"): CLIENTS,  # none has answered with a frame yet
        ("train", MODEL_STYPE): CLIENTS,
        ("evaluate", MODEL_STYPE): 2 * CLIENTS,
    }
    assert {stype for stype, _ in spy.up} == {STYPE}
    assert sum(t.bytes_up for t in strategy.traffic) == sum(size for _, size in spy.up)
    assert max(size for _, size in spy.up) < 300
    assert all(type(value) in (bool, bytes, float, int, str) for config in spy.configs for value in config.values())


def test_evaluation_sees_the_model_and_is_made_by_the_inner_strategy() -> None:
    seen: list[list[Any]] = []

    def collect(metrics: list[tuple[int, dict[str, Scalar]]]) -> dict[str, Scalar]:
        seen[-1].append(sorted((n, metric["partition"]) for n, metric in metrics))
        return {}

    def at_server(server_round: int, arrays: Arrays, config: dict[str, Scalar]) -> tuple[float, dict[str, Scalar]]:
        seen[-1].append((server_round, round(float(arrays[0].sum()), 2)))
        return 0.0, {}

    def strategy() -> legacy.FedAvg:
        seen.append([])
        return fedavg(fraction_evaluate=1.0, evaluate_fn=at_server, evaluate_metrics_aggregation_fn=collect)

    serve(strategy(), client_app([mod()]), 2)
    serve(CompressedStrategy(strategy(), "float32"), client_app([mod()]), 2)
    assert seen[0] == seen[1]
    everyone = [(1 + p, p) for p in range(CLIENTS)]
    assert [what for what in seen[1] if isinstance(what, list)] == [everyone, everyone]
    assert [what[0] for what in seen[1] if isinstance(what, tuple)] == [0, 1, 2]


def test_losses_of_clients_are_weighed_as_ever() -> None:
    strategy = CompressedStrategy(fedavg(fraction_evaluate=1.0), "float32")
    results: list[tuple[ClientProxy, EvaluateRes]] = [
        (Direct(str(p)), EvaluateRes(OK, float(p), 1 + p, {})) for p in range(3)
    ]
    assert strategy.aggregate_evaluate(1, results, []) == ((0 + 2 + 6) / 6, {})
    assert strategy.aggregate_evaluate(1, [], []) == (None, {})
    weightless: list[tuple[ClientProxy, EvaluateRes]] = [(Direct("0"), EvaluateRes(OK, 1.0, 0, {}))]
    assert strategy.aggregate_evaluate(1, weightless, []) == (None, {})


def test_metrics_are_those_of_all_clients() -> None:
    told: list[list[tuple[int, dict[str, Scalar]]]] = []

    def collect(metrics: list[tuple[int, dict[str, Scalar]]]) -> dict[str, Scalar]:
        told.append(sorted(metrics, key=lambda one: one[0]))
        return {"who": ", ".join(str(metric["who"]) for _, metric in told[-1])}

    strategy = fedavg(fit_metrics_aggregation_fn=collect)
    run(CompressedStrategy(strategy, "sign"), [mod()], rounds=1)
    ((number, first), *others) = told[0]
    assert (number, first["who"], first["loss"]) == (10, "client 0", 1.0)
    assert [number for number, _ in others] == [11, 12, 13, 14, 15]
    assert strategy.fit_metrics_aggregation_fn is collect


def test_integers_get_a_mean_where_flower_makes_zeros_of_them() -> None:
    """Flower's in-place mean casts the share of each client to the tensor's dtype, which leaves 0 of integers."""
    start = [*start_arrays(), np.array([7, 8], np.int64)]
    begin = ndarrays_to_parameters(start)
    plain = run(fedavg(initial_parameters=begin), [], rounds=1)
    wrapped = run(CompressedStrategy(fedavg(initial_parameters=begin), "float32"), [mod()], rounds=1)
    largest = run(CompressedStrategy(fedavg(initial_parameters=begin), "float32", integers="max"), [mod()], rounds=1)
    assert plain[-1].tolist() == [0, 0]
    assert (wrapped[-1].dtype.name, wrapped[-1].tolist()) == ("float64", [7, 8])
    assert (largest[-1].dtype.name, largest[-1].tolist()) == ("int64", [7, 8])
    close(plain[:-1], wrapped[:-1])


def test_a_budget_holds_through_the_legacy_path() -> None:
    strategy = CompressedStrategy(fedavg(), "auto", budget="120 B", shared=False)
    spy = Spy()
    run(strategy, [spy, mod()], rounds=3)
    assert {stype for stype, _ in spy.up} == {STYPE}
    assert max(size for _, size in spy.up) <= 120
    shared = CompressedStrategy(fedavg(), "auto", budget="120 B")
    run(shared, [mod()], rounds=6)
    assert np.mean([t.bytes_up / CLIENTS for t in shared.traffic]) == pytest.approx(120, rel=0.1)


def test_differences_go_down_and_the_average_is_what_is_evaluated() -> None:
    evaluated: list[Arrays] = []

    def keep(server_round: int, arrays: Arrays, config: dict[str, Scalar]) -> None:
        evaluated.append(arrays)

    options: dict[str, Any] = {"downlink": "uniform(8)", "mixed_fleet": False, "average": 0.5}
    strategy = CompressedStrategy(fedavg(evaluate_fn=keep), "float32", **options)
    server = serve(strategy, client_app([CompressMod(MemoryStore(), models=MemoryModelCache())]), 3)
    assert strategy.traffic[2].bytes_down < strategy.traffic[0].bytes_down / 2
    newest = parameters_to_ndarrays(server.parameters)
    averaged = parameters_to_ndarrays(to_parameters(strategy.compressed.averaged or to_record(server.parameters)))
    close(evaluated[-1], averaged)
    close(evaluated[0], start_arrays())
    assert np.abs(newest[0] - evaluated[-1][0]).max() > 0.01
    strategy.evaluate(0, start_parameters())  # another training begins
    close(evaluated[-1], start_arrays())


@pytest.mark.parametrize(
    ("fraction", "evaluate_fn", "said"),
    [(1.0, None, "loss "), (0.0, evaluation, "loss 1."), (1.0, evaluation, "loss 1."), (0.0, None, "uplink")],
)
def test_a_line_is_logged_a_round(
    fraction: float, evaluate_fn: Any, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    strategy = CompressedStrategy(fedavg(fraction_evaluate=fraction, evaluate_fn=evaluate_fn), "int8")
    with caplog.at_level(logging.INFO, "flwr"):
        serve(strategy, client_app([mod()]), 2)
    lines = [record.message for record in caplog.records if " | downlink " in record.message]
    assert [line.split("round ")[1][:1] for line in lines] == ["1", "2"]
    assert all(line.split(": ", 1)[1].startswith(said) for line in lines)


def test_estimates_of_the_wire_count_the_objects_that_flower_makes() -> None:
    """A count by a mod, which sees what compat layer and ClientApp really exchange."""
    objects: list[int] = []

    def spy(message: Message, context: Context, call_next: Any) -> Message:
        down = objects_in(message.content)
        reply: Message = call_next(message, context)
        up = sum(len(array.data) for record in reply.content.array_records.values() for array in record.values())
        objects.append(transport(down, objects_in(reply.content), up))
        return reply

    strategy = CompressedStrategy(fedavg(fraction_evaluate=1.0), "int8")
    serve(strategy, client_app([spy, mod()]), 2)
    assert sum(traffic.wire_up for traffic in strategy.traffic) == sum(objects)


# --- feedback --------------------------------------------------------------------------------------------------------


def test_error_feedback_telescopes() -> None:
    """What all rounds have moved the model by, and what the last residuals hold, is what was trained."""
    store = MemoryStore()
    model = run(
        CompressedStrategy(fedavg(), Plan(TopK(0.02), min_size=0), feedback="ef"), [CompressMod(store)], rounds=4
    )
    exact = run(fedavg(), [], rounds=4)
    weights = np.array([10 + p for p in range(CLIENTS)]) / sum(10 + p for p in range(CLIENTS))
    ((_, kept),) = store._kept._kept.items()
    residuals = [kept[f"partition-{p}"][4].slots["residual"] for p in range(CLIENTS)]
    left = sum(w * flat([kept[str(i)] for i in range(4)]) for w, kept in zip(weights, residuals, strict=True))
    sent, trained = flat(model) - flat(start_arrays()), flat(exact) - flat(start_arrays())
    assert np.linalg.norm(sent - trained) > 0.1 * np.linalg.norm(trained)
    np.testing.assert_allclose(sent + left, trained, atol=1e-4)


def test_a_client_that_comes_back_as_another_goes_on_with_its_memory() -> None:
    """As under start_server, where each connection is a client of its own."""
    strategy = CompressedStrategy(fedavg(), "topk(0.02)", feedback="ef")
    manager, store = SimpleClientManager(), MemoryStore()
    clients = [wrap_client(Trainer(p).to_client(), partition_id=p, mod=CompressMod(store)) for p in range(2)]
    parameters = start_parameters()
    for round_ in (1, 2, 3):
        for p in range(2):
            manager.register(Direct(f"{'first' if round_ < 3 else 'second'} {p}", clients[p]))
        parameters, told = one_round(strategy, round_, parameters, manager)
        for proxy in list(manager.all().values()):
            if round_ >= 2:
                manager.unregister(proxy)
    assert [str.split(config[ACKS]) for config in told] == [["1", "2", "0", "2"]] * 2  # type: ignore[arg-type]
    assert strategy.traffic[2].resets == 0
    residuals = [memory for kept in store._kept._kept.values() for memory in kept.values()]
    assert [sorted(memory) for memory in residuals] == [[2, 3], [2, 3]]


# --- what goes wrong -------------------------------------------------------------------------------------------------


def damaged(message: Message, context: Context, call_next: Any) -> Message:
    """A mod that cuts the frame of one client in round 2."""
    config = next(iter(message.content.config_records.values()))
    reply: Message = call_next(message, context)
    if context.node_config["partition-id"] == 1 and config.get("server-round") == 2:
        (record,) = reply.content.array_records.values()
        ((key, array),) = record.items()
        record[key] = Array(dtype="uint8", shape=(9,), stype=array.stype, data=array.data[:9])
    return reply


@pytest.mark.parametrize("kind", [legacy.FedAvg, legacy.FedMedian])
def test_a_damaged_frame_is_a_failure_and_the_round_goes_on(kind: Any) -> None:
    failures: list[list[Any]] = []

    inner = kind(**given())
    real = inner.aggregate_fit

    def spy(server_round: int, results: Any, failed: list[Any]) -> Any:
        failures.append(failed)
        return real(server_round, results, failed)

    inner.aggregate_fit = spy
    strategy = CompressedStrategy(inner, "int8")
    run(strategy, [damaged, mod()], rounds=3)
    assert [len(failed) for failed in failures] == [0, 1, 0]
    assert "refused" in str(failures[1][0])
    assert [dict(traffic.dropped) for traffic in strategy.traffic] == [{}, {"damaged": 1}, {}]


def test_a_client_that_fails_is_left_out_and_told_to_the_inner_strategy() -> None:
    def fails(arrays: Arrays, partition: int, round_: int) -> Arrays:
        if partition == 2 and round_ == 2:
            raise RuntimeError("out of memory")
        return [np.full_like(a, np.nan) for a in arrays] if partition == 3 and round_ == 3 else arrays

    told: list[dict[str, Scalar]] = []

    class Noting(CompressedStrategy):
        def aggregate_fit(self, *args: Any, **kwargs: Any) -> Any:
            parameters, metrics = super().aggregate_fit(*args, **kwargs)
            told.append(metrics)
            return parameters, metrics

    plain = run(fedavg(), [], fault=lambda a, p, r: fails(a, p, min(r, 2)))
    strategy = Noting(fedavg(), "float32")
    trained = run(strategy, [mod()], fault=lambda a, p, r: fails(a, p, min(r, 2)))
    close(plain, trained)
    assert [dict(traffic.dropped) for traffic in strategy.traffic] == [{}, {"error": 1}, {"error": 1}]
    assert told[1] == {"fedcomp-dropped-error": 1}
    strategy = Noting(fedavg(accept_failures=False), "float32")
    run(strategy, [mod()], fault=fails)
    assert [dict(traffic.dropped) for traffic in strategy.traffic] == [{}, {"error": 1}, {"non-finite": 1}]


def test_failures_of_several_kinds_leave_no_node_with_a_model_it_has_lost() -> None:
    strategy = CompressedStrategy(fedavg(), "int8")
    manager = SimpleClientManager()
    for p in range(4):
        manager.register(Direct(f"{p}", wrap_client(Trainer(p).to_client(), partition_id=p, mod=mod())))
    asked = strategy.configure_fit(1, start_parameters(), manager)
    results = [(proxy, proxy.fit(ins, None, None)) for proxy, ins in asked if proxy.cid in "01"]
    failed: list[Failure] = [ValueError("StaleModelError: gone"), ValueError("out of memory")]
    parameters, _ = strategy.aggregate_fit(1, results, failed)
    assert parameters is not None
    assert dict(strategy.traffic[0].dropped) == {"stale": 2}


def test_a_result_with_an_impossible_weight_is_refused() -> None:
    strategy = CompressedStrategy(fedavg(min_available_clients=2), "int8")
    manager = SimpleClientManager()
    for p in range(3):
        manager.register(Direct(f"{p}", wrap_client(Trainer(p).to_client(), partition_id=p, mod=mod())))
    asked = strategy.configure_fit(1, start_parameters(), manager)
    results = [(proxy, proxy.fit(ins, None, None)) for proxy, ins in asked]
    for (_, result), weight in zip(results, (-1, float("nan"), 5), strict=False):
        result.num_examples = weight  # type: ignore[assignment]
    parameters, _ = strategy.aggregate_fit(1, results, [])
    assert parameters is not None
    assert dict(strategy.traffic[0].dropped) == {"weight": 2 if len(asked) == 3 else len(asked)}


@pytest.mark.parametrize("wrapped", [{0, 3}, set()])
def test_clients_without_fedcomp_are_averaged_along(wrapped: set[int]) -> None:
    compress = mod()

    def some(message: Message, context: Context, call_next: Any) -> Message:
        if context.node_config["partition-id"] in wrapped:
            return compress(message, context, call_next)
        return call_next(message, context)  # type: ignore[no-any-return]

    strategy, spy = CompressedStrategy(fedavg(), "float32"), Spy()
    close(run(fedavg(), []), run(strategy, [spy, some]))
    assert Counter(stype for stype, _ in spy.up)[STYPE] == 3 * len(wrapped)
    assert [traffic.failures for traffic in strategy.traffic] == [0, 0, 0]


def test_clients_with_fedcomp_reply_plainly_to_other_servers() -> None:
    close(run(fedavg(), []), run(fedavg(), [mod()]))


def test_a_client_that_declines_is_a_failure_with_its_reason() -> None:
    class Declining(Client):
        def fit(self, ins: FitIns) -> FitRes:
            return FitRes(Status(Code.FIT_NOT_IMPLEMENTED, "no battery"), Parameters([], ""), 0, {})

    def client(partition: int) -> Client:
        return Trainer(partition).to_client() if partition else Declining()

    strategy, seen = CompressedStrategy(fedavg(), "int8"), []
    real = strategy.strategy.aggregate_fit

    def spy(server_round: int, results: Any, failures: list[Any]) -> Any:
        seen.append([result.status.message for _, result in failures])
        return real(server_round, results, failures)

    strategy.strategy.aggregate_fit = spy  # type: ignore[method-assign]
    serve(strategy, client_app([mod()], client=client), 1)
    assert seen == [["no battery"]]
    assert dict(strategy.traffic[0].dropped) == {"error": 1}


def test_too_few_results_leave_the_old_model() -> None:
    def one_left(arrays: Arrays, partition: int, round_: int) -> Arrays:
        if partition and round_ == 2:
            raise RuntimeError("out of memory")
        return arrays

    ends = [run(CompressedStrategy(fedavg(), "int8", min_replies=2), [mod()], rounds=n, fault=one_left) for n in (1, 2)]
    assert all(np.array_equal(a, b) for a, b in zip(*ends, strict=True))


# --- small things ----------------------------------------------------------------------------------------------------


def test_the_wrapper_is_called_as_flower_does_and_shows_the_inner_attributes() -> None:
    strategy = CompressedStrategy(fedavg(min_fit_clients=3), "sign")
    manager = SimpleClientManager()
    assert strategy.min_fit_clients == 3
    assert strategy.initialize_parameters(client_manager=manager) == start_parameters()
    assert strategy.initialize_parameters(manager) is None  # FedAvg hands it out once
    assert strategy.evaluate(0, parameters=start_parameters()) is None
    assert "FedAvg" in repr(strategy)
    with pytest.raises(AttributeError):
        _ = strategy.nothing


def test_ids_of_clients_are_numbers_that_stay() -> None:
    cids = ["1001", "18446744073709551615", "0f3a" * 8, "ipv4:127.0.0.1:33", "9" * 32]
    numbers = [node_id(Direct(cid)) for cid in cids]
    assert numbers[:2] == [1001, 2**64 - 1]
    assert all(0 <= number < 2**63 for number in numbers[2:])
    assert numbers == [node_id(Direct(cid)) for cid in cids]
    assert len(set(numbers)) == len(cids)


@pytest.mark.parametrize(
    "parameters",
    [
        start_parameters(),
        Parameters([], ""),
        Parameters([], "numpy.ndarray"),
        Parameters([b"{}"], ""),
        Parameters([b"PK zipped"], "numpy.ndarray"),
        Parameters([start_parameters().tensors[0], b"\x93NUMPY\x01"], "numpy.ndarray"),
        Parameters([b"frame"], STYPE),
    ],
)
def test_parameters_come_back_from_records(parameters: Parameters) -> None:
    assert to_parameters(to_record(parameters)) == parameters
    assert len(views(to_record(parameters))) == (4 if parameters == start_parameters() else 0)


def test_acknowledgements_are_read_from_lists_and_from_text() -> None:
    for told in ([3, 1, 9, 2], "3 1 9 2"):
        config = ConfigRecord({KEY: Request(Plan(TopK(0.1)), 1).to_text(), ACKS: told})
        metadata = Metadata(0, "", 1, 2, "", "", 0.0, 1.0, "train")
        read = Told.of(Message(content=RecordDict({"c": config}), metadata=metadata))  # type: ignore[call-overload]
        assert read is not None
        assert read.acks == {3: 1, 9: 2}
    config[ACKS] = "3 x"
    read = Told.of(Message(content=RecordDict({"c": config}), metadata=metadata))  # type: ignore[call-overload]
    assert read is not None
    assert read.acks == {}


def test_the_wrapper_of_the_other_api_says_which_one_to_use() -> None:
    with pytest.raises(ConfigError, match=r"CompressedStrategy of fedcomp_strategies\.legacy"):
        Compressed(legacy.FedAvg(), "int8")  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["DPFedAvgFixed", "DPFedAvgAdaptive"])
def test_the_oldest_privacy_strategies_are_given_no_more_than_their_norm(kind: str) -> None:
    """Their noise is for it, and a codec without bias makes updates longer than clients have clipped them."""
    lengths: list[float] = []

    class Inner(legacy.FedAvg):
        def configure_fit(self, server_round: int, parameters: Parameters, client_manager: Any) -> Any:
            self.base = parameters_to_ndarrays(parameters)
            return super().configure_fit(server_round, parameters, client_manager)

        def aggregate_fit(self, server_round: int, results: Any, failures: Any) -> Any:
            for _, result in results:
                moved = [a - b for a, b in zip(parameters_to_ndarrays(result.parameters), self.base, strict=True)]
                lengths.append(float(np.linalg.norm(flat([step for step in moved if step.ndim]))))
            return super().aggregate_fit(server_round, results, failures)

    def clipped(new: Arrays, partition: int, server_round: int) -> Arrays:
        before = start_arrays()
        step = flat(new) - flat(before)
        return [b + (a - b) * np.float32(0.5 / np.linalg.norm(step)) for a, b in zip(new, before, strict=True)]

    strategy = getattr(legacy, kind)(Inner(**given()), CLIENTS, 0.5, 0.0)
    run(CompressedStrategy(strategy, "eden(0.2)"), [mod()], rounds=1, fault=clipped)
    assert len(lengths) == CLIENTS
    assert max(lengths) <= 0.5 * (1 + 1e-5)
