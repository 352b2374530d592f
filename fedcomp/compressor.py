"""What a client and a server call: a model's update as one frame, and back. Knows nothing of Flower."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcomp import _validate, wire
from fedcomp.codec import Codec, Parts, Upload
from fedcomp.errors import BudgetError, ConfigError, LayoutError, UnboundedError
from fedcomp.feedback import EMPTY, Feedback, Memory, NoFeedback
from fedcomp.layout import Arrays, Layout, Tensor, Vector, check_finite, check_same_tensors
from fedcomp.metrics import length
from fedcomp.plan import Bucket, Plan, as_plan


def generator(seed: int, round: int, node: int) -> np.random.Generator:
    """Counter-based generator (Philox) for one node in one round: the same everywhere, independent between nodes.

    All three are non-negative; a node is best named by its partition, which survives restarts.
    """
    return np.random.Generator(np.random.Philox(np.random.SeedSequence((seed, round, node))))


def cohort_seed(seed: int, round: int) -> int:
    """Seed of what all clients of a round share."""
    return int(np.random.SeedSequence((seed, round)).generate_state(1, np.uint64)[0])


@dataclass(frozen=True)
class CompressedUpdate:
    """A compressed update.

    Attributes:
        frame: what travels.
        memory: what feedback must remember if the server uses the frame; without slots if the scheme needs nothing. It
            still holds what is remembered of tensors that travelled verbatim in this round.
        norm: length of the update that went in.
        notes: what the frame says about feedback and about the model that was sent.
    """

    frame: bytes
    memory: Memory
    norm: float
    notes: wire.Notes

    @property
    def residual_ratio(self) -> float:
        """Length of the residual in lengths of the update; 0 without a residual."""
        left = length(self.memory.slots.get("residual", {}).values())
        return left / self.norm if self.norm and left else 0.0


def compress(
    base: Arrays,
    new: Arrays,
    plan: Plan | Codec | str,
    *,
    round: int,
    rng: np.random.Generator,
    feedback: Feedback = NoFeedback(),  # noqa: B008  (frozen)
    memory: Memory | None = EMPTY,
    predictor: Mapping[str, Vector] | None = None,
    number: int | None = None,
    unkept: bool = False,
    measured: bool = False,
    weight: float = 1.0,
    dither: tuple[int, float] | None = None,
) -> CompressedUpdate:
    """Compress the update new - base of a model.

    Args:
        base: the tensors received from the server, by name.
        new: the tensors after training: same names and shapes in any order, perhaps other dtypes. Never written to.
        plan: which tensors get which codec; a codec or its text stands for a plan with defaults.
        round: server round, written into the frame.
        rng: source of all randomness, see `generator`.
        feedback: what makes up for losses.
        memory: what the last use of this function that the server acknowledged told to remember; EMPTY in the first
            round; None: it was lost, which the frame says.
        predictor: of CAFe, as the server sent it, by tensor name: every coded tensor's float32 array.
        number: introduces the client to the server.
        unkept: tells the server that the model it sent could not be kept here.
        measured: tells the server the length of the update of the coded tensors, rounded up to 8 bits; costs 2 bytes.
        weight: of this client in the mean, for codecs that share bytes out by it.
        dither: for stochastic rounding, see Upload.

    Raises LayoutError if names, shapes or dtypes do not fit, NonFiniteError (naming the tensor) for NaN or infinity,
    ConfigError for a feedback with a codec that it cannot go around, BudgetError for a budget that is too small. Then
    nothing has changed.
    """
    _validate.integer(low=0, high=2**32 - 1, round=round)
    plan = as_plan(plan)
    feedback.check(plan)
    check_same_tensors(base, new, "trained model")
    layout = Layout.of({name: new[name] for name in base})
    verbatim = {t.name: np.asarray(new[t.name]) for t in plan.verbatim(layout)}
    for name, values in verbatim.items():
        if values.dtype.kind == "f":
            check_finite(name, values)
    before, reset = _still_good(memory, feedback, round)
    notes = wire.Notes(predictor is not None, reset, False, number, unkept, 0.0 if measured else None)
    contents = wire.Contents(plan, layout, round, [], verbatim, notes)
    buckets = plan.buckets(layout)
    coded: dict[int, Parts] = {}
    after: dict[str, dict[str, Vector]] = {slot: {} for slot in feedback.slots}
    norm = 0.0
    for index in sorted(range(len(buckets)), key=lambda i: buckets[i].codec.limit(layout.size) is not None):
        bucket = buckets[index]
        x = _update(base, new, bucket)
        norm = math.hypot(norm, length([x]))
        slots = {slot: before.flat(slot, bucket.layout) for slot in feedback.slots}
        if predictor is not None:
            slots["predictor"] = _flat(predictor, bucket.layout)
        codec = _for_upload(contents, coded, index, Layout.of(base), weight, dither)
        coded[index], left = feedback.encode(codec, x, bucket.layout, slots, rng, age=max(1, round - before.round))
        for slot, values in left.items():
            after[slot] |= bucket.layout.unflatten(values)
    shortened = feedback.limit(after, norm)
    for slot, kept in after.items():
        kept |= _carried(before, slot, plan.verbatim(layout))
    notes = replace(notes, shortened=shortened, norm=wire.Notes.rounded_up(norm) if measured else None)
    contents = replace(contents, parts=[coded[index] for index in range(len(buckets))], notes=notes)
    frame = wire.pack(contents, Layout.of(base))
    for limit in _limits(plan, layout):
        if len(frame) > limit:
            raise _too_small(limit, len(frame))
    return CompressedUpdate(frame, Memory(round, after), norm, notes)


def _limits(plan: Plan, layout: Layout) -> list[int]:
    """Of the plan's codecs, used or not."""
    return [limit for codec in plan.codecs() if (limit := codec.limit(layout.size)) is not None]


