"""The server's side of bytes: what auto becomes for a model, the announced step, and the mean length through Flower."""

import logging
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from flower_app import CLIENTS, Model, OrderedGrid, client_app, frame_of, record, run, start_model
from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp.typing import Mod
from flwr.serverapp.strategy import FedAdam, FedAvg, FedAvgM, FedMedian, Strategy

import fedcomp
from fedcomp import Auto, BudgetError, CAFe, ConfigError, ErrorFeedback, Feedback, Layout, NoFeedback, Plan, Tensor
from fedcomp.budget import budget_of
from fedcomp.request import KEY, PLACE, Request
from fedcomp_clients import CompressMod, MemoryModelCache, MemoryStore
from fedcomp_strategies import Compressed
from fedcomp_strategies.rates import Rates, choose

ALONE: dict[str, Any] = {
    "fraction_evaluate": 0.0, "min_evaluate_nodes": 0, "min_train_nodes": 1, "min_available_nodes": 1
}  # fmt: skip
MLP = Layout((Tensor("hidden.weight", (64, 784)), Tensor("hidden.bias", (64,)), Tensor("output.weight", (10, 64))))
CNN = Layout((Tensor("conv1.weight", (8, 1, 5, 5)), *MLP.tensors))
MOTION = Layout((Tensor("conv.weight", (24, 6, 7)), Tensor("fc.weight", (7, 64))))
GRU = Layout((Tensor("embedding.weight", (77, 16)), Tensor("gru.weight_hh_l0", (288, 96))))


def mod() -> CompressMod:
    return CompressMod(MemoryStore(), models=MemoryModelCache())


def fedavg(uplink: Any = "auto", **options: Any) -> Compressed:
    return Compressed(FedAvg(**ALONE), uplink, **options)


def model() -> Model:
    """No normalisation layer: only what auto codes."""
    return {name: values for name, values in start_model().items() if name.startswith("fc")}


# --- what auto becomes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "strategy", "wanted", "bits", "unbiased", "feedback", "cap"),
    [
        (MLP, FedAvg(), None, 0.1, False, CAFe(0.95), None),
        (MLP, FedAvgM(), None, 0.1, False, CAFe(0.95), None),
        (MLP, FedAvg(), NoFeedback(), 0.1, True, NoFeedback(), 2.0),
        (MLP, FedAvg(), NoFeedback(), 2.0, True, NoFeedback(), None),
        (MLP, FedAvg(), ErrorFeedback(), 0.1, False, ErrorFeedback(), None),
        (MLP, FedAdam(), None, 0.1, True, NoFeedback(), 2.0),
        (MLP, FedMedian(), None, 0.1, False, ErrorFeedback(), None),
        (MLP, FedMedian(), NoFeedback(), 0.1, True, NoFeedback(), None),
        (CNN, FedAvg(), None, 0.1, True, NoFeedback(), 2.0),
        (MOTION, FedAvg(), None, 0.01, True, NoFeedback(), 2.0),
        (GRU, FedAvg(), None, 0.1, True, NoFeedback(), 1.0),
        (GRU, FedAvg(), None, 0.03, True, NoFeedback(), 0.7),
        (GRU, FedAvg(), CAFe(), 0.1, False, CAFe(), None),
    ],
)
def test_what_suits_a_model(
    layout: Layout,
    strategy: Strategy,
    wanted: Feedback | None,
    bits: float,
    unbiased: bool,
    feedback: Feedback,
    cap: float | None,
) -> None:
    choice = choose(layout, bits, 10, strategy, wanted)
    assert (choice.unbiased, choice.feedback, choice.norm_cap) == (unbiased, feedback, cap)
    assert choice.reason


def test_a_downlink_that_carries_no_predictor_needs_unbiased_coding() -> None:
    assert choose(MLP, 0.1, 10, FedAvg(), None, predictors=False).unbiased
    assert "3 clients" in choose(CNN, 0.1, 3, FedAvg(), None).reason


def test_the_log_says_what_was_chosen_and_why(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "fedcomp")
    run(fedavg(budget="300 B"), [mod()], rounds=1, model=model())
    (said,) = [r.getMessage() for r in caplog.records if r.getMessage().startswith("auto:")]
    assert "biased coding in 3.81 bits" in said
    assert "feedback cafe(beta=0.95)" in said
    assert "suits perceptrons" in said
    assert not [r for r in caplog.records if "are below" in r.getMessage()]


