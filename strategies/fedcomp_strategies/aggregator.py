"""Aggregator: the weighted mean of many clients' frames, without a dense model for any of them.

`add` only collects. `mean` goes through the replies in the order of their nodes, so that no bit of the result hangs on
the order of arrival, and adds one after the other to one running sum: beside the replies themselves, memory holds the
sum and the parts of one reply.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fedcomp import _validate, decompress, wire
from fedcomp.codecs.sketch import CountSketch, sketch
from fedcomp.compressor import apply, difference, total
from fedcomp.device import resolve, running_sum
from fedcomp.errors import ConfigError, FedcompError, FrameError, LayoutError
from fedcomp.layout import Arrays, Layout, Vector, check_finite, check_same_tensors
from fedcomp.metrics import length
from fedcomp.plan import Bucket, Plan
from fedcomp.terms import MAX, Values, peak
from fedcomp.wire import Contents

LARGEST_WEIGHT = 1e18
_LOST = 2.0**-20  # share of the weight below which what is left is summed again, or small numbers would lose bits
_MARGIN = 0.99  # of the room above the base's values: bounds are rounded too

Array: TypeAlias = NDArray[Any]


@dataclass(frozen=True)
class Mean:
    """The weighted mean of what clients sent.

    Attributes:
        update: of each coded tensor the mean update, float32, by name.
        verbatim: of each other tensor the mean of the values (not updates), float64.
        largest: of each tensor that is an integer or boolean in all replies the elementwise maximum, in their dtype.
        dtypes: the replies' dtype of each tensor; where they differ, what numpy promotes them to.
        weight: sum of the weights of the replies that were used. 0: updates are zero, and nothing is verbatim.
        tables: of each bucket whose sketches were added instead, by its place in plan.buckets: the mean table, flat.
        contents: of each frame that was used, by node, what it said besides parts and verbatim values.
        levels: of each of these the step that it was coded at, see `level_of`.
        failed: why the other replies were left out, by node.
    """

    update: dict[str, Vector]
    verbatim: dict[str, Array]
    largest: dict[str, Array]
    dtypes: dict[str, str]
    weight: float
    tables: dict[int, Vector]
    contents: dict[int, Contents]
    levels: dict[int, float]
    failed: dict[int, FedcompError]

    def model(self, base: Arrays, integers: str = "mean") -> dict[str, Array]:
        """The mean model, see `tensors`."""
        return dict(self.tensors(base, integers))

    def tensors(self, base: Arrays, integers: str = "mean") -> Iterator[tuple[str, Array]]:
        """The tensors of the mean model one by one: base plus mean update, in the replies' dtypes and base's order.

        Those of which there is neither an update nor a value stay as they are in the base.

        Args:
            base: what the update is added to: a model with the same tensors.
            integers: "mean" makes float64 means of integers and booleans, as Flower's FedAvg does; "max" keeps their
                dtype and takes the largest of the replies.
        """
        _validate.one_of(choices=("mean", "max"), integers=integers)
        for name, start in base.items():
            dtype = self.dtypes.get(name, start.dtype.name)
            if name in self.update:
                yield name, total(start, self.update[name], dtype)
            elif name not in self.verbatim:
                yield name, np.array(start)
            elif name in self.largest:
                yield name, (self.verbatim if integers == "mean" else self.largest)[name]
            else:
                yield name, self.verbatim[name].astype(dtype)


class Aggregator:
    """Collects the replies of one round and takes their weighted mean.

    Args:
        base: the model that clients were sent: names, shapes, and what uncompressed replies are compared with.
        plan: what clients were asked for; frames made with another plan are left out.
        round: the server's round, likewise.
        device: where to sum: "auto", "cpu", "cuda", "cuda:1" or "mps".
        exact: names of tensors that are integers, whatever the base's dtype: Flower's strategies make floats of them,
            which clients turn back.
        tables: add up the tables of buckets coded by `sketch`, instead of what they decode to.

    >>> from fedcomp import TopK, compress, generator
    >>> base = {"w": np.zeros(100, np.float32)}
    >>> plan = Plan(TopK(k=1))
    >>> aggregator = Aggregator(base, plan, round=1)
    >>> for node in (1, 3):
    ...     new = {"w": np.eye(1, 100, node, dtype=np.float32)[0]}
    ...     aggregator.add(compress(base, new, plan, round=1, rng=generator(0, 1, node)).frame, node, node=node)
    >>> aggregator.mean().model(base)["w"][:4].tolist()
    [0.0, 0.25, 0.0, 0.75]

    Attributes:
        buckets: the tensors that are coded together, by codec.

    Raises ConfigError for a device that is not there, or for tables of sketches that do not share a seed.
    """

    def __init__(
        self,
        base: Arrays,
        plan: Plan,
        *,
        round: int,
        device: str = "auto",
        tables: bool = False,
        exact: Collection[str] = (),
    ) -> None:
        if tables and any(isinstance(codec, CountSketch) and codec.seed == 0 for codec in plan.codecs()):
            raise ConfigError("tables: sketches with seed=0 cannot be added; give them all the same seed")
        self._base, self._plan, self._round, self._tables = base, plan, round, tables
        self._device = resolve(device)
        self._layout = Layout.of(base)
        dtypes = ("int64" if t.name in exact and t.is_float else t.dtype for t in self._layout.tensors)
        self._kinds = plan.assign(meant := self._layout.with_dtypes(dtypes))
        self.buckets = plan.buckets(meant)
        self._replies: dict[int, tuple[float, bytes | Arrays]] = {}
        self._shifts: list[tuple[int, float, Mapping[str, Vector]]] = []
        self._known_limits: dict[Layout, list[float]] = {}

    def add(self, frame: bytes, weight: float, *, node: int) -> None:
        """Take the frame of a node with a weight from 0 to 1e18; what is wrong with the frame is found by `mean`.

        Raises ConfigError for another weight, or if the node has replied already.
        """
        self._take(frame, weight, node)

    def add_plain(self, model: Arrays, weight: float, *, node: int) -> None:
        """Take the uncompressed model of a node, likewise. It must not change before `mean`."""
        self._take(model, weight, node)

    def add_update(self, update: Mapping[str, Vector], weight: float, *, node: int) -> None:
        """Add weight times an update of some coded tensors, if the reply of the node is used.

        That may be a predictor that the node's frame is relative to. The weight counts towards no total. Nodes may
        share one mapping, which then is added once for all of them.
        """
        self._shifts.append((node, float(weight), update))

    def _take(self, content: bytes | Arrays, weight: float, node: int) -> None:
        if not 0 <= weight <= LARGEST_WEIGHT:  # NaN fails both
            raise ConfigError(f"weight of node {node}: expected 0 to {LARGEST_WEIGHT:g}, got {weight}")
        if node in self._replies:
            raise ConfigError(f"node {node} has replied already; a node counts once in a round")
        self._replies[node] = float(weight), content

    def mean(self) -> Mean:
        """The mean of the replies that are good, summed in the order of their nodes.

        A reply is left out, and told of in `failed`, if its frame is damaged or of another plan, round or model, or if
        its model would not be finite.
        """
        failed: dict[int, FedcompError] = {}
        while True:
            before = self._weight(failed)
            mean, suspects = self._sum(failed)
            culprits = {node: fault for node in suspects if (fault := self._fault(node)) is not None}
            failed |= culprits
            if not culprits and mean.weight >= _LOST * before:
                return mean

    def norms(self, mean: Mean) -> dict[int, float]:
        """The lengths of the updates in the mean, over the coded tensors, by node.

        Those of frames are as the frames note them, and frames without a note are left out; others are measured.
        """
        norms: dict[int, float] = {}
        for node in sorted(self._replies.keys() - mean.failed.keys()):
            _, content = self._replies[node]
            if not isinstance(content, bytes):
                names = [tensor.name for bucket in self.buckets for tensor in bucket.layout.tensors]
                norms[node] = length(_difference(content[name], self._base[name]) for name in names)
            elif (noted := mean.contents[node].notes.norm) is not None:
                norms[node] = noted
        return norms

    def _weight(self, failed: Mapping[int, FedcompError]) -> float:
        return math.fsum(weight for node, (weight, _) in self._replies.items() if node not in failed)

    def _sum(self, failed: dict[int, FedcompError]) -> tuple[Mean, list[int]]:
        """The mean of all replies but the failed ones, and the nodes of those whose model might not be finite.

        Replies that cannot be read are added to the failed ones.
        """
        everything = self._weight(failed)
        # A power of two, so that what failed replies weigh changes no bit; within what float64 can undo.
        scale = math.ldexp(1.0, min(-math.frexp(everything)[1], 1000))
        sums = [_BucketSum(bucket, self._device, self._tables) for bucket in self.buckets]
        values, contents, suspects = _Values(), dict[int, Contents](), list[int]()
        levels: dict[int, float] = {}
        for node in sorted(self._replies.keys() - failed.keys()):
            weight, content = self._replies[node]
            try:
                opened = self._open(content)
            except FedcompError as error:
                failed[node] = error
                continue
            values.add(opened, weight * scale)
            bounds = [bucket.add(opened, index, weight * scale) for index, bucket in enumerate(sums)]
            if any(bound > limit for bound, limit in zip(bounds, self._limits(opened.layout), strict=True)):
                suspects.append(node)
            if (said := opened if isinstance(opened, Contents) else opened.contents) is not None:
                levels[node] = level_of(said)
                contents[node] = replace(said, parts=[], verbatim={})
        for shift, weight in self._shared_shifts(failed):
            for bucket in sums:
                bucket.add_vectors(shift.get, weight * scale)
        used = self._weight(failed)
        factor = 1 / (used * scale) if used else 0.0
        means = [_times(bucket.sum.result(), factor) for bucket in sums]
        updates = [b.layout.unflatten(mean) for b, mean in zip(sums, means, strict=True) if not b.raw]
        mean = Mean(
            update={name: x for update in updates for name, x in update.items()},
            # Divided, so that integers on which all agree come out exactly: clients cut off what is behind the point.
            verbatim={name: np.asarray(x / (used * scale)) for name, x in values.totals.items()} if used else {},
            largest=values.integers(),
            dtypes=values.dtypes(),
            weight=used,
            tables={index: mean for index, mean in enumerate(means) if sums[index].raw},
            contents=contents,
            levels=levels,
            failed=failed,
        )
        return mean, suspects

    def _open(self, content: bytes | Arrays) -> "Contents | _Plain":
        """A checked reply. Raises FedcompError."""
        if isinstance(content, bytes):
            contents = wire.unpack(content, self._layout, plan=self._plan, round=self._round)
            if self._plan.assign(contents.layout) == self._kinds:
                return contents
            return self._as_plain(apply(contents, self._base), contents)
        check_same_tensors(self._base, content, "uncompressed reply")
        for name, values in content.items():
            if values.dtype.kind == "f":
                check_finite(name, values)
        return self._as_plain(content, None)

    def _as_plain(self, model: Arrays, contents: Contents | None) -> "_Plain":
        """A model whose tensors may be of unusual kinds. Raises FrameError for floats that were made integers."""
        layout = Layout.of({name: model[name] for name in self._base})
        for tensor, codec in zip(layout.tensors, self._kinds, strict=True):
            widened = self._base[tensor.name].dtype == np.float64  # as Flower does with integers
            if codec is not None and not tensor.is_float and not widened:
                raise FrameError(
                    f"tensor {tensor.name!r} came as {tensor.dtype}, expected floating-point numbers; clients must not "
                    "turn floating-point tensors into integers"
                )
        verbatim = {t.name: model[t.name] for t, c in zip(layout.tensors, self._kinds, strict=True) if c is None}
        return _Plain(layout, verbatim, self._base, model, contents)

    def _limits(self, layout: Layout) -> list[float]:
        """For each bucket a magnitude that may be added to all values of the base in the replies' dtypes."""
        if layout not in self._known_limits:
            dtypes = {t.name: t.dtype if t.is_float else self._base[t.name].dtype.name for t in layout.tensors}
            self._known_limits[layout] = [
                min(_room(self._base[t.name], dtypes[t.name]) for t in bucket.layout.tensors) for bucket in self.buckets
            ]
        return self._known_limits[layout]

    def _fault(self, node: int) -> FedcompError | None:
        """Why the model of a node is not finite, if it is not: found by decoding it whole."""
        _, content = self._replies[node]
        try:
            if isinstance(content, bytes):
                decompress(content, self._base, plan=self._plan, round=self._round)
            else:
                _check_difference(self._base, content)
        except FedcompError as error:
            return error
        return None

    def _shared_shifts(self, failed: Mapping[int, FedcompError]) -> list[tuple[Mapping[str, Vector], float]]:
        """Each update once with the weight of all nodes that are used, in the order of the nodes."""
        found: dict[int, tuple[Mapping[str, Vector], list[float]]] = {}
        for node, weight, update in sorted(self._shifts, key=lambda shift: shift[0]):
            if node in self._replies and node not in failed:
                found.setdefault(id(update), (update, []))[1].append(weight)
        return [(update, math.fsum(weights)) for update, weights in found.values()]


