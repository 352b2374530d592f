"""compress_mod together with Flower's own mods: size mods outside, clipping and local privacy inside."""

import logging
import re
from collections.abc import Iterator
from typing import Any

import flwr.server.strategy as legacy
import legacy_app
import numpy as np
import pytest
from flower_app import CLIENTS, Model, arrays, client_app, frame_of, record, run, start_model, trained
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.client.mod import fixedclipping_mod as legacy_clipping_mod
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import (
    LocalDpMod,
    adaptiveclipping_mod,
    arrays_size_mod,
    fixedclipping_mod,
    message_size_mod,
)
from flwr.clientapp.typing import Mod
from flwr.common import parameters_to_ndarrays
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
    FedAvg,
    Strategy,
)

import fedcomp
from fedcomp.request import KEY, Request
from fedcomp_clients import CompressMod, MemoryStore
from fedcomp_simulations.grid import InProcessGrid
from fedcomp_strategies import Compressed
from fedcomp_strategies.legacy import CompressedStrategy

QUIET: dict[str, Any] = {"fraction_evaluate": 0.0, "min_evaluate_nodes": 0}
NORM = 0.1
MODEL: Model = {"fc.weight": start_model()["fc.weight"], "fc.bias": np.zeros(30, np.float32)}


def mod() -> CompressMod:
    return CompressMod(MemoryStore())


def fixed(noise: float = 0.0, **options: Any) -> Strategy:
    return DifferentialPrivacyClientSideFixedClipping(FedAvg(**{**QUIET, **options}), noise, NORM, CLIENTS)


def adaptive(**options: Any) -> Strategy:
    inner = FedAvg(**{**QUIET, **options})
    return DifferentialPrivacyClientSideAdaptiveClipping(inner, 0.0, CLIENTS, initial_clipping_norm=NORM)


def local(noise: float) -> LocalDpMod:
    """Local privacy with noise of about this standard deviation."""
    return LocalDpMod(NORM, sensitivity=1.0, epsilon=float(np.sqrt(2 * np.log(1.25e5))) / noise, delta=1e-5)


def length(model: Model, base: Model) -> float:
    return float(np.sqrt(sum(np.square(model[name] - values).sum() for name, values in base.items())))


class Watcher:
    """A mod outside all others that decodes the frames."""

    def __init__(self) -> None:
        self.updates: list[Model] = []
        self.partitions: list[int] = []
        self.frames: list[int] = []

    def __call__(self, message: Message, context: Context, call_next: Any) -> Message:
        request = Request.from_text(str(next(iter(message.content.config_records.values()))[KEY]))
        base = arrays(message.content.array_records["arrays"])
        reply: Message = call_next(message, context)
        frame = frame_of(reply)
        assert frame is not None
        model = fedcomp.decompress(frame, base, plan=request.plan, round=request.round)
        self.partitions.append(int(context.node_config["partition-id"]))
        self.updates.append({name: model[name] - base[name] for name in base})
        self.frames.append(len(frame))
        return reply

    def lengths(self) -> list[float]:
        return [float(np.sqrt(sum(np.square(v).sum() for v in update.values()))) for update in self.updates]


def watched(strategy: Strategy, inner: list[Mod], uplink: str = "float32", **options: Any) -> Watcher:
    watcher = Watcher()
    wrapped = Compressed(strategy, uplink, downlink="plain", **options)
    run(wrapped, [watcher, mod(), *inner], model=MODEL)
    assert [t.failures for t in wrapped.traffic] == [0, 0, 0]
    return watcher


# --- the order that is right -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("compact", [True, False])
def test_the_frame_holds_the_clipped_update(compact: bool) -> None:
    assert min(watched(FedAvg(**QUIET), [], compact=compact).lengths()) > 10 * NORM
    lengths = watched(fixed(), [fixedclipping_mod], compact=compact).lengths()
    assert lengths == pytest.approx([NORM] * 3 * CLIENTS, rel=1e-4)
    assert max(watched(fixed(), [fixedclipping_mod], "int8", compact=compact).lengths()) < 1.01 * NORM


def test_adaptive_clipping_moves_the_norm_from_round_to_round() -> None:
    lengths = watched(adaptive(), [adaptiveclipping_mod]).lengths()
    assert lengths[:CLIENTS] == pytest.approx([NORM] * CLIENTS, rel=1e-4)
    assert min(lengths[CLIENTS : 2 * CLIENTS]) < 0.95 * NORM  # all were clipped, so the norm goes down


def test_local_noise_is_in_the_frame() -> None:
    clipped, noisy = (watched(FedAvg(**QUIET), [local(noise)]) for noise in (1e-9, 0.01))
    first = [dict(zip(w.partitions[:CLIENTS], w.updates, strict=False)) for w in (clipped, noisy)]
    added = [first[1][partition]["fc.weight"] - first[0][partition]["fc.weight"] for partition in range(CLIENTS)]
    assert np.std(added) == pytest.approx(0.01, rel=0.06)
    assert max(clipped.lengths()) < 1.001 * NORM


