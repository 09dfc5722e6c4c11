"""The wire and the detokenizer: what a step costs between the scheduler and the frontend.

    python -m benchmarks.host.wire [--rows 256] [--streams 1000] [--json]

Frames: encode and decode one step, in microseconds of one core. Channels: there and back again over ZMQ between two
processes, with a frame of one token and with one of ``--rows`` tokens. Detokenizer: CPU microseconds for each token of
``--streams`` streams with the demo model's tokenizer. All of it without a scheduler, a model or a frontend.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

import aioengine
from aioengine.processes.detokenizer_process import DetokenizerService, TextSource
from aioengine.protocol.codec import FrameDecoder, FrameEncoder
from aioengine.protocol.columns import TokenColumns
from aioengine.protocol.messages import FirstToken, Message, StepOutput, TextChunks, TextOpened, TextRules
from aioengine.transport.zmq import Context, ZmqReceiver, ZmqSender

if TYPE_CHECKING:
    from collections.abc import Callable

EPOCH = 1
NUM_STEPS = 100
REPEATS = 5
WORDS = [" the", " of", " a", "ing", " world", ",", " Paris", "s", ".", " is"]


@dataclass
class Figure:
    """One line of the answer."""

    what: str
    value: float
    unit: str


def tokens_of(rows: int) -> StepOutput:
    """Return a step with a token for each row."""
    return StepOutput(TokenColumns(list(range(1000, 1000 + rows)), [index * 7919 % 150_000 for index in range(rows)]))


def chunks_of(rows: int) -> TextChunks:
    """Return the same step with its text."""
    step = tokens_of(rows)
    texts = [WORDS[index % len(WORDS)] for index in range(rows)]
    return TextChunks(step.tokens, texts, num_open=rows)


def best_us(function: Callable[[], object], calls: int) -> float:
    """Return the microseconds of CPU for a call: the best of a few rounds, because the machine has other work."""
    rounds: list[float] = []
    for _ in range(REPEATS):
        start = time.process_time()
        for _ in range(calls):
            function()
        rounds.append((time.process_time() - start) / calls)
    return min(rounds) * 1e6


def measure_frames(rows: int) -> list[Figure]:
    figures: list[Figure] = []
    message: Message
    for name, message in (("tokens", tokens_of(rows)), ("tokens and text", chunks_of(rows))):
        frames: list[bytes] = []
        encoder, decoder = FrameEncoder(EPOCH), FrameDecoder(EPOCH, time.monotonic)
        encode = partial(encoder.encode, [message])
        encoding = best_us(lambda encode=encode, frames=frames: frames.append(bytes(encode())), 1000)
        in_order = iter(frames)  # each can be decoded once
        decoding = best_us(lambda decoder=decoder, ahead=in_order: decoder.decode(next(ahead)), 1000)
        figures += [
            Figure(f"{rows} rows of {name}: encode", encoding, "us"),
            Figure(f"{rows} rows of {name}: decode", decoding, "us"),
            Figure(f"{rows} rows of {name}: encode and decode", encoding + decoding, "us"),
            Figure(f"{rows} rows of {name}: size", len(frames[0]), "bytes"),
        ]
    return figures


def echo(endpoint: str, answer_to: str) -> None:
    """Run the other process: send back all messages, until none arrives for a while."""
    context = Context()
    receiver, sender = ZmqReceiver(context, endpoint, EPOCH), ZmqSender(context, answer_to, EPOCH)
    while messages := receiver.receive(2.0):
        sender.send(messages)
    os._exit(0)


def measure_channels(rows: int) -> list[Figure]:
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        there, back = f"ipc://{directory}/there", f"ipc://{directory}/back"
        other = get_context("fork").Process(target=echo, args=(there, back))
        other.start()
        context = Context()
        receiver, sender = ZmqReceiver(context, back, EPOCH), ZmqSender(context, there, EPOCH)
        figures: list[Figure] = []
        for name, message in (("1 token", chunks_of(1)), (f"{rows} tokens and text", chunks_of(rows))):
            times: list[float] = []
            for _ in range(2000):
                start = time.perf_counter()
                sender.send([message])
                assert receiver.receive(5.0)
                times.append(time.perf_counter() - start)
            figures.append(Figure(f"there and back with {name}: median", statistics.median(times) * 1e6, "us"))
            tail = statistics.quantiles(times, n=100)[98]
            figures.append(Figure(f"there and back with {name}: 99 of 100 within", tail * 1e6, "us"))
        sender.close()
        receiver.close()
        context.term()
        other.join()
    return figures


def measure_detokenizer(num_streams: int) -> list[Figure]:
    source = TextSource(str(Path(aioengine.__file__).parent / "demo"))
    draw = random.Random(1)
    uids = list(range(num_streams))
    steps = [StepOutput(TokenColumns(uids, [draw.randrange(10, 2000) for _ in uids])) for _ in range(NUM_STEPS)]
    rules = {
        "streaming": TextRules(),
        "streaming, with stop strings": TextRules(stop=("\n\nUser:", "###")),
        "every 8 tokens": TextRules(stream_interval=8),
        "whole": TextRules(stream=False),
    }
    figures: list[Figure] = []
    for name, rule in rules.items():
        rounds: list[float] = []
        for _ in range(REPEATS):
            service = DetokenizerService(source)
            service.handle([StepOutput(opened=[TextOpened(FirstToken(uid, 0, 0.0, 0.0), rule) for uid in uids])], 0.0)
            start = time.process_time()
            for step in steps:
                service.handle([step], 0.0)
                service.step(0.0)
            rounds.append((time.process_time() - start) / (num_streams * NUM_STEPS))
        figures.append(Figure(f"detokenizer, {num_streams} streams, {name}: a token", min(rounds) * 1e6, "us"))
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=256, help="requests in a step")
    parser.add_argument("--streams", type=int, default=1000, help="requests of the detokenizer")
    parser.add_argument("--json", action="store_true", help="print figures as JSON")
    arguments = parser.parse_args()
    figures = [
        *measure_frames(arguments.rows),
        *measure_channels(arguments.rows),
        *measure_detokenizer(arguments.streams),
    ]
    if arguments.json:
        json.dump([asdict(figure) for figure in figures], sys.stdout, indent=1)
        return
    for figure in figures:
        print(f"{figure.value:10.2f} {figure.unit:<6} {figure.what}")


if __name__ == "__main__":
    main()
