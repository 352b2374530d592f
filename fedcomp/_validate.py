"""Checks of user-given arguments, so that all errors speak with one voice.

Each check takes its argument as a keyword and names it in the message: ``integer(low=1, high=8, bits=bits)``.
"""

from collections.abc import Collection

from fedcomp.errors import ConfigError


def _only(argument: dict[str, object]) -> tuple[str, object]:
    ((name, value),) = argument.items()
    return name, value


def integer(*, low: int, high: int | None = None, **argument: object) -> None:
    """Raise ConfigError unless the argument is an int in [low, high]."""
    name, value = _only(argument)
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        limits = f"from {low} to {high}" if high is not None else f"of at least {low}"
        raise ConfigError(f"{name}: expected a whole number {limits}, got {value!r}")


def number(*, low: float, high: float, above: bool = False, **argument: object) -> float:
    """The argument as a plain float; ConfigError unless it is a number in [low, high], with `above` in (low, high]."""
    name, value = _only(argument)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and low <= value <= high and not (above and value == low):  # type: ignore[operator]
        return float(value)  # type: ignore[arg-type]
    raise ConfigError(f"{name}: expected a number {'above' if above else 'from'} {low} to {high}, got {value!r}")


def flag(**argument: object) -> None:
    """Raise ConfigError unless the argument is True or False."""
    name, value = _only(argument)
    if not isinstance(value, bool):
        raise ConfigError(f"{name}: expected True or False, got {value!r}")


def one_of(*, choices: Collection[object], **argument: object) -> None:
    """Raise ConfigError unless the argument is one of the choices."""
    name, value = _only(argument)
    if value not in choices:
        raise ConfigError(f"{name}: expected one of {', '.join(map(repr, choices))}, got {value!r}")


def instance(*, kind: type, **argument: object) -> None:
    """Raise ConfigError unless the argument is an instance of the kind."""
    name, value = _only(argument)
    if not isinstance(value, kind):
        raise ConfigError(f"{name}: expected a {kind.__name__}, got {value!r}")
