"""Strategies of Flower with compressed uploads in one name, with defaults for real devices.

``CompressedFedAvg()`` is ``Compressed(FedAvg(), uplink="auto", budget="1/300")``: an upload takes a three hundredth of
the model's bytes, and a node that has died is waited for ten minutes a round instead of an hour.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAdagrad, FedAdam, FedAvg, FedAvgM, FedProx, FedYogi, Result

from fedcomp import Codec, ConfigError, Plan, _validate
from fedcomp.schedule import Schedule
from fedcomp_strategies.compressed import Compressed
from fedcomp_strategies.settings import Value, checked, kinds_of, merged, read, unknown, with_budget

_USUAL: dict[str, tuple[str, type]] = {
    "num-server-rounds": ("rounds", int),
    "fraction-train": ("fraction_train", float),
    "fraction-evaluate": ("fraction_evaluate", float),
}
"""Keys that apps have always had: the option they set, and its kind."""


class Ready(Compressed):
    """What the strategies of this file share.

    Args:
        uplink, budget: see `Compressed`. An uplink "auto" without a budget gets 1/300 of float32.
        min_clients: how many nodes must be there, and take part in training and evaluation at least.
        fraction: which part of the nodes takes part in training and evaluation.
        timeout: seconds to wait for the replies of a round, unless `start` says otherwise.
        rounds: how many, unless `start` says otherwise.
        rest: any other option of `Compressed` or of the strategy of Flower. What these call fraction_train,
            min_evaluate_nodes and so on goes before `fraction` and `min_clients`.

    Raises ConfigError for an option that neither of them has.
    """

    inner: ClassVar[type[FedAvg]] = FedAvg
    """The strategy of Flower that is wrapped."""

    better: ClassVar[Mapping[str, Any]] = {}
    """Options of that strategy whose defaults are others here."""

    def __init__(
        self,
        uplink: Schedule | Plan | Codec | str = "auto",
        budget: str | float | None = None,
        *,
        min_clients: int = 2,
        fraction: float = 1.0,
        timeout: float = 600.0,
        rounds: int = 3,
        **rest: Any,
    ) -> None:
        _validate.integer(low=1, min_clients=min_clients)
        _validate.integer(low=1, rounds=rounds)
        self.timeout = _validate.number(low=0, high=1e7, above=True, timeout=timeout)
        self.rounds = rounds
        share = _validate.number(low=0, high=1, above=True, fraction=fraction)
        outer, inner = self._split(rest)
        nodes = dict.fromkeys(("min_train_nodes", "min_evaluate_nodes", "min_available_nodes"), min_clients)
        parts = dict.fromkeys(("fraction_train", "fraction_evaluate"), share)
        strategy = self.inner(**{**nodes, **parts, **self.better, **inner})
        super().__init__(strategy, **with_budget({"uplink": uplink, "budget": budget, **outer}))

    @classmethod
    def from_config(cls, run_config: Mapping[str, Value], **defaults: Any) -> Self:
        """The strategy that an app's configuration describes: ``from_config(context.run_config)``.

        Args:
            run_config: any option that is a text, a number or a truth value, as in "fedcomp-min-clients"; see
                `settings`. Also num-server-rounds, fraction-train and fraction-evaluate, as in any app.
            defaults: options that hold where the configuration says nothing.

        Raises ConfigError as `settings` does.
        """
        kinds = {**_kinds(Compressed), **_kinds(cls.inner), **_kinds(Ready)}
        usual = {n: checked(key, run_config[key], kind) for key, (n, kind) in _USUAL.items() if key in run_config}
        return cls(**merged({**defaults, **usual}, read(run_config, kinds)))

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int | None = None,
        timeout: float | None = None,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """As `Compressed.start`; rounds and timeout are this strategy's own unless given."""
        return super().start(
            grid,
            initial_arrays,
            self.rounds if num_rounds is None else num_rounds,
            self.timeout if timeout is None else timeout,
            train_config,
            evaluate_config,
            evaluate_fn,
        )

    def _split(self, options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Options for `Compressed`, and those for the strategy of Flower."""
        outer, inner = _options(Compressed), _options(self.inner)
        for name in options.keys() - outer - inner:
            known = outer | inner | _options(Ready)
            raise ConfigError(f"{type(self).__name__}: {name}={options[name]!r}: {unknown(name, known)}")
        return {n: v for n, v in options.items() if n in outer}, {n: v for n, v in options.items() if n in inner}


class CompressedFedAvg(Ready):
    """FedAvg with compressed uploads: the weighted mean of the clients' models (McMahan et al., 1602.05629)."""


class CompressedFedAvgM(Ready):
    """FedAvgM with compressed uploads (1909.06335).

    Its options server_momentum and server_learning_rate are 0.9 and 0.3 unless given: Flower's 0 and 1 are FedAvg.
    """

    inner = FedAvgM
    better: ClassVar[Mapping[str, Any]] = {"server_momentum": 0.9, "server_learning_rate": 0.3}


class CompressedFedProx(Ready):
    """FedProx with compressed uploads: clients are told proximal_mu as "proximal-mu" and must use it (1812.06127)."""

    inner = FedProx


class CompressedFedAdam(Ready):
    """FedAdam with compressed uploads: eta, beta_1, beta_2, tau are its own (2003.00295)."""

    inner = FedAdam


class CompressedFedYogi(Ready):
    """FedYogi with compressed uploads: eta, beta_1, beta_2, tau are its own (2003.00295)."""

    inner = FedYogi


class CompressedFedAdagrad(Ready):
    """FedAdagrad with compressed uploads: eta and tau are its own (2003.00295)."""

    inner = FedAdagrad


def _options(kind: type) -> set[str]:
    """Names of the options of a strategy."""
    parameters = inspect.signature(kind.__init__).parameters  # type: ignore[misc]
    return set(parameters) - {"self", "strategy", "rest"}


def _kinds(kind: type) -> dict[str, tuple[type, ...]]:
    return kinds_of(kind.__init__)  # type: ignore[misc]
