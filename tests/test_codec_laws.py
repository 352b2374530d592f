"""The laws of the architecture as property tests over every registered codec: the checklist a new codec inherits."""

import json
import pickle
from typing import Any

import numpy as np
import pytest
from codec_list import CODECS, IDS
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import fedcomp
from fedcomp import Codec, ErrorFeedback, Layout, LayoutError, NonFiniteError, Plan, Tensor, nmse, wire
from fedcomp.descriptor import describe, read_plan
from fedcomp.layout import Vector
from strategies import MAX, layouts_with_vectors

every_codec = pytest.mark.parametrize("codec", CODECS, ids=IDS)
law = settings(suppress_health_check=[HealthCheck.too_slow])


def rng(seed: int = 0) -> np.random.Generator:
    return fedcomp.generator(seed, 1, 0)


def through_wire(codec: Codec, x: Vector, layout: Layout, seed: int = 0) -> Vector:
    """One round trip of a vector through the frame."""
    plan = Plan(codec, min_size=0, gentle_share=0)
    parts = codec.encode(x, layout, rng(seed))
    frame = wire.pack(wire.Contents(plan, layout, 1, [parts] if layout.tensors else [], {}), layout)
    (back,) = wire.unpack(frame, layout, plan=plan).parts
    return codec.decode(back, layout)


def test_every_registered_codec_is_on_the_list() -> None:
    assert {codec.name for codec in CODECS} == set(fedcomp.registered())
    for cls in fedcomp.registered().values():
        assert cls.__doc__ is not None
        assert ">>>" in cls.__doc__, f"{cls.name}: a docstring with an example is missing"


@every_codec
@law
@given(case=layouts_with_vectors())
def test_law_1_shape_and_type_come_back_and_the_input_is_not_written(codec: Codec, case: tuple[Layout, Vector]) -> None:
    layout, x = case
    before = x.copy()
    x.flags.writeable = False
    decoded = through_wire(codec, x, layout)
    assert decoded.shape == x.shape
    assert decoded.dtype == np.float32
    assert decoded.flags.writeable
    assert np.array_equal(x, before)


@every_codec
@pytest.mark.parametrize("dtype", ["<f4", ">f4", "<f2", "<f8"])
def test_law_1_models_of_every_kind_of_array(codec: Codec, dtype: str) -> None:
    """c07 c09 c11 c12: 0-d, empty, Fortran order, strided, read-only and big-endian tensors."""
    random = np.random.default_rng(1)
    wide = random.standard_normal((8, 10)).astype(dtype)
    new = {
        "0d": np.array(2.5, dtype),
        "empty": np.zeros((0, 4), dtype),
        "fortran": np.asfortranarray(random.standard_normal((5, 6)).astype(dtype)),
        "strided": wide[::2, ::-2],
        "counter": np.array(7, ">i8"),
        "flag": np.array([True, False]),
    }
    for array in new.values():
        array.flags.writeable = False
    base = {name: np.zeros(a.shape, a.dtype.newbyteorder("=")) for name, a in new.items()}
    plan = Plan(codec, min_size=0)
    update = fedcomp.compress(base, new, plan, round=3, rng=rng())
    model = fedcomp.decompress(update.frame, base, plan=plan, round=3)
    for name, array in new.items():
        assert isinstance(model[name], np.ndarray)
        assert (model[name].shape, model[name].dtype) == (array.shape, array.dtype.newbyteorder("="))
    assert model["counter"] == 7
    assert model["flag"].tolist() == [True, False]
    native = {name: np.ascontiguousarray(a, a.dtype.newbyteorder("=")).reshape(a.shape) for name, a in new.items()}
    assert fedcomp.compress(base, native, plan, round=3, rng=rng()).frame == update.frame


@every_codec
def test_law_2_configuration_round_trips(codec: Codec) -> None:
    config = json.loads(json.dumps(fedcomp.to_config(codec)))
    assert fedcomp.from_config(config) == codec
    assert fedcomp.parse_codec(str(codec)) == codec
    assert pickle.loads(pickle.dumps(codec)) == codec
    assert hash(fedcomp.from_config(config)) == hash(codec)
    if "codebook" not in config:  # a shared one is only named
        told = fedcomp.from_config({key: value for key, value in config.items() if key not in codec.encoder_only})
        assert read_plan(describe(Plan(codec))) == Plan(told)


@pytest.mark.parametrize("codec", [c for c in CODECS if c.unbiased], ids=str)
def test_law_3_unbiased_codecs_are_right_on_average(codec: Codec) -> None:
    """The mean of n draws is off by no more than chance allows, in length and along the input itself."""
    layout, draws = Layout((Tensor("a", (40,)), Tensor("b", (3, 20)))), 2000
    x = np.random.default_rng(3).standard_normal(100, np.float32)
    decoded = np.stack([codec.decode(codec.encode(x, layout, rng(s)), layout) for s in range(draws)], dtype=np.float64)
    variance = decoded.var(axis=0) / draws
    off = decoded.mean(axis=0) - x
    assert np.square(off).sum() <= 1.8 * variance.sum() + 1e-9
    assert abs(off @ x) <= 5 * np.sqrt((variance * np.square(x)).sum()) + 1e-4


