"""The ready ClientApp: federated training from a bundle, and what its mistakes look like to the server."""

from pathlib import Path
from typing import Any

import bundles
import numpy as np
import pytest
from bundles import CLASSES, INPUTS
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable
from flwr.serverapp.strategy import FedAvg, FedProx
from numpy.typing import NDArray

from fedcomp_clients import CompressMod, MemoryStore, OnnxTrainer, initial_arrays, make_client_app
from fedcomp_clients.bundle import MANIFEST
from fedcomp_simulations.grid import InProcessGrid
from fedcomp_strategies import Compressed

Array = NDArray[Any]
Samples = tuple[Array, Array]

NODES = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bundles.mlp(tmp_path_factory.mktemp("bundles") / "mlp")


def samples(context: Context, count: int = 60) -> Samples:
    """Samples of this node, whose label is the largest of their first values."""
    random = np.random.default_rng(int(context.node_config["partition-id"]))
    x = random.standard_normal((count, INPUTS)).astype(np.float32)
    return x, x[:, :CLASSES].argmax(axis=1)


def split(context: Context) -> tuple[Samples, Samples]:
    x, y = samples(context)
    return (x[:40], y[:40]), (x[40:], y[40:])


def ask(
    app: ClientApp,
    model: ArrayRecord,
    kind: str = "train",
    config: dict[str, Any] | None = None,
    run_config: dict[str, Any] | None = None,
    node: int = 0,
) -> Message:
    """The reply of one node to one message, from a server without fedcomp."""
    with InProcessGrid(app, NODES, run_config) as grid:
        content = RecordDict({"arrays": model, "config": ConfigRecord(config or {})})
        message = Message(content, grid.get_node_ids()[node], kind)
        return next(iter(grid.send_and_receive([message])))


def trained(reply: Message) -> dict[str, Array]:
    assert not reply.has_error(), reply.error.reason
    return {name: array.numpy() for name, array in reply.content.array_records["arrays"].items()}


def metrics(reply: Message) -> MetricRecord:
    assert not reply.has_error(), reply.error.reason
    return reply.content.metric_records["metrics"]


@pytest.mark.parametrize("piggyback", [False, True])
def test_a_federation_learns(piggyback: bool, folder: Path) -> None:
    evaluation = {"evaluation": "piggyback"} if piggyback else {}
    strategy = Compressed(FedAvg(), uplink="uniform(8)", **evaluation)  # type: ignore[arg-type]
    config = ConfigRecord({"lr": 0.2, "batch-size": 8, "local-epochs": 3})
    with InProcessGrid(make_client_app(folder, split), NODES) as grid:
        result = strategy.start(grid, initial_arrays(folder), num_rounds=8, train_config=config)
    told = result.evaluate_metrics_clientapp[8]
    assert float(told["accuracy"]) > 0.85  # type: ignore[arg-type]
    assert {"loss", "accuracy"} <= set(result.train_metrics_clientapp[1])
    uncompressed = sum(len(array.data) for array in initial_arrays(folder).values())
    for round_ in strategy.traffic:
        assert round_.uploads == NODES
        assert round_.bytes_up < uncompressed * NODES / 5
    assert (strategy.traffic[0].bytes_down_evaluate == 0) == piggyback


def test_training_is_what_the_trainer_does(folder: Path) -> None:
    app = make_client_app(folder, split)
    config = {"lr": 0.05, "local-epochs": 2, "batch-size": 7, "seed": 3, "server-round": 5, "clip-norm": 0.5}
    reply = ask(app, initial_arrays(folder), config=config, node=2)
    trainer = OnnxTrainer(folder)
    seed = int(np.random.SeedSequence((3, 5, 2)).generate_state(1)[0])
    (x, y), _ = split(_context(2))
    result = trainer.fit(x, y, epochs=2, batch_size=7, lr=0.05, seed=seed, clip_norm=0.5)
    for name, values in trainer.get_parameters().items():
        np.testing.assert_array_equal(trained(reply)[name], values)
        assert trained(reply)[name].dtype == values.dtype
    assert dict(metrics(reply)) == {"num-examples": 40, "loss": result.loss, "accuracy": result.accuracy}


