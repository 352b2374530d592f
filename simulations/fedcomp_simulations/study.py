"""Reads experiments from TOML: shipped ones by name, others by path, each at every point of its grid.

[grid]                                              # every combination of these is a training task of its own
alpha = [0.1, 0.3]
strategy_options.eta = [0.01, 0.03]
methods.downlink = ["pack", "uniform(8)"]           # a key of every method

[[methods]]
name = "auto {budget}"                              # and of these, a method of its own in each task
codec = "auto"
grid = { budget = ["640 B", "190 B"], feedback = ["none", "auto"] }
"""

import math
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from importlib.resources import files
from itertools import product
from pathlib import Path
from typing import Any

from fedcomp.errors import ConfigError
from fedcomp_simulations.config import from_config
from fedcomp_simulations.experiment import Experiment

MAX_RUNS = 10_000

Values = dict[str, Any]


@dataclass(frozen=True)
class Point:
    """An experiment at one point of its grid.

    Attributes:
        name: such as "alpha=0.1, lr=0.05"; "" without grid.
        grid: the keys of the grid and their values here.
    """

    name: str
    grid: Mapping[str, Any]
    experiment: Experiment


@dataclass(frozen=True)
class Study:
    """An experiment at every point of its grid; without grid there is one point."""

    name: str
    points: tuple[Point, ...]

    @property
    def runs(self) -> int:
        """How often a model is trained: once a point, method and seed."""
        return sum(len(point.experiment.methods) * len(point.experiment.seeds) for point in self.points)

    def map(self, change: Callable[[Experiment], Experiment]) -> "Study":
        """Change the experiment at every point."""
        return replace(self, points=tuple(replace(point, experiment=change(point.experiment)) for point in self.points))


def study_of(experiment: Experiment) -> Study:
    """An experiment without grid."""
    return Study(experiment.name, (Point("", {}, experiment),))


def shipped() -> tuple[str, ...]:
    """Names of the experiments that come with the package."""
    folder = files("fedcomp_simulations") / "experiments"
    names = (entry.name for entry in folder.iterdir())
    return tuple(sorted(name.removesuffix(".toml") for name in names if name.endswith(".toml")))


def load_study(name_or_path: str, changes: Sequence[str] = (), grid: Sequence[str] = ()) -> Study:
    """Read a shipped experiment by name, or any other by the path of its TOML file.

    Args:
        changes: "key=value" each, values as in TOML or plain texts, in the place of what the file says.
        grid: "key=value,value" each: more of its grid.

    Raises ConfigError, which names the file and the key.
    """
    if name_or_path in shipped():
        text = (files("fedcomp_simulations") / "experiments" / f"{name_or_path}.toml").read_text("utf-8")
        return parse_study(text, name=name_or_path, source=f"{name_or_path}.toml", changes=changes, grid=grid)
    path = Path(name_or_path)
    if not path.is_file():
        raise ConfigError(f"unknown experiment {name_or_path!r}: no such file, and shipped are {', '.join(shipped())}")
    try:
        text = path.read_text("utf-8-sig")  # Windows' editors begin files with a byte order mark
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    return parse_study(text, name=path.stem, source=str(path), changes=changes, grid=grid)


def load_experiment(name_or_path: str) -> Experiment:
    """Read an experiment without grid, see load_study."""
    study = load_study(name_or_path)
    if len(study.points) > 1:
        raise ConfigError(f"{name_or_path}: expected an experiment without grid, got one of {len(study.points)} points")
    return study.points[0].experiment


def parse_experiment(text: str, *, name: str, source: str) -> Experiment:
    """Make an experiment from TOML text without grid; errors name the source, the key and what exists."""
    return parse_study(text, name=name, source=source).points[0].experiment


def parse_study(text: str, *, name: str, source: str, changes: Sequence[str] = (), grid: Sequence[str] = ()) -> Study:
    """Make a study from TOML text; errors name the source, the key and what exists. For the rest see load_study."""
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{source}: not valid TOML: {error}") from error
    for change in changes:
        _set(table, *_assignment("--set", change))
    for more in grid:
        key, values = _assignment("--grid", more, several=True)
        _set(table, f"grid.{key}", values)
    try:
        study = Study(name, tuple(_points(name, table)))
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from error
    if study.runs > MAX_RUNS:
        raise ConfigError(f"{source}: the grid makes {study.runs:,} runs, more than {MAX_RUNS:,}; take values out")
    return study


