"""What to run: an `Experiment` is one training task, a `Method` one way to upload, both read from TOML.

    clients = 100
    rounds = 60
    [[methods]]
    name = "sign + EF"
    codec = "sign"
    feedback = "ef"

The keys are the fields of the two classes; the name of an experiment is the name of its file.
"""

import math
import tomllib
from collections import Counter
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from fedcomp import Plan, Schedule, as_feedback
from fedcomp.errors import ConfigError
from fedcomp.feedback import feedbacks
from fedcomp.plan import as_plan
from fedcomp_simulations import datasets, partition

MODELS: dict[str, tuple[str, ...]] = {  # and the data sets each of them takes
    "cnn": ("fashion", "mnist"),
    "gru": ("shakespeare",),
    "imu-cnn": ("imu",),
    "mlp": ("fashion", "mnist"),
}
STRATEGIES: dict[str, tuple[str, ...]] = {  # and the options each of them takes
    "fedadagrad": ("eta", "tau"),
    "fedadam": ("eta", "beta_1", "beta_2", "tau"),
    "fedavg": (),
    "fedavgm": ("server_learning_rate", "server_momentum"),
    "fedmedian": (),
    "fedyogi": ("eta", "beta_1", "beta_2", "tau"),
}


@dataclass(frozen=True)
class Method:
    """One way to communicate.

    Attributes:
        codec: of the uploads: a codec or a schedule of codecs as text.
        feedback: what makes up for losses, as text.
        gentle_share, min_size: what becomes of small tensors, see fedcomp.Plan.
        downlink: "pack", "plain", or the codec of the global model's differences.
        budget, shared: of the codec "auto", see fedcomp_strategies.Compressed; budget "": none. With one, gentle_share
            and min_size have no effect.
        norm_cap: see there; 0: what suits "auto", else none; below 0: none.
        average: see there.
        strategy, strategy_options: in the place of the experiment's, such as FedAvgM as the twin of a feedback with
            momentum; "": the experiment's.
    """

    name: str
    codec: str
    feedback: str = "none"
    gentle_share: float = Plan.gentle_share
    min_size: int = Plan.min_size
    downlink: str = "pack"
    strategy: str = ""
    strategy_options: Mapping[str, float] = field(default_factory=dict, hash=False)
    budget: str = ""
    shared: bool = True
    norm_cap: float = 0.0
    average: float = 0.0

    def __post_init__(self) -> None:
        if self.budget:
            self.uplink.with_budget(self.budget)
        if self.feedback != "auto":
            feedback = as_feedback(self.feedback)
            for plan in self.uplink.plans():
                feedback.check(plan)
        if self.downlink not in ("pack", "plain"):
            as_plan(self.downlink)
        if self.strategy:
            _check_strategy(self.strategy, self.strategy_options)
        elif self.strategy_options:
            raise ConfigError("strategy_options: name the strategy of the method too")

    @property
    def uplink(self) -> Schedule:
        """The codec over the rounds."""
        return Schedule.parse(self.codec).with_settings(gentle_share=self.gentle_share, min_size=self.min_size)

    @property
    def uncompressed(self) -> bool:
        """Whether this is the plain float32 upload that others are compared with."""
        plain = self.feedback == "none" and self.downlink in ("pack", "plain") and not self.strategy
        return plain and not self.average and self.uplink == Schedule.parse("float32")


@dataclass(frozen=True)
class Experiment:
    """One training task and the methods to compare on it.

    Attributes:
        partition: "dirichlet" (by `alpha`), "iid", or "natural" where the data say whose each sample is.
        momentum: of the clients' SGD; its velocity starts at 0 in every round.
        clip_norm: bound on the norm of every batch's gradient, all tensors together.
        last: evaluations whose mean is the final accuracy: one alone swings by a point.
    """

    name: str
    dataset: str
    model: str
    methods: tuple[Method, ...]
    seeds: tuple[int, ...] = (0, 1, 2)
    clients: int = 100
    clients_per_round: int = 10
    partition: str = "dirichlet"
    alpha: float = 0.3
    min_samples: int = 8
    rounds: int = 60
    local_epochs: int = 1
    batch: int = 20
    lr: float = 0.1
    momentum: float = 0.0
    clip_norm: float = math.inf
    last: int = 10
    strategy: str = "fedavg"
    strategy_options: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _one_of("dataset", self.dataset, datasets.available())
        _one_of("model", self.model, tuple(MODELS))
        _one_of(f"dataset for model {self.model!r}", self.dataset, MODELS[self.model])
        _one_of("partition", self.partition, partition.kinds())
        _check_strategy(self.strategy, self.strategy_options)
        for key in ("clients", "clients_per_round", "min_samples", "rounds", "local_epochs", "batch", "last"):
            if getattr(self, key) < 1:
                raise ConfigError(f"{key}: expected at least 1, got {getattr(self, key)}")
        for key in ("alpha", "lr"):
            if not 0 < getattr(self, key) < math.inf:
                raise ConfigError(f"{key}: expected a finite number above 0, got {getattr(self, key)}")
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"momentum: expected a number from 0 to below 1, got {self.momentum}")
        if not self.clip_norm > 0:
            raise ConfigError(f"clip_norm: expected a number above 0, got {self.clip_norm}")
        if self.clients_per_round > self.clients:
            raise ConfigError(f"clients_per_round: {self.clients_per_round} is more than clients, {self.clients}")
        if min(self.seeds, default=-1) < 0:
            raise ConfigError(f"seeds: expected one or more numbers from 0 on, got {list(self.seeds)}")
        if not self.methods:
            raise ConfigError("methods: expected at least one [[methods]] table with name and codec")
        _unique("seeds", self.seeds)
        _unique("methods", [method.name for method in self.methods])


