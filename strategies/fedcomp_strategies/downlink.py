"""What a server sends down: the global model as one package, whole or as differences to what a client holds.

    send C(w - told),   told' = told + C(w - told)      (the server's half of DoubleSqueeze:
                                                         Tang et al., ICML 2019, arXiv 1905.05957)

`told` is the model that every client holds after receiving, to the last bit, because both sides decode the same frames.
What compression lost is w - told; it is part of the next difference by itself, so this is error feedback without a
residual to keep: sums telescope, told - told_0 is exactly what was broadcast. Knows nothing of Flower.
"""

import logging
from collections import Counter, deque
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcomp import Codec, ConfigError, FedcompError, FrameError, NonFiniteError, Plan, compress, decompress, generator
from fedcomp.descriptor import describe, read_plan
from fedcomp.downlink import MAX_LINKS, Link, Package, model_digest, own_arrays, pack_model
from fedcomp.layout import Arrays, Layout
from fedcomp.plan import as_plan

log = logging.getLogger("fedcomp")

_DOWNLINK = 2**64 + 1
"""Stands for the downlink where randomness is seeded by node: beyond every node id and the server's own number."""

_TRIES = 3

Model = dict[str, NDArray[Any]]


class Downlink:
    """The global model's way down to the clients: remembers what they hold and packs what each one lacks.

    Clients that were confirmed to hold one of the last models get a chain of the frames since then, as long as that is
    shorter than the whole model; all others get the whole model. A reply that is lost costs nothing: the chain can be
    entered at any link, so it also serves a client that is further than the server knows.

    A node that fails with three chains in a row, because it loses its models or its machine computes differently, gets
    whole models from then on.

    Args:
        plan: how differences are coded: a plan, a codec or its text. Codecs must be contractive. Those that decode by
            products of matrices or powers (lowrank, lrq, powersgd, tensortrain, log, vq, rvq) are the same to the last
            bit only on machines of one kind. None: whole models without loss.
        seed: feeds the codecs' randomness, together with the round.

    Raises ConfigError for a plan with which the loss would grow without bound, or which clients could not read.
    """

    def __init__(self, plan: Plan | Codec | str | None, seed: int = 0) -> None:
        self.plan = None if plan is None else _checked(as_plan(plan))
        self.seed = seed
        self.restart()

    def restart(self) -> None:
        """Another training begins: forget the model and what the nodes hold."""
        self._told: Model | None = None
        self._digest = self._source = b""  # of told, and of what was published
        self._model: bytes | None = None  # told, packed
        self._version = 0
        self._links: deque[tuple[Link, int]] = deque()  # the last one leads to the current version; and their bytes
        self._most = 0  # bytes of a packed model
        self._sent: dict[int, tuple[int, int | None]] = {}  # by node: version, and links if it was a chain
        self._held: dict[int, int] = {}
        self._failed: Counter[int] = Counter()  # chains in a row
        self._packages: dict[tuple[int | None, bytes | None], bytes] = {}

    # --- the model ---------------------------------------------------------------------------------------------------

    @property
    def told(self) -> Model:
        """The model that clients hold after receiving: read-only arrays. Without a plan, what was published."""
        if self._told is None:
            raise _nothing_yet()
        return self._told

    @property
    def digest(self) -> bytes:
        """8 bytes that name `told`."""
        if self._told is None:
            raise _nothing_yet()
        return self._digest

    def publish(self, arrays: Arrays, round: int) -> None:
        """Make this the global model. The same model again changes nothing, in whatever round.

        With a plan the first model is told exactly, and so is one of another layout, one whose difference cannot be
        coded, or one whose frame would not be shorter than the model.

        Raises NonFiniteError with a plan and a model that is not finite, LayoutError for dtypes, names or shapes that
        no model has; then nothing has changed.
        """
        source = model_digest(arrays)
        if source == self._source:
            self._packages = {key: data for key, data in self._packages.items() if key[1] is None}  # predictors change
            return
        if self.plan is not None:
            _check_finite(arrays)
        step = None if self.plan is None or self._told is None else self._step(self.plan, arrays, round)
        if step is None:
            self._start_from(own_arrays(arrays), source)
        else:
            self._go_on(*step)
        self._source = source
        self._version += 1
        self._packages = {}
        oldest = self._version - len(self._links)
        self._sent = {node: sent for node, sent in self._sent.items() if sent[0] >= oldest}
        self._held = {node: version for node, version in self._held.items() if version >= oldest}

    def _step(self, plan: Plan, arrays: Arrays, round: int) -> tuple[Link, Model] | None:
        """The link to the new model and what clients will make of it; None if the whole model has to be sent."""
        if Layout.of(arrays) != Layout.of(self.told):
            log.info("round %d: the global model's tensors have changed: clients get the whole model", round)
            return None
        rng = generator(self.seed, round, _DOWNLINK)
        try:
            frame = compress(self.told, arrays, plan, round=round, rng=rng).frame
            told = decompress(frame, self.told, plan=plan)
        except (NonFiniteError, FrameError) as error:  # the model is finite, its difference or what is decoded is not
            log.warning("round %d: the difference cannot be coded: clients get the whole model (%s)", round, error)
            return None
        link = Link(self._digest, frame)
        return None if len(link.to_bytes()) >= self._most else (link, told)

    def _start_from(self, told: Model, digest: bytes) -> None:
        self._told, self._digest, self._model = _read_only(told), digest, pack_model(told)
        self._most = len(self._model)
        self._links.clear()

    def _go_on(self, link: Link, told: Model) -> None:
        self._told, self._digest, self._model = _read_only(told), model_digest(told), None
        self._links.append((link, len(link.to_bytes())))
        # Every chain that is left, being a part of this one, is shorter than the model that follows the same header.
        while len(self._links) > MAX_LINKS or sum(nbytes for _, nbytes in self._links) >= self._most:
            self._links.popleft()

    # --- the nodes ---------------------------------------------------------------------------------------------------

    def package(self, node: int, predictor: bytes | None = None) -> bytes:
        """What this node must be sent to hold the current model; nodes in the same state share one bytes object.

        Args:
            node: its number.
            predictor: a frame that travels beside the model.
        """
        digest, held = self.digest, self._held.get(node)
        if self.plan is not None:
            self._sent[node] = self._version, None if held is None else self._version - held
        if (held, predictor) not in self._packages:
            self._packages[held, predictor] = self._pack(digest, held, predictor).to_bytes()
        return self._packages[held, predictor]

    def _pack(self, digest: bytes, held: int | None, predictor: bytes | None) -> Package:
        keep = self.plan is not None
        if held is not None:
            links = [link for link, _ in self._links][len(self._links) - (self._version - held) :]
            return Package(digest, None, tuple(links), predictor, keep)
        if self._model is None:
            self._model = pack_model(self.told)
        return Package(digest, self._model, (), predictor, keep)

    def confirm(self, node: int) -> None:
        """The node has answered its last package and kept the model: chains for it start there."""
        version, links = self._sent.get(node, (None, None))
        if links:  # a chain without any says nothing of how the node computes
            del self._failed[node]
        if version is not None and self._failed[node] < _TRIES:
            self._held[node] = version

    def forget(self, node: int) -> None:
        """The node has lost its model, or could not read the package: it gets the whole model next."""
        _, links = self._sent.pop(node, (None, None))
        self._held.pop(node, None)
        if links is not None:
            self._failed[node] += 1
            if self._failed[node] == _TRIES:
                log.warning("node %d failed with %d chains in a row: it gets whole models from now on", node, _TRIES)


def _checked(plan: Plan) -> Plan:
    """The plan, if it can be used for differences."""
    for codec in plan.codecs():
        if codec.name == "auto":
            raise ConfigError("downlink: budgets are for uploads; use a codec such as uniform(4) instead of auto")
        if not codec.contractive:
            raise ConfigError(
                f"downlink: {codec} cannot code differences of the global model: it is not contractive, so the "
                "distance to what clients hold would grow without bound; use a codec such as sign(), "
                "topk(0.05) or uniform(4), or None for whole models"
            )
    try:
        read_plan(describe(plan))
    except FrameError as error:
        raise ConfigError(f"downlink: clients could not read frames of {plan.codec}: {error}") from None
    return plan


def _check_finite(arrays: Arrays) -> None:
    bad = [name for name, values in arrays.items() if values.dtype.kind == "f" and not np.isfinite(values).all()]
    if bad:
        raise NonFiniteError(
            f"global model: expected finite values, got NaN or infinity in {bad[:5]}; keep the last round's model"
        )


def _nothing_yet() -> FedcompError:
    return FedcompError("downlink: publish a model before asking for it")


def _read_only(model: Model) -> Model:
    for values in model.values():
        values.setflags(write=False)
    return model
