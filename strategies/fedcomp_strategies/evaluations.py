"""Evaluations that come along with training: what to ask for, and what has come, by round."""

import logging
from typing import Any

from flwr.app import ConfigRecord, MetricRecord

from fedcomp.request import EVALUATE

log = logging.getLogger("fedcomp")


class Evaluations:
    """Metrics of each round's model, as nodes found them when they received it for the next round's training.

    Attributes:
        metrics: by round, as the inner strategy has aggregated them; 0: the initial model.
        heard: whether any reply to the last train messages has brought an evaluation.
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
        self.heard = False
        self._warned = False
        self._last, self._config = num_rounds, config

    def comes_along(self, server_round: int) -> bool:
        """Whether this round's model will be evaluated along with the next training, so that messages are spared."""
        if not self.heard and not self._warned:
            self._warned = True
            log.warning(
                "round %d: no client has evaluated along with training: models are evaluated by messages meanwhile; "
                "mark the function of the ClientApp by @compress_mod.evaluates", server_round,
            )  # fmt: skip
        return self.heard and server_round != self._last

    def asked(self, server_round: int) -> dict[str, Any]:
        """Entries of a train message's configuration that ask for an evaluation of the model in it."""
        config = {**(self._config or {}), "server-round": server_round - 1}
        return {EVALUATE: True} | {f"{EVALUATE}.{key}": value for key, value in config.items()}
