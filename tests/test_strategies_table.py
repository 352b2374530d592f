"""Every strategy that Flower exports, wrapped in Compressed and not: the runs that docs/strategies.md is made from."""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import flwr.serverapp.strategy as flower
import numpy as np
import pytest
from flower_app import Model, run, start_model
from flwr.app import Array, ArrayRecord, Context, Message
from flwr.clientapp.mod import adaptiveclipping_mod, fixedclipping_mod
from flwr.clientapp.typing import Mod
from flwr.serverapp.strategy import FedAvg, Strategy
from marked import check_section

from fedcomp import ConfigError
from fedcomp_clients import CompressMod, MemoryStore
from fedcomp_strategies import Compressed
from fedcomp_strategies.averaging import averages

CLIENTS = 7  # as many as Bulyan needs for one that is malicious
QUIET: dict[str, Any] = {"fraction_evaluate": 0.0}
BUDGET = "500 B"
LOSSY: dict[str, tuple[str, dict[str, Any]]] = {
    "topk + EF": ("topk(0.1, values=uniform(8))", {"feedback": "ef"}),
    "eden": ("eden(1)", {}),
    "auto": ("auto", {"budget": BUDGET}),
}
FEEDBACK = {
    "ef": "topk(0.1)",
    "cafe": "topk(0.1)",
    "dgc": "topk(0.1)",
    "ef21": "topk(0.1)",
    "fetchsgd": "sketch(ratio=4)",
}


@dataclass(frozen=True)
class Case:
    """How a strategy is run.

    Attributes:
        make: the strategy, of a given privacy noise where it has such.
        mods: the client's mods that belong to it.
        tolerance: of the comparison with the unwrapped strategy.
        trees: whether it is about trees instead of tensors.
        counters: whether the model may have integer tensors.
        remark: for the table.
    """

    make: Callable[[float], Strategy]
    mods: tuple[Mod, ...] = ()
    tolerance: float = 1e-6
    trees: bool = False
    counters: bool = True
    remark: str = ""


def simple(kind: type[FedAvg], remark: str = "", **options: Any) -> Case:
    adaptive = kind in (flower.FedAdagrad, flower.FedAdam, flower.FedYogi)  # divide by how little weights have moved
    return Case(lambda _: kind(**QUIET, **options), tolerance=1e-5 if adaptive else 1e-6, remark=remark)


def private(name: str, *mods: Mod, remark: str = "") -> Case:
    """A privacy wrapper around FedAvg, whose clipping norm is reached by every update."""
    kind = getattr(flower, name)
    norm = {"initial_clipping_norm": 0.5} if "Adaptive" in name else {"clipping_norm": 0.5}
    return Case(
        lambda noise: kind(strategy=FedAvg(**QUIET), noise_multiplier=noise, num_sampled_clients=CLIENTS, **norm),
        mods,
        remark=remark,
    )


CLIPPED = "a reply that is refused ends the round without a step"
AGAIN = f"updates that the codec makes longer are clipped again; {CLIPPED}"
PICKS = "may ignore an update that its client believes used, under `ef` or `dgc`"
TREES = "trees travel as they are; nothing to compress"

