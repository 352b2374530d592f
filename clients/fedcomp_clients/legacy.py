"""Wrappers for clients that are started with `start_client`, which knows no mods.

A client inside a ClientApp needs none of this: ``ClientApp(client_fn=..., mods=[compress_mod])`` serves both APIs.
"""

import secrets
import time
from collections.abc import Callable
from hashlib import sha256
from typing import TypeVar

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, Metadata, MetricRecord, RecordDict
from flwr.client import Client, NumPyClient
from flwr.common import (
    Code,
    EvaluateIns,
    EvaluateRes,
    FitIns,
    FitRes,
    GetParametersIns,
    GetParametersRes,
    GetPropertiesIns,
    GetPropertiesRes,
    Parameters,
    Status,
)

from fedcomp import ConfigError, FedcompError, _validate
from fedcomp.request import KEY, MODEL_STYPE, is_ours
from fedcomp_clients.mod import CompressMod, compress_mod

_NUMBERS = 31  # bits of a client's number that is made of its name

T = TypeVar("T")


def wrap_client(
    client: Client, *, name: str | None = None, partition_id: int | None = None, mod: CompressMod = compress_mod
) -> Client:
    """The client, uploading frames to servers that ask for them: ``start_client(client=wrap_client(client))``.

    What feedback remembers lies in files, see FileStore. `start_client` gives a client no identity, so unless it is
    given one here it is another client after a restart, and its memory starts again from zero. With the same name or
    number, and the same FEDCOMP_STATE_DIR, it goes on with its memory, as long as the server process that trains does:
    a server that starts again begins a new training.

    Args:
        client: any client, NumPyClients as ``client.to_client()``.
        name: of this device, such as its host name; no other client of the training may have it.
        partition_id: the same as a number from 0, such as that of the part of the data that it has.
        mod: what compresses, with its stores.

    A model that is not finite, or a memory that cannot be stored, becomes a result with the reason as its status,
    where `start_client` would end the client. Raises ConfigError for a name and a number at once.
    """
    return _CompressedClient(client, _context(name, partition_id), mod)


def wrap_numpy_client(
    client: NumPyClient, *, name: str | None = None, partition_id: int | None = None, mod: CompressMod = compress_mod
) -> Client:
    """The same for a NumPyClient: ``start_client(client=wrap_numpy_client(client))``; see wrap_client."""
    return wrap_client(client.to_client(), name=name, partition_id=partition_id, mod=mod)


class _CompressedClient(Client):
    """A client behind a CompressMod."""

    def __init__(self, client: Client, context: Context, mod: CompressMod) -> None:
        self._client, self._mod, self._context = client, mod, context

    def get_properties(self, ins: GetPropertiesIns) -> GetPropertiesRes:
        """The client's own."""
        return self._client.get_properties(ins)

    def get_parameters(self, ins: GetParametersIns) -> GetParametersRes:
        """The client's own: whole, as nothing is known yet that differences could be to."""
        return self._client.get_parameters(ins)

    def fit(self, ins: FitIns) -> FitRes:
        """Fit, and compress the update if the server asks for that."""
        if not _concerns(ins):
            return self._client.fit(ins)
        content = {"config": ConfigRecord({key: value for key, value in ins.config.items() if is_ours(key)})}
        try:
            reply, result = self._through("train", ins, content, lambda p: self._client.fit(FitIns(p, ins.config)))
        except FedcompError as error:
            return FitRes(_status(Code.FIT_NOT_IMPLEMENTED, error), Parameters([], ""), 0, {})
        if result.status.code == Code.OK:
            result.parameters = _parameters(reply)
        return result

    def evaluate(self, ins: EvaluateIns) -> EvaluateRes:
        """Evaluate, the model unpacked."""
        if not _concerns(ins):
            return self._client.evaluate(ins)
        try:
            return self._through("evaluate", ins, {}, lambda p: self._client.evaluate(EvaluateIns(p, ins.config)))[1]
        except FedcompError as error:
            return EvaluateRes(_status(Code.EVALUATE_NOT_IMPLEMENTED, error), 0.0, 0, {})

    def _through(
        self, kind: str, ins: FitIns | EvaluateIns, content: dict[str, ConfigRecord], call: Callable[[Parameters], T]
    ) -> tuple[Message, T]:
        """What the mod makes of the instructions and of the client's result, as a message, and that result."""
        results = []

        def answer(message: Message, _: Context) -> Message:
            results.append(call(_parameters(message)))
            return _message(kind, _records(results[-1]))

        request = _message(kind, RecordDict({"parameters": _arrays(ins.parameters), **content}))
        return self._mod(request, self._context, answer), results[-1]


def _concerns(ins: FitIns | EvaluateIns) -> bool:
    """Whether the server speaks to us."""
    return KEY in ins.config or ins.parameters.tensor_type == MODEL_STYPE


def _context(name: str | None, partition_id: int | None) -> Context:
    """Who this client is, for the mod: a number that stays, or a node id of this process's own."""
    if name is not None and partition_id is not None:
        raise ConfigError(f"expected a name or a partition_id, got both: {name!r} and {partition_id}")
    if name is not None:
        _validate.instance(kind=str, name=name)
        partition_id = int.from_bytes(sha256(name.encode()).digest()[:4], "big") >> (32 - _NUMBERS)
    if partition_id is not None:
        _validate.integer(low=0, high=2**63 - 1, partition_id=partition_id)
    known: dict[str, bool | float | int | str] = {} if partition_id is None else {"partition-id": partition_id}
    return Context(run_id=0, node_id=secrets.randbits(62), node_config=known, state=RecordDict(), run_config={})


def _records(result: object) -> RecordDict:
    """What the mod looks at in a result: the model of a fit that went well, and its weight."""
    if not isinstance(result, FitRes) or result.status.code != Code.OK:
        return RecordDict()
    weight = MetricRecord({"num_examples": int(result.num_examples)})
    return RecordDict({"parameters": _arrays(result.parameters), "weight": weight})


def _arrays(parameters: Parameters) -> ArrayRecord:
    """Parameters as Flower's records hold them: named by position, without dtypes and shapes."""
    kind, tensors = parameters.tensor_type, parameters.tensors
    return ArrayRecord({str(i): Array(dtype="", shape=(), stype=kind, data=data) for i, data in enumerate(tensors)})


def _parameters(message: Message) -> Parameters:
    arrays = list(next(iter(message.content.array_records.values())).values())
    return Parameters([array.data for array in arrays], arrays[0].stype if arrays else "numpy.ndarray")


def _message(kind: str, content: RecordDict) -> Message:
    """A message that no engine has sent."""
    metadata = Metadata(0, "", 1, 0, "", "", time.time(), 3600.0, kind)
    message: Message = Message(content=content, metadata=metadata)  # type: ignore[call-overload]
    return message


def _status(code: Code, error: FedcompError) -> Status:
    """Flower has no code for what went wrong; the server reads the message."""
    return Status(code, f"{type(error).__name__}: {error}")