def level_of(contents: Contents) -> float:
    """The step that a codec with a budget has coded a frame at; 0 if there is none."""
    buckets = zip(contents.plan.buckets(contents.layout), contents.parts, strict=True)
    return max((bucket.codec.level(parts, bucket.layout) for bucket, parts in buckets), default=0.0)


# --- sums ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Plain:
    """A reply as a whole model that has been checked: an uncompressed one, or one with tensors of unusual kinds."""

    layout: Layout
    verbatim: dict[str, Array]
    base: Arrays
    model: Arrays
    contents: Contents | None  # of the frame that it came in, if any

    def update(self, name: str) -> Vector:
        """What the client adds to a tensor."""
        return _difference(self.model[name], self.base[name])


class _BucketSum:
    """The running sum of what a bucket's codec decodes to, or of the tables of its sketches (`raw`)."""

    def __init__(self, bucket: Bucket, device: str, tables: bool) -> None:
        self.codec, self.layout = bucket.codec, bucket.layout
        self.raw = tables and isinstance(bucket.codec, CountSketch)
        size = self.layout.size
        if tables and isinstance(self.codec, CountSketch):
            size = self.codec.rows * self.codec.width(size)
        self.sum = running_sum(size, device)

    def add(self, opened: Contents | _Plain, index: int, share: float) -> float:
        """Add a share of a reply, of which this is bucket `index`; returns what none of its magnitudes exceeds."""
        if isinstance(opened, _Plain):
            return self.add_vectors(opened.update, share)
        parts = opened.parts[index]
        if self.raw:
            return self.sum.add([_whole(parts["table"])], share)
        return self.sum.add(self.codec.terms(parts, self.layout), share)

    def add_vectors(self, vectors: Callable[[str], Vector | None], share: float) -> float:
        """Likewise of the tensors that a function has for some names."""
        if not (self.raw and isinstance(self.codec, CountSketch)):
            return self.sum.add(self._terms(vectors), share)
        x = np.zeros(self.layout.size, np.float32)
        for term in self._terms(vectors):
            x[term.where] = term.values
        table = sketch(x, self.codec.rows, self.codec.width(x.size), self.codec.seed)
        return self.sum.add([_whole(table.astype(np.float32).ravel())], share)

    def _terms(self, vectors: Callable[[str], Vector | None]) -> Iterator[Values]:
        for tensor, where in self.layout.slices():
            values = vectors(tensor.name)
            if values is not None:
                yield Values(where, np.ascontiguousarray(values, np.float32).reshape(-1))


