"""A counting proxy between a SuperNode and its SuperLink: what really went through the sockets, request by request."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from fedcomp_simulations.deployment.errors import DeploymentError
from fedcomp_simulations.deployment.http1 import Forward, Head, HttpError, pass_body
from fedcomp_simulations.deployment.process import LOOPBACK

_LIMIT = 1 << 18  # bytes that a head may take
_START_S = 10.0


@dataclass
class Exchange:
    """One request and its response; bytes are those of the sockets, headers and marks between chunks included.

    Attributes:
        path: of the request, without its query.
        started: `time.monotonic()` at its first byte.
        status: of the response; 0: none came.
        bytes_up, bytes_down: of the whole request and response.
        body_up, body_down: of their bodies alone.
    """

    path: str
    started: float = field(default_factory=time.monotonic)
    status: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    body_up: int = 0
    body_down: int = 0


class CountingProxy:
    """Passes HTTP/1.1 from a free loopback port on to `target`, in a thread of its own, and counts; a context manager.

    Connections are kept alive or closed as both sides do it. What is not HTTP/1.1 ends its connection: TLS cannot be
    looked into.

    Args:
        target: "host:port" of the SuperLink.

    Attributes:
        exchanges: in the order in which they began, those under way included.
        address: "host:port" to connect to instead.
    """

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        if not host or not port.isdecimal():
            raise DeploymentError(f'target: expected "host:port", got {target!r}')
        self.exchanges: list[Exchange] = []
        self.address = ""
        self._target = host, int(port)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop = asyncio.Event()
        self._ready = threading.Event()
        self._failure: OSError | None = None
        self._thread = threading.Thread(target=self._serve, name="counting-proxy", daemon=True)

    @property
    def bytes_up(self) -> int:
        """All that clients have sent."""
        return sum(exchange.bytes_up for exchange in self.exchanges)

    @property
    def bytes_down(self) -> int:
        """All that clients have been sent."""
        return sum(exchange.bytes_down for exchange in self.exchanges)

    def __enter__(self) -> Self:
        self._thread.start()
        self._ready.wait(_START_S)
        if not self.address:
            raise DeploymentError(f"the proxy found no port on {LOOPBACK}: {self._failure}") from self._failure
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def _serve(self) -> None:
        try:
            asyncio.run(self._listen())
        finally:
            self._ready.set()

    async def _listen(self) -> None:
        connections: set[asyncio.Task[None]] = set()

        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.ensure_future(self._connection(reader, writer))
            connections.add(task)
            task.add_done_callback(connections.discard)

        try:
            server = await asyncio.start_server(accept, LOOPBACK, 0, limit=_LIMIT)
        except OSError as error:
            self._failure = error
            return
        self._loop = asyncio.get_running_loop()
        self.address = f"{LOOPBACK}:{server.sockets[0].getsockname()[1]}"
        self._ready.set()
        await self._stop.wait()
        server.close()
        for task in list(connections):
            task.cancel()
        await asyncio.gather(*connections, return_exceptions=True)

    async def _connection(self, client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        """Serve one connection of a client, with one of our own to the target."""
        writers = [to_client]
        try:
            server, to_server = await asyncio.open_connection(*self._target, limit=_LIMIT)
            writers.append(to_server)
            while await self._exchange(client, to_client, server, to_server):
                pass
        except (OSError, HttpError):
            pass  # both sides see their connection end, as they would without a proxy
        finally:
            for writer in writers:
                writer.close()
                with contextlib.suppress(OSError, asyncio.CancelledError):
                    await writer.wait_closed()

    async def _exchange(
        self,
        client: asyncio.StreamReader,
        to_client: asyncio.StreamWriter,
        server: asyncio.StreamReader,
        to_server: asyncio.StreamWriter,
    ) -> bool:
        """Pass one request and its response on. Returns whether another may follow."""
        request = await _unless(server.read(1), Head.read(client))
        if request is None:
            return False
        exchange = Exchange(request.path)
        self.exchanges.append(exchange)
        up, down = _counted(exchange, "bytes_up", to_server), _counted(exchange, "bytes_down", to_client)
        await up(request.raw)
        exchange.body_up = await pass_body(request, client, up)
        while True:
            response = await Head.read(server)
            if response is None:
                return False
            await down(response.raw)
            exchange.body_down = await pass_body(response, server, down, request)
            if response.status >= 200:  # else there is more to come
                break
        exchange.status = response.status
        delimited = {"content-length", "transfer-encoding"} & set(response.headers) or not exchange.body_down
        return bool(delimited) and not (request.closes or response.closes)


def _counted(exchange: Exchange, counter: str, writer: asyncio.StreamWriter) -> Forward:
    async def forward(data: bytes) -> None:
        setattr(exchange, counter, getattr(exchange, counter) + len(data))
        writer.write(data)
        await writer.drain()

    return forward


async def _unless(over: Coroutine[Any, Any, bytes], wanted: Coroutine[Any, Any, Head | None]) -> Head | None:
    """What is wanted, unless the idle target closes its connection before: then None."""
    ends, comes = asyncio.ensure_future(over), asyncio.ensure_future(wanted)
    try:
        await asyncio.wait({ends, comes}, return_when=asyncio.FIRST_COMPLETED)
        return comes.result() if comes.done() else None
    finally:
        for task in (ends, comes):
            task.cancel()
        await asyncio.gather(ends, comes, return_exceptions=True)
