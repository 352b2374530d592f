"""What the sparse, rotated, sketched, lattice and residual codecs promise beyond the shared laws."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
from families_sparse import CODECS
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

import fedcomp
from fedcomp import Codec, ConfigError, Layout, Plan, Sign, Tensor, TopK, Uniform, nmse, seeded, wire
from fedcomp.codec import Columns, Count, Floats, Parts, PartSpec, Positions, Schema, Symbols, symbol_dtype
from fedcomp.codecs import hadamard, normal
from fedcomp.codecs.blocktopk import BlockTopK
from fedcomp.codecs.e8 import E8
from fedcomp.codecs.e8 import nearest as nearest_e8
from fedcomp.codecs.eden import EDEN
from fedcomp.codecs.randk import RandomK
from fedcomp.codecs.rvq import ResidualVQ
from fedcomp.codecs.sketch import CountSketch, sketch, unsketch
from fedcomp.codecs.threshold import Threshold
from fedcomp.layout import Vector
from strategies import layouts

MAX = float(np.finfo(np.float32).max)
WORDS_OF_7 = ["0x78046c3e44c57fae", "0x6d17e4bdf94f8ac5"]
SUBSET_OF_7 = [23, 27, 37, 62, 70]
FLIPS_OF_7 = [0, 2, 4, 5, 6, 9, 10, 11, 12, 13, 14, 15, 16, 17]


def trip(codec: Codec, x: Vector, seed: int = 0) -> Vector:
    layout = Layout.vector(x.size)
    return codec.decode(codec.encode(x, layout, fedcomp.generator(seed, 0, 0)), layout)


def frame_size(codec: Codec, x: Vector) -> int:
    layout, plan = Layout.vector(x.size), Plan(codec, min_size=0, gentle_share=0)
    parts = codec.encode(x, layout, fedcomp.generator(0, 0, 0))
    return len(wire.pack(wire.Contents(plan, layout, 1, [parts], {}), layout))


def gauss(size: int, seed: int = 0) -> Vector:
    return np.random.default_rng(seed).standard_normal(size).astype(np.float32)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("randk", "give either fraction or k"),
        ("randk(0.1, k=3)", "give either fraction or k"),
        ("randk(2)", "fraction: expected a number above 0 to 1, got 2"),
        ("randk(0.1, values=3)", "values: expected a Codec"),
        ("randk(0.1, scaled=2)", "scaled: expected True or False, got 2"),
        ("blocktopk", "missing 1 required"),
        ("blocktopk(0.1, block=0)", "block: expected a whole number"),
        ("threshold(0)", "tau: expected a number above 0"),
        ("eden(0)", "bits: expected a number above 0 to 8, got 0"),
        ("eden(9)", "bits: expected a number above 0 to 8, got 9"),
        ("eden(1, scale='best')", "scale: expected one of 'unbiased', 'mse'"),
        ("eden(1, rounds=3)", "rounds: expected a whole number from 1 to 2"),
        ("sketch", "give either columns or ratio"),
        ("sketch(3, columns=5, ratio=2)", "give either columns or ratio"),
        ("sketch(16, 5)", "rows: expected a whole number from 1 to 15"),
        ("e8", "give either bits or step"),
        ("e8(2, step=1)", "give either bits or step"),
        ("rvq(9)", "stages: expected a whole number from 1 to 8"),
        ("rvq(dim=3, block=64)", "block must be a multiple of dim"),
        ("rvq(2, 1, 3, codebook='AAAAAA==')", "codebook has 2 vectors of 1, expected 4 of 1"),
    ],
)
def test_mistakes_are_named(text: str, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        fedcomp.parse_codec(text)


# --- whatever a frame may hold ---------------------------------------------------------------------------------------


def forged(schema: Schema, rng: np.random.Generator, extreme: bool) -> Parts:
    """Parts that fit the schema and nothing else; the extreme ones at their limits."""
    parts: Parts = {}
    try:
        spec = next(schema)
        while True:
            parts[spec.name] = _forge(spec, rng, extreme)
            spec = schema.send(parts[spec.name])
    except StopIteration:
        return parts


def _forge(spec: PartSpec, rng: np.random.Generator, extreme: bool) -> NDArray[Any]:
    match spec:
        case Floats():
            ends = np.array([spec.low, spec.high], np.float32)
            values = rng.choice(ends, spec.count) if extreme else rng.uniform(-1, 1, spec.count)
            limit = float(np.finfo(np.float16).max) if spec.dtype == "float16" else MAX
            return np.clip(np.clip(values, spec.low, spec.high), -limit, limit).astype(np.float32)
        case Symbols():
            low = spec.size - 1 if extreme else 0
            return rng.integers(low, spec.size, spec.count).astype(symbol_dtype(spec.size))
        case Positions():
            return np.sort(rng.choice(spec.universe, spec.count, replace=False)).astype(np.int64)
        case Columns():
            ends = np.array([-32767, 32767])
            values = rng.choice(ends, spec.count) if extreme else rng.integers(-3, 4, spec.count)
            return values.astype(np.int32)
        case Count():
            return np.array(min(spec.high, 2**32 - 1) if extreme else rng.integers(0, min(spec.high, 40) + 1))


@pytest.mark.parametrize("codec", CODECS, ids=str)
@given(layout=layouts(), seed=st.integers(0, 2**32 - 1), extreme=st.booleans())
def test_forged_parts_decode_to_something_finite(codec: Codec, layout: Layout, seed: int, extreme: bool) -> None:
    decoded = codec.decode(forged(codec.schema(layout), np.random.default_rng(seed), extreme), layout)
    assert decoded.shape == (layout.size,)
    assert np.isfinite(decoded).all()


# --- shared randomness -----------------------------------------------------------------------------------------------


def test_seeded_randomness_never_changes() -> None:
    """Frames of other versions and machines depend on it."""
    assert [hex(w) for w in seeded.words(seeded.philox(7), 2).tolist()] == WORDS_OF_7
    assert np.flatnonzero(seeded.subset(seeded.philox(7), 5, 100)).tolist() == SUBSET_OF_7
    assert np.flatnonzero(seeded.flips(seeded.philox(7), 20)).tolist() == FLIPS_OF_7


@pytest.mark.parametrize(("k", "size"), [(0, 0), (0, 5), (5, 5), (1, 1), (1, 1000), (999, 1000), (500, 1000)])
def test_subsets_have_exactly_k_members(k: int, size: int) -> None:
    mask = seeded.subset(seeded.philox(3), k, size)
    assert (mask.size, int(np.count_nonzero(mask))) == (size, k)


@pytest.mark.parametrize("k", [2, 7])
def test_subsets_are_all_equally_likely(k: int) -> None:
    """36 pairs of 9, drawn directly or as the complement of the other 7: chi-square below its 99.9 % quantile."""
    draws, source = 18_000, seeded.philox(1)
    keys = [int(seeded.subset(source, k, 9).dot(1 << np.arange(9))) for _ in range(draws)]
    counts = np.unique(keys, return_counts=True)[1]
    assert counts.size == math.comb(9, k)
    expected = draws / counts.size
    assert np.square(counts - expected).sum() / expected < 67


# --- random-k --------------------------------------------------------------------------------------------------------


def test_randk_sends_no_position() -> None:
    x = gauss(100_000)
    for k in (1, 1000, 50_000):
        assert frame_size(RandomK(k=k), x) == frame_size(RandomK(k=k), np.zeros_like(x))
        assert frame_size(RandomK(k=k), x) <= 20 + 15 + 5 + 4 * k


@pytest.mark.parametrize("fraction", [0.05, 0.5, 0.9])
def test_randk_error_is_the_closed_form(fraction: float) -> None:
    x = gauss(200_000)
    assert nmse(x, trip(RandomK(fraction), x)) == pytest.approx(1 / fraction - 1, rel=0.05)
    assert nmse(x, trip(RandomK(fraction, scaled=False), x)) == pytest.approx(1 - fraction, rel=0.03)


def test_randk_keeps_the_values_themselves() -> None:
    x = gauss(1000)
    decoded = trip(RandomK(k=100, scaled=False), x)
    kept = np.flatnonzero(decoded)
    assert kept.size == 100
    assert np.array_equal(decoded[kept], x[kept])
    assert np.array_equal(trip(RandomK(k=5000), x), x)
    assert not np.array_equal(decoded, trip(RandomK(k=100, scaled=False), x, seed=1))


# --- block top-k and threshold ---------------------------------------------------------------------------------------


@given(layout=layouts(), block=st.integers(1, 40), seed=st.integers(0, 99))
def test_blocktopk_picks_what_a_sort_picks(layout: Layout, block: int, seed: int) -> None:
    x, kept = gauss(layout.size, seed), BlockTopK(0.3).kept
    edges = [a for _, where in layout.slices() for a in range(where.start, where.stop, block)] + [layout.size]
    pairs = list(itertools.pairwise(edges))
    best = sorted(pairs, key=lambda p: -float(np.square(x[p[0] : p[1]], dtype=np.float64).sum()))[: kept(len(pairs))]
    expected = np.zeros_like(x)
    for a, b in best:
        expected[a:b] = x[a:b]
    codec = BlockTopK(0.3, block=block)
    assert np.array_equal(codec.decode(codec.encode(x, layout, np.random.default_rng(0)), layout), expected)


def test_blocks_pay_less_for_positions() -> None:
    x = np.zeros((300, 32), np.float32)
    x[::10] = gauss(960).reshape(30, 32)
    blocks, single = BlockTopK(0.1, values=Uniform(8)), TopK(0.1, values=Uniform(8))
    assert nmse(x, trip(blocks, x.ravel()).reshape(x.shape)) < 1e-3
    assert frame_size(blocks, x.ravel()) < frame_size(single, x.ravel())


@pytest.mark.parametrize("tau", [0.5, 2.0, 3.0])
def test_threshold_keeps_exactly_what_reaches_it(tau: float) -> None:
    x = gauss(50_000)
    expected = np.abs(x) >= np.float32(tau * np.sqrt(np.square(x, dtype=np.float64).mean()))
    assert np.array_equal(trip(Threshold(tau), x), np.where(expected, x, 0))
    assert expected.mean() == pytest.approx(math.erfc(tau / math.sqrt(2)), rel=0.2)


def test_threshold_may_keep_nothing() -> None:
    x = np.full(1000, 3, np.float32)
    assert not trip(Threshold(1.1), x).any()
    assert frame_size(Threshold(1.1), x) < 45
    assert not trip(Threshold(1e6), np.full(10, MAX, np.float32)).any()
    tiny = np.array([1e-45, 0], np.float32)
    assert np.array_equal(trip(Threshold(0.01), tiny), tiny)


# --- EDEN ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 4, 8, 12, 16, 20, 24, 28, 32, 40, 56, 64, 80, 112, 128, 448])
def test_hadamard_transforms_are_orthogonal_with_entries_of_one(n: int) -> None:
    assert hadamard.size_below(n) == hadamard.size_above(n) == n
    unit = np.eye(n, dtype=np.float32)
    forward = np.stack([hadamard.transform(e.copy()) for e in unit], axis=1)
    assert (np.abs(forward) == 1).all()
    assert np.array_equal(forward @ forward.T, n * unit)
    assert np.array_equal(np.stack([hadamard.transform(e.copy(), inverse=True) for e in unit], axis=1), forward.T)


def test_hadamard_sizes_are_four_an_octave() -> None:
    sizes = sorted({hadamard.size_above(n) for n in range(1, 1025)})
    assert sizes == [1, 2, 4, 8, 12, *(m << k for k in range(6) for m in (16, 20, 24, 28)), 1024]
    assert all(hadamard.size_below(n) <= n <= hadamard.size_above(n) for n in range(1, 3000))


def test_large_transforms_agree_with_their_definition() -> None:
    """Sylvester's matrix, up to an order of its rows."""
    x = gauss(1 << 11)
    matrix: NDArray[Any] = np.ones((1, 1))
    while len(matrix) < x.size:
        matrix = np.kron([[1, 1], [1, -1]], matrix)
    assert np.allclose(np.sort(hadamard.transform(x.copy())), np.sort(matrix @ x), atol=1e-3)


