"""Flower's `Grid` in one process: any strategy against any ClientApp, without Ray, ports or waiting."""

import logging
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from copy import deepcopy
from threading import Lock
from types import TracebackType
from typing import Self

from flwr.app import ArrayRecord, Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import SUPERLINK_NODE_ID, ErrorCode
from flwr.serverapp import Grid, ServerApp
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from fedcomp.errors import ConfigError

UserValue = bool | float | int | str

FIRST_NODE_ID = 1_001  # apart from the server's own id

_log = logging.getLogger(__name__)


class InProcessGrid(Grid):
    """Runs a ClientApp for each message it is given, one after the other, as Flower's simulation would.

    Every node has its own `Context`, every message its own copy of the records, and a client that raises
    becomes an error reply while the node's state goes back to what it was. Node ids are always the same.
    Use it as a context manager: inside, messages can be made as inside a Flower engine.

        with InProcessGrid(client_app, num_nodes=10) as grid:
            strategy.start(grid=grid, initial_arrays=arrays)
    """

    def __init__(
        self, client_app: ClientApp, num_nodes: int, run_config: Mapping[str, UserValue] | None = None
    ) -> None:
        if num_nodes < 1:
            raise ConfigError(f"num_nodes: expected at least 1, got {num_nodes}")
        self._app = client_app
        run_id = secrets.randbits(63)  # as Flower's engines do: what clients stored in another run is not theirs
        self._run = Run.create_empty(run_id)
        self._run_config = dict(run_config or {})
        self._contexts = {
            FIRST_NODE_ID + index: Context(
                run_id=run_id,
                node_id=FIRST_NODE_ID + index,
                node_config={"partition-id": index, "num-partitions": num_nodes},
                state=RecordDict(),
                run_config=dict(self._run_config),
            )
            for index in range(num_nodes)
        }
        self._messages = 0
        self._one_by_one = Lock()  # servers of the legacy API send from many threads
        self._waiting: dict[str, Message] = {}
        self._identity: AbstractContextManager[None] | None = None

    def __enter__(self) -> Self:
        self._identity = _server_identity(self._run.run_id)
        self._identity.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._identity is not None:
            self._identity.__exit__(kind, error, trace)
            self._identity = None

    def set_run(self, run: Run) -> None:
        """Set the run that `run` tells about; nothing else depends on it."""
        self._run = run

    @property
    def run(self) -> Run:
        """Information about the run."""
        return self._run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """Make a message; `Message(...)` does the same."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> list[int]:
        """Return the ids of all nodes, in the order of their partitions."""
        return list(self._contexts)

    def context(self, node_id: int) -> Context:
        """Return the context of a node: its config and what its mods have stored."""
        return self._contexts[node_id]

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Run the ClientApp on each message and keep the replies until they are pulled."""
        ids = []
        for message in messages:
            with self._one_by_one:
                identifier = self._new_id()
                message.metadata.__dict__["_message_id"] = identifier  # as every Grid of Flower does
                self._waiting[identifier] = self._answer(message)
            ids.append(identifier)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Hand over the replies to these messages; each reply is handed over once."""
        found = (self._waiting.pop(identifier, None) for identifier in message_ids)
        return [reply for reply in found if reply is not None]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        """Run the ClientApp on each message and return the replies in the same order."""
        del timeout  # nothing is waited for: the clients run inside this call
        return self.pull_messages(self.push_messages(messages))

    def _answer(self, message: Message) -> Message:
        node_id = message.metadata.dst_node_id
        request: Message = Message(content=_copy(message.content), metadata=message.metadata)  # type: ignore[call-overload]
        try:
            reply = self._run_client(request, node_id)
        except Exception as error:  # whatever a client raises must not stop the others
            reason = f"{type(error).__name__}: {error}"
            _log.debug("node %s failed", node_id, exc_info=error)  # the strategy reports the reason
            failure = Error(code=ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason=reason)
            reply = Message(failure, reply_to=message)
        reply.metadata.__dict__["_message_id"] = self._new_id()
        return reply

    def _run_client(self, message: Message, node_id: int) -> Message:
        """Run the app on a copy of the node's context, and keep the copy only when all went well."""
        if node_id not in self._contexts:
            raise ConfigError(f"no node has the id {node_id}")
        context = _copy_context(self._contexts[node_id])
        reply = self._app(message, context)
        if not isinstance(reply, Message):
            raise TypeError(f"the ClientApp returned {type(reply).__name__} instead of a Message")
        if context.run_config != self._run_config:
            raise ConfigError("the run_config of a Context must not be changed")
        self._contexts[node_id] = context
        return reply

    def _new_id(self) -> str:
        self._messages += 1
        return f"message-{self._messages}"


def run_in_process(
    server_app: ServerApp,
    client_app: ClientApp,
    num_nodes: int,
    run_config: Mapping[str, UserValue] | None = None,
) -> None:
    """Run a whole Flower app in this process, as Flower's `run_simulation` does with Ray."""
    with InProcessGrid(client_app, num_nodes, run_config) as grid:
        context = Context(
            run_id=grid.run.run_id,
            node_id=SUPERLINK_NODE_ID,
            node_config={},
            state=RecordDict(),
            run_config=dict(run_config or {}),
        )
        server_app(grid, context)


def _copy_context(context: Context) -> Context:
    """Copy a context so that changes to the copy leave the original alone."""
    return Context(
        run_id=context.run_id,
        node_id=context.node_id,
        node_config=dict(context.node_config),
        state=_copy(context.state),
        run_config=dict(context.run_config),
        series_id=context.series_id,
    )


def _copy(records: RecordDict) -> RecordDict:
    """Copy records; the bytes of arrays are immutable and shared, so this costs next to nothing."""
    copies = records.copy()  # without the checks of types, which were made when the record was
    for key, record in records.items():
        if isinstance(record, ArrayRecord):
            copies[key] = ArrayRecord(dict(record))  # of new arrays: an Array can be changed
        elif not any(isinstance(value, list) for value in record.values()):
            copies[key] = record.copy()
        else:
            copies[key] = deepcopy(record)
    return copies


@contextmanager
def _server_identity(run_id: int) -> Iterator[None]:
    """Give this process the identity that `Message()` asks for, and put back the former one afterwards."""
    names = ("_task_id", "_run_id", "_node_id")  # the public properties raise while nothing is set
    before = {name: getattr(TaskIdentity, name) for name in names}
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, run_id, SUPERLINK_NODE_ID
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(TaskIdentity, name, value)
