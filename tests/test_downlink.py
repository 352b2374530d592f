"""What goes down: packages, what the server knows of its nodes, what a client keeps."""

import logging
import pickle
import struct
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import fedcomp
from fedcomp import ConfigError, FedcompError, FrameError, LayoutError, NonFiniteError, Plan, VectorQuantizer, wire
from fedcomp.downlink import HEADER, MAX_LINKS, MAX_TENSORS, Link, Package, model_digest, pack_model, unpack_model
from fedcomp.entropy.bits import write_varint
from fedcomp.errors import StaleModelError
from fedcomp.layout import DTYPES
from fedcomp.request import KEY, MODEL_STYPE, Request
from fedcomp_clients import CompressMod, MemoryStore
from fedcomp_clients.downlink import FileModelCache, MemoryModelCache, ModelCache, receive
from fedcomp_simulations.grid import InProcessGrid
from fedcomp_strategies.downlink import Downlink, Model

CODECS = ("sign()", "topk(0.05)", "uniform(4)")


def model(seed: int = 0, scale: float = 1.0) -> Model:
    random = np.random.default_rng(seed)
    return {
        "fc.weight": (scale * random.standard_normal((30, 20))).astype(np.float32),
        "fc.bias": (scale * random.standard_normal(30)).astype(np.float32),
        "steps": np.array(seed),
        "on": np.array([True, False, True]),
        "none": np.zeros((0, 4), np.float16),
    }


def walk(seed: int, rounds: int) -> list[Model]:
    """A global model that wanders."""
    random = np.random.default_rng(seed)
    models = [model(seed)]
    for number in range(1, rounds):
        last = models[-1]
        step = {n: (0.05 * random.standard_normal(last[n].shape)).astype(np.float32) for n in ("fc.weight", "fc.bias")}
        models.append({**last, **{n: last[n] + s for n, s in step.items()}, "steps": np.array(number)})
    return models


def assert_same(got: Any, expected: Any) -> None:
    """The same tensors in the same order, to the last bit."""
    assert list(got) == list(expected)
    for name, values in expected.items():
        assert got[name].dtype == values.dtype.newbyteorder("=")
        assert got[name].shape == values.shape
        assert got[name].tobytes() == np.asarray(values, got[name].dtype).tobytes()


def sealed(data: bytes) -> bytes:
    """The package with its checksum made right again, as an attacker would."""
    crc = zlib.crc32(data[8:], zlib.crc32(data[:4]))
    return data[:4] + struct.pack("<I", crc) + data[8:]


def chained() -> tuple[Model, bytes, Model]:
    """A model that is held, a package with a chain of two frames, and what comes out."""
    held = {"w": np.arange(32, dtype=np.float32), "n": np.array(3)}
    links, told = [], held
    for number in (1, 2):
        new = {"w": told["w"] + np.float32(number), "n": np.array(number)}
        frame = fedcomp.compress(told, new, "uniform(4)", round=number, rng=fedcomp.generator(0, number, 0)).frame
        links.append(Link(model_digest(told), frame))
        told = fedcomp.decompress(frame, told)
    return held, Package(model_digest(told), None, tuple(links), b"predictor", True).to_bytes(), told


# --- the package -----------------------------------------------------------------------------------------------------


@st.composite
def models(draw: st.DrawFn) -> Model:
    names = draw(st.lists(st.text(max_size=8), max_size=4, unique=True))
    shapes = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5)
    dtypes = st.sampled_from([np.dtype(name).newbyteorder("<") for name in DTYPES])
    return {
        name: draw(hnp.arrays(draw(dtypes | dtypes.map(lambda dtype: dtype.newbyteorder(">"))), shapes)).T
        for name in names
    }


@given(models(), st.none() | st.binary(max_size=20), st.booleans())
def test_a_whole_model_comes_back_whatever_its_dtypes_and_shapes(
    arrays: Model, predictor: bytes | None, keep: bool
) -> None:
    package = Package.of(arrays, predictor, keep=keep)
    back = Package.from_bytes(package.to_bytes())
    assert (back.predictor, back.keep, back.chain, back.digest) == (predictor, keep, (), model_digest(arrays))
    opened = back.open()
    assert_same(opened, arrays)
    assert all(a.flags.writeable and a.flags.c_contiguous for a in opened.values())
    assert unpack_model(pack_model(arrays)).keys() == arrays.keys()