@pytest.mark.parametrize("bits", range(1, 9))
def test_normal_levels_are_lloyds_fixed_point(bits: int) -> None:
    """Each level is the mean of the normal values nearest to it, and the distortion is the textbook's."""
    levels = normal.levels(bits).astype(np.float64)
    edges = np.concatenate([[-np.inf], (levels[1:] + levels[:-1]) / 2, [np.inf]])
    below = np.array([0.5 * math.erfc(-t / math.sqrt(2)) for t in edges])
    density = np.exp(-np.square(edges) / 2) / math.sqrt(2 * math.pi)
    share = np.diff(below)
    assert np.allclose(-np.diff(density) / share, levels, atol=3e-6)
    distortion = 1 - (share * np.square(levels)).sum()
    assert distortion == pytest.approx(
        (0.3634, 0.11748, 0.03455, 0.0095, 0.0025, 6.4e-4, 1.63e-4, 4.12e-5)[bits - 1], rel=0.02
    )


@pytest.mark.parametrize(
    ("bits", "unbiased", "mse"),
    [
        (1, 0.571, 0.363),
        (2, 0.133, 0.1175),
        (3, 0.0358, 0.0345),
        (4, 0.0096, 0.0095),
        (8, 4.12e-5, 4.12e-5),
        (0.5, math.pi - 1, 1 - 1 / math.pi),
        (0.1, 5 * math.pi - 1, 1 - 0.2 / math.pi),
    ],
)
@pytest.mark.parametrize("kind", ["normal", "heavy"])
def test_eden_error_is_the_closed_form(bits: float, unbiased: float, mse: float, kind: str) -> None:
    x = gauss(300_000) if kind == "normal" else np.random.default_rng(0).standard_t(3, 300_000).astype(np.float32)
    assert nmse(x, trip(EDEN(bits), x)) == pytest.approx(unbiased, rel=0.02)
    assert nmse(x, trip(EDEN(bits, scale="mse"), x)) == pytest.approx(mse, rel=0.02)


