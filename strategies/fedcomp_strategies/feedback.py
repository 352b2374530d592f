"""The server's half of feedback: what it remembers between rounds, and what it makes of the mean of the replies."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from fedcomp import (
    EF21,
    CAFe,
    CountSketch,
    Feedback,
    FetchSGD,
    FrameError,
    LayoutError,
    Plan,
    Rule,
    compress,
    decompress,
    generator,
    wire,
)
from fedcomp.feedback import CAFeGuard, EF21Server, FetchSGDServer
from fedcomp.feedback.cafe import LEAST_BITS, blank
from fedcomp.layout import Arrays, Vector
from fedcomp.metrics import length
from fedcomp.plan import Bucket
from fedcomp_strategies.aggregator import Mean

log = logging.getLogger("fedcomp")

SERVER = 2**64
"""Stands for the server where randomness is seeded by node: beyond every node id."""

Update = dict[str, Vector]


class ServerFeedback:
    """What the server does about losses, whatever the scheme.

    Args:
        feedback: the scheme.
        seed: feeds the randomness of the predictor's codec.

    Attributes:
        feedback: the scheme as clients are asked for it; CAFe's beta may have been lowered.
        predictor, predictor_frame: CAFe's, as clients decode it, and as it is sent; None: there is none.
        out_of_step: whether a client has lost what the server counts on, so that the training must begin anew.
    """

    def __init__(self, feedback: Feedback, seed: int) -> None:
        self._given = feedback
        self._seed = seed
        self._forgetful: set[int] = set()
        self.restart()

    def restart(self) -> None:
        """Another training begins: nothing is remembered."""
        self.feedback = self._given
        self.predictor: Update | None = None
        self.predictor_frame: bytes | None = None
        self._guard = CAFeGuard(self._given.beta) if isinstance(self._given, CAFe) else None
        self._ef21 = EF21Server()
        self._fetchsgd: dict[int, FetchSGDServer] = {}
        self._warned = False
        self.out_of_step = False

    @property
    def needs_mean(self) -> bool:
        """Whether the scheme computes with the mean alone, so that the strategy must be one that averages."""
        return isinstance(self._given, EF21 | FetchSGD)

    @property
    def learns(self) -> bool:
        """Whether the scheme wants to see the update of the global model."""
        return isinstance(self._given, CAFe)

    def shifted(self, base: Arrays) -> Arrays:
        """The base plus what clients took off their updates. Raises FrameError if they were not told of anything."""
        taken = {name: self._beta * values for name, values in self._known().items()}
        return {name: values + taken[name] if name in taken else values for name, values in base.items()}

    def check(self, node: int, notes: wire.Notes | None) -> None:
        """Raise FrameError or LayoutError for a reply that the scheme cannot compute with."""
        if notes is not None and notes.predicted:
            self._known()
        if not isinstance(self.feedback, EF21):
            return
        if notes is None:
            raise LayoutError("feedback 'ef21' needs clients with fedcomp, this one replied uncompressed")
        if notes.reset and node in self._forgetful:
            raise FrameError("the client loses its estimate again and again; it is left out")
        if notes.reset:
            self.out_of_step = True
            self._forgetful.add(node)
            raise FrameError("the client has lost the estimate that the server still counts; all begin anew")

    def weight(self, node: int, weight: float) -> float:
        """The weight to average a node with: with EF21 that of its first upload."""
        return self._ef21.weight(node, weight) if isinstance(self.feedback, EF21) else weight

    def succeed(self, former: int | None, node: int) -> None:
        """A node is the former one under another id."""
        if former is not None:
            self._ef21.rename(former, node)

    def step(self, mean: Mean, buckets: Sequence[Bucket], weights: Mapping[int, float]) -> Mean:
        """The mean with the update that the scheme makes of it.

        Args:
            mean: of what the clients sent.
            buckets: of the round's plan.
            weights: by node, of all replies in it.
        """
        if isinstance(self.feedback, FetchSGD):
            return replace(mean, update=mean.update | self._fetch(self.feedback, mean, buckets))
        if isinstance(self.feedback, EF21):
            return replace(mean, update=self._ef21.step(mean.update, weights))
        predicted = sum(weights[node] for node, contents in mean.contents.items() if contents.notes.predicted)
        if not predicted:
            return mean
        predictor, factor = self._known(), np.float32(self._beta * (predicted / mean.weight))
        return replace(mean, update={name: x + factor * predictor[name] for name, x in mean.update.items()})

    def commit(self) -> None:
        """The model that came of the last step was accepted."""
        self._ef21.commit()
        for server in self._fetchsgd.values():
            server.commit()

    def _known(self) -> Update:
        if self.predictor is None:
            raise FrameError("frame is a difference to a predictor, but none was sent in this round")
        return self.predictor

    @property
    def _beta(self) -> np.float32:
        return np.float32(self.feedback.beta if isinstance(self.feedback, CAFe) else 0)

    def _fetch(self, feedback: FetchSGD, mean: Mean, buckets: Sequence[Bucket]) -> Update:
        update: Update = {}
        for index, table in mean.tables.items():
            codec, layout = buckets[index].codec, buckets[index].layout
            assert isinstance(codec, CountSketch)
            server = self._fetchsgd.setdefault(index, FetchSGDServer(feedback, codec))
            update |= layout.unflatten(server.step(table.reshape(codec.rows, -1), layout.size))
        return update

    def learn(self, update: Mapping[str, Vector] | None, weights: Arrays, round: int) -> None:
        """Prepare the next round.

        Args:
            update: the mean update of this round by tensor name; None: there was none, so that none is re-applied.
            weights: the new global model.
            round: the round that has ended.
        """
        if not isinstance(self.feedback, CAFe) or self._guard is None:
            return
        self.predictor, self.predictor_frame = None, None
        if update is None:
            return
        if reason := self._guard.observe(length(update.values()), length(weights[name] for name in update)):
            log.warning("round %d: feedback cafe: %s", round, reason)
            self.feedback = replace(self.feedback, beta=self._guard.beta)
        self._predict(update, weights, round)

    def _predict(self, update: Mapping[str, Vector], weights: Arrays, round: int) -> None:
        """Code the update, and remember what clients will decode."""
        assert isinstance(self.feedback, CAFe)
        zeros = blank(weights)
        told = {name: np.asarray(update.get(name, zero), np.float32) for name, zero in zeros.items()}
        if not all(np.isfinite(values).all() for values in told.values()):
            return
        codec = self.feedback.codec
        plan = Plan(codec, (Rule("*", codec),))
        rng = generator(self._seed, round, SERVER)
        self.predictor_frame = compress(zeros, told, plan, round=round, rng=rng).frame
        self.predictor = decompress(self.predictor_frame, zeros)

    def warn_of_starvation(self, bits: float) -> None:
        """Say once if uploads are too small for the scheme."""
        if isinstance(self.feedback, CAFe) and bits < LEAST_BITS and not self._warned:
            self._warned = True
            log.warning(
                "uploads of %.3g bits per parameter are below %g: feedback cafe does harm; use ef or larger uploads",
                bits, LEAST_BITS,
            )  # fmt: skip
