"""Whole runs: the same results everywhere, and what happens when clients fail."""

import multiprocessing
import os
import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message

from fedcomp.errors import ConfigError, FedcompError
from fedcomp_clients import CompressMod, MemoryStore
from fedcomp_simulations import apps, models, runner
from fedcomp_simulations.apps import RoundOutcome, client_app, make_strategy, run_strategy, server_app
from fedcomp_simulations.experiment import Experiment, Method
from fedcomp_simulations.grid import InProcessGrid, run_in_process
from fedcomp_simulations.ledger import Ledger
from fedcomp_simulations.runner import Progress, run_one
from fedcomp_simulations.sweep import run_experiment

FLOAT32 = Method("float32", "float32")
SIGN = Method("sign + EF", "sign", "ef")
TINY = Experiment(
    name="tiny",
    dataset="mnist",
    model="mlp",
    methods=(FLOAT32, SIGN),
    seeds=(0, 1),
    clients=20,
    clients_per_round=4,
    rounds=3,
)


Next = Callable[[Message, Context], Message]


pytestmark = pytest.mark.usefixtures("one_thread")


def silent(progress: Progress) -> None:
    pass


def passing(message: Message, context: Context, call_next: Next) -> Message:
    return call_next(message, context)


def final_model(experiment: Experiment, method: Method, seed: int = 0) -> dict[str, np.ndarray]:
    outcomes: list[RoundOutcome] = []
    run_in_process(
        server_app(experiment, method, seed, outcomes.append),
        client_app(experiment, seed, CompressMod(store=MemoryStore())),
        experiment.clients,
    )
    return unpack(outcomes[-1].arrays)


def unpack(arrays: ArrayRecord) -> dict[str, np.ndarray]:
    return {key: array.numpy() for key, array in arrays.items()}


def test_results_do_not_depend_on_the_number_of_workers() -> None:
    seen: list[Progress] = []
    environment = dict(os.environ)
    alone = run_experiment(TINY, workers=1)
    spread = run_experiment(TINY, workers=2, on_progress=seen.append)
    assert os.environ == environment
    assert [replace(run, seconds=0) for run in alone.runs] == [replace(run, seconds=0) for run in spread.runs]
    assert [(run.method.name, run.seed) for run in alone.runs] == [
        ("float32", 0),
        ("float32", 1),
        ("sign + EF", 0),
        ("sign + EF", 1),
    ]
    assert sorted((p.method.name, p.seed, p.round) for p in seen) == sorted(
        (method.name, seed, number) for method in TINY.methods for seed in TINY.seeds for number in (1, 2, 3)
    )
    by_run = {(p.method.name, p.seed): p for p in seen if p.round == 3}
    assert all(by_run[run.method.name, run.seed].bytes_up == run.payload_bytes_up for run in alone.runs)


def test_float32_through_compressed_is_plain_fedavg() -> None:
    with InProcessGrid(client_app(TINY, 0, passing), TINY.clients) as grid:
        plain = unpack(run_strategy(make_strategy(TINY), TINY, 0, grid))
    compressed = final_model(TINY, FLOAT32)
    assert plain.keys() == compressed.keys()
    for key, values in plain.items():
        np.testing.assert_allclose(compressed[key], values, rtol=0, atol=1e-6)


def test_training_learns() -> None:
    result = run_one(replace(TINY, rounds=15), FLOAT32, 0, silent)
    assert result.accuracy_curve[-1][2] > 0.6
    assert result.accuracy_final == pytest.approx(np.mean([point[2] for point in result.accuracy_curve[5:]]))
    assert result.payload_bytes_up == result.accuracy_curve[-1][1]
    assert result.uploads == 15 * 4
    assert 203_560 < result.payload_per_upload < 203_800
    assert result.payload_bytes_down > 60 * 203_560
    assert result.warnings == ()