class _Values:
    """Means of verbatim tensors in float64, the largest of their integers, and the dtypes of all tensors."""

    def __init__(self) -> None:
        self.totals: dict[str, Array] = {}
        self.largest: dict[str, Array] = {}
        self._layouts: set[Layout] = set()

    def add(self, opened: Contents | _Plain, share: float) -> None:
        self._layouts.add(opened.layout)
        for name, value in opened.verbatim.items():
            self.totals[name] = np.asarray(self.totals.get(name, 0.0) + value.astype(np.float64) * share)
            self.largest[name] = np.asarray(np.maximum(self.largest.get(name, value), value))

    def integers(self) -> dict[str, Array]:
        return {name: values for name, values in self.largest.items() if values.dtype.kind != "f"}

    def dtypes(self) -> dict[str, str]:
        found: dict[str, list[str]] = {}
        for layout in self._layouts:
            for tensor in layout.tensors:
                found.setdefault(tensor.name, []).append(tensor.dtype)
        return {name: np.result_type(*dtypes).name for name, dtypes in found.items()}


def _whole(x: Vector) -> Values:
    return Values(slice(0, x.size), x)


def _times(x: Vector, factor: float) -> Vector:
    """The vector times a factor that is 1 or above, in place and within float32's range."""
    if factor != 1:
        with np.errstate(over="ignore"):
            x *= np.float32(factor)
    return x if np.isfinite(peak(x)) else np.clip(x, -MAX, MAX)  # shares may sum to a hair above one


def _difference(new: Array, base: Array) -> Vector:
    """What is added to the base, as float32."""
    with np.errstate(over="ignore"):
        return difference(new, base).astype(np.float32, copy=False)


def _check_difference(base: Arrays, model: Arrays) -> None:
    """Raise LayoutError naming a tensor whose update does not fit float32."""
    for name, values in model.items():
        if values.dtype.kind == "f" and not peak(_difference(values, base[name])) <= MAX:
            raise LayoutError(f"uncompressed reply: the update of tensor {name!r} does not fit float32")


def _room(base: Array, dtype: str) -> float:
    """How much may be added to any value of the base for sure, so that it stays finite in the dtype."""
    with np.errstate(over="ignore"):
        return _MARGIN * (float(np.finfo(dtype).max) - peak(base.astype(dtype, copy=False)))
