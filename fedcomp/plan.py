"""Plan: which tensors get which codec, and which travel verbatim.

Rules by name pattern come first, in order, the first match wins. Then what must not lose anything: integers and
booleans, normalisation tensors (a variance coded with loss can turn negative) and tensors too small to matter travel
verbatim. The smallest of the others, such as a bias or an output layer, are coded gently where the codec keeps so
little that it would starve them (`Codec.gentle`): they are few and decide much. Everything else gets the plan's codec.
Tensors with the same codec share a bucket: one flat vector.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from fedcomp import _validate
from fedcomp.codec import Codec, Config, from_config, parse_codec, to_config
from fedcomp.errors import ConfigError
from fedcomp.layout import Layout, Tensor, Vector

NORMALISATION = ("*running_mean", "*running_var", "*num_batches_tracked", "*norm*", "*.bn*", "bn*", "*.ln*", "ln*")
"""Names that normalisation layers go by. The weights of a layer with running statistics are found by those instead."""


KINDS = ("bias", "convolution", "embedding", "matrix", "normalisation", "vector")
"""Shape kinds that rules can name: more than two dimensions; two, named like an embedding; other two; normalisation
layers; one dimension or none; those of them named bias."""
MAX_RULES = 1000
MAX_PATTERN = 1000  # bytes


@dataclass(frozen=True)
class Rule:
    """Tensors that match get the codec; None: verbatim.

    Args:
        pattern: shell-style pattern of the name (case counts).
        codec: what they get.
        kind: only tensors of this kind, see KINDS; "": all.
        min_size, max_size: only tensors with so many elements; max_size 0: no upper limit.
    """

    pattern: str
    codec: Codec | None
    kind: str = ""
    min_size: int = 0
    max_size: int = 0

    def __post_init__(self) -> None:
        _validate.instance(kind=str, pattern=self.pattern)
        if len(self.pattern.encode()) > MAX_PATTERN:
            raise ConfigError(f"rule: a pattern has at most {MAX_PATTERN} bytes, got {len(self.pattern.encode())}")
        if self.codec is not None:
            _validate.instance(kind=Codec, codec=self.codec)
        _validate.one_of(choices=("", *KINDS), kind=self.kind)
        _validate.integer(low=0, high=2**40, min_size=self.min_size)
        _validate.integer(low=0, high=2**40, max_size=self.max_size)

    def matches(self, tensor: Tensor, layout: Layout) -> bool:
        """Whether the rule is about this tensor of the layout."""
        return (
            fnmatchcase(tensor.name, self.pattern)
            and tensor.size >= self.min_size
            and (self.max_size == 0 or tensor.size <= self.max_size)
            and (self.kind == "" or self.kind in kinds_of(tensor, layout))
        )

    def to_config(self) -> dict[str, Any] | list[Any]:
        """[pattern, codec], or a mapping where there are more conditions; what is at its default is not written."""
        codec = to_config(self.codec) if self.codec else None
        more = {k: getattr(self, k) for k in ("kind", "min_size", "max_size") if getattr(self, k) != getattr(Rule, k)}
        return {"pattern": self.pattern, "codec": codec, **more} if more else [self.pattern, codec]

    @classmethod
    def from_config(cls, config: Any) -> "Rule":
        """Inverse of to_config. Raises ConfigError."""
        if isinstance(config, Mapping):
            if unknown := sorted(map(str, config.keys() - {"pattern", "codec", "kind", "min_size", "max_size"})):
                raise ConfigError(f"rule: unknown keys {unknown}; known: pattern, codec, kind, min_size, max_size")
            told = {"pattern": "*", "codec": None, **config}
        elif isinstance(config, list | tuple) and len(config) == 2:
            told = {"pattern": config[0], "codec": config[1]}
        else:
            raise ConfigError("plan: rules: expected a list of [pattern, codec or null] or of mappings")
        codec = told.pop("codec")
        return cls(codec=None if codec is None else from_config(codec), **told)


def kinds_of(tensor: Tensor, layout: Layout) -> tuple[str, ...]:
    """The kinds that a tensor is of, by name and shape: one of KINDS, and "vector" beside "bias"."""
    if _is_normalisation(tensor.name, layout):
        return ("normalisation",)
    if len(tensor.shape) > 2:
        return ("convolution",)
    if len(tensor.shape) == 2:
        return ("embedding",) if "emb" in tensor.name.lower() else ("matrix",)
    return ("vector", "bias") if "bias" in tensor.name.lower() else ("vector",)


@dataclass(frozen=True)
class Bucket:
    """Tensors coded together as one vector: their codec and their layout."""

    codec: Codec
    layout: Layout


@dataclass(frozen=True)
class Plan:
    """What happens to each tensor of a model.

    Args:
        codec: for every tensor that no rule and no exception names.
        rules: first match wins, before all exceptions (which never apply to a tensor that a rule names,
            except that integers and booleans are never coded with loss).
        min_size: float tensors with fewer elements travel verbatim. Larger: safer for tiny layers, more bytes. Without
            effect where the codec pools small tensors, as auto does.
        gentle_share: the smallest tensors, up to this share of the elements, get the codec's gentle companion if it
            has one. 0: none.

    >>> from fedcomp import Sign, Uniform
    >>> plan = Plan(Sign(), rules=(Rule("*.bias", Uniform(8)),))
    >>> layout = Layout((Tensor("a.weight", (64, 8)), Tensor("a.bias", (64,)), Tensor("steps", (), "int64")))
    >>> [(str(b.codec), [t.name for t in b.layout.tensors]) for b in plan.buckets(layout)]
    [('sign()', ['a.weight']), ('uniform()', ['a.bias'])]
    >>> [t.name for t in plan.verbatim(layout)]
    ['steps']
    """

    codec: Codec
    rules: tuple[Rule, ...] = ()
    min_size: int = 16
    gentle_share: float = 0.02

    def __post_init__(self) -> None:
        _validate.instance(kind=Codec, codec=self.codec)
        _validate.instance(kind=tuple, rules=self.rules)
        for rule in self.rules:
            _validate.instance(kind=Rule, rule=rule)
        if len(self.rules) > MAX_RULES:
            raise ConfigError(f"plan: at most {MAX_RULES} rules are allowed, got {len(self.rules)}; use wider patterns")
        _validate.integer(low=0, high=2**40, min_size=self.min_size)
        object.__setattr__(self, "gentle_share", _validate.number(low=0, high=1, gentle_share=self.gentle_share))

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Plans are keys of caches that every frame asks several times."""
        return hash((self.codec, self.rules, self.min_size, self.gentle_share))

    def __getstate__(self) -> dict[str, Any]:
        """Without the hash: another process has other hashes of texts."""
        return {name: value for name, value in vars(self).items() if name != "_hash"}

    @classmethod
    def layered(
        cls,
        matrices: "Codec | str" = "lowrank(8, factors=uniform(8))",
        convolutions: "Codec | str" = "uniform(4, block=64)",
        embeddings: "Codec | str" = "uniform(8)",
        vectors: "Codec | str" = "uniform(8)",
    ) -> "Plan":
        """A plan by kind of layer, with common defaults: low rank for matrices, gently for what they would starve.

        Each argument is a codec or its text. Raises ConfigError.
        """
        kinds = {"convolution": convolutions, "embedding": embeddings, "vector": vectors}
        rules = tuple(Rule("*", as_plan(codec).codec, kind=kind) for kind, codec in kinds.items())
        verbatim = (Rule("*", None, kind="normalisation"), Rule("*", None, max_size=cls.min_size - 1))
        return cls(as_plan(matrices).codec, verbatim + rules, gentle_share=0)

    def assign(self, layout: Layout) -> tuple[Codec | None, ...]:
        """The codec of each tensor of the layout, None for verbatim."""
        return _assign(self, layout)

    def buckets(self, layout: Layout) -> list[Bucket]:
        """The coded tensors by codec, in order of first appearance."""
        return list(_buckets(self, layout))

    def verbatim(self, layout: Layout) -> list[Tensor]:
        """The tensors that travel as they are, in the layout's order."""
        return [tensor for tensor, codec in zip(layout.tensors, self.assign(layout), strict=True) if codec is None]

    def codecs(self) -> Iterator[Codec]:
        """Every codec that the plan may use."""
        yield self.codec
        if self.codec.gentle is not None:
            yield self.codec.gentle
        yield from (rule.codec for rule in self.rules if rule.codec is not None)

    def adapt(self, update: Mapping[str, Vector], layout: Layout, rng: np.random.Generator) -> "Plan":
        """The plan a server should ask for next, having seen the last mean update by tensor name (any shape)."""
        learnt = {}
        for bucket in self.buckets(layout):
            x = np.concatenate([np.ravel(update[t.name]) for t in bucket.layout.tensors]).astype(np.float32)
            learnt[bucket.codec] = bucket.codec.adapt(x, bucket.layout, rng)
        rules = tuple(replace(r, codec=learnt.get(r.codec, r.codec) if r.codec else None) for r in self.rules)
        return replace(self, codec=learnt.get(self.codec, self.codec), rules=rules)

    def to_config(self) -> dict[str, Any]:
        """JSON-ready description; what is at its default is not written."""
        config: dict[str, Any] = {"codec": to_config(self.codec)}
        if self.rules:
            config["rules"] = [rule.to_config() for rule in self.rules]
        for key in ("min_size", "gentle_share"):
            if getattr(self, key) != getattr(Plan, key):
                config[key] = getattr(self, key)
        return config

    @classmethod
    def from_config(cls, config: Config) -> "Plan":
        """Inverse of to_config. Raises ConfigError for unknown keys or anything malformed."""
        if not isinstance(config, Mapping) or "codec" not in config:
            raise ConfigError(f"plan: expected a mapping with the key 'codec', got {str(config)[:80]!r}")
        if unknown := sorted(map(str, config.keys() - {"codec", "rules", "min_size", "gentle_share"})):
            raise ConfigError(f"plan: unknown keys {unknown}; known: codec, rules, min_size, gentle_share")
        listed = config.get("rules", ())
        if not isinstance(listed, list | tuple):
            raise ConfigError("plan: rules: expected a list of [pattern, codec or null] or of mappings")
        rules = tuple(map(Rule.from_config, listed))
        rest = {key: config[key] for key in ("min_size", "gentle_share") if key in config}
        return cls(from_config(config["codec"]), rules, **rest)


