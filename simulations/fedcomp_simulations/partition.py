"""Who holds which samples: each goes to exactly one client, and no client gets less than `min_samples`.

Schemes: `iid`; `dirichlet` and `shards`, by which clients differ in labels; `quantity`, by which they differ in size;
`natural`, by which a client holds what is its own in the data; and `flwr:NAME`, a partitioner of flwr-datasets.
"""

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from fedcomp.errors import ConfigError

Labels = NDArray[np.int64]
Indices = NDArray[np.int64]
FLWR = "flwr:"
SHARDS_PER_CLIENT = 2


def partition(
    kind: str,
    labels: Labels,
    clients: int,
    *,
    alpha: float,
    min_samples: int,
    seed: int,
    owners: NDArray[np.int64] | None = None,
    shards_per_client: int = SHARDS_PER_CLIENT,
    options: Mapping[str, object] | None = None,
) -> list[Indices]:
    """Split the samples among the clients by the named scheme; the same arguments give the same split.

    Args:
        alpha: of Dirichlet's distribution, in `dirichlet` and `quantity`: the smaller, the less alike clients are.
        owners: `(samples,)`, what `natural` goes by.
        shards_per_client: of `shards`.
        options: of a partitioner of flwr-datasets.

    Raises ConfigError if the samples cannot be split like this.
    """
    check_kind(kind)
    if kind == "natural":
        return _natural(owners, clients, min_samples)
    if not alpha > 0:
        raise ConfigError(f"alpha: expected a number above 0, got {alpha}")
    if clients * min_samples > len(labels):
        raise ConfigError(
            f"{clients} clients with min_samples = {min_samples} need {clients * min_samples} samples, "
            f"got {len(labels)}; lower clients or min_samples"
        )
    if kind.startswith(FLWR):
        from fedcomp_simulations.flwr_partition import flwr_partition

        name = kind.removeprefix(FLWR)
        return flwr_partition(name, labels, clients, dict(options or {}), min_samples, seed, owners)
    rng = np.random.default_rng(100 + seed)
    skew = float(shards_per_client) if kind == "shards" else alpha
    return _top_up(_KINDS[kind](labels, clients, skew, rng), min_samples, rng)


def check_kind(kind: str) -> None:
    """Raise ConfigError unless `partition` knows the scheme, as far as that can be told without flwr-datasets."""
    if kind not in kinds() and not kind.startswith(FLWR):
        raise ConfigError(f"unknown partition {kind!r}; available: {', '.join(kinds())}, {FLWR}NAME")


def kinds() -> tuple[str, ...]:
    """Names that `partition` knows."""
    return (*sorted(_KINDS), "natural")


def _natural(owners: NDArray[np.int64] | None, clients: int, min_samples: int) -> list[Indices]:
    """Give every client the samples of one owner; nobody is topped up, as that would mix owners."""
    if owners is None:
        raise ConfigError("partition 'natural': this dataset does not say whose its samples are; use dirichlet or iid")
    sizes = np.bincount(owners)
    if len(sizes) != clients:
        raise ConfigError(f"partition 'natural': the dataset has {len(sizes)} owners; set clients = {len(sizes)}")
    if sizes.min() < min_samples:
        raise ConfigError(f"min_samples: an owner has only {sizes.min()} samples, less than {min_samples}; lower it")
    return [np.flatnonzero(owners == owner) for owner in range(clients)]


def _iid(labels: Labels, clients: int, alpha: float, rng: np.random.Generator) -> list[Indices]:
    """Deal the shuffled samples out evenly; sizes differ by at most one."""
    del alpha
    return np.array_split(rng.permutation(len(labels)), clients)


def _dirichlet(labels: Labels, clients: int, alpha: float, rng: np.random.Generator) -> list[Indices]:
    """Cut each class by its own Dirichlet(alpha) shares (Hsu et al. 2019, arXiv:1909.06335)."""
    if labels.ndim > 1:
        raise ConfigError("partition 'dirichlet': every sample of this dataset has many labels; use natural or iid")
    pieces: list[list[Indices]] = [[] for _ in range(clients)]
    for label in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == label))
        shares = _shares(clients, alpha, rng)
        cuts = (np.cumsum(shares) * len(members)).astype(np.int64)[:-1]
        for own, piece in zip(pieces, np.split(members, cuts), strict=True):
            own.append(piece)
    return [np.concatenate(own) for own in pieces]


def _quantity(labels: Labels, clients: int, alpha: float, rng: np.random.Generator) -> list[Indices]:
    """Cut the shuffled samples by Dirichlet(alpha) shares: all see the same labels, some have far more of them."""
    cuts = (np.cumsum(_shares(clients, alpha, rng)) * len(labels)).astype(np.int64)[:-1]
    return np.split(rng.permutation(len(labels)), cuts)


def _shards(labels: Labels, clients: int, per_client: float, rng: np.random.Generator) -> list[Indices]:
    """Sort by label, cut into equal shards and deal these out (McMahan et al. 2017, arXiv:1602.05629)."""
    if labels.ndim > 1:
        raise ConfigError("partition 'shards': every sample of this dataset has many labels; use natural or iid")
    count = clients * int(per_client)
    if not 0 < count <= len(labels):
        raise ConfigError(
            f"shards_per_client: expected from 1 to {len(labels) // clients} for {len(labels)} samples and {clients} "
            f"clients, got {per_client:.0f}"
        )
    shards = np.array_split(np.argsort(labels, kind="stable"), count)
    return [np.concatenate([shards[shard] for shard in own]) for own in rng.permutation(count).reshape(clients, -1)]


def _shares(clients: int, alpha: float, rng: np.random.Generator) -> NDArray[np.float64]:
    """Dirichlet shares; where float64 cannot draw them, the limit they tend to."""
    with np.errstate(all="ignore"):
        shares = rng.dirichlet(np.full(clients, alpha))
    if np.isfinite(shares).all() and shares.sum() > 0.5:
        return shares
    if alpha > 1:
        return np.full(clients, 1 / clients)
    one = np.zeros(clients)
    one[rng.integers(clients)] = 1
    return one


def _top_up(parts: list[Indices], min_samples: int, rng: np.random.Generator) -> list[Indices]:
    """Raise every client to `min_samples` with random samples of whoever holds most at that moment.

    Dropping small clients, the usual rule, would change the number of clients and lose samples.
    """
    parts = list(parts)
    for client in range(len(parts)):
        while (missing := min_samples - len(parts[client])) > 0:
            donor = max(range(len(parts)), key=lambda other: len(parts[other]))
            given = min(missing, len(parts[donor]) - min_samples)
            shuffled = rng.permutation(parts[donor])
            parts[donor] = np.sort(shuffled[given:])
            parts[client] = np.concatenate([parts[client], shuffled[:given]])
    return parts


_KINDS: dict[str, Callable[[Labels, int, float, np.random.Generator], list[Indices]]] = {
    "dirichlet": _dirichlet,
    "iid": _iid,
    "quantity": _quantity,
    "shards": _shards,
}
