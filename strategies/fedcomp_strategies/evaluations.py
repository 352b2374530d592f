"""Evaluations that come along with training: what to ask for, and what has come, by round."""

from typing import Any

from flwr.app import ConfigRecord, MetricRecord

from fedcomp.request import EVALUATE


class Evaluations:
    """Metrics of each round's model, as nodes found them when they received it for the next round's training.

    Attributes:
        metrics: by round, as the inner strategy has aggregated them; 0: the initial model.
    """

    def __init__(self) -> None:
        self.begin(0, None)

    def begin(self, num_rounds: int, config: ConfigRecord | None) -> None:
        """Another training begins.

        Args:
            num_rounds: after which one the model is evaluated by messages, as no training follows; 0: not known.
            config: for evaluations.
        """
        self.metrics: dict[int, MetricRecord] = {}
        self._last, self._config = num_rounds, config

    def is_last(self, server_round: int) -> bool:
        """Whether no training follows this round."""
        return server_round == self._last

    def asked(self, server_round: int) -> dict[str, Any]:
        """Entries of a train message's configuration that ask for an evaluation of the model in it."""
        config = {**(self._config or {}), "server-round": server_round - 1}
        return {EVALUATE: True} | {f"{EVALUATE}.{key}": value for key, value in config.items()}
