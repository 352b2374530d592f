"""The compact form: a frame, its metrics and an evaluation in one record, small models inside the configuration."""

import logging
from collections.abc import Iterable
from typing import Any

import pytest
from flower_app import CLIENTS, Model, OrderedGrid, arrays, client_app, frame_of, package_of, record, run, start_model
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg, FedMedian, Result
from hypothesis import given
from hypothesis import strategies as st

from fedcomp import ConfigError, FrameError, TopK
from fedcomp.envelope import CONFIG, EVALUATION, METRICS, Entry, Envelope
from fedcomp.request import COMPACT, DECLINED, KEY, MODEL
from fedcomp_clients import CompressMod, MemoryModelCache, MemoryStore
from fedcomp_strategies import Compressed
from fedcomp_strategies import compact as server_side
from fedcomp_strategies.traffic import objects_in, transport

QUIET: dict[str, Any] = {"fraction_evaluate": 0.0, "min_evaluate_nodes": 0}
THREE = 3  # objects: message, records, the one record


def mod() -> CompressMod:
    return CompressMod(MemoryStore(), models=MemoryModelCache())


def same(a: Model, b: Model) -> None:
    assert {name: values.tobytes() for name, values in a.items()} == {n: v.tobytes() for n, v in b.items()}


class Wire:
    """An outermost mod that keeps what travels."""

    def __init__(self) -> None:
        self.down: list[RecordDict] = []
        self.up: list[RecordDict] = []

    def __call__(self, message: Message, context: Context, call_next: Any) -> Message:
        self.down.append(RecordDict({**message.content}))
        reply: Message = call_next(message, context)
        self.up.append(RecordDict({**reply.content}))
        return reply


# --- the envelope ----------------------------------------------------------------------------------------------------

numbers = st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False)
names = st.text(max_size=20)
metrics = st.dictionaries(
    names, numbers | st.lists(st.integers(), min_size=1, max_size=3) | st.lists(st.floats(allow_nan=False), min_size=1)
)
scalars = numbers | st.booleans() | st.text(min_size=1, max_size=5) | st.binary(min_size=1, max_size=5)
configs = st.dictionaries(names, scalars | st.lists(st.text(max_size=3), min_size=1, max_size=3), max_size=4)
entries = st.lists(
    st.one_of(
        st.builds(Entry, st.sampled_from([METRICS, EVALUATION + METRICS]), names, metrics),
        st.builds(Entry, st.sampled_from([CONFIG, EVALUATION + CONFIG]), names, configs),
    ),
    max_size=4,
    unique_by=lambda entry: entry.name,
)


@given(st.binary(), names, entries, st.booleans())
def test_envelopes_come_back(frame: bytes, arrays: str, listed: list[Entry], own: bool) -> None:
    listed = [entry for entry in listed if entry.name != arrays]
    envelope = Envelope(frame, arrays, tuple(listed), own)
    assert Envelope.from_mapping(envelope.to_mapping()) == envelope


keys = st.sampled_from(
    ["frame", "arrays", "records", "own", "0.x", "1.x", "00.x", "x", "-1.x", "².", f"{'9' * 5000}.x"]
)
values = scalars | st.just("") | st.lists(st.sampled_from(["m:a", "c:a", "em:b", "z:c", ":", "m:"]), max_size=3)


@given(st.dictionaries(keys, values))
def test_forged_envelopes_are_refused_or_sound(told: dict[str, Any]) -> None:
    try:
        envelope = Envelope.from_mapping(told)
    except FrameError:
        return
    assert Envelope.from_mapping(envelope.to_mapping()) == envelope


def test_what_no_reader_could_take_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="kind"):
        Envelope(b"f", "arrays", (Entry("z", "metrics", {}),))
    with pytest.raises(ConfigError, match="empty values"):
        Envelope(b"f", "arrays", (Entry(CONFIG, "more", {"note": ""}),))


# --- through Flower --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [FedAvg, FedMedian])
@pytest.mark.parametrize("mixed", [True, False])
def test_the_form_changes_no_bit_of_the_model(kind: Any, mixed: bool) -> None:
    models = []
    for compact in (True, False):
        strategy = Compressed(kind(**QUIET), "topk(0.1)", feedback="ef", mixed_fleet=mixed, compact=compact)
        models.append(run(strategy, [mod()], rounds=4))
    same(*models)