def test_the_examples_of_the_format_document() -> None:
    """They are its golden packages: version 1 is to be written and read like this for ever."""
    text = (Path(fedcomp.__file__).parent / "FORMAT.md").read_text()
    whole = Package.of({"w": np.array([1, -2], np.float32)}, keep=True)
    links = (Link(bytes(range(8, 16)), b"frame"), Link(bytes(range(16, 24)), b"frame2"))
    for package in (whole, Package(bytes(range(8)), None, links, b"p", keep=True)):
        assert package.to_bytes().hex(" ") in text
        assert Package.from_bytes(package.to_bytes()) == package


def test_the_digest_names_names_order_shapes_dtypes_and_values() -> None:
    a, b = np.arange(4, dtype=np.float32), np.zeros(2, np.float32)
    variants: list[Model] = [
        {"a": a, "b": b},
        {"b": b, "a": a},
        {"c": a, "b": b},
        {"a": a.reshape(2, 2), "b": b},
        {"a": a.astype(np.float64), "b": b},
        {"a": a.view(np.int32), "b": b},
        {"a": a + 1, "b": b},
        {"a": a, "b": -b},
    ]
    assert len({model_digest(v) for v in variants}) == len(variants)
    assert model_digest({"a": a.astype(">f4"), "b": b[::-1]}) == model_digest(variants[0])


def test_a_chain_may_be_entered_at_any_link() -> None:
    held, data, told = chained()
    package = Package.from_bytes(data)
    assert package.predictor == b"predictor"
    middle = fedcomp.decompress(package.chain[0].frame, held)
    for start in (held, middle, told):
        copy = {name: values.copy() for name, values in start.items()}
        opened = package.open(start)
        assert_same(opened, told)
        for values in opened.values():  # the caller's own, also where nothing had to be done
            values[...] = 0
        assert_same(start, copy)


def test_a_chain_of_nothing_costs_a_header() -> None:
    held = model()
    data = Package(model_digest(held), keep=True).to_bytes()
    assert len(data) == HEADER.size == 16
    assert_same(Package.from_bytes(data).open(held), held)


@pytest.mark.parametrize("held", [None, {"w": np.ones(32, np.float32), "n": np.array(3)}, {}])
def test_a_chain_from_another_model_is_stale(held: Model | None) -> None:
    _, data, _ = chained()
    with pytest.raises(StaleModelError, match="the sender must send the whole model"):
        Package.from_bytes(data).open(held)


def test_a_model_that_was_held_and_changed_is_stale() -> None:
    held, data, _ = chained()
    held["w"][3] += 1
    with pytest.raises(StaleModelError):
        Package.from_bytes(data).open(held)


def test_a_chain_that_ends_elsewhere_is_refused() -> None:
    """Another processor, or a forged header."""
    held, data, _ = chained()
    package = Package.from_bytes(sealed(data[:8] + b"elsewher" + data[16:]))
    with pytest.raises(FrameError, match="sender and receiver compute differently") as caught:
        package.open(held)
    assert not isinstance(caught.value, StaleModelError)
    whole = Package.of(held).to_bytes()
    with pytest.raises(FrameError, match="not the one that its header names"):
        Package.from_bytes(sealed(whole[:8] + b"elsewher" + whole[16:])).open()


# --- what is refused -------------------------------------------------------------------------------------------------


def small_packages() -> dict[str, tuple[Model | None, bytes]]:
    held, data, _ = chained()
    arrays = {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "on": np.array([True, False]), "x": np.array(1.5)}
    return {
        "whole": (None, Package.of(arrays, b"predictor", keep=True).to_bytes()),
        "chain": (held, data),
        "nothing": (held, Package(model_digest(held)).to_bytes()),
    }


@pytest.mark.parametrize("kind", small_packages())
def test_every_truncation_and_every_flipped_bit_is_refused(kind: str) -> None:
    held, data = small_packages()[kind]
    Package.from_bytes(data).open(held)
    for end in range(len(data)):
        with pytest.raises(FrameError):
            Package.from_bytes(data[:end]).open(held)
    for bit in range(8 * len(data)):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(FrameError):
            Package.from_bytes(bytes(damaged)).open(held)
    with pytest.raises(FrameError):
        Package.from_bytes(data + b"\0").open(held)


