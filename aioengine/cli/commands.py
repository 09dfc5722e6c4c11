"""The commands of the command line."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import io
import json
import os
import sys
from collections.abc import Generator, Sequence
from typing import cast

import msgspec

from aioengine.api.sync import Engine
from aioengine.cli import benchmark, flags, report
from aioengine.cli.batch import run as run_batch
from aioengine.cli.flags import Arguments
from aioengine.errors import EngineError, RequestTooLargeError
from aioengine.file_descriptors import hold_standard_descriptors
from aioengine.frontend.progress import is_terminal
from aioengine.settings.planning import plan_of, read_size

Message = dict[str, object]

FAILED, WRONG_USAGE = 1, 2
READER_GONE = 141
"""The exit status of programs that SIGPIPE ended."""


def run(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    _prepare_streams()
    if sys.stdout is None:
        return _fail("standard output is closed: answers cannot be printed")
    arguments = flags.read(argv)
    try:
        arguments.check()
    except (TypeError, ValueError) as error:
        return _fail(error, WRONG_USAGE)
    commands = {"generate": generate, "chat": chat, "serve": serve, "batch": batch, "bench": bench, "info": info}
    try:
        status = commands[arguments.command](arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes stdout once more at exit, which must not fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return READER_GONE
    except (EngineError, ValueError, TypeError, OSError) as error:
        return _fail(error)
    return status


def _prepare_streams() -> None:
    """Replace closed standard input by empty input, discard output to a closed standard error, and set encodings."""
    hold_standard_descriptors()
    sys.stdin = sys.stdin or os.fdopen(0, closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # the encoding may lack characters of an answer
    if isinstance(sys.stdin, io.TextIOWrapper):
        # In the locale C, Python would read bytes that are not ASCII as lone surrogates, which no model can read.
        is_ascii = codecs.lookup(sys.stdin.encoding).name == "ascii"
        sys.stdin.reconfigure(encoding="utf-8" if is_ascii else None, errors="strict")


def generate(arguments: Arguments) -> int:
    """Stream the answer to one prompt, or print several answers."""
    prompt = arguments.prompt
    if prompt in (None, "-"):
        with _decoding():
            prompt = "" if is_terminal(sys.stdin) else sys.stdin.read()
    if not prompt:
        return _fail('give a prompt: aioengine generate "Once upon a time"', WRONG_USAGE)
    lora_path, images, params = arguments.lora_path, arguments.image, arguments.sampling()
    with Engine.from_config(arguments.config()) as engine:
        if arguments.n != 1:
            params["n"] = arguments.n
            answers = engine.generate([prompt], params, lora_path=lora_path, image_data=images and [images])
            print("\n\n".join(answers["text"]))
            return 0
        for chunk in engine.generate(prompt, params, lora_path=lora_path, image_data=images, stream=True):
            print(chunk["text"], end="", flush=True)
        print(flush=True)
    return 0


def chat(arguments: Arguments) -> int:
    """Answer each line of the input, until it ends. The lines and answers are one conversation."""
    is_dialogue = is_terminal(sys.stdin)
    opening: list[Message] = [{"role": "system", "content": arguments.system}] if arguments.system else []
    messages = list(opening)
    images = [{"type": "image_url", "image_url": {"url": image}} for image in arguments.image or ()]
    with Engine.from_config(arguments.config()) as engine:
        if is_dialogue:
            print("Ctrl-C ends an answer; at the prompt, Ctrl-C and Ctrl-D end the conversation.", file=sys.stderr)
        while (line := _next_line(is_dialogue)) is not None:
            if not line.strip():
                continue
            is_first = len(messages) == len(opening)
            content = [*images, {"type": "text", "text": line}] if images and is_first else line
            messages.append({"role": "user", "content": content})
            answer = ""
            try:
                params = arguments.sampling()
                with engine.chat(messages, params, lora_path=arguments.lora_path, stream=True) as stream:
                    for chunk in stream:
                        answer += chunk["text"]
                        print(chunk["text"], end="", flush=True)
                print(flush=True)
            except KeyboardInterrupt:
                print()
            except RequestTooLargeError as error:
                _fail(f"{error}; the conversation starts again")
                messages = list(opening)
                continue
            messages.append({"role": "assistant", "content": answer})
    return 0


def serve(arguments: Arguments) -> int:
    """Answer HTTP requests until a signal ends the server."""
    try:
        from aioengine.cli.server import run_server  # slow to import, and of the extra "server"
    except ModuleNotFoundError as error:
        if error.name not in ("fastapi", "starlette", "uvicorn"):
            raise
        return _fail(f"serve needs the package {error.name}: pip install 'aioengine[server]'")
    return run_server(arguments)


def batch(arguments: Arguments) -> int:
    """Answer the rows of a JSONL file."""
    options = {} if arguments.lora_path is None else {"lora_path": arguments.lora_path}
    progress = cast("bool | None", arguments.engine().get("progress"))
    job = run_batch(arguments.batch(), arguments.config(), arguments.sampling(), options, progress)
    if num_errors := asyncio.run(job):
        print(f"aioengine: rows with an error instead of an answer: {num_errors}", file=sys.stderr)
    return 0


def bench(arguments: Arguments) -> int:
    """Measure throughput and latency with random prompts."""
    figures = asyncio.run(benchmark.measure(arguments.workload(), arguments.config()))
    print(json.dumps(figures, indent=2) if arguments.json else report.table(figures))
    return 0


def info(arguments: Arguments) -> int:
    """Print versions, devices, the facts of the model and the settings of an engine; or the plan for a model."""
    if arguments.model is not None:
        memory = None if arguments.device_memory is None else read_size(arguments.device_memory)
        plan = plan_of(arguments.config(), memory)
        print(json.dumps(msgspec.to_builtins(plan), indent=2) if arguments.json else plan)
        return 0
    facts = report.facts(arguments.model_path, arguments.engine())
    print(json.dumps(facts, indent=2) if arguments.json else report.outline(facts))
    return 0


def _next_line(is_dialogue: bool) -> str | None:
    """Return the next line of the user; None at the end of the input."""
    try:
        with _decoding():
            return input("> " if is_dialogue else "")
    except EOFError:
        if is_dialogue:
            print()
        return None


@contextlib.contextmanager
def _decoding() -> Generator[None]:
    """Raise ValueError if standard input is not in its encoding."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise ValueError(
            f"standard input is not {error.encoding}: it has the byte 0x{error.object[error.start]:02x}; convert it "
            f"first (iconv -f latin1 -t {error.encoding})"
        ) from error


def _fail(error: Exception | str, status: int = FAILED) -> int:
    """Print the error on one line, and return the exit status."""
    text = "; ".join(line.strip() for line in str(error).splitlines() if line.strip()) or type(error).__name__
    print(f"aioengine: {text}", file=sys.stderr)
    return status