def _too_small(limit: int, least: int) -> BudgetError:
    return BudgetError(
        f"budget of {limit} bytes: the smallest upload for this model takes {least}; raise the budget, or send "
        "fewer tensors verbatim"
    )


@lru_cache(maxsize=16)
def smallest_frame(plan: Plan, layout: Layout) -> int:
    """Bytes that a frame takes at most, if the codec with a budget takes as few as it can.

    Verbatim tensors count uncompressed, and there is a dtype table, since servers widen dtypes. Notes on feedback do
    not count. 0 for a plan without a budget.
    """
    if not _limits(plan, layout):
        return 0
    buckets = plan.buckets(layout)
    rng = np.random.default_rng(0)
    parts = [
        b.codec.encode(np.zeros(b.layout.size, np.float32), b.layout, rng)
        if b.codec.limit(layout.size) is None
        else b.codec.least(b.layout)
        for b in buckets
    ]
    verbatim = {t.name: np.zeros(t.shape, t.dtype) for t in plan.verbatim(layout)}
    base = layout.with_dtypes("bool" for _ in layout.tensors)  # other dtypes: so there is a table
    return len(wire.pack(wire.Contents(plan, layout, 2**14, parts, verbatim), base, deflate=False))


def _for_upload(
    contents: wire.Contents,
    coded: Mapping[int, Parts],
    index: int,
    base: Layout,
    weight: float,
    dither: tuple[int, float] | None,
) -> Codec:
    """The codec of a bucket; if it has a budget, which comes last, it is told the room that the others leave.

    Raises BudgetError if that is not enough.
    """
    buckets = contents.plan.buckets(contents.layout)
    codec, layout = buckets[index].codec, buckets[index].layout
    limit = codec.limit(contents.layout.size)
    if limit is None:
        return codec
    if len(coded) < len(buckets) - 1:
        raise ConfigError("plan: expected one codec with a budget, got several; a budget is for the whole upload")
    least = codec.least(layout)
    parts = [least if other == index else coded[other] for other in range(len(buckets))]
    whole = len(wire.pack(replace(contents, parts=parts), base))
    if whole > limit:
        raise _too_small(limit, whole)
    return codec.for_upload(Upload(limit - whole + len(wire.write_parts(least, buckets[index])), weight, dither))


