"""Sets of the Hugging Face hub, for machines with internet, by what `flwr-datasets` brings: the extra `datasets`.

`hub:ylecun/mnist` takes what stands behind `hub:` as `datasets.load_dataset` does, so a folder of parquet files serves
too. Settings may follow a question mark: `hub:flwrlabs/femnist?y=character&client=writer_id`.
"""

from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qsl

import numpy as np
from numpy.typing import NDArray

from fedcomp.errors import ConfigError, FedcompError
from fedcomp_simulations.datasets import Dataset
from fedcomp_simulations.datasets.arrays import from_arrays

INSTALL = 'pip install "fedcomp[datasets]" (or: pip install "flwr-datasets>=0.5")'
SETTINGS = ("x", "y", "client", "subset", "train", "test")
INPUTS = ("image", "img", "x", "features", "audio")  # columns by these names are found
LABELS = ("label", "labels", "y", "target", "fine_label")
TESTS = ("test", "validation", "valid")


def load_hub(name: str) -> Dataset:
    """Load a set by `hub:NAME` with settings: columns x, y and client, the subset, the parts train and test.

    Without a part for the test a fifth is held out. Raises FedcompError if the extra is missing or the set cannot be
    had, ConfigError if its columns are not understood.
    """
    address, _, query = name.removeprefix("hub:").partition("?")
    settings = dict(parse_qsl(query, keep_blank_values=True))
    for key in settings:
        if key not in SETTINGS:
            raise ConfigError(f"dataset {name!r}: unknown setting {key!r}; available: {', '.join(SETTINGS)}")
    parts = _download(address, settings.get("subset"))
    try:
        return from_arrays(name, _arrays(parts, settings))
    except ConfigError as error:
        raise ConfigError(f"dataset {name!r}: {error}") from error


def _download(address: str, subset: str | None) -> Mapping[str, Any]:
    try:
        import datasets
    except ModuleNotFoundError as error:
        if error.name != "datasets":
            raise
        raise FedcompError(f"dataset 'hub:{address}' needs flwr-datasets; run: {INSTALL}") from error
    try:
        parts: Mapping[str, Any] = datasets.load_dataset(address, subset)
    except Exception as error:  # of the network, of the hub, of parsers: nothing common stands above them
        reason = str(error).strip().partition("\n")[0]
        raise FedcompError(f"dataset 'hub:{address}' cannot be had: {type(error).__name__}: {reason}") from error
    return parts


def _arrays(parts: Mapping[str, Any], settings: Mapping[str, str]) -> dict[str, NDArray[Any]]:
    """Turn the columns of the training and the test part into arrays."""
    train = _part(parts, settings.get("train", "train"))
    test = settings.get("test") or next((name for name in TESTS if name in parts), "")
    x, y = (_column(train, key, settings, known) for key, known in (("x", INPUTS), ("y", LABELS)))
    found = {"x": _stacked(x, train[x]), "y": np.asarray(train[y])}
    if client := settings.get("client"):
        _column(train, "client", settings, ())
        found["client"] = np.asarray(train[client])
    if test:
        held_out = _part(parts, test)
        found |= {"x_test": _stacked(x, held_out[x]), "y_test": np.asarray(held_out[y])}
    return found


def _part(parts: Mapping[str, Any], name: str) -> Any:
    if name not in parts:
        raise ConfigError(f"there is no part {name!r}; available: {', '.join(parts)}")
    return parts[name]


def _column(part: Any, key: str, settings: Mapping[str, str], known: tuple[str, ...]) -> str:
    """The column that is given, or the first that has one of the known names."""
    columns: list[str] = part.column_names
    name = settings.get(key) or next((name for name in known if name in columns), "")
    if name not in columns:
        wanted = f"there is no column {name!r}" if name else f"no column is known to be {key}"
        raise ConfigError(f"{wanted}; add ?{key}=COLUMN, available: {', '.join(columns)}")
    return name


def _stacked(name: str, column: Any) -> NDArray[Any]:
    """One array of all samples; images as channels x height x width."""
    rows = [np.asarray(row) for row in column]
    shapes = {row.shape for row in rows}
    if len(shapes) > 1 or rows[0].dtype == object or rows[0].dtype.kind in "US":
        what = f"{len(shapes)} different shapes" if len(shapes) > 1 else f"{rows[0].dtype}"
        raise ConfigError(f"column {name!r}: expected images or numbers of one shape, got {what}")
    x = np.stack(rows)
    if x.dtype != np.uint8 or x.ndim not in (3, 4):
        return x
    return x[:, None] if x.ndim == 3 else np.ascontiguousarray(x.transpose(0, 3, 1, 2))