def as_plan(plan: "Plan | Codec | str") -> Plan:
    """A plan from what users write: a plan, a codec, or a codec's text. Raises ConfigError."""
    if isinstance(plan, str):
        plan = parse_codec(plan)
    if isinstance(plan, Codec):
        plan = Plan(plan)
    _validate.instance(kind=Plan, plan=plan)
    return plan


@lru_cache(maxsize=64)
def _buckets(plan: Plan, layout: Layout) -> tuple[Bucket, ...]:
    groups: dict[Codec, list[Tensor]] = {}
    for tensor, codec in zip(layout.tensors, plan.assign(layout), strict=True):
        if codec is not None:
            groups.setdefault(codec, []).append(tensor)
    return tuple(Bucket(codec, Layout(tuple(tensors))) for codec, tensors in groups.items())


@lru_cache(maxsize=64)
def _assign(plan: Plan, layout: Layout) -> tuple[Codec | None, ...]:
    found: list[Codec | None] = []
    open_to_gentle = []
    min_size = 0 if plan.codec.pools else plan.min_size
    for index, tensor in enumerate(layout.tensors):
        rule = next((r for r in plan.rules if tensor.is_float and r.matches(tensor, layout)), None)
        if rule is not None:
            found.append(rule.codec)
        elif not tensor.is_float or tensor.size < min_size or _is_normalisation(tensor.name, layout):
            found.append(None)
        else:
            found.append(plan.codec)
            open_to_gentle.append(index)
    if plan.codec.gentle is not None:
        for index in _smallest(open_to_gentle, layout, plan.gentle_share):
            found[index] = plan.codec.gentle
    return tuple(found)


def _smallest(indices: list[int], layout: Layout, share: float) -> list[int]:
    """The smallest of these tensors that together have at most this share of their elements; exact, in millionths."""
    sizes = {index: layout.tensors[index].size for index in indices}
    left = round(share * 1_000_000) * sum(sizes.values())
    taken = []
    for index in sorted(indices, key=lambda i: sizes[i]):
        left -= 1_000_000 * sizes[index]
        if left < 0 or not share:
            break
        taken.append(index)
    return taken


def _is_normalisation(name: str, layout: Layout) -> bool:
    if any(fnmatchcase(name, pattern) for pattern in NORMALISATION):
        return True
    prefix, _, last = name.rpartition(".")
    return last in ("weight", "bias") and f"{prefix}.running_mean".lstrip(".") in layout.names
