"""Downloads: limits of bytes, time, redirects and addresses, with servers that exceed them."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import ipaddress
import socket
import socketserver
import threading
import time
import zlib
from collections.abc import Callable, Iterator

import pytest
from msgspec.structs import replace

from aioengine.media.service import download
from aioengine.media.service.download import MAX_REDIRECTS, Downloader, is_public
from aioengine.settings.config import MediaConfig

LIMITS = MediaConfig(max_image_bytes=100_000, timeout_s=5.0, allow_private_urls=True)
BODY = bytes(range(256)) * 16


async def fetch(url: str, limits: MediaConfig = LIMITS) -> bytes:
    return await Downloader(limits).fetch(url)


class Server(socketserver.ThreadingTCPServer):
    """Answers each path by a function that writes to the connection; ``paths`` and ``heads``: of its requests."""

    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.heads: list[bytes] = []
        self.answers: dict[str, Callable[[socket.socket], None]] = {}
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class Handler(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        head = b""
        while b"\r\n\r\n" not in head:
            part = self.request.recv(4096)
            if not part:
                return
            head += part
        path = head.split()[1].decode()
        self.server.paths.append(path)
        self.server.heads.append(head)
        try:
            self.server.answers[path](self.request)
        except OSError:
            return


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server() as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()


def answer(body: bytes = BODY, status: str = "200 OK", **headers: str) -> Callable[[socket.socket], None]:
    lines = [f"HTTP/1.1 {status}", *(f"{name.replace('_', '-')}: {value}" for name, value in headers.items())]
    head = "\r\n".join([*lines, "", ""]).encode()
    return lambda connection: connection.sendall(head + body)


def endless(head: bytes, piece: bytes, pause_s: float = 0.0) -> Callable[[socket.socket], None]:
    def write(connection: socket.socket) -> None:
        connection.sendall(head)
        while True:
            connection.sendall(piece)
            time.sleep(pause_s)

    return write


async def test_a_body_is_read_with_and_without_its_length(server: Server) -> None:
    server.answers |= {
        "/plain": answer(Content_Length=str(len(BODY)), Content_Type="image/png"),
        "/until-end": answer(),
        "/chunked": answer(b"5\r\nhello\r\n0\r\n\r\n", Transfer_Encoding="chunked"),
        "/zipped?a=b": answer(gzip.compress(BODY), Content_Encoding="gzip", Content_Type="application/octet-stream"),
        "/deflated": answer(zlib.compress(BODY), Content_Encoding="deflate"),
    }
    for path in ("/plain", "/until-end", "/zipped?a=b", "/deflated"):
        assert await fetch(server.url + path) == BODY, path
    assert await fetch(server.url + "/chunked") == b"hello"


@pytest.mark.parametrize(
    ("response", "words"),
    [
        (answer(Content_Length="10000000000"), "more than max_image_bytes=100000 bytes"),
        (endless(b"HTTP/1.1 200 OK\r\n\r\n", bytes(10_000)), "more than max_image_bytes"),
        (answer(gzip.compress(bytes(1 << 27)), Content_Encoding="gzip"), "more than max_image_bytes"),
        (
            endless(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"1000\r\n" + bytes(4096) + b"\r\n"),
            "more",
        ),
        (endless(b"", b"HTTP/1.1 100 Continue\r\n\r\n", 0.001), "within media_timeout"),
        (lambda connection: time.sleep(3), "within media_timeout=0.3 seconds"),
        (endless(b"HTTP/1.1 200 OK\r\n", b"X", 0.01), "within media_timeout|could not be read"),
        (endless(b"HTTP/1.1 200 OK\r\nContent-Length: 5000\r\n\r\n", b"x", 0.01), "within media_timeout"),
        (endless(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n", b"x", 0.01), "within media_timeout"),
        (answer(Content_Length="9999"), "received 4096 bytes, expected 9999"),
        (answer(b"5\r\nhel", Transfer_Encoding="chunked"), "incomplete chunked read"),
        (answer(Content_Type="text/html; charset=utf-8"), "sent text/html, which is not an image"),
        (answer(Content_Encoding="br"), "content encoding 'br'"),
        (answer(b"not zipped", Content_Encoding="gzip"), "could not be read: error"),
        (answer(status="404 Not Found"), "answered 404 Not Found"),
        (answer(status="302 Found"), "answered 302"),
        (answer(status="302 Found", Location="file:///etc/passwd"), "the scheme 'file'"),
        (answer(b"rubbish", "rubbish"), "could not be read"),
        (lambda connection: connection.close(), "could not be read"),
    ],
)
async def test_answers_beyond_the_limits_are_refused(
    server: Server, response: Callable[[socket.socket], None], words: str
) -> None:
    server.answers["/odd"] = response
    with pytest.raises(ValueError, match=words):
        await fetch(server.url + "/odd", replace(LIMITS, timeout_s=0.3 if "media_timeout" in words else 20.0))


async def test_redirects_are_followed_a_few_times(server: Server) -> None:
    server.answers |= {f"/{n}": answer(status="307 T", Location=f"/{n - 1}") for n in range(1, MAX_REDIRECTS + 2)}
    server.answers["/0"] = answer()
    assert await fetch(f"{server.url}/{MAX_REDIRECTS}") == BODY
    with pytest.raises(ValueError, match=f"more than {MAX_REDIRECTS} redirects"):
        await fetch(f"{server.url}/{MAX_REDIRECTS + 1}")


async def test_private_addresses_are_not_connected_to(server: Server) -> None:
    server.paths.clear()
    port = server.server_address[1]
    hosts = ("127.0.0.1", "localhost", "[::ffff:127.0.0.1]", "0.0.0.0", "2130706433", "0x7f.1")
    for host in hosts:
        with pytest.raises(ValueError, match=r"not public; allow_private_urls=True allows it|no connection|no address"):
            await fetch(f"http://{host}:{port}/plain", replace(LIMITS, allow_private_urls=False))
    assert server.paths == []


async def test_each_redirect_is_checked(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "is_public", lambda address: str(address) == "127.0.0.1")
    port = server.server_address[1]
    server.answers["/inward"] = answer(status="301 M", Location=f"http://127.0.0.2:{port}/plain")
    with pytest.raises(ValueError, match=r"'127.0.0.2' has the address 127.0.0.2, which is not public"):
        await fetch(f"{server.url}/inward", replace(LIMITS, allow_private_urls=False))


async def test_connection_goes_to_the_checked_address(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def look_up(host: str, port: int, **_: object) -> list[tuple[object, ...]]:
        asked.append(host)
        address = "127.0.0.1" if len(asked) == 1 else "127.0.0.9"
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))]

    real = socket.getaddrinfo
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda host, *a, **k: (look_up if host == "a.b" else real)(host, *a, **k)
    )
    server.answers["/named"] = answer()
    assert await fetch(f"http://a.b:{server.server_address[1]}/named") == BODY
    assert asked == ["a.b"]


async def test_slow_lookup_ends_at_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: time.sleep(1) or [])
    with pytest.raises(ValueError, match="within media_timeout=0.1 seconds"):
        await fetch("http://slow.example/x.png", replace(LIMITS, timeout_s=0.1))


@pytest.mark.parametrize(
    "address",
    ["10.1.2.3", "127.0.0.1", "169.254.169.254", "100.100.100.200", "0.0.0.0", "224.0.0.1", "::1", "::", "fe80::1",
     "fd00:ec2::254", "::ffff:10.0.0.1", "64:ff9b::a00:1", "2002:a00:1::", "2001:0:808:808::f5ff:fffe", "ff02::1",
     "fec0::1", "192.0.0.8", "192.0.0.192", "168.63.129.16", "::ffff:168.63.129.16", "64:ff9b::a83f:8110",
     "2002:a83f:8110::", "192.88.99.1", "64:ff9b:1::1", "100::1", "100:0:0:1::1", "2001:2::1", "2001:db8::1", "3fff::1",
     "5f00::1", "::8.8.8.8"],
)  # fmt: skip
def test_addresses_that_are_not_public(address: str) -> None:
    assert not is_public(ipaddress.ip_address(address))


@pytest.mark.parametrize(
    "address", ["8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808", "2002:808:808::"]
)
def test_addresses_that_are_public(address: str) -> None:
    assert is_public(ipaddress.ip_address(address))


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://", "names no host"),
        ("http://user:secret@example.com/x", "has a user name"),
        ("http://example.com/a b", "written as %XX"),
        ("http://example.com/\r\nHost: x", "written as %XX"),
        ("http://example.com:port/", "[Pp]ort"),
        ("http://127.0.0.1:1/", "no connection to its host '127.0.0.1'"),
    ],
)
async def test_invalid_urls_are_refused(url: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        await fetch(url)


async def test_cancelled_download_closes_its_connection(server: Server) -> None:
    has_begun, is_closed = threading.Event(), threading.Event()

    def write(connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\n\r\nsome")
        has_begun.set()
        with contextlib.suppress(OSError):
            connection.recv(1)  # returns when the other side closes the connection
        is_closed.set()

    server.answers["/cancelled"] = write
    download = asyncio.ensure_future(fetch(server.url + "/cancelled", replace(LIMITS, timeout_s=600)))
    await asyncio.to_thread(has_begun.wait)
    download.cancel()
    with pytest.raises(asyncio.CancelledError):
        await download
    await asyncio.to_thread(is_closed.wait)


async def test_server_sees_the_name_of_the_host(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the Host header, and in the TLS handshake as the name for which the certificate must be valid."""
    real = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda _, *rest, **options: real("127.0.0.1", *rest, **options))
    port = server.server_address[1]
    server.answers["/host"] = answer()
    await fetch(f"http://cats.example:{port}/host")
    assert f"Host: cats.example:{port}".encode() in server.heads[-1]
    handshakes: list[bytes] = []

    async def read_handshake(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        handshakes.append(await reader.read(4096))
        writer.close()

    async with await asyncio.start_server(read_handshake, "127.0.0.1") as secure:
        with pytest.raises(ValueError, match=r"no connection to its host 'cats.example' \(127.0.0.1 port"):
            await fetch(f"https://cats.example:{secure.sockets[0].getsockname()[1]}/x.png")
    assert b"cats.example" in handshakes[0]


async def test_addresses_are_tried_in_order_until_one_answers(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in ("127.0.0.2", "127.0.0.1")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: entries)
    server.answers["/second"] = answer()
    assert await fetch(f"http://a.b:{server.server_address[1]}/second") == BODY


async def test_endless_body_of_a_redirect_is_not_read(server: Server) -> None:
    head = f"HTTP/1.1 302 Found\r\nLocation: {server.url}/target\r\n\r\n".encode()
    server.answers |= {"/endless": endless(head, bytes(10_000)), "/target": answer()}
    assert await fetch(f"{server.url}/endless") == BODY
