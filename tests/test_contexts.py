"""Matrices in contexts: round trips, savings on real updates, never much longer, and damage that ends in FrameError."""

import time
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fedcomp import Layout, Tensor
from fedcomp.codec import Symbols, matrix_shapes, nested, symbol_dtype
from fedcomp.entropy import decode_matrices, encode_matrices, encode_symbols, models, rans
from fedcomp.errors import ConfigError, FrameError
from fedcomp.wire import _read_part, _Reader, _write_part

Shapes = list[tuple[int, int]]
GARBAGE = b"\xa5\x00\xff\x3c" * 3


def draw(shapes: Shapes, size: int, scale: float, seed: int, spread: float = 2.0) -> NDArray[Any]:
    """Laplace symbols around size // 2 whose rows and columns differ in scale by factors of about e^spread."""
    rng = np.random.default_rng(seed)
    parts = []
    for rows, columns in shapes:
        busy = np.exp(spread * (rng.standard_normal((rows, 1)) + rng.standard_normal((1, columns))) / 2)
        parts.append(np.rint(rng.laplace(size=(rows, columns)) * busy * scale).ravel())
    values = np.clip(np.concatenate([np.zeros(0), *parts]) + size // 2, 0, size - 1)
    symbols: NDArray[Any] = values.astype(symbol_dtype(size))
    return symbols


def check(symbols: NDArray[Any], size: int, shapes: Shapes) -> bytes:
    data = encode_matrices(symbols, size, shapes)
    for tail in (b"", GARBAGE):
        decoded, used = decode_matrices(memoryview(data + tail), symbols.size, size, shapes)
        assert used == len(data)
        assert decoded.dtype == symbol_dtype(size)
        np.testing.assert_array_equal(decoded, symbols)
    plain = len(encode_symbols(symbols, size))
    assert len(data) <= plain + 1 if plain else not data
    return data


class TestRoundTrip:
    @settings(max_examples=80, deadline=None)
    @given(
        shapes=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 60)), max_size=5),
        size=st.sampled_from([1, 2, 3, 15, 255, 256, 257, 5000, 65536]),
        scale=st.sampled_from([0.02, 0.2, 1.0, 20.0]),
        seed=st.integers(0, 999),
    )
    def test_any(self, shapes: Shapes, size: int, scale: float, seed: int) -> None:
        check(draw(shapes, size, scale, seed), size, shapes)

    @pytest.mark.parametrize("size", [9, 31, 256, 1001, 65535])
    @pytest.mark.parametrize("scale", [0.02, 0.3, 3.0])
    def test_large_matrices_among_small_ones(self, size: int, scale: float) -> None:
        shapes = [(200, 300), (1, 200), (10, 200), (0, 7), (1, 10), (300, 1)]
        data = check(draw(shapes, size, scale, 1), size, shapes)
        assert data[0] == 1

    @pytest.mark.parametrize("rows", [1, 500])
    def test_rows_and_columns_without_anything_cost_nothing(self, rows: int) -> None:
        symbols = np.full((rows, 400), 7, np.uint8)
        assert len(check(symbols.ravel(), 15, [(rows, 400)])) <= 3
        symbols[:, 5] = np.arange(rows) % 15
        assert len(check(symbols.ravel(), 15, [(rows, 400)])) <= 3 + rows // 2 + 40

    def test_one_symbol_and_classes_far_apart(self) -> None:
        symbols = np.zeros((60, 60), np.uint16)
        symbols[0] = 65535
        symbols[:, 0] = 1
        check(symbols.ravel(), 65536, [(60, 60)])

    def test_input_is_not_written(self) -> None:
        symbols = draw([(50, 60)], 31, 1.0, 0)
        symbols.flags.writeable = False
        decoded, _ = decode_matrices(encode_matrices(symbols, 31, [(50, 60)]), 3000, 31, [(50, 60)])
        decoded[:] = 0

    def test_shapes_must_fit(self) -> None:
        for shapes in ([], [(2, 3)], [(2, 2), (1, 1)]):
            with pytest.raises(ConfigError, match="4 elements"):
                encode_matrices(np.zeros(4, np.uint8), 3, shapes)
            with pytest.raises(ConfigError, match="4 elements"):
                decode_matrices(b"\0\0\0", 4, 3, shapes)

    def test_runs_with_tables_of_their_own(self) -> None:
        """The coder below: runs of many lengths, among them some shorter than a step, one table each."""
        rng = np.random.default_rng(2)
        runs = [5, 1, 3000, 2, 70_000, 4, 900]
        parts = [np.minimum(rng.geometric(1 / (i + 1.2), n) - 1, 40).astype(np.uint8) for i, n in enumerate(runs)]
        histograms = [np.bincount(part, minlength=41) + (np.arange(41) < 2) for part in parts]
        tables = [models.fit(histogram, 12).widened(14) for histogram in histograms]
        data = rans.encode_runs(np.concatenate(parts), tables, runs, 200_000)
        decoded, used = rans.decode_runs(data + GARBAGE, tables, runs, np.uint8)
        assert used == len(data)
        np.testing.assert_array_equal(decoded, np.concatenate(parts))


