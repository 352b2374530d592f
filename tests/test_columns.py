"""Columns of small integers: the adaptive coder and what it is measured by."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from fedcomp.codec import Columns, Schema, nested
from fedcomp.entropy.columns import TOP, Tally, decode_columns, encode_columns
from fedcomp.errors import ConfigError, FrameError

Ints = NDArray[np.int64]


def busy_in_places(rows: int, columns: int, scale: float, seed: int = 0) -> Ints:
    """Integers (columns, rows) that are large in some stretches of rows, and smaller from column to column."""
    rng = np.random.default_rng(seed)
    envelope = np.exp(2.5 * np.sin(np.linspace(0, 9, rows))) * 0.7 ** np.arange(columns)[:, None]
    matrix: Ints = np.rint(rng.laplace(0, scale, (columns, rows)) * envelope).astype(np.int64)
    return matrix


def ideal(tally: Tally) -> float:
    """Length in bits of the code of Krichevsky and Trofimov: Beta(1/2, 1/2) integrals, one for each context."""
    bits = float(tally.raw)
    for no, yes in tally.counts[tally.counts.any(axis=1)].tolist():
        log = math.lgamma(no + 0.5) + math.lgamma(yes + 0.5) - 2 * math.lgamma(0.5) - math.lgamma(no + yes + 1)
        bits -= log / math.log(2)
    return bits


@pytest.mark.parametrize(
    ("rows", "columns", "scale"), [(500, 4, 0.2), (800, 16, 0.1), (800, 16, 20.0), (10000, 20, 0.2)]
)
def test_near_the_ideal(rows: int, columns: int, scale: float) -> None:
    """2 k to 200 k integers: within 1 % and two bytes of the ideal adaptive code of the same contexts."""
    matrix = busy_in_places(rows, columns, scale)
    tally = Tally.of(matrix, 2)
    data = encode_columns(matrix.ravel(), [(rows, columns)], [2])
    assert ideal(tally) <= 8 * len(data) <= 1.01 * ideal(tally) + 16
    assert abs(tally.bits() - ideal(tally)) <= 0.01 * ideal(tally) + 16
    assert abs(tally.bits_at(tally.prices()) - ideal(tally)) <= 0.03 * ideal(tally) + 100


@pytest.mark.parametrize("rows", [1000, 100_000])
def test_zeros_cost_next_to_nothing(rows: int) -> None:
    assert len(encode_columns(np.zeros(rows), [(rows, 1)], [0])) <= 5
    assert encode_columns(np.zeros(0), [(rows, 0)], [0]) == b""


def test_neighbours_help() -> None:
    """Busy stretches make long columns cheaper than the same values in any order; rows that are busy as well."""
    matrix = busy_in_places(2000, 4, 0.3)
    shuffled = np.random.default_rng(1).permuted(matrix, axis=1)
    in_rows = matrix[:, np.random.default_rng(1).permutation(2000)]
    a, b, c = (len(encode_columns(m.ravel(), [(2000, 4)], [0])) for m in (matrix, in_rows, shuffled))
    assert a < 0.95 * b < 0.9 * c


@given(data=st.data())
def test_round_trip(data: st.DataObject) -> None:
    shapes = data.draw(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 5)), max_size=4))
    kinds = data.draw(st.lists(st.integers(0, 3), min_size=len(shapes), max_size=len(shapes)))
    count = sum(rows * columns for rows, columns in shapes)
    numbers = st.sampled_from([0, 0, 0, 1, -1, 2, 3, -4, 100, TOP, -TOP]) | st.integers(-TOP, TOP)
    values = np.array(data.draw(st.lists(numbers, min_size=count, max_size=count)), np.int32)
    coded = encode_columns(values, shapes, kinds)
    back, used = decode_columns(coded + b"more", shapes, kinds)
    assert used == len(coded)
    assert back.dtype == np.int32
    assert np.array_equal(back, values)


def test_golden_stream() -> None:
    """The coding never changes: this is FORMAT.md, section 6, in bytes."""
    values = np.array([0, 0, 5, -6, 0, 1, 0, 0, 0, 0, -1, 0, 300, 0])
    shapes, kinds = [(6, 2), (1, 2)], [0, 3]
    assert encode_columns(values, shapes, kinds).hex() == GOLDEN
    assert np.array_equal(decode_columns(bytes.fromhex(GOLDEN), shapes, kinds)[0], values)


GOLDEN = "2cea0c0d638626"


@pytest.mark.parametrize("values", [[TOP + 1, 0], [0, -TOP - 1], [1], [1, 2, 3]])
def test_refuses_values(values: list[int]) -> None:
    with pytest.raises(ConfigError, match="expected 2 values of at most 32767"):
        encode_columns(np.array(values), [(2, 1)], [0])


def test_truncations_and_other_endings() -> None:
    matrix = busy_in_places(60, 3, 2.0)
    data = encode_columns(matrix.ravel(), [(60, 3)], [1])
    for length in range(len(data)):
        with pytest.raises(FrameError):
            decode_columns(data[:length], [(60, 3)], [1])
    with pytest.raises(FrameError, match="17 to 24 bits"):
        decode_columns(b"\0\0\0", [(60, 3)], [1])
    with pytest.raises(FrameError, match="end in its start state"):
        decode_columns((142_536).to_bytes(3, "little"), [(1, 1)], [0])


@given(data=st.binary(max_size=80))
def test_random_bytes(data: bytes) -> None:
    """Whatever comes: integers in range, or a FrameError."""
    try:
        values, used = decode_columns(data, [(20, 3), (5, 1)], [0, 1])
    except FrameError:
        return
    assert used <= len(data)
    assert np.abs(values).max() <= TOP


def test_specification_counts_and_nests() -> None:
    spec = Columns("columns", ((6, 2), (1, 3)), (0, 1))

    def schema() -> Schema:
        yield spec

    assert spec.count == 15
    assert next(nested("inner", schema())) == Columns("inner.columns", spec.shapes, spec.kinds)