def test_budgets_that_no_setting_makes_up_for_are_named(caplog: pytest.LogCaptureFixture) -> None:
    big = {"fc.weight": np.zeros((200, 200), np.float32)}
    run(fedavg(budget="60 B"), [mod()], rounds=1, model=big)
    (said,) = [r.getMessage() for r in caplog.records if "are below" in r.getMessage()]
    assert "auto: 0.012 bits per parameter are below 0.02" in said


def test_settings_of_the_user_stand() -> None:
    strategy = fedavg(budget="300 B", feedback="none", norm_cap=None)
    run(strategy, [mod()], rounds=1, model=model())
    assert strategy._norm_cap is None
    request = strategy._request
    assert request.plan.codec == Auto("300 B", unbiased=True)
    assert not request.norm
    explicit = fedavg("auto('300 B', unbiased=True)")
    run(explicit, [mod()], rounds=1, model=model())
    assert explicit._feedback.feedback == NoFeedback()
    assert explicit._norm_cap is None


def test_auto_within_a_schedule_is_chosen_too() -> None:
    strategy, sizes = fedavg("float32 | 3: auto", budget="250 B"), Sizes()
    run(strategy, [sizes, mod()], rounds=5)
    assert min(sizes.of([1, 2])) > 2400
    assert max(sizes.of([3])) <= 250
    assert {str(request.feedback) for request in sizes.requests} == {"cafe(beta=0.95)"}


def test_mistakes_end_before_the_run() -> None:
    with pytest.raises(ConfigError, match="needs the budget of an upload"):
        fedavg()
    with pytest.raises(ConfigError, match="needs the budget of an upload"):
        fedavg("float32 | 3: auto")
    with pytest.raises(ConfigError, match="expected an uplink of auto"):
        fedavg("sign", budget="2 kB")
    with pytest.raises(ConfigError, match="cannot be read"):
        fedavg(budget="much")
    with pytest.raises(ConfigError, match="shared: expected True or False"):
        fedavg(budget="2 kB", shared=1)
    with pytest.raises(ConfigError, match="not contractive"):
        fedavg("auto('2 kB', unbiased=True)", feedback="ef")


@pytest.mark.parametrize("feedback", ["auto", "none", "ef"])
@pytest.mark.parametrize("shared", [True, False])
def test_a_budget_that_is_too_small_ends_the_first_round_and_names_the_smallest(feedback: str, shared: bool) -> None:
    with pytest.raises(BudgetError, match="'20 B' is 20 bytes for this model, whose smallest upload takes") as refusal:
        run(fedavg(budget="20 B", feedback=feedback, shared=shared), [mod()], rounds=1)
    smallest = int(str(refusal.value).split("takes ")[1].split()[0])
    strategy = fedavg(budget=f"{smallest} B", feedback=feedback, shared=False)
    run(strategy, [mod()], rounds=2)
    assert [t.failures for t in strategy.traffic] == [0, 0]
    assert all(t.bytes_up <= CLIENTS * smallest for t in strategy.traffic)


# --- bytes -----------------------------------------------------------------------------------------------------------


class Sizes:
    """A mod that notes the lengths of uploads by round and partition, and the requests."""

    def __init__(self) -> None:
        self.found: dict[tuple[int, int], int] = {}
        self.places: dict[int, list[float]] = {}
        self.requests: list[Request] = []

    def __call__(self, message: Message, context: Context, call_next: Any) -> Message:
        config = next(iter(message.content.config_records.values()))
        self.requests.append(Request.from_text(str(config[KEY])))
        if PLACE in config:
            self.places.setdefault(self.requests[-1].round, []).append(float(config[PLACE]))  # type: ignore[arg-type]
        reply: Message = call_next(message, context)
        self.found[self.requests[-1].round, int(context.node_config["partition-id"])] = len(frame_of(reply) or b"")
        return reply

    def of(self, rounds: Iterable[int]) -> list[int]:
        return [size for (round_, _), size in self.found.items() if round_ in rounds]


@pytest.mark.parametrize("feedback", ["auto", "none", "ef"])
def test_without_sharing_no_upload_is_longer_than_the_budget(feedback: str) -> None:
    sizes = Sizes()
    run(fedavg(budget="250 B", feedback=feedback, shared=False), [sizes, mod()], rounds=4)
    assert max(sizes.of(range(9))) <= 250
    assert np.mean(sizes.of(range(9))) > 230
    assert all(request.plan.codec.step == 0 for request in sizes.requests if isinstance(request.plan.codec, Auto))


