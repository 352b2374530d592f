"""What to run: an `Experiment` is one training task, a `Method` one way to upload; `study` reads both from TOML.

    clients = 100
    rounds = 60
    [[methods]]
    name = "sign + EF"
    codec = "sign"
    feedback = "ef"

The keys are the fields of the two classes; the name of an experiment is the name of its file.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from fedcomp import Plan, Schedule, as_feedback
from fedcomp.errors import ConfigError
from fedcomp.feedback import feedbacks
from fedcomp.plan import as_plan
from fedcomp_simulations import datasets
from fedcomp_simulations.config import one_of, unique
from fedcomp_simulations.fleet import Fleet
from fedcomp_simulations.network import Network, check_model
from fedcomp_simulations.partition import FLWR, SHARDS_PER_CLIENT, check_kind

STRATEGIES: dict[str, tuple[str, ...]] = {  # and the options each of them takes
    "fedadagrad": ("eta", "tau"),
    "fedadam": ("eta", "beta_1", "beta_2", "tau"),
    "fedavg": (),
    "fedavgm": ("server_learning_rate", "server_momentum"),
    "fedmedian": (),
    "fedyogi": ("eta", "beta_1", "beta_2", "tau"),
}


_AVERAGING = ("fedavg", "fedmedian")  # whose model is between those of the clients

_AT_LEAST_ONE = (
    "clients", "clients_per_round", "min_samples", "shards_per_client",
    "rounds", "local_epochs", "batch", "evaluate_every", "last",
)  # fmt: skip


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
        if not self.name.isprintable():
            raise ConfigError(f"name: expected a text without control characters, got {self.name!r}")
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
        """Whether this is the plain float32 upload that others are compared with; small tensors are plain anyway."""
        plain = self.feedback == "none" and self.downlink in ("pack", "plain") and not self.strategy
        alone = not self.average and self.norm_cap <= 0
        return plain and alone and Schedule.parse(self.codec) == Schedule.parse("float32")


@dataclass(frozen=True)
class Experiment:
    """One training task and the methods to compare on it.

    Attributes:
        dataset: one that comes inside a package, or "idx:FOLDER", "FILE.npz", "hub:NAME".
        hidden: units of the model's hidden layer, or a transformer's width; 0: what the model has by default.
        norm: what normalizes after the convolutions of cnn and cnn1d: "none", "group" or "batch".
        partition: "dirichlet" or "quantity" (by `alpha`), "shards" (by `shards_per_client`), "iid", "natural" where the
            data say whose each sample is, or "flwr:NAME", a partitioner of flwr-datasets with `partition_options`.
        momentum: of the clients' SGD; its velocity starts at 0 in every round.
        clip_norm: bound on the norm of every batch's gradient, all tensors together.
        evaluate_every: rounds from one evaluation to the next; the last `last` rounds are all evaluated.
        last: evaluations whose mean is the final accuracy: one alone swings by a point.
        fleet: what clients are like beyond their data: links, drop-outs, lost and late replies.
    """

    name: str
    dataset: str
    model: str
    methods: tuple[Method, ...]
    seeds: tuple[int, ...] = (0, 1, 2)
    clients: int = 100
    clients_per_round: int = 10
    hidden: int = 0
    norm: str = "none"
    partition: str = "dirichlet"
    alpha: float = 0.3
    shards_per_client: int = SHARDS_PER_CLIENT
    partition_options: Mapping[str, Any] = field(default_factory=dict)
    min_samples: int = 8
    rounds: int = 60
    local_epochs: int = 1
    batch: int = 20
    lr: float = 0.1
    momentum: float = 0.0
    clip_norm: float = math.inf
    evaluate_every: int = 1
    last: int = 10
    strategy: str = "fedavg"
    strategy_options: Mapping[str, float] = field(default_factory=dict)
    fleet: Fleet = field(default_factory=Fleet)

    def __post_init__(self) -> None:
        datasets.check_name(self.dataset)
        if form := datasets.known_form(self.dataset):
            Network(self.model, form, self.hidden, self.norm)
        else:  # the data may be large, and elsewhere: the run looks at them
            check_model(self.model)
        check_kind(self.partition)
        _check_options(self.partition, self.partition_options)
        _check_strategy(self.strategy, self.strategy_options)
        for strategy in (self.strategy, *(method.strategy for method in self.methods)):
            if self.norm == "batch" and strategy not in ("", *_AVERAGING):
                raise ConfigError(
                    f"norm: strategy {strategy!r} moves the running statistics of BatchNorm beyond what any client has "
                    f'seen, variances below zero; use "group" or "none", or one of {", ".join(_AVERAGING)}'
                )
        for key in _AT_LEAST_ONE:
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
        unique("seeds", self.seeds)
        unique("methods", [method.name for method in self.methods])

    def network(self) -> Network:
        """What is trained; for data of the user's own this reads them. Raises ConfigError if they do not suit it."""
        return Network(self.model, datasets.form(self.dataset), self.hidden, self.norm)

    def evaluates(self, server_round: int) -> bool:
        """Whether the model is evaluated after this round."""
        return server_round % self.evaluate_every == 0 or server_round > self.rounds - self.last


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


def _check_options(partition: str, options: Mapping[str, Any]) -> None:
    if options and not partition.startswith(FLWR):
        raise ConfigError(f"partition_options: only partitions flwr:NAME take options, not {partition!r}")
    for key, value in options.items():
        if not all(
            isinstance(each, bool | int | float | str) for each in (value if isinstance(value, list) else [value])
        ):
            raise ConfigError(f"partition_options.{key}: expected a number, a text or a list of such, got {value!r}")


def _check_strategy(name: str, options: Mapping[str, float]) -> None:
    one_of("strategy", name, tuple(STRATEGIES))
    for key, value in options.items():
        one_of(f"option of strategy {name!r}", key, STRATEGIES[name])
        below = 1 if key in ("beta_1", "beta_2", "server_momentum") else math.inf
        if not 0 <= value < below or (key == "tau" and value == 0):
            raise ConfigError(f"strategy_options.{key}: expected a number from 0 to below {below}, got {value}")