def _context(partition: int) -> Context:
    return Context(run_id=1, node_id=1, node_config={"partition-id": partition}, state=RecordDict(), run_config={})


def test_evaluation_is_of_the_received_model_on_data_of_its_own(folder: Path) -> None:
    reply = ask(make_client_app(folder, split), initial_arrays(folder), "evaluate")
    told = OnnxTrainer(folder).evaluate(*split(_context(0))[1])
    assert dict(metrics(reply)) == {"num-examples": 20, "loss": told.loss, "accuracy": told.accuracy}


def test_without_such_data_training_data_serve(folder: Path) -> None:
    reply = ask(make_client_app(folder, samples), initial_arrays(folder), "evaluate")
    assert metrics(reply)["num-examples"] == 60


def test_settings_of_the_message_come_before_those_of_the_run(folder: Path) -> None:
    app, model = make_client_app(folder, samples), initial_arrays(folder)
    start = {name: array.numpy() for name, array in model.items()}
    still = trained(ask(app, model, run_config={"lr": 0.0}))
    np.testing.assert_array_equal(still["w1"], start["w1"])
    moved = trained(ask(app, model, config={"lr": 0.1}, run_config={"lr": 0.0}))
    assert not np.array_equal(moved["w1"], start["w1"])
    epochs = trained(ask(app, model, run_config={"local-epochs": 3, "batch-size": 30}))
    assert epochs["steps"] == 6
    pieces = trained(ask(app, model, run_config={"accumulate": 5, "batch-size": 30}))
    assert pieces["steps"] == 10


def test_a_node_chooses_what_its_memory_bears(folder: Path) -> None:
    def load(context: Context) -> Samples:
        context.node_config["accumulate"] = 2  # as `flower-supernode --node-config` would
        return samples(context)

    reply = ask(make_client_app(folder, load), initial_arrays(folder), config={"accumulate": 1, "batch-size": 60})
    assert trained(reply)["steps"] == 2


def test_the_proximal_term_of_flowers_fedprox(folder: Path) -> None:
    def distance(mu: float) -> float:
        app = make_client_app(folder, samples)
        with InProcessGrid(app, NODES) as grid:
            strategy = FedProx(proximal_mu=mu, fraction_evaluate=0.0)
            result = strategy.start(
                grid, initial_arrays(folder), num_rounds=1, train_config=ConfigRecord({"local-epochs": 5})
            )
        w1 = result.arrays["w1"].numpy()
        return float(np.linalg.norm(w1 - initial_arrays(folder)["w1"].numpy()))

    assert distance(5.0) < 0.6 * distance(0.0)


def test_orders_change_with_round_and_node_and_repeat(folder: Path) -> None:
    model = initial_arrays(folder)

    def same_data(_: Context) -> Samples:
        return samples(_context(0))

    app = make_client_app(folder, same_data)

    def after(round_: int, node: int) -> bytes:
        return trained(ask(app, model, config={"server-round": round_, "batch-size": 8}, node=node))["w1"].tobytes()

    assert after(1, 0) == after(1, 0)
    assert len({after(1, 0), after(2, 0), after(1, 1)}) == 3


def test_regression_has_no_accuracy(tmp_path: Path) -> None:
    folder = bundles.linear(tmp_path)

    def load(context: Context) -> Samples:
        x, _ = samples(context)
        return x, x[:, 0].copy()

    app = make_client_app(lambda context: folder, load)
    assert set(metrics(ask(app, initial_arrays(folder)))) == {"num-examples", "loss"}
    assert set(metrics(ask(app, initial_arrays(folder), "evaluate"))) == {"num-examples", "loss"}


def test_one_sample_under_batch_norm_weighs_nothing(tmp_path: Path) -> None:
    """C15: no exception, the received model comes back, and its weight is zero."""
    folder = bundles.mlp(tmp_path, variance=True)
    model = initial_arrays(folder)
    reply = ask(make_client_app(folder, lambda context: samples(context, 1)), model)
    assert metrics(reply)["num-examples"] == 0
    assert np.isfinite(metrics(reply)["loss"])
    for name, array in model.items():
        np.testing.assert_array_equal(trained(reply)[name], array.numpy())


