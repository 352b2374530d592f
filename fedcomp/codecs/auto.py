"""Auto: the least error for a number of bytes, by rate control over the codecs that spend them best.

Biased, for clients whose feedback makes up for what is lost: `lrq`, whose one global step is found by a search on cheap
estimates of the length and a last one on real lengths. Each tensor is sent as entropy-coded low-rank factors, value by
value, or not at all, whatever is cheapest by D + lambda R at the step (see `ways`).

Unbiased, for clients that keep nothing: `eden` at any rate. Above 0.3 bits a value stochastic rounding with entropy
coding (`ecsq`) where that has clearly less error. The dithers of a cohort are stratified: all clients of a round draw
the same u for a value, each shifts it by its place among them, so that some round up where others round down
(correlated quantization: Suresh, Sun, Ro, Yu, ICML 2022).

Both: nothing for nothing, and float32 as it is once that fits.

The server may announce a step instead. A client of weight w then codes at step / w, in one go: an error in its update
counts w times in the mean, so that this spends bytes where they help most (see `budget`). For unbiased coding the step
stands for ||x|| / bits.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import ClassVar

import numpy as np

from fedcomp import _validate, wire
from fedcomp.budget import Budget
from fedcomp.codec import Codec, Count, Parts, Schema, Upload, register
from fedcomp.codecs import ecsq
from fedcomp.codecs.eden import EDEN
from fedcomp.codecs.identity import Identity
from fedcomp.codecs.lrq import RestLRQ, ShortLRQ
from fedcomp.codecs.ways import Encoder
from fedcomp.errors import ConfigError
from fedcomp.layout import Layout, Vector
from fedcomp.metrics import length
from fedcomp.plan import Bucket
from fedcomp.terms import Term, peak

_NOTHING, _LRQ, _RAW, _EDEN, _STOCHASTIC, _RESTS, _TURNED = range(7)  # ways
_ROTATIONS = {_EDEN: 1, _TURNED: 2}
_DOMINANT = 0.03  # of a piece's energy, in one value, from which on one rotation is not enough
_FEW = 30.0  # over their number, likewise: in short pieces the largest of normal values has as much
_OCTAVE = 64  # rates of EDEN an octave
_MOST_BITS = 8.0
_RATES = 24 * _OCTAVE
_STABLE_BITS = 0.3  # a value: below, stochastic rounding destroys training outside of plain MLPs
_CLEARLY = 0.75  # of EDEN's error: spikes in few values harm more than as much error spread evenly
_CODINGS = 4
_LEFT = 0.03
_RICH = 0.5  # bits a value from which on more directions are worth their time
_RANKS = (16, 32)
_LARGEST_STEP = 1e200


@register
@dataclass(frozen=True)
class Auto(Codec):
    """The least error for a number of bytes, found by search: exact byte budgets.

    Args:
        budget: most bytes of an upload, whole frame included: "2 kB", "0.05 bits" (per parameter), "30 s at 20 kbit/s",
            "1/1000" or "0.1 %" of float32, or a number of bytes. Never exceeded.
        unbiased: code without bias, for clients without feedback; else with the least error, for feedback.
        step: announced by the server for an update of weight 1; 0: none, every upload has the budget. With a step, the
            budget is what uploads have on average.
        cap: with a step, the most that an upload may take, in budgets.

    Frames tell none of these: decoding needs none.

    >>> from fedcomp import Layout, Tensor
    >>> x = np.outer(np.sin(np.arange(200) / 9), np.cos(np.arange(100) / 9)).astype(np.float32).ravel()
    >>> codec, layout = Auto("200 B"), Layout((Tensor("w", (200, 100)),))
    >>> decoded = codec.decode(codec.encode(x, layout, np.random.default_rng(0)), layout)
    >>> bool(np.square(decoded - x).sum() < 0.02 * np.square(x).sum())
    True
    """

    name: ClassVar[str] = "auto"
    number: ClassVar[int] = 25
    encoder_only: ClassVar[frozenset[str]] = frozenset({"budget", "unbiased", "step", "cap"})
    pools: ClassVar[bool] = True

    budget: str = ""
    unbiased: bool = False
    step: float = 0.0
    cap: float = 4.0

    def __post_init__(self) -> None:
        if isinstance(self.budget, int | float):
            object.__setattr__(self, "budget", f"{self.budget} B")
        if self.budget != "":
            Budget.parse(self.budget)
        _validate.flag(unbiased=self.unbiased)
        object.__setattr__(self, "step", _validate.number(low=0, high=1e300, step=self.step))
        object.__setattr__(self, "cap", _validate.number(low=1, high=1000, cap=self.cap))

    @property
    def contractive(self) -> bool:
        return not self.unbiased

    def limit(self, parameters: int) -> int:
        """See Codec. Raises ConfigError without a budget."""
        if not self.budget:
            raise ConfigError('codec auto: give the budget of an upload, such as auto("2 kB")')
        most = Budget.parse(self.budget).bytes(parameters)
        return int(most * self.cap) if self.step else most

    def for_upload(self, upload: Upload) -> Codec:
        """See Codec."""
        return _Fitted(**{entry.name: getattr(self, entry.name) for entry in fields(Auto)}, upload=upload)

    def least(self, layout: Layout) -> Parts:
        """See Codec."""
        if not self.unbiased or not layout.size:
            return {"way": np.array(_NOTHING)}
        return {"way": np.array(_EDEN), "rate": np.array(_RATES), **_eden(_RATES, 1).longest(layout)}

    def level(self, parts: Parts, layout: Layout) -> float:
        """The step that these parts were coded at; 0 if they have none. See RateControl."""
        way = int(parts["way"])
        if way in (_LRQ, _RESTS):
            return ShortLRQ.step_of(parts)
        if way in _ROTATIONS:
            codec = _eden(int(parts["rate"]), _ROTATIONS[way])
            return codec.norm(parts, layout) / codec.bits
        if way == _STOCHASTIC:
            table = ecsq.levels(float(parts["step"][0]), parts).astype(np.float64)
            norm = math.sqrt(float(np.bincount(parts["q"], minlength=table.size) @ np.square(table)))
            return norm * layout.size / (8 * wire.parts_size(parts, Bucket(Auto(), layout)))
        return 0.0

    def _encode(self, x: Vector, layout: Layout, rng: np.random.Generator) -> Parts:
        return self._code(x, layout, rng, Upload(self.limit(layout.size)))

    def _code(self, x: Vector, layout: Layout, rng: np.random.Generator, upload: Upload) -> Parts:
        if not x.any():
            return {"way": np.array(_NOTHING)}
        if upload.room > 4 * x.size and not self.step:
            return {"way": np.array(_RAW), "values": x.copy()}
        if self.unbiased:
            return _Unbiased(x, layout).within(upload, self.step, rng)
        return self._biased(x, layout, rng, upload)

    def _biased(self, x: Vector, layout: Layout, rng: np.random.Generator, upload: Upload) -> Parts:
        def whole(parts: Parts) -> Parts:
            if not int(parts["step"]):
                return {"way": np.array(_NOTHING)}
            return {"way": np.array(_RESTS if "rest" in parts else _LRQ), **ShortLRQ.shortened(parts)}

        def measure(parts: Parts) -> int:
            return wire.parts_size(whole(parts), Bucket(Auto(), layout))

        def excess(parts: Parts) -> int:
            return len(wire.write_parts(parts, Bucket(Auto(), layout))) - upload.room

        rank = _RANKS[8 * upload.room > _RICH * x.size]
        encoder = Encoder.of(x, layout, rank, 0.0, rng)
        if self.step:
            parts = whole(encoder.parts(encoder.at(min(self.step / max(upload.weight, 1e-300), _LARGEST_STEP))))
            if excess(parts) <= 0:
                return parts
        room = upload.room
        while True:  # what is measured may be some bytes short, once in a hundred times
            parts = whole(encoder.within(room, measure))
            over = excess(parts)
            if over <= 0:
                return parts
            room -= over

    def schema(self, layout: Layout) -> Schema:
        way = int((yield Count("way", _TURNED)))
        if way in _ROTATIONS:
            yield from _eden(int((yield Count("rate", _RATES))), _ROTATIONS[way]).schema(layout)
        elif way != _NOTHING:
            yield from _CODECS[way].schema(layout)

    def terms(self, parts: Parts, layout: Layout) -> Iterator[Term]:
        way = int(parts["way"])
        if way in _ROTATIONS:
            yield from _eden(int(parts["rate"]), _ROTATIONS[way]).terms(parts, layout)
        elif way != _NOTHING:
            yield from _CODECS[way].terms(parts, layout)


@dataclass(frozen=True)
class _Fitted(Auto):
    """Auto for one upload, whose place in the frame is known."""

    upload: Upload = Upload(0)  # noqa: RUF009  (frozen)

    def _encode(self, x: Vector, layout: Layout, rng: np.random.Generator) -> Parts:
        return self._code(x, layout, rng, self.upload)


_CODECS: dict[int, Codec] = {
    _LRQ: ShortLRQ(step=1.0),
    _RAW: Identity(),
    _RESTS: RestLRQ(step=1.0),
    _STOCHASTIC: ecsq.ECSQ(step=1.0, rounding="stochastic"),
}


def _eden(rate: int, rotations: int) -> EDEN:
    """The codec of a rate; a larger one is a lower rate."""
    return EDEN(_MOST_BITS * 2.0 ** (-rate / _OCTAVE), rounds=rotations, compact=True)


# --- without bias ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Unbiased:
    """Unbiased ways to send a vector (layout.size,) with a value other than 0."""

    x: Vector
    layout: Layout

    @cached_property
    def way(self) -> int:
        """EDEN with one rotation; with two where a value dominates a piece, as others would come back too small."""
        for piece in _eden(_RATES, 1).split(self.layout.size):
            squares = np.square(self.x[piece.where], dtype=np.float64)
            if squares.max() > max(_DOMINANT, _FEW / squares.size) * squares.sum():
                return _TURNED
        return _EDEN

    def codec(self, rate: int) -> EDEN:
        """EDEN at a rate."""
        return _eden(rate, _ROTATIONS[self.way])

    def within(self, upload: Upload, step: float, rng: np.random.Generator) -> Parts:
        """The parts of the least expected error in the room, or at the step."""
        highest = self._highest_rate(upload.room)
        if step:
            bits = min(max(length([self.x]) * upload.weight / step, 1e-9), _MOST_BITS)
            asked = min(max(round(_OCTAVE * math.log2(_MOST_BITS / bits)), 0), _RATES)
            if asked > highest:
                highest, upload = asked, replace(upload, room=self._most(asked))
        if 8 * upload.room > _STABLE_BITS * self.x.size:
            stochastic = self._stochastic(upload, highest, rng)
            if stochastic is not None:
                return stochastic
        return self._filling(highest, upload.room, rng)

    def _filling(self, rate: int, room: int, rng: np.random.Generator) -> Parts:
        """Parts of EDEN at a rate that surely fits, or at a higher one if the entropy coder leaves room for it."""
        parts = self.eden(rate, rng)
        for _ in range(_CODINGS):
            used = len(wire.write_parts(parts, Bucket(Auto(), self.layout)))
            higher = max(rate - int(_OCTAVE * math.log2(room / used)), 0)
            if self.codec(rate).bits <= 1 or higher >= rate:
                break
            tried = self.eden(higher, rng)
            if len(wire.write_parts(tried, Bucket(Auto(), self.layout))) > room:
                break
            rate, parts = higher, tried
        return parts

    def eden(self, rate: int, rng: np.random.Generator) -> Parts:
        """Parts of EDEN at a rate."""
        return {"way": np.array(self.way), "rate": np.array(rate), **self.codec(rate).encode(self.x, self.layout, rng)}

    def _highest_rate(self, room: int) -> int:
        """The smallest number of a rate whose parts surely fit, by bisection; _RATES if none does."""
        low, high = -1, _RATES
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._most(middle) <= room else (middle, high)
        return high

    def _most(self, rate: int) -> int:
        """Most bytes of the parts at a rate: symbols packed, everything else at its largest."""
        pieces, *bits = self.codec(rate).sizes(self.layout.size)
        return 1 + 2 + 2 + 3 * pieces + sum(1 + -(-count // 8) for count in bits if count)

    def _stochastic(self, upload: Upload, rate: int, rng: np.random.Generator) -> Parts | None:
        """Parts of stochastic rounding; None if they do not fit, or if EDEN at this rate is not clearly worse."""
        cells, size, room = ecsq.Cells.of(self.x), self.x.size, upload.room
        highest = peak(self.x)
        least = max(highest / (ecsq.TOP - 1), ecsq.LEAST)
        kept = self.codec(rate).captured(size)
        tolerated = _CLEARLY * (1 - kept) / kept * length([self.x]) ** 2
        wanted, best = 8 * room / size, None
        for _ in range(_CODINGS):
            step = max(cells.step_for(wanted, 0.0, True), least)
            _, error = cells.estimate(step, 0.0, True)
            if error * step**2 * size > tolerated:
                return best
            rounded = ecsq.stochastic(self.x, ecsq.float32_up(step), highest, _dither(upload, rng))
            parts = {"way": np.array(_STOCHASTIC), **rounded}
            used = len(wire.write_parts(parts, Bucket(Auto(), self.layout)))
            if used <= room:
                best = parts
                if used >= (1 - _LEFT) * room or step == least:
                    break
            wanted *= (1 - _LEFT / 2) * room / used
        return best


class _Dither:
    """Stands for a generator whose uniform numbers are those of all clients of a round, shifted by this one's place."""

    def __init__(self, seed: int, place: float) -> None:
        self._shared, self._place = np.random.Generator(np.random.Philox(seed)), np.float32(place)

    def random(self, size: tuple[int, ...], dtype: type[np.float32]) -> Vector:
        """Like Generator.random."""
        u: Vector = self._shared.random(size, dtype)
        u += self._place
        u[u >= 1] -= 1
        return u


def _dither(upload: Upload, rng: np.random.Generator) -> ecsq.Uniforms:
    return rng if upload.dither is None else _Dither(*upload.dither)
