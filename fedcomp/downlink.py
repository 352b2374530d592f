"""The package: what one message carries down to one client. FORMAT.md beside this file is its specification.

A package holds the global model whole, or as a *chain* of frames that turn a model the client holds into the new one,
and perhaps a predictor beside it. Unlike a frame it is also read by clients that know nothing yet, so a whole model
says its own names, shapes and dtypes. Whatever is wrong with the bytes ends in one exception, FrameError.
"""

import hashlib
import math
import struct
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcomp.compressor import decompress
from fedcomp.descriptor import sized
from fedcomp.entropy.bits import read_varint, write_varint
from fedcomp.errors import ConfigError, FrameError, LayoutError, StaleModelError
from fedcomp.layout import DTYPES, Arrays, Layout, Tensor

MAGIC = b"\xfc\x9e"
VERSION = 1
HEADER = struct.Struct("<2sBBI8s")
"""Magic, version, flags, CRC-32 of all other bytes, digest of the model: 16 bytes."""

MAX_TENSORS = 2**16
MAX_NAME = 1000  # bytes
MAX_DIMENSIONS = 32
MAX_ELEMENTS = min(2**40, sys.maxsize // 8)  # also of the other dimensions of an empty tensor: numpy multiplies them
MAX_LINKS = 256

_DIGEST = 8  # bytes
_MODEL, _PREDICTOR, _KEEP = 1, 2, 4  # flags
_CRC_AT = slice(4, 8)


@dataclass(frozen=True)
class Link:
    """One step of a chain: `frame` turns the model with the digest `base` into the next one."""

    base: bytes
    frame: bytes

    def __post_init__(self) -> None:
        _check_digest("link", self.base)

    def to_bytes(self) -> bytes:
        """The link as it stands in a package."""
        return self.base + sized(self.frame)


@dataclass(frozen=True)
class Package:
    """What one message carries to one client. Raises ConfigError for what no package can hold.

    Attributes:
        digest: `model_digest` of the model that the client ends up with.
        model: that model as written by `pack_model`; None: the client must hold one that the chain starts from.
        chain: links from the oldest model that will do to the new one; none, and no model: the client holds it already.
        predictor: one more frame, for the client's feedback; not looked into here.
        keep: whether the client should keep the model, so that the next package can be a chain.

    >>> held = {"w": np.arange(3.0)}
    >>> package = Package.of(held)
    >>> Package.from_bytes(package.to_bytes()).open()
    {'w': array([0., 1., 2.])}
    >>> same = Package(package.digest).to_bytes()
    >>> len(same), Package.from_bytes(same).open(held)
    (16, {'w': array([0., 1., 2.])})
    """

    digest: bytes
    model: bytes | memoryview | None = None
    chain: tuple[Link, ...] = ()
    predictor: bytes | None = None
    keep: bool = False

    def __post_init__(self) -> None:
        _check_digest("package", self.digest)
        if self.model is not None and self.chain:
            raise ConfigError("package: expected a model or a chain, got both")
        if len(self.chain) > MAX_LINKS:
            raise ConfigError(f"package: a chain has at most {MAX_LINKS} links, got {len(self.chain)}; send the model")

    @classmethod
    def of(cls, arrays: Arrays, predictor: bytes | None = None, *, keep: bool = False) -> "Package":
        """A package with the whole model. Raises LayoutError as `pack_model` does."""
        model = pack_model(arrays)
        return cls(_digest_of(model), model, (), predictor, keep)

    def to_bytes(self) -> bytes:
        """The package as it travels."""
        flags = _MODEL * (self.model is not None) | _PREDICTOR * (self.predictor is not None) | _KEEP * self.keep
        body: list[bytes | memoryview] = [b"" if self.predictor is None else sized(self.predictor)]
        body += [link.to_bytes() for link in self.chain] if self.model is None else [self.model]
        head = HEADER.pack(MAGIC, VERSION, flags, 0, self.digest)
        crc = _checksum(head, *body)
        return b"".join([HEADER.pack(MAGIC, VERSION, flags, crc, self.digest), *body])

    @classmethod
    def from_bytes(cls, data: bytes) -> "Package":
        """Inverse of to_bytes. Raises FrameError for anything else; a model inside is checked when it is opened."""
        if len(data) < HEADER.size:
            raise FrameError(f"package of {len(data)} bytes is shorter than its header of {HEADER.size}")
        magic, version, flags, crc, digest = HEADER.unpack_from(data)
        if magic != MAGIC:
            raise FrameError(f"not a fedcomp package: starts with {magic.hex()}, expected {MAGIC.hex()}")
        if version != VERSION:
            raise FrameError(
                f"package of version {version}, this fedcomp reads version {VERSION}; update the older side"
            )
        rest = memoryview(data)[HEADER.size :]
        if _checksum(data[: HEADER.size], rest) != crc:
            raise FrameError("package is damaged: its checksum does not match")
        if flags & ~(_MODEL | _PREDICTOR | _KEEP):
            raise FrameError(f"package has unknown flags {flags:#04x}; it may come from a newer fedcomp")
        predictor = None
        if flags & _PREDICTOR:
            cut, rest = _unsized(rest, "a predictor")
            predictor = bytes(cut)
        if flags & _MODEL:
            return cls(digest, rest, (), predictor, bool(flags & _KEEP))
        return cls(digest, None, tuple(_read_chain(rest)), predictor, bool(flags & _KEEP))

    def open(self, held: Arrays | None = None) -> dict[str, NDArray[Any]]:
        """The model: arrays that belong to the caller, C-contiguous and of native byte order, in the server's order.

        Args:
            held: the model that this client kept, in the order it came in; None: none. Needed for a chain, which may
                be entered at any of its links. Never written to.

        Raises StaleModelError if the chain does not pass the model that is held, FrameError for anything wrong in the
        bytes: a damaged or forged model or frame, or one that decodes to another model than the sender's.
        """
        if self.model is not None:
            if _digest_of(self.model) != self.digest:
                raise FrameError("package: the model in it is not the one that its header names")
            return unpack_model(self.model)
        arrays, left = self._enter(held)
        for link in left:
            arrays = decompress(link.frame, arrays)
        if left and (got := model_digest(arrays)) != self.digest:
            raise FrameError(
                f"package: the chain ends at model {got.hex()}, expected {self.digest.hex()}; sender and receiver "
                "compute differently, send the whole model"
            )
        return arrays

    def _enter(self, held: Arrays | None) -> tuple[dict[str, NDArray[Any]], tuple[Link, ...]]:
        """A copy of the model that is held, and the links that it lacks."""
        known = None if held is None else model_digest(held)
        models = [link.base for link in self.chain] + [self.digest]
        if held is None or known not in models:
            raise StaleModelError(
                f"package: expected one of the models {[m.hex() for m in models[:3]]} to be held here, "
                f"got {known.hex() if known else 'none'}; the sender must send the whole model"
            )
        last = max(place for place, digest in enumerate(models) if digest == known)
        return own_arrays(held), self.chain[last:]


# --- a whole model ---------------------------------------------------------------------------------------------------


def pack_model(arrays: Arrays) -> bytes:
    """A whole model as bytes that describe themselves: names, shapes, dtypes, then the values as they are.

    Raises LayoutError for tensors that no model may hold: dtype, name or number of dimensions.
    """
    return b"".join(_pieces(arrays))


def unpack_model(data: bytes | memoryview) -> dict[str, NDArray[Any]]:
    """Inverse of pack_model: arrays that belong to the caller. Raises FrameError for anything else.

    Values are not looked at, except that booleans must be 0 or 1; needs no more memory than twice the data.
    """
    layout, view = _read_layout(memoryview(data))
    expected = sum(t.size * np.dtype(t.dtype).itemsize for t in layout.tensors)
    if len(view) != expected:
        raise FrameError(f"model: expected {expected} bytes of tensors, got {len(view)}")
    arrays, at = {}, 0
    for tensor in layout.tensors:
        dtype = np.dtype(tensor.dtype).newbyteorder("<")
        raw = view[at : at + tensor.size * dtype.itemsize]
        at += len(raw)
        if dtype == np.bool_ and np.frombuffer(raw, np.uint8).max(initial=0) > 1:
            raise FrameError(f"model: tensor {tensor.name!r}: a boolean is neither 0 nor 1")
        arrays[tensor.name] = np.frombuffer(raw, dtype).astype(tensor.dtype).reshape(tensor.shape)
    return arrays


def model_digest(arrays: Arrays) -> bytes:
    """8 bytes that name a model: BLAKE2b of what `pack_model` writes, so of names in order, shapes, dtypes and values.

    Raises LayoutError as `pack_model` does.
    """
    return _digest_of(*_pieces(arrays))


def own_arrays(arrays: Arrays) -> dict[str, NDArray[Any]]:
    """Copies that are writable, C-contiguous and of native byte order."""
    return {name: np.array(a, a.dtype.newbyteorder("="), order="C") for name, a in arrays.items()}


def _pieces(arrays: Arrays) -> Iterator[bytes | memoryview]:
    """What a packed model consists of: its layout, then the bytes of each tensor, without copying where possible."""
    tensors = Layout.of(arrays).tensors
    if len(tensors) > MAX_TENSORS:
        raise LayoutError(f"model: at most {MAX_TENSORS} tensors can be sent, got {len(tensors)}")
    told = [write_varint(len(tensors))]
    for tensor in tensors:
        name = tensor.name.encode(errors="surrogatepass")
        if complaint := _complaint(name, tensor.shape):
            raise LayoutError(f"model: tensor {tensor.name[:80]!r}: {complaint}")
        told += [sized(name), bytes([DTYPES.index(tensor.dtype), len(tensor.shape)]), *map(write_varint, tensor.shape)]
    yield b"".join(told)
    for values in arrays.values():
        little = np.ascontiguousarray(values, values.dtype.newbyteorder("<"))
        yield little.reshape(-1).view(np.uint8).data


def _complaint(name: bytes, shape: tuple[int, ...]) -> str:
    """What is wrong with a tensor's name or shape; empty if nothing is."""
    if len(name) > MAX_NAME:
        return f"expected a name of at most {MAX_NAME} bytes, got {len(name)}"
    try:
        name.decode()
    except UnicodeDecodeError:
        return "expected a name in UTF-8"
    if len(shape) > MAX_DIMENSIONS:
        return f"expected at most {MAX_DIMENSIONS} dimensions, got {len(shape)}"
    if math.prod(side for side in shape if side) > MAX_ELEMENTS:
        return f"expected at most {MAX_ELEMENTS} elements, got the shape {shape}"
    return ""


def _read_layout(view: memoryview) -> tuple[Layout, memoryview]:
    """The layout at the head of a packed model, and what follows it."""
    count, at = read_varint(view)
    if count > MAX_TENSORS:
        raise FrameError(f"model: {count} tensors, at most {MAX_TENSORS} are allowed")
    view, tensors = view[at:], dict[str, Tensor]()
    for _ in range(count):
        raw, view = _unsized(view, "a tensor's name")
        if len(view) < 2 or view[0] >= len(DTYPES):
            raise FrameError("model: expected a tensor's dtype and number of dimensions; truncated or damaged")
        dtype, dimensions, view = DTYPES[view[0]], view[1], view[2:]
        shape: list[int] = []
        for _ in range(dimensions):
            side, at = read_varint(view)
            view = view[at:]
            shape.append(side)
        if complaint := _complaint(bytes(raw), tuple(shape)):
            raise FrameError(f"model: tensor {len(tensors)}: {complaint}")
        name = bytes(raw).decode()
        if name in tensors:
            raise FrameError(f"model: tensor {name[:80]!r} comes twice")
        tensors[name] = Tensor(name, tuple(shape), dtype)
    return Layout(tuple(tensors.values())), view


# --- small parts -----------------------------------------------------------------------------------------------------


def _read_chain(view: memoryview) -> Iterator[Link]:
    """The links up to the end of a package."""
    for _ in range(MAX_LINKS):
        if not view:
            return
        base, view = view[:_DIGEST], view[_DIGEST:]
        if len(base) < _DIGEST:
            raise FrameError(f"package: expected a digest of {_DIGEST} bytes before a frame, got {len(base)}")
        frame, view = _unsized(view, "a frame")
        yield Link(bytes(base), bytes(frame))
    if view:
        raise FrameError(f"package: more than {MAX_LINKS} links, or {len(view)} bytes too many")


def _unsized(view: memoryview, what: str) -> tuple[memoryview, memoryview]:
    """Undo `sized`: the bytes behind their varint length, and the rest."""
    length, at = read_varint(view)
    if length > len(view) - at:
        raise FrameError(f"package: expected {what} of {length} bytes, got {len(view) - at}; truncated or damaged")
    return view[at : at + length], view[at + length :]


def _checksum(head: bytes, *body: bytes | memoryview) -> int:
    """CRC-32 of header and body without the field that holds it."""
    crc = zlib.crc32(head[_CRC_AT.stop :], zlib.crc32(head[: _CRC_AT.start]))
    for piece in body:
        crc = zlib.crc32(piece, crc)
    return crc


def _digest_of(*pieces: bytes | memoryview) -> bytes:
    digest = hashlib.blake2b(digest_size=_DIGEST)
    for piece in pieces:
        digest.update(piece)
    return digest.digest()


def _check_digest(name: str, value: bytes) -> None:
    if not isinstance(value, bytes) or len(value) != _DIGEST:
        raise ConfigError(f"{name}: expected a digest of {_DIGEST} bytes, got {value!r}")
