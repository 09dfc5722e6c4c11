"""Main function of a child process: read the orders, report ready, serve, report a failure."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import logging
import os
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NoReturn

import msgspec
import zmq

from aioengine.child_process.host import AskedToEnd, die_with_parent, handle_signals, name_process, read_orders
from aioengine.file_descriptors import raise_descriptor_limit
from aioengine.protocol.board import CrashBoard
from aioengine.protocol.codec import fingerprint, new_epoch_in
from aioengine.protocol.messages import Control, Fact, Failed, LogRecord, Message, Ready, Role
from aioengine.protocol.orders import Orders, SecureEndpoint, decode_orders, roles_of
from aioengine.protocol.rank_step import RankAdapter, RankStep
from aioengine.protocol.service import Service
from aioengine.transport.base import BacklogFullError
from aioengine.transport.zmq import Context, ZmqReceiver, ZmqSender

GC_THRESHOLDS = (1_000_000, 20, 20)
_LINGER_S = 0.3


class Child:
    """The sockets and settings of a child process."""

    def __init__(self, orders: Orders, wake_fd: int) -> None:
        self.orders = orders
        self.settings = orders.settings
        self.board = CrashBoard.open(Path(orders.board))
        self._context: Context = zmq.Context()
        inbox = orders.endpoints[str(orders.role)]
        self.receiver = ZmqReceiver(self._context, inbox, orders.epoch, wake_fd=wake_fd)
        if orders.from_frontend is not None:
            self.receiver.attach(orders.from_frontend)
        self._senders: list[ZmqSender] = []
        self._to_ranks: list[ZmqSender] = []
        listens = isinstance(orders.frontend, str)  # on this machine
        self.uplink = Uplink(self._connect(orders.frontend, "the frontend", listens=listens).send)

    def _connect(self, endpoint: str | SecureEndpoint, receiver: str, *, listens: bool = False) -> ZmqSender:
        sender = ZmqSender(self._context, endpoint, self.orders.epoch, receiver=receiver, listens=listens)
        self._senders.append(sender)
        return sender

    def connect_ranks(self) -> Callable[[RankStep | RankAdapter | Control], None]:
        """Return a function that sends a message to the other ranks."""
        roles = [role for role in roles_of(self.settings) if role.rank]
        self._to_ranks = [self._connect(self.orders.endpoints[str(role)], f"the {role} process") for role in roles]

        def send(message: RankStep | RankAdapter | Control) -> None:
            for sender in self._to_ranks:
                sender.send([message])

        return send

    def _send_ready(self, facts: Mapping[str, Fact]) -> None:
        text = msgspec.json.encode(dict(facts)).decode()
        self.uplink.send([Ready(self.orders.role, os.getpid(), fingerprint(), text)])

    def serve(self, service: Service, peer: Role) -> None:
        """Run ``service`` until this process is asked to end, or an exception is raised. peer: role of its peer."""
        to_peer = self._connect(self.orders.endpoints[str(peer)], f"the {peer} process")
        # Exclude existing objects from garbage collection, and collect rarely. The loop creates no cycles, and a
        # collection that visits the prefix cache of a large pool takes longer than a step.
        gc.collect()
        gc.freeze()
        gc.set_threshold(*GC_THRESHOLDS)
        self._send_ready(service.facts)
        now = time.monotonic()
        try:
            while True:
                messages = self.receiver.receive(service.wait_s(now))
                now = time.monotonic()
                if messages and (new_epoch := new_epoch_in(messages)):
                    for sender in self._to_ranks:
                        sender.send([new_epoch])
                    for socket in (self.receiver, *self._senders):
                        socket.begin(new_epoch.epoch)
                    service.handle([new_epoch], now)
                    self._send_ready(service.facts)
                elif messages:
                    service.handle(messages, now)
                outbox = service.step(now)
                if outbox.to_peer:
                    to_peer.send(outbox.to_peer)
                if outbox.to_frontend:
                    self.uplink.send(outbox.to_frontend)
                self.uplink.flush()
        except AskedToEnd:  # clean up only here: after a failure, the cleanup might fail too
            service.close()
            raise

    def close(self) -> None:
        """Close all sockets. Unsent frames are sent for at most ``_LINGER_S`` seconds."""
        self.receiver.close()
        for sender in self._senders:
            sender.close(_LINGER_S)
        self._context.term()


def run_child(work: Callable[[Child], None]) -> NoReturn:
    """Read the orders from standard input, call ``work``, and end the process.

    An exception is written to the log file and sent to the frontend.
    """
    faulthandler.enable()
    wake_fd = handle_signals()
    orders = decode_orders(read_orders())
    role = orders.role
    # Linux shows 15 characters
    name_process(f"aioengine:{role.name[:2]}-{role.rank}" if role.rank else f"aioengine:{role.name[:5]}")
    die_with_parent(orders.parent_pid)
    raise_descriptor_limit()
    child = Child(orders, wake_fd)
    forward_logs(child.uplink, orders.settings.log_level)
    code = 0
    try:
        work(child)
    except AskedToEnd:
        pass
    except BaseException as error:
        code = 1
        failed = Failed(role, type(error).__name__, encodable(str(error)), encodable(traceback.format_exc()))
        child.uplink.send([failed])
        with contextlib.suppress(OSError):  # the disk of its log may be full
            traceback.print_exc()
    child.close()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    # A normal exit of the interpreter may hang in threads of libraries. Nothing is left to clean up.
    os._exit(code)


_MAX_RECORDS_PER_S = 50.0
_MAX_BURST = 200.0


class Uplink:
    """Sends messages to the frontend. Messages of other threads wait for the main thread, which owns the socket."""

    def __init__(self, send: Callable[[list[Message]], None]) -> None:
        """send: sends messages in one frame, without waiting."""
        self._send = send
        self._thread = threading.get_ident()
        self._pending: deque[Message] = deque(maxlen=1000)

    def send(self, messages: list[Message]) -> None:
        """Send pending messages, then these. Call it in the main thread."""
        if self._pending:
            messages = [*self._take_pending(), *messages]
        self._send(messages)

    def post(self, message: Message) -> None:
        """Send ``message`` now in the main thread, or with the next flush in another thread."""
        self._pending.append(message)
        if threading.get_ident() == self._thread:
            self.flush()

    def flush(self) -> None:
        """Send pending messages of other threads. Call it in the main thread."""
        if self._pending:
            self._send(self._take_pending())

    def _take_pending(self) -> list[Message]:
        return [self._pending.popleft() for _ in range(len(self._pending))]


class ForwardedLogs(logging.Handler):
    """Sends log records to the frontend's loggers of the same name. Above a maximum rate, records are only counted."""

    def __init__(self, uplink: Uplink) -> None:
        super().__init__()
        self._uplink = uplink
        self._allowance = _MAX_BURST
        self._refilled_at = time.monotonic()
        self._num_dropped = 0

    def emit(self, record: logging.LogRecord) -> None:
        now = time.monotonic()
        self._allowance = min(_MAX_BURST, self._allowance + (now - self._refilled_at) * _MAX_RECORDS_PER_S)
        self._refilled_at = now
        if self._allowance < 1:
            self._num_dropped += 1
            return
        self._allowance -= 1
        text = self.format(record)
        if self._num_dropped:
            text += f" ({self._num_dropped} records before this one were too many at once and are left out)"
            self._num_dropped = 0
        with contextlib.suppress(BacklogFullError):  # the code that logs is not at fault; the next result raises it too
            self._uplink.post(LogRecord(record.name, record.levelno, encodable(text)))


def encodable(text: str) -> str:
    """Return ``text`` with escapes for characters that UTF-8 cannot encode. Paths may contain them."""
    return text.encode(errors="backslashreplace").decode()


def forward_logs(uplink: Uplink, level: str) -> None:
    """Send records of the ``aioengine`` loggers of at least ``level`` to the frontend, and to no other handler."""
    logger = logging.getLogger("aioengine")
    logger.setLevel(level.upper())
    logger.propagate = False
    logger.addHandler(ForwardedLogs(uplink))
