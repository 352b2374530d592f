"""The mod that compresses a ClientApp's train replies: ``ClientApp(mods=[compress_mod])`` is all a client needs.

Put size mods before it (they see the compressed size), clipping and local privacy mods after it (the clipped, noised
update is what gets compressed).
"""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp.typing import ClientAppCallable

from fedcomp import (
    CAFe,
    CompressedUpdate,
    FedcompError,
    Feedback,
    Layout,
    LayoutError,
    Memory,
    Plan,
    compress,
    decompress,
    generator,
)
from fedcomp.compressor import cohort_seed, total
from fedcomp.feedback import EMPTY
from fedcomp.feedback.cafe import blank
from fedcomp.feedback.stored import memory_layout
from fedcomp.monitor import Monitor, Sink
from fedcomp.request import DECLINED, KEY, Request, has_floats
from fedcomp_clients import order
from fedcomp_clients.compact import compacted, evaluate, package_in, unpacked, with_frame
from fedcomp_clients.downlink import FileModelCache, ModelCache, Received, receive
from fedcomp_clients.node import node_of, partition_of
from fedcomp_clients.records import of_kind, to_numpy, to_record
from fedcomp_clients.state import FileStore, StateStore
from fedcomp_clients.told import Told, first_time

log = logging.getLogger("fedcomp")

_SECURE_AGGREGATION = "secaggplus_configs"  # name of the record that Flower's SecAgg+ adds to its messages


@dataclass(frozen=True)
class Upload:
    """What a client is about to upload, for whoever observes it.

    Attributes:
        round: of the server.
        base, new: the model received and the model trained, arrays by tensor name.
        update: the frame, and how long update and residual are.
        decoded: makes the model that the server will take for `new`; costs one decoding.
    """

    round: int
    base: dict[str, np.ndarray[Any, Any]]
    new: dict[str, np.ndarray[Any, Any]]
    update: CompressedUpdate
    decoded: Callable[[], dict[str, np.ndarray[Any, Any]]]