@every_codec
@law
@given(case=layouts_with_vectors())
def test_law_3_contractive_codecs_never_add_error(codec: Codec, case: tuple[Layout, Vector]) -> None:
    layout, x = case
    if codec.contractive:
        assert nmse(x, through_wire(codec, x, layout)) <= 1 + 1e-5


@every_codec
@law
@given(case=layouts_with_vectors(), weight=st.floats(-3, 3), wide=st.booleans())
def test_law_4_accumulate_is_adding_the_decoded_vector(
    codec: Codec, case: tuple[Layout, Vector], weight: float, wide: bool
) -> None:
    layout, x = case
    x = np.clip(x, -1e30, 1e30)
    parts = codec.encode(x, layout, rng())
    start = np.linspace(-1, 1, layout.size)
    out: NDArray[Any] = start if wide else start.astype(np.float32)
    term = codec.decode(parts, layout).astype(out.dtype) * out.dtype.type(weight)
    expected = out + term
    codec.accumulate(parts, layout, out, weight)
    assert np.array_equal(out, expected) or not wide
    assert np.abs(out - expected).max(initial=0) <= 3e-7 * (1 + np.abs(term).max(initial=0))


@pytest.mark.parametrize("codec", [c for c in CODECS if c.contractive], ids=str)
def test_law_5_feedback_telescopes(codec: Codec) -> None:
    """c29 c30: all that was sent plus what is remembered equals all updates."""
    layout = Layout((Tensor("a", (40,)), Tensor("b", (3, 20))))
    feedback, random = ErrorFeedback(), np.random.default_rng(4)
    slots = {"residual": np.zeros(100, np.float32)}
    sent, given_ = np.zeros(100), np.zeros(100)
    for step in range(50):
        x = random.standard_normal(100, np.float32) + np.float32(1)
        parts, slots = feedback.encode(codec, x, layout, slots, rng(step))
        sent += codec.decode(parts, layout)
        given_ += x
    assert np.allclose(sent + slots["residual"], given_, atol=2e-3)


@pytest.mark.parametrize("codec", [c for c in CODECS if not c.contractive], ids=str)
def test_law_5_feedback_refuses_what_diverges(codec: Codec) -> None:
    with pytest.raises(fedcomp.ConfigError, match="not contractive"):
        ErrorFeedback().check(Plan(codec))


@every_codec
def test_law_7_damaged_frames_are_refused(codec: Codec) -> None:
    layout = Layout((Tensor("a", (6, 7)),))
    x = np.random.default_rng(6).standard_normal(42, np.float32)
    plan = Plan(codec, min_size=0, gentle_share=0)
    frame = wire.pack(wire.Contents(plan, layout, 1, [codec.encode(x, layout, rng())], {}), layout)
    for length in range(len(frame)):
        with pytest.raises(fedcomp.FrameError):
            wire.unpack(frame[:length], layout, plan=plan)
    for bit in range(8 * len(frame)):
        damaged = bytearray(frame)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(fedcomp.FrameError):
            wire.unpack(bytes(damaged), layout, plan=plan)


@every_codec
@pytest.mark.parametrize("value", [0.0, -0.0, 3.0, 1e-45, -1e-45, 3e38, MAX, -MAX])
@pytest.mark.parametrize("size", [1, 8, 300])
def test_law_8_zero_constant_subnormal_and_huge(codec: Codec, value: float, size: int) -> None:
    """c08: finite values, zeros exactly zero, no warning (warnings are errors in this suite)."""
    x = np.full(size, value, np.float32)
    decoded = through_wire(codec, x, Layout.vector(size))
    assert np.isfinite(decoded).all()
    if value == 0:
        assert not decoded.any()


@every_codec
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_law_8_values_that_are_not_finite_are_refused_by_name(codec: Codec, bad: float) -> None:
    """c01 c02"""
    layout = Layout((Tensor("good", (4,)), Tensor("fc.weight", (2, 3))))
    x = np.ones(10, np.float32)
    x[7] = bad
    with pytest.raises(NonFiniteError, match=r"'fc.weight'.*1 NaN or infinite of 6"):
        codec.encode(x, layout, rng())


@every_codec
def test_a_vector_of_another_size_is_refused(codec: Codec) -> None:
    with pytest.raises(LayoutError, match="expected a vector of 5 values"):
        codec.encode(np.zeros(4, np.float32), Layout.vector(5), rng())


@every_codec
@law
@given(case=layouts_with_vectors())
def test_the_frame_brings_back_every_part_bit_by_bit(codec: Codec, case: tuple[Layout, Vector]) -> None:
    """What the client's error feedback decodes must be what the server decodes."""
    layout, x = case
    parts = codec.encode(x, layout, rng())
    assert np.array_equal(through_wire(codec, x, layout), codec.decode(parts, layout))


@every_codec
def test_same_inputs_give_the_same_bytes(codec: Codec) -> None:
    x = np.random.default_rng(8).standard_normal(200, np.float32)
    layout = Layout.vector(200)
    a, b = (codec.encode(x, layout, rng(5)) for _ in range(2))
    assert all(np.array_equal(a[name], b[name]) for name in a)
