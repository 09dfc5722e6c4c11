"""Keys of links between machines. Frames are encrypted and authenticated by CURVE, the protocol of libzmq over TCP."""

from __future__ import annotations

import asyncio
import contextlib
from typing import NamedTuple

import zmq
from zmq.utils import z85

from aioengine.transport.zmq import Context

_ZAP_ENDPOINT = "inproc://zeromq.zap.01"
_ZAP_VERSION = b"1.0"


class Keys(NamedTuple):
    """The keys of one end. The public key is for the other end, the secret key never leaves its machine."""

    public: str
    secret: str


def new_keys() -> Keys:
    """Draw new keys."""
    public, secret = zmq.curve_keypair()
    return Keys(public.decode(), secret.decode())


class KeyCheck:
    """Accepts only connections of one public key to the listening sockets of a context.

    libzmq asks it about each connection, by messages of its ZAP protocol. Without a ``KeyCheck``, libzmq accepts each
    client that knows the public key of the listening end.
    """

    def __init__(self, context: Context, public_key: str) -> None:
        self._key = z85.decode(public_key)
        self._loop = asyncio.get_running_loop()
        self._socket = context.socket(zmq.REP)
        self._socket.bind(_ZAP_ENDPOINT)
        self._loop.add_reader(self._socket.fileno(), self._answer)

    def close(self) -> None:
        if not self._loop.is_closed() and not self._socket.closed:
            self._loop.remove_reader(self._socket.fileno())
        self._socket.close(linger=0)

    def _answer(self) -> None:
        with contextlib.suppress(zmq.Again):
            while True:  # the descriptor only reports changes
                parts = self._socket.recv_multipart(zmq.NOBLOCK)
                _, request_id, _, _, _, mechanism, *credentials = parts
                is_known = mechanism == b"CURVE" and credentials == [self._key]
                status = (b"200", b"OK") if is_known else (b"400", b"unknown key")
                self._socket.send_multipart([_ZAP_VERSION, request_id, *status, b"", b""])
