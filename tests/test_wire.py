"""The frame: what it costs, what it refuses. The numbers A01, A02, ... are those of attacks/README.md."""

import json
import struct
import time
import tracemalloc
import zlib
from typing import Any

import numpy as np
import pytest
from codec_list import CODECS, IDS
from hypothesis import given, settings
from hypothesis import strategies as st

import fedcomp
from fedcomp import FrameError, Identity, Layout, Plan, Rule, Sign, Tensor, TopK, Uniform, VectorQuantizer, wire
from fedcomp.descriptor import describe, read_plan, sized
from fedcomp.layout import DTYPES

LAYOUT = Layout((Tensor("w", (30, 20)), Tensor("b", (20,)), Tensor("steps", (), "int64"), Tensor("on", (3,), "bool")))
BASE = {t.name: np.zeros(t.shape, t.dtype) for t in LAYOUT.tensors}


def model(seed: int = 0) -> dict[str, Any]:
    random = np.random.default_rng(seed)
    return {
        "w": random.standard_normal((30, 20)).astype(np.float32),
        "b": random.standard_normal(20).astype(np.float32),
        "steps": np.array(5),
        "on": np.array([True, False, True]),
    }


def frame(codec: fedcomp.Codec, seed: int = 0) -> bytes:
    """A frame with one bucket, whatever companions the codec has."""
    plan = Plan(codec, gentle_share=0)
    return fedcomp.compress(BASE, model(seed), plan, round=7, rng=fedcomp.generator(0, 7, 0)).frame


def sealed(data: bytes | bytearray) -> bytes:
    """The frame with its checksum made right again, as an attacker would."""
    crc = zlib.crc32(data[8:], zlib.crc32(data[:4]))
    return bytes(data[:4]) + struct.pack("<I", crc) + bytes(data[8:])


def refused(data: bytes, match: str | None, **expected: Any) -> None:
    with pytest.raises(FrameError, match=match):
        fedcomp.decompress(data, BASE, **expected)


# --- size ------------------------------------------------------------------------------------------------------------


HEAD = wire.HEADER.size + 1  # with a round below 128


def test_the_header_of_a_whole_model_takes_13_bytes_and_the_plan_few() -> None:
    assert HEAD == 13
    sizes = {str(c): len(describe(Plan(c))) for c in (Sign(), Uniform(8), TopK(0.01, values=Uniform(4)))}
    assert sizes == {"sign()": 2, "uniform()": 2, "topk(fraction=0.01, values=uniform(bits=4))": 13}


def test_a_hundred_tensors_cost_no_header_each() -> None:
    base = {f"layer{i}.weight": np.zeros((10, 10), np.float32) for i in range(100)}
    rng = np.random.default_rng(0)
    new = {name: rng.standard_normal((10, 10)).astype(np.float32) for name in base}
    update = fedcomp.compress(base, new, Plan(Uniform(1, block=0)), round=1, rng=rng)
    assert len(update.frame) <= HEAD + 3 + 100 * 4 + 100 * 100 // 8 + 8


def test_positions_and_values_of_top_k_are_near_their_limit() -> None:
    """1 % of 50,890 values with 8 bits: 1/195 of float32 in the limit, at least 1/180 with everything."""
    x = np.random.default_rng(1).standard_normal(50_890).astype(np.float32)
    base = {"w": np.zeros(50_890, np.float32)}
    update = fedcomp.compress(
        base, {"w": x}, Plan(TopK(0.01, values=Uniform(8))), round=1, rng=np.random.default_rng(0)
    )
    assert len(update.frame) <= 4 * 50_890 / 190


def test_raw_floats_are_raw() -> None:
    assert len(frame(Identity())) == HEAD + 1 + 8 + 4 * 620 + 1 + 8 + 3


# --- what comes back -------------------------------------------------------------------------------------------------


