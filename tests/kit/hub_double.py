"""A local HTTP server that replaces the Hugging Face hub. It has one model."""

from __future__ import annotations

import json
import threading
from contextlib import contextmanager
from fnmatch import fnmatch
from functools import partial
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

COMMIT = "a" * 40


class HubDouble:
    """Serves ``files`` as the model "owner/name".

    Attributes:
        stuck: pattern of file names. Only the first byte of these files is sent until ``is_over`` is set.
        fetched: names of the requested files.
        has_begun: set after the first byte of a stuck file was sent.
    """

    def __init__(self, files: Mapping[str, bytes], *, stuck: str = "") -> None:
        self.files = files
        self.stuck = stuck
        self.fetched: list[str] = []
        self.has_begun = threading.Event()
        self.is_over = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Handler, self))
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    @contextmanager
    def serving(self) -> Iterator[HubDouble]:
        thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield self
        finally:
            self.is_over.set()
            self._server.shutdown()
            self._server.server_close()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    def __init__(self, hub: HubDouble, *arguments: Any) -> None:
        self._hub = hub
        super().__init__(*arguments)

    def do_HEAD(self) -> None:
        if self._name in self._hub.files:
            self._answer(self._hub.files[self._name], is_whole=False)
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "EntryNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

    def do_GET(self) -> None:
        hub = self._hub
        if "/resolve/" in self.path:
            hub.fetched.append(self._name)
            is_stuck = fnmatch(self._name, hub.stuck)
            first, _, last = self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")
            part = slice(int(first), int(last) + 1 if last else None)
            self._answer(hub.files[self._name][part], is_whole=not is_stuck)
            if is_stuck:
                self.wfile.write(hub.files[self._name][:1])
                self.wfile.flush()
                hub.has_begun.set()
                hub.is_over.wait(1000)
        elif "/tree/" in self.path:
            files = hub.files.items()
            entries = [{"type": "file", "path": name, "size": len(data), "oid": _id(data)} for name, data in files]
            self._answer(json.dumps(entries).encode())
        else:
            self._answer(json.dumps({"id": "owner/name", "sha": COMMIT, "siblings": []}).encode())

    @property
    def _name(self) -> str:
        return self.path.rpartition("/")[2]

    def _answer(self, data: bytes, *, is_whole: bool = True) -> None:
        self.send_response(200)
        headers = {"Content-Length": str(len(data)), "X-Repo-Commit": COMMIT, "ETag": f'"{_id(data)}"'}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if is_whole:
            self.wfile.write(data)

    def log_message(self, format: str, *arguments: object) -> None:
        """Do not log requests."""


def _id(data: bytes) -> str:
    return sha1(data).hexdigest()