def test_eden_between_integers() -> None:
    x = gauss(200_000)
    between = (0.11748 + 0.03455) / 2
    assert nmse(x, trip(EDEN(2.5), x)) == pytest.approx(between / (1 - between), rel=0.02)


@pytest.mark.parametrize("bits", [0.03, 0.1, 0.5, 1, 1.5, 2, 4])
@pytest.mark.parametrize("size", [50_890, 1_126_410])
def test_eden_pays_what_it_says(bits: float, size: int) -> None:
    """At most 2 % above nominal with everything in a large frame; 200 to 300 bytes where the budget is that small."""
    nbytes = frame_size(EDEN(bits), gauss(size))
    assert 8 * nbytes <= (1.02 if bits >= 0.1 else 1.03) * bits * size + 8 * 48
    if size > 1_000_000 and bits >= 0.1:
        assert 8 * nbytes <= 1.02 * bits * size
    if (bits, size) == (0.03, 50_890):
        assert nbytes <= 245


@pytest.mark.parametrize("size", [1, 5, 100, 1024, 1500, 70_000, 131_072, 200_001])
def test_eden_brings_a_single_value_back_at_one_bit(size: int) -> None:
    for at, scale in itertools.product({0, size // 2, size - 1}, ("unbiased", "mse")):
        x = np.zeros(size, np.float32)
        x[at] = -2.5
        assert np.allclose(trip(EDEN(1, scale=scale), x), x, atol=1e-4)


def test_eden_handles_zero_pieces() -> None:
    """Dead rows once made a whole piece zero, and its scale 0/0."""
    x = gauss(300_000)
    x[:140_000] = 0
    for bits in (0.05, 1, 2.5, 4):
        decoded = trip(EDEN(bits), x)
        assert not decoded[:131_072].any()
        assert np.isfinite(decoded).all()
    assert not trip(EDEN(0.01), np.zeros(100, np.float32)).any()


def test_eden_is_unbiased_on_average() -> None:
    """More draws than the law takes, on a vector with another size and a heavier tail."""
    x = np.random.default_rng(5).standard_t(4, 700).astype(np.float32)
    for codec in (EDEN(1), EDEN(0.2), EDEN(2.3), EDEN(1, rounds=2)):
        decoded = np.stack([trip(codec, x, seed) for seed in range(1500)]).astype(np.float64)
        variance = decoded.var(axis=0).sum() / len(decoded)
        assert np.square(decoded.mean(axis=0) - x).sum() < 1.4 * variance


def test_two_rounds_mend_what_a_dominating_value_breaks() -> None:
    x = np.ones(1024, np.float32)
    x[17] = 1000
    rest = np.arange(1024) != 17
    for rounds, low, high in ((1, -0.1, 0.3), (2, 0.7, 1.3)):
        mean = np.mean([trip(EDEN(1, rounds=rounds), x, seed)[rest].mean() for seed in range(3000)])
        assert low < mean < high


# --- count sketch ----------------------------------------------------------------------------------------------------


def test_sketches_add_up_exactly_in_integers() -> None:
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-1000, 1000, 70_001).astype(np.float32) for _ in range(2))
    assert np.array_equal(sketch(a, 5, 999, 3) + sketch(b, 5, 999, 3), sketch(a + b, 5, 999, 3))
    codec, layout = CountSketch(ratio=10.0), Layout.vector(a.size)
    tables = [codec.encode(x, layout, rng)["table"] for x in (a, b, a + b)]
    assert np.array_equal(tables[0] + tables[1], tables[2])


