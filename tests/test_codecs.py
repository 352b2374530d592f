"""What each codec promises beyond the shared laws."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fedcomp
from fedcomp import (
    Codebook,
    Codec,
    ConfigError,
    Identity,
    Layout,
    Plan,
    Sign,
    Tensor,
    TopK,
    Uniform,
    VectorQuantizer,
    nmse,
)
from fedcomp.codecs.topk import largest
from fedcomp.codecs.vq import nearest, train
from fedcomp.layout import Vector
from strategies import vectors


def trip(codec: Codec, x: Vector, seed: int = 0) -> Vector:
    layout = Layout.vector(x.size)
    return codec.decode(codec.encode(x, layout, fedcomp.generator(seed, 0, 0)), layout)


def frame_size(codec: Codec, x: Vector) -> int:
    rng = fedcomp.generator(0, 0, 0)
    return len(fedcomp.compress({"x": np.zeros_like(x)}, {"x": x}, Plan(codec, min_size=0), round=1, rng=rng).frame)


# --- registry and text -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("zip", "unknown codec 'zip'; known: auto, blocktopk, e8, ecsq, .*vq, float16, float32, int4, int8"),
        ("uniform(bites=3)", "codec 'uniform': unknown key 'bites'; known: bits, block, rounding, affine, fast"),
        ("uniform(9)", "bits: expected a whole number from 1 to 8, got 9"),
        ("uniform(bits='8')", "bits: expected a whole number"),
        ("uniform(True)", "bits: expected a whole number"),
        ("uniform(1, 2, 'nearest', False, False, 5)", "6 arguments given"),
        ("uniform(8, bits=4)", "an argument is given twice"),
        ("uniform(8, rounding='up')", "rounding: expected one of 'nearest', 'stochastic', got 'up'"),
        ("topk", "give either fraction or k"),
        ("topk(0.1, k=3)", "give either fraction or k"),
        ("topk(1.5)", "fraction: expected a number above 0 to 1, got 1.5"),
        ("topk(0.1, values=3)", "values: expected a Codec"),
        ("topk(0.1, scope='row')", "scope: expected one of"),
        ("vq(dim=3, block=64)", "block must be a multiple of dim"),
        ("vq(codebook='###')", "codebook: expected base64"),
        ("vq(dim=8, codebook='AAAA')", "codebook: expected whole finite float16 vectors of 8"),
        ("vq(dim=1, codebook='AHw=')", "finite"),
        ("vq(dim=1, size=2, codebook='AAAAAAAA')", "codebook has 4 vectors of 1, expected at most 2 of 1"),
        ("identity('int3')", "dtype: expected one of"),
        ("sign(", "cannot be read"),
        ("__import__('os').system('x')", "expected a codec such as"),
        ("uniform(*[1])", "arguments must be literals"),
        ("sign(1, 2)", "2 arguments given, fields: zeros"),
        ("topk(k=1, values=" * 20 + "sign" + ")" * 20, "expected a codec|cannot be read"),
        ("(" * 100_000, "cannot be read"),
    ],
)  # fmt: skip
def test_mistakes_are_named(text: str, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        fedcomp.parse_codec(text)


def test_aliases() -> None:
    assert fedcomp.parse_codec("int8") == Uniform(8)
    assert fedcomp.parse_codec(" float32 ") == Identity()


def test_names_and_numbers_are_taken_once() -> None:
    with pytest.raises(ConfigError, match="taken by 'sign'"):
        fedcomp.register(type("Other", (Sign,), {"name": "other"}))
    with pytest.raises(ConfigError, match="taken by 'sign'"):
        fedcomp.register(type("Other", (Sign,), {"number": 200}))


def test_numbers_of_other_types_make_the_same_codec_and_frame() -> None:
    assert str(TopK(np.float64(0.1))) == str(TopK(0.1)) == "topk(fraction=0.1)"
    x = np.random.default_rng(0).standard_normal(100).astype(np.float32)
    base = {"x": np.zeros(100, np.float32)}
    plan = Plan(TopK(1), min_size=0)
    frame = fedcomp.compress(base, {"x": x}, plan, round=1, rng=np.random.default_rng(0)).frame
    fedcomp.decompress(frame, base, plan=Plan(TopK(1.0), min_size=0))
    flags = ("uniform(affine=1)", "vq(shared=0)", "lloydmax(shared=1)", "randk(0.1, scaled=1)", "powersgd(warm=1)")
    large = (f"lloydmax(block={2**70})", f"log(block={2**70})", f"qsgd(bucket={2**70})", f"randk(k={2**70})")
    for wrong in (*flags, *large, "topk(k=2.0)"):
        with pytest.raises(ConfigError, match="expected"):
            fedcomp.parse_codec(wrong)


def test_defaults_are_not_written() -> None:
    """c35: a reader that lacks a new field still understands configurations that do not use it."""
    assert fedcomp.to_config(Uniform()) == {"codec": "uniform"}
    assert fedcomp.to_config(TopK(0.5, values=Uniform(4))) == {
        "codec": "topk", "fraction": 0.5, "values": {"codec": "uniform", "bits": 4},
    }  # fmt: skip


# --- uniform ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("bits", range(1, 9))
def test_uniform_error_is_within_half_a_step(bits: int, affine: bool) -> None:
    x = np.random.default_rng(0).uniform(-1, 3, 1000).astype(np.float32)
    steps = 2**bits - 1 if affine else 2**bits - 2
    width = 4 if affine else 2 * np.abs(x).max()
    if steps:
        assert np.abs(trip(Uniform(bits, affine=affine), x) - x).max() <= width / steps / 2 * 1.0001


def test_uniform_levels_are_the_papers() -> None:
    """q = round(127 x / max|x|) of the plain int8 formula, on values without ties."""
    x = np.random.default_rng(1).standard_normal(500, np.float32)
    scale = np.abs(x).max() / 127
    assert np.allclose(trip(Uniform(8), x), np.round(x / scale) * scale, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_stochastic_rounding_leaves_exact_levels_alone(bits: int) -> None:
    x = np.zeros(2_000_000, np.float32)
    x[0] = 1
    decoded = trip(Uniform(bits, rounding="stochastic"), x)
    assert decoded[0] == 1
    assert not decoded[1:].any()


@pytest.mark.parametrize(("block", "overhead"), [(64, 0.26), (16, 1.01)])
def test_block_scales_follow_local_magnitude(block: int, overhead: float) -> None:
    """Independent scales of 1e-3 to 1e3: blocks keep the small ones, and cost at most 16 bits each."""
    rng = np.random.default_rng(2)
    scales = np.repeat(10.0 ** rng.uniform(-3, 3, 40), 256).astype(np.float32)
    x = rng.standard_normal(scales.size).astype(np.float32) * scales
    small = scales < 1e-2
    assert nmse(x[small], trip(Uniform(4, block=block), x)[small]) < 0.02
    assert nmse(x[small], trip(Uniform(4), x)[small]) > 0.99
    assert 8 * frame_size(Uniform(4, block=block), x) / x.size < 4.05 + overhead


def test_entropy_coding_takes_back_unused_levels() -> None:
    x = np.random.default_rng(3).standard_normal(50_000, np.float32) ** 5
    assert 8 * frame_size(Uniform(8), x) / x.size < 3


def test_fast_frames_are_packed_and_decode_to_the_same() -> None:
    x = np.random.default_rng(3).standard_normal(10_000, np.float32)
    assert np.array_equal(trip(Uniform(8, fast=True), x), trip(Uniform(8), x))
    assert 10_000 < frame_size(Uniform(8, fast=True), x) < 10_050


def test_float16_clips_what_it_cannot_hold() -> None:
    x = np.array([1e6, -1e6, 1.0], np.float32)
    assert trip(Identity("float16"), x).tolist() == [65504.0, -65504.0, 1.0]


# --- sign ------------------------------------------------------------------------------------------------------------


def test_sign_of_zero_is_plus_and_nine_values_take_two_bytes() -> None:
    """c26"""
    x = np.array([0.0, -0.0, 1.0, -2.0], np.float32)
    assert trip(Sign("plus"), x).tolist() == [0.75, 0.75, 0.75, -0.75]
    assert trip(Sign("keep"), x).tolist() == [0, 0, 1.5, -1.5]
    rng = np.random.default_rng(0)
    for size in (1, 7, 8, 9, 1000):
        x = rng.standard_normal(size).astype(np.float32)
        assert frame_size(Sign("plus"), x) <= 20 + 15 + 4 + 1 + -(-size // 8)
        assert frame_size(Sign(), x) <= 20 + 6 + 1 + 4 + 1 + -(-size // 8)


def test_sign_pays_little_for_the_rows_of_dead_inputs() -> None:
    x = np.random.default_rng(0).standard_normal((500, 64)).astype(np.float32)
    x[np.random.default_rng(1).random(500) < 0.4] = 0
    assert frame_size(Sign(), x.ravel()) < 0.75 * frame_size(Sign("plus"), x.ravel() + np.float32(1e-9))


def test_sign_has_a_scale_for_each_tensor() -> None:
    layout = Layout((Tensor("a", (2,)), Tensor("zero", (3,)), Tensor("empty", (0,)), Tensor("b", (1,))))
    x = np.array([1, -3, 0, 0, 0, 5], np.float32)
    rng = np.random.default_rng(0)
    assert Sign().decode(Sign().encode(x, layout, rng), layout).tolist() == [2, -2, 0, 0, 0, 5]


# --- top-k -----------------------------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(x=st.integers(0, 400).flatmap(vectors), k=st.integers(1, 400))
def test_topk_picks_what_a_stable_sort_picks(x: Vector, k: int) -> None:
    """c32: exactly k, ties to the lowest index, on data full of ties."""
    x = np.round(x)
    expected = np.sort(np.argsort(-np.abs(x), kind="stable")[:k])
    assert largest(x, k).tolist() == expected.tolist()


@pytest.mark.parametrize("kind", ["normal", "ties", "sparse", "sorted", "periodic"])
@pytest.mark.parametrize("k", [1, 37, 500, 20_000])
def test_topk_on_large_vectors_picks_the_same_as_a_sort(kind: str, k: int) -> None:
    x = np.random.default_rng(k).standard_normal(50_000).astype(np.float32)
    match kind:
        case "ties":
            x = np.round(x)
        case "sparse":
            x[np.random.default_rng(0).random(x.size) < 0.99] = 0
        case "sorted":
            x.sort()
        case "periodic":  # what a strided sample cannot see
            x[::12] = 0
    assert largest(x, k).tolist() == np.sort(np.argsort(-np.abs(x), kind="stable")[:k]).tolist()


def test_topk_of_a_constant_tensor_keeps_exactly_k() -> None:
    assert np.flatnonzero(trip(TopK(0.25), np.ones(1000, np.float32))).tolist() == list(range(250))


def test_topk_handles_seventeen_million_values() -> None:
    """c32: where a quantile refuses."""
    x = np.zeros(17_000_000, np.float32)
    x[[5, 16_999_999]] = 1, -2
    assert largest(x, 2).tolist() == [5, 16_999_999]


def test_topk_by_tensor_starves_none() -> None:
    layout = Layout((Tensor("big", (100,)), Tensor("small", (10,)), Tensor("empty", (0, 3))))
    x = np.concatenate([np.full(100, 9), np.linspace(0.1, 1, 10)]).astype(np.float32)
    rng = np.random.default_rng(0)
    for scope, kept in (("global", [11, 0]), ("tensor", [10, 1])):
        codec = TopK(0.1, scope=scope)
        decoded = codec.decode(codec.encode(x, layout, rng), layout)
        assert [np.count_nonzero(decoded[:100]), np.count_nonzero(decoded[100:])] == kept


# --- vector quantization ---------------------------------------------------------------------------------------------


def test_vq_comes_near_what_theory_promises_at_one_bit() -> None:
    """Gaussian, 8 values in one of 256 vectors: NMSE .32 at one bit; the scalar limit with entropy coding is .348."""
    x = np.random.default_rng(0).standard_normal(400_000, np.float32)
    book = Codebook.of(train(x[:160_000].reshape(-1, 8), 256, np.random.default_rng(1)))
    codec = VectorQuantizer(8, 256, codebook=book)
    assert nmse(x, trip(codec, x)) < 0.325
    assert 8 * frame_size(codec, x) / x.size < 1.01


def test_vq_uses_no_more_vectors_than_there_are_groups() -> None:
    """c21: fewer samples than code vectors, and nothing but duplicates."""
    for groups in (1, 4, 5, 40):
        x = np.random.default_rng(groups).standard_normal(4 * groups).astype(np.float32)
        assert np.array_equal(trip(VectorQuantizer(4, 256), x), x)
    x = np.tile(np.array([1, 2, 0.5, -1], np.float32), 5000)
    assert nmse(x, trip(VectorQuantizer(4, 256), x)) < 1e-6
    assert frame_size(VectorQuantizer(4, 256), x) < 350


def test_blocks_larger_than_the_tensor_cost_nothing() -> None:
    import tracemalloc

    x = np.random.default_rng(0).standard_normal(2000).astype(np.float32)
    tracemalloc.start()
    try:
        for codec in (VectorQuantizer(4, 16, block=2**31 - 4), Uniform(4, block=2**31 - 1)):
            assert nmse(x, trip(codec, x)) < 0.4
        assert tracemalloc.get_traced_memory()[1] < 3_000_000
    finally:
        tracemalloc.stop()


def test_vq_work_is_bounded_by_chunks() -> None:
    """c25: the full matrix of distances would take 2 GB here."""
    import tracemalloc

    groups = np.random.default_rng(0).standard_normal((500_000, 2)).astype(np.float32)
    vectors_ = np.random.default_rng(1).standard_normal((1024, 2)).astype(np.float32)
    tracemalloc.start()
    try:
        nearest(groups, vectors_)
        assert tracemalloc.get_traced_memory()[1] < 12_000_000
    finally:
        tracemalloc.stop()


def test_vq_training_sums_wide() -> None:
    """c03: sums of many values far from zero keep their precision."""
    groups = np.full((200_000, 1), 50.0, np.float32)
    groups[::2] += np.float32(0.01)
    vectors_ = train(groups, 3, np.random.default_rng(0))
    assert np.abs(vectors_ - 50.005).max() < 0.006


@pytest.mark.parametrize("size", [2, 15, 16, 17, 255, 256, 257, 1000])
def test_vq_indices_of_every_width(size: int) -> None:
    """c23"""
    rng = np.random.default_rng(size)
    book = Codebook.of(rng.standard_normal((size - 1, 2)).astype(np.float32))
    codec = VectorQuantizer(2, max(size, 2), codebook=book)
    x = rng.standard_normal(4001).astype(np.float32)
    plan = Plan(codec)
    base = {"x": np.zeros(4001, np.float32)}
    update = fedcomp.compress(base, {"x": x}, plan, round=1, rng=rng)
    assert np.array_equal(fedcomp.decompress(update.frame, base, plan=plan)["x"], trip(codec, x))


def test_vq_adapts_only_when_shared() -> None:
    x = np.random.default_rng(0).standard_normal(4000, np.float32)
    layout, rng = Layout.vector(4000), np.random.default_rng(1)
    assert VectorQuantizer().adapt(x, layout, rng) == VectorQuantizer()
    adapted = VectorQuantizer(2, 16, shared=True).adapt(x, layout, rng)
    assert isinstance(adapted, VectorQuantizer)
    assert adapted.codebook is not None
    assert frame_size(adapted, x) < frame_size(VectorQuantizer(2, 16), x)
    zero = VectorQuantizer(shared=True).adapt(np.zeros(4000, np.float32), layout, rng)
    assert zero == VectorQuantizer(shared=True)