@pytest.mark.parametrize("compact", [True, False])
@pytest.mark.parametrize("downlink", ["plain", "pack"])
@pytest.mark.parametrize("strategy", ["fixed", "adaptive", "local"])
def test_all_mods_at_once(strategy: str, downlink: str, compact: bool) -> None:
    chosen: dict[str, tuple[Strategy, Mod]] = {
        "fixed": (fixed(), fixedclipping_mod),
        "adaptive": (adaptive(), adaptiveclipping_mod),
        "local": (FedAvg(**QUIET), local(1e-6)),
    }
    inner, clipping = chosen[strategy]
    wrapped = Compressed(inner, "int8", downlink=downlink, mixed_fleet=False, compact=compact)
    model = run(wrapped, [message_size_mod, arrays_size_mod, mod(), clipping], model=MODEL)
    assert [t.failures for t in wrapped.traffic] == [0, 0, 0]
    assert 0 < length(model, MODEL) < 3.05 * NORM


# --- size mods -------------------------------------------------------------------------------------------------------


@pytest.fixture
def flower_log() -> Iterator[list[str]]:
    """What Flower's logger says."""
    said: list[str] = []

    class Keeper(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    handler, logger = Keeper(), logging.getLogger("flwr")
    logger.addHandler(handler)
    yield said
    logger.removeHandler(handler)


def numbers(said: list[str], pattern: str) -> list[int]:
    found = [re.fullmatch(pattern, line) for line in said]
    return [int(match[1]) for match in found if match]


@pytest.mark.parametrize("compact", [True, False])
def test_size_mods_see_the_compressed_size(compact: bool, flower_log: list[str]) -> None:
    watcher = Watcher()
    strategy = Compressed(FedAvg(**QUIET), "sign", downlink="plain", compact=compact)
    run(strategy, [message_size_mod, arrays_size_mod, watcher, mod()], rounds=1, model=MODEL)
    whole = sum(4 * values.size for values in MODEL.values())
    assert min(numbers(flower_log, r"Incoming message size: (\d+) bytes")) > whole
    said = numbers(flower_log, r"Total array elements sent: (\d+) bytes")
    arrays = [size - frame if not compact else size for size, frame in zip(said, watcher.frames, strict=True)]
    assert all(0 <= rest < 40 for rest in arrays)  # a compact reply has none
    said = numbers(flower_log, r"Outgoing message size: (\d+) bytes")
    assert [0 <= size - frame < 120 for size, frame in zip(said, watcher.frames, strict=True)] == [True] * CLIENTS
    assert max(said) < whole / 10


# --- the wrong order -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mixed_fleet", [True, False])
@pytest.mark.parametrize("name", ["fixedclipping_mod", "adaptiveclipping_mod", "LocalDpMod"])
def test_clipping_outside_is_refused_with_the_right_order(
    name: str, mixed_fleet: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """By us, or where the request is compact already by Flower's mod, which finds no model to remember."""
    chosen: dict[str, tuple[Strategy, Mod]] = {
        "fixedclipping_mod": (fixed(), fixedclipping_mod),
        "adaptiveclipping_mod": (adaptive(), adaptiveclipping_mod),
        "LocalDpMod": (FedAvg(**QUIET), local(1.0)),
    }
    strategy, outer = chosen[name]
    wrapped = Compressed(strategy, "int8", mixed_fleet=mixed_fleet)
    model = run(wrapped, [outer, mod()], rounds=2, model=MODEL)
    assert length(model, MODEL) == 0
    assert [t.dropped for t in wrapped.traffic] == [{"error": CLIENTS}] * 2
    reason = f"mods=[compress_mod, {name}]" if mixed_fleet else f"{name} expects exactly one ArrayRecord, but found 0"
    assert reason in caplog.text


def test_clipping_outside_still_works_at_a_server_that_asks_for_no_frame() -> None:
    model = run(fixed(), [fixedclipping_mod, mod()], rounds=1, model=MODEL)
    assert 0 < length(model, MODEL) <= 1.001 * NORM


def test_a_client_that_does_not_clip_is_clipped_and_told(caplog: pytest.LogCaptureFixture) -> None:
    model = run(Compressed(fixed(), "float32"), [mod()], rounds=1, model=MODEL)
    assert length(model, MODEL) <= 1.001 * NORM
    assert "missing after compress_mod?" in caplog.text
    assert "clipped to 0.1 again" in caplog.text


def test_clipped_clients_are_told_nothing(caplog: pytest.LogCaptureFixture) -> None:
    run(Compressed(fixed(), "float32"), [mod(), fixedclipping_mod], rounds=2, model=MODEL)
    assert "missing after" not in caplog.text
    assert "again" not in caplog.text


# --- privacy that fits what arrives ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("strategy", "clip"), [(fixed, fixedclipping_mod), (adaptive, adaptiveclipping_mod)])
@pytest.mark.parametrize(("uplink", "feedback"), [("eden(0.1)", "none"), ("qsgd(4)", "none"), ("topk(0.3)", "ef")])
def test_noise_fits_the_updates_that_codecs_make_longer(
    strategy: Any, clip: Mod, uplink: str, feedback: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[float] = []
    real = FedAvg.aggregate_train

    def spy(self: FedAvg, server_round: int, replies: Any) -> Any:
        replies = list(replies)
        seen.extend(length(arrays(m.content.array_records["arrays"]), MODEL) for m in replies)
        return real(self, server_round, replies)

    if feedback == "none":
        assert max(watched(strategy(), [clip], uplink).lengths()) > 1.05 * NORM
    monkeypatch.setattr(FedAvg, "aggregate_train", spy)
    run(Compressed(strategy(), uplink, feedback=feedback), [mod(), clip], rounds=1, model=MODEL)
    assert len(seen) == CLIENTS
    assert max(seen) <= 1.001 * NORM


def test_wrappers_of_the_older_api_get_updates_that_fit_their_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[float] = []
    real = legacy.FedAvg.aggregate_fit

    def spy(self: legacy.FedAvg, server_round: int, results: Any, failures: Any) -> Any:
        for _, result in results:
            moved = zip(parameters_to_ndarrays(result.parameters), legacy_app.start_arrays(), strict=True)
            seen.append(float(np.sqrt(sum(np.square(new - old).sum() for new, old in moved if old.ndim))))
        return real(self, server_round, results, failures)

    monkeypatch.setattr(legacy.FedAvg, "aggregate_fit", spy)
    inner = legacy.FedAvg(initial_parameters=legacy_app.start_parameters(), **legacy_app.QUIET)
    private = legacy.DifferentialPrivacyClientSideFixedClipping(inner, 0.0, NORM, CLIENTS)
    legacy_app.run(CompressedStrategy(private, "eden(0.1)"), [mod(), legacy_clipping_mod], rounds=1)
    assert seen == pytest.approx([NORM] * CLIENTS, rel=1e-3)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda: DifferentialPrivacyServerSideFixedClipping(FedAvg(**QUIET), 0.0, NORM, CLIENTS),
        lambda: DifferentialPrivacyServerSideAdaptiveClipping(FedAvg(**QUIET), 0.0, CLIENTS),
    ],
)
@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64])
def test_an_update_of_zero_does_not_end_a_run_with_server_side_clipping(wrap: Any, dtype: Any) -> None:
    """Flower divides by its length: a client that learnt nothing, or a codec that had no room for it."""
    model = {name: np.asarray(values, dtype) for name, values in MODEL.items()}

    def learn_nothing(reply: Message, context: Context, round_: int) -> None:
        reply.content["arrays"] = record(model)

    strategy = Compressed(wrap(), "float32")
    result = run(strategy, [mod()], fault=learn_nothing, model=model, rounds=1)
    assert [t.failures for t in strategy.traffic] == [0]
    assert all(np.allclose(result[name], values, atol=0.02) for name, values in model.items())