@pytest.mark.parametrize("mixed", [True, False])
def test_a_round_takes_three_objects_each_way(mixed: bool) -> None:
    wire, strategy = Wire(), Compressed(FedAvg(**QUIET), "int8", mixed_fleet=mixed)
    run(strategy, [wire, mod()], rounds=2)
    assert {objects_in(content) for content in wire.up} == {THREE}
    assert {objects_in(content) for content in wire.down[CLIENTS:]} == {THREE}
    if mixed:  # nobody is known to read packages yet
        assert all(list(content.array_records["arrays"]) == list(start_model()) for content in wire.down[:CLIENTS])
    payload = sum(len(frame_of(_reply(content)) or b"") for content in wire.up[CLIENTS:])
    assert strategy.traffic[1].bytes_up == payload
    assert strategy.traffic[1].wire_up == payload + CLIENTS * transport(THREE, THREE, 0)


def _reply(content: RecordDict) -> Message:
    with OrderedGrid(client_app([]), 1) as grid:
        return Message(content, grid.get_node_ids()[0], "train")


def test_apps_see_ordinary_messages() -> None:
    """Inside of the mod nothing is different, and nothing of ours is left among the arrays."""
    wire = Wire()
    run(Compressed(FedAvg(**QUIET), "int8", mixed_fleet=False), [mod(), wire])
    for down, up in zip(wire.down, wire.up, strict=True):
        assert list(down) == ["arrays", "config"]
        assert MODEL not in down.config_records["config"]
        assert list(down.array_records["arrays"]) == list(start_model())
        assert list(up) == ["arrays", "metrics"]


def test_size_mods_see_the_compressed_size(caplog: pytest.LogCaptureFixture) -> None:
    from flwr.clientapp.mod import arrays_size_mod, message_size_mod

    strategy = Compressed(FedAvg(**QUIET), "topk(0.01)", mixed_fleet=False)
    with caplog.at_level(logging.INFO, logger="flwr"):
        run(strategy, [message_size_mod, arrays_size_mod, mod()], rounds=1)
    told = [int(r.getMessage().split()[3]) for r in caplog.records if "Outgoing message size" in r.getMessage()]
    assert len(told) == CLIENTS
    assert strategy.traffic[0].bytes_up < sum(told) < strategy.traffic[0].bytes_up + 120 * CLIENTS


def test_large_models_are_arrays_which_messages_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model as long as that would be copied into each node's configuration."""
    from fedcomp_strategies import delivery

    def sent(**limits: int) -> list[bool]:
        with monkeypatch.context() as patch:
            for name, limit in limits.items():
                patch.setattr(delivery, name, limit)
            wire = Wire()
            run(Compressed(FedAvg(**QUIET), "int8", mixed_fleet=False), [wire, mod()], rounds=1)
        assert all(package_of(_reply(content)) for content in wire.down)
        return [MODEL in content.config_records["config"] for content in wire.down]

    assert all(sent())
    assert not any(sent(MOST_IN_RECORD=1000))
    assert sum(sent(MOST_IN_MESSAGES=8000)) == 2


def test_empty_values_travel_by_themselves() -> None:
    """They would crash Flower's message_size_mod if they were in our record, and so does their own: not our doing."""

    def noted(reply: Message, context: Context, round_: int) -> None:
        reply.content["notes"] = ConfigRecord({"text": "", "list": []})

    wire, strategy = Wire(), Compressed(FedAvg(**QUIET), "int8")
    run(strategy, [wire, mod()], rounds=1, fault=noted)
    assert all(list(content) == [KEY, "notes"] for content in wire.up)
    assert strategy.traffic[0].failures == 0