class TestSchema:
    def test_layout_as_matrices(self) -> None:
        shapes = {"conv": (8, 3, 5, 5), "bias": (8,), "0d": (), "empty": (0, 4), "hole": (3, 0, 2), "fc": (10, 8)}
        layout = Layout(tuple(Tensor(name, shape) for name, shape in shapes.items()))
        assert matrix_shapes(layout) == ((8, 75), (1, 8), (1, 1), (1, 0), (1, 0), (10, 8))

    def test_through_the_frame(self) -> None:
        shapes = ((40, 50), (1, 40))
        symbols = draw(list(shapes), 31, 0.5, 3)
        plain, spec = Symbols("q", 2040, 31), Symbols("q", 2040, 31, shapes)
        assert len(_write_part(symbols, spec)) < len(_write_part(symbols, plain))
        reader = _Reader(memoryview(_write_part(symbols, spec)))
        np.testing.assert_array_equal(_read_part(reader, spec), symbols)
        assert reader.left == 0

    def test_shapes_survive_nesting(self) -> None:
        def schema() -> Any:
            yield Symbols("q", 4, 3, ((2, 2),))

        assert next(nested("values", schema())) == Symbols("values.q", 4, 3, ((2, 2),))


# --- savings ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def update_mlp() -> dict[str, NDArray[np.float32]]:
    """One local epoch of a ReLU MLP 64-1024-1024-10 on 600 of scikit-learn's 8x8 digits."""
    datasets = pytest.importorskip("sklearn.datasets")
    torch = pytest.importorskip("torch")
    digits = datasets.load_digits()
    x, y = torch.tensor(digits.data[:600] / 16, dtype=torch.float32), torch.tensor(digits.target[:600])
    torch.manual_seed(0)
    linear, relu = torch.nn.Linear, torch.nn.ReLU
    model = torch.nn.Sequential(linear(64, 1024), relu(), linear(1024, 1024), relu(), linear(1024, 10))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for start in range(0, 600, 20):
        sgd.zero_grad()
        torch.nn.functional.cross_entropy(model(x[start : start + 20]), y[start : start + 20]).backward()
        sgd.step()
    return {name: (p.detach() - before[name]).numpy() for name, p in model.named_parameters()}


def entropy_bits(q: NDArray[Any]) -> float:
    shares = np.unique(q, return_counts=True)[1] / q.size
    return float(-(shares * np.log2(shares)).sum())


def quantize(x: NDArray[np.float32], bits: float) -> tuple[NDArray[Any], int]:
    """(symbols, alphabet) of x at the step where the order-0 entropy is `bits`."""
    low, high = 1e-6, 1.0
    for _ in range(30):
        step = (low * high) ** 0.5
        low, high = (step, high) if entropy_bits(np.rint(x / step)) > bits else (low, step)
    q = np.rint(x / high)
    top = int(np.abs(q).max())
    return (q + top).astype(symbol_dtype(2 * top + 1)).ravel(), 2 * top + 1


@pytest.mark.parametrize("bits", [0.1, 0.3, 1.0])
def test_saves_on_a_real_update(update_mlp: dict[str, NDArray[np.float32]], bits: float) -> None:
    for name, atleast in (("0.weight", 0.15), ("2.weight", 0.30)):
        x = update_mlp[name]
        symbols, size = quantize(x, bits)
        data = check(symbols, size, [(x.shape[0], x.shape[1])])
        assert len(data) <= (1 - atleast) * bits * x.size / 8
    assert len(data) <= 0.78 * len(encode_symbols(symbols, size))  # the larger one, against the real order-0 stream


def test_saves_on_a_whole_model(update_mlp: dict[str, NDArray[np.float32]]) -> None:
    layout = Layout.of(update_mlp)
    symbols, size = quantize(np.concatenate([x.ravel() for x in update_mlp.values()]), 0.3)
    assert len(check(symbols, size, list(matrix_shapes(layout)))) <= 0.75 * len(encode_symbols(symbols, size))


@pytest.mark.parametrize("scale", [0.1, 1.0, 30.0])
def test_nothing_to_gain_costs_one_byte(scale: float) -> None:
    shapes = [(300, 200), (1, 300)]
    symbols = draw(shapes, 255, scale, 5, spread=0)
    assert len(check(symbols, 255, shapes)) == len(encode_symbols(symbols, 255)) + 1


def test_speed() -> None:
    """A loose guard: the real numbers are in `fedcomp bench`."""
    shapes = [(1024, 1024)]
    symbols = draw(shapes, 255, 0.3, 6)
    start = time.process_time()
    data = encode_matrices(symbols, 255, shapes)
    middle = time.process_time()
    decode_matrices(data, symbols.size, 255, shapes)
    end = time.process_time()
    assert data[0] == 1
    assert 4 * symbols.size / (middle - start) > 10e6
    assert 4 * symbols.size / (end - middle) > 15e6


# --- damage ----------------------------------------------------------------------------------------------------------