def test_adaptive_clipping_survives_a_round_without_replies() -> None:
    class Deaf(InProcessGrid):
        def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> list[Message]:
            list(messages)
            return []

    with Deaf(client_app([]), CLIENTS) as grid:
        result = Compressed(adaptive(), "int8").start(grid, record(MODEL), num_rounds=1)
    assert not result.arrays


# --- evaluation ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inner", [fixedclipping_mod, adaptiveclipping_mod, local(1.0)])
def test_flowers_mods_of_apps_fail_on_evaluate_messages(inner: Mod) -> None:
    """Without fedcomp too. If this fails, Flower has mended it, and docs/flower.md can say so."""
    either: list[list[Mod]] = [[inner], [mod(), inner]]
    for mods in either:
        strategy = Compressed(FedAvg(), "int8") if len(mods) > 1 else FedAvg()
        with InProcessGrid(client_app(mods, evaluate=True), CLIENTS) as grid:
            result = strategy.start(
                grid, record(MODEL), num_rounds=1, train_config=ConfigRecord({"clipping_norm": 1.0})
            )
        assert result.train_metrics_clientapp
        assert not result.evaluate_metrics_clientapp


def test_mods_of_functions_leave_evaluation_alone() -> None:
    """So the documentation has them on the train function."""
    app = ClientApp(mods=[message_size_mod, mod()])

    @app.train(mods=[fixedclipping_mod])
    def train(message: Message, context: Context) -> Message:
        model = trained(arrays(message.content.array_records["arrays"]), int(context.node_config["partition-id"]), 1)
        content = RecordDict({"arrays": record(model), "metrics": MetricRecord({"num-examples": 1})})
        return Message(content, reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        return Message(RecordDict({"metrics": MetricRecord({"num-examples": 1, "accuracy": 0.5})}), reply_to=message)

    strategy = Compressed(fixed(fraction_evaluate=1.0, min_evaluate_nodes=2), "int8")
    with InProcessGrid(app, CLIENTS) as grid:
        result = strategy.start(grid, record(MODEL), num_rounds=2)
    assert [t.failures for t in strategy.traffic] == [0, 0]
    assert result.evaluate_metrics_clientapp[2]["accuracy"] == pytest.approx(0.5)
    assert result.arrays is not None
    assert length(arrays(result.arrays), MODEL) < 2.05 * NORM