def test_sketch_is_its_definition() -> None:
    """Row by row from single values: each goes to one place of each row, with the same sign as it is read."""
    size, rows, columns = 200, 4, 17
    unit = np.eye(size, dtype=np.float32)
    tables = np.stack([sketch(e, rows, columns, 9) for e in unit])  # (size, rows, columns)
    assert (np.abs(tables).sum(axis=2) == 1).all()
    x = gauss(size)
    table = np.tensordot(x, tables, axes=1)
    assert np.allclose(sketch(x, rows, columns, 9), table, atol=1e-5)
    each = np.einsum("src,rc->rs", tables, table)
    assert np.allclose(unsketch(table.astype(np.float32), size, 9), np.median(each, axis=0), atol=1e-5)
    assert np.allclose(unsketch(table.astype(np.float32), size, 9, "mean"), each.mean(axis=0), atol=1e-5)


@pytest.mark.parametrize("rows", range(1, 8))
def test_medians_of_any_number_of_rows(rows: int) -> None:
    from fedcomp.codecs.sketch import _median

    found = gauss(rows * 500).reshape(rows, 500)
    assert np.allclose(_median(found), np.median(found, axis=0))


def test_sketch_recovers_heavy_hitters() -> None:
    x = gauss(100_000) * np.float32(0.01)
    heavy = np.arange(50) * 1999
    x[heavy] = np.where(np.arange(50) % 2, 5, -7)
    decoded = trip(CountSketch(7, columns=10_000, keep=50 / 100_000), x)
    assert np.flatnonzero(decoded).tolist() == heavy.tolist()
    assert nmse(x[heavy], decoded[heavy]) < 0.01


