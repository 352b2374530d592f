"""Tables of plain values, as TOML and JSON have them, to dataclasses and back; errors name the key and what exists."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any, TypeVar, get_args, get_origin

from fedcomp.errors import ConfigError

T = TypeVar("T")

_WORDS: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    Mapping[str, float]: "a table of numbers",
    Mapping[str, Any]: "a table",
    tuple[int, ...]: "a list of whole numbers",
    tuple[str, ...]: "a list of texts",
}


def from_config(table: Mapping[str, Any], kind: type[T], *, prefix: str = "", **fixed: Any) -> T:
    """Make a dataclass from a table of its fields; whatever is not there has its default.

    Args:
        prefix: of the keys in errors, as in "fleet.".
        fixed: fields that the table must not set.

    Raises ConfigError, which names the key, for unknown and missing keys and values of another type.
    """
    known = {entry.name: entry for entry in _fields(kind) if entry.name not in fixed}
    for key in table:
        one_of("key", prefix + key, [prefix + name for name in known])
    for key, entry in known.items():
        if key not in table and entry.default is MISSING and entry.default_factory is MISSING:
            raise ConfigError(f"key {prefix + key!r} is missing")
    return kind(**fixed, **{key: _value(prefix + key, value, known[key]) for key, value in table.items()})


def to_config(value: object, skip: Iterable[str] = ()) -> dict[str, Any]:
    """The fields of a dataclass as plain values, from which `from_config` makes it again."""
    skip = set(skip)
    return {entry.name: _plain(getattr(value, entry.name)) for entry in _fields(type(value)) if entry.name not in skip}


def one_of(what: str, value: str, known: Iterable[str]) -> None:
    """Raise ConfigError, which lists what is known, if the value is not among it."""
    known = list(known)
    if value not in known:
        raise ConfigError(f"unknown {what} {value!r}; available: {', '.join(known) or 'none'}")


def unique(key: str, values: Iterable[Any]) -> None:
    """Raise ConfigError if a value is there twice."""
    repeated = [value for value, count in Counter(values).items() if count > 1]
    if repeated:
        raise ConfigError(f"{key}: {sorted(repeated)[0]!r} is there twice")


def _fields(kind: type[Any]) -> tuple[Field[Any], ...]:
    return tuple(entry for entry in fields(kind) if entry.init)


def _value(key: str, value: Any, entry: Field[Any]) -> Any:
    """The value as the type of its field; the default, such as "" for nothing, may be written out."""
    if type(value) is type(entry.default) and value == entry.default:
        return value
    return _convert(key, value, entry.type)


def _convert(key: str, value: Any, expected: Any) -> Any:
    """Return the value as the type of its field; TOML's integers serve as floats, its booleans as nothing."""
    if is_dataclass(expected) and isinstance(value, Mapping):
        return from_config(value, expected, prefix=f"{key}.")  # type: ignore[arg-type]
    if get_origin(expected) is tuple and isinstance(value, list):
        return _converted_list(key, value, get_args(expected)[0])
    if get_origin(expected) is Mapping and isinstance(value, Mapping):
        return {name: _convert(f"{key}.{name}", entry, get_args(expected)[1]) for name, entry in value.items()}
    if expected is Any or _fits(value, expected):
        return float(value) if expected is float else value
    raise ConfigError(f"{key}: expected {_word(expected)}, got {value!r}")


def _fits(value: Any, expected: Any) -> bool:
    if isinstance(value, bool) or expected is bool:
        return isinstance(value, bool) and expected is bool
    if expected is float:  # TOML's integers may be too large for a float; JSON knows no infinity, see _plain
        return value in ("inf", "-inf") or isinstance(value, float) or (isinstance(value, int) and abs(value) <= 1e300)
    if expected is str:
        return isinstance(value, str) and value != ""
    return expected is int and isinstance(value, int)


def _converted_list(key: str, values: list[Any], expected: Any) -> tuple[Any, ...]:
    if not is_dataclass(expected):
        return tuple(_convert(f"an entry of {key}", value, expected) for value in values)
    made = []
    for number, value in enumerate(values, 1):
        try:
            if not isinstance(value, Mapping):
                raise ConfigError(f"expected a table, got {value!r}")
            made.append(from_config(value, expected))  # type: ignore[arg-type]
        except ConfigError as error:
            raise ConfigError(f"{key}, entry {number}: {error}") from error
    return tuple(made)


def _word(expected: Any) -> str:
    if is_dataclass(expected):
        return "a table"
    return _WORDS.get(expected, "a list of tables")


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return to_config(value)
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(entry) for entry in value]
    if isinstance(value, float) and math.isinf(value):
        return "inf" if value > 0 else "-inf"
    return value