def test_reply_dtypes_may_differ_from_those_sent() -> None:
    """FedAdam sends float64 and counters as float64; clients reply with what they train in."""
    base = {name: values.astype(np.float64) for name, values in BASE.items()}
    new = model()
    update = fedcomp.compress(base, new, Plan(Uniform(8)), round=1, rng=np.random.default_rng(0))
    back = fedcomp.decompress(update.frame, base)
    assert [a.dtype for a in back.values()] == [np.asarray(a).dtype for a in new.values()]
    assert len(update.frame) <= len(frame(Uniform(8))) + 8


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_travels(dtype: str) -> None:
    base = {"x": np.zeros((4, 5), dtype)}
    new = {"x": np.arange(20).reshape(4, 5).astype(dtype)}
    update = fedcomp.compress(base, new, Plan(Identity()), round=1, rng=np.random.default_rng(0))
    back = fedcomp.decompress(update.frame, base)["x"]
    assert back.dtype == dtype
    assert np.array_equal(back, new["x"])


def test_positions_of_32_bit_machines_make_the_same_frame() -> None:
    layout, plan = Layout.vector(100), Plan(TopK(0.1), gentle_share=0)
    parts = TopK(0.1).encode(np.arange(100, dtype=np.float32), layout, np.random.default_rng(0))
    narrow = {**parts, "positions": parts["positions"].astype(np.int32)}
    frames = {wire.pack(wire.Contents(plan, layout, 1, [p], {}), layout) for p in (parts, narrow)}
    assert len(frames) == 1


def test_dtypes_that_models_cannot_hold_are_named() -> None:
    with pytest.raises(fedcomp.LayoutError, match="tensor 'c': dtype complex64 is not supported"):
        fedcomp.compress(
            {"c": np.zeros(2, "c8")}, {"c": np.zeros(2, "c8")}, Plan(Sign()), round=1, rng=np.random.default_rng()
        )


def test_inspect_tells_what_a_frame_says() -> None:
    data = frame(TopK(0.1, values=Uniform(4)))
    told = json.loads(json.dumps(wire.inspect(data)))
    assert told["round"] == 7
    assert told["bytes"] == len(data) == told["header_bytes"] + 1 + told["plan_bytes"] + told["body_bytes"]
    assert told["plan"] == Plan(TopK(0.1, values=Uniform(4)), gentle_share=0).to_config()
    assert LAYOUT.digest.hex().startswith(told["layout"])


@pytest.mark.parametrize("norm", [None, 0.0, 1.5, 2.0**127])
@pytest.mark.parametrize("number", [None, 0, 300, 2**63 - 1])
@pytest.mark.parametrize("bits", range(16))
def test_every_combination_of_notes_travels(bits: int, number: int | None, norm: float | None) -> None:
    predicted, reset, shortened, unkept = (bool(bits & 1 << bit) for bit in range(4))
    notes = wire.Notes(predicted, reset, shortened, number, unkept, norm)
    layout = Layout.vector(3)
    part = Identity().encode(np.ones(3, np.float32), layout, np.random.default_rng(0))
    data = wire.pack(wire.Contents(Plan(Identity(), min_size=1), layout, 7, [part], {}, notes), layout)
    assert (
        data[3]
        == predicted * 2 + reset * 4 + shortened * 8 + (number is not None) * 16 + unkept * 32 + (norm is not None) * 64
    )
    assert wire.peek(data) == (7, notes)
    assert wire.unpack(data, layout).notes == notes
    told = wire.inspect(data)["notes"]
    assert told == {
        key: value
        for key, value in vars(notes).items()
        if value is True or (key in ("number", "norm") and value is not None)
    }


