"""The mod that compresses a ClientApp's train replies: ``ClientApp(mods=[compress_mod])`` is all a client needs.

Put size mods before it (they see the compressed size), clipping and local privacy mods after it (the clipped, noised
update is what gets compressed).
"""

import logging
from collections.abc import Mapping
from functools import lru_cache

from flwr.app import Array, ArrayRecord, Context, Message, RecordDict
from flwr.clientapp.typing import ClientAppCallable

from fedcomp import ConfigError, LayoutError, compress, decompress, generator
from fedcomp.layout import is_float_dtype
from fedcomp.monitor import Monitor, Sink
from fedcomp.request import KEY, STYPE, Request
from fedcomp_clients.state import FileStore, ResidualStore

log = logging.getLogger("fedcomp")


class CompressMod:
    """A Flower mod; the server decides the codec, and without its request the reply stays as it is.

    Args:
        store: where error feedback keeps residuals; None: files, see FileStore.
        monitor: called with statistics of each tensor's update and what its frame makes of it; costs one decoding.
    """

    def __init__(self, store: ResidualStore | None = None, monitor: Sink | None = None) -> None:
        self.store = store or FileStore()
        self.monitor = monitor
        self._monitors: dict[str, Monitor] = {}

    def __call__(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        """Train, then replace the model in the reply by one frame with its update.

        Raises NonFiniteError if the trained model holds NaN or infinity, FedcompError if the residual cannot be stored:
        Flower turns both into an error reply of this client. What merely does not fit is sent plainly, with a warning.
        """
        request = _request(message) if message.metadata.message_type.partition(".")[0] == "train" else None
        if request is None or len(message.content.array_records) != 1:
            return call_next(message, context)
        base = dict(next(iter(message.content.array_records.values())))  # user code may empty the record itself
        if not _has_floats(base):  # trees, counters: nothing to compress
            return call_next(message, context)
        reply = call_next(message, context)
        if reply.has_error() or len(reply.content.array_records) != 1:
            return reply
        key, trained = next(iter(reply.content.array_records.items()))
        try:
            frame = self._compress(base, trained, request, context)
        except LayoutError as error:
            log.warning("update sent uncompressed: %s", error)
            return reply
        packed = Array(dtype="uint8", shape=(len(frame),), stype=STYPE, data=frame)
        reply.content = RecordDict({**reply.content, key: ArrayRecord({KEY: packed})})
        return reply

    def _compress(self, base: dict[str, Array], trained: ArrayRecord, request: Request, context: Context) -> bytes:
        name, number = _node(context)
        training = f"{context.run_id}-{request.session}"
        feedback = request.feedback == "ef"
        start = {key: array.numpy() for key, array in base.items()}
        new = {key: array.numpy() for key, array in trained.items()}
        update = compress(
            start,
            new,
            request.plan,
            round=request.round,
            rng=generator(request.seed, request.round, number),
            residual=self.store.load(training, name) if feedback else None,
        )
        if self.monitor is not None:
            decoded = decompress(update.frame, start, plan=request.plan)
            self._monitors.setdefault(name, Monitor(self.monitor)).observe(request.round, start, new, decoded)
        if feedback:
            self.store.save(training, name, update.residual)
        return update.frame


compress_mod = CompressMod()
"""The mod with residuals in files: works in deployment and in simulation, on as many processes as there are."""


def _has_floats(record: Mapping[str, Array]) -> bool:
    return any(array.stype == "numpy.ndarray" and is_float_dtype(array.dtype) for array in record.values())


def _node(context: Context) -> tuple[str, int]:
    """Name and number of this node: its partition where it has one, since node ids change when a SuperNode restarts."""
    partition = context.node_config.get("partition-id")
    if isinstance(partition, int) and partition >= 0:
        return f"partition-{partition}", partition
    return f"node-{context.node_id}", context.node_id


def _request(message: Message) -> Request | None:
    for config in message.content.config_records.values():
        text = config.get(KEY)
        if isinstance(text, str):
            return _parse(text)
    return None


@lru_cache(maxsize=4)  # in a simulation all clients of a round get the same text
def _parse(text: str) -> Request | None:
    try:
        return Request.from_text(text)
    except ConfigError as error:
        log.warning("the server asks for what this fedcomp cannot do, replying uncompressed: %s", error)
        return None
