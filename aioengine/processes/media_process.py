"""The media process: its main function and its message loop."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import socket
import threading
from concurrent import futures
from typing import TYPE_CHECKING

from PIL import Image

from aioengine.media import pictures
from aioengine.media.service.worker import MediaWorker, load_processor
from aioengine.processes.host import die_with_parent, handle_signals, limit_threads, name_process
from aioengine.protocol.media import (
    NUM_FETCHES,
    CancelJob,
    FetchJob,
    MediaReady,
    decode_job,
    decode_media_orders,
    encode_line,
)

if TYPE_CHECKING:
    from aioengine.protocol.media import Job, JobEnd, Waits


def main() -> None:
    faulthandler.enable()
    handle_signals()
    orders = decode_media_orders(_read_line(0))
    name_process("aioengine:media")
    die_with_parent(orders.parent_pid)
    limit_threads(1)
    pictures.limit_pixels(orders.max_pixels)
    worker = MediaWorker(orders, *load_processor(orders))
    Image.init()  # loads the decoders, now and not for the first picture
    with contextlib.suppress(SystemExit, OSError):  # asked to end, or the frontend has ended
        _serve(socket.socket(fileno=orders.socket_fd), worker, orders.num_workers)
    os._exit(0)


def _serve(channel: socket.socket, worker: MediaWorker, num_workers: int) -> None:
    lock = threading.Lock()

    def send(reply: MediaReady | Waits | JobEnd) -> None:
        with lock:
            channel.sendall(encode_line([reply]))

    def work(job: Job) -> None:
        send(worker.do(job, send))
        worker.spares.make()

    prepares = futures.ThreadPoolExecutor(num_workers, "prepare")
    fetches = futures.ThreadPoolExecutor(NUM_FETCHES, "fetch")
    send(MediaReady())
    for line in channel.makefile("rb"):
        job = decode_job(line)
        if isinstance(job, CancelJob):
            worker.cancel(job.id)
            continue
        worker.accept(job)
        pool = fetches if isinstance(job, FetchJob) else prepares
        pool.submit(work, job)


def _read_line(fd: int) -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        part = os.read(fd, 65536)
        if not part:
            os._exit(1)  # the parent died first
        line += part
    return line
