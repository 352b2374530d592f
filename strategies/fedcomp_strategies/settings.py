"""Options of strategies from the configuration of a Flower app, where users change them without touching code.

    [tool.flwr.app.config]
    num-server-rounds = 60
    fraction-train = 0.1
    fedcomp-uplink = "auto"
    fedcomp-budget = "2 kB"

Every option of `Compressed` that is a text, a number or a truth value has a key: "fedcomp-" and its name with hyphens.
"""

from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from fedcomp import Auto, ConfigError
from fedcomp.schedule import as_schedule
from fedcomp_strategies.compressed import Compressed

PREFIX = "fedcomp-"
"""What the keys of the configuration that are for us begin with."""

BUDGET = "1/300"
"""Budget of an uplink "auto" where none is given: about what kept all measured tasks within a point of float32."""

Value = bool | float | int | str

_KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}


def settings(run_config: Mapping[str, Value], **defaults: Any) -> dict[str, Any]:
    """What an app's configuration says to `Compressed`: ``Compressed(strategy, **settings(context.run_config))``.

    Args:
        run_config: of the app; keys without the prefix "fedcomp-" are somebody else's. An empty text counts as not
            given, for keys that an app declares so that ``flwr run -c`` can set them; "none" stands for None.
        defaults: arguments that hold where the configuration says nothing. Without any, the uplink is "auto" with a
            budget of 1/300 of float32.

    Raises ConfigError for a key with the prefix that nothing is known of, or a value of the wrong kind.
    """
    return with_budget(merged(defaults, read(run_config, kinds_of(Compressed.__init__))))


def merged(defaults: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments given, with the defaults for the others; a default budget is for the default uplink."""
    kept = {n: v for n, v in defaults.items() if n != "budget" or "uplink" not in given}
    return {"uplink": "auto", **kept, **given}


def with_budget(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments, with a budget if the uplink needs one that is not there."""
    plans = as_schedule(arguments["uplink"]).plans()
    needed = any(isinstance(codec, Auto) and not codec.budget for plan in plans for codec in plan.codecs())
    return {**arguments, "budget": BUDGET} if needed and arguments.get("budget") is None else arguments


def kinds_of(function: Callable[..., Any]) -> dict[str, tuple[type, ...]]:
    """By parameter of a function, the kinds of value that a configuration file can give it; those that have some."""
    kinds = {}
    for name, hint in get_type_hints(function).items():
        allowed = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        found = tuple(kind for kind in _KINDS if kind in allowed)
        if found and name != "return":
            kinds[name] = (*found, type(None)) if type(None) in allowed else found
    return kinds


def read(run_config: Mapping[str, Value], kinds: Mapping[str, tuple[type, ...]]) -> dict[str, Any]:
    """The values of our keys by parameter name, of the kinds that these take. Raises ConfigError, see `settings`."""
    found = {}
    for key, value in run_config.items():
        if not key.startswith(PREFIX.rstrip("-")) or value == "":
            continue
        name = key.removeprefix(PREFIX).replace("-", "_")
        if not key.startswith(PREFIX) or name not in kinds:
            raise ConfigError(f"{key} = {value!r}: {unknown(key, (key_of(known) for known in kinds))}")
        found[name] = checked(key, value, *kinds[name])
    return found


def key_of(name: str) -> str:
    """The key for an option."""
    return PREFIX + name.replace("_", "-")


def unknown(name: str, known: Iterable[str]) -> str:
    """What to say of a name that is not one of these."""
    listed = sorted(known)
    near = get_close_matches(name, listed, 1)
    guess = f"did you mean {near[0]}? " if near else ""
    return f"no such option; {guess}there are {', '.join(listed)}"


def checked(key: str, value: Value, *kinds: type) -> Any:
    """The value of a key, None for "none" where that may be. Raises ConfigError unless it is of one of the kinds."""
    if value == "none" and type(None) in kinds:
        return None
    if type(value) in kinds or (type(value) is int and float in kinds):
        return value
    wanted = " or ".join(_KINDS[kind] for kind in kinds if kind in _KINDS)
    raise ConfigError(f"{key}: expected {wanted}, got {value!r}")