def test_numbers_beyond_flowers_integers_are_refused() -> None:
    """The server tells them to other clients, in a message that could not be sent."""
    layout = Layout.vector(20)
    parts = [Sign().encode(np.ones(20, np.float32), layout, np.random.default_rng(0))]
    frame = wire.pack(
        wire.Contents(Plan(Sign(), gentle_share=0), layout, 1, parts, {}, wire.Notes(number=2**63)), layout
    )
    for read in (wire.inspect, lambda data: wire.unpack(data, layout)):
        with pytest.raises(FrameError, match="below 2"):
            read(frame)
    assert wire.peek(frame) is None


@pytest.mark.parametrize("norm", [1e-300, 0.1, 1.2345e9, 1e300])
def test_norms_travel_to_three_digits(norm: float) -> None:
    """And those that float32 cannot hold as the nearest it can."""
    layout = Layout.vector(3)
    part = Identity().encode(np.ones(3, np.float32), layout, np.random.default_rng(0))
    contents = wire.Contents(Plan(Identity(), min_size=1), layout, 7, [part], {}, wire.Notes(norm=norm))
    data = wire.pack(contents, layout)
    back = wire.unpack(data, layout).notes.norm
    assert back == wire.Notes.rounded(norm)
    assert back == pytest.approx(np.clip(norm, 0, 3.4e38), rel=4e-3, abs=1e-40)
    for bad in (0x7F80, 0xFFFF, 0x8000):
        with pytest.raises(FrameError, match="norm that is negative or not finite"):
            wire.unpack(sealed(data[:HEAD] + bad.to_bytes(2, "little") + data[HEAD + 2 :]), layout)


def test_rounds_are_below_2_to_the_32() -> None:
    data = frame(Sign())
    refused(sealed(data[: HEAD - 1] + b"\x80\x80\x80\x80\x10" + data[HEAD:]), "round 4294967296")
    refused(sealed(data[: HEAD - 1] + b"\x87\0" + data[HEAD:]), "varint")


# --- what is refused -------------------------------------------------------------------------------------------------


def test_a01_other_magic_version_and_flags() -> None:
    data = bytearray(frame(Sign()))
    refused(b"PK" + bytes(data[2:]), "not a fedcomp frame: starts with 504b, expected fc9d")
    data[2] = 3
    refused(sealed(data), "frame of version 3, this fedcomp reads versions 1, 2")
    for version, flags in ((1, 0x40), (1, 0x80), (2, 0x80)):
        data[2], data[3] = version, flags
        refused(sealed(data), f"unknown flags {flags:#x}")


def test_a02_another_model_round_or_plan() -> None:
    data = frame(Sign())
    other = {**BASE, "w": np.zeros((20, 30), np.float32)}
    with pytest.raises(FrameError, match="another model: layout"):
        fedcomp.decompress(data, other)
    refused(data, "round 7, expected round 8", round=8)
    refused(data, r"another plan: .*'sign'.*expected .*'uniform'", plan=Plan(Uniform(8)))


def test_a03_codec_names_and_numbers_from_outside() -> None:
    """c36: nothing is imported or evaluated, depth and length are limited."""
    data = frame(Sign())
    head, body = data[:HEAD], data[HEAD + 5 :]
    for plan in (b"\xff\0\x10\0", b"\0\0\x10\0", b"", b"\3", b"\3\1\0\x10\0", b"\2\1\x07\x10\0", b"\3\0\x10\x01"):
        refused(sealed(head + bytes([len(plan)]) + plan + body), "descriptor|varint")
    nested = b"\4\2\2\1\x25" * 10_000 + b"\3\0\x10\0"
    refused(sealed(head + sized(nested) + body), "descriptor")
    for name in ("os.system", "builtins.eval", "../x", "x" * 1_000_000):
        with pytest.raises(fedcomp.ConfigError, match="unknown codec"):
            fedcomp.from_config({"codec": name})
    deep: dict[str, Any] = {"codec": "sign"}
    for _ in range(10_000):
        deep = {"codec": "topk", "k": 1, "values": deep}
    with pytest.raises(fedcomp.ConfigError, match="nested too deeply"):
        fedcomp.from_config(deep)