@pytest.mark.parametrize(
    "damage",
    [
        {"frame": "text"},
        {"arrays": 3},
        {"records": ["x:metrics"]},
        {"records": ["m:metrics", "m:metrics"]},
        {"records": ["m:arrays"]},
        {"0.loss": b"high"},
        {"7.loss": 1.0},
        {"frame": b"no frame"},
    ],
)
def test_a_damaged_reply_is_dropped_alone(damage: dict[str, Any]) -> None:
    def damaging(message: Message, context: Context, call_next: Any) -> Message:
        reply: Message = call_next(message, context)
        if context.node_config["partition-id"] == 2:
            reply.content[KEY] = ConfigRecord({**reply.content.config_records[KEY], **damage})
        return reply

    def absent(reply: Message, context: Context, round_: int) -> None:
        if context.node_config["partition-id"] == 2:
            raise RuntimeError("away")

    strategy = Compressed(FedAvg(**QUIET), "int8")
    model = run(strategy, [damaging, mod()])
    assert [t.dropped for t in strategy.traffic] == [{"damaged": 1}] * 3
    same(model, run(Compressed(FedAvg(**QUIET), "int8"), [mod()], fault=absent))


# --- rollout in any order --------------------------------------------------------------------------------------------


def without(key: str) -> Any:
    """A mod that hides an entry of the configuration, as if that side were of an older fedcomp."""

    def hiding(message: Message, context: Context, call_next: Any) -> Message:
        for config in message.content.config_records.values():
            if key in config:
                del config[key]
        return call_next(message, context)  # type: ignore[no-any-return]

    return hiding


def test_clients_that_know_no_compact_form_go_on_with_arrays() -> None:
    wire, strategy = Wire(), Compressed(FedAvg(**QUIET), "int8")
    model = run(strategy, [wire, without(COMPACT), mod()])
    assert {objects_in(content) for content in [*wire.up, *wire.down[CLIENTS:]]} == {6}
    assert all(MODEL not in content.config_records["config"] for content in wire.down)
    same(model, run(Compressed(FedAvg(**QUIET), "int8"), [mod()]))


def test_a_client_that_cannot_do_what_is_asked_replies_plainly_and_says_why_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def newer(message: Message, context: Context, call_next: Any) -> Message:
        config = message.content.config_records["config"]
        if context.node_config["partition-id"] == 1:
            config[KEY] = str(config[KEY]).replace('"codec":"topk"', '"codec":"telepathy"')
        return call_next(message, context)  # type: ignore[no-any-return]

    strategy = Compressed(FedAvg(**QUIET), TopK(0.1))
    with caplog.at_level(logging.INFO, logger="fedcomp"):
        run(strategy, [newer, mod()])
    assert not any(t.failures for t in strategy.traffic)
    told = [r.getMessage() for r in caplog.records if "telepathy" in r.getMessage()]
    assert [text.split(":")[0] for text in told] == [
        "the server asks for what this fedcomp cannot do, replying uncompressed",
        "round 1",
    ]


def test_older_clients_fail_once_where_all_were_said_to_be_new() -> None:
    """They look for the model among the arrays."""

    def older(message: Message, context: Context, call_next: Any) -> Message:
        config = message.content.config_records["config"]
        config.pop(COMPACT, None)
        if MODEL in config:
            raise KeyError("arrays")
        return client(message, context, call_next)

    client, strategy = mod(), Compressed(FedAvg(**QUIET), "int8", mixed_fleet=False)
    run(strategy, [older], rounds=4)
    assert [t.failures for t in strategy.traffic] == [CLIENTS, 0, 0, 0]


def test_a_client_cannot_write_lines_into_the_log(caplog: pytest.LogCaptureFixture) -> None:
    def forger(message: Message, context: Context, call_next: Any) -> Message:
        reply: Message = call_next(message, context)
        reply.content[DECLINED] = ConfigRecord({"reason": "a\nERROR: fake\n" + "b" * 1000})
        return reply

    with caplog.at_level(logging.INFO, logger="fedcomp"):
        run(Compressed(FedAvg(**QUIET), "int8"), [forger], rounds=1)
    told = [r.getMessage() for r in caplog.records if "fake" in r.getMessage()]
    assert len(told) == CLIENTS
    assert all("\n" not in text and len(text) < 500 for text in told)


def test_an_app_may_have_a_record_of_our_name() -> None:
    def odd(reply: Message, context: Context, round_: int) -> None:
        reply.content[KEY] = ConfigRecord({"text": ""})

    strategy = Compressed(FedAvg(**QUIET), "int8")
    same(run(strategy, [mod()], fault=odd), run(Compressed(FedAvg(**QUIET), "int8"), [mod()]))
    assert not any(t.failures for t in strategy.traffic)


