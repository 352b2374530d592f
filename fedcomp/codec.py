"""The codec: what every compressor is made of, and the registry that finds it by name.

A codec is a frozen dataclass whose fields are its configuration, so that equality, repr, hash, pickle, JSON and the
negotiation between server and client come from one declaration. It turns a flat float32 vector into *parts* (named
arrays of small integers and a few floats) and back; it never sees bytes. Its ``schema`` tells the wire format which
parts come in which order and which values are legal, once for both directions.

To add one: subclass Codec, decorate with ``@register``, write the five members marked abstract below.
"""

import ast
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields
from typing import Any, ClassVar, TypeAlias, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from fedcomp import terms as term_sums
from fedcomp.errors import ConfigError, LayoutError
from fedcomp.layout import Layout, Vector
from fedcomp.terms import Index, Sum, Term

Parts = dict[str, NDArray[Any]]
Config: TypeAlias = Mapping[str, Any]


# --- what a codec may put into a frame -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Floats:
    """A float32 array of `count` finite values in [low, high], sent as float32 or rounded to 16 bits by the codec."""

    name: str
    count: int
    dtype: str = "float32"  # or "float16", "bfloat16": values must already be exact in it
    low: float = -float(np.finfo(np.float32).max)
    high: float = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Symbols:
    """`count` integers in [0, size), size at most 65536, as uint8 (size up to 256) or uint16: entropy coded.

    With `shapes`, the (rows, columns) of matrices that the symbols fill one after the other (see `matrix_shapes`),
    each is coded in the context of how busy its row and its column are where that is shorter. With `fast` they are
    only packed into bits.
    """

    name: str
    count: int
    size: int
    shapes: tuple[tuple[int, int], ...] = ()
    fast: bool = False


@dataclass(frozen=True)
class Positions:
    """`count` strictly increasing int64 positions in [0, universe)."""

    name: str
    count: int
    universe: int


@dataclass(frozen=True)
class Count:
    """One integer in [0, high] that the decoder cannot know, as an int64 array of shape ()."""

    name: str
    high: int


@dataclass(frozen=True)
class Columns:
    """Integers from -32767 to 32767 as an int32 vector, mostly zeros: columns of thin matrices, one after the other.

    `shapes` are the (rows, columns) of the matrices. Each has a kind from 0 to 3; those of one kind are coded with
    common statistics, learnt on the way. For the few numbers of factors: coding takes a loop over all of them.
    """

    name: str
    shapes: tuple[tuple[int, int], ...]
    kinds: tuple[int, ...]

    @property
    def count(self) -> int:
        """How many integers."""
        return sum(rows * columns for rows, columns in self.shapes)


PartSpec: TypeAlias = Floats | Symbols | Positions | Count | Columns
Schema: TypeAlias = Generator[PartSpec, NDArray[Any], None]
"""Yields the specification of a part, receives the part itself; later parts may depend on earlier ones."""


def symbol_dtype(size: int) -> type[np.uint8] | type[np.uint16]:
    """Integer type that parts use for an alphabet of `size` symbols."""
    return np.uint8 if size <= 256 else np.uint16


