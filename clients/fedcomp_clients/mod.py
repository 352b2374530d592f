"""The mod that compresses a ClientApp's train replies: ``ClientApp(mods=[compress_mod])`` is all a client needs.

Put size mods before it (they see the compressed size), clipping and local privacy mods after it (the clipped, noised
update is what gets compressed).
"""

import logging
import math
from dataclasses import dataclass, replace
from functools import lru_cache

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp.typing import ClientAppCallable

from fedcomp import CompressedUpdate, ConfigError, Layout, LayoutError, Memory, compress, decompress, generator
from fedcomp.compressor import cohort_seed
from fedcomp.feedback import EMPTY
from fedcomp.feedback.cafe import blank
from fedcomp.feedback.stored import memory_layout
from fedcomp.monitor import Monitor, Sink
from fedcomp.request import ACK, ACKS, KEY, MODEL_STYPE, PLACE, STYPE, Request, has_floats
from fedcomp_clients import order
from fedcomp_clients.downlink import FileModelCache, ModelCache, Received, receive
from fedcomp_clients.state import FileStore, StateStore

log = logging.getLogger("fedcomp")


class CompressMod:
    """A Flower mod; the server decides the codec, and without its request the reply stays as it is.

    Args:
        store: where feedback keeps what it must remember; None: files, see FileStore.
        monitor: called with statistics of each tensor's update and what its frame makes of it; costs one decoding.
        models: where the model is kept that the server's next differences apply to; None: files, see FileModelCache.
    """

    def __init__(
        self, store: StateStore | None = None, monitor: Sink | None = None, models: ModelCache | None = None
    ) -> None:
        self.store = store or FileStore()
        self.models = models or FileModelCache()
        self.monitor = monitor
        self._monitors: dict[str, Monitor] = {}

    def __call__(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        """Train, then replace the model in the reply by one frame with its update.

        Raises NonFiniteError if the trained model holds NaN or infinity, FedcompError if the residual cannot be stored:
        Flower turns both into an error reply of this client. What merely does not fit is sent plainly, with a warning.
        So it does with StaleModelError, if the server sent differences to a model that is not here any more.
        """
        received = self._unpack(message, context)
        told = _Told.of(message) if message.metadata.message_type.partition(".")[0] == "train" else None
        if told is None or len(message.content.array_records) != 1:
            return call_next(message, context)
        base = dict(next(iter(message.content.array_records.values())))  # user code may empty the record itself
        if not has_floats(base):  # trees, counters: nothing to compress
            return call_next(message, context)
        order.check_outer()
        reply = call_next(message, context)
        if reply.has_error() or len(reply.content.array_records) != 1:
            return reply
        key, trained = next(iter(reply.content.array_records.items()))
        try:
            frame = self._compress(base, trained, told, received, context, _weight(reply, told.request.weight))
        except LayoutError as error:
            log.warning("update sent uncompressed: %s", error)
            return reply
        packed = Array(dtype="uint8", shape=(len(frame),), stype=STYPE, data=frame)
        reply.content = RecordDict({**reply.content, key: ArrayRecord({KEY: packed})})
        return reply

    def _unpack(self, message: Message, context: Context) -> Received | None:
        """Put the model in the place of a package, whatever the message is for. Returns what else it brought."""
        for key, record in message.content.array_records.items():
            packed = next((array for array in record.values() if array.stype == MODEL_STYPE), None)
            if packed is not None:
                received = receive(packed.data, self.models, str(context.run_id), _node(context)[0])
                model = ArrayRecord({name: Array(values) for name, values in received.arrays.items()})
                message.content = RecordDict({**message.content, key: model})
                return replace(received, arrays={})  # training needs the room
        return None

    def _compress(
        self,
        base: dict[str, Array],
        trained: ArrayRecord,
        told: "_Told",
        received: Received | None,
        context: Context,
        weight: float,
    ) -> bytes:
        name, number = _node(context)
        request = told.request
        start = {key: array.numpy() for key, array in base.items()}
        new = {key: array.numpy() for key, array in trained.items()}
        order.warn_of_length(start, new, told.clipping)
        remembers = bool(request.feedback.slots)
        predictor = None if received is None else received.predictor
        update = compress(
            start,
            new,
            request.plan,
            round=request.round,
            rng=generator(request.seed, request.round, number),
            feedback=request.feedback,
            predictor=None if predictor is None else decompress(predictor, blank(start)),
            memory=self._recall(request, told.used(number), context, Layout.of(start)) if remembers else EMPTY,
            number=number if remembers and told.ack is None and _partition(context) is not None else None,
            unkept=received is not None and received.unkept,
            measured=request.norm,
            weight=weight,
            dither=None if told.place is None else (cohort_seed(request.seed, request.round), told.place),
        )
        if self.monitor is not None:
            decoded = decompress(update.frame, start, plan=request.plan)
            self._monitors.setdefault(name, Monitor(self.monitor)).observe(request.round, start, new, decoded)
        if remembers:
            self._remember(update, request, context, Layout.of(start))
        return update.frame

    def _recall(self, request: Request, acknowledged: int, context: Context, layout: Layout) -> Memory | None:
        """The memory that belongs to the last upload the server used. What belongs to others never happened."""
        training, name = _training(request, context), _node(context)[0]
        self.store.discard(training, name, but=acknowledged)
        return self.store.load(training, name, acknowledged, memory_layout(layout)) if acknowledged else EMPTY

    def _remember(self, update: CompressedUpdate, request: Request, context: Context, layout: Layout) -> None:
        training, name = _training(request, context), _node(context)[0]
        place = self.store.save(training, name, update.memory, memory_layout(layout), exact=request.feedback.exact)
        context.state[KEY] = ConfigRecord({"memory": place, "round": request.round})
        log.info("round %d: residual is %.3g times the update", request.round, update.residual_ratio)
        if update.notes.shortened:
            log.warning("round %d: the residual was longer than feedback %s allows", request.round, request.feedback)


compress_mod = CompressMod()
"""The mod with memories in files: works in deployment and in simulation, on as many processes as there are."""


@dataclass(frozen=True)
class _Told:
    """What the server says in the configuration of a train message. Read before user code, which may empty it.

    Attributes:
        request: what it asks for.
        ack: the last round in which it used an upload of this node; 0: none; None: it does not know this node.
        acks: the same by number, for clients that are gone and may be back as this node.
        place: of this client among those of the round, in [0, 1); None: not told.
        clipping: how long Flower's wrappers for client-side clipping say an update may be; None: they are not there.
    """

    request: Request
    ack: int | None
    acks: dict[int, int]
    place: float | None
    clipping: object = None

    @classmethod
    def of(cls, message: Message) -> "_Told | None":
        """None if the server asks for nothing, or for what this fedcomp cannot do."""
        for config in message.content.config_records.values():
            text, ack, listed = config.get(KEY), config.get(ACK), config.get(ACKS)
            request = _parse(text) if isinstance(text, str) else None
            if request is not None:
                numbers = _numbers(listed)
                acks = dict(zip(numbers[::2], numbers[1::2], strict=False))
                place = config.get(PLACE)
                at = place if isinstance(place, float) and 0 <= place < 1 else None
                return cls(request, ack if isinstance(ack, int) else None, acks, at, config.get(order.CLIPPING_NORM))
        return None

    def used(self, number: int) -> int:
        """The round of the last upload that the server used of the client with this number; 0: none."""
        return self.acks.get(number, 0) if self.ack is None else self.ack


def _numbers(listed: object) -> list[int]:
    """The integers in a list, or in the text that carries it where configurations hold no lists; else none."""
    found = listed.split() if isinstance(listed, str) else listed if isinstance(listed, list) else []
    try:
        return [int(number) for number in found]
    except ValueError:
        return []


def _weight(reply: Message, key: str) -> float:
    """What the reply weighs by its metric of that name; 1 if there is no such number."""
    found = [record[key] for record in reply.content.metric_records.values() if key in record]
    weight = found[0] if found else 1.0
    return float(weight) if isinstance(weight, int | float) and math.isfinite(weight) and weight >= 0 else 1.0


def _training(request: Request, context: Context) -> str:
    return f"{context.run_id}-{request.session}"


def _partition(context: Context) -> int | None:
    partition = context.node_config.get("partition-id")
    return partition if isinstance(partition, int) and partition >= 0 else None


def _node(context: Context) -> tuple[str, int]:
    """Name and number of this node: its partition where it has one, since node ids change when a SuperNode restarts."""
    partition = _partition(context)
    return (f"node-{context.node_id}", context.node_id) if partition is None else (f"partition-{partition}", partition)


@lru_cache(maxsize=4)  # in a simulation all clients of a round get the same text
def _parse(text: str) -> Request | None:
    try:
        return Request.from_text(text)
    except ConfigError as error:
        log.warning("the server asks for what this fedcomp cannot do, replying uncompressed: %s", error)
        return None