def test_plain_replies_are_told_of_once_a_node(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="fedcomp"):
        run(Compressed(FedAvg(**QUIET), "int8"), [])
    told = [r.getMessage() for r in caplog.records if "replies uncompressed" in r.getMessage()]
    assert len(told) == CLIENTS
    assert all(text.startswith("round 1: node ") and "no fedcomp there" in text for text in told)


# --- evaluation along with training ----------------------------------------------------------------------------------


def evaluated(client: CompressMod | None = None, fault: Any = None, **options: Any) -> tuple[Result, list[int]]:
    """The result of three rounds, and how many messages each of Flower's sendings had."""
    client = client or mod()
    app, sent = client_app([client]), []

    @app.evaluate()
    @client.evaluates
    def evaluate(message: Message, context: Context) -> Message:
        config = next(iter(message.content.config_records.values()))
        if fault is not None:
            fault(context)
        norm = float(abs(arrays(message.content.array_records["arrays"])["fc.weight"]).sum())
        told = MetricRecord({"num-examples": 1 + int(context.node_config["partition-id"]), "norm": norm})
        told["round"], told["topk"] = int(config["server-round"]), int(config["topk"])  # type: ignore[arg-type]
        return Message(RecordDict({"metrics": told}), reply_to=message)

    class Counting(OrderedGrid):
        def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
            messages = list(messages)
            sent.append(len(messages))
            return super().send_and_receive(messages, timeout=timeout)

    with Counting(app, CLIENTS) as grid:
        strategy = Compressed(FedAvg(), "int8", **options)
        config = ConfigRecord({"topk": 5})
        return strategy.start(grid, record(start_model()), num_rounds=3, evaluate_config=config), sent


@pytest.mark.parametrize("mixed", [True, False])
def test_metrics_that_come_along_are_those_that_messages_bring(mixed: bool) -> None:
    result, sent = evaluated(evaluation="piggyback", mixed_fleet=mixed)
    usual, _ = evaluated(mixed_fleet=mixed)
    found = result.evaluate_metrics_clientapp
    assert list(found) == [0, 1, 2, 3]
    assert {round_: dict(metrics) for round_, metrics in found.items() if round_} == {
        round_: dict(metrics) for round_, metrics in usual.evaluate_metrics_clientapp.items()
    }
    assert found[0]["round"] == 0
    assert sent == [CLIENTS, 0, CLIENTS, 0, CLIENTS, CLIENTS]  # only the last model is evaluated by itself
    assert result.arrays is not None
    assert usual.arrays is not None
    same(arrays(result.arrays), arrays(usual.arrays))


def test_an_evaluation_that_fails_costs_no_training(caplog: pytest.LogCaptureFixture) -> None:
    def broken(context: Context) -> None:
        if context.node_config["partition-id"] == 0:
            raise RuntimeError("no test data")

    result, _ = evaluated(fault=broken, evaluation="piggyback")
    assert "evaluation beside training failed: RuntimeError: no test data" in caplog.text
    assert list(result.evaluate_metrics_clientapp) == [0, 1, 2, 3]
    usual = evaluated()[0].arrays
    assert result.arrays is not None
    assert usual is not None
    same(arrays(result.arrays), arrays(usual))


def test_where_no_client_evaluates_along_messages_do_it(caplog: pytest.LogCaptureFixture) -> None:
    strategy = Compressed(FedAvg(), "int8", evaluation="piggyback")
    with OrderedGrid(client_app([mod()], evaluate=True), CLIENTS) as grid:
        result = strategy.start(grid, record(start_model()), num_rounds=3)
    assert list(result.evaluate_metrics_clientapp) == [1, 2, 3]
    assert not any(t.failures for t in strategy.traffic)
    assert caplog.text.count("mark the function of the ClientApp by @compress_mod.evaluates") == 1


