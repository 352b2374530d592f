"""Ready-made strategies and options from an app's configuration."""

import pickle
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flower_app import client_app, record, run, start_model
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAdagrad, FedAdam, FedAvg, FedAvgM, FedProx, FedYogi, Strategy

from fedcomp import Auto, ConfigError
from fedcomp_clients import CompressMod, MemoryStore
from fedcomp_simulations.grid import run_in_process
from fedcomp_strategies import (
    Compressed,
    CompressedFedAdagrad,
    CompressedFedAdam,
    CompressedFedAvg,
    CompressedFedAvgM,
    CompressedFedProx,
    CompressedFedYogi,
    settings,
)
from fedcomp_strategies.ready import Ready
from fedcomp_strategies.settings import Value

FAMILY: dict[type[Ready], type[FedAvg]] = {
    CompressedFedAvg: FedAvg,
    CompressedFedAvgM: FedAvgM,
    CompressedFedProx: FedProx,
    CompressedFedAdam: FedAdam,
    CompressedFedYogi: FedYogi,
    CompressedFedAdagrad: FedAdagrad,
}
QUIET: dict[str, Any] = {"fraction_evaluate": 0.0}


class Recorder(Grid):
    """Notes the timeouts with which it is asked, and has no nodes."""

    timeouts: list[float | None]

    def __init__(self) -> None:
        self.timeouts = []

    def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> Any:
        self.timeouts.append(timeout)
        return []

    def get_node_ids(self) -> list[int]:
        return []

    set_run = run = create_message = push_messages = pull_messages = None  # type: ignore[assignment]


# --- strategies ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", FAMILY)
def test_each_is_flowers_strategy_with_a_budget(kind: type[Ready]) -> None:
    """The test model is too small for a three hundredth, and the first frames are of another length than later ones."""
    strategy = kind(budget="400 B", shared=False, **QUIET)
    assert type(strategy.strategy) is FAMILY[kind]
    model = run(strategy, [CompressMod(MemoryStore())], rounds=2)
    assert [t.failures for t in strategy.traffic] == [0, 0]
    assert all(0 < t.bytes_up <= t.uploads * 400 for t in strategy.traffic)
    assert not np.array_equal(model["fc.weight"], start_model()["fc.weight"])


@pytest.mark.parametrize("kind", FAMILY)
def test_each_gives_the_result_of_what_it_stands_for(kind: type[Ready]) -> None:
    ready = kind("float32", **QUIET)
    inner = FAMILY[kind](**QUIET, **kind.better)
    model, other = run(ready, [CompressMod(MemoryStore())]), run(Compressed(inner, "float32"), [CompressMod()])
    assert all(np.array_equal(model[name], other[name]) for name in model)


def test_the_default_is_a_three_hundredth_of_float32() -> None:
    plans = CompressedFedAvg(**QUIET)._uplink.plans()
    assert [plan.codec for plan in plans] == [Auto("1/300")]
    model = {"fc.weight": np.random.default_rng(0).standard_normal((200, 300)).astype(np.float32)}
    strategy = CompressedFedAvg(shared=False, **QUIET)
    run(strategy, [CompressMod(MemoryStore())], model=model, rounds=1)
    (traffic,) = strategy.traffic
    assert 0.9 * 800 < traffic.bytes_up / traffic.uploads <= 800


def test_an_uplink_without_auto_gets_no_budget() -> None:
    assert len(CompressedFedAvg("float32 | 3: int8")._uplink.plans()) == 2
    with pytest.raises(ConfigError, match="expected an uplink of auto"):
        CompressedFedAvg("int8", "2 kB")


def test_min_clients_and_fraction_stand_for_all_their_kind() -> None:
    strategy = CompressedFedAvg(min_clients=5, fraction=0.5)
    inner: Any = strategy.strategy
    assert (inner.min_train_nodes, inner.min_evaluate_nodes, inner.min_available_nodes) == (5, 5, 5)
    assert (inner.fraction_train, inner.fraction_evaluate) == (0.5, 0.5)
    inner = CompressedFedAvg(min_clients=5, fraction=0.5, fraction_evaluate=0.25, min_available_nodes=9)
    assert (inner.fraction_train, inner.fraction_evaluate) == (0.5, 0.25)
    assert (inner.min_train_nodes, inner.min_available_nodes) == (5, 9)


