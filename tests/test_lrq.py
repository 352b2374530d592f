"""LRQ: exact ranks, modes, rates, and what it gains over quantizing value by value."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

import fedcomp
from fedcomp import Codec, ConfigError, Layout, Plan, Tensor, nmse, wire
from fedcomp.codec import Columns, Count, PartSpec, Symbols, symbol_dtype
from fedcomp.codecs.ecsq import ECSQ
from fedcomp.codecs.lowrank import from_matrix, sides
from fedcomp.codecs.lrq import LRQ
from fedcomp.entropy.columns import TOP
from fedcomp.layout import Vector
from fedcomp.terms import Levels, Product, Values
from strategies import layouts

LAYOUT = Layout(
    (Tensor("conv", (16, 8, 3, 3)), Tensor("bias", (16,)), Tensor("fc", (40, 60)), Tensor("wide", (50, 200)))
)


def rng(seed: int = 0) -> np.random.Generator:
    return fedcomp.generator(seed, 1, 0)


def frame(codec: Codec, x: Vector, layout: Layout) -> bytes:
    plan = Plan(codec, min_size=0, gentle_share=0)
    return wire.pack(wire.Contents(plan, layout, 1, [codec.encode(x, layout, rng())], {}), layout)


def measured(codec: Codec, x: Vector, layout: Layout) -> tuple[float, float]:
    """Bits per value of the frame less its header of 33 bytes, and NMSE."""
    sent = frame(codec, x, layout)
    (parts,) = wire.unpack(sent, layout).parts
    return 8 * (len(sent) - 33) / x.size, nmse(x, codec.decode(parts, layout))


def low_rank(layout: Layout, rank: int, seed: int = 0, noise: float = 0.0) -> Vector:
    """Matrices of a rank, vectors of noise; singular values fall by half each."""
    random = np.random.default_rng(seed)
    x = np.empty(layout.size, np.float32)
    for tensor, where in layout.slices():
        if len(tensor.shape) < 2:
            x[where] = random.standard_normal(tensor.size)
            continue
        m, n = sides(tensor)
        left = random.standard_normal((m, rank)) * 0.5 ** np.arange(rank)
        whole = left @ random.standard_normal((rank, n)) + noise * random.standard_normal((m, n))
        x[where] = from_matrix(whole, tensor)
    return x


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_a_matrix_of_rank_one_takes_one_direction(scale: float) -> None:
    x = low_rank(LAYOUT, 1) * np.float32(scale)
    parts = LRQ(step=0.2).encode(x, LAYOUT, rng())
    assert parts["modes"].tolist() == [2, 1, 2, 2]
    assert parts["columns"].size == (48 + 24) + 16 + (40 + 60) + (50 + 200)
    assert nmse(x, LRQ(step=0.2).decode(parts, LAYOUT)) < 0.002


def test_integers_are_the_formula() -> None:
    """Of a single direction: a = round(s u / step), b = round(g w / step), with the least-squares w."""
    u, v = np.linspace(1, 2, 50), np.linspace(3, -3, 20)
    matrix = np.outer(u, v).astype(np.float32)
    layout, codec = Layout((Tensor("w", (50, 20)),)), LRQ(step=0.5, rho=0.5)
    parts = codec.encode(matrix.ravel(), layout, rng())
    step = float(np.array([int(parts["step"]) << 16], np.uint32).view(np.float32)[0])
    assert step == pytest.approx(0.5 * np.sqrt(np.square(matrix).mean()), rel=1 / 256)
    a, b = parts["columns"][:50], parts["columns"][50:]
    exact = u * np.linalg.norm(v) / step
    assert np.abs(np.abs(a) - exact).max() <= 0.5 + 0.06 + 1e-3
    fitted = a @ matrix / np.linalg.norm(a) / step
    assert np.abs(b - fitted).max() <= 0.5 + 0.06 + 1e-3
    expected = np.outer(a / np.linalg.norm(a), b * step)
    assert np.abs(codec.decode(parts, layout) - expected.ravel()).max() < 1e-5


def test_zeros_cost_nothing() -> None:
    x = np.zeros(LAYOUT.size, np.float32)
    assert len(frame(LRQ(bits=1), x, LAYOUT)) <= 36
    x[-10_000:] = low_rank(LAYOUT, 1)[-10_000:]
    parts = LRQ(step=1).encode(x, LAYOUT, rng())
    assert parts["modes"].tolist() == [0, 0, 0, 2]
    assert not LRQ(step=1).decode(parts, LAYOUT)[:-10_000].any()


def test_convolutions_are_regrouped() -> None:
    """The kernel rows go with the outputs, so that separable kernels have rank one."""
    random = np.random.default_rng(3)
    left, right = random.standard_normal((16, 3)), random.standard_normal((8, 3))
    x = np.einsum("oh,iw->oihw", left, right).astype(np.float32).ravel()
    layout = Layout((Tensor("conv", (16, 8, 3, 3)),))
    assert LRQ(step=0.3).encode(x, layout, rng())["modes"].tolist() == [2]


@pytest.mark.parametrize("rank", [1, 3])
def test_the_rank_is_capped(rank: int) -> None:
    x = low_rank(LAYOUT, 6)
    codec = LRQ(step=0.05, rank=rank)
    modes = codec.encode(x, LAYOUT, rng())["modes"]
    assert modes.max() <= 1 + rank
    assert LRQ(step=0.05).encode(x, LAYOUT, rng())["modes"].max() == 7


def test_terms_are_products_that_the_server_can_sum() -> None:
    """Factors as products, large tensors without structure as levels, the rest as values."""
    layout = Layout((*LAYOUT.tensors, Tensor("noise", (100, 90))))
    x = np.concatenate([low_rank(LAYOUT, 2), np.random.default_rng(4).standard_normal(9000)]).astype(np.float32)
    codec = LRQ(step=0.5)
    kinds = [type(term) for term in codec.terms(codec.encode(x, layout, rng()), layout)]
    assert kinds == [Product, Values, Product, Product, Levels]


@pytest.mark.parametrize("bits", [0.03, 0.1, 0.3, 1.0])
def test_bits_aimed_at_are_met(bits: float) -> None:
    layout = Layout((Tensor("w", (300, 200)), Tensor("b", (200,)), Tensor("v", (200, 30))))
    real, _ = measured(LRQ(bits=bits, rank=64), low_rank(layout, 12, noise=0.05), layout)
    assert 0.8 * bits <= real <= 1.03 * bits + 0.004


def test_more_bits_no_more_error() -> None:
    x = low_rank(LAYOUT, 8, noise=0.02)
    errors = [measured(LRQ(bits=bits), x, LAYOUT)[1] for bits in (0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4)]
    assert errors == sorted(errors, reverse=True)
    assert errors[0] < 0.99
    assert errors[-1] < 2e-4


@pytest.mark.parametrize("bits", [0.1, 0.5, 2.0, 4.0])
def test_without_structure_it_is_as_good_as_ecsq(bits: float) -> None:
    layout = Layout((Tensor("w", (300, 200)), Tensor("b", (200,))))
    x = np.random.default_rng(5).standard_normal(layout.size, np.float32)
    (real, error), (usual, expected) = (measured(codec, x, layout) for codec in (LRQ(bits=bits), ECSQ(bits=bits)))
    assert real <= 1.02 * usual + 0.002
    assert error * 4 ** (real - usual) <= 1.02 * expected  # a bit more or less is worth a factor of four at most


@pytest.mark.parametrize("bits", [0.05, 0.2, 1.0])
def test_with_structure_it_is_far_better_than_ecsq(bits: float) -> None:
    layout = Layout((Tensor("w", (300, 200)), Tensor("b", (200,))))
    x = low_rank(layout, 5, noise=0.01)
    (real, error), (usual, expected) = (measured(codec, x, layout) for codec in (LRQ(bits=bits), ECSQ(bits=bits)))
    assert real <= 1.1 * max(usual, bits)
    assert error <= 0.5 * expected


@given(layout=layouts(), seed=st.integers(0, 2**32 - 1), extreme=st.booleans(), rank=st.sampled_from([1, 5, 64]))
def test_forged_parts_decode_to_something_finite(layout: Layout, seed: int, extreme: bool, rank: int) -> None:
    random = np.random.default_rng(seed)
    codec, parts = LRQ(step=1, rank=rank), {}
    try:
        spec = next(schema := codec.schema(layout))
        while True:
            parts[spec.name] = _forge(spec, random, extreme)
            spec = schema.send(parts[spec.name])
    except StopIteration:
        pass
    assert np.isfinite(codec.decode(parts, layout)).all()


def _forge(spec: PartSpec, random: np.random.Generator, extreme: bool) -> NDArray[Any]:
    match spec:
        case Symbols():
            return random.integers(0, spec.size, spec.count).astype(symbol_dtype(spec.size))
        case Columns():
            low = TOP if extreme else -3
            return random.integers(low, max(low + 1, 4), spec.count).astype(np.int32)
        case Count():
            return np.array(spec.high if extreme else random.integers(0, spec.high))
        case _:
            raise AssertionError(spec)


@pytest.mark.parametrize(
    "wrong",
    [{}, {"step": 1, "bits": 1}, {"step": 0.0}, {"bits": 13}, {"bits": 1, "rank": 0}, {"bits": 1, "rank": 65},
     {"bits": 1, "rho": 0.6}],
)  # fmt: skip
def test_bad_settings(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"lrq|rank|rho|bits"):
        fedcomp.from_config({"codec": "lrq", **wrong})
