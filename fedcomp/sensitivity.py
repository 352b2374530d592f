"""Sensitivity: which layers bear which codec, measured, and a plan that spends a given number of bytes where it helps.

Every tensor is coded alone with every candidate; its bytes and its damage are measured. Damage is the squared error
or, where the model's outputs on some data are at hand, the Kullback-Leibler divergence KL(p || p') between the outputs
of the updated model and those with this one tensor coded. The cheapest choice for each tensor at one price of bytes,

    minimise  sum_i damage_i(c_i) + price * bytes_i(c_i),

is found by bisecting the price (Shoham & Gersho, IEEE Trans. ASSP 1988: the convex hull of each tensor's choices).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedcomp.codec import Codec
from fedcomp.compressor import compress, decompress, generator
from fedcomp.errors import ConfigError
from fedcomp.layout import Arrays, check_same_tensors
from fedcomp.plan import Plan, Rule

Outputs = Callable[[Arrays], NDArray[np.float64]]
"""Class probabilities (samples, classes) of the model with the given tensors."""


@dataclass(frozen=True)
class Choice:
    """One tensor with one codec: what it costs, and the damage it does."""

    tensor: str
    codec: Codec
    nbytes: int
    damage: float


def measure(base: Arrays, new: Arrays, candidates: Sequence[Codec], *, outputs: Outputs | None = None) -> list[Choice]:
    """Bytes and damage of each candidate on each floating-point tensor of the update new - base.

    Args:
        base, new: the model before and after training, by name.
        candidates: codecs to try.
        outputs: if given, damage is the KL divergence of its outputs (nats, mean over samples); else the squared error.

    Raises what `compress` raises.
    """
    check_same_tensors(base, new, "trained model")
    reference = outputs(new) if outputs is not None else None
    choices = []
    for name, values in new.items():
        if values.dtype.kind != "f" or not values.size:
            continue
        for codec in candidates:
            coded, nbytes = _alone(base, new, name, codec)
            if outputs is None or reference is None:
                damage = float(np.square(coded.astype(np.float64) - values).sum())
            else:
                damage = kl_divergence(reference, outputs({**new, name: coded}))
            choices.append(Choice(name, codec, nbytes, damage))
    return choices


def allot(choices: Sequence[Choice], nbytes: int) -> Plan:
    """A plan with one rule a tensor whose measured bytes together are at most `nbytes`, at the least total damage.

    Tensors without a choice fall to the cheapest codec of all. Frames of the plan are somewhat smaller than the sum,
    since tensors of equal codec share streams. Raises ConfigError if not even the smallest choices fit.
    """
    by_tensor: dict[str, list[Choice]] = {}
    for choice in choices:
        by_tensor.setdefault(choice.tensor, []).append(choice)
    least = sum(min(c.nbytes for c in options) for options in by_tensor.values())
    if not choices or least > nbytes:
        raise ConfigError(f"budget of {nbytes} bytes: the smallest choices take {least}; add cheaper candidates")
    low, high = 0.0, 1.0
    while _spent(_pick(by_tensor, high)) > nbytes:
        high *= 16
    for _ in range(80):
        price = (low + high) / 2
        low, high = (price, high) if _spent(_pick(by_tensor, price)) > nbytes else (low, price)
    picked = _pick(by_tensor, high)
    cheapest = min(choices, key=lambda c: c.nbytes).codec
    rules = tuple(Rule(_literal(choice.tensor), choice.codec) for choice in picked)
    return Plan(cheapest, rules, gentle_share=0)


def kl_divergence(p: NDArray[np.float64], q: NDArray[np.float64]) -> float:
    """Mean over samples of KL(p || q) in nats, for probabilities (samples, classes)."""
    a, b = np.maximum(np.asarray(p, np.float64), 1e-12), np.maximum(np.asarray(q, np.float64), 1e-12)
    return max(0.0, float((a * (np.log(a) - np.log(b))).sum(axis=1).mean()))


def _alone(base: Arrays, new: Arrays, name: str, codec: Codec) -> tuple[NDArray[np.float64], int]:
    """One tensor after coding, and the bytes that it adds to a frame."""
    plan = Plan(codec, min_size=0, gentle_share=0)
    start, end = {name: base[name]}, {name: new[name]}
    frame = compress(start, end, plan, round=0, rng=generator(0, 0, 0)).frame
    empty = {name: np.zeros(0, new[name].dtype)}
    overhead = len(compress(empty, empty, plan, round=0, rng=generator(0, 0, 0)).frame)
    return decompress(frame, start, plan=plan)[name], max(0, len(frame) - overhead)


def _pick(by_tensor: Mapping[str, Sequence[Choice]], price: float) -> list[Choice]:
    return [min(options, key=lambda c: (c.damage + price * c.nbytes, c.nbytes)) for options in by_tensor.values()]


def _spent(picked: Sequence[Choice]) -> int:
    return sum(choice.nbytes for choice in picked)


def _literal(name: str) -> str:
    """The name as a pattern that matches only itself."""
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)