def test_options_reach_whom_they_belong_to() -> None:
    strategy = CompressedFedAdam("int8", eta=0.05, weighted_by_key="n", downlink="plain", average=0.5)
    assert strategy.eta == 0.05
    assert strategy.weighted_by_key == "n"
    assert strategy._delivery.downlink is None
    assert CompressedFedAvgM().server_momentum == 0.9
    assert CompressedFedAvgM(server_momentum=0.5).server_momentum == 0.5


@pytest.mark.parametrize(
    ("kind", "option", "said"),
    [
        (CompressedFedAvg, {"eta": 0.1}, r"CompressedFedAvg: eta=0\.1: no such option.*fraction_train"),
        (CompressedFedAdam, {"min_client": 3}, "did you mean min_clients"),
        (CompressedFedAvg, {"upLink": "int8"}, "did you mean uplink"),
        (CompressedFedAvg, {"strategy": 1}, "no such option"),
        (CompressedFedAvg, {"min_clients": 0}, "min_clients: expected a whole number of at least 1, got 0"),
        (CompressedFedAvg, {"fraction": 1.5}, "fraction: expected a number above 0 to 1, got 1.5"),
        (CompressedFedAvg, {"timeout": 0}, "timeout: expected a number above 0"),
        (CompressedFedAvg, {"rounds": "3"}, "rounds: expected a whole number of at least 1, got '3'"),
    ],
)
def test_impossible_options_are_named(kind: type[Ready], option: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        kind(**option)


def test_dead_nodes_are_waited_for_ten_minutes_unless_told_otherwise() -> None:
    arrays = record({"fc.weight": np.zeros((200, 300), np.float32)})
    grid = Recorder()
    quiet: dict[str, Any] = {"fraction_train": 0.0, "fraction_evaluate": 0.0}
    CompressedFedAvg(**quiet).start(grid, arrays)
    assert grid.timeouts == [600.0] * 6
    grid = Recorder()
    CompressedFedAvg(rounds=1, timeout=30, **quiet).start(grid, arrays)
    assert grid.timeouts == [30.0] * 2
    grid = Recorder()
    CompressedFedAvg(rounds=1, **quiet).start(grid, arrays, num_rounds=2, timeout=5)
    assert grid.timeouts == [5] * 4


def test_what_compresses_already_is_not_wrapped_again() -> None:
    with pytest.raises(ConfigError, match="CompressedFedAvg compresses already"):
        Compressed(CompressedFedAvg(), "int8")


def test_they_can_be_pickled() -> None:
    strategy = pickle.loads(pickle.dumps(CompressedFedProx(timeout=5, proximal_mu=0.1)))
    assert (strategy.timeout, strategy.proximal_mu) == (5.0, 0.1)


# --- configuration ---------------------------------------------------------------------------------------------------


def test_the_configuration_describes_a_strategy() -> None:
    config: dict[str, Value] = {
        "num-server-rounds": 7,
        "fraction-train": 0.5,
        "lr": 0.1,
        "fedcomp-uplink": "auto",
        "fedcomp-budget": 2000,
        "fedcomp-min-clients": 4,
        "fedcomp-timeout": 60,
        "fedcomp-eta": 0.2,
        "fedcomp-mixed-fleet": False,
        "fedcomp-norm-cap": "none",
        "fedcomp-feedback": "",
    }
    strategy = CompressedFedAdam.from_config(config, fraction_train=0.1, weighted_by_key="n")
    assert (strategy.rounds, strategy.timeout, strategy.weighted_by_key) == (7, 60.0, "n")
    assert (strategy.eta, strategy.fraction_train, strategy.min_train_nodes) == (0.2, 0.5, 4)
    assert strategy._uplink.plans()[0].codec == Auto("2000 B")
    assert strategy._delivery._mixed is False
    assert strategy._wanted_cap is None


def test_every_simple_option_of_compressed_has_a_key() -> None:
    config: dict[str, Value] = {
        "fedcomp-min-replies": 3, "fedcomp-evaluation": "piggyback", "fedcomp-budgets": "link=lte: 2 kB"
    }  # fmt: skip
    strategy = CompressedFedAvg.from_config(config)
    assert strategy.min_replies == 3
    assert strategy._evaluations is not None
    with pytest.raises(ConfigError, match="link"):
        CompressedFedAvg.from_config({"fedcomp-budgets": "link: much"})


def test_settings_are_the_arguments_of_compressed() -> None:
    assert settings({}) == {"uplink": "auto", "budget": "1/300"}
    assert settings({"fedcomp-budget": "2 kB", "lr": 1}) == {"uplink": "auto", "budget": "2 kB"}
    assert settings({"fedcomp-average": 0}, uplink="int8") == {"uplink": "int8", "average": 0}
    assert settings({"fedcomp-uplink": "sign"}, budget="2 kB", seed=3) == {"uplink": "sign", "seed": 3}
    assert isinstance(Compressed(FedAvg(), **settings({"fedcomp-seed": 5})), Strategy)


def test_the_configuration_in_the_documentation_works() -> None:
    page = (Path(__file__).parent.parent / "docs" / "flower.md").read_text()
    config = tomllib.loads(page.split("```toml")[1].split("```")[0])["tool"]["flwr"]["app"]["config"]
    strategy = CompressedFedAvg.from_config(config)
    assert (strategy.rounds, strategy.fraction_train, strategy.min_available_nodes) == (60, 0.1, 10)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("fedcomp-buget", "2 kB", "fedcomp-buget = '2 kB': no such option; did you mean fedcomp-budget"),
        ("fedcomp.uplink", "int8", "did you mean fedcomp-uplink"),
        ("fedcomp-strategy", "x", "no such option"),
        ("fedcomp-monitor", "x", "no such option"),
        ("fedcomp-shared", "yes", "fedcomp-shared: expected true or false, got 'yes'"),
        ("fedcomp-shared", 1, "fedcomp-shared: expected true or false, got 1"),
        ("fedcomp-seed", 1.5, r"fedcomp-seed: expected a whole number, got 1\.5"),
        ("fedcomp-seed", True, "fedcomp-seed: expected a whole number, got True"),
        ("fedcomp-average", "much", "fedcomp-average: expected a number, got 'much'"),
        ("fedcomp-uplink", 8, "fedcomp-uplink: expected a text, got 8"),
        ("fedcomp-budget", True, "fedcomp-budget: expected a number or a text, got True"),
        ("fedcomp-feedback", "eff", "feedback"),
    ],
)
def test_mistakes_in_the_configuration_are_named(key: str, value: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Compressed(FedAvg(), **settings({key: value}))
    with pytest.raises(ConfigError, match=said):
        CompressedFedAvg.from_config({key: value})


@pytest.mark.parametrize(("key", "said"), [("num-server-rounds", "a whole number"), ("fraction-train", "a number")])
def test_mistakes_in_the_usual_keys_are_named(key: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"{key}: expected {said}, got 'all'"):
        CompressedFedAvg.from_config({key: "all"})


def test_options_of_flowers_strategies_are_not_those_of_compressed() -> None:
    with pytest.raises(ConfigError, match="fedcomp-eta"):
        settings({"fedcomp-eta": 0.1})


def test_an_app_is_configured_from_its_file() -> None:
    """As a Flower app does it, in the in-process grid."""
    found: list[Ready] = []
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        found.append(CompressedFedAvg.from_config(context.run_config))
        found[0].start(grid, record(start_model()))

    config: dict[str, Value] = {
        "num-server-rounds": 2, "fraction-evaluate": 0.0, "fedcomp-uplink": "int8"
    }  # fmt: skip
    run_in_process(app, client_app([CompressMod(MemoryStore())]), 3, config)
    assert [t.uploads for t in found[0].traffic] == [3, 3]
    assert all(t.bytes_up < 3 * 1000 for t in found[0].traffic)
