"""Who holds which samples."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedcomp.errors import ConfigError
from fedcomp_simulations.partition import partition

ALPHAS = st.floats(min_value=5e-324, max_value=1.7e308) | st.floats(min_value=0.01, max_value=100)


@given(
    st.data(), st.sampled_from(["dirichlet", "iid"]), ALPHAS, st.integers(0, 3), st.integers(1, 12), st.integers(1, 5)
)
def test_every_sample_goes_to_one_client_and_nobody_gets_too_few(
    data: st.DataObject, kind: str, alpha: float, seed: int, clients: int, min_samples: int
) -> None:
    size = data.draw(st.integers(clients * min_samples, clients * min_samples + 200))
    labels = np.random.default_rng(seed).integers(0, 5, size)
    parts = partition(kind, labels, clients, alpha=alpha, min_samples=min_samples, seed=seed)
    assert len(parts) == clients
    assert min(map(len, parts)) >= min_samples
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(size))
    again = partition(kind, labels, clients, alpha=alpha, min_samples=min_samples, seed=seed)
    assert all(np.array_equal(one, other) for one, other in zip(parts, again, strict=True))


def test_dirichlet_draws_as_documented_where_nobody_is_too_small() -> None:
    labels = np.repeat(np.arange(3), 50)
    parts = partition("dirichlet", labels, 4, alpha=5.0, min_samples=1, seed=9)
    rng = np.random.default_rng(109)
    expected: list[list[int]] = [[] for _ in range(4)]
    for label in range(3):
        members = rng.permutation(np.flatnonzero(labels == label))
        cuts = [int(cut * 50) for cut in np.cumsum(rng.dirichlet([5.0] * 4))[:-1]]
        for own, piece in zip(expected, np.split(members, cuts), strict=True):
            own.extend(piece)
    assert [list(part) for part in parts] == expected


def test_small_alpha_skews_labels_and_large_alpha_does_not() -> None:
    labels = np.repeat(np.arange(10), 400)

    def largest_share(alpha: float) -> float:
        parts = partition("dirichlet", labels, 20, alpha=alpha, min_samples=8, seed=0)
        return float(np.mean([np.bincount(labels[part]).max() / len(part) for part in parts]))

    assert largest_share(0.05) > 0.6
    assert largest_share(1000.0) < 0.15


def test_iid_sizes_differ_by_one_at_most() -> None:
    parts = partition("iid", np.zeros(103, np.int64), 10, alpha=1.0, min_samples=8, seed=0)
    assert {len(part) for part in parts} == {10, 11}


def test_mistakes_are_named() -> None:
    labels = np.zeros(20, np.int64)
    with pytest.raises(ConfigError, match="unknown partition 'shards'; available: dirichlet, iid, natural"):
        partition("shards", labels, 2, alpha=1.0, min_samples=1, seed=0)
    with pytest.raises(ConfigError, match="3 clients with min_samples = 8 need 24 samples, got 20"):
        partition("iid", labels, 3, alpha=1.0, min_samples=8, seed=0)
    with pytest.raises(ConfigError, match="alpha: expected a number above 0, got nan"):
        partition("dirichlet", labels, 2, alpha=float("nan"), min_samples=1, seed=0)
