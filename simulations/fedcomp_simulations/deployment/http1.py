"""Just enough of HTTP/1.1 to see where a message ends, while its bytes go on as they came."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

_BLOCK = 65_536
_NO_BODY = (204, 304)

Forward = Callable[[bytes], Awaitable[None]]
"""Takes raw bytes on to the other side."""


class HttpError(Exception):
    """Bytes that are not a message of HTTP/1.1 that can be followed."""


@dataclass(frozen=True)
class Head:
    """The first line and the headers of a message.

    Attributes:
        raw: all its bytes, the empty line included.
        first: the words of the first line.
        headers: by name in lower case.
    """

    raw: bytes
    first: tuple[str, ...]
    headers: dict[str, str]

    @classmethod
    async def read(cls, reader: asyncio.StreamReader) -> "Head | None":
        """The next one; None if the connection ends before. Raises HttpError for what is none."""
        try:
            raw = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError as error:
            if error.partial:
                raise HttpError("the connection ended within the headers") from error
            return None
        except asyncio.LimitOverrunError as error:
            raise HttpError("headers are too long") from error
        lines = raw.decode("latin-1").split("\r\n")
        pairs = (line.partition(":") for line in lines[1:] if line)
        head = cls(raw, tuple(lines[0].split(" ", 2)), {name.lower(): value.strip() for name, _, value in pairs})
        if len(head.first) < 2 or not any(word.startswith("HTTP/1.") for word in (head.first[0], head.first[-1])):
            raise HttpError(f"expected HTTP/1.1, got {lines[0][:80]!r}")
        return head

    @property
    def path(self) -> str:
        """Of a request, without the query."""
        return self.first[1].partition("?")[0]

    @property
    def status(self) -> int:
        """Of a response. Raises HttpError if it is no number."""
        if not self.first[1].isdecimal():
            raise HttpError(f"expected a status, got {self.first[1][:20]!r}")
        return int(self.first[1])

    @property
    def closes(self) -> bool:
        """Whether the connection ends after this message."""
        keeps = "HTTP/1.1" in self.first
        return self.headers.get("connection", "").lower() == "close" or not keeps

    def _length(self) -> int:
        text = self.headers.get("content-length", "0")
        if not text.isdecimal():
            raise HttpError(f"expected a content-length, got {text[:20]!r}")
        return int(text)


async def pass_body(head: Head, reader: asyncio.StreamReader, forward: Forward, asked: Head | None = None) -> int:
    """Pass the body of a message on. Returns how long it is, without the marks between chunks.

    Args:
        asked: of a response: the request that it answers.

    Raises HttpError if the body ends early or is not what its headers say.
    """
    if asked is not None and (asked.first[0] == "HEAD" or head.status in _NO_BODY or head.status < 200):
        return 0
    try:
        if "chunked" in head.headers.get("transfer-encoding", "").lower():
            return await _pass_chunks(reader, forward)
        if asked is None or "content-length" in head.headers:
            return await _pass_bytes(head._length(), reader, forward)
    except (asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
        raise HttpError("the connection ended within a body") from error
    return await _pass_rest(reader, forward)


async def _pass_bytes(count: int, reader: asyncio.StreamReader, forward: Forward) -> int:
    left = count
    while left:
        block = await reader.read(min(left, _BLOCK))
        if not block:
            raise HttpError(f"the connection ended {left} bytes before the end of a body of {count}")
        await forward(block)
        left -= len(block)
    return count


async def _pass_chunks(reader: asyncio.StreamReader, forward: Forward) -> int:
    total = 0
    while True:
        line = await reader.readuntil(b"\r\n")
        await forward(line)
        try:
            size = int(line.partition(b";")[0], 16)
        except ValueError:
            raise HttpError(f"expected the size of a chunk, got {line[:20]!r}") from None
        if size == 0:
            break
        total += await _pass_bytes(size, reader, forward)
        await forward(await reader.readexactly(2))
    while (line := await reader.readuntil(b"\r\n")) != b"\r\n":  # trailers
        await forward(line)
    await forward(line)
    return total


async def _pass_rest(reader: asyncio.StreamReader, forward: Forward) -> int:
    total = 0
    while block := await reader.read(_BLOCK):
        await forward(block)
        total += len(block)
    return total