@pytest.mark.parametrize("kind", small_packages())
def test_every_edit_with_a_right_checksum_is_refused_or_opens_to_what_its_digest_names(kind: str) -> None:
    held, data = small_packages()[kind]
    opened = 0
    for cut in range(HEADER.size, len(data)):  # inside of the model its digest still guards, outside only structure
        for edited in (data[:cut], data[:cut] + b"\xff" + data[cut + 1 :], data[:cut] + data[cut + 1 :], data + b"\0"):
            try:
                package = Package.from_bytes(sealed(edited))
                arrays = package.open(held)
            except FrameError:
                continue
            opened += 1
            assert model_digest(arrays) == package.digest
    assert opened < len(data)  # other predictors, links that are not needed


HUGE = write_varint(2**62)


@pytest.mark.parametrize(
    ("body", "match"),
    [
        (HUGE, f"at most {MAX_TENSORS} are allowed"),
        (write_varint(60_000), "varint"),
        (b"\1" + HUGE + b"w", "a tensor's name of 4611686018427387904 bytes, got 1"),
        (b"\1\1w\0\1" + HUGE, "at most 1099511627776 elements"),
        (b"\1\1w\0\2\0" + HUGE, "at most 1099511627776 elements"),
        (b"\1\1w\0\3\0" + write_varint(2**39) + write_varint(2**39), "at most 1099511627776 elements"),
        (b"\1\1w\0\1" + write_varint(2**40), "expected 4398046511104 bytes of tensors, got 0"),
        (b"\1\1w\0" + bytes([33]) + b"\1" * 33 + b"1234", "at most 32 dimensions, got 33"),
        (b"\1\1w\0\xff" + b"\1" * 99, "varint"),
        (b"\1\1w\x0c\0" + b"1234", "dtype"),
        (b"\1\1w\0", "dtype"),
        (b"\2\1w\0\0\1w\0\0" + b"12345678", "'w' comes twice"),
        (b"\1\2\xff\xfe\0\0" + b"1234", "UTF-8"),
        (b"\1" + write_varint(1001) + b"w" * 1001 + b"\0\0" + b"1234", "at most 1000 bytes, got 1001"),
        (b"\1\1w\3\0\2", "a boolean is neither 0 nor 1"),
        (b"\1\1w\0\0" + b"12345", "expected 4 bytes of tensors, got 5"),
        (b"\x81\0\1w\0\0" + b"1234", "shortest form"),
        (b"", "varint"),
    ],
)
def test_forged_models_are_refused_before_memory_is_taken(body: bytes, match: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(FrameError, match=match):
            unpack_model(body)
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


def test_magic_version_flags_and_lengths_are_checked() -> None:
    digest = bytes(8)

    def package(flags: int, body: bytes = b"", magic: bytes = b"\xfc\x9e", version: int = 1) -> bytes:
        return sealed(HEADER.pack(magic, version, flags, 0, digest) + body)

    for data, match in (
        (package(0, magic=b"\xfc\x9d"), "not a fedcomp package: starts with fc9d, expected fc9e"),
        (package(0, version=2), "package of version 2, this fedcomp reads version 1"),
        (package(8), "unknown flags 0x08"),
        (package(2), "varint"),
        (package(2, HUGE), "a predictor of 4611686018427387904 bytes, got 0"),
        (package(0, b"1234567"), "expected a digest of 8 bytes before a frame, got 7"),
        (package(0, digest + HUGE), "a frame of 4611686018427387904 bytes, got 0"),
        (package(0, (digest + b"\0") * (MAX_LINKS + 1)), f"more than {MAX_LINKS} links"),
    ):
        with pytest.raises(FrameError, match=match):
            Package.from_bytes(data)


def test_what_no_package_can_hold_is_refused_when_it_is_made() -> None:
    link = Link(bytes(8), b"frame")
    for make, match in (
        (lambda: Package(b"short"), "package: expected a digest of 8 bytes, got b'short'"),
        (lambda: Link(b"short", b"frame"), "link: expected a digest of 8 bytes"),
        (lambda: Package(bytes(8), b"model", (link,)), "a model or a chain, got both"),
        (lambda: Package(bytes(8), None, (link,) * 257), "at most 256 links, got 257"),
    ):
        with pytest.raises(ConfigError, match=match):
            make()
    value = np.zeros(1, np.float32)
    for arrays, match in (
        ({"w" * 1001: value}, "at most 1000 bytes, got 1001"),
        ({"\ud800": value}, "UTF-8"),
        ({"c": value.astype(np.complex64)}, "dtype complex64 is not supported"),
        (dict.fromkeys(map(str, range(MAX_TENSORS + 1)), value), "at most 65536 tensors can be sent, got 65537"),
    ):
        with pytest.raises(LayoutError, match=match):
            pack_model(arrays)


# --- server and clients together -------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", CODECS)
@pytest.mark.parametrize("wide", [False, True])
def test_every_client_holds_exactly_what_the_server_believes(plan: str, wide: bool) -> None:
    """30 rounds with random participation and lost replies: sums telescope, packages are the shortest there are."""
    random, cache = np.random.default_rng(1), MemoryModelCache()
    down = Downlink(fedcomp.parse_codec(plan), seed=3)
    broadcast: dict[str, list[Any]] = {"fc.weight": [], "fc.bias": []}
    kinds = set()
    first: Model = {}
    for number, published in enumerate(walk(0, 30), 1):
        if wide:
            published = {n: v.astype(np.float64) if v.dtype == np.float32 else v for n, v in published.items()}
        before = down.told if number > 1 else published
        down.publish(published, number)
        first = first or down.told
        whole = len(Package.of(down.told, keep=True).to_bytes())
        for name, steps in broadcast.items():
            steps.append(down.told[name].astype(np.float64) - before[name])
        for node in random.permutation(10)[:4].tolist():
            data = down.package(node)
            received = receive(data, cache, "training", str(node))
            assert_same(received.arrays, down.told)
            assert (received.kept, received.unkept) == (True, False)
            assert received.digest == down.digest == model_digest(down.told)
            package = Package.from_bytes(data)
            kinds.add("whole" if package.model is not None else f"{min(len(package.chain), 2)} links")
            assert len(data) <= whole
            assert (len(data) == whole) == (package.model is not None)
            if random.random() < 0.8:  # else the reply is lost, and the client is further than the server knows
                down.confirm(node)
        np.testing.assert_array_equal(down.told["steps"], published["steps"])
    for name, steps in broadcast.items():
        np.testing.assert_allclose(down.told[name] - first[name], sum(steps), atol=1e-4)
        assert np.linalg.norm(published[name] - down.told[name]) < np.linalg.norm(published[name] - first[name])
    assert kinds == {"whole", "1 links", "2 links"}


def test_what_was_broadcast_is_the_sum_of_the_decoded_frames() -> None:
    down, models = Downlink("sign()"), walk(0, 6)
    down.publish(models[0], 1)
    first, cache = down.told, MemoryModelCache()
    receive(down.package(1), cache, "t", "1")
    down.confirm(1)
    for number, published in enumerate(models[1:], 2):
        down.publish(published, number)
    package = Package.from_bytes(down.package(1))
    assert len(package.chain) == 5
    zero = {name: np.zeros_like(values) for name, values in first.items()}
    total = sum(fedcomp.decompress(link.frame, zero)["fc.weight"].astype(np.float64) for link in package.chain)
    np.testing.assert_allclose(down.told["fc.weight"], first["fc.weight"] + total, atol=1e-5)


def test_without_loss_in_the_codec_the_told_model_is_the_published_one() -> None:
    down = Downlink("identity()")
    for number, published in enumerate(walk(0, 5), 1):
        down.publish(published, number)
        for name, values in published.items():
            np.testing.assert_allclose(down.told[name], values, rtol=1e-6, atol=1e-6)


def test_without_a_plan_every_package_is_the_published_model_and_nobody_keeps_it() -> None:
    down, cache = Downlink(None), MemoryModelCache()
    for number, published in enumerate(walk(0, 3), 1):
        published["mask"] = np.array([-np.inf, np.nan])
        down.publish(published, number)
        assert_same(down.told, published)
        received = receive(down.package(7), cache, "t", "7")
        assert_same(received.arrays, published)
        assert (received.kept, received.unkept) == (False, False)  # nobody asked for it
        assert down.package(7) == Package.of(published).to_bytes()
        down.confirm(7)
    assert cache.load("t", "7") is None


def test_the_first_model_is_exact_and_the_same_model_again_is_free() -> None:
    down, models = Downlink("sign()"), walk(0, 2)
    down.publish(models[0], 1)
    assert_same(down.told, models[0])
    down.package(1)
    down.confirm(1)
    down.publish(models[1], 2)
    told, data = down.told, down.package(1)
    down.publish({name: values.copy() for name, values in models[1].items()}, 3)
    assert down.told is told
    assert down.package(1) is data
    down.confirm(1)
    assert len(down.package(1)) == HEADER.size


def test_published_arrays_are_copied_and_told_ones_are_read_only() -> None:
    down, published = Downlink(None), model()
    down.publish(published, 1)
    published["fc.weight"][:] = 0
    assert_same(Package.from_bytes(down.package(1)).open(), model())
    with pytest.raises(ValueError, match="read-only"):
        down.told["fc.weight"][0] = 1


def test_nodes_in_the_same_state_share_bytes() -> None:
    down, models = Downlink("uniform(4)"), walk(0, 3)
    for number, published in enumerate(models, 1):
        down.publish(published, number)
        packages = [down.package(node, b"predictor") for node in range(5)]
        for node in range(4):  # the last one never answers
            down.confirm(node)
        assert len({id(data) for data in packages[:4]}) == 1
        assert (packages[4] is packages[0]) == (number == 1)
        assert Package.from_bytes(packages[0]).predictor == b"predictor"
        assert Package.from_bytes(down.package(9)).predictor is None


def test_history_is_kept_while_it_is_shorter_than_the_model() -> None:
    down, cache = Downlink("uniform(8)"), MemoryModelCache()
    models = walk(0, 8)
    down.publish(models[0], 1)
    receive(down.package(1), cache, "t", "1")
    down.confirm(1)
    kinds = []
    for number, published in enumerate(models[1:], 2):
        down.publish(published, number)
        data = down.package(1)
        package, whole = Package.from_bytes(data), Package.of(down.told, keep=True).to_bytes()
        kinds.append(len(package.chain))
        total = 16 + sum(len(link.to_bytes()) for link in package.chain)
        assert len(data) == (total if package.chain else len(whole)) <= len(whole)
        assert_same(receive(data, cache, "t", "1").arrays, down.told)
    assert kinds[:3] == [1, 2, 3]
    assert kinds[-1] == 0  # and from then on for ever, since the node never confirms


def test_a_late_answer_to_a_package_that_history_no_longer_reaches_is_no_news() -> None:
    down, models = Downlink("uniform(8)"), walk(0, 12)
    down.publish(models[0], 1)
    down.package(1)
    for number, published in enumerate(models[1:], 2):
        down.publish(published, number)
    down.confirm(1)
    assert Package.from_bytes(down.package(1)).model is not None


def test_a_frame_that_is_no_shorter_than_the_model_gives_way_to_the_exact_model() -> None:
    down, random = Downlink(Plan(fedcomp.Identity(), min_size=1000)), np.random.default_rng(0)
    for number in (1, 2):
        published = {"w": random.standard_normal(20)}
        down.publish(published, number)
        assert_same(down.told, published)
        assert Package.from_bytes(down.package(1)).model is not None
        down.confirm(1)


def test_a_model_that_is_not_finite_changes_nothing() -> None:
    down, models = Downlink("sign()"), walk(0, 2)
    down.publish(models[0], 1)
    told, data = down.told, down.package(1)
    bad = {**models[1], "fc.bias": np.full(30, np.nan, np.float32)}
    with pytest.raises(NonFiniteError, match=r"NaN or infinity in \['fc.bias'\]; keep the last round's model"):
        down.publish(bad, 2)
    with pytest.raises(LayoutError, match="complex64"):
        down.publish({"c": np.zeros(3, np.complex64)}, 2)
    assert down.told is told
    assert down.package(1) is data


def test_other_tensors_and_differences_beyond_float32_start_again(caplog: pytest.LogCaptureFixture) -> None:
    down = Downlink("uniform(8)")
    big = {"w": np.full(64, 3e38, np.float32)}
    wide = {"w": np.full(64, 1e300)}
    series: list[Model] = [big, {"w": -big["w"]}, {"v": big["w"]}, {"v": np.ones(64)}, {"v": -wide["w"]}]
    for number, published in enumerate(series, 1):
        with caplog.at_level(logging.INFO):
            down.publish(published, number)
        assert_same(down.told, published)
        assert Package.from_bytes(down.package(1)).model is not None
        down.confirm(1)
    assert caplog.text.count("clients get the whole model") == 4
    assert caplog.text.count("cannot be coded") == 2


def test_a_model_that_would_not_decode_to_finite_values_starts_again(caplog: pytest.LogCaptureFixture) -> None:
    """sign() decodes to the mean magnitude: added to a value near the largest float16 it overflows."""
    down = Downlink(Plan(fedcomp.Sign(), gentle_share=0))
    start, new = np.zeros(64, np.float16), np.full(64, 60000, np.float16)
    start[0], new[0] = 60000, 60032
    down.publish({"w": start}, 1)
    down.publish({"w": new}, 2)
    assert_same(down.told, {"w": new})
    assert "cannot be coded" in caplog.text
    assert "not finite in float16" in caplog.text


def test_another_training_starts_from_nothing() -> None:
    down = Downlink("sign()")
    with pytest.raises(FedcompError, match="publish a model before"):
        _ = down.told
    with pytest.raises(FedcompError, match="publish a model before"):
        _ = down.digest
    with pytest.raises(FedcompError, match="publish a model before"):
        down.package(1)
    down.publish(model(), 1)
    down.package(1)
    down.confirm(1)
    down.restart()
    down.publish(model(), 1)
    assert Package.from_bytes(down.package(1)).model is not None


@pytest.mark.parametrize("codec", ["qsgd()", "topk(0.1, values=terngrad())", "eden(1)", "noisysign()"])
def test_codecs_that_are_not_contractive_are_refused(codec: str) -> None:
    with pytest.raises(ConfigError, match="it is not contractive, so the distance to what clients hold would grow"):
        Downlink(codec)


def test_plans_that_clients_could_not_read_are_refused() -> None:
    x = np.random.default_rng(0).standard_normal(4096).astype(np.float32)
    learnt = VectorQuantizer(shared=True).adapt(x, fedcomp.Layout.vector(4096), np.random.default_rng(0))
    with pytest.raises(ConfigError, match=r"clients could not read frames of vq.*side information"):
        Downlink(learnt)


# --- what a client keeps ---------------------------------------------------------------------------------------------


@pytest.fixture(params=["file", "memory"])
def cache(request: pytest.FixtureRequest, tmp_path: Path) -> ModelCache:
    return FileModelCache(tmp_path) if request.param == "file" else MemoryModelCache()


def test_models_come_back_for_their_training_and_node_only(cache: ModelCache) -> None:
    data = Package.of(model(), b"predictor", keep=True).to_bytes()
    received = receive(data, cache, "1", "partition-0")
    assert (received.predictor, received.kept, received.digest) == (b"predictor", True, model_digest(model()))
    for values in received.arrays.values():  # training in place
        values[...] = 0
    kept = cache.load("1", "partition-0")
    assert kept is not None
    assert_same(kept, model())
    kept["fc.weight"][:] = 0
    assert_same(cache.load("1", "partition-0"), model())
    assert cache.load("1", "partition-1") is None
    assert cache.load("2", "partition-0") is None


def test_a_process_keeps_the_models_of_its_last_trainings_only() -> None:
    """C5: a client that lives through hundreds of trainings does not fill up, and forgets none that is going on."""
    cache, package = MemoryModelCache(), Package.of(model(), keep=True).to_bytes()
    for number in range(30):
        cache.save(str(number), "1", package)
        assert cache.load("0", "1") is not None
    assert [n for n in range(30) if cache.load(str(n), "1") is not None] == [0, *range(23, 30)]


def test_a_lost_model_is_reported_and_the_whole_one_follows(cache: ModelCache) -> None:
    down, models = Downlink("sign()"), walk(0, 3)
    for number, published in enumerate(models[:2], 1):
        down.publish(published, number)
        receive(down.package(1), cache, "t", "1")
        down.confirm(1)
    down.publish(models[2], 3)
    chain = down.package(1)
    with pytest.raises(StaleModelError, match="got none"):
        receive(chain, cache, "t", "restarted")
    receive(Package.of(models[0], keep=True).to_bytes(), cache, "t", "1")  # an old backup
    with pytest.raises(StaleModelError, match=f"got {model_digest(models[0]).hex()}"):
        receive(chain, cache, "t", "1")
    kept = cache.load("t", "1")
    assert kept is not None
    assert_same(kept, models[0])
    down.forget(1)
    assert_same(receive(down.package(1), cache, "t", "1").arrays, down.told)
    down.confirm(1)
    assert len(down.package(1)) == HEADER.size
    assert_same(receive(down.package(1), cache, "t", "1").arrays, down.told)


def test_a_node_that_keeps_failing_with_chains_gets_whole_models(caplog: pytest.LogCaptureFixture) -> None:
    down, models = Downlink("sign()"), iter(walk(0, 12))
    chains = []
    for number, published in enumerate(models, 1):
        down.publish(published, number)
        chains.append(Package.from_bytes(down.package(1)).model is None)
        down.forget(1) if chains[-1] and number != 4 else down.confirm(1)
        if number in (3, 6, 8):  # the same model once more, which any machine can open
            assert len(down.package(1)) == HEADER.size
            down.confirm(1)
    assert chains == [False, True, False, True] + [True, False, True, False, True] + [False] * 3
    assert "node 1 failed with 3 chains in a row" in caplog.text


@pytest.mark.parametrize("damage", [b"", b"rubbish" * 9, None, "bit"])
def test_a_damaged_file_counts_as_none(damage: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache = FileModelCache(tmp_path)
    receive(Package.of(model(), keep=True).to_bytes(), cache, "t", "n")
    path = tmp_path / "t" / "n.model"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data) if damage == "bit" else path.read_bytes()[:-3] if damage is None else damage)
    assert cache.load("t", "n") is None
    assert "cannot be used" in caplog.text
    with pytest.raises(StaleModelError):
        receive(Package(model_digest(model())).to_bytes(), cache, "t", "n")
    assert receive(Package.of(model(), keep=True).to_bytes(), cache, "t", "n").kept
    assert cache.load("t", "n") is not None