def test_sketch_size_is_bounded_by_the_layout() -> None:
    assert CountSketch(5, columns=2**31).width(1000) == 3200
    assert frame_size(CountSketch(5, columns=100), gauss(10_000)) <= 20 + 15 + 2000


# --- E8 --------------------------------------------------------------------------------------------------------------


def test_e8_has_240_neighbours_and_finds_the_nearest_point() -> None:
    """Against every lattice point near the origin: 240 of norm 2, 2160 of norm 4."""
    halves = np.array(list(itertools.product((-0.5, 0.5), repeat=8)))
    whole = np.array(list(itertools.product((-1, 0, 1), repeat=8)))
    twos = np.concatenate([2 * np.eye(8), -2 * np.eye(8)])
    points = np.concatenate([p[p.sum(axis=1) % 2 == 0] for p in (halves, whole, twos)])
    norms = np.square(points).sum(axis=1)
    assert [np.count_nonzero(norms == n) for n in (0, 2)] == [1, 240]
    x = np.random.default_rng(0).uniform(-0.6, 0.6, (2000, 8)).astype(np.float32)
    found = nearest_e8(x) / 2
    best = np.square(x[:, None] - points[norms <= 4]).sum(axis=2).min(axis=1)
    assert np.allclose(np.square(x - found).sum(axis=1), best, atol=1e-5)
    assert ((2 * found % 2 == (2 * found % 2)[:, :1]).all(axis=1) & (found.sum(axis=1) % 2 == 0)).all()


def test_e8_cells_are_as_round_as_theory_says() -> None:
    x = np.random.default_rng(1).uniform(-50, 50, (50_000, 8)).astype(np.float32)
    assert np.square(x - nearest_e8(x) / 2).mean() == pytest.approx(0.07168, rel=0.01)


