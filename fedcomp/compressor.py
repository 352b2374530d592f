"""What a client and a server call: a model's update as one frame, and back. Knows nothing of Flower."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcomp import _validate, wire
from fedcomp.codec import Codec, Parts
from fedcomp.errors import FrameError
from fedcomp.feedback import ErrorFeedback, Residual
from fedcomp.layout import Arrays, Layout, Vector, check_finite, check_same_tensors
from fedcomp.plan import Bucket, Plan, as_plan


def generator(seed: int, round: int, node: int) -> np.random.Generator:
    """Counter-based generator (Philox) for one node in one round: the same everywhere, independent between nodes.

    All three are non-negative; a node is best named by its partition, which survives restarts.
    """
    return np.random.Generator(np.random.Philox(np.random.SeedSequence((seed, round, node))))


@dataclass(frozen=True)
class CompressedUpdate:
    """A compressed update: `frame` is what travels, `residual` what error feedback must remember (empty without)."""

    frame: bytes
    residual: dict[str, Vector]


def compress(
    base: Arrays,
    new: Arrays,
    plan: Plan | Codec | str,
    *,
    round: int,
    rng: np.random.Generator,
    residual: Residual | None = None,
) -> CompressedUpdate:
    """Compress the update new - base of a model.

    Args:
        base: the tensors received from the server, by name.
        new: the tensors after training: same names and shapes in any order, perhaps other dtypes. Never written to.
        plan: which tensors get which codec; a codec or its text stands for a plan with defaults.
        round: server round, written into the frame.
        rng: source of all randomness, see `generator`.
        residual: memory of error feedback, {} in the first round; None: no error feedback.

    Raises LayoutError if names, shapes or dtypes do not fit, NonFiniteError (naming the tensor) for NaN or infinity,
    ConfigError for error feedback around a codec that is not contractive. Then nothing has changed.
    """
    _validate.integer(low=0, high=2**32 - 1, round=round)
    plan = as_plan(plan)
    check_same_tensors(base, new, "trained model")
    layout = Layout.of({name: new[name] for name in base})
    verbatim = {t.name: np.asarray(new[t.name]) for t in plan.verbatim(layout)}
    for name, values in verbatim.items():
        if values.dtype.kind == "f":
            check_finite(name, values)
    parts: list[Parts] = []
    remembered: dict[str, Vector] = {}
    for bucket in plan.buckets(layout):
        x = _update(base, new, bucket)
        if residual is None:
            parts.append(bucket.codec.encode(x, bucket.layout, rng))
        else:
            coded, left = ErrorFeedback(bucket.codec).encode(x, bucket.layout, residual, rng)
            parts.append(coded)
            remembered |= left
    contents = wire.Contents(plan, layout, round, parts, verbatim)
    return CompressedUpdate(wire.pack(contents, Layout.of(base)), remembered)


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
    contents = wire.unpack(frame, Layout.of(base), plan=plan, round=round)
    model = dict(contents.verbatim)
    for bucket, parts in zip(contents.plan.buckets(contents.layout), contents.parts, strict=True):
        update = bucket.layout.unflatten(bucket.codec.decode(parts, bucket.layout))
        for tensor in bucket.layout.tensors:
            model[tensor.name] = _apply(base[tensor.name], update[tensor.name], tensor.name, tensor.dtype)
    return {name: model[name] for name in base}


def _update(base: Arrays, new: Arrays, bucket: Bucket) -> Vector:
    """new - base of the bucket's tensors as one float32 vector; the base counts in the reply's dtype."""
    out = np.empty(bucket.layout.size, np.float32)
    with np.errstate(over="ignore", invalid="ignore"):  # found by the codec's check, which names the tensor
        for tensor, where in bucket.layout.slices():
            wide = np.float64 if tensor.dtype == "float64" else np.float32
            start = base[tensor.name].astype(tensor.dtype).astype(wide, copy=False)
            out[where] = np.subtract(new[tensor.name], start, dtype=wide).ravel()
    return out


def _apply(base: NDArray[Any], update: Vector, name: str, dtype: str) -> NDArray[Any]:
    wide = np.float64 if dtype == "float64" else np.float32
    with np.errstate(over="ignore", invalid="ignore"):
        model: NDArray[Any] = np.asarray(np.add(base.astype(dtype), update, dtype=wide), dtype)
    if not np.isfinite(model).all():
        raise FrameError(f"tensor {name!r}: the decoded model is not finite in {dtype}")
    return model