def test_a_full_disk_does_not_stop_the_round(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    received = receive(Package.of(model(), keep=True).to_bytes(), FileModelCache(tmp_path / "file"), "t", "n")
    assert_same(received.arrays, model())
    assert (received.kept, received.unkept) == (False, True)
    assert "model cannot be stored" in caplog.text
    assert "FEDCOMP_STATE_DIR" in caplog.text


def test_the_frame_says_that_the_model_could_not_be_kept() -> None:
    """B9: otherwise the server sends differences to a model that is not there, which fail for ever."""

    class Full(MemoryModelCache):
        def save(self, training: str, node: str, package: bytes) -> None:
            raise FedcompError("the disk is full")

    down = Downlink("sign()")
    down.publish(model(), 1)
    request = Request(Plan(fedcomp.Sign()), 1).to_text()

    def reply(message: Message, context: Context) -> Message:
        return Message(RecordDict({"arrays": message.content.array_records["arrays"]}), reply_to=message)

    def frame(package: bytes, cache: ModelCache) -> bytes:
        packed = Array(dtype="uint8", shape=(len(package),), stype=MODEL_STYPE, data=package)
        content = RecordDict({"arrays": ArrayRecord({KEY: packed}), "config": ConfigRecord({KEY: request})})
        context = Context(7, 1, {}, RecordDict(), {})
        with InProcessGrid(ClientApp(), 1) as grid:
            message = grid.create_message(content, "train", 1001, "1")
            answer = CompressMod(MemoryStore(), models=cache)(message, context, reply)
        return next(iter(answer.content.array_records["arrays"].values())).data

    def unkept(package: bytes, cache: ModelCache) -> bool:
        seen = wire.peek(frame(package, cache))
        assert seen is not None
        return seen[1].unkept

    assert unkept(down.package(1), Full())
    assert not unkept(down.package(1), MemoryModelCache())
    assert not unkept(Package.of(model()).to_bytes(), Full())


def test_the_old_file_stays_if_the_new_one_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = FileModelCache(tmp_path)
    receive(Package.of(model(), keep=True).to_bytes(), cache, "t", "n")

    def full(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    assert not receive(Package.of(model(1), keep=True).to_bytes(), cache, "t", "n").kept
    kept = cache.load("t", "n")
    assert kept is not None
    assert_same(kept, model())
    assert [path.name for path in tmp_path.rglob("*.*")] == ["n.model"]


def test_the_cache_can_be_pickled_and_finds_its_directory_when_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = pickle.loads(pickle.dumps(FileModelCache()))
    monkeypatch.setenv("FEDCOMP_STATE_DIR", str(tmp_path))
    receive(Package.of(model(), keep=True).to_bytes(), cache, "t", "n")
    assert (tmp_path / "t" / "n.model").exists()