def _points(name: str, table: Values) -> Iterator[Point]:
    grid = _flat(table.pop("grid", {}), "grid")
    for values in _combinations(grid, "grid"):
        changed = deepcopy(table)
        for key, value in values.items():
            _set(changed, key, value)
        if isinstance(changed.get("methods"), list):
            changed["methods"] = [entry for method in changed["methods"] for entry in _expanded(method)]
        try:
            yield Point(_named(values), values, from_config(changed, Experiment, name=name))
        except ConfigError as error:
            raise ConfigError(f"{error} (where {_named(values)})" if values else str(error)) from error


def _expanded(method: Any) -> list[Any]:
    """A method at every point of its own grid; what is no table is left to whoever checks it."""
    if not isinstance(method, dict) or "grid" not in method:
        return [method]
    rest = {key: value for key, value in method.items() if key != "grid"}
    where = f"grid of method {rest.get('name')!r}"
    return [_at(rest, values) for values in _combinations(_flat(method["grid"], where), where)]


def _at(method: Values, values: Values) -> Values:
    """The method with these values, and with them in its name, unless that has a place for none of them."""
    changed = deepcopy(method)
    name = str(method.get("name", ""))
    for key, value in values.items():
        _set(changed, key, value)
        placed = name.replace(f"{{{key}}}", _shown(value))
        name = placed if placed != name else f"{name}, {key}={_shown(value)}"
    return changed | {"name": name}


def _combinations(grid: Mapping[str, list[Any]], where: str) -> Iterator[Values]:
    """Every combination of the values, the last key changing fastest."""
    if (size := math.prod(map(len, grid.values()))) > MAX_RUNS:
        raise ConfigError(f"{where}: {size:,} combinations are more than {MAX_RUNS:,}; take values out")
    for values in product(*grid.values()):
        yield dict(zip(grid, values, strict=True))


def _flat(grid: Any, where: str, prefix: str = "") -> dict[str, list[Any]]:
    """The lists of a grid by dotted key."""
    if not isinstance(grid, dict):
        raise ConfigError(f"{where}: expected a table of lists, got {grid!r}")
    found: dict[str, list[Any]] = {}
    for name, values in grid.items():
        key = f"{prefix}{name}"
        if isinstance(values, dict):
            found |= _flat(values, where, f"{key}.")
        elif not isinstance(values, list) or not values:
            raise ConfigError(f"{where}: {key}: expected a list of values, got {values!r}")
        elif key in ("seeds", "methods", "name", "grid"):
            raise ConfigError(f"{where}: {key} cannot be varied here; seeds and methods are lists of their own")
        elif any(value in values[:index] for index, value in enumerate(values)):
            raise ConfigError(f"{where}: {key}: a value is there twice")
        else:
            found[key] = values
    return found


def _set(table: Values, key: str, value: Any) -> None:
    """Set a dotted key; "methods.x" is x of every method."""
    first, dot, rest = key.partition(".")
    if not dot:
        table[key] = value
    elif first == "methods" and isinstance(table.get("methods"), list):
        for method in table["methods"]:
            if isinstance(method, dict):
                _set(method, rest, value)
    else:
        inner = table.setdefault(first, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"{key}: expected a table {first!r}, got {inner!r}")
        _set(inner, rest, value)


def _assignment(option: str, text: str, *, several: bool = False) -> tuple[str, Any]:
    """Split "key=value"; the value is TOML, or else a plain text, and with several a list of such."""
    key, equals, value = text.partition("=")
    if not (equals and key.strip() and value.strip()):
        raise ConfigError(f"{option}: expected key=value{',value' if several else ''}, got {text!r}")
    if several:
        whole = _toml(f"[{value}]")
        return key.strip(), whole if isinstance(whole, list) else [_toml(each) for each in value.split(",")]
    return key.strip(), _toml(value)


def _toml(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text.strip()}")["value"]
    except tomllib.TOMLDecodeError:
        return text.strip()


def _named(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={_shown(value)}" for key, value in values.items())


def _shown(value: Any) -> str:
    """A value in a name: short, but never the same for two values."""
    short = f"{value:g}" if isinstance(value, float) else str(value)
    return short if not isinstance(value, float) or float(short) == value else repr(value)
