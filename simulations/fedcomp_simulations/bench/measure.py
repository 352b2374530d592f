"""Bits per parameter, error and speed of one codec on one input. Bits come from the length of a real frame."""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import lru_cache
from statistics import median
from typing import Any

import numpy as np

from fedcomp import Codec, Plan, bits_per_parameter, generator, nmse, parse_codec, registered, wire
from fedcomp.codec import to_config
from fedcomp.layout import Vector
from fedcomp_simulations.bench.inputs import Input

MEGA = 1e6
LEAST_SECONDS = 0.3
"""A codec is repeated until this much time has passed, three times at least: the median stands for it."""


TYPICAL = {
    "auto": ["'0.03 bits'", "'0.07 bits'", "'0.3 bits'", "'1 bits'", "'0.1 bits', unbiased=True"],
    "blocktopk": ["0.05, values=uniform(8)"],
    "e8": ["bits=1", "bits=2"],
    "ecsq": [
        "bits=0.25", "bits=0.5", "bits=1", "bits=2", "bits=4", "bits=1, rounding='stochastic'",
    ],
    "eden": ["1", "2", "4", "0.1", "1, scale='mse'"],
    "lloydmax": ["2"],
    "lowrank": ["8, factors=uniform(8)"],
    "lrq": ["bits=0.03", "bits=0.1", "bits=0.3"],
    "powersgd": ["4, factors=uniform(8)"],
    "randk": ["0.1, values=uniform(8)"],
    "sketch": ["ratio=10"],
    "tensortrain": ["8, factors=uniform(8)"],
    "threshold": ["3, values=uniform(8)"],
    "topk": ["0.01, values=uniform(8)"],
    "trellis": ["bits=1", "bits=2"],
    "uniform": ["8", "8, fast=True", "4, block=64", "2, rounding='stochastic'"],
    "vq": ["8, 288", "4, 16"],
}  # fmt: skip
"""Arguments of codecs without defaults, or that should show more than one setting."""


def typical() -> list[Codec]:
    """Every registered codec in settings that show what it is for."""
    return [parse_codec(f"{name}({arguments})") for name in registered() for arguments in TYPICAL.get(name, [""])]


@dataclass(frozen=True)
class Row:
    """One codec on one input.

    Attributes:
        codec: how the codec is written, or the name of a peer.
        config: its configuration, as JSON.
        input: name of the input.
        n: number of values.
        bits_per_parameter: 8 len(frame) / n.
        nmse: ||x' - x||^2 / ||x||^2 as decoded.
        nmse_scaled: the same after the best single scale; unbiased codecs decode too long for it.
        encode_mb_s, decode_mb_s: float32 megabytes a second, frame included; medians.
        memcpy_mb_s: speed of copying 64 MB, more than caches hold, measured in the same run.
        unbiased: whether the codec is unbiased: never compare NMSE across that line. None: not stated.
    """

    codec: str
    config: dict[str, Any]
    input: str
    n: int
    bits_per_parameter: float
    nmse: float
    nmse_scaled: float
    encode_mb_s: float
    decode_mb_s: float
    memcpy_mb_s: float
    unbiased: bool | None

    def to_json(self) -> dict[str, Any]:
        """Plain values; the keys are a contract with whoever reads the file."""
        return asdict(self)


def measure(codec: Codec, given: Input) -> Row:
    """Measure a codec through the frame, as one bucket: no tensor travels verbatim or gently."""
    plan = Plan(codec, min_size=0, gentle_share=0)
    layout, x = given.layout, given.x

    def encode() -> bytes:
        parts = [bucket.codec.encode(x, bucket.layout, generator(0, 1, 0)) for bucket in plan.buckets(layout)]
        return wire.pack(wire.Contents(plan, layout, 1, parts, {}), layout)

    def decode(frame: bytes) -> Vector:
        (parts,) = wire.unpack(frame, layout, plan=plan).parts
        return codec.decode(parts, layout)

    return measure_functions(str(codec), to_config(codec), given, encode, decode, codec.unbiased)


def measure_functions(
    name: str,
    config: dict[str, Any],
    given: Input,
    encode: Callable[[], bytes],
    decode: Callable[[bytes], Vector],
    unbiased: bool | None,
) -> Row:
    """Measure any pair of functions, a peer's for example, on the same terms."""
    x = given.x
    frame = encode()
    decoded = decode(frame)
    size = x.nbytes / MEGA
    return Row(
        codec=name,
        config=config,
        input=given.name,
        n=x.size,
        bits_per_parameter=bits_per_parameter(len(frame), x.size),
        nmse=nmse(x, decoded),
        nmse_scaled=nmse(x, _best_scale(x, decoded) * decoded.astype(np.float64)),
        encode_mb_s=size / _seconds(encode),
        decode_mb_s=size / _seconds(lambda: decode(frame)),
        memcpy_mb_s=memcpy_speed(),
        unbiased=unbiased,
    )


def _best_scale(x: Vector, decoded: Vector) -> float:
    wide = decoded.astype(np.float64)
    energy = float(wide @ wide)
    return float(wide @ x.astype(np.float64)) / energy if energy else 0.0


@lru_cache(maxsize=1)
def memcpy_speed() -> float:
    """Megabytes a second that numpy copies from memory to memory, on one core."""
    source = np.ones(1 << 24, np.float32)
    target = np.zeros_like(source)
    return source.nbytes / MEGA / _seconds(lambda: np.copyto(target, source))


def _seconds(work: Callable[[], object]) -> float:
    """Median time of one call."""
    times: list[float] = []
    while len(times) < 3 or (sum(times) < LEAST_SECONDS and len(times) < 1000):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return median(times)