@pytest.mark.parametrize("scale", [np.nan, np.inf, -1.0])
def test_a04_a_valid_checksum_around_a_bad_scale(scale: float) -> None:
    """c01: it would poison the average."""
    data = bytearray(frame(Sign()))
    at = data.index(np.float32(np.abs(model()["w"]).mean()).tobytes())
    data[at : at + 4] = np.float32(scale).tobytes()
    refused(sealed(data), "part 'scale': expected finite values from 0")


def test_a05_a_huge_scale_ends_in_an_error_not_in_infinity() -> None:
    base = {"w": np.full(20, 3e38, np.float32)}
    update = fedcomp.compress(
        base, {"w": np.full(20, 3e38, np.float32)}, Plan(Identity()), round=1, rng=np.random.default_rng()
    )
    data = bytearray(update.frame)
    data[-4:] = np.float32(3e38).tobytes()
    with pytest.raises(FrameError, match="tensor 'w': the decoded model is not finite in float32"):
        fedcomp.decompress(sealed(data), base)


def test_a06_verbatim_floats_booleans_and_bombs() -> None:
    base = {"s": np.zeros(3, np.float32), "on": np.zeros(2, np.bool_)}
    update = fedcomp.compress(base, base, Plan(Sign()), round=1, rng=np.random.default_rng())
    data = update.frame
    head = data[: HEAD + 1 + data[HEAD]]
    nan = b"\0" + np.array([0, np.nan, 0], "<f4").tobytes() + b"\0\1"
    with pytest.raises(FrameError, match="'s': expected finite values"):
        fedcomp.decompress(sealed(head + nan), base)
    with pytest.raises(FrameError, match="'on': a boolean is neither 0 nor 1"):
        fedcomp.decompress(sealed(head + b"\0" + bytes(12) + b"\0\2"), base)
    bomb = zlib.compress(bytes(50_000_000), 9)
    tracemalloc.start()
    try:
        with pytest.raises(FrameError, match="expected 14 bytes"):
            fedcomp.decompress(sealed(head + b"\1" + sized(bomb)), base)
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
    finally:
        tracemalloc.stop()


def test_a07_a_codebook_that_does_not_fit() -> None:
    """c24"""
    x = {"w": np.random.default_rng(0).standard_normal((30, 20)).astype(np.float32)}
    base = {"w": np.zeros((30, 20), np.float32)}
    plan = Plan(VectorQuantizer(dim=2, size=16))
    data = fedcomp.compress(base, x, plan, round=1, rng=fedcomp.generator(0, 0, 0)).frame
    at = HEAD + 1 + data[HEAD]
    assert data[at] == 16
    for size in (17, 200, 15, 1):
        with pytest.raises(FrameError):
            fedcomp.decompress(sealed(data[:at] + bytes([size]) + data[at + 1 :]), base)


def test_a08_a_shared_codebook_is_needed_and_named() -> None:
    book = fedcomp.Codebook.of(np.random.default_rng(0).standard_normal((7, 2)).astype(np.float32))
    plan = Plan(VectorQuantizer(dim=2, size=8, codebook=book))
    data = fedcomp.compress(BASE, model(), plan, round=1, rng=np.random.default_rng(0)).frame
    assert book.data not in data
    fedcomp.decompress(data, BASE, plan=plan)
    refused(data, f"side information {book.digest.hex()}")
    assert "side information" in wire.inspect(data)["plan"]