def _still_good(memory: Memory | None, feedback: Feedback, round: int) -> tuple[Memory, bool]:
    """The memory to start from, and whether one was lost or is too old."""
    if memory is None:
        return EMPTY, True
    limit = getattr(feedback, "max_age", 0)
    too_old = bool(limit and memory.slots and round - memory.round > limit)
    return (EMPTY, True) if too_old else (memory, False)


def _carried(memory: Memory, slot: str, tensors: list[Tensor]) -> dict[str, Vector]:
    """What is remembered of tensors that travel verbatim in this round, by name: it stays as it is.

    Their updates arrive whole, so they neither add to what is owed from earlier rounds nor pay any of it.
    """
    known = Layout(tuple(t for t in tensors if t.name in memory.slots.get(slot, {})))
    return known.unflatten(memory.flat(slot, known))


def _flat(predictor: Mapping[str, Vector], layout: Layout) -> Vector:
    for tensor in layout.tensors:
        if tensor.name not in predictor or predictor[tensor.name].shape != tensor.shape:
            raise LayoutError(f"predictor: tensor {tensor.name!r} is missing or not of shape {tensor.shape}")
    return np.concatenate([np.zeros(0, np.float32), *(predictor[t.name].ravel() for t in layout.tensors)])


def decompress(
    frame: bytes, base: Arrays, *, plan: Plan | None = None, round: int | None = None
) -> dict[str, NDArray[Any]]:
    """The client's model: base plus the update in the frame, in the dtypes of the client's reply and base's order.

    Args:
        frame: bytes made by `compress`.
        base: the tensors that were sent to this client.
        plan, round: what was asked for; a frame that differs is refused. None: anything goes.

    Raises FrameError for a frame that is damaged or meant for something else, or if the model would not be finite.
    """
    return apply(wire.unpack(frame, Layout.of(base), plan=plan, round=round), base)


def apply(contents: wire.Contents, base: Arrays) -> dict[str, NDArray[Any]]:
    """The model that an unpacked frame stands for, see decompress. Raises FrameError if it would not be finite."""
    model = dict(contents.verbatim)
    for bucket, parts in zip(contents.plan.buckets(contents.layout), contents.parts, strict=True):
        update = bucket.layout.unflatten(bucket.codec.decode(parts, bucket.layout))
        for tensor in bucket.layout.tensors:
            model[tensor.name] = _apply(base[tensor.name], update[tensor.name], tensor.name, tensor.dtype)
    return {name: model[name] for name in base}


def difference(new: NDArray[Any], base: NDArray[Any]) -> NDArray[Any]:
    """new - base of a tensor, in float64 if the new one is that, else in float32; infinite where it does not fit.

    The base counts in the new one's dtype, so that what a client was sent in another dtype is no update.
    """
    dtype = new.dtype.newbyteorder("=")
    wide = np.float64 if dtype == np.float64 else np.float32
    start = base.astype(dtype, copy=False).astype(wide, copy=False)
    with np.errstate(over="ignore", invalid="ignore"):
        moved: NDArray[Any] = np.subtract(new, start, dtype=wide)
    return moved


def total(base: NDArray[Any], update: Vector, dtype: str) -> NDArray[Any]:
    """base + update of a tensor in the dtype, added in float64 if it is that, else in float32; perhaps infinite."""
    wide = np.float64 if dtype == "float64" else np.float32
    with np.errstate(over="ignore", invalid="ignore"):
        return np.asarray(np.add(base.astype(dtype, copy=False), update, dtype=wide), dtype)


def _update(base: Arrays, new: Arrays, bucket: Bucket) -> Vector:
    """new - base of the bucket's tensors as one float32 vector."""
    out = np.empty(bucket.layout.size, np.float32)
    with np.errstate(over="ignore"):  # found by the codec's check, which names the tensor
        for tensor, where in bucket.layout.slices():
            out[where] = difference(new[tensor.name], base[tensor.name]).ravel()
    return out


def _apply(base: NDArray[Any], update: Vector, name: str, dtype: str) -> NDArray[Any]:
    model = total(base, update, dtype)
    if not np.isfinite(model).all():
        raise UnboundedError(f"tensor {name!r}: the decoded model is not finite in {dtype}")
    return model