def shipped() -> tuple[str, ...]:
    """Names of the experiments that come with the package."""
    folder = files("fedcomp_simulations") / "experiments"
    names = (entry.name for entry in folder.iterdir())
    return tuple(sorted(name.removesuffix(".toml") for name in names if name.endswith(".toml")))


def load_experiment(name_or_path: str) -> Experiment:
    """Read a shipped experiment by name, or any other by the path of its TOML file."""
    if name_or_path in shipped():
        text = (files("fedcomp_simulations") / "experiments" / f"{name_or_path}.toml").read_text("utf-8")
        return parse_experiment(text, name=name_or_path, source=f"{name_or_path}.toml")
    path = Path(name_or_path)
    if not path.is_file():
        raise ConfigError(f"unknown experiment {name_or_path!r}: no such file, and shipped are {', '.join(shipped())}")
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    return parse_experiment(text, name=path.stem, source=str(path))


def parse_experiment(text: str, *, name: str, source: str) -> Experiment:
    """Make an experiment from TOML text; errors name the source, the key and what exists."""
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{source}: not valid TOML: {error}") from error
    try:
        values = _checked(table, Experiment, skip="name")
        methods = tuple(_parse_method(index, entry) for index, entry in enumerate(table["methods"], 1))
        return Experiment(name=name, **values | {"methods": methods})
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from error


def parse_method(text: str) -> Method:
    """Make a method from a codec as text, with feedback if it ends in one, as in `sign+ef` or `sign+cafe(beta=0.8)`."""
    codec, plus, feedback = text.rpartition("+")
    if plus and feedback.strip().partition("(")[0] in feedbacks():
        return Method(text, codec.strip(), feedback.strip())
    return Method(text, text.strip())


def with_codecs(experiment: Experiment, codecs: list[str]) -> Experiment:
    """Replace the methods; plain float32 stays the first, as the twin that the others are compared with."""
    methods = [parse_method(text) for text in dict.fromkeys(codecs)]
    others = tuple(method for method in methods if not method.uncompressed)
    return replace(experiment, methods=(Method("float32", "float32"), *others))


def _parse_method(index: int, entry: Any) -> Method:
    where = f"methods, entry {index}"
    if not isinstance(entry, dict):
        raise ConfigError(f"{where}: expected a table, got {entry!r}")
    try:
        return Method(**_checked(entry, Method))
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def _checked(table: Mapping[str, Any], kind: type[Any], skip: str = "") -> dict[str, Any]:
    """Check the keys and value types of a table against the fields of a dataclass."""
    known = {entry.name: entry for entry in fields(kind) if entry.name != skip}
    for key in table:
        _one_of("key", key, tuple(known))
    for key, entry in known.items():
        if key not in table and entry.default is MISSING and entry.default_factory is MISSING:
            raise ConfigError(f"key {key!r} is missing")
    return {key: _convert(key, table[key], known[key].type) for key in table}


def _convert(key: str, value: Any, expected: Any) -> Any:
    """Return the value as the type of its field; TOML's integers serve as floats, its booleans as nothing."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    whole = number and isinstance(value, int)
    if (expected is int and whole) or (expected is bool and isinstance(value, bool)):
        return value
    if (
        expected is float and number and not (whole and abs(value) > 1e300)
    ):  # TOML's integers may be too large for a float
        return float(value)
    if expected is str and isinstance(value, str) and value:
        return value
    if isinstance(value, list) and key == "methods":
        return value
    if isinstance(value, list) and key == "seeds":
        return tuple(_convert("an entry of seeds", entry, int) for entry in value)
    if isinstance(value, dict) and key == "strategy_options":
        return {name: _convert(f"strategy_options.{name}", entry, float) for name, entry in value.items()}
    raise ConfigError(f"{key}: expected {_WORDS.get(expected) or _WORDS[key]}, got {value!r}")


_WORDS: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    "methods": "a list of tables",
    "seeds": "a list of whole numbers",
    "strategy_options": "a table of numbers",
}


def _check_strategy(name: str, options: Mapping[str, float]) -> None:
    _one_of("strategy", name, tuple(STRATEGIES))
    for key, value in options.items():
        _one_of(f"option of strategy {name!r}", key, STRATEGIES[name])
        below = 1 if key in ("beta_1", "beta_2", "server_momentum") else math.inf
        if not 0 <= value < below or (key == "tau" and value == 0):
            raise ConfigError(f"strategy_options.{key}: expected a number from 0 to below {below}, got {value}")


def _one_of(what: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigError(f"unknown {what} {value!r}; available: {', '.join(known) or 'none'}")


def _unique(key: str, values: Any) -> None:
    repeated = [value for value, count in Counter(values).items() if count > 1]
    if repeated:
        raise ConfigError(f"{key}: {sorted(repeated)[0]!r} is there twice")