@pytest.mark.parametrize("codec", CODECS, ids=IDS)
def test_a09_random_edits_with_a_right_checksum(codec: fedcomp.Codec) -> None:
    """c37: a FrameError, or a model of the right shapes with finite values; quickly, in little memory."""
    plan = Plan(codec, min_size=0)
    data = fedcomp.compress(BASE, model(), plan, round=7, rng=fedcomp.generator(0, 7, 0)).frame
    random = np.random.default_rng(9)
    tracemalloc.start()
    try:
        for _ in range(100):
            edited = bytearray(data)
            for _ in range(random.integers(1, 4)):
                place = int(random.integers(HEAD, len(edited)))
                match random.integers(3):
                    case 0:
                        edited[place] = random.integers(256)
                    case 1:
                        del edited[place : place + int(random.integers(1, 9))]
                    case 2:
                        edited[place:place] = random.bytes(int(random.integers(1, 9)))
                if len(edited) <= HEAD + 1:
                    break
            started = time.perf_counter()
            try:
                back = fedcomp.decompress(sealed(edited), BASE, plan=plan)
            except FrameError:
                continue
            finally:
                assert time.perf_counter() - started < 1
            assert {n: a.shape for n, a in back.items()} == {n: a.shape for n, a in BASE.items()}
            assert all(np.isfinite(a).all() for a in back.values())
        assert tracemalloc.get_traced_memory()[1] < 4_000_000
    finally:
        tracemalloc.stop()


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_a10_random_bytes(data: bytes) -> None:
    with pytest.raises(FrameError):
        fedcomp.decompress(data, BASE)
    with pytest.raises(FrameError):
        fedcomp.decompress(sealed(wire.MAGIC + b"\1\0" + bytes(4) + LAYOUT.digest + bytes(4) + data), BASE)
    with pytest.raises(FrameError):
        fedcomp.decompress(sealed(wire.MAGIC + b"\2\0" + bytes(4) + LAYOUT.digest[:4] + b"\0" + data), BASE)


@settings(max_examples=500, deadline=None)
@given(st.binary(max_size=40))
def test_a11_random_plans(data: bytes) -> None:
    try:
        plan = read_plan(data)
    except FrameError:
        return
    assert isinstance(plan, Plan)


def test_plans_with_rules_describe_themselves() -> None:
    plan = Plan(
        TopK(0.25, values=Uniform(4, block=8)), (Rule("*.bias", None), Rule("emb*", Uniform(8, affine=True))), 99
    )
    assert read_plan(describe(plan)) == plan
    assert Plan.from_config(json.loads(json.dumps(plan.to_config()))) == plan


def test_a13_plans_with_very_many_rules() -> None:
    with pytest.raises(fedcomp.ConfigError, match="at most 1000 rules"):
        Plan(Sign(), (Rule("x", None),) * 1001)
    with pytest.raises(fedcomp.ConfigError, match="at most 1000 bytes"):
        Rule("x" * 1001, None)
    plan = describe(Plan(Sign()), whole=True)[:-1] + b"\xa0\x8d\x06" + b"\1a\0" * 100_000
    refused(sealed(frame(Sign())[:HEAD] + sized(plan)), "100000 rules, at most 1000")
    refused(sealed(frame(Sign())[:HEAD] + sized(plan)), "another plan", plan=Plan(Sign()))


def test_a12_dtype_tables_that_do_not_add_up() -> None:
    base = {name: values.astype(np.float64) for name, values in BASE.items()}
    data = fedcomp.compress(base, model(), Plan(Sign()), round=1, rng=np.random.default_rng(0)).frame
    at = HEAD + 1 + data[HEAD]
    assert data[at : at + 2] == b"\0\2"  # two float32 tensors
    for run in (b"\0\0", b"\0\5", b"\x0c\2", b"\xff\2"):
        with pytest.raises(FrameError, match="dtype table"):
            fedcomp.decompress(sealed(data[:at] + run + data[at + 2 :]), base)


def test_every_truncation_is_refused_even_with_a_right_checksum() -> None:
    for codec in (Identity(), Uniform(4), Sign(), TopK(0.1), VectorQuantizer(dim=2, size=8)):
        data = frame(codec)
        for length in range(HEAD, len(data)):
            refused(sealed(data[:length]), None)
        refused(sealed(data + b"\0"), "1 bytes too many")