def matrix_shapes(layout: Layout) -> tuple[tuple[int, int], ...]:
    """Each tensor as (rows, columns): outputs x inputs for the weights of a layer, one row for vectors."""
    return tuple(
        (t.shape[0], t.size // t.shape[0]) if len(t.shape) > 1 and t.size else (1, t.size) for t in layout.tensors
    )


def nested(prefix: str, schema: Schema) -> Schema:
    """The schema of an inner codec, its part names put below `prefix`."""
    try:
        spec = next(schema)
        while True:
            inner = type(spec)(**{**vars(spec), "name": f"{prefix}.{spec.name}"})
            spec = schema.send((yield inner))
    except StopIteration:
        return


def put_below(prefix: str, parts: Parts) -> Parts:
    """Parts of an inner codec under names below `prefix`."""
    return {f"{prefix}.{name}": part for name, part in parts.items()}


def take_below(prefix: str, parts: Parts) -> Parts:
    """The parts below `prefix`, under the inner codec's own names."""
    return {name.removeprefix(f"{prefix}."): part for name, part in parts.items() if name.startswith(f"{prefix}.")}


# --- the codec -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Upload:
    """What is known of the upload that a codec with a budget codes for.

    Attributes:
        room: bytes that its parts may take.
        weight: of the client in the mean.
        dither: seed that all clients of a round share, and this one's place among them, in [0, 1); None: not known.
    """

    room: int
    weight: float = 1.0
    dither: tuple[int, float] | None = None


class Codec(ABC):
    """Turns a vector into parts and back. Subclasses are frozen dataclasses decorated with ``@register``."""

    name: ClassVar[str]
    """Key in the registry, in configurations and on the command line."""

    number: ClassVar[int]
    """Id in frames, 1 to 255. Permanent: a codec that decodes differently takes a new one."""

    encoder_only: ClassVar[frozenset[str]] = frozenset()
    """Fields that decoding does not need: frames do not tell them."""

    pools: ClassVar[bool] = False
    """Whether no tensor is too small for it, since it codes all of them together: see Plan.min_size."""

    @property
    @abstractmethod
    def unbiased(self) -> bool:
        """Whether the mean of decode(encode(x)) over the generator's seeds is x."""

    @property
    @abstractmethod
    def contractive(self) -> bool:
        """Whether ||decode(encode(x)) - x|| <= ||x|| for every x, so that error feedback around it cannot diverge."""

    @abstractmethod
    def _encode(self, x: Vector, layout: Layout, rng: np.random.Generator) -> Parts:
        """Parts of a finite contiguous vector x (layout.size,), which must not be written to."""

    @abstractmethod
    def schema(self, layout: Layout) -> Schema:
        """Specifications of the parts in the order of the frame, with the bounds that decoding relies on."""

    @abstractmethod
    def terms(self, parts: Parts, layout: Layout) -> Iterator[Term]:
        """The decoded vector as terms of a sum. Places that no term names are zero, none is named twice."""

    @property
    def gentle(self) -> "Codec | None":
        """Codec for the few smallest tensors of a model, where this one would starve them. Default: none, itself."""
        return None

    def limit(self, parameters: int) -> int | None:
        """Most bytes that a frame may take, for a model of so many parameters. Default: None, no limit.

        A codec with a limit is asked for its parts last, when the room that is left is known, see `for_upload`.
        """
        del parameters
        return None

    def least(self, layout: Layout) -> Parts:
        """Of a codec with a limit: parts of the least bytes that it can do with."""
        raise NotImplementedError(f"codec {self.name} has no limit")

    def for_upload(self, upload: Upload) -> "Codec":
        """Of a codec with a limit: the codec for one upload. Its parts fit this one's schema."""
        del upload
        return self

    def level(self, parts: Parts, layout: Layout) -> float:
        """Of a codec with a limit: the step that these parts were coded at, see RateControl. Default: 0, none."""
        del parts, layout
        return 0.0

    def adapt(self, update: Vector, layout: Layout, rng: np.random.Generator) -> "Codec":
        """The codec a server should ask for next, having seen the last mean update (layout.size,). Default: itself."""
        return self

    def encode(self, x: Vector, layout: Layout, rng: np.random.Generator) -> Parts:
        """Turn the vector x of shape (layout.size,) into parts.

        Raises LayoutError for another shape, NonFiniteError (naming the tensor) for NaN or infinity.
        """
        if x.shape != (layout.size,):
            raise LayoutError(f"codec {self.name}: expected a vector of {layout.size} values, got shape {x.shape}")
        x = np.ascontiguousarray(x, np.float32)
        layout.check_finite(x)
        return self._encode(x, layout, rng)

    def pieces(self, parts: Parts, layout: Layout) -> Iterator[tuple[Index, Vector]]:
        """The decoded vector piece by piece: (where, values), as of `terms`."""
        for term in self.terms(parts, layout):
            yield from term.pieces()

    def decode(self, parts: Parts, layout: Layout) -> Vector:
        """The float32 vector of shape (layout.size,) that the parts stand for. Expects parts that fit the schema."""
        out = np.zeros(layout.size, np.float32)
        for where, values in self.pieces(parts, layout):
            out[where] = values
        return out

    def accumulate(self, parts: Parts, layout: Layout, out: Sum, weight: float) -> None:
        """Add weight * decode(parts) to `out` (layout.size,) in place, without building the decoded vector.

        Sums in float32 may compute evenly spaced levels instead of looking them up: equal up to rounding.
        """
        term_sums.add(self.terms(parts, layout), out, weight)

    def __str__(self) -> str:
        """Text that parse_codec reads, with the fields that differ from their defaults."""
        told = [f"{key}={_text(value)}" for key, value in settings(self).items()]
        return f"{self.name}({', '.join(told)})"


class ContractiveCodec(Codec):
    """A codec that is biased and never moves a vector further than its own length, whatever its settings."""

    @property
    def unbiased(self) -> bool:
        """False."""
        return False

    @property
    def contractive(self) -> bool:
        """True."""
        return True


def _text(value: object) -> str:
    return str(value) if isinstance(value, Codec) else repr(_json_value(value))


# --- registry and configuration --------------------------------------------------------------------------------------

_REGISTRY: dict[str, type[Codec]] = {}
_ALIASES: dict[str, str] = {}
C = TypeVar("C", bound=type[Codec])


def register(cls: C) -> C:
    """Class decorator: make a codec known by its name and number. Raises ConfigError if either is taken."""
    for other in _REGISTRY.values():
        if cls.name == other.name or cls.number == other.number:
            raise ConfigError(f"codec {cls.name!r} (number {cls.number}): taken by {other.name!r} ({other.number})")
    _REGISTRY[cls.name] = cls
    return cls


def alias(name: str, text: str) -> None:
    """Let parse_codec understand `name` as the codec written as `text`. Raises ConfigError if the name is taken."""
    if name in _REGISTRY or name in _ALIASES:
        raise ConfigError(f"alias {name!r}: the name is taken")
    _ALIASES[name] = text


def aliases() -> dict[str, str]:
    """Short names that parse_codec understands, with the text each stands for, in alphabetical order."""
    return dict(sorted(_ALIASES.items()))


def registered() -> dict[str, type[Codec]]:
    """All known codecs by name, in alphabetical order."""
    return dict(sorted(_REGISTRY.items()))


def codec_fields(codec: Codec | type[Codec]) -> tuple[Field[Any], ...]:
    """The fields of a codec in their permanent order."""
    return fields(cast(Any, codec))


def settings(codec: Codec) -> dict[str, Any]:
    """Fields that differ from their defaults. Defaults are never written, so that old readers survive new fields."""
    told = {}
    for field in codec_fields(codec):
        value = getattr(codec, field.name)
        if field.type is float:  # 1 and 1.0, or numpy's floats, are equal and must be written alike
            value = float(value)
        if field.default is MISSING or value != field.default:
            told[field.name] = value
    return told


def _json_value(value: Any) -> Any:
    if isinstance(value, Codec):
        return to_config(value)
    return value.to_text() if hasattr(value, "to_text") else value


def to_config(codec: Codec) -> dict[str, Any]:
    """JSON-ready description: {"codec": name, field: value, ...}, nested codecs likewise."""
    return {"codec": codec.name, **{key: _json_value(value) for key, value in settings(codec).items()}}


def from_config(config: Config, *, depth: int = 8) -> Codec:
    """Rebuild a codec from to_config's description.

    Raises ConfigError for an unknown codec or key (naming what exists), a bad value, or nesting beyond `depth`.
    """
    if depth == 0:
        raise ConfigError("codec: nested too deeply")
    if not isinstance(config, Mapping) or not isinstance(config.get("codec"), str):
        raise ConfigError(f"codec: expected a mapping with the key 'codec', got {str(config)[:80]!r}")
    values = {
        key: from_config(value, depth=depth - 1) if isinstance(value, Mapping) else value
        for key, value in config.items()
        if key != "codec"
    }
    return build(config["codec"], values)


def build(name: str, values: Mapping[str, Any]) -> Codec:
    """Make the codec `name` with the given fields. Raises ConfigError as from_config does."""
    cls = _REGISTRY.get(name)
    if cls is None:
        raise ConfigError(f"unknown codec {name[:40]!r}; known: {', '.join([*registered(), *sorted(_ALIASES)])}")
    known = [field.name for field in codec_fields(cls)]
    for key in values:
        if key not in known:
            raise ConfigError(f"codec {name!r}: unknown key {str(key)[:40]!r}; known: {', '.join(known) or 'none'}")
    try:
        return cls(**values)
    except TypeError as error:  # a required field is missing
        raise ConfigError(
            f"codec {name!r}: {str(error).split('__init__() ')[-1]}; fields: {', '.join(known)}"
        ) from None


def parse_codec(text: str) -> Codec:
    """Read a codec written as on the command line: a name or a call with literal arguments, nested at will.

    >>> import fedcomp
    >>> str(fedcomp.parse_codec("topk(0.01, values=uniform(4))"))
    'topk(fraction=0.01, values=uniform(bits=4))'

    Raises ConfigError for anything else, naming the known codecs and keys. Nothing is ever evaluated.
    """
    try:
        tree = ast.parse(text.strip(), mode="eval").body if isinstance(text, str) and len(text) <= 65_536 else None
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        tree = None
    if tree is None:
        raise ConfigError(f"codec {str(text)[:80]!r}: cannot be read; write for example topk(0.01, values=uniform(8))")
    return _from_tree(tree, text, depth=8)


def _from_tree(tree: ast.expr, text: str, depth: int) -> Codec:
    if isinstance(tree, ast.Name):
        return parse_codec(_ALIASES[tree.id]) if tree.id in _ALIASES else build(tree.id, {})
    if not isinstance(tree, ast.Call) or not isinstance(tree.func, ast.Name) or depth == 0:
        raise ConfigError(f"codec {text[:80]!r}: expected a codec such as sign or uniform(bits=4)")
    name, cls = tree.func.id, _REGISTRY.get(tree.func.id)
    known = [field.name for field in codec_fields(cls)] if cls else []
    if cls and len(tree.args) > len(known):
        raise ConfigError(f"codec {name!r}: {len(tree.args)} arguments given, fields: {', '.join(known) or 'none'}")
    given = [*zip(known, tree.args, strict=False), *((k.arg or "**", k.value) for k in tree.keywords)]
    if len({key for key, _ in given}) < len(given):
        raise ConfigError(f"codec {name!r}: an argument is given twice in {text[:80]!r}")
    return build(name, {key: read_argument(value, text, depth) for key, value in given})


def read_argument(tree: ast.expr, text: str, depth: int = 8) -> Any:
    """The value of an argument in a text: a literal or a codec. Raises ConfigError for anything else."""
    if isinstance(tree, ast.Name | ast.Call):
        return _from_tree(tree, text, depth - 1)
    try:
        return ast.literal_eval(tree)
    except (ValueError, TypeError, RecursionError, MemoryError):
        raise ConfigError(f"codec {text[:80]!r}: arguments must be literals or codecs") from None