# Bytes must never change, or old frames could not be read.
GOLDEN: dict[str, tuple[NDArray[Any], int, Shapes, str]] = {
    "plain": (np.arange(12, dtype=np.uint8) % 5, 5, [(3, 4)], "00018846442302"),
    "rows": (
        (np.arange(1200) // 300 % 2 * (np.arange(1200) ** 2 % 7)).astype(np.uint8),
        7,
        [(4, 300)],
        (
            "010002020001010a000102058a3b0c4103876462351710010eddbf7c6096a45ce7e96d7275cd4e6ac1dd952d14a340125f57"
            "106151568e1dbe8c806f4a919eec08fb5c856e62f93a4f7f9600ebb6b75fa3aa5f115175fb4cfa3edaf2d3c3df5716b2190b"
            "147849eb3622fff6ba992960e250133f886d1ab6afae7ea6ab5e0da9b04376d58c9cf5033b7131593ce8124fc72f26e82117"
            "b00bb21756bdda9f5564296ac93785e9df"
        ),
    ),
    "both": (
        (np.outer(np.arange(24) % 6, np.arange(40) % 5).ravel() * (np.arange(960) ** 2 % 11) // 8).astype(np.uint8),
        32,
        [(20, 40), (1, 160)],
        (
            "01000304010301944aaa944a0201a4934a3ae9a4934a3ae9020a0653e0e7db3e056800e79feb3a320d2bca944a16b74b4a49"
            "01eb554a0701ce946b2ed24108f75851c42faef6368ffb8f1a48044be6b93d20eac04213e8c767a43cad81f05bde55114686"
            "f67a71585c26c07dc02c0203739e299b5fff255164616396c542dd839f446a5ab96d10ba8dc8893da8ccf564ba192d941fd6"
            "3123ea0113d65ef3302326035ee72c1c1e3121f2668ce0f68ce93396dc7307198d44a978a3cd0e6fe9c2f3ac0cd09f764128"
            "8153af954ed2e8889aad685bf1ac3b1c58581403921cc755db43236c4c0d058edd90f10c90b0e931ca69d248e194078e204e"
            "cc25334f2e3d2d613dda424246ae571929f9c512409e16e54bd283bd4f5e87364fbc1e28804bf37a96dfed87edc74d2bc447"
            "e1d78f172d2d4fd96cb8"
        ),
    ),
    "sparse": (
        (np.outer(np.arange(40) % 9 == 4, np.arange(90) % 8 == 3).ravel() * (np.arange(3600) ** 3 % 4)).astype(
            np.uint8
        ),
        4,
        [(40, 90)],
        "01000502000332f91f215e7a0063fe2207f3290100a3adce63788806000001000003",
    ),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_golden(name: str) -> None:
    symbols, size, shapes, golden = GOLDEN[name]
    data = check(symbols, size, shapes)
    assert data[0] == (name != "plain")
    assert data.hex() == golden
    np.testing.assert_array_equal(decode_matrices(bytes.fromhex(golden), symbols.size, size, shapes)[0], symbols)


def refused(data: bytes, count: int, size: int, shapes: Shapes) -> bool:
    """True for FrameError; any other result has to be valid."""
    try:
        symbols, used = decode_matrices(data, count, size, shapes)
    except FrameError:
        return True
    assert 0 <= used <= len(data)
    assert symbols.shape == (count,)
    assert not count or int(symbols.max()) < size
    return False


@pytest.mark.parametrize("name", GOLDEN)
def test_truncations(name: str) -> None:
    symbols, size, shapes, _ = GOLDEN[name]
    data = encode_matrices(symbols, size, shapes)
    for end in range(len(data)):
        assert refused(data[:end], symbols.size, size, shapes)


@pytest.mark.parametrize("name", GOLDEN)
def test_bit_flips(name: str) -> None:
    symbols, size, shapes, _ = GOLDEN[name]
    data = encode_matrices(symbols, size, shapes)
    for bit in [*range(min(400, 8 * len(data))), *range(400, 8 * len(data), 7)]:
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        refused(bytes(flipped), symbols.size, size, shapes)


@pytest.mark.parametrize("part", range(4))
def test_random_bytes(part: int) -> None:
    rng = np.random.default_rng(part)
    goldens = [(encode_matrices(s, size, shapes), size, shapes) for s, size, shapes, _ in GOLDEN.values()]
    for _ in range(400):
        size = int(rng.choice([1, 2, 3, 15, 256, 257, 65536]))
        shapes = [(int(r), int(c)) for r, c in rng.integers(0, 30, (int(rng.integers(0, 5)), 2))]
        data = bytearray(rng.integers(0, 256, int(rng.integers(0, 200)), dtype=np.uint8))
        if data:  # most mode bytes are refused at once
            data[0] = part % 2
        if part > 1:  # a real stream, changed
            real, size, shapes = goldens[int(rng.integers(len(goldens)))]
            data = bytearray(real)
            for _ in range(int(rng.integers(1, 4))):
                data[int(rng.integers(1, len(data)))] = int(rng.integers(256))
        count = sum(r * c for r, c in shapes)
        tracemalloc.start()
        try:
            refused(bytes(data), count, size, shapes)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak <= 160 * count + 32 * len(data) + (20 << 20)