@pytest.mark.parametrize("size", [1, 9, 5000, 40_003])
@pytest.mark.parametrize("step", [6.0, 2.5, 1.0, 0.1])
def test_e8_points_survive_their_symbols(size: int, step: float) -> None:
    """Decoded values are lattice points once the factor of their length is taken out."""
    x, layout = gauss(size) ** 3, Layout.vector(size)
    parts = E8(step=step).encode(x, layout, np.random.default_rng(0))
    plain = {**parts, "gain": np.ones_like(parts["gain"])}
    groups = np.zeros((-(-size // 8), 8), np.float32)
    groups.reshape(-1)[:size] = x
    expected = nearest_e8(groups / np.float32(parts["step"][0])).ravel()[:size] / 2 * float(parts["step"][0])
    assert np.allclose(E8(step=step).decode(plain, layout), expected, rtol=1e-5)
    assert nmse(x, E8(step=step).decode(parts, layout)) <= nmse(x, expected) + 1e-6


@pytest.mark.parametrize(("bits", "error"), [(0.1, 0.9065), (0.5, 0.5954), (1, 0.31), (2, 0.0799), (4, 0.00487)])
def test_e8_beats_scalar_quantization_on_normal_values(bits: float, error: float) -> None:
    """In real bytes; ideal scalar quantization with entropy coding takes .9085, .617, .348, .089, .0056."""
    x = gauss(400_000)
    assert nmse(x, trip(E8(bits), x)) <= error
    assert 8 * frame_size(E8(bits), x) / x.size <= 1.02 * bits + 0.001


# --- residual vector quantization ------------------------------------------------------------------------------------


def test_every_stage_takes_error_away() -> None:
    x = gauss(100_000)
    errors = [nmse(x, trip(ResidualVQ(stages, dim=4, size=32), x)) for stages in (1, 2, 3)]
    assert errors[0] < 0.45
    assert errors[1] < 0.45 * errors[0]
    assert errors[2] < 0.45 * errors[1]


def test_rvq_with_one_stage_is_vq() -> None:
    x = gauss(20_000)
    assert np.array_equal(trip(ResidualVQ(1, dim=4, size=16), x), trip(fedcomp.VectorQuantizer(4, 16), x))


def test_rvq_shares_codebooks_only_when_asked() -> None:
    x, layout = gauss(40_000), Layout.vector(40_000)
    plain, shared = ResidualVQ(2, 4, 64), ResidualVQ(2, 4, 64, shared=True)
    rng = np.random.default_rng(1)
    assert plain.adapt(x, layout, rng) == plain
    assert shared.adapt(np.zeros_like(x), layout, rng) == shared
    adapted = shared.adapt(gauss(40_000, seed=9), layout, rng)
    assert frame_size(adapted, x) <= frame_size(plain, x) - 2 * 63 * 4 * 2 * 0.8
    assert 8 * frame_size(adapted, x) / x.size < 3.01
    assert nmse(x, trip(adapted, x)) < 1.05 * nmse(x, trip(plain, x)) + 0.005
    few = ResidualVQ(2, 2, 64, shared=True).adapt(np.tile(gauss(10), 100), Layout.vector(1000), rng)
    assert fedcomp.from_config(fedcomp.to_config(few)) == few
    assert nmse(np.tile(gauss(10), 100), trip(few, np.tile(gauss(10), 100))) < 1e-4


def test_gentle_companions() -> None:
    assert BlockTopK(0.01).gentle == Threshold(3.0).gentle == Uniform(4)
    assert BlockTopK(0.1).gentle is Threshold(1.0).gentle is RandomK(0.01).gentle is EDEN(0.1).gentle is None


def test_codecs_nest() -> None:
    codec = RandomK(0.5, values=BlockTopK(0.5, block=4, values=EDEN(2, scale="mse")), scaled=False)
    layout = Layout((Tensor("a", (30, 20)), Tensor("b", (0,)), Tensor("c", (50,))))
    x = gauss(layout.size)
    parts = codec.encode(x, layout, np.random.default_rng(0))
    assert nmse(x, codec.decode(parts, layout)) < 0.9
    assert codec.contractive
    assert not RandomK(0.5, values=Sign()).unbiased
