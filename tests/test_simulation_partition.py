"""Who holds which samples."""

import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from fedcomp.errors import ConfigError, FedcompError
from fedcomp_simulations.partition import partition

ALPHAS = st.floats(min_value=5e-324, max_value=1.7e308) | st.floats(min_value=0.01, max_value=100)


@given(
    st.data(),
    st.sampled_from(["dirichlet", "iid", "quantity", "shards"]),
    ALPHAS,
    st.integers(0, 3),
    st.integers(1, 12),
    st.integers(1, 5),
)
def test_every_sample_goes_to_one_client_and_nobody_gets_too_few(
    data: st.DataObject, kind: str, alpha: float, seed: int, clients: int, min_samples: int
) -> None:
    size = data.draw(st.integers(clients * min_samples, clients * min_samples + 200))
    labels = np.random.default_rng(seed).integers(0, 5, size)
    shards = data.draw(st.integers(1, size // clients))
    options: dict[str, Any] = {"alpha": alpha, "min_samples": min_samples, "seed": seed, "shards_per_client": shards}
    parts = partition(kind, labels, clients, **options)
    assert len(parts) == clients
    assert min(map(len, parts)) >= min_samples
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(size))
    again = partition(kind, labels, clients, **options)
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
    with pytest.raises(
        ConfigError, match="unknown partition 'x'; available: dirichlet, iid, quantity, shards, natural, flwr:NAME"
    ):
        partition("x", labels, 2, alpha=1.0, min_samples=1, seed=0)
    with pytest.raises(ConfigError, match="3 clients with min_samples = 8 need 24 samples, got 20"):
        partition("iid", labels, 3, alpha=1.0, min_samples=8, seed=0)
    with pytest.raises(ConfigError, match="alpha: expected a number above 0, got nan"):
        partition("dirichlet", labels, 2, alpha=float("nan"), min_samples=1, seed=0)
    with pytest.raises(
        ConfigError, match="shards_per_client: expected from 1 to 10 for 20 samples and 2 clients, got 11"
    ):
        partition("shards", labels, 2, alpha=1.0, min_samples=1, seed=0, shards_per_client=11)
    with pytest.raises(ConfigError, match="many labels; use natural or iid"):
        partition("shards", np.zeros((20, 5), np.int64), 2, alpha=1.0, min_samples=1, seed=0)


def test_shards_are_pieces_of_the_sorted_samples() -> None:
    labels = np.random.default_rng(4).permutation(np.repeat(np.arange(10), 60))
    parts = partition("shards", labels, 20, alpha=1.0, min_samples=8, seed=3, shards_per_client=2)
    assert {len(part) for part in parts} == {30}
    by_label = np.argsort(labels, kind="stable")
    dealt = np.random.default_rng(103).permutation(40).reshape(20, 2)
    for part, own in zip(parts, dealt, strict=True):
        assert part.tolist() == [index for shard in own for index in by_label[15 * shard : 15 * shard + 15].tolist()]
    assert max(len(np.unique(labels[part])) for part in parts) == 2


def test_quantity_skews_sizes_but_not_labels() -> None:
    labels = np.repeat(np.arange(2), 5_000)

    def sizes(alpha: float) -> list[int]:
        return [len(part) for part in partition("quantity", labels, 10, alpha=alpha, min_samples=8, seed=0)]

    assert max(sizes(0.1)) > 5_000
    assert {*sizes(1e300)} <= {999, 1_000, 1_001}
    assert sorted(sizes(1e-300)) == [8] * 9 + [9_928]
    large = max(partition("quantity", labels, 10, alpha=0.1, min_samples=8, seed=0), key=len)
    assert abs(float(labels[large].mean()) - 0.5) < 0.05
    many = np.zeros((40, 3), np.int64)  # labels at every position are no hindrance
    assert sum(map(len, partition("quantity", many, 4, alpha=1.0, min_samples=1, seed=0))) == 40


# Partitioners of flwr-datasets


def test_the_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(FedcompError, match=r'need flwr-datasets; run: pip install "fedcomp\[datasets\]"'):
        partition("flwr:IidPartitioner", np.zeros(20, np.int64), 2, alpha=1.0, min_samples=1, seed=0)


def flwr(name: str, labels: NDArray[np.int64], clients: int = 10, **more: Any) -> list[NDArray[np.int64]]:
    pytest.importorskip("flwr_datasets")
    return partition(f"flwr:{name}", labels, clients, **{"alpha": 1.0, "min_samples": 4, "seed": 2} | more)


def test_partitioners_of_flwr_split_every_sample_once() -> None:
    labels = np.random.default_rng(0).integers(0, 5, 300)
    parts = flwr("PathologicalPartitioner", labels, options={"num_classes_per_partition": 2})
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(300))
    assert max(len(np.unique(labels[part])) for part in parts) == 2
    again = flwr("PathologicalPartitioner", labels, options={"num_classes_per_partition": 2})
    assert all(np.array_equal(one, other) for one, other in zip(parts, again, strict=True))
    owners = np.random.default_rng(1).integers(0, 10, 300)
    parts = flwr("NaturalIdPartitioner", labels, owners=owners)
    assert all(len(np.unique(owners[part])) == 1 for part in parts)
    assert len(flwr("DirichletPartitioner", labels, options={"alpha": 0.5})) == 10
    assert len(flwr("DirichletPartitioner", labels, options={"alpha": (1.0,) * 10})) == 10


def test_what_partitioners_of_flwr_refuse_is_told() -> None:
    labels = np.random.default_rng(0).integers(0, 5, 300)
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("BestPartitioner", {}, "unknown partition 'flwr:BestPartitioner'; available: .*IidPartitioner"),
        ("VerticalSizePartitioner", {}, "unknown partition"),
        ("IidPartitioner", {"options": {"alpha": 1}}, "unknown option 'alpha' of IidPartitioner; available: none"),
        ("DirichletPartitioner", {}, "alpha"),
        ("DirichletPartitioner", {"options": {"alpha": -1.0}}, "flwr:DirichletPartitioner' with"),
        ("NaturalIdPartitioner", {}, "does not say whose"),
        ("NaturalIdPartitioner", {"owners": labels}, "makes 5 parts; set clients = 5"),
        ("LinearPartitioner", {"min_samples": 8}, "gives a client only 5 samples, less than min_samples = 8"),
    ]
    for name, more, message in cases:
        with pytest.raises(ConfigError, match=message):
            flwr(name, labels, **more)
