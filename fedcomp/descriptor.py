"""A plan's configuration in a few bytes, so that every frame says how it was made.

Layout (FORMAT.md, section 4): a plan is its codec and, unless all are at their defaults, its sizes and its rules; a
codec is its number, a count and that many fields that differ from their defaults, each a byte ``index << 4 | tag`` and
a value. What only the encoder needs to know is left out. Small plans take 2 to 12 bytes.
"""

from functools import lru_cache
from typing import Any

from fedcomp.codec import Codec, codec_fields, registered, settings
from fedcomp.entropy.bits import read_varint, write_varint
from fedcomp.errors import ConfigError, FrameError
from fedcomp.plan import KINDS, MAX_PATTERN, MAX_RULES, Plan, Rule

_FALSE, _TRUE, _INT, _FLOAT, _TEXT, _CODEC, _DIGEST = range(7)
_DEPTH = 8


@lru_cache(maxsize=64)
def describe(plan: Plan, *, whole: bool = False) -> bytes:
    """The plan as bytes; `whole`: with what is at its default, as in version 1 of the frame.

    A shared codebook is named by its digest only.
    """
    if not whole and plan == Plan(plan.codec):
        return _codec(plan.codec)
    rules = b"".join(map(_rule, plan.rules))
    share = b"" if plan.gentle_share == Plan.gentle_share else repr(float(plan.gentle_share)).encode()
    return _codec(plan.codec) + write_varint(plan.min_size) + sized(share) + write_varint(len(plan.rules)) + rules


def _rule(rule: Rule) -> bytes:
    """Pattern, codec (a byte 0 for verbatim), then the other conditions."""
    codec = _codec(rule.codec) if rule.codec else b"\0"
    kind = ("", *KINDS).index(rule.kind)
    return _text(rule.pattern) + codec + bytes([kind]) + write_varint(rule.min_size) + write_varint(rule.max_size)


def _text(text: str) -> bytes:
    return sized(text.encode())


def sized(data: bytes) -> bytes:
    """The data behind its length."""
    return write_varint(len(data)) + data


def _codec(codec: Codec) -> bytes:
    told = {key: value for key, value in settings(codec).items() if key not in codec.encoder_only}
    out = bytes([codec.number, len(told)])
    for index, field in enumerate(codec_fields(codec)):
        if field.name in told:
            tag, data = _value(told[field.name])
            out += bytes([index << 4 | tag]) + data
    return out


def _value(value: Any) -> tuple[int, bytes]:
    match value:
        case bool():
            return (_TRUE if value else _FALSE), b""
        case int():
            return _INT, write_varint(value)
        case float():
            return _FLOAT, _text(repr(float(value)))
        case str():
            return _TEXT, _text(value)
        case Codec():
            return _CODEC, _codec(value)
    return _DIGEST, value.digest


class _Reader:
    """Reads a descriptor; every FrameError says what is wrong with it."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def byte(self) -> int:
        return self.take(1)[0]

    def take(self, count: int) -> bytes:
        if self.at + count > len(self.data):
            raise FrameError("descriptor: ends too early")
        self.at += count
        return self.data[self.at - count : self.at]

    def varint(self) -> int:
        value, used = read_varint(self.data[self.at :])
        self.at += used
        return value

    def text(self) -> str:
        length = self.varint()
        if length > MAX_PATTERN:
            raise FrameError(f"descriptor: a text of {length} bytes, at most {MAX_PATTERN} are allowed")
        try:
            return self.take(length).decode()
        except UnicodeDecodeError:
            raise FrameError("descriptor: a text is not UTF-8") from None

    def rule(self) -> Rule:
        pattern, number = self.text(), self.byte()
        codec = self.codec(number=number) if number else None
        return Rule(pattern, codec, self.kind(), self.varint(), self.varint())

    def kind(self) -> str:
        index = self.byte()
        if index > len(KINDS):
            raise FrameError(f"descriptor: shape kind {index} is unknown")
        return ("", *KINDS)[index]

    def codec(self, depth: int = _DEPTH, *, number: int | None = None) -> Codec:
        number = self.byte() if number is None else number
        cls = next((c for c in registered().values() if c.number == number), None)
        if cls is None:
            raise FrameError(f"descriptor: codec number {number} is unknown to this version of fedcomp")
        names = [field.name for field in codec_fields(cls)]
        values: dict[str, Any] = {}
        for _ in range(self.byte()):
            index, tag = divmod(self.byte(), 16)
            if index >= len(names) or names[index] in values:
                raise FrameError(f"descriptor: codec {cls.name!r} has no field {index}, or has it twice")
            values[names[index]] = self.value(tag, cls.name, depth)
        try:
            return cls(**values)
        except (ConfigError, TypeError) as error:
            raise FrameError(f"descriptor: codec {cls.name!r}: {error}") from None

    def value(self, tag: int, codec: str, depth: int) -> Any:
        match tag:
            case 0 | 1:
                return tag == _TRUE
            case 2:
                return self.varint()
            case 3:
                return self.decimal()
            case 4:
                return self.text()
            case 5 if depth > 1:
                return self.codec(depth - 1)
            case 6:
                raise FrameError(
                    f"descriptor: codec {codec!r} refers to side information {self.take(8).hex()} of the server; it "
                    "can be read only with the plan of its round"
                )
        raise FrameError(f"descriptor: value tag {tag} is unknown, or codecs are nested deeper than {_DEPTH}")

    def decimal(self) -> float:
        text = self.text()
        try:
            return float(text)
        except ValueError:
            raise FrameError(f"descriptor: {text[:40]!r} is no number") from None


def read_plan(data: bytes) -> Plan:
    """The plan that `describe` wrote, whole or not, fields of the encoder alone at their defaults.

    Raises FrameError for anything else; nothing is imported or evaluated.
    """
    reader = _Reader(data)
    codec = reader.codec()
    if reader.at == len(data):
        return Plan(codec)
    min_size, share = reader.varint(), reader.text()
    count = reader.varint()
    if count > MAX_RULES:
        raise FrameError(f"descriptor: {count} rules, at most {MAX_RULES} are allowed")
    try:
        rules = [reader.rule() for _ in range(count)]
        if reader.at != len(data):
            raise FrameError(f"descriptor: {len(data) - reader.at} bytes too many")
        return Plan(codec, tuple(rules), min_size, float(share) if share else Plan.gentle_share)
    except FrameError:
        raise
    except ConfigError as error:
        raise FrameError(f"descriptor: {error}") from None
    except ValueError:
        raise FrameError(f"descriptor: {share[:40]!r} is no number") from None