BAD_LOADS: dict[str, tuple[Any, str]] = {
    "labels": (lambda c: (samples(c)[0], samples(c)[1] + 1), "DataError: y: expected labels from 0 to 2, got 3"),
    "doubles": (lambda c: (samples(c)[0].astype(np.float64), samples(c)[1]), "DataError: x: expected float32"),
    "nothing": (lambda c: None, r"FedcompError: load_data: expected \(x, y\)"),
    "three": (lambda c: (*samples(c), 1), r"FedcompError: load_data: expected \(x, y\)"),
    "halves": (lambda c: (samples(c), 1), r"FedcompError: load_data: expected \(x, y\)"),
    "diverging": (lambda c: (samples(c)[0] * np.float32(1e30), samples(c)[1]), "NonFiniteError: training diverged"),
}


@pytest.mark.parametrize("name", BAD_LOADS)
def test_a_node_with_bad_data_replies_why_and_the_others_go_on(name: str, folder: Path) -> None:
    bad, reason = BAD_LOADS[name]

    def load(context: Context) -> Any:
        return bad(context) if context.node_config["partition-id"] == 1 else samples(context)

    app = make_client_app(folder, load, compress=CompressMod(MemoryStore()))
    reply = ask(app, initial_arrays(folder), node=1)
    assert reply.has_error()
    with pytest.raises(AssertionError, match=reason):
        trained(reply)
    strategy = Compressed(FedAvg(fraction_evaluate=0.0), uplink="uniform(8)", feedback="ef")
    with InProcessGrid(app, NODES) as grid:
        result = strategy.start(grid, initial_arrays(folder), num_rounds=2)
        for node in grid.get_node_ids():
            held = dict(grid.context(node).state)
            assert bool(held) == (grid.context(node).node_config["partition-id"] != 1)
    assert not np.array_equal(result.arrays["w1"].numpy(), initial_arrays(folder)["w1"].numpy())


def test_a_bundle_that_is_not_sound_is_an_error_reply(folder: Path, tmp_path: Path) -> None:
    model = initial_arrays(folder)
    with pytest.raises(AssertionError, match=r"BundleError: .*nowhere: expected the folder of a training bundle"):
        trained(ask(make_client_app(tmp_path / "nowhere", samples), model))
    other = bundles.mlp(tmp_path / "other")
    app = make_client_app(other, samples)
    trained(ask(app, model))
    (other / MANIFEST).write_text("{")  # also while the trainer of the sound one is kept
    with pytest.raises(AssertionError, match=r"BundleError: manifest\.json is no valid JSON"):
        trained(ask(app, model))


def test_a_model_of_another_bundle_is_an_error_reply(folder: Path, tmp_path: Path) -> None:
    app = make_client_app(folder, samples)
    with pytest.raises(AssertionError, match=r"LayoutError: the bundle is of another model: missing tensors \['b1'"):
        trained(ask(app, initial_arrays(bundles.linear(tmp_path))))


@pytest.mark.parametrize(
    ("config", "reason"),
    [({"lr": "fast"}, "lr: expected a number"), ({"local-epochs": 1.5}, "local-epochs: expected a whole number"),
     ({"batch-size": True}, "batch-size: expected a whole number"), ({"single": "drop"}, "single: expected one of"),
     ({"local-epochs": 0}, "epochs: expected a whole number of at least 1")],
)  # fmt: skip
def test_settings_out_of_range(config: dict[str, Any], reason: str, folder: Path) -> None:
    with pytest.raises(AssertionError, match=f"ConfigError: {reason}"):
        trained(ask(make_client_app(folder, samples), initial_arrays(folder), config=config))


def test_mods_see_the_update_before_and_after_it_is_compressed(folder: Path) -> None:
    seen: list[tuple[str, bool]] = []

    def look(name: str) -> Any:
        def mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
            reply = call_next(message, context)
            seen.append((name, "w1" in next(iter(reply.content.array_records.values()), {})))
            return reply

        return mod

    app = make_client_app(folder, samples, mods=[look("inner")], outer_mods=[look("outer")])
    strategy = Compressed(FedAvg(fraction_evaluate=0.0), uplink="uniform(8)")
    with InProcessGrid(app, 2) as grid:
        strategy.start(grid, initial_arrays(folder), num_rounds=1)
    assert seen == [("inner", True), ("outer", False)] * 2
