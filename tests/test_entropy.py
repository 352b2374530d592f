"""fedcomp.entropy: round trips, sizes near the entropy, stable bytes, and damaged data that must end in FrameError."""

import math
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fedcomp.entropy import (
    SparseSymbols,
    decode_positions,
    decode_symbols,
    encode_positions,
    encode_symbols,
    models,
    narrow,
    rans,
)
from fedcomp.entropy.bits import BitReader, BitWriter, bit_length, pack_bits, read_varint, unpack_bits, write_varint
from fedcomp.errors import ConfigError, FedcompError, FrameError

SIZES = [1, 2, 3, 15, 16, 17, 255, 256, 257, 4096, 65536]
COUNTS = [0, 1, 7, 8, 9, 100, 128, 129, 513, 5000]
SKEWS = ["uniform", "constant", "rare", "geometric", "steep", "halves"]
GARBAGE = b"\xa5\x00\xff\x3c" * 3

Symbols = NDArray[Any]


def draw_symbols(skew: str, count: int, size: int, seed: int) -> Symbols:
    rng = np.random.default_rng(seed)
    if skew == "uniform":
        values = rng.integers(0, size, count)
    elif skew == "constant":
        values = np.full(count, rng.integers(0, size))
    elif skew == "rare":
        values = np.where(rng.random(count) < 0.002, rng.integers(0, size, count), size - 1)
    elif skew == "geometric":
        values = np.minimum(rng.geometric(min(4 / size, 0.5), count) - 1, size - 1)
    elif skew == "steep":
        values = np.minimum(rng.geometric(0.8, count) - 1, size - 1)
    else:  # the first half is one symbol, so some phases of the coder write no words at all
        values = np.where(np.arange(count) < count // 2, 0, rng.integers(0, size, count))
    return values.astype(np.uint8 if size <= 256 else np.uint16)


def draw_positions(count: int, universe: int, seed: int) -> NDArray[np.int64]:
    """A uniformly random set; of about `count` when the universe is too large to permute."""
    rng = np.random.default_rng(seed)
    if universe <= 1 << 20:
        return np.sort(rng.permutation(universe)[:count]).astype(np.int64)
    return np.unique(rng.integers(0, universe, count))


def laplace(count: int, scale: float, top: int, seed: int = 0) -> Symbols:
    """Rounded Laplace values in [-top, top], shifted to [0, 2 top]."""
    values = np.rint(np.random.default_rng(seed).laplace(size=count) * scale)
    return (np.clip(values, -top, top) + top).astype(np.uint8)


def entropy_bytes(symbols: Symbols) -> float:
    counts = np.bincount(symbols)
    shares = counts[counts > 0] / symbols.size
    return float(-(shares * np.log2(shares)).sum() * symbols.size / 8)


def set_bytes(count: int, universe: int) -> float:
    """log2 C(universe, count) / 8."""
    return (math.lgamma(universe + 1) - math.lgamma(count + 1) - math.lgamma(universe - count + 1)) / math.log(256)


def check_symbols(symbols: Symbols, size: int) -> bytes:
    data = encode_symbols(symbols, size)
    for tail in (b"", GARBAGE):
        decoded, used = decode_symbols(memoryview(data + tail), symbols.size, size)
        assert used == len(data)
        assert decoded.dtype == (np.uint8 if size <= 256 else np.uint16)
        np.testing.assert_array_equal(decoded, symbols)
    return data


def check_positions(positions: NDArray[np.int64], universe: int) -> bytes:
    data = encode_positions(positions, universe)
    for tail in (b"", GARBAGE):
        decoded, used = decode_positions(memoryview(data + tail), positions.size, universe)
        assert used == len(data)
        assert decoded.dtype == np.int64
        np.testing.assert_array_equal(decoded, positions)
    return data


class TestBits:
    @given(width=st.integers(0, 48), count=st.integers(0, 40), seed=st.integers(0, 99))
    def test_fixed_width(self, width: int, count: int, seed: int) -> None:
        values = np.random.default_rng(seed).integers(0, 1 << width, count, dtype=np.uint64)
        data = pack_bits(values, width)
        assert len(data) == -(-count * width // 8)
        np.testing.assert_array_equal(unpack_bits(data + GARBAGE, count, width), values)

    def test_fixed_width_refuses(self) -> None:
        with pytest.raises(FrameError, match="truncated"):
            unpack_bits(b"\x01", 3, 3)
        with pytest.raises(FrameError, match="zero bits"):
            unpack_bits(b"\x80", 2, 3)
        assert unpack_bits(b"\xca", 2, 3, shared_tail=True).tolist() == [2, 1]

    @given(st.lists(st.tuples(st.integers(0, 48), st.integers(0, 2**48 - 1), st.integers(0, 2**40))))
    def test_fields(self, fields: list[tuple[int, int, int]]) -> None:
        widths = np.array([width for width, _, _ in fields], np.int64)
        values = np.array([value % (1 << width) for width, value, _ in fields], np.int64)
        tops = np.array([top for _, _, top in fields], np.int64)
        bounded = np.array([value % (top + 1) for _, value, top in fields], np.int64)
        writer = BitWriter()
        writer.put(values, widths)
        writer.put_bounded(bounded, tops)
        data = writer.to_bytes()
        reader = BitReader(data + GARBAGE)
        np.testing.assert_array_equal(reader.take(widths), values)
        np.testing.assert_array_equal(reader.take_bounded(tops), bounded)
        assert reader.finish() == len(data)

    def test_bit_length(self) -> None:
        values = [0, 1, 2, 3, 4, 7, 8, 2**40 - 1, 2**40, 2**60]
        assert bit_length(np.array(values)).tolist() == [value.bit_length() for value in values]

    @given(st.integers(0, 2**64 - 1))
    def test_varint(self, value: int) -> None:
        data = b"\x07" + write_varint(value)
        assert read_varint(data + GARBAGE, 1) == (value, len(data))
        for end in range(1, len(data)):
            with pytest.raises(FrameError):
                read_varint(data[:end], 1)

    @pytest.mark.parametrize("data", ["", "80", "8000", "ff808000", "80" * 9 + "02", "ff" * 10, "ff" * 10 + "01"])
    def test_varint_refuses(self, data: str) -> None:
        with pytest.raises(FrameError):
            read_varint(bytes.fromhex(data))

    @pytest.mark.parametrize("value", [-1, 2**64])
    def test_varint_range(self, value: int) -> None:
        with pytest.raises(ConfigError):
            write_varint(value)


class TestModels:
    @given(st.lists(st.integers(1, 2**40), min_size=2, max_size=200), st.integers(0, 8))
    def test_normalise(self, counts: list[int], slack: int) -> None:
        precision = min((len(counts) - 1).bit_length() + slack, models.MAX_PRECISION)
        frequencies = models.normalise(np.array(counts), precision)
        assert frequencies.sum() == 1 << precision
        assert frequencies.min() >= 1

    def test_log2(self) -> None:
        values = np.concatenate([np.arange(1, 5000), 3 ** np.arange(33)])
        exact = np.log2(values.astype(np.float64))
        assert np.abs(models.log2_fixed(values) / (1 << models.COST_SHIFT) - exact).max() < 2**-11

    @given(st.integers(2, 300), st.integers(0, 99))
    def test_table(self, size: int, seed: int) -> None:
        symbols = draw_symbols(SKEWS[seed % len(SKEWS)], 1000, size, seed)
        table = models.fit(np.bincount(symbols, minlength=size))
        if table.symbols.size == 1:
            return
        data = models.write_table(table, size)
        read, used = models.read_table(data + GARBAGE, size, table.precision, 1000)
        assert used == len(data)
        np.testing.assert_array_equal(read.symbols, table.symbols)
        np.testing.assert_array_equal(read.frequencies, table.frequencies)

    def test_tables_are_short(self) -> None:
        for size, nbytes in ((2, 2), (4, 4), (16, 16), (256, 190)):
            counts = np.bincount(draw_symbols("geometric", 20_000, size, 1), minlength=size)
            table = models.fit(counts)
            assert len(models.write_table(table, size)) <= nbytes


class TestSymbols:
    @pytest.mark.parametrize("size", SIZES)
    @settings(max_examples=40, deadline=None)
    @given(skew=st.sampled_from(SKEWS), count=st.sampled_from(COUNTS), seed=st.integers(0, 999))
    def test_round_trip(self, size: int, skew: str, count: int, seed: int) -> None:
        data = check_symbols(draw_symbols(skew, count, size, seed), size)
        width = (size - 1).bit_length()
        assert len(data) <= (1 + -(-count * width // 8) if count and width else 0)

    @pytest.mark.parametrize("size", [2, 15, 256, 65536])
    @pytest.mark.parametrize("skew", SKEWS)
    def test_round_trip_long(self, size: int, skew: str) -> None:
        check_symbols(draw_symbols(skew, 150_001, size, 5), size)

    @settings(max_examples=60, deadline=None)
    @given(values=st.lists(st.integers(0, 4), max_size=300))
    def test_round_trip_any(self, values: list[int]) -> None:
        check_symbols(np.array(values, np.uint8), 5)

    @pytest.mark.parametrize(
        ("count", "scale", "top", "percent"),
        [(10_000, 2.0, 15, 2.0), (50_000, 0.7, 7, 1.0), (50_000, 2.0, 15, 0.8), (50_000, 20.0, 127, 1.2),
         (500_000, 0.2, 7, 0.8), (500_000, 0.7, 7, 0.6), (500_000, 2.0, 15, 0.5), (500_000, 20.0, 127, 0.5),
         (2_000_000, 2.0, 15, 0.5)],
    )  # fmt: skip
    def test_near_entropy(self, count: int, scale: float, top: int, percent: float) -> None:
        symbols = laplace(count, scale, top)
        assert len(encode_symbols(symbols, 2 * top + 1)) <= entropy_bytes(symbols) * (1 + percent / 100)

    @pytest.mark.parametrize(("count", "share"), [(10_000, 0.01), (50_000, 0.01), (500_000, 0.001), (500_000, 0.05)])
    def test_near_entropy_sparse(self, count: int, share: float) -> None:
        symbols = (np.random.default_rng(2).random(count) < share).astype(np.uint8)
        assert len(encode_symbols(symbols, 2)) <= entropy_bytes(symbols) * 1.02 + 5

    @pytest.mark.parametrize(("scale", "top"), [(0.2, 7), (0.7, 7), (0.7, 15), (1.0, 7)])
    @pytest.mark.parametrize("count", [10, 20, 40, 70, 100])
    def test_short_streams(self, count: int, scale: float, top: int) -> None:
        draws = [laplace(count, scale, top, seed) for seed in range(20)]
        surplus = [len(encode_symbols(symbols, 2 * top + 1)) - entropy_bytes(symbols) for symbols in draws]
        assert np.mean(surplus) <= 10.5
        assert max(surplus) <= 11.5

    def test_hopeless_streams_run_no_coder(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(rans, "encode", None)
        for size in (2, 16, 256, 65536):
            symbols = draw_symbols("uniform", 20_000, size, 0)
            assert len(encode_symbols(symbols, size)) == 1 + 20_000 * (size - 1).bit_length() // 8

    @pytest.mark.parametrize(
        ("symbols", "size"),
        [(np.zeros(3, np.uint8), 0), (np.zeros(3, np.uint8), 65537), (np.array([0, 3], np.uint8), 3),
         (np.array([1], np.uint8), 1), (np.zeros((2, 2), np.uint8), 4), (np.zeros(3, np.int64), 4)],
    )  # fmt: skip
    def test_refuses(self, symbols: Symbols, size: int) -> None:
        with pytest.raises(ConfigError):
            encode_symbols(symbols, size)

    def test_input_is_not_written(self) -> None:
        symbols = laplace(3000, 1.0, 7)
        symbols.flags.writeable = False
        decoded, _ = decode_symbols(encode_symbols(symbols, 15), 3000, 15)
        decoded[:] = 0


class TestPositions:
    @settings(max_examples=150, deadline=None)
    @given(universe=st.integers(1, 3000), share=st.floats(0, 1), seed=st.integers(0, 999))
    def test_round_trip(self, universe: int, share: float, seed: int) -> None:
        check_positions(draw_positions(round(share * universe), universe, seed), universe)

    @settings(max_examples=50, deadline=None)
    @given(st.sets(st.integers(0, 2**40 - 1), max_size=50))
    def test_round_trip_wide(self, members: set[int]) -> None:
        check_positions(np.array(sorted(members), np.int64), 1 << 40)

    @pytest.mark.parametrize("universe", [1, 2, 7, 8, 9, 1000])
    def test_extremes_need_no_bytes(self, universe: int) -> None:
        assert check_positions(np.zeros(0, np.int64), universe) == b""
        assert check_positions(np.arange(universe, dtype=np.int64), universe) == b""

    @pytest.mark.parametrize(
        ("universe", "count"),
        [
            (universe, round(universe * share))
            for universe in (300, 1000, 10_000, 100_000, 1_000_000)
            for share in (0.001, 0.01, 0.06, 0.1, 0.15, 0.2, 0.25, 0.3, 0.36, 0.4, 0.45, 0.5, 0.7, 0.99)
            if universe * min(share, 1 - share) >= 50
        ],
    )
    def test_near_the_bound(self, universe: int, count: int) -> None:
        data = check_positions(draw_positions(count, universe, 3), universe)
        assert len(data) <= 1.02 * set_bytes(count, universe) + 4

    @pytest.mark.parametrize("universe", [100, 1000, 10**6, 10**9, 2**40])
    @pytest.mark.parametrize("count", [1, 2, 3, 5, 13, 30, 49])
    def test_small_sets(self, universe: int, count: int) -> None:
        surplus = []
        for seed in range(20):
            positions = draw_positions(count, universe, seed)
            surplus.append(len(encode_positions(positions, universe)) - set_bytes(positions.size, universe))
        assert np.mean(surplus) <= 2.5
        assert max(surplus) <= 3.5

    def test_clusters_cost_less(self) -> None:
        rng = np.random.default_rng(4)
        rows = rng.random((784, 256)) < 0.1
        rows[rng.random(784) < 0.5] = False  # dead image rows
        positions = np.flatnonzero(rows).astype(np.int64)
        assert len(check_positions(positions, rows.size)) < 0.9 * set_bytes(positions.size, rows.size)
        assert len(check_positions(np.arange(1000, 3000, dtype=np.int64), 10**6)) <= 12

    @pytest.mark.parametrize(
        ("positions", "universe"),
        [([1, 1], 5), ([2, 1], 5), ([-1, 1], 5), ([1, 5], 5), ([0], 0), ([0], 2**40 + 1)],
    )
    def test_refuses(self, positions: list[int], universe: int) -> None:
        with pytest.raises(ConfigError):
            encode_positions(np.array(positions, np.int64), universe)

    def test_refuses_dtype_and_count(self) -> None:
        with pytest.raises(ConfigError):
            encode_positions(np.zeros(1, np.int32), 5)
        with pytest.raises(FrameError):
            decode_positions(b"\x00", 6, 5)


# Streams of every kind, from formulas: their bytes must never change, or old frames could not be read.
GOLDEN_SYMBOLS = {
    "constant": (np.full(9, 300, np.uint16), 1000, "002c01"),
    "packed": (np.arange(8, dtype=np.uint8), 8, "0188c6fa"),
    "packed wide": (np.arange(5, dtype=np.uint16) * 1021 % 4099, 5000, "0100fdfaf7f4609cf500"),
    "rans single": (
        np.minimum(np.arange(60) % 9 * (np.arange(60) % 4 == 0), 5).astype(np.uint8),
        16,
        "320afc3f50a76a2aa7842972881b7452",
    ),
    "rans lanes": (
        np.where(np.arange(520) % 7, 0, np.arange(520) % 5).astype(np.uint8),
        5,
        (
            "42ffff0151018bc0714f6b3780a0bd88b2559516510ba04fcb60d3018cc2fe2386db48ccd8415036e4fb007380c8812d"
            "1e660b8a5a872e00de"
        ),
    ),
    "sparse": (
        np.where(np.arange(400) % 37, 2, np.arange(400) % 5).astype(np.uint8),
        6,
        "0302090320114212212455aa0158844500",
    ),
}
GOLDEN_POSITIONS = {
    "rice": (np.arange(12, dtype=np.int64) ** 2 * 7, 1000, "03804189b0cf68a84d48bf2a09"),
    "bitmap": (
        np.flatnonzero(np.arange(648) ** 3 % 107 < 23).astype(np.int64),
        648,
        (
            "04767f1f0da72fd9b141b2a5144ecdfa512d6714648aabf7f927210320469efbdc41154043d53d943f981b4463f9e87f"
            "96c2121038c1655ca555efa5a5e9f64e9a"
        ),
    ),
    "classes": (np.flatnonzero(np.arange(3000) % 500 < 40).astype(np.int64), 3000, "0503000505000ddc36001a10044110"),
    "complement": (np.flatnonzero(np.arange(300) % 20).astype(np.int64), 300, "02d8b66ddbb62d4992244992"),
}
KINDS = {"constant": 0, "packed": 1, "packed wide": 1, "rans single": 2, "rans lanes": 2, "sparse": 3}
FORMS = {"rice": range(4), "bitmap": [4], "classes": [5], "complement": range(4)}


@pytest.mark.parametrize("name", GOLDEN_SYMBOLS)
def test_golden_symbols(name: str) -> None:
    symbols, size, golden = GOLDEN_SYMBOLS[name]
    data = check_symbols(symbols, size)
    assert data[0] & 15 == KINDS[name]
    assert data.hex() == golden
    np.testing.assert_array_equal(decode_symbols(bytes.fromhex(golden), symbols.size, size)[0], symbols)


@pytest.mark.parametrize("name", GOLDEN_POSITIONS)
def test_golden_positions(name: str) -> None:
    positions, universe, golden = GOLDEN_POSITIONS[name]
    data = check_positions(positions, universe)
    assert data[0] in FORMS[name]
    assert data.hex() == golden
    np.testing.assert_array_equal(decode_positions(bytes.fromhex(golden), positions.size, universe)[0], positions)


@contextmanager
def bounded_memory(count: int, nbytes: int) -> Iterator[None]:
    """Fails when the peak inside is not linear in the symbols, the data and the largest table."""
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak <= 160 * count + 32 * nbytes + 64 * 65536


def refused(decode: Callable[..., tuple[NDArray[Any], int]], data: bytes, count: int, limit: int) -> bool:
    """True for FrameError; any other result has to be valid."""
    try:
        values, used = decode(data, count, limit)
    except FrameError:
        return True
    assert 0 <= used <= len(data)
    assert values.shape == (count,)
    if count:
        assert 0 <= int(values.min()) <= int(values.max()) < limit
    if values.dtype == np.int64:
        assert (np.diff(values) > 0).all()
    return False


STREAMS: dict[str, tuple[Callable[..., tuple[NDArray[Any], int]], bytes, int, int]] = {}
for _name, (_symbols, _size, _) in GOLDEN_SYMBOLS.items():
    STREAMS[_name] = (decode_symbols, encode_symbols(_symbols, _size), _symbols.size, _size)
for _name, (_positions, _universe, _) in GOLDEN_POSITIONS.items():
    STREAMS[_name] = (decode_positions, encode_positions(_positions, _universe), _positions.size, _universe)


@pytest.mark.parametrize("name", STREAMS)
def test_truncations(name: str) -> None:
    decode, data, count, limit = STREAMS[name]
    with bounded_memory(count, len(data)):
        for end in range(len(data)):
            assert refused(decode, data[:end], count, limit)


@pytest.mark.parametrize("name", STREAMS)
def test_bit_flips(name: str) -> None:
    decode, data, count, limit = STREAMS[name]
    flips = [bytearray(data) for _ in range(8 * len(data))]
    for bit, flipped in enumerate(flips):
        flipped[bit // 8] ^= 1 << bit % 8
    with bounded_memory(count, len(data)):  # tracing is slow: only where sizes are read, in the first bytes
        for flipped in flips[:64]:
            refused(decode, bytes(flipped), count, limit)
    for flipped in flips[64:]:
        refused(decode, bytes(flipped), count, limit)


@pytest.mark.parametrize("part", range(4))
def test_random_bytes(part: int) -> None:
    rng = np.random.default_rng(part)
    for _ in range(500):
        data = bytearray(rng.integers(0, 256, int(rng.integers(0, 200)), dtype=np.uint8))
        if data and part % 2:  # most mode bytes are refused at once: try those that are not
            data[0] = rng.choice([0, 1, 2, 3, 4, 5, 0x52, 0x72, 0xB2, 0xF2])
        count = int(rng.choice([1, 5, 100, 128, 129, 600, 3000]))
        size = int(rng.choice(SIZES))
        universe = int(rng.choice([count, count + 3, 3 * count, 100 * count, 2**40]))
        with bounded_memory(count, len(data)):
            refused(decode_symbols, bytes(data), count, size)
        with bounded_memory(max(count, min(universe, 16 * count)), len(data)):
            refused(decode_positions, bytes(data), count, universe)


def test_damage_in_the_coder_is_seen() -> None:
    """A flipped bit in the words leaves some lane in a wrong state."""
    symbols = laplace(3000, 2.0, 15)
    data = bytearray(encode_symbols(symbols, 31))
    seen = 0
    for byte in range(200, len(data), 20):
        data[byte] ^= 16
        seen += refused(decode_symbols, bytes(data), 3000, 31)
        data[byte] ^= 16
    assert seen == len(range(200, len(data), 20))


@pytest.mark.parametrize("name", STREAMS)
def test_few_lanes_take_the_same_steps_in_plain_python(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    decode, data, count, limit = STREAMS[name]
    outcomes: dict[int, list[Any]] = {}
    for widest in (0, 8, 1 << 12):  # none, those that are quicker, all
        monkeypatch.setattr(narrow, "WIDEST", widest)
        values = decode(memoryview(data), count, limit)[0]
        again = encode_symbols(values, limit) if decode is decode_symbols else encode_positions(values, limit)
        assert again == data
        damaged = [data[:end] for end in range(0, len(data), 7)]
        damaged += [data[:i] + bytes([data[i] ^ 16]) + data[i + 1 :] for i in range(0, len(data), 3)]
        outcomes[widest] = [_outcome(decode, each, count, limit) for each in damaged]
    assert outcomes[0] == outcomes[8] == outcomes[1 << 12]


def _outcome(decode: Callable[..., Any], data: bytes, count: int, limit: int) -> tuple[Any, ...]:
    try:
        values, used = decode(memoryview(data), count, limit)
        return values.tolist(), used
    except FrameError as error:
        return type(error), str(error)


def test_errors_are_fedcomp_errors() -> None:
    assert issubclass(FrameError, FedcompError)
    assert issubclass(ConfigError, FedcompError)


def test_sparse_symbols_know_their_places_and_nothing_made_of_them_does() -> None:
    symbols = np.full(1000, 7, np.uint8)
    symbols[[3, 500, 999]] = 1, 9, 0
    decoded, _ = decode_symbols(encode_symbols(symbols, 12), 1000, 12)
    assert isinstance(decoded, SparseSymbols)
    assert np.array_equal(decoded, symbols)
    assert decoded.common == 7
    assert decoded.places is not None
    assert decoded.places.tolist() == [3, 500, 999]
    for derived in (decoded[400:], decoded + 1, decoded.astype(np.uint16)):
        assert getattr(derived, "places", None) is None
    with pytest.raises(ValueError, match="read-only"):
        decoded[0] = 1
