"""The counting proxy: bytes of the sockets, whatever the framing of messages and the life of connections."""

import http.client
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from fedcomp_simulations.deployment import CountingProxy, DeploymentError, Exchange

CHUNKS = (b"abc", b"x" * 70_000, b"z")


class Echo(BaseHTTPRequestHandler):
    """Sends bodies back: by length, or in chunks, or until the connection ends."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self._chunks() if "chunked" in self.headers.get("Transfer-Encoding", "") else self._bytes()
        self.send_response(200)
        if self.path.startswith("/chunked"):
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for chunk in CHUNKS:
                self.wfile.write(f"{len(chunk):x}\r\n".encode() + chunk + b"\r\n")
            self.wfile.write(b"0\r\n\r\n")
            return
        if self.path == "/endless":
            self.send_header("Connection", "close")
            self.close_connection = True
        else:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_HEAD(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "1000")  # of what GET would bring
        self.end_headers()

    def do_GET(self) -> None:
        self.send_response(204)
        self.end_headers()
        if self.path == "/last":
            self.close_connection = True  # unannounced

    def _bytes(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _chunks(self) -> bytes:
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: the server is quiet."""


@contextmanager
def proxied() -> Iterator[CountingProxy]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Echo) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            with CountingProxy(f"127.0.0.1:{server.server_port}") as proxy:
                yield proxy
        finally:
            server.shutdown()
            thread.join()


def raw(proxy: CountingProxy, *requests: bytes) -> bytes:
    """All that comes back on one connection, of which the client closes its half at the end."""
    host, _, port = proxy.address.partition(":")
    with socket.create_connection((host, int(port)), timeout=5) as connection:
        connection.sendall(b"".join(requests))
        answer = b""
        while block := connection.recv(65_536):
            answer += block
    return answer


def counted(exchange: Exchange) -> tuple[str, int, int, int]:
    return exchange.path, exchange.status, exchange.body_up, exchange.body_down


def test_bytes_are_those_of_the_sockets() -> None:
    request = b"POST /a?b=c HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 100000\r\n\r\n" + b"y" * 100_000
    with proxied() as proxy:
        answer = raw(proxy, request)
    (exchange,) = proxy.exchanges
    assert counted(exchange) == ("/a", 200, 100_000, 100_000)
    assert answer.endswith(b"\r\n\r\n" + b"y" * 100_000)
    assert (proxy.bytes_up, proxy.bytes_down) == (exchange.bytes_up, exchange.bytes_down) == (len(request), len(answer))


def test_a_connection_is_kept_alive_over_all_ways_to_end_a_message() -> None:
    with proxied() as proxy:
        client = http.client.HTTPConnection(proxy.address, timeout=5)
        ports = set()
        for path, body in (("/length", b"q" * 5), ("/chunked", b""), ("/length", b"")):
            client.request("POST", path, body)
            ports.add(client.sock.getsockname()[1])
            assert client.getresponse().read() == (b"".join(CHUNKS) if path == "/chunked" else body)
        client.request("HEAD", "/nothing")
        assert client.getresponse().read() == b""
        client.request("GET", "/nothing")
        assert client.getresponse().read() == b""
        client.request("POST", "/length", iter(CHUNKS), encode_chunked=True, headers={"Transfer-Encoding": "chunked"})
        ports.add(client.sock.getsockname()[1])
        assert client.getresponse().read() == b"".join(CHUNKS)
        client.request("POST", "/endless", b"12")
        assert client.getresponse().read() == b"12"
        client.close()
    assert len(ports) == 1
    whole = sum(map(len, CHUNKS))
    assert [counted(exchange) for exchange in proxy.exchanges] == [
        ("/length", 200, 5, 5),
        ("/chunked", 200, 0, whole),
        ("/length", 200, 0, 0),
        ("/nothing", 200, 0, 0),
        ("/nothing", 204, 0, 0),
        ("/length", 200, whole, whole),
        ("/endless", 200, 2, 2),
    ]
    marks = sum(len(f"{len(chunk):x}") + 4 for chunk in CHUNKS) + len(b"0\r\n\r\n")
    chunked, lengthy = proxy.exchanges[1], proxy.exchanges[2]
    headers = len(b"Transfer-Encoding: chunked") - len(b"Content-Length: 0")
    assert chunked.bytes_down - lengthy.bytes_down == whole + marks + headers


def test_connections_end_as_they_would_without_a_proxy() -> None:
    with proxied() as proxy:
        client = http.client.HTTPConnection(proxy.address, timeout=5)
        client.request("GET", "/last")
        assert client.getresponse().status == 204
        assert client.sock.recv(1) == b""  # the idle server went away
        client.close()
        assert raw(proxy, b"GET /nothing HTTP/1.0\r\n\r\n").startswith(b"HTTP/1.1 204")
        assert raw(proxy, b"\x16\x03\x01 not HTTP\r\n\r\n") == b""
        assert raw(proxy, b"POST /a HTTP/1.1\r\nContent-Length: many\r\n\r\n") == b""
    assert [exchange.status for exchange in proxy.exchanges] == [204, 204, 0]


def test_parallel_connections_are_counted_apart() -> None:
    bodies = [b"p" * size for size in (10, 50_000, 200_000)]

    def post(proxy: CountingProxy, body: bytes) -> None:
        client = http.client.HTTPConnection(proxy.address, timeout=5)
        for _ in range(5):
            client.request("POST", f"/{len(body)}", body)
            assert client.getresponse().read() == body
        client.close()

    with proxied() as proxy:
        threads = [threading.Thread(target=post, args=(proxy, body)) for body in bodies]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for body in bodies:
        mine = [exchange for exchange in proxy.exchanges if exchange.path == f"/{len(body)}"]
        assert [(e.status, e.body_up, e.body_down) for e in mine] == [(200, len(body), len(body))] * 5


def test_a_target_that_is_not_there_ends_connections_and_nothing_else() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        target = f"127.0.0.1:{closed.getsockname()[1]}"
    with CountingProxy(target) as proxy:
        assert raw(proxy, b"GET / HTTP/1.1\r\n\r\n") == b""
        assert raw(proxy, b"GET / HTTP/1.1\r\n\r\n") == b""
    assert not proxy.exchanges


def test_a_target_is_host_and_port() -> None:
    with pytest.raises(DeploymentError, match="expected \"host:port\", got 'http://a'"):
        CountingProxy("http://a")