class CompressMod:
    """A Flower mod; the server decides the codec, and without its request the reply stays as it is.

    Args:
        store: where feedback keeps what it must remember; None: files, see FileStore.
        monitor: called with statistics of each tensor's update and what its frame makes of it; costs one decoding.
        models: where the model is kept that the server's next differences apply to; None: files, see FileModelCache.
        observer: called with every upload before it is sent.
    """

    def __init__(
        self,
        store: StateStore | None = None,
        monitor: Sink | None = None,
        models: ModelCache | None = None,
        observer: Callable[[Upload], None] | None = None,
    ) -> None:
        self.store = store or FileStore()
        self.models = models or FileModelCache()
        self.monitor = monitor
        self.observer = observer
        self._monitors: dict[str, Monitor] = {}
        self._evaluation: ClientAppCallable | None = None

    def evaluates(self, function: ClientAppCallable) -> ClientAppCallable:
        """Have this function evaluate the received model within train messages, if the server wants that.

        Then a round costs one message instead of two. Used beside Flower's own decorator; a process with several apps
        needs a CompressMod for each:

            @app.evaluate()
            @compress_mod.evaluates
            def evaluate(message, context): ...
        """
        if self._evaluation is not None and self._evaluation.__module__ != function.__module__:
            log.warning(
                "%s takes the place of %s in evaluations along with training; give each app a CompressMod of its own",
                function.__qualname__, self._evaluation.__qualname__,
            )  # fmt: skip
        self._evaluation = function
        return function

    def __call__(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        """Train, then replace the model in the reply by one frame with its update.

        Raises NonFiniteError if the trained model holds NaN or infinity, FedcompError if the residual cannot be stored
        or the server aggregates securely: Flower turns all into an error reply of this client. What merely does not fit
        is sent plainly, with a warning. So it does with StaleModelError, if the server sent differences to a model that
        is not here any more.
        """
        received = self._unpack(message, context)
        told = Told.of(message)
        if told is None:
            return call_next(message, context)
        if isinstance(message.content.get(_SECURE_AGGREGATION), ConfigRecord):
            raise FedcompError(
                "compression and secure aggregation exclude each other: masked updates can only be summed, and frames "
                "must be decoded one by one; use Flower's own strategy, or no secure aggregation"
            )
        if told.request is None:
            return _declined(call_next(message, context), told, context)
        models = of_kind(message.content, ArrayRecord)
        if len(models) != 1:
            return call_next(message, context)
        base = dict(next(iter(models.values())))  # user code may empty the record itself
        if not has_floats(base):  # trees, counters: nothing to compress
            return call_next(message, context)
        order.check_outer()
        evaluation = self._evaluate(message, told, context)
        reply = call_next(message, context)
        found = {} if reply.has_error() else of_kind(reply.content, ArrayRecord)
        if len(found) != 1:
            return reply
        key, trained = next(iter(found.items()))
        if not has_floats(trained):  # such as a legacy client that declines: its reason is in the status
            return reply
        try:
            frame, own = self._compress(base, trained, told, received, context, _weight(reply, told.request.weight))
        except LayoutError as error:
            log.warning("update sent uncompressed: %s", error)
            return reply
        if told.compact and KEY not in reply.content:  # a record of the app's own
            reply.content = compacted(reply.content, key, frame, evaluation, own)
        else:
            reply.content = with_frame(reply.content, key, frame, own)
        return reply

    def _unpack(self, message: Message, context: Context) -> Received | None:
        """Put the model in the place of a package, whatever the message is for. Returns what else it brought."""
        found = package_in(message.content)
        if found is None:
            return None
        key, package = found
        received = receive(package, self.models, str(context.run_id), node_of(context)[0])
        message.content = unpacked(message.content, key, to_record(received.arrays))
        return replace(received, arrays={})  # training needs the room

    def _evaluate(self, message: Message, told: Told, context: Context) -> RecordDict | None:
        """What the app says of the received model, if the server wants to know and the app can tell."""
        if told.evaluate is None or not told.compact or self._evaluation is None:
            return None
        return evaluate(message, told.evaluate, context, self._evaluation)

    def _compress(
        self,
        base: dict[str, Array],
        trained: ArrayRecord,
        told: Told,
        received: Received | None,
        context: Context,
        weight: float,
    ) -> tuple[bytes, bool]:
        """The frame, and whether it keeps to a budget of this node's own."""
        name, number = node_of(context)
        request = told.request
        assert request is not None
        start = {key: to_numpy(array) for key, array in base.items()}
        new = {key: to_numpy(array) for key, array in trained.items()}
        if (said := order.unclipped(start, new, told.clipping)) and first_time(context, "clipping"):
            log.warning("%s", said)
        layout, remembers = Layout.of(start), bool(request.feedback.slots)
        plan = told.plan(context, layout.size)
        packed = None if received is None else received.predictor
        predictor = None if packed is None else decompress(packed, blank(start))
        update = compress(
            start,
            new,
            plan,
            round=request.round,
            rng=generator(request.seed, request.round, number),
            feedback=request.feedback,
            predictor=predictor,
            memory=self._recall(request, told.used(number), context, layout) if remembers else EMPTY,
            number=number if remembers and told.ack is None and partition_of(context) is not None else None,
            unkept=received is not None and received.unkept,
            measured=request.norm,
            weight=weight,
            dither=None if told.place is None else (cohort_seed(request.seed, request.round), told.place),
        )
        if (most := told.exceeded(context, layout.size, len(update.frame))) and first_time(context, "budget"):
            log.warning("this upload takes %d bytes, fedcomp-budget allows %d: only auto keeps to it", *most)
        decoded = partial(_decoded, update.frame, start, plan, request.feedback, predictor)
        if self.monitor is not None:
            self._monitors.setdefault(name, Monitor(self.monitor)).observe(request.round, start, new, decoded())
        if self.observer is not None:
            self.observer(Upload(request.round, start, new, update, decoded))
        if remembers:
            self._remember(update, request, context, layout)
        return update.frame, plan != request.plan

    def _recall(self, request: Request, acknowledged: int, context: Context, layout: Layout) -> Memory | None:
        """The memory that belongs to the last upload the server used. What belongs to others never happened."""
        training, name = _training(request, context), node_of(context)[0]
        self.store.discard(training, name, but=acknowledged)
        return self.store.load(training, name, acknowledged, memory_layout(layout)) if acknowledged else EMPTY

    def _remember(self, update: CompressedUpdate, request: Request, context: Context, layout: Layout) -> None:
        training, name = _training(request, context), node_of(context)[0]
        place = self.store.save(training, name, update.memory, memory_layout(layout), exact=request.feedback.exact)
        context.state[KEY] = ConfigRecord({"memory": place, "round": request.round})
        log.info("round %d: residual is %.3g times the update", request.round, update.residual_ratio)
        if update.notes.shortened:
            log.warning("round %d: the residual was longer than feedback %s allows", request.round, request.feedback)


compress_mod = CompressMod()
"""The mod with memories in files: works in deployment and in simulation, on as many processes as there are."""


def _decoded(
    frame: bytes,
    base: dict[str, np.ndarray[Any, Any]],
    plan: Plan,
    feedback: Feedback,
    predictor: dict[str, np.ndarray[Any, Any]] | None,
) -> dict[str, np.ndarray[Any, Any]]:
    """The model that the server will take for this client's, with what it adds to the decoded update by itself."""
    model = decompress(frame, base, plan=plan)
    if predictor is None or not isinstance(feedback, CAFe):
        return model
    exact = {tensor.name for tensor in plan.verbatim(Layout.of(base))}
    foretold = {name: values for name, values in predictor.items() if name not in exact}
    return model | {name: total(model[name], np.float32(feedback.beta) * x, "float32") for name, x in foretold.items()}


def _weight(reply: Message, key: str) -> float:
    """What the reply weighs by its metric of that name; 1 if there is no such number."""
    found = [record[key] for record in of_kind(reply.content, MetricRecord).values() if key in record]
    weight = found[0] if found else 1.0
    return float(weight) if isinstance(weight, int | float) and math.isfinite(weight) and weight >= 0 else 1.0


def _declined(reply: Message, told: Told, context: Context) -> Message:
    """The plain reply of a client that cannot do what the server asks for, with the reason, which is logged once."""
    if first_time(context, "declined"):
        log.warning("the server asks for what this fedcomp cannot do, replying uncompressed: %s", told.declined)
    if told.compact and not reply.has_error():
        reply.content = RecordDict({**reply.content, DECLINED: ConfigRecord({"reason": told.declined})})
    return reply


def _training(request: Request, context: Context) -> str:
    return f"{context.run_id}-{request.session}"
