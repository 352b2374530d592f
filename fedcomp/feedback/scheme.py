"""What all feedback schemes have in common: the client's half of a round, its memory, and how users write them."""

import ast
import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, TypeVar, cast

import numpy as np

from fedcomp.codec import Codec, Parts, read_argument
from fedcomp.errors import ConfigError
from fedcomp.layout import Layout, Vector
from fedcomp.plan import Plan

log = logging.getLogger("fedcomp")

Slots = dict[str, Vector]
"""What a client remembers of one bucket: a vector (layout.size,) for each of the scheme's slots."""


@dataclass(frozen=True)
class Memory:
    """What a client remembers of a model.

    Attributes:
        round: of the upload after which it was made; 0: nothing yet.
        slots: float32 arrays of the tensors' shapes, by slot and tensor name. What is missing counts as zero.
    """

    round: int = 0
    slots: Mapping[str, Mapping[str, Vector]] = field(default_factory=dict)

    def flat(self, slot: str, layout: Layout) -> Vector:
        """The slot as one vector (layout.size,).

        A tensor of another shape or with values that are not finite counts as zero, with a warning that names it.
        """
        out = np.zeros(layout.size, np.float32)
        for tensor, where in layout.slices():
            known = self.slots.get(slot, {}).get(tensor.name)
            if known is None:
                continue
            if known.shape != tensor.shape or not np.isfinite(known).all():
                log.warning(
                    "%s of tensor %r dropped: shape %s, expected %s with finite values",
                    slot, tensor.name, known.shape, tensor.shape,
                )  # fmt: skip
                continue
            out[where] = known.ravel()
        return out


EMPTY = Memory()


@dataclass(frozen=True)
class Feedback(ABC):
    """A feedback scheme. Fields are its configuration, as with codecs."""

    name: ClassVar[str]
    """What users write."""

    slots: ClassVar[tuple[str, ...]] = ()
    """What clients must remember; empty: they need no state."""

    exact: ClassVar[bool] = False
    """Whether the memory must be stored without rounding, because the server computes with the same numbers."""

    def check(self, plan: Plan) -> None:
        """Raise ConfigError for a codec with which the scheme diverges. Default: all are fine."""
        del plan

    def plan(self, plan: Plan, round: int) -> Plan:
        """The plan of a round, the first of which is 1. Default: as given."""
        del round
        return plan

    @abstractmethod
    def encode(
        self, codec: Codec, x: Vector, layout: Layout, before: Slots, rng: np.random.Generator, *, age: int = 1
    ) -> tuple[Parts, Slots]:
        """Parts for the update x (layout.size,) of one bucket, and what to remember if the server uses them.

        Args:
            before: the memory; every slot of the scheme is there.
            age: rounds since it was made, at least 1.

        Inputs are not written to. Raises what codec.encode raises.
        """

    def limit(self, memory: dict[str, dict[str, Vector]], norm: float) -> bool:
        """Shorten the memory in place where it is too long for updates of this norm. Returns whether it was."""
        del memory, norm
        return False

    def __str__(self) -> str:
        """Text that as_feedback reads, with the fields that differ from their defaults."""
        told = [f"{f.name}={getattr(self, f.name)}" for f in fields(self) if getattr(self, f.name) != f.default]
        return f"{self.name}({', '.join(told)})" if told else self.name


_KNOWN: dict[str, type[Feedback]] = {}
F = TypeVar("F", bound=type[Feedback])


def register(cls: F) -> F:
    """Class decorator: make a scheme known by its name."""
    _KNOWN[cls.name] = cls
    return cls


def feedbacks() -> tuple[str, ...]:
    """Names of the schemes that a server can ask for."""
    return tuple(_KNOWN)


def as_feedback(given: "Feedback | str") -> Feedback:
    """A scheme from what users write: itself, a name, or a call such as ``cafe(beta=0.8)``.

    Raises ConfigError for anything else, naming what exists. Nothing is ever evaluated.
    """
    if isinstance(given, Feedback):
        return given
    try:
        tree = ast.parse(given.strip(), mode="eval").body if isinstance(given, str) and len(given) < 1000 else None
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        tree = None
    call = ast.Call(tree, [], []) if isinstance(tree, ast.Name) else tree
    cls = _KNOWN.get(call.func.id) if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) else None
    if cls is None:
        raise ConfigError(
            f"unknown feedback {str(given)[:80]!r}; known: {', '.join(_KNOWN)}, with arguments as in cafe(beta=0.8)"
        )
    return _build(cls, cast(ast.Call, call), str(given))


def _build(cls: type[Feedback], call: ast.Call, text: str) -> Feedback:
    known = [f.name for f in fields(cls)]
    values: dict[str, Any] = {}
    for name, tree in [*zip(known, call.args, strict=False), *((k.arg or "**", k.value) for k in call.keywords)]:
        if name not in known or name in values:
            raise ConfigError(f"feedback {cls.name!r}: argument {name!r} is unknown or given twice; known: {known}")
        values[name] = read_argument(tree, text)
    if len(call.args) > len(known):
        raise ConfigError(f"feedback {cls.name!r}: {len(call.args)} arguments given, known: {known}")
    return cls(**values)


@register
@dataclass(frozen=True)
class NoFeedback(Feedback):
    """What compression lost is lost. Right for unbiased codecs, whose errors average out over clients."""

    name: ClassVar[str] = "none"

    def encode(
        self, codec: Codec, x: Vector, layout: Layout, before: Slots, rng: np.random.Generator, *, age: int = 1
    ) -> tuple[Parts, Slots]:
        """See Feedback."""
        return codec.encode(x, layout, rng), {}


def refuse_unless_contractive(plan: Plan, name: str, why: str) -> None:
    """Raise ConfigError if the plan has a codec that may move a vector by more than its length."""
    for codec in dict.fromkeys(plan.codecs()):
        if not codec.contractive:
            raise ConfigError(
                f"{name} cannot go around {codec}: it is not contractive, so {why}; "
                'use feedback="none" with it, or a codec such as sign(), topk(0.01) or uniform(8)'
            )
