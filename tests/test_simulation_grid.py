"""The in-process grid behaves as Flower's simulation does."""

import contextlib
from collections.abc import Callable

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from fedcomp.errors import ConfigError
from fedcomp_simulations.grid import FIRST_NODE_ID, InProcessGrid, run_in_process

Train = Callable[[Message, Context], Message]


def make_app(train: Train) -> ClientApp:
    app = ClientApp()
    app.train()(train)
    return app


def count_calls(message: Message, context: Context) -> Message:
    """Keep the number of calls in the node's state, and fail in the call that the message asks to fail."""
    calls = context.state.metric_records.setdefault("calls", MetricRecord({"n": 0}))
    calls["n"] = int(calls["n"]) + 1  # type: ignore[arg-type]
    if message.content.config_records["config"]["fail"]:
        raise OSError("no sensor")
    metrics = MetricRecord({"n": calls["n"], "id": context.node_config["partition-id"]})  # type: ignore[dict-item]
    return Message(RecordDict({"metrics": metrics}), reply_to=message)


def ask(grid: Grid, *, fail_on: int = -1, nodes: list[int] | None = None) -> list[Message]:
    nodes = list(grid.get_node_ids()) if nodes is None else nodes
    messages = [
        Message(RecordDict({"config": ConfigRecord({"fail": node == fail_on})}), node, "train") for node in nodes
    ]
    return list(grid.send_and_receive(messages))


def test_replies_come_in_the_order_of_the_messages() -> None:
    with InProcessGrid(make_app(count_calls), 4) as grid:
        assert grid.get_node_ids() == [FIRST_NODE_ID + index for index in range(4)]
        assert [node.node_id for node in grid.get_nodes()] == grid.get_node_ids()
        replies = ask(grid, nodes=grid.get_node_ids()[::-1])
    assert [reply.content["metrics"]["id"] for reply in replies] == [3, 2, 1, 0]
    assert [reply.metadata.src_node_id for reply in replies] == grid.get_node_ids()[::-1]
    assert len({reply.metadata.message_id for reply in replies}) == 4


def test_a_client_that_raises_becomes_an_error_reply_and_its_state_goes_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("DEBUG", "fedcomp_simulations")
    with InProcessGrid(make_app(count_calls), 3) as grid:
        second = grid.get_node_ids()[1]
        ask(grid)
        replies = ask(grid, fail_on=second)
        assert [reply.has_error() for reply in replies] == [False, True, False]
        assert replies[1].error.code == ErrorCode.CLIENT_APP_RAISED_EXCEPTION
        assert replies[1].error.reason == "OSError: no sensor"
        assert replies[1].metadata.src_node_id == second
        assert [reply.content["metrics"]["n"] for reply in ask(grid)] == [3, 2, 3]
    assert "Traceback" in caplog.text


def test_clients_cannot_change_what_others_receive() -> None:
    def train(message: Message, context: Context) -> Message:
        arrays = message.content.array_records["arrays"]
        value = float(arrays["x"].numpy()[0])
        arrays["x"] = Array(np.zeros(1))
        message.content.config_records["config"]["seen"] = True
        assert "seen" not in shared.config_records["config"]
        return Message(RecordDict({"metrics": MetricRecord({"x": value})}), reply_to=message)

    arrays = ArrayRecord({"x": Array(np.ones(1))})
    shared = RecordDict({"arrays": arrays, "config": ConfigRecord({"a": 1})})
    with InProcessGrid(make_app(train), 2) as grid:
        messages = [Message(shared, node, "train") for node in grid.get_node_ids()]
        replies = grid.send_and_receive(messages)
    assert [reply.content["metrics"]["x"] for reply in replies] == [1.0, 1.0]


def test_run_config_arrives_and_must_not_change() -> None:
    def train(message: Message, context: Context) -> Message:
        learnt = MetricRecord({"lr": float(context.run_config["lr"])})
        if context.node_config["partition-id"] == 1:
            context.run_config["lr"] = 7.0
        return Message(RecordDict({"metrics": learnt}), reply_to=message)

    with InProcessGrid(make_app(train), 2, {"lr": 0.5}) as grid:
        replies = ask(grid)
    assert replies[0].content["metrics"]["lr"] == 0.5
    assert "run_config" in str(replies[1].error.reason)


def test_a_reply_is_pulled_once() -> None:
    with InProcessGrid(make_app(count_calls), 2) as grid:
        content = RecordDict({"config": ConfigRecord({"fail": False})})
        message = grid.create_message(content, "train", grid.get_node_ids()[0], "1")
        (identifier,) = grid.push_messages([message])
        assert [reply.metadata.reply_to_message_id for reply in grid.pull_messages([identifier])] == [identifier]
        assert grid.pull_messages([identifier, "unknown"]) == []


def test_unknown_nodes_and_strange_replies_are_errors_too() -> None:
    with InProcessGrid(make_app(lambda message, context: None), 1) as grid:  # type: ignore[arg-type, return-value]
        replies = ask(grid, nodes=[5, grid.get_node_ids()[0]])
    assert "no node has the id 5" in str(replies[0].error.reason)
    assert "NoneType instead of a Message" in str(replies[1].error.reason)
    with pytest.raises(ConfigError, match="num_nodes"):
        InProcessGrid(make_app(count_calls), 0)


@pytest.mark.parametrize("before", [None, 77])
def test_the_identity_of_the_process_is_put_back(before: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, before)
    with contextlib.suppress(ZeroDivisionError), InProcessGrid(make_app(count_calls), 1) as grid:
        assert TaskIdentity.run_id == grid.run.run_id
        raise ZeroDivisionError
    assert TaskIdentity._task_id == TaskIdentity._run_id == TaskIdentity._node_id == before


def test_a_whole_app_runs() -> None:
    def train(message: Message, context: Context) -> Message:
        value = message.content.array_records["arrays"]["x"].numpy() + float(context.run_config["step"])
        arrays = ArrayRecord({"x": Array(value)})
        metrics = MetricRecord({"num-examples": 1})
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

    server, seen = ServerApp(), []

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        grid.set_run(Run.create_empty(5))
        assert grid.run.run_id == 5
        start = ArrayRecord({"x": Array(np.zeros(2))})
        result = FedAvg(fraction_evaluate=0.0).start(grid=grid, initial_arrays=start, num_rounds=3)
        seen.append((context.run_config["step"], result.arrays["x"].numpy().tolist()))

    run_in_process(server, make_app(train), 2, {"step": 0.5})
    assert seen == [(0.5, [1.5, 1.5])]