@pytest.mark.parametrize("feedback", ["auto", "none", "ef"])
def test_the_mean_length_is_the_budget_and_heavy_clients_send_more(feedback: str) -> None:
    sizes = Sizes()
    run(fedavg(budget="250 B", feedback=feedback), [sizes, mod()], rounds=20, fault=heavier)
    late = range(6, 21)
    assert np.mean(sizes.of(late)) == pytest.approx(245, rel=0.06)
    assert max(sizes.of(late)) <= 1000
    means = [np.mean([size for (r, p), size in sizes.found.items() if r in late and p // 2 == q]) for q in range(3)]
    assert means == sorted(means)
    assert means[-1] > 1.5 * means[0]
    weights = {request.weight for request in sizes.requests}
    assert weights == {"num-examples"}


def heavier(reply: Message, context: Context, round_: int) -> None:
    partition = int(context.node_config["partition-id"])
    metrics = next(iter(reply.content.metric_records.values()))
    metrics["num-examples"] = 10 * 2 ** (partition // 2)


def test_all_budgets_of_a_schedule_are_looked_at_in_the_first_round() -> None:
    with pytest.raises(BudgetError, match="'20 B' is 20 bytes"):
        run(fedavg(budget="500 B | 3: 20 B"), [mod()], rounds=1)


def test_what_optimisers_widen_does_not_count_twice() -> None:
    """FedAdam hands out float64 from round 2 on; clients go on sending float32."""
    big = {"fc.weight": np.zeros((60, 60), np.float32), "bn.weight": np.ones(400, np.float32)}
    strategy = Compressed(FedAdam(**ALONE), "auto", budget="2000 B")
    run(strategy, [mod()], rounds=3, model=big)
    assert [t.failures for t in strategy.traffic] == [0, 0, 0]


def test_auto_has_no_place_in_rules_downlink_or_predictor() -> None:
    with pytest.raises(ConfigError, match="rules cannot use auto"):
        fedavg(Plan(fedcomp.Uniform(8), (fedcomp.Rule("*", Auto("1 kB")),)))
    with pytest.raises(ConfigError, match="downlink: budgets are for uploads"):
        fedavg("sign", downlink="auto('1 kB')")
    with pytest.raises(ConfigError, match="'cafe': budgets are for uploads"):
        fedavg("sign", feedback="cafe(codec=auto('1 kB'))")


def test_models_that_frames_cannot_be_about_travel_plainly(caplog: pytest.LogCaptureFixture) -> None:
    odd = {**model(), "phase": np.zeros(3, np.complex64)}
    strategy = fedavg(budget="300 B")
    run(strategy, [mod()], rounds=2, model=odd)
    assert "models are sent and received uncompressed" in caplog.text
    assert [t.failures for t in strategy.traffic] == [0, 0]


def test_rounding_at_random_is_shared_out_too() -> None:
    sizes = Sizes()
    big = {"fc.weight": np.zeros((80, 80), np.float32)}
    run(fedavg(budget="1500 B", feedback="none"), [sizes, mod()], rounds=12, fault=heavier, model=big)
    assert np.mean(sizes.of(range(6, 13))) == pytest.approx(1470, rel=0.08)
    assert all(request.plan.codec.step for request in sizes.requests[CLIENTS:] if isinstance(request.plan.codec, Auto))


def test_budgets_over_the_rounds() -> None:
    sizes = Sizes()
    run(fedavg(budget="200 B | 10: 600 B"), [sizes, mod()], rounds=24)
    assert np.mean(sizes.of(range(4, 10))) == pytest.approx(196, rel=0.1)
    assert np.mean(sizes.of(range(14, 25))) == pytest.approx(588, rel=0.1)


def test_replies_that_were_dropped_do_not_count() -> None:
    def break_one(reply: Message, context: Context, round_: int) -> None:
        heavier(reply, context, round_)
        if int(context.node_config["partition-id"]) == 5:
            raise RuntimeError("out of memory")

    sizes = Sizes()
    strategy = fedavg(budget="250 B")
    run(strategy, [sizes, mod()], rounds=12, fault=break_one)
    assert all(t.failures == 1 for t in strategy.traffic)
    assert np.mean(sizes.of(range(5, 13))) == pytest.approx(245, rel=0.08)


def test_clients_are_told_their_places_where_rounding_is_random() -> None:
    sizes = Sizes()
    run(fedavg(budget="600 B", feedback="none"), [sizes, mod()], rounds=2)
    assert sorted(sizes.places[1]) == [i / CLIENTS for i in range(CLIENTS)]
    biased = Sizes()
    run(fedavg(budget="600 B", feedback="ef"), [biased, mod()], rounds=1)
    assert not biased.places


def test_strategies_that_look_at_each_model_get_uploads_of_one_length() -> None:
    sizes = Sizes()
    run(Compressed(FedMedian(**ALONE), "auto", budget="300 B"), [sizes, mod()], rounds=3)
    assert max(sizes.of(range(9))) <= 300
    assert {str(request.feedback) for request in sizes.requests} == {"ef"}


def test_another_training_begins_with_steps_of_its_own() -> None:
    strategy, sizes = fedavg(budget="250 B"), Sizes()
    first = run(strategy, [sizes, mod()], rounds=3)
    codecs = [request.plan.codec for request in sizes.requests]
    again = Sizes()
    second = run(strategy, [again, mod()], rounds=3)
    assert all(np.array_equal(first[name], second[name]) for name in first)
    assert [request.plan.codec for request in again.requests] == codecs


def test_the_frames_of_auto_are_summed_in_any_order() -> None:
    """Through the grid in its own order, and in that of the nodes."""

    class Reversed(OrderedGrid):
        def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
            return super().send_and_receive(messages, timeout=timeout)[::-1]

    def trained(grid: type[OrderedGrid]) -> Model:
        with grid(client_app([mod()]), CLIENTS) as made:
            result = fedavg(budget="250 B", feedback="none").start(made, record(start_model()), num_rounds=3)
        return {name: array.numpy() for name, array in result.arrays.items()}

    a, b = trained(OrderedGrid), trained(Reversed)
    assert all(np.array_equal(a[name], b[name]) for name in a)


def test_clients_without_the_mod_are_averaged_along() -> None:
    def mods() -> list[Mod]:
        return []

    strategy = fedavg(budget="250 B", feedback="none")
    trained = run(strategy, mods(), rounds=2)
    assert [t.failures for t in strategy.traffic] == [0, 0]
    assert not np.array_equal(trained["fc.weight"], start_model()["fc.weight"])


def test_rates_leave_other_codecs_alone() -> None:
    rates, layout = Rates(shared=True), Layout.of(start_model())
    plan = Plan(fedcomp.Sign())
    assert rates.plan(plan, layout, 0) is plan
    rates.observe(plan, [100], {1: 1.0}, {1: 1.0})
    auto = Plan(Auto("600 B"))
    assert rates.plan(auto, layout, 0) == auto
    rates.observe(auto, [500, 700], {1: 2.0, 2: 0.5}, {1: 1.0, 2: 4.0})
    assert rates.plan(auto, layout, 0) == replace(auto, codec=Auto("600 B", step=2.0))
    rates.restart()
    assert rates.plan(auto, layout, 0) == auto


def test_the_weight_is_that_of_the_metric_or_one() -> None:
    """Requests carry its name; replies without it, or with nonsense, weigh 1."""
    from fedcomp_clients.mod import _weight

    class Reply:
        def __init__(self, **metrics: Any) -> None:
            self.content = RecordDict({"m": MetricRecord(metrics)})

    found = [_weight(Reply(**m), "n") for m in ({"n": 7}, {"n": 0}, {}, {"n": -1}, {"n": float("nan")}, {"n": [1]})]  # type: ignore[arg-type]
    assert found == [7, 0, 1, 1, 1, 1]
    request = Request(Plan(Auto("1 kB")), 1, weight="n")
    assert Request.from_text(request.to_text()) == request
    assert "weight" not in Request(Plan(Auto("1 kB")), 1).to_text()


# --- budgets of nodes ------------------------------------------------------------------------------------------------


def fleet(**options: Any) -> tuple[Compressed, Sizes]:
    """A run with nodes on three kinds of links, one of which has a limit of its own."""
    sizes, strategy = Sizes(), Compressed(FedAvg(**ALONE), "auto", **options)
    links = ["nbiot", "lte", "lte", "dsl", "dsl", "dsl"]
    with OrderedGrid(client_app([sizes, mod()]), CLIENTS) as grid:
        for node, link in zip(grid.get_node_ids(), links, strict=True):
            grid.context(node).node_config["link"] = link
        grid.context(grid.get_node_ids()[2]).node_config["fedcomp-budget"] = "215 B"
        strategy.start(grid, record(start_model()), num_rounds=12)
    return strategy, sizes


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("feedback", ["auto", "none", "ef"])
def test_nodes_keep_to_budgets_of_their_own(feedback: str, shared: bool) -> None:
    budgets = {"link=nbiot": "190 B", "link=lte": "400 B"}
    strategy, sizes = fleet(budget="250 B", budgets=budgets, shared=shared, feedback=feedback)
    assert not any(t.failures for t in strategy.traffic)
    by_node = [[sizes.found[round_, node] for round_ in range(5, 13)] for node in range(CLIENTS)]
    assert 165 < max(by_node[0]) <= 190
    assert 360 < max(by_node[1]) <= 400
    assert 190 < max(by_node[2]) <= 215  # whatever the server allows
    rest = np.array(by_node[3:])
    assert rest.mean() == pytest.approx(250, rel=0.08)  # the others' budget is not changed by them
    assert shared or rest.max() <= 250


def test_own_budgets_leave_the_others_alone_without_compact_replies_too() -> None:
    strategy, sizes = fleet(budget="250 B", compact=False)
    assert not any(t.failures for t in strategy.traffic)
    by_node = [[sizes.found[round_, node] for round_ in range(5, 13)] for node in range(CLIENTS)]
    assert max(by_node[2]) <= 215
    assert np.mean([sizes for node, sizes in enumerate(by_node) if node != 2]) == pytest.approx(250, rel=0.08)


def test_conditions_read_values_as_toml_has_them() -> None:
    properties = {"metered": True, "rate": 20.0, "link": "lte", "cell": 7}
    for condition in ("metered=true", "metered = True", "rate=20", "link=lte", "cell=7", "cell=7.0"):
        assert budget_of({condition: "200 B"}, properties) == "200 B"
    for condition in ("metered=1", "rate=fast", "link=LTE", "cell=8", "other=7"):
        assert budget_of({condition: "200 B"}, properties) == ""


def test_a_nodes_own_budget_under_another_codec_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    with OrderedGrid(client_app([mod()]), CLIENTS) as grid:
        grid.context(grid.get_node_ids()[0]).node_config["fedcomp-budget"] = "100 B"
        Compressed(FedAvg(**ALONE), "int8").start(grid, record(start_model()), num_rounds=3)
    assert caplog.text.count("fedcomp-budget allows 100") == 1


def test_a_training_that_was_refused_leaves_nothing_behind() -> None:
    strategy = fedavg(budget="0.1 bits")
    small = {"w": np.ones((20, 20), np.float32)}
    with pytest.raises(BudgetError, match="is 5 bytes"):
        run(strategy, [mod()], model=small, rounds=1)
    big = {"w": np.random.default_rng(0).standard_normal((300, 300)).astype(np.float32)}
    run(strategy, [mod()], model=big, rounds=1)
    assert strategy.traffic[-1].failures == 0


def test_budgets_of_nodes_are_looked_at_before_training() -> None:
    with pytest.raises(ConfigError, match="expected conditions"):
        Compressed(FedAvg(), "auto", budget="2 kB", budgets={"nbiot": "200 B"})
    for budgets in ({"link=nbiot": "few"}, "link=nbiot: 500 B | 10: 2 kB"):
        with pytest.raises(ConfigError, match="cannot be read"):
            Compressed(FedAvg(), "auto", budget="2 kB", budgets=budgets)
    with pytest.raises(ConfigError, match="keeps to budgets"):
        Compressed(FedAvg(), "int8", budgets={"link=nbiot": "200 B"})
    with pytest.raises(ConfigError, match="compact"):
        Compressed(FedAvg(), "auto", budget="2 kB", budgets={"link=nbiot": "200 B"}, compact=False)
    with pytest.raises(BudgetError, match="give at least"):
        fleet(budget="250 B", budgets={"link=nbiot": "10 B"})


def test_a_nodes_own_budget_that_makes_no_sense_is_named(caplog: pytest.LogCaptureFixture) -> None:
    strategy = Compressed(FedAvg(**ALONE), "auto", budget="250 B")
    with OrderedGrid(client_app([mod()]), CLIENTS) as grid:
        grid.context(grid.get_node_ids()[0]).node_config["fedcomp-budget"] = "thrifty"
        strategy.start(grid, record(start_model()), num_rounds=1)
    assert strategy.traffic[0].dropped == {"error": 1}
    assert "fedcomp-budget in this node's --node-config: budget 'thrifty': cannot be read" in caplog.text