def test_all_methods_of_a_seed_see_the_same_clients() -> None:
    cohorts: dict[str, list[int]] = {}
    for method in (FLOAT32, SIGN):
        seen = cohorts.setdefault(method.name, [])

        def note(message: Message, context: Context, call_next: Next, seen: list[int] = seen) -> Message:
            seen.append(int(context.node_config["partition-id"]))
            return call_next(message, context)

        server = server_app(TINY, method, 0, lambda outcome: None)
        run_in_process(server, client_app(TINY, 0, note), TINY.clients)
    assert cohorts["float32"] == cohorts["sign + EF"]
    assert len(cohorts["float32"]) == 12


def test_the_global_generator_and_threads_are_put_back() -> None:
    random.seed(5)
    torch.set_num_threads(2)
    before = random.getstate()
    run_one(replace(TINY, rounds=1), FLOAT32, 0, silent)
    assert random.getstate() == before
    assert torch.get_num_threads() == 2


def fail_one(message: Message, context: Context, call_next: Next) -> Message:
    if context.node_config["partition-id"] == 3:
        raise OSError("sensor unplugged")
    return call_next(message, context)


def test_a_failing_client_is_counted_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    mod = CompressMod(store=MemoryStore())

    def either(message: Message, context: Context, call_next: Next) -> Message:
        return mod(message, context, lambda m, c: fail_one(m, c, call_next))

    monkeypatch.setattr(runner, "CompressMod", lambda *args: either)
    everyone = replace(TINY, clients_per_round=20, rounds=2)
    result = run_one(everyone, SIGN, 0, silent)
    assert (result.uploads, result.failures) == (38, 2)
    assert any("sensor unplugged" in warning for warning in result.warnings)


def test_a_round_without_any_usable_reply_keeps_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(message: Message, context: Context, call_next: Next) -> Message:
        raise OSError("all down")

    monkeypatch.setattr(runner, "CompressMod", lambda *args: fail)
    result = run_one(replace(TINY, rounds=2), FLOAT32, 0, silent)
    assert (result.uploads, result.failures, result.payload_bytes_up) == (0, 8, 0)
    assert result.payload_per_upload == 0
    assert result.accuracy_curve[0][2] == result.accuracy_curve[1][2]


@pytest.mark.parametrize("strategy", sorted(apps.STRATEGIES))
def test_every_strategy_runs(strategy: str) -> None:
    result = run_one(replace(TINY, strategy=strategy, rounds=2), Method("int8", "int8"), 0, silent)
    assert result.failures == 0
    assert len(result.accuracy_curve) == 2


def test_the_cnn_and_iid_run_too() -> None:
    result = run_one(replace(TINY, model="cnn", partition="iid", local_epochs=2, rounds=1), SIGN, 0, silent)
    assert result.failures == 0


def test_the_number_of_nodes_must_fit() -> None:
    with InProcessGrid(client_app(TINY, 0, passing), 21) as grid:
        start = apps.to_record(models.initial_arrays("mlp", 0))
        messages = make_strategy(TINY).configure_train(1, start, ConfigRecord(), grid)
        replies = grid.send_and_receive(messages)
    assert "the experiment has 20 clients, but 21 nodes run it" in str(replies[0].error.reason)


def test_mistakes_inside_workers_reach_the_caller() -> None:
    crowded = replace(TINY, clients=1000)
    with pytest.raises(ConfigError, match="1000 clients with min_samples = 8 need 8000 samples, got 4000"):
        run_experiment(crowded, workers=2)


def test_an_exception_in_the_progress_callback_ends_the_workers() -> None:
    def refuse(progress: Progress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_experiment(replace(TINY, rounds=500), workers=2, on_progress=refuse)


def test_a_dead_worker_is_reported() -> None:
    with pytest.raises(FedcompError, match="a worker process died"):
        run_experiment(replace(TINY, rounds=500), workers=2, on_progress=kill_a_worker)


def kill_a_worker(progress: Progress) -> None:
    for child in multiprocessing.active_children():
        child.kill()


def test_ledger_sums_rounds() -> None:
    empty = Ledger(())
    assert (empty.bytes_up, empty.uploads, empty.bytes_up_until(3)) == (0, 0, 0)
