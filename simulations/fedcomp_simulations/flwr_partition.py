"""The partitioners of `flwr-datasets`, from the extra `datasets`, on a table of sample numbers, labels and owners."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcomp.errors import ConfigError, FedcompError
from fedcomp_simulations.datasets.hub import INSTALL

Indices = NDArray[np.int64]
GIVEN = ("num_partitions", "min_partition_size", "seed")  # and, unless in the options, partition_by


def flwr_partition(
    name: str,
    labels: NDArray[np.int64],
    clients: int,
    options: Mapping[str, object],
    min_samples: int,
    seed: int,
    owners: NDArray[np.int64] | None = None,
) -> list[Indices]:
    """Split samples by a partitioner, such as "PathologicalPartitioner" with `num_classes_per_partition`.

    It sees the columns "label" and, where the data say whose each sample is, "client", by one of which it may go.
    Raises FedcompError if the package is missing, ConfigError if there is no such partitioner, if it refuses its
    options, or if it gives a sample to nobody or to two, or a client less than min_samples.
    """
    table, maker = _table(labels, owners), _maker(name)
    known = inspect.signature(maker).parameters
    for key in options:
        if key not in known or key in GIVEN:
            own = ", ".join(key for key in known if key not in GIVEN)
            raise ConfigError(f"partition_options: unknown option {key!r} of {name}; available: {own or 'none'}")
    by = "client" if "NaturalId" in name else "label"
    given = {"num_partitions": clients, "min_partition_size": min_samples, "seed": 100 + seed, "partition_by": by}
    values = {key: value for key, value in given.items() if key in known}
    values |= {key: list(value) if isinstance(value, tuple) else value for key, value in options.items()}
    if values.get("partition_by") == "client" and owners is None:
        raise ConfigError(f"partition {name!r}: this dataset does not say whose its samples are")
    parts = _parts(name, maker, values, table, clients)
    _check(name, parts, len(labels), min_samples)
    return parts


def _table(labels: NDArray[np.int64], owners: NDArray[np.int64] | None) -> Any:
    if labels.ndim > 1:
        raise ConfigError("partition 'flwr:': every sample of this dataset has many labels; use natural or iid")
    try:
        from datasets import Dataset
    except ModuleNotFoundError as error:
        if error.name != "datasets":
            raise
        raise _missing() from error
    columns = {"index": np.arange(len(labels)), "label": labels}
    return Dataset.from_dict(columns if owners is None else columns | {"client": owners})


def _maker(name: str) -> Callable[..., Any]:
    try:
        from flwr_datasets import partitioner
    except ModuleNotFoundError as error:
        if error.name != "flwr_datasets":
            raise
        raise _missing() from error
    usable = [each for each in partitioner.__all__ if each != "Partitioner" and not each.startswith("Vertical")]
    if name not in usable:  # vertical ones cut samples into pieces
        raise ConfigError(f"unknown partition 'flwr:{name}'; available: {', '.join(usable)}")
    maker: Callable[..., Any] = getattr(partitioner, name)
    return maker


def _missing() -> FedcompError:
    return FedcompError(f"partitions 'flwr:NAME' need flwr-datasets; run: {INSTALL}")


def _parts(
    name: str, maker: Callable[..., Any], values: Mapping[str, object], table: Any, clients: int
) -> list[Indices]:
    try:
        made = maker(**values)
        made.dataset = table
        count = made.num_partitions
        parts = [np.asarray(made.load_partition(client)["index"], np.int64) for client in range(min(count, clients))]
    except Exception as error:  # TypeError, ValueError or KeyError, by the partitioner
        reason = " ".join(str(error).split())
        raise ConfigError(f"partition 'flwr:{name}' with {dict(values)}: {reason}") from error
    if count != clients:
        raise ConfigError(f"partition 'flwr:{name}' makes {count} parts; set clients = {count}")
    return parts


def _check(name: str, parts: list[Indices], samples: int, min_samples: int) -> None:
    held = np.bincount(np.concatenate(parts), minlength=samples)
    if (held != 1).any():
        raise ConfigError(
            f"partition 'flwr:{name}' gives {(held == 0).sum()} samples to nobody and {(held > 1).sum()} to several; "
            "change its options"
        )
    if (least := min(map(len, parts))) < min_samples:
        raise ConfigError(
            f"partition 'flwr:{name}' gives a client only {least} samples, less than min_samples = {min_samples}; "
            "lower it or change the options"
        )
