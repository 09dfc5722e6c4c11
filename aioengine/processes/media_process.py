"""The media process: main function and message loop."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import os
import socket
from typing import TYPE_CHECKING, Final

from PIL import Image

from aioengine.child_process.host import die_with_parent, handle_signals, limit_threads, name_process, read_orders
from aioengine.media import pictures
from aioengine.media.service.processors import load_processor
from aioengine.media.service.worker import MediaWorker
from aioengine.protocol.media import CancelJob, MediaReady, decode_job, decode_media_orders, encode_line

if TYPE_CHECKING:
    from aioengine.protocol.media import JobEnd, JobWaiting, MediaJob

MAX_LINE: Final = 1 << 20
"""Maximum bytes of a message. Only URLs and paths are long."""


def main() -> None:
    faulthandler.enable()
    handle_signals()
    orders = decode_media_orders(read_orders())
    name_process("aioengine:media")
    die_with_parent(orders.parent_pid)
    limit_threads(1)
    pictures.limit_pixels(orders.limits.max_image_pixels)
    processor, device_resize = load_processor(orders)
    Image.init()  # load the decoders before the first image
    channel = socket.socket(fileno=orders.socket_fd)
    with contextlib.suppress(SystemExit, OSError):  # asked to end, or the frontend has exited
        asyncio.run(_serve(channel, MediaWorker(orders, processor, device_resize)))
    os._exit(0)


async def _serve(channel: socket.socket, worker: MediaWorker) -> None:
    loop = asyncio.get_running_loop()
    channel.setblocking(False)
    reader, writer = await asyncio.open_connection(sock=channel, limit=MAX_LINE)
    tasks: set[asyncio.Task[None]] = set()

    def send(reply: MediaReady | JobWaiting | JobEnd) -> None:
        writer.write(encode_line([reply]))

    def report(waiting: JobWaiting) -> None:
        loop.call_soon_threadsafe(send, waiting)

    async def do(job: MediaJob) -> None:
        send(await worker.do(job, report))

    send(MediaReady())
    while line := await reader.readline():
        job = decode_job(line)
        if isinstance(job, CancelJob):
            worker.cancel(job.id)
            continue
        tasks.add(task := asyncio.create_task(do(job)))
        task.add_done_callback(tasks.discard)
        await asyncio.sleep(0)  # start the job before the next line is read, which may cancel it