def test_two_apps_with_one_mod_are_told_apart(caplog: pytest.LogCaptureFixture) -> None:
    def evaluate(message: Message, context: Context) -> Message:
        raise NotImplementedError

    client = mod()
    client.evaluates(evaluate)
    client.evaluates(evaluate)  # a module that is loaded again
    assert not caplog.records
    evaluate.__module__ = "another_app"
    client.evaluates(evaluate)
    client.evaluates(lambda message, context: message)
    assert "give each app a CompressMod of its own" in caplog.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compact": False}, "needs compact replies"),
        ({"average": 0.8}, "the model that is trained"),
        ({"evaluation": "never"}, "evaluation"),
    ],
)
def test_what_does_not_go_together_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Compressed(FedAvg(), "int8", **{"evaluation": "piggyback", **options})


def test_a_strategy_is_used_for_several_trainings() -> None:
    """Metrics of one are not those of the next."""
    client = mod()
    app = ClientApp(mods=[client])
    inner = client_app([])
    strategy = Compressed(FedAvg(), "int8", evaluation="piggyback")

    @app.train()
    def train(message: Message, context: Context) -> Message:
        return inner(message, context)

    @app.evaluate()
    @client.evaluates
    def evaluate(message: Message, context: Context) -> Message:
        return Message(RecordDict({"metrics": MetricRecord({"num-examples": 1, "x": 1.0})}), reply_to=message)

    for rounds in (4, 2):
        with OrderedGrid(app, CLIENTS) as grid:
            result = strategy.start(grid, record(start_model()), num_rounds=rounds)
        assert list(result.evaluate_metrics_clientapp) == list(range(rounds + 1))


# --- what else a round needs -----------------------------------------------------------------------------------------


def test_too_few_replies_leave_the_model_as_it_was(caplog: pytest.LogCaptureFixture) -> None:
    def some(reply: Message, context: Context, round_: int) -> None:
        if round_ == 2 and context.node_config["partition-id"] not in (0, 1):
            raise RuntimeError("away")

    for kind in (FedAvg, FedMedian):
        models = []
        for least in (1, 3):
            strategy = Compressed(kind(**QUIET), "int8", min_replies=least)
            models.append(run(strategy, [mod()], fault=some, rounds=2))
        once = run(Compressed(kind(**QUIET), "int8"), [mod()], rounds=1)
        same(models[1], once)
        assert any((models[0][name] != once[name]).any() for name in once)
    assert "2 usable replies are fewer than min_replies=3" in caplog.text


def test_a_line_about_each_round(caplog: pytest.LogCaptureFixture) -> None:
    def late(reply: Message, context: Context, round_: int) -> None:
        if round_ == 2 and context.node_config["partition-id"] == 0:
            raise RuntimeError("away")

    strategy = Compressed(FedAvg(), "int8")
    with caplog.at_level(logging.INFO, logger="flwr"):
        run(strategy, [mod()], evaluate=True, rounds=2, fault=late)
    lines = [r.getMessage() for r in caplog.records if "uplink" in r.getMessage()]
    up, wire = strategy.traffic[1].bytes_up, strategy.traffic[1].wire_up
    down = strategy.traffic[1].bytes_down + strategy.traffic[1].bytes_down_evaluate
    assert len(lines) == 2
    assert lines[1] == (
        f"\t└──> round 2: accuracy 0.5 | uplink {up:,} B in 5 of 6 replies (wire ~{wire:,} B) | downlink {down:,} B"
        " | dropped 1 error"
    )
    assert wire > up + CLIENTS * 10_000


def test_the_line_tells_what_the_server_itself_finds(caplog: pytest.LogCaptureFixture) -> None:
    strategy = Compressed(FedAvg(**QUIET), "int8", evaluation="piggyback")
    with caplog.at_level(logging.INFO, logger="flwr"), OrderedGrid(client_app([mod()]), CLIENTS) as grid:
        strategy.start(
            grid, record(start_model()), num_rounds=2, evaluate_fn=lambda r, _: MetricRecord({"loss": r / 2})
        )
    lines = [r.getMessage() for r in caplog.records if "uplink" in r.getMessage()]
    assert [line.split("|")[0] for line in lines] == ["\t└──> round 1: loss 0.5 ", "\t└──> round 2: loss 1 "]


def test_expanding_is_for_compact_replies_only() -> None:
    with pytest.raises(FrameError, match="expected a frame"):
        server_side.expanded(_reply(RecordDict({"metrics": MetricRecord({"x": 1})})))
