"""Files from the web: one GET with a limit of bytes, of time and of redirects, to addresses that are allowed.

The address that was checked is the one that is connected to: names are looked up once for each request. The proxies of
the environment are not used, since they would connect to addresses that cannot be checked here.
"""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import socket
import ssl
import threading
import time
import zlib
from typing import TYPE_CHECKING, Final, NamedTuple
from urllib.parse import SplitResult, urljoin, urlsplit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Address = ipaddress.IPv4Address | ipaddress.IPv6Address

MAX_REDIRECTS: Final = 5
MAX_URL: Final = 8192
PIECE_BYTES: Final = 64 * 1024
_REDIRECTS: Final = (301, 302, 303, 307, 308)
_HEADERS: Final = {"User-Agent": "aioengine", "Accept": "image/*", "Accept-Encoding": "identity"}
_NAT64: Final = ipaddress.ip_network("64:ff9b::/96")
# IANA's special-purpose address registries (iana-ipv4-special-registry and iana-ipv6-special-registry, 2025): networks
# that are not globally reachable. ``is_global`` of older Python releases lacks some. They contain the metadata services
# of clouds, except the one of Azure, which is the last entry.
_NOT_PUBLIC_NETWORKS: Final = (
    "0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12", "192.0.0.0/24",
    "192.0.2.0/24", "192.88.99.0/24", "192.168.0.0/16", "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24",
    "240.0.0.0/4", "::/96", "64:ff9b:1::/48", "100::/64", "100:0:0:1::/64", "2001::/23", "2001:db8::/32", "3fff::/20",
    "5f00::/16", "fc00::/7", "fe80::/10", "fec0::/10", "168.63.129.16/32",
)  # fmt: skip
_NOT_PUBLIC: Final = tuple(map(ipaddress.ip_network, _NOT_PUBLIC_NETWORKS))
_COMPRESSED: Final = ("gzip", "x-gzip", "deflate")


class WebLimits(NamedTuple):
    """``timeout_s``: for all of it, the redirects too. ``allows_private``: also addresses that are not public."""

    max_bytes: int
    timeout_s: float
    allows_private: bool = False


class Cancellation:
    """Ends work early, from any thread. What waits is woken by ``wake``, which is called once at most."""

    def __init__(self) -> None:
        self.is_cancelled = False
        self._wake: Callable[[], None] | None = None
        self._lock = threading.Lock()

    def cancel(self) -> None:
        with self._lock:
            self.is_cancelled = True
            if self._wake is not None:
                self._wake()

    def set_wake(self, wake: Callable[[], None] | None) -> None:
        """None: nothing waits. It is called now where this is cancelled already."""
        with self._lock:
            self._wake = wake
            if self.is_cancelled and wake is not None:
                wake()


def fetch(url: str, limits: WebLimits, cancellation: Cancellation | None = None) -> bytes:
    """The body at ``url``.

    Raises:
        ValueError: it could not be got within the limits, or was cancelled; the message has no URL.
    """
    deadline = time.monotonic() + limits.timeout_s
    cancellation = cancellation or Cancellation()
    for _ in range(MAX_REDIRECTS + 1):
        body, url = _one_request(url, limits, deadline, cancellation)
        if body is not None:
            return body
    raise ValueError(f"more than {MAX_REDIRECTS} redirects")


