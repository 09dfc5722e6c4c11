"""Downloads images, with limits on bytes, time, redirects and addresses.

HTTP is spoken by a transport of httpx. ``httpx.AsyncClient`` is not used, because it would break promises of ours: it
reads the whole body of a redirect, inflates a compressed body without a limit, ignores unknown content encodings, and
keeps cookies between downloads.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
import zlib
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final

import httpx

from aioengine.settings.config import MediaConfig

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

MAX_REDIRECTS: Final = 5
MAX_LOOKUPS: Final = 64
"""Threads for DNS lookups, which cannot be cancelled: each may outlast its download."""

_PORTS: Final = {"http": 80, "https": 443}
_HEADERS: Final = {"User-Agent": "aioengine", "Accept": "image/*", "Accept-Encoding": "identity"}
_COMPRESSED: Final = ("gzip", "x-gzip", "deflate")
_NAT64: Final = ipaddress.ip_network("64:ff9b::/96")
_NOT_PUBLIC: Final = tuple(
    map(ipaddress.ip_network, ("192.0.0.0/24", "192.88.99.0/24", "3fff::/20", "fec0::/10", "168.63.129.16/32"))
)
"""Networks that are not public, although ``is_global`` of some Python releases is true for them. The last one is the
metadata service of Azure; other clouds use addresses that are not global.
"""


class Downloader:
    """Downloads images. On one event loop."""

    def __init__(self, limits: MediaConfig) -> None:
        self._limits = limits
        # No connection is kept: another host with the same address could get it without a check of its certificate.
        # Proxies of the environment are not used: they would connect to addresses that cannot be checked here.
        self._transport = httpx.AsyncHTTPTransport(
            verify=ssl.create_default_context(),
            trust_env=False,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
        )
        self._lookups = ThreadPoolExecutor(MAX_LOOKUPS, "lookup")

    async def fetch(self, url: str) -> bytes:
        """Return the bytes at a URL.

        Raises ValueError if it cannot be downloaded within the limits. The message does not contain the URL.
        """
        if not url.isascii() or any(character <= " " or character == "\x7f" for character in url):
            raise ValueError("the URL has characters that must be written as %XX")
        try:
            async with asyncio.timeout(self._limits.timeout_s):
                target = httpx.URL(url)
                for _ in range(MAX_REDIRECTS + 1):
                    response = await self._request(target)
                    try:
                        if not response.has_redirect_location:
                            return await self._read(response)
                        target = target.join(response.headers["Location"])
                    finally:
                        await response.aclose()
        except TimeoutError:
            raise ValueError(f"it was not downloaded within media_timeout={self._limits.timeout_s:g} seconds") from None
        except (httpx.HTTPError, httpx.InvalidURL, zlib.error) as error:
            raise ValueError(f"it could not be read: {type(error).__name__}: {error}") from error
        raise ValueError(f"more than {MAX_REDIRECTS} redirects")

    async def _request(self, url: httpx.URL) -> httpx.Response:
        """Send a GET request to the first allowed address of the host that accepts a connection."""
        if url.scheme not in _PORTS:
            raise ValueError(f"it redirects to a URL of the scheme {url.scheme!r:.80}, which is not http or https")
        if not url.host:
            raise ValueError("the URL names no host")
        if url.userinfo:
            raise ValueError("the URL has a user name; pass the bytes of such files")
        host, port = url.raw_host.decode(), url.port or _PORTS[url.scheme]
        headers = {**_HEADERS, "Host": url.netloc.decode()}
        refused = problem = ""
        for address in await self._addresses(host, port):
            if not (self._limits.allow_private_urls or is_public(ipaddress.ip_address(address.partition("%")[0]))):
                refused = refused or address
                continue
            # The connection goes to the checked address. The certificate must be of the host.
            request = httpx.Request(
                "GET", url.copy_with(host=address), headers=headers, extensions={"sni_hostname": host}
            )
            try:
                return await self._transport.handle_async_request(request)
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                cause: BaseException = error
                while cause.__cause__ is not None:  # the error of the operating system
                    cause = cause.__cause__
                problem = f"{address} port {port}: {cause}"
        if refused and not problem:
            private = f"its host {host!r} has the address {refused}, which is not public"
            raise ValueError(f"{private}; allow_private_urls=True allows it")
        raise ValueError(f"no connection to its host {host!r} ({problem or 'it has no address'})")

    async def _addresses(self, host: str, port: int) -> list[str]:
        """Return the IP addresses of a host."""
        look_up = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
        try:
            entries = await asyncio.get_running_loop().run_in_executor(self._lookups, look_up)
        except (OSError, UnicodeError) as error:
            raise ValueError(f"its host {host!r} has no address: {error}") from error
        return list(dict.fromkeys(str(entry[4][0]) for entry in entries))

    async def _read(self, response: httpx.Response) -> bytes:
        """Return the body. Both its compressed and its inflated size are limited."""
        max_bytes = self._limits.max_image_bytes
        too_large = ValueError(f"it has more than max_image_bytes={max_bytes} bytes")
        if response.status_code != httpx.codes.OK:
            raise ValueError(f"its host answered {response.status_code} {response.reason_phrase:.80}")
        content_type = response.headers.get("Content-Type", "").partition(";")[0].strip().lower()
        if content_type.startswith(("text/", "application/json")):
            raise ValueError(f"its host sent {content_type}, which is not an image")
        length = response.headers.get("Content-Length", "")
        if length.isdecimal() and int(length) > max_bytes:
            raise too_large
        encoding = response.headers.get("Content-Encoding", "identity").strip().lower()
        if encoding not in ("identity", "", *_COMPRESSED):
            raise ValueError(f"its host sent it in the content encoding {encoding!r:.80}, which was not asked for")
        inflater = zlib.decompressobj(wbits=zlib.MAX_WBITS | 32) if encoding in _COMPRESSED else None
        body, num_read = bytearray(), 0
        async for piece in response.aiter_raw():
            num_read += len(piece)
            body += piece if inflater is None else inflater.decompress(piece, max_bytes + 1 - len(body))
            if max(num_read, len(body)) > max_bytes:
                raise too_large
        return bytes(body)


def is_public(address: Address) -> bool:
    """Return whether an address is globally reachable. Teredo addresses are not.

    An IPv4 address that an IPv6 address embeds must be globally reachable, too.
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