CASES: dict[str, Case] = {
    "FedAvg": simple(flower.FedAvg),
    "FedAvgM": simple(flower.FedAvgM, "momentum twice under `cafe`", server_momentum=0.9, server_learning_rate=0.3),
    "FedProx": simple(flower.FedProx, proximal_mu=0.1),
    "FedAdam": simple(flower.FedAdam, "unbiased codecs without feedback do better"),
    "FedYogi": simple(flower.FedYogi, "unbiased codecs without feedback do better"),
    "FedAdagrad": simple(flower.FedAdagrad, "unbiased codecs without feedback do better"),
    "FedMedian": simple(flower.FedMedian, "clients are not weighted"),
    "FedTrimmedAvg": simple(flower.FedTrimmedAvg, "clients are not weighted"),
    "QFedAvg": Case(
        lambda _: flower.QFedAvg(client_learning_rate=0.1, train_loss_key="loss", **QUIET),
        counters=False,
        remark="divides by the squared lengths of updates, which unbiased codecs raise; Flower's own fails on integers",
    ),
    "Krum": simple(flower.Krum, PICKS, num_malicious_nodes=1),
    "MultiKrum": simple(flower.MultiKrum, PICKS, num_malicious_nodes=1, num_nodes_to_select=3),
    "Bulyan": simple(flower.Bulyan, PICKS, num_malicious_nodes=1),
    "DifferentialPrivacyServerSideFixedClipping": private("DifferentialPrivacyServerSideFixedClipping", remark=CLIPPED),
    "DifferentialPrivacyServerSideAdaptiveClipping": private(
        "DifferentialPrivacyServerSideAdaptiveClipping", remark=CLIPPED
    ),
    "DifferentialPrivacyClientSideFixedClipping": private(
        "DifferentialPrivacyClientSideFixedClipping", fixedclipping_mod, remark=AGAIN
    ),
    "DifferentialPrivacyClientSideAdaptiveClipping": private(
        "DifferentialPrivacyClientSideAdaptiveClipping", adaptiveclipping_mod, remark=AGAIN
    ),
    "FedXgbBagging": Case(lambda _: flower.FedXgbBagging(**QUIET), trees=True, remark=TREES),
    "FedXgbCyclic": Case(lambda _: flower.FedXgbCyclic(**QUIET), trees=True, remark=TREES),
}
TENSORS = [name for name, case in CASES.items() if not case.trees]


@pytest.fixture(autouse=True)
def _no_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower collects garbage after each reply to some strategies, which takes long in a process with torch."""
    monkeypatch.setattr("gc.collect", lambda *_: 0)


def plant(reply: Message, context: Context, round_: int) -> None:
    """Replace the model in a reply by one tree, as clients of the XGBoost strategies send it."""
    tree = {"id": 0, "node": int(context.node_config["partition-id"]), "round": round_}
    parameters = {"num_parallel_tree": "1", "num_trees": "1"}
    model = {"gbtree_model_param": parameters, "trees": [tree], "iteration_indptr": [0, 1], "tree_info": [0]}
    text = json.dumps({"learner": {"gradient_booster": {"model": model}}})
    reply.content["arrays"] = ArrayRecord({"0": Array(np.frombuffer(text.encode(), np.uint8).copy())})


@cache
def trained(name: str, uplink: str = "", **options: Any) -> tuple[Model, Any]:
    """The model after three rounds, and the strategy; without an uplink, of Flower alone."""
    random.seed(0)  # FedXgbCyclic asks nodes in an order that it draws
    case = CASES[name]
    strategy = case.make(0.0)
    mods = list(case.mods)
    if uplink:
        strategy = Compressed(strategy, uplink, **options)
        mods = [CompressMod(MemoryStore()), *mods]
    fault = plant if case.trees else None
    return run(strategy, mods, model=start_of(case), fault=fault, clients=CLIENTS), strategy


def start_of(case: Case) -> Model:
    """The model that training starts with."""
    if case.trees:
        return {"0": np.zeros(0, np.uint8)}
    return {name: values for name, values in start_model().items() if case.counters or values.dtype.kind == "f"}


def distance(name: str) -> float:
    """The largest difference between the models of the wrapped and the unwrapped strategy, of their larger values."""
    plain, wrapped = trained(name)[0], trained(name, "float32")[0]
    assert plain.keys() == wrapped.keys()
    for key, values in plain.items():
        assert (values.dtype, values.shape) == (wrapped[key].dtype, wrapped[key].shape), key
    return max(float(np.max(np.abs(v - wrapped[key]) / np.maximum(np.abs(v), 1))) for key, v in plain.items())


def test_there_is_a_case_for_every_strategy_of_flower() -> None:
    assert set(CASES) == set(flower.__all__) - {"Strategy", "Result"}


@pytest.mark.parametrize("name", TENSORS)
def test_without_loss_the_model_is_that_of_the_unwrapped_strategy(name: str) -> None:
    start, (plain, _) = start_model(), trained(name)
    assert float(np.abs(plain["fc.weight"] - start["fc.weight"]).max()) > 1e-3  # there is something to compare
    assert distance(name) < CASES[name].tolerance
    _, strategy = trained(name, "float32")
    assert [t.failures for t in strategy.traffic] == [0, 0, 0]


def trains(name: str, codec: str) -> bool:
    """Whether the strategy learns with a lossy codec.

    The clients' steps have a mean, which must be found in the model; no reply is dropped; bytes are saved.
    """
    uplink, options = LOSSY[codec]
    model, strategy = trained(name, uplink, **options)
    start = start_model()["fc.weight"]
    moved, wanted = (model["fc.weight"] - start).ravel(), (trained(name)[0]["fc.weight"] - start).ravel()
    whole = sum(values.nbytes for values in start_model().values())
    return (
        all(np.isfinite(values).all() for values in model.values())
        and all(t.failures == 0 and t.bytes_up < t.uploads * whole / 3 for t in strategy.traffic)
        and moved @ wanted > 0.1 * float(np.linalg.norm(moved) * np.linalg.norm(wanted))
    )


@pytest.mark.parametrize("codec", LOSSY)
@pytest.mark.parametrize("name", TENSORS)
def test_with_loss_it_trains(name: str, codec: str) -> None:
    assert trains(name, codec)


@pytest.mark.parametrize("name", [name for name in TENSORS if name.startswith("Differential")])
def test_privacy_wrappers_go_on_adding_their_noise(name: str) -> None:
    case = CASES[name]
    quiet, _ = trained(name, "float32")
    noisy = run(Compressed(case.make(0.1), "float32"), [CompressMod(MemoryStore()), *case.mods], clients=CLIENTS)
    scale = 0.1 * 0.5 / CLIENTS * np.sqrt(3)  # three rounds of noise
    assert 0.5 * scale < np.std(noisy["fc.weight"] - quiet["fc.weight"]) < 2 * scale


def passes_through(name: str) -> bool:
    """Whether the strategy's trees are those of the unwrapped one."""
    plain, (wrapped, strategy) = trained(name)[0], trained(name, "int8")
    same = plain["0"].size > 50 and plain["0"].tobytes() == wrapped["0"].tobytes()
    return same and all(t.failures == 0 for t in strategy.traffic)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.trees])