def is_public(address: Address) -> bool:
    """Whether the address means the same machine everywhere on the internet, as does the IPv4 address that it embeds.

    Teredo addresses are not public.
    """
    if isinstance(address, ipaddress.IPv6Address):
        if address in _NAT64:
            return is_public(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
        if address.ipv4_mapped is not None:
            return is_public(address.ipv4_mapped)
        if address.sixtofour is not None and not is_public(address.sixtofour):
            return False
    if any(address in network for network in _NOT_PUBLIC):
        return False
    return address.is_global and not (address.is_multicast or address.is_reserved or address.is_unspecified)


class _Cutter:
    """Shuts a connection down at the deadline, or when it is cancelled: whatever waits for it then goes on, however
    slowly bytes trickled.
    """

    def __init__(self, connection: socket.socket, deadline: float, cancellation: Cancellation) -> None:
        self._own = connection.dup()  # another descriptor of it, which stays this connection until ``end``
        self._cancellation = cancellation
        cancellation.set_wake(self._cut)
        self._timer = threading.Timer(max(0.0, deadline - time.monotonic()), self._cut)
        self._timer.daemon = True
        self._timer.start()

    def _cut(self) -> None:
        with contextlib.suppress(OSError):  # the other side has ended it
            self._own.shutdown(socket.SHUT_RDWR)

    def end(self) -> None:
        self._cancellation.set_wake(None)
        self._timer.cancel()
        self._timer.join()
        self._own.close()


class _Connection(http.client.HTTPConnection):
    """A connection to an address that was checked, under the name of its host."""

    def __init__(self, target: SplitResult, limits: WebLimits, deadline: float, cancellation: Cancellation) -> None:
        self._is_secure = target.scheme == "https"
        super().__init__(target.hostname or "", target.port or (443 if self._is_secure else 80))
        self._limits = limits
        self._deadline = deadline
        self._cancellation = cancellation
        self._cutter: _Cutter | None = None

    def connect(self) -> None:
        self.sock = _connected(self.host, self.port, self._limits, self._deadline)
        self._cutter = _Cutter(self.sock, self._deadline, self._cancellation)
        if self._is_secure:
            self.sock = ssl.create_default_context().wrap_socket(self.sock, server_hostname=self.host)

    def end(self) -> None:
        """Close it, and end the watch over its time; ``close`` is called before an answer is read."""
        self.close()
        if self._cutter is not None:
            self._cutter.end()


def _connected(host: str, port: int, limits: WebLimits, deadline: float) -> socket.socket:
    """A connection to the first address of ``host`` that is allowed and answers."""
    refused, problem = list[str](), ""
    for address in _addresses(host, port, deadline):
        if not (limits.allows_private or is_public(ipaddress.ip_address(address.partition("%")[0]))):
            refused.append(address)
            continue
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise _late(limits)
        try:
            connection = socket.create_connection((address, port), timeout=left_s)
        except OSError as error:
            problem = f"{address} port {port}: {error}"
            continue
        connection.settimeout(None)  # the deadline is the cutter's
        return connection
    if time.monotonic() >= deadline:
        raise _late(limits)
    if refused and not problem:
        raise ValueError(
            f"its host {host!r} has the address {refused[0]}, which is not public; allow_private_urls=True allows it"
        )
    raise ValueError(f"no connection to its host {host!r} ({problem or 'it has no address'})")


def _addresses(host: str, port: int, deadline: float) -> list[str]:
    """The addresses of a host, looked up on a thread: there is no limit of time for it."""
    found: list[str] = []
    errors: list[Exception] = []

    def look_up() -> None:
        try:
            entries = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            errors.append(error)
        else:
            found.extend(dict.fromkeys(str(entry[4][0]) for entry in entries))

    thread = threading.Thread(target=look_up, name="look-up", daemon=True)
    thread.start()
    thread.join(max(0.0, deadline - time.monotonic()))
    if errors:
        raise ValueError(f"its host {host!r} has no address: {errors[0]}")
    return list(found)


def _one_request(url: str, limits: WebLimits, deadline: float, cancellation: Cancellation) -> tuple[bytes | None, str]:
    """(its body, url), or (None, the URL that it redirects to)."""
    target = _checked_url(url)
    connection, answer = _Connection(target, limits, deadline, cancellation), None
    try:
        path = (target.path or "/") + (f"?{target.query}" if target.query else "")
        connection.request("GET", path, headers=_HEADERS)
        answer = connection.getresponse()
        if answer.status in _REDIRECTS and (place := answer.getheader("Location")):
            return None, urljoin(url, place)
        if answer.status != http.client.OK:
            raise ValueError(f"its host answered {answer.status} {answer.reason:.80}")
        _check_headers(answer, limits)
        body = bytearray()  # and no list, whose pieces may have a byte each
        for part in _body(answer, limits, deadline):
            body += part
        return bytes(body), url
    except (OSError, http.client.HTTPException, UnicodeError, zlib.error) as error:
        if time.monotonic() >= deadline:
            raise _late(limits) from error
        raise ValueError(f"it could not be read: {type(error).__name__}: {error}") from error
    finally:
        if answer is not None:
            answer.close()
        connection.end()


def _checked_url(url: str) -> SplitResult:
    """A URL that can be asked for. Raises ValueError."""
    if len(url) > MAX_URL:
        raise ValueError(f"the URL has {len(url)} characters, more than {MAX_URL}")
    if not url.isascii() or any(character <= " " or character == "\x7f" for character in url):
        raise ValueError("the URL has characters that must be written as %XX")
    target = urlsplit(url)
    if target.scheme not in ("http", "https"):
        raise ValueError(f"it redirects to a URL of the scheme {target.scheme!r:.80}, which is not http or https")
    if not target.hostname:
        raise ValueError("the URL names no host")
    if target.username is not None:
        raise ValueError("the URL has a user name; pass the bytes of such files")
    return target


def _check_headers(answer: http.client.HTTPResponse, limits: WebLimits) -> None:
    kind = answer.headers.get_content_type()
    if answer.getheader("Content-Type") and kind.startswith(("text/", "application/json")):
        raise ValueError(f"its host gave {kind}, which is no picture")
    length = answer.getheader("Content-Length", "")
    if length.isdecimal() and int(length) > limits.max_bytes:
        raise _too_large(limits)


def _body(answer: http.client.HTTPResponse, limits: WebLimits, deadline: float) -> Iterator[bytes]:
    """Its pieces. One that is compressed counts as it is, and as what it becomes."""
    coding = answer.getheader("Content-Encoding", "identity").strip().lower()
    if coding not in ("identity", "", *_COMPRESSED):
        raise ValueError(f"its host sent it in the content encoding {coding!r:.80}, which was not asked for")
    inflate = zlib.decompressobj(wbits=zlib.MAX_WBITS | 32) if coding in _COMPRESSED else None
    num_read = num_given = 0
    while piece := answer.read1(PIECE_BYTES):
        num_read += len(piece)
        while piece:
            part = piece
            piece = b""
            if inflate is not None:
                part = inflate.decompress(part, PIECE_BYTES)
                piece = inflate.unconsumed_tail
            num_given += len(part)
            if max(num_read, num_given) > limits.max_bytes:
                raise _too_large(limits)
            yield part
    if time.monotonic() >= deadline:  # the end of what was read may be that of the connection, which was cut
        raise _late(limits)
    if answer.length:
        raise ValueError(f"its host ended the connection {answer.length} bytes before the end")


def _too_large(limits: WebLimits) -> ValueError:
    return ValueError(f"it has more than max_image_bytes={limits.max_bytes} bytes")


def _late(limits: WebLimits) -> ValueError:
    return ValueError(f"it was not there within media_timeout={limits.timeout_s:g} seconds")