def test_trees_pass_through(name: str) -> None:
    assert passes_through(name)


def refuses(name: str, feedback: str) -> bool:
    """Whether the strategy cannot have a kind of feedback, because that needs the mean of all updates."""
    uplink = FEEDBACK[feedback]
    Compressed(FedAvg(**QUIET), uplink, feedback=feedback)  # what is refused below is refused because of the strategy
    try:
        Compressed(CASES[name].make(0.0), uplink, feedback=feedback)
    except ConfigError as error:
        return "mean of all updates" in str(error)
    return False


def row(name: str) -> str:
    """A line of the table."""
    case = CASES[name]
    if case.trees:
        verdict = "passes through" if passes_through(name) else "fails"
        return f"| `{name}` | {verdict} | its trees | the same | | {case.remark} |\n"
    same = distance(name) < case.tolerance
    verdict = "works" if same and all(trains(name, codec) for codec in LOSSY) else "fails"
    sees = "one mean" if averages(case.make(0.0)) else "every model"
    told = f"the same to {case.tolerance:.0e}".replace("e-0", "e-") if same else "another"
    banned = ", ".join(f"`{feedback}`" for feedback in FEEDBACK if refuses(name, feedback)) or "none"
    return f"| `{name}` | {verdict} | {sees} | {told} | {banned} | {case.remark} |\n"


def test_the_table_in_the_documentation_is_what_these_runs_give() -> None:
    head = (
        "| strategy | in `Compressed` | is given | model with `float32` | feedback refused | remarks |\n"
        "|---|---|---|---|---|---|\n"
    )
    check_section("strategies.md", "serverapp", head + "".join(row(name) for name in CASES))
